"""Subwords spell the text, have true counts, and are reproducible."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from lm.config.groups import find_plugin
from lm.data.corpora.pydoc import PydocConfig
from lm.data.corpora.text import TextConfig
from lm.data.corpus import Corpus, open_corpus, summary
from lm.data.source import SPLITS, rule_of
from lm.data.text.tokenize import SPACES, WHITESPACE, WORD_PATTERN, Joiner, PieceJoiner, TokenRule
from lm.data.text.vocabulary import EOS, KNOWN, UNK, WORD_END, Vocabulary, VocabularyRule
from lm.system.errors import UserError
from tests.conftest import Command
from tests.helpers.subword_text import PIECES, TEXTS, in_pieces

Write = Callable[..., TextConfig]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def config(text_folder: Write) -> TextConfig:
    return in_pieces(text_folder(min_count=3, **TEXTS))


@pytest.fixture
def corpus(config: TextConfig) -> Corpus:
    return open_corpus(config)


def test_word_counts_equal_those_of_the_word_corpus(config: TextConfig, corpus: Corpus) -> None:
    words = open_corpus(replace(config, tokenizer="words", vocab_size=None))
    assert corpus.path.name == f"{words.path.name}-sp{PIECES}"
    assert f"{PIECES} SentencePiece pieces" in corpus.meta["rule"]["limits"]
    assert not list(words.path.glob("*.words.bin"))
    for split in SPLITS:
        pieces, plain = corpus.meta["splits"][split], words.meta["splits"][split]
        assert {key: pieces[key] for key in ("words", "characters", "bytes")} == {
            key: plain[key] for key in ("words", "characters", "bytes")
        }
        assert pieces["word_tokens"] == plain["tokens"], "words and </s> of the word corpus"
        assert pieces["word_tokens"] - pieces["known_word_tokens"] == plain["oov"]
        for text, num_tokens in [(corpus.text(split), pieces["tokens"]), (words.text(split), plain["tokens"])]:
            assert (len(text.tokens), text.num_words) == (num_tokens, plain["tokens"])
            assert text.num_characters == len(TEXTS[split])


def test_pieces_and_marks_equal_those_of_single_words(corpus: Corpus) -> None:
    """The reference spells one word at a time with SentencePiece."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(corpus.path / "sentencepiece.model"))
    counts = Counter(TEXTS["train"].split())
    for split in SPLITS:
        pieces: list[str] = []
        marks: list[int] = []
        for line in filter(str.split, TEXTS[split].split("\n")):
            for word in [*line.split(), EOS]:
                spelled = [word] if word in (UNK, EOS) else processor.encode(word, out_type=str)
                pieces += spelled
                known = word == EOS or (word != UNK and counts[word] >= 3)
                marks += [KNOWN * known] * (len(spelled) - 1) + [KNOWN * known + WORD_END]
        assert corpus.vocabulary.decode(corpus.split(split)) == pieces
        assert corpus.text(split).marks.tolist() == marks
        assert 0 < sum(mark == WORD_END for mark in marks) < len(marks) / 4, "some words are unknown, most are not"


def test_pieces_join_to_the_text(corpus: Corpus) -> None:
    for split in SPLITS:
        joiner, text = PieceJoiner(TokenRule(WHITESPACE)), ""
        for piece in corpus.vocabulary.decode(corpus.split(split)):
            text += "\n" if piece == EOS else joiner.add(piece)
            if piece == EOS:
                joiner.end()
        lines = [" ".join(line.split()) for line in TEXTS[split].split("\n") if line.split()]
        assert text == "".join(f"{line}\n" for line in lines).replace(f" {EOS}", "\n")


def test_ids_are_sorted_by_true_counts(corpus: Corpus) -> None:
    vocabulary = corpus.vocabulary
    assert len(vocabulary) == len(set(vocabulary.words)) == PIECES
    assert vocabulary.counts.tolist() == np.bincount(corpus.split("train"), minlength=PIECES).tolist()
    assert (np.diff(vocabulary.counts) <= 0).all()
    assert vocabulary.counts[vocabulary.unk_id] == 1, "the literal one of the text"
    assert vocabulary.counts[vocabulary.eos_id] == 302
    assert corpus.meta["splits"]["test"]["oov"] == 0
    assert corpus.meta["splits"]["valid"]["oov"] == 1


def test_preparation_is_reproducible(config: TextConfig, corpus: Corpus, tmp_path: Path) -> None:
    assert files_of(open_corpus(replace(config, root=str(tmp_path / "other"))).path) == files_of(corpus.path)


