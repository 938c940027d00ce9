"""Prepare corpora: write a complete corpus folder or nothing.

The files are written to a hidden folder and moved into place when every byte is on disk. The writing process
holds a lock; a second one waits and then opens the prepared corpus. Leftovers of a killed process are removed.
"""

import hashlib
import json
import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unicodedata import unidata_version

import numpy as np

from lm.config.groups import DataConfig
from lm.data.archive import file_hash
from lm.data.corpora.text import find_in_folder
from lm.data.corpus import FORMAT, SplitText, checksum, summary
from lm.data.encode import Scanned, scan_split
from lm.data.formats import text_files
from lm.data.source import SPLITS, Source, rule_of
from lm.data.text.vocabulary import KNOWN, WORD_END, SubwordVocabulary, Vocabulary
from lm.system.console import Progress, say
from lm.system.errors import UserError
from lm.system.files import exclusive, sync_folder, write_bytes, write_text


def encode_folder(
    folder: str,
    *,
    data_config: DataConfig,
    vocabulary: Vocabulary,
    splits: Sequence[str] = SPLITS,
    encoding_errors: str = "strict",
) -> dict[str, SplitText]:
    """Encode a folder's splits with a run's tokenizer and vocabulary."""
    files = {split: paths for split, paths in find_in_folder(folder).items() if split in splits}
    if not files:
        raise UserError(
            f"data.dir must contain at least one of {', '.join(f'{split}.txt' for split in splits)}; got {folder!r}. "
            "Put the text to evaluate there as test.txt."
        )
    encoded, field = {}, getattr(data_config, "field", "text")
    with TemporaryDirectory() as scratch:
        place = Path(scratch)
        for split, paths in files.items():
            texts = [text for path in paths for text in text_files(path, field=field, errors=encoding_errors)]
            scanned = scan_split(split, texts, rule=rule_of(data_config), scratch=place, errors=encoding_errors)
            record = _write_split(place, split, scanned, vocabulary)
            ids = np.fromfile(place / f"{split}.bin", vocabulary.dtype)
            marks = np.fromfile(path, np.uint8) if (path := place / f"{split}.words.bin").exists() else None
            encoded[split] = SplitText(ids, record.get("word_tokens", len(ids)), record["characters"], marks)
    return encoded


def prepare(source: Source, path: Path) -> None:
    """Write the corpus to `path`, unless another process does so first."""
    building = path.with_name(f".{path.name}.building")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(path.with_name(f".{path.name}.lock"), waiting_for=f"the preparation of {str(path)!r}"):
            if path.exists():
                return
            say(f"preparing {str(path)!r} from {source.meta['source']}")
            shutil.rmtree(building, ignore_errors=True)  # left by a killed process
            try:
                scratch, prepared = building / "scratch", building / "prepared"
                scratch.mkdir(parents=True)
                prepared.mkdir()
                report = _write_files(prepared, source, scratch)
                prepared.rename(path)
                sync_folder(path.parent)
            finally:
                shutil.rmtree(building, ignore_errors=True)
            say(report)
    except BrokenPipeError:  # stdout was closed, as by `| head`; the disk is fine
        raise
    except OSError as error:
        about = f" ({str(error.filename)!r})" if error.filename else ""
        raise UserError(
            f"Cannot prepare {str(path)!r}: {error.strerror or error}{about}. No incomplete corpus is left. Fix this, "
            "or pass data.root=PATH to prepare it elsewhere."
        ) from None


def _write_files(folder: Path, source: Source, scratch: Path) -> str:
    """Write all files of the corpus; return a summary."""
    start = time.monotonic()
    files = source.open(scratch)
    options: dict[str, Any] = {"rule": source.rule, "sentence_words": source.sentence_words, "errors": source.errors}
    scanned = {split: scan_split(split, files[split], scratch=scratch, **options) for split in SPLITS}
    vocabulary = scanned["train"].vocabulary(source.vocabulary)
    splits = {split: _write_split(folder, split, scanned[split], vocabulary) for split in SPLITS}
    if setting := source.meta["rule"].get("blank_lines"):
        _note_blank_lines(splits["train"]["blank_lines"], int(vocabulary.counts[vocabulary.eos_id]), setting=setting)
    vocabulary_files = vocabulary.files()
    packages = {name: version(name) for name in ("numpy", "numba", "sentencepiece")}
    meta = {
        **source.meta,
        "format": FORMAT,
        "versions": {"python": platform.python_version(), "unicode": unidata_version, **packages},
        "dtype": vocabulary.dtype.name,
        "vocabulary_size": len(vocabulary),
        "vocabulary_hash": vocabulary.hash,
        "vocabulary_files": {name: hashlib.sha256(data).hexdigest() for name, data in vocabulary_files.items()},
        "splits": splits,
    }
    meta["checksum"] = checksum(json.loads(json.dumps(meta)))  # of what can be read back
    for name, data in vocabulary_files.items():
        write_bytes(folder / name, data)
    write_text(folder / "meta.json", json.dumps(meta, indent=2) + "\n")
    seconds = time.monotonic() - start
    megabytes = sum(record["bytes"] for record in splits.values()) / 1e6
    rate = f", {megabytes / seconds:,.0f} MB/s" if megabytes >= 1 else ""
    speed = f"prepared {megabytes:,.1f} MB in {seconds:.1f} s{rate}"
    return f"{summary(meta, vocabulary=vocabulary)}\n\n{speed}"


def _note_blank_lines(blank: int, ends: int, *, setting: str) -> None:
    """Report what happened to the blank lines of a text with more than 1% of them."""
    is_kept = setting == "keep"
    share = blank / (ends if is_kept else ends + blank)
    if share > 0.01:
        effect = "each counts as </s>" if is_kept else "they are ignored. data.blank_lines=keep counts each as </s>"
        say(f"note: {share:.1%} of the training lines are blank; {effect}, as published WikiText counts do.")


def _write_split(folder: Path, split: str, scanned: Scanned, vocabulary: Vocabulary) -> dict[str, Any]:
    """Write a split's token ids and subword flags; return its meta.json entry."""
    names = [f"{split}.bin"] + [f"{split}.words.bin"] * isinstance(vocabulary, SubwordVocabulary)
    counts, record = np.zeros(len(vocabulary), np.int64), Counter[str]()
    with ExitStack() as stack:
        files = [stack.enter_context((folder / name).open("wb")) for name in names]
        progress = stack.enter_context(Progress(None, label=f"{split}: encoding", unit="tokens"))
        for block in scanned.blocks(vocabulary):
            ids = block.ids.astype(vocabulary.dtype, copy=False)
            counts += np.bincount(ids, minlength=len(vocabulary))
            record.update(block.amounts, tokens=len(ids))
            if block.marks is not None:
                ends = block.marks[block.marks >= WORD_END]
                record.update(word_tokens=len(ends), known_word_tokens=int(np.count_nonzero(ends & KNOWN)))
            for file, array in zip(files, (ids, block.marks), strict=False):
                file.write(np.ascontiguousarray(array).data)
            progress.advance(len(ids))
        for file in files:
            file.flush()
            os.fsync(file.fileno())
    hashes = zip(("sha256", "marks_sha256"), (file_hash(folder / name) for name in names), strict=False)
    rest = {"oov": int(counts[vocabulary.unk_id]), "unigram_perplexity": vocabulary.unigram_perplexity(counts)}
    return {**record, **dict(hashes), **rest}
