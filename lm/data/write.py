"""Write a prepared corpus whole or not at all, also when killed, also when two processes do it at once.

The folder is built beside its final place under a hidden name and renamed when every byte is on disk. Who
builds holds a lock on the hidden folder itself, which the kernel drops when the process dies: a hidden folder that
nobody has locked is a leftover and is removed, and a second process waits and then finds the corpus finished.
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from unicodedata import unidata_version

import numpy as np
import numpy.typing as npt

from lm.data.corpus import FORMAT, SPLITS
from lm.data.summary import summary
from lm.data.text.subwords import KNOWN, WORD_END, Spelling, SubwordVocabulary
from lm.data.text.vocabulary import Ids, Vocabulary
from lm.system.console import Progress
from lm.system.errors import UserError
from lm.system.files import sync_folder


class Block(NamedTuple):
    """Ids that follow each other in a split, and how much of its text they are."""

    ids: Ids
    words: int
    """Words of the text: the ids without `</s>`."""
    characters: int
    """Unicode characters, spaces and line ends included."""
    size: int
    """Bytes that were read."""
    part_ends: Sequence[int] = ()
    """How many of the ids stand before each end of a part; none where sentences run on from part to part."""
    marks: npt.NDArray[np.uint8] | None = None
    """Of ids of pieces: which words they belong to, as `subwords.KNOWN` and `WORD_END` say."""

    def spelt(self, spelling: Spelling) -> "Block":
        """A block of words by number, as one of pieces by id."""
        spelt = spelling.take(self.ids)
        part_ends = tuple(int(spelt.ends[end - 1]) if end else 0 for end in self.part_ends)
        return self._replace(ids=spelt.ids, part_ends=part_ends, marks=spelt.marks)


@dataclass(frozen=True)
class Content:
    """A source that was opened: its vocabulary, and each split in blocks, read as they are used."""

    vocabulary: Vocabulary
    splits: Mapping[str, Iterable[Block]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What meta.json says of the source and only opening it could tell."""


@dataclass(frozen=True)
class Recipe:
    """How to prepare one corpus."""

    folder: str
    """Name of its folder under `data.root`; differs wherever source or rule differ."""
    meta: dict[str, Any]
    """What the source says of itself in meta.json: name, source, rule and more."""
    read: Callable[[], Content]
    """Opens the source; called only where the corpus is not prepared yet."""
    shards: bool = False
    """A split's parts are shards, whose ends meta.json records where there are several."""


