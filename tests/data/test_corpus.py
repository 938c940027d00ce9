"""A prepared corpus opens as written, or the error names the damaged file."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm.data.corpora.text import TextConfig
from lm.data.corpus import Corpus, checksum, open_corpus
from lm.data.source import SPLITS
from lm.system.errors import UserError


@pytest.fixture
def prepared(text_folder: Callable[..., TextConfig]) -> Corpus:
    return open_corpus(text_folder())


def test_ids_decode_to_the_text(prepared: Corpus) -> None:
    texts = {split: " ".join(prepared.vocabulary.decode(prepared.split(split))) for split in SPLITS}
    assert texts == {"train": "a b a </s> b <unk> </s>", "valid": "a <unk> </s>", "test": "b <unk> </s>"}
    assert prepared.vocabulary.words == ("</s>", "a", "b", "<unk>")
    assert prepared.vocabulary.counts.tolist() == [2, 2, 2, 1]


def test_token_files_are_memory_mapped_little_endian(prepared: Corpus) -> None:
    tokens = prepared.split("train")
    assert isinstance(tokens, np.memmap)
    assert tokens.dtype == np.dtype("<u2")
    assert not tokens.flags.writeable
    assert (prepared.path / "train.bin").read_bytes() == bytes([1, 0, 2, 0, 1, 0, 0, 0, 2, 0, 3, 0, 0, 0])


def test_meta_describes_the_files(prepared: Corpus) -> None:
    meta = json.loads((prepared.path / "meta.json").read_text())
    assert meta == prepared.meta
    assert (meta["name"], meta["format"], meta["dtype"], meta["vocabulary_size"]) == ("text", 2, "uint16", 4)
    assert meta["rule"]["min_count"] == 2
    assert meta["vocabulary_hash"] == hashlib.sha256((prepared.path / "vocab.tsv").read_bytes()).hexdigest()
    for split, tokens, oov in [("train", 7, 1), ("valid", 3, 1), ("test", 3, 1)]:
        record = meta["splits"][split]
        assert (record["tokens"], record["oov"]) == (tokens, oov)
        text = {"train": "a b a\nb c\n", "valid": "a c\n", "test": "b z\n"}[split]
        assert (record["words"], record["characters"], record["bytes"]) == (len(text.split()), len(text), len(text))
        assert record["sha256"] == hashlib.sha256((prepared.path / f"{split}.bin").read_bytes()).hexdigest()
        counts = np.bincount(prepared.split(split), minlength=4)
        assert prepared.unigram_perplexity(split) == prepared.vocabulary.unigram_perplexity(counts)
    assert prepared.true_perplexity is None
    assert set(meta["versions"]) == {"python", "unicode", "numpy", "numba", "sentencepiece"}


def change_meta(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change meta.json together with its checksum."""
    meta = json.loads((path / "meta.json").read_text())
    change(meta)
    meta["checksum"] = checksum(meta)
    (path / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lambda path: (path / "valid.bin").write_bytes((path / "valid.bin").read_bytes()[:-2]), "valid.bin"),
        (lambda path: (path / "vocab.tsv").write_text("nonsense"), "vocab.tsv"),
        (lambda path: (path / "vocab.tsv").write_bytes(b"</s>\t2\nA\t2\nb\t2\n<unk>\t1\n"), "vocab.tsv"),
        (lambda path: (path / "train.bin").unlink(), "train.bin"),
        (lambda path: (path / "vocab.tsv").unlink(), "vocab.tsv"),
        (lambda path: (path / "meta.json").unlink(), "meta.json"),
        (lambda path: (path / "meta.json").write_text("{"), "meta.json"),
        (lambda path: (path / "meta.json").write_text("[]"), "meta.json"),
        (lambda path: (path / "meta.json").write_text('{"format": 2}'), "meta.json"),
        (lambda path: change_meta(path, lambda meta: meta.update(format=99)), "meta.json"),
        (lambda path: change_meta(path, lambda meta: meta.pop("splits")), "meta.json"),
        (lambda path: change_meta(path, lambda meta: meta.update(dtype="nonsense")), "meta.json"),
    ],
)
def test_damaged_folder_names_the_file(prepared: Corpus, damage: Callable[[Path], object], name: str) -> None:
    damage(prepared.path)
    with pytest.raises(UserError, match=f"{prepared.path}.*{name}.*Move that folder away"):
        Corpus.open(prepared.path)


@pytest.mark.parametrize("verify", [True, False])
def test_changed_tokens_are_an_error_on_first_use(prepared: Corpus, verify: bool) -> None:
    (prepared.path / "train.bin").write_bytes(bytes(14))
    opened = Corpus.open(prepared.path, verify=verify)
    assert len(opened.split("valid")) == 3
    if verify:
        with pytest.raises(UserError, match=r"train\.bin"):
            opened.split("train")
    else:
        assert opened.split("train").tolist() == [0] * 7


def test_summary_names_rule_vocabulary_and_splits(
    text_folder: Callable[..., TextConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    open_corpus(text_folder(train="a b b\na b c\n", min_count=1, lowercase=True))
    _, *lines = capsys.readouterr().out.splitlines()
    printed = dict(line.split(maxsplit=1) for line in lines if line)
    assert list(printed) == [
        *("source", "min_count", "tokens", "lowercase", "encoding_errors", "sentences", "splits"),
        *("blank_lines", "vocabulary"),
        *("split", "-----", "train", "valid", "test", "prepared"),
    ]
    assert (printed["min_count"], printed["tokens"], printed["lowercase"]) == ("1", r"\S+", "yes")
    assert printed["splits"] == "train: train.txt, valid: valid.txt, test: test.txt"
    assert printed["vocabulary"] == "5 words, including <unk> (0 times in training) and </s> (2)"
    assert printed["split"].split() == ["tokens", "words", "characters", "<unk>"]
    assert printed["train"].split() == ["8", "6", "12", "0.00%"]
    assert printed["test"].split() == ["3", "2", "4", "33.33%"]
    assert re.fullmatch(r"0\.0 MB in \d+\.\d s", printed["prepared"]), "no rate below 1 MB"