@pytest.mark.parametrize("size", [20, 100_000])
def test_impossible_size_names_a_possible_one(config: TextConfig, size: int) -> None:
    with pytest.raises(UserError, match=rf"data\.vocab_size must be .*; got {size}\. Try ") as raised:
        open_corpus(replace(config, vocab_size=size))
    assert not Path(config.root).exists() or not list(Path(config.root).iterdir())
    limit = int(str(raised.value).rpartition("=")[2].rstrip("."))
    assert len(open_corpus(replace(config, vocab_size=limit)).vocabulary) == limit


@pytest.mark.parametrize(
    ("name", "data"),
    [("sentencepiece.model", b"x"), ("words.txt", b"x"), ("words.txt", None), ("test.words.bin", b"x")],
)
def test_damaged_folder_names_the_file(corpus: Corpus, name: str, data: bytes | None) -> None:
    (corpus.path / name).unlink()
    if data is not None:
        (corpus.path / name).write_bytes(data)
    with pytest.raises(UserError, match=f"{name}.*Move that folder away"):
        Corpus.open(corpus.path)


def test_pydoc_in_pieces(command: Command, workspace: Path) -> None:
    printed = command("lm/prepare.py", "data=pydoc", "data.tokenizer=sentencepiece", "data.vocab_size=600").stdout
    assert "600 pieces, including <unk> (0 times in training)" in printed
    assert "rare words" in printed
    config = PydocConfig(root=str(workspace / "data"), tokenizer="sentencepiece", vocab_size=600)
    pieces, words = open_corpus(config), open_corpus(replace(config, tokenizer="words", vocab_size=None))
    assert pieces.text("train").num_words == len(words.split("train"))


def test_lone_sentencepiece_prefix_is_unknown(corpus: Corpus) -> None:
    vocabulary = corpus.vocabulary
    assert vocabulary.encode(["▁", "</s>"]).tolist() == [vocabulary.unk_id, vocabulary.eos_id]
    assert not vocabulary.knows("▁")
    assert vocabulary.knows("Ω") and vocabulary.knows(EOS) and not vocabulary.knows(UNK)


def test_punctuation_pieces_are_attached() -> None:
    joiner = PieceJoiner(TokenRule(WORD_PATTERN))
    pieces = ["▁a", "b", "▁", "(", "▁c", "▁)", "▁,", "▁<unk>", "<unk>", "▁", "<0xC3>", "<0xA9>", "▁x", "<0xC3>", "▁y"]
    assert "".join(map(joiner.add, pieces)) == "ab (c), <unk> <unk> é x\ufffd y"
    joiner.end()
    assert [joiner.add("▁z"), joiner.add("<0xC3>")] == ["z", ""]
    joiner.end()
    assert joiner.add("▁z") == "z"


# ---- words -----------------------------------------------------------------------------------------------------------


WORDS = st.one_of(
    st.sampled_from(["a", "b", "c", "d", UNK, EOS, "é", "tab\there", " "]),
    st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), min_size=1, max_size=4),
)
SENTENCES = st.lists(st.lists(WORDS, min_size=1, max_size=8), min_size=1, max_size=20)
MIN_COUNTS = st.integers(1, 4)


def vocabulary_of(sentences: list[list[str]], min_count: int) -> Vocabulary:
    counts = Counter(word for sentence in sentences for word in [*sentence, EOS])
    return Vocabulary.from_counts(counts.items(), VocabularyRule(min_count))


@given(SENTENCES, MIN_COUNTS)
def test_counts_are_those_of_the_encoded_training_text(sentences: list[list[str]], min_count: int) -> None:
    vocabulary = vocabulary_of(sentences, min_count)
    text = [word for sentence in sentences for word in [*sentence, EOS]]
    times_seen = Counter(text)
    seen = Counter(word if word == EOS or times_seen[word] >= min_count else UNK for word in text)
    assert dict(zip(vocabulary.words, vocabulary.counts.tolist(), strict=True)) == {UNK: 0, EOS: 0} | seen
    encoded = vocabulary.encode(text)
    assert np.array_equal(np.bincount(encoded, minlength=len(vocabulary)), vocabulary.counts)


@given(SENTENCES, MIN_COUNTS)
def test_ids_are_sorted_by_count_then_word(sentences: list[list[str]], min_count: int) -> None:
    vocabulary = vocabulary_of(sentences, min_count)
    pairs = list(zip((-vocabulary.counts).tolist(), vocabulary.words, strict=True))
    assert pairs == sorted(pairs)


@given(SENTENCES, MIN_COUNTS)
def test_decode_inverts_encode_except_for_unknown_words(sentences: list[list[str]], min_count: int) -> None:
    vocabulary = vocabulary_of(sentences, min_count)
    for sentence in [*sentences, ["never seen before"]]:
        expected = [word if word in vocabulary.words else UNK for word in sentence]
        assert vocabulary.decode(vocabulary.encode(sentence)) == expected


