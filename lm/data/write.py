"""Write a prepared corpus whole or not at all, even if killed, and even if two processes do it at once.

The folder is built under a hidden name beside its final place, and renamed when every byte is on disk. The process that
builds holds a lock on the hidden folder. A hidden folder without a lock is a leftover and is removed; a second process
waits and then finds the corpus finished.
"""

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from operator import methodcaller
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from unicodedata import unidata_version

import numpy as np
import numpy.typing as npt

from lm.data.corpus import FORMAT, SPLITS, checksum, summary
from lm.data.locking import is_at, locked, try_lock
from lm.data.text.subwords import KNOWN, WORD_END, Spelling, SubwordVocabulary
from lm.data.text.vocabulary import Ids, Vocabulary
from lm.system.console import Progress
from lm.system.errors import UserError
from lm.system.files import sync_folder, write_whole


class Block(NamedTuple):
    """Consecutive ids of a split, and how much of its text they are."""

    ids: Ids
    words: int
    """Words of the text, without `</s>`."""
    characters: int
    """Unicode characters, spaces and line ends included."""
    size: int
    """Bytes read."""
    part_ends: Sequence[int] = ()
    """The number of ids before each end of a part; empty if sentences span parts."""
    marks: npt.NDArray[np.uint8] | None = None
    """For subwords: `subwords.KNOWN` and `WORD_END` of each id."""

    def spelt(self, spelling: Spelling) -> "Block":
        """A block of word numbers as a block of subword ids."""
        spelt = spelling.take(self.ids)
        part_ends = tuple(int(spelt.ends[end - 1]) if end else 0 for end in self.part_ends)
        return self._replace(ids=spelt.ids, part_ends=part_ends, marks=spelt.marks)


@dataclass(frozen=True)
class Content:
    """An opened source: its vocabulary, and each split as a stream of blocks."""

    vocabulary: Vocabulary
    splits: Mapping[str, Iterable[Block]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Records for meta.json that are only known once the source is opened."""


@dataclass(frozen=True)
class Recipe:
    """How to prepare one corpus."""

    folder: str
    """Name of its folder under `data.root`; must differ if source or rule differ."""
    meta: dict[str, Any]
    """Records for meta.json: name, source, rule and more."""
    read: Callable[[Path], Content]
    """Opens the source, given a folder for temporary files; called only if the corpus is not prepared yet."""
    shards: bool = False
    """The parts of a split are shards; meta.json records their ends if there are several."""


def write_corpus(path: Path, *, recipe: Recipe, notice: Callable[[str], None]) -> None:
    """Prepare the corpus at `path`, unless another process does so first."""
    building = path.with_name(f".{path.name}.building")

    def open_folder() -> int:
        while True:
            building.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):  # another process has just renamed it
                return os.open(building, os.O_RDONLY)

    def on_wait() -> None:
        notice(f"waiting for the process that prepares {str(path)!r}")

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        with locked(building, opener=open_folder, on_wait=on_wait) as lock:
            try:
                if not path.exists():
                    notice(f"preparing {str(path)!r} from {recipe.meta['source']}")
                    for leftover in building.iterdir():
                        shutil.rmtree(leftover)
                    scratch, prepared = building / "scratch", building / "prepared"
                    scratch.mkdir()
                    prepared.mkdir()
                    report = _write_content(prepared, recipe=recipe, scratch=scratch)
                    prepared.rename(path)
                    sync_folder(path.parent)
                    notice(report)
            finally:
                if is_at(building, lock):  # not once it is renamed: the name may be another process's by now
                    shutil.rmtree(building, ignore_errors=True)
    except BrokenPipeError:  # the reader of our output has gone, as in `| head`; the disk is fine
        raise
    except OSError as error:
        about = f" ({str(error.filename)!r})" if error.filename else ""
        raise UserError(
            f"cannot prepare {str(path)!r}: {error.strerror or error}{about}. Nothing half-written is left. Fix this, "
            "or prepare it elsewhere with data.root=PATH"
        ) from None


def _remove_leftovers(root: Path) -> None:
    """Remove what killed processes were building under `root`."""
    for folder in root.glob(".*.building"):
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            if try_lock(lock, path=folder, key="data.root") and is_at(folder, lock):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _write_content(folder: Path, *, recipe: Recipe, scratch: Path) -> str:
    """Write all files; returns a report."""
    start = time.monotonic()
    content = recipe.read(scratch)
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
    meta["checksum"] = checksum(json.loads(json.dumps(meta)))  # of what can be read back
    for name, data in (files | {"meta.json": (json.dumps(meta, indent=2) + "\n").encode()}).items():
        write_whole(folder / name, methodcaller("write", data))
    seconds = time.monotonic() - start
    megabytes = sum(record["bytes"] for record in splits.values()) / 1e6
    speed = f"prepared {megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / seconds:,.0f} MB/s"
    return f"{summary(meta, vocabulary=vocabulary)}\n\n{speed}"


def _write_split(
    folder: Path, split: str, blocks: Iterable[Block], *, vocabulary: Vocabulary, shards: bool
) -> dict[str, Any]:
    """Stream one split to disk; returns its record in meta.json."""
    counts = np.zeros(len(vocabulary), np.int64)
    tokens = words = characters = size = 0
    part_ends: list[int] = []
    digest = hashlib.sha256()
    in_words: dict[str, Any] = {}
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


def _keep_marks(path: Path, blocks: Iterable[Block], *, record: dict[str, Any]) -> Iterator[Block]:
    """The same blocks; writes their marks to a file, and the number of words and `</s>` to the record."""
    words = known = 0
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in blocks:
            assert block.marks is not None
            file.write(block.marks.data)
            digest.update(block.marks.data)
            words += int(np.count_nonzero(block.marks & WORD_END))
            known += int(np.count_nonzero(block.marks == KNOWN | WORD_END))
            yield block
        _sync(file)
    record |= {"word_tokens": words, "known_word_tokens": known, "marks_sha256": digest.hexdigest()}


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