def write_corpus(path: Path, *, recipe: Recipe, notice: Callable[[str], None]) -> None:
    """Prepare the corpus at `path`; where another process does so first, its result stands."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        building = path.with_name(f".{path.name}.building")
        lock = _lock_folder(building, on_wait=lambda: notice(f"waiting for the process that prepares {str(path)!r}"))
        try:
            if not path.exists():
                notice(f"preparing {str(path)!r} from {recipe.meta['source']}")
                _empty(building)
                told = _write_content(building, recipe=recipe)
                building.rename(path)
                sync_folder(path.parent)
                notice(told)
        finally:
            if _owns(lock, building):  # not once it is renamed: the name may be another process's by now
                shutil.rmtree(building, ignore_errors=True)
            os.close(lock)
    except BrokenPipeError:  # whoever read what is told has gone, as in `| head`; nothing is wrong with the disk
        raise
    except OSError as error:
        about = f" ({str(error.filename)!r})" if error.filename else ""
        raise UserError(
            f"cannot prepare {str(path)!r}: {error.strerror or error}{about}. Nothing half-written is left. Free the "
            "way, or prepare elsewhere with data.root=PATH"
        ) from None


def _write_content(folder: Path, *, recipe: Recipe) -> str:
    """Write all files; returns what was done, to be told."""
    start = time.monotonic()
    content = recipe.read()
    vocabulary = content.vocabulary
    splits = {
        split: _write_split(folder, split, content.splits[split], vocabulary=vocabulary, shards=recipe.shards)
        for split in SPLITS
    }
    meta = {
        **recipe.meta,
        **content.facts,
        "format": FORMAT,
        "versions": {
            "python": platform.python_version(),
            "unicode": unidata_version,
            "numpy": np.__version__,
            "numba": version("numba"),
        },
        "dtype": vocabulary.dtype.name,
        "vocabulary_size": len(vocabulary),
        "vocabulary_hash": vocabulary.hash,
        "splits": splits,
    }
    files = vocabulary.files()
    if isinstance(vocabulary, SubwordVocabulary):
        meta["versions"]["sentencepiece"] = version("sentencepiece")
        meta["vocabulary_files"] = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    for name, data in files.items():
        _write_file(folder / name, data)
    _write_file(folder / "meta.json", (json.dumps(meta, indent=2) + "\n").encode())
    sync_folder(folder)
    seconds = time.monotonic() - start
    megabytes = sum(record["bytes"] for record in splits.values()) / 1e6
    speed = f"prepared {megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / seconds:,.0f} MB/s"
    return f"{summary(meta, vocabulary=vocabulary)}\n\n{speed}"


def _write_split(
    folder: Path, split: str, blocks: Iterable[Block], *, vocabulary: Vocabulary, shards: bool
) -> dict[str, Any]:
    """Stream one split to disk; returns what meta.json says of it."""
    counts = np.zeros(len(vocabulary), np.int64)
    tokens = words = characters = size = 0
    part_ends: list[int] = []
    digest = hashlib.sha256()
    in_words: dict[str, int] = {}
    if isinstance(vocabulary, SubwordVocabulary):
        blocks = _keep_marks(folder / f"{split}.words.bin", blocks, record=in_words)
    with (folder / f"{split}.bin").open("wb") as file, Progress(None, label=f"{split}: encoding", unit="tokens") as bar:
        for block in blocks:
            counts += np.bincount(block.ids, minlength=len(vocabulary))
            data = block.ids.astype(vocabulary.dtype, copy=False).data
            digest.update(data)
            file.write(data)
            part_ends += [tokens + end for end in block.part_ends]
            tokens += len(block.ids)
            words, characters, size = words + block.words, characters + block.characters, size + block.size
            bar.advance(len(block.ids))
        _sync(file)
    if not counts.any():
        raise UserError(f"the {split} split must hold at least one word; its source holds none")
    if split == "train" and not np.array_equal(counts, vocabulary.counts):
        raise UserError("the training text changed while it was read. Run again when nothing writes to it")
    return {
        "tokens": tokens,
        "words": words,
        **in_words,
        "characters": characters,
        "bytes": size,
        "oov": int(counts[vocabulary.unk_id]),
        "unigram_perplexity": vocabulary.unigram_perplexity(counts),
        "sha256": digest.hexdigest(),
        **({"shard_ends": part_ends} if shards and len(part_ends) > 1 else {}),
    }


def _keep_marks(path: Path, blocks: Iterable[Block], *, record: dict[str, int]) -> Iterator[Block]:
    """The same blocks; their marks go to a file, and how many words and `</s>` they are to the record."""
    words = known = 0
    with path.open("wb") as file:
        for block in blocks:
            assert block.marks is not None
            file.write(block.marks.data)
            words += int(np.count_nonzero(block.marks & WORD_END))
            known += int(np.count_nonzero(block.marks == KNOWN | WORD_END))
            yield block
        _sync(file)
    record |= {"word_tokens": words, "known_word_tokens": known}


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _lock_folder(folder: Path, *, on_wait: Callable[[], None]) -> int:
    """Make the folder ours, waiting for whoever has it; returns the descriptor that holds the lock."""
    while True:
        folder.mkdir(exist_ok=True)
        if (lock := _try_lock(folder)) is not None:
            return lock
        on_wait()
        _wait(folder)


def _try_lock(folder: Path) -> int | None:
    """The folder's lock, or None where another process has it or the folder has gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last owner may have renamed or removed the folder since we opened it.
        if _owns(lock, folder):
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None


def _owns(lock: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), folder.stat())
    except FileNotFoundError:
        return False


def _wait(folder: Path) -> None:
    """Return when nobody holds the folder's lock any more."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(lock)


def _remove_leftovers(root: Path) -> None:
    """Remove what killed processes were building under `root`."""
    for folder in root.glob(".*.building"):
        if (lock := _try_lock(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _empty(folder: Path) -> None:
    for item in folder.iterdir():
        item.unlink()