@given(SENTENCES, MIN_COUNTS)
def test_bytes_round_trip(sentences: list[list[str]], min_count: int) -> None:
    vocabulary = vocabulary_of(sentences, min_count)
    again = Vocabulary.from_bytes(vocabulary.to_bytes())
    assert again.words == vocabulary.words
    assert np.array_equal(again.counts, vocabulary.counts)
    assert again.hash == vocabulary.hash


def test_ids_fit_the_dtype() -> None:
    for size, dtype in [(1 << 16, "<u2"), ((1 << 16) + 1, "<u4")]:
        words = ((f"w{number}", 1) for number in range(size - 2))
        vocabulary = Vocabulary.from_counts(words)
        assert len(vocabulary) == size
        assert vocabulary.dtype == np.dtype(dtype)
        assert np.iinfo(vocabulary.dtype).max >= size - 1


def test_unigram_perplexity_by_hand() -> None:
    vocabulary = Vocabulary.from_counts([("a", 5), ("b", 2), (EOS, 2)])
    assert vocabulary.words == ("a", EOS, "b", UNK)
    # <unk> does not occur and is counted once: 5, 2, 2 and 1 of 10.
    expected = math.exp(-(math.log(0.5) + 2 * math.log(0.2) + math.log(0.1)) / 4)
    assert vocabulary.unigram_perplexity(np.array([1, 1, 1, 1])) == pytest.approx(expected)


# ---- a given lexicon -------------------------------------------------------------------------------------------------


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


# ---- token rules -----------------------------------------------------------------------------------------------------


SPACED = st.text(st.one_of(st.sampled_from("ab \t\r\v\f\x1c\x85\xa0\u2028\u3000é"), st.characters(codec="utf-8")))
PUNCTUATED = TokenRule(WORD_PATTERN, lowercase=True)


@given(SPACED, st.sampled_from([WHITESPACE, SPACES, WORD_PATTERN]), st.booleans())
def test_words_are_the_matches_of_the_pattern(line: str, pattern: str, lowercase: bool) -> None:
    line = line.replace("\n", "") + "\n"
    expected = re.findall(pattern, line.lower() if lowercase else line)
    assert TokenRule(pattern, lowercase=lowercase).words(line) == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Mr President's well-known, isn’t it?", ["mr", "president's", "well-known", ",", "isn’t", "it", "?"]),
        ("'quoted' -dash- 3.5%", ["'", "quoted", "'", "-", "dash", "-", "3", ".", "5", "%"]),
        ("Европейски съюз...", ["европейски", "съюз", ".", ".", "."]),
        (" \n", []),
    ],
)
def test_words_and_punctuation(line: str, words: list[str]) -> None:
    assert PUNCTUATED.words(line) == words


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("text", TokenRule(WHITESPACE)),
        ("text8", TokenRule(WHITESPACE)),
        ("zipf", TokenRule(WHITESPACE)),
        ("one_billion_word", TokenRule(SPACES)),
        ("pydoc", PUNCTUATED),
        ("docstrings", PUNCTUATED),
        ("europarl", TokenRule(WORD_PATTERN, lowercase=True, skip_markup=True)),
    ],
)
def test_rule_of_each_corpus(name: str, rule: TokenRule) -> None:
    assert rule_of(find_plugin("data", name).settings()) == rule


# ---- words to text -----------------------------------------------------------------------------------------------


def join(words: list[str], rule: TokenRule) -> str:
    joiner = Joiner(rule)
    return "".join(joiner.add(word) for word in words)


@pytest.mark.parametrize(
    "text",
    [
        'see section "a method" (or two) for it, please.',
        "what? yes: 'this', and \"that\"; 20% of [x].",
        "the members’ votes «so to speak» cost $5... no!",
        "f (x) = {y}",
    ],
)
def test_punctuation_is_attached(text: str) -> None:
    assert join(PUNCTUATED.words(text), PUNCTUATED) == text


@given(st.text(alphabet="ab1_-'’\"`()[].,;:!?/%$«»é \t"))
def test_tokenizing_joined_text_gives_the_same_words(text: str) -> None:
    words = PUNCTUATED.words(text)
    assert PUNCTUATED.words(join(words, PUNCTUATED)) == words


@pytest.mark.parametrize("pattern", [WHITESPACE, SPACES])
def test_words_separated_by_spaces_are_joined_by_spaces(pattern: str) -> None:
    words = ["It", "'s", "(", "so", ")", '"', "."]
    assert join(words, TokenRule(pattern)) == " ".join(words)


def test_new_sentence_has_no_space_and_no_open_quote() -> None:
    joiner = Joiner(PUNCTUATED)
    assert [joiner.add(word) for word in ["a", '"', "b"]] == ["a", ' "', "b"]
    joiner.end()
    assert [joiner.add(word) for word in ['"', "c", '"']] == ['"', "c", '"']
