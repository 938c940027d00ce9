"""Limits of the vocabulary: a lexicon, the most frequent words, and texts that contain <unk>."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lm.data.corpora.text import TextConfig
from lm.data.corpus import Corpus, open_corpus, summary
from lm.data.text.vocabulary import EOS, UNK, Vocabulary
from lm.system.errors import UserError

TRAIN = "b a a c\na b d <unk>\na e\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small text."""
    (tmp_path / "text").mkdir()
    for split, text in {"train": TRAIN, "valid": "a z c\n", "test": "Q d\n"}.items():
        (tmp_path / f"text/{split}.txt").write_text(text)
    return tmp_path


def prepared(folder: Path, *, min_count: int = 1, lowercase: bool = False, **limits: object) -> Corpus:
    settings: dict[str, Any] = {"min_count": min_count, "lowercase": lowercase, **limits}
    return open_corpus(TextConfig(root=str(folder / "data"), dir=str(folder / "text"), **settings))


def counts(corpus: Corpus) -> dict[str, int]:
    return dict(zip(corpus.vocabulary.words, corpus.vocabulary.counts.tolist(), strict=True))


def test_lexicon_names_the_words(folder: Path) -> None:
    """Includes words unseen in training; ignores other columns, duplicates and empty lines."""
    (folder / "lexicon").write_text("d D IY\nb  B IY\n\nz Z\nz(2) ZED\na\t7\n")
    corpus = prepared(folder, vocabulary=str(folder / "lexicon"), min_count=3)
    seen = Counter(TRAIN.split())
    assert counts(corpus) == {"a": seen["a"], "b": 2, "d": 1, "z": 0, UNK: 3, EOS: 3}
    assert corpus.vocabulary.decode(corpus.split("valid").tolist()) == ["a", "z", UNK, EOS]
    assert list(corpus.vocabulary.counts) == sorted(corpus.vocabulary.counts, reverse=True)
    printed = summary(corpus.meta, vocabulary=corpus.vocabulary)
    assert "and </s> (3); 1 of the given words do not occur there\n" in printed, "z"
    (folder / "lexicon").write_text("a\n")
    assert prepared(folder, vocabulary=str(folder / "lexicon"), min_count=3).path != corpus.path
    assert "1 words of" in prepared(folder, vocabulary=str(folder / "lexicon"), min_count=3).meta["rule"]["limits"]


def test_lexicon_follows_the_case_of_the_text(folder: Path) -> None:
    (folder / "lexicon").write_text("A\nQ\n")
    corpus = prepared(folder, vocabulary=str(folder / "lexicon"), lowercase=True)
    assert corpus.vocabulary.decode(corpus.split("test").tolist()) == ["q", UNK, EOS]


def test_max_words_keeps_the_most_frequent(folder: Path) -> None:
    corpus = prepared(folder, max_words=2)
    assert counts(corpus) == {"a": 4, "b": 2, UNK: 4, EOS: 3}
    assert prepared(folder, max_words=100).vocabulary.hash == prepared(folder).vocabulary.hash
    tied = prepared(folder, max_words=3)
    assert set(tied.vocabulary.words) == {"a", "b", "c", UNK, EOS}, "of equal counts, the first in the alphabet"


def test_literal_unk_is_the_unknown_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = prepared(folder, min_count=1)
    assert counts(corpus)[UNK] == 1
    assert "contains <unk>" not in capsys.readouterr().out
    assert counts(prepared(folder, min_count=2))[UNK] == 4
    assert "contains <unk> 1 time, and data.min_count=2 or another limit turns 3 more" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", [None, b"\n  \n", b"\xff\xfe", b"zzz\n"], ids=["missing", "empty", "not UTF-8", "no training word"]
)
def test_invalid_lexicon_raises(folder: Path, content: bytes | None) -> None:
    if content is not None:
        (folder / "lexicon").write_bytes(content)
    with pytest.raises(UserError, match=r"data\.vocabulary"):
        prepared(folder, vocabulary=str(folder / "lexicon"))
    assert not any((folder / "data").glob("text-*"))


def test_vocabulary_size_of_penn_treebank() -> None:
    """Its 9,999 words, including <unk>, and </s>."""
    words = [(f"w{i}", 1 + i % 7) for i in range(9998)] + [(UNK, 500), (EOS, 42)]

    assert len(Vocabulary.from_counts(words, min_count=1)) == 10_000
    assert len(Vocabulary.from_counts(words, min_count=2)) < 10_000
