"""Given vocabularies: a lexicon, the most frequent words, and texts that write <unk> themselves."""

from collections import Counter
from pathlib import Path

import pytest

from lm.data import encode
from lm.data.corpora.text import TextConfig
from lm.data.corpus import Corpus, summary
from lm.data.opening import open_corpus
from lm.data.settings import Tokenizer
from lm.data.text.vocabulary import EOS, UNK, Vocabulary
from lm.system.errors import UserError

TRAIN = "b a a c\na b d <unk>\na e\n"


@pytest.fixture(params=["plain", "scanner"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small text, read by either reader."""
    if request.param == "scanner":
        monkeypatch.setattr(encode, "SMALL", 0)
    (tmp_path / "text").mkdir()
    for split, text in {"train": TRAIN, "valid": "a z c\n", "test": "Q d\n"}.items():
        (tmp_path / f"text/{split}.txt").write_text(text)
    return tmp_path


def prepared(folder: Path, *, min_count: int = 1, lowercase: bool = False, **limits: object) -> Corpus:
    config = TextConfig(
        "text",
        str(folder / "data"),
        min_count,
        dir=str(folder / "text"),
        lowercase=lowercase,
        **limits,  # type: ignore[arg-type]
    )
    assert config.tokenizer is Tokenizer.words
    return open_corpus(config, notice=lambda _: None)


def counts(corpus: Corpus) -> dict[str, int]:
    return dict(zip(corpus.vocabulary.words, corpus.vocabulary.counts.tolist(), strict=True))


def test_a_lexicon_names_the_words(folder: Path) -> None:
    """Also those that training lacks; its other columns, repeated words and empty lines do not matter."""
    (folder / "lexicon").write_text("d D IY\nb  B IY\n\nz Z\nz ZED\na\t7\n")
    corpus = prepared(folder, vocabulary=str(folder / "lexicon"), min_count=3)
    seen = Counter(TRAIN.split())
    assert counts(corpus) == {"a": seen["a"], "b": 2, "d": 1, "z": 0, UNK: 3, EOS: 3}
    assert corpus.vocabulary.decode(corpus.split("valid").tolist()) == ["a", "z", UNK, EOS]
    assert list(corpus.vocabulary.counts) == sorted(corpus.vocabulary.counts, reverse=True)
    told = summary(corpus.meta, vocabulary=corpus.vocabulary)
    assert "and </s> (3); 1 of the given words never occur there\n" in told, "z"
    (folder / "lexicon").write_text("a\n")
    assert prepared(folder, vocabulary=str(folder / "lexicon"), min_count=3).path != corpus.path
    assert "1 of" in prepared(folder, vocabulary=str(folder / "lexicon"), min_count=3).meta["rule"]["words"]


def test_a_lexicon_follows_the_case_of_the_text(folder: Path) -> None:
    (folder / "lexicon").write_text("A\nQ\n")
    corpus = prepared(folder, vocabulary=str(folder / "lexicon"), lowercase=True)
    assert corpus.vocabulary.decode(corpus.split("test").tolist()) == ["q", UNK, EOS]


def test_the_most_frequent_words(folder: Path) -> None:
    corpus = prepared(folder, max_words=2)
    assert counts(corpus) == {"a": 4, "b": 2, UNK: 4, EOS: 3}
    assert prepared(folder, max_words=100).vocabulary.hash == prepared(folder).vocabulary.hash
    tied = prepared(folder, max_words=3)
    assert set(tied.vocabulary.words) == {"a", "b", "c", UNK, EOS}, "of equal counts, the first in the alphabet"


def test_a_literal_unk_is_the_mark(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = prepared(folder, min_count=1)
    assert counts(corpus)[UNK] == 1
    assert "writes <unk> itself" not in capsys.readouterr().out
    assert counts(prepared(folder, min_count=2))[UNK] == 4
    said = capsys.readouterr().out
    assert "the training text writes <unk> itself, 1 time." in said
    assert "makes 3 more of its words the same <unk>" in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\n  \n", "holds none"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"zzz\n", "holds no word of the training text"),
    ],
)
def test_a_file_that_is_no_lexicon_is_refused(folder: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (folder / "lexicon").write_bytes(content)
    with pytest.raises(UserError, match=r"data\.vocabulary") as error:
        prepared(folder, vocabulary=str(folder / "lexicon"))
    assert message in str(error.value)
    assert not any((folder / "data").glob("text-*"))


def test_penn_treebanks_words() -> None:
    """As Penn Treebank counts them: its 9,999 words, <unk> among them, and </s>."""
    words = [(f"w{i}", 1 + i % 7) for i in range(9998)] + [(UNK, 500), (EOS, 42)]

    assert len(Vocabulary.from_counts(words, min_count=1)) == 10_000
    assert len(Vocabulary.from_counts(words, min_count=2)) < 10_000
