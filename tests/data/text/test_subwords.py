"""Pieces of words: they give back the text, keep the promises of every vocabulary, and are the same each time."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data import encode, fast_encode
from lm.data.corpora.pydoc import PydocConfig
from lm.data.corpora.text import TextConfig
from lm.data.corpus import SPLITS, Corpus
from lm.data.opening import open_corpus
from lm.data.settings import Tokenizer
from lm.data.text.detokenize import PieceJoiner
from lm.data.text.learn import learn_pieces
from lm.data.text.subwords import KNOWN, WORD_END, SubwordVocabulary
from lm.data.text.tokenize import SPACES, WHITESPACE, WORD_PATTERN, TokenRule
from lm.data.text.vocabulary import EOS, UNK, Vocabulary, count_words
from lm.system.errors import UserError
from tests.conftest import ROOT, Command
from tests.data.test_corpus import change_meta
from tests.data.test_fast_encode import TEXTS as ODD_TEXTS
from tests.data.test_fast_encode import text_of
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


def test_the_folder_is_beside_that_of_the_words_and_says_what_it_holds(config: TextConfig, corpus: Corpus) -> None:
    words = open_corpus(replace(config, tokenizer=Tokenizer.words, vocab_size=None))
    assert corpus.path.name == f"{words.path.name}-sp{PIECES}"
    assert corpus.meta["rule"]["tokenizer"] == f"SentencePiece, unigram: {PIECES} pieces of the words"
    assert not list(words.path.glob("*.words.bin"))
    for split in SPLITS:
        own, theirs = corpus.meta["splits"][split], words.meta["splits"][split]
        assert {key: own[key] for key in ("words", "characters", "bytes")} == {
            key: theirs[key] for key in ("words", "characters", "bytes")
        }
        assert own["word_tokens"] == theirs["tokens"], "as many words and </s> as a run on words counts"
        assert own["word_tokens"] - own["known_word_tokens"] == theirs["oov"]
        assert corpus.extent(split) == corpus.text(split).extent == (own["tokens"], theirs["tokens"], len(TEXTS[split]))
        assert words.extent(split) == (theirs["tokens"], theirs["tokens"], len(TEXTS[split]))


def test_pieces_and_marks_are_those_of_each_word_alone(corpus: Corpus) -> None:
    """By SentencePiece itself, a word at a time, and a plain count of the training words."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(corpus.path / "sentencepiece.model"))
    counts = Counter(TEXTS["train"].split())
    for split in SPLITS:
        pieces: list[str] = []
        marks: list[int] = []
        for line in filter(str.split, TEXTS[split].split("\n")):
            for word in [*line.split(), EOS]:
                spelt = [word] if word in (UNK, EOS) else processor.encode(word, out_type=str)
                pieces += spelt
                known = word == EOS or (word != UNK and counts[word] >= 3)
                marks += [KNOWN * known] * (len(spelt) - 1) + [KNOWN * known + WORD_END]
        assert corpus.vocabulary.decode(corpus.split(split)) == pieces
        assert corpus.text(split).marks.tolist() == marks
        assert 0 < sum(mark == WORD_END for mark in marks) < len(marks) / 4, "some words are unknown, most are not"


def test_pieces_give_back_the_text(corpus: Corpus) -> None:
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
    assert vocabulary.counts[vocabulary.unk_id] == 1, "the one that the text itself holds"
    assert vocabulary.counts[vocabulary.eos_id] == 302
    assert corpus.meta["splits"]["test"]["oov"] == 0
    assert corpus.meta["splits"]["valid"]["oov"] == 1


@pytest.mark.slow
def test_another_process_makes_the_same_bytes(config: TextConfig, corpus: Corpus, tmp_path: Path) -> None:
    """Killed while it learns and while it writes, then again."""
    arguments = ["data=text", f"data.dir={config.dir}", "data.min_count=3", f"data.root={tmp_path}/other"]
    command = [
        sys.executable,
        "-m",
        "lm.prepare",
        *arguments,
        "data.tokenizer=sentencepiece",
        f"data.vocab_size={PIECES}",
    ]
    building = tmp_path / "other" / f".{corpus.path.name}.building"
    for moment in (building, building / "prepared" / "train.bin"):
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        while not moment.exists() and child.poll() is None:
            time.sleep(0.001)
        child.kill()
        child.wait()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files_of(tmp_path / "other" / corpus.path.name) == files_of(corpus.path)


def test_large_texts_give_the_same_bytes(config: TextConfig, corpus: Corpus, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(encode, "SMALL", 0)
    scanned = open_corpus(replace(config, root=f"{tmp_path}/scanned"))
    assert files_of(scanned.path) == files_of(corpus.path)


@pytest.mark.parametrize("size", [20, 100_000])
def test_a_size_that_does_not_suit_the_text_is_told_with_one_that_does(config: TextConfig, size: int) -> None:
    with pytest.raises(
        UserError, match=rf"data\.vocab_size must be at (most|least) \d+.*; got {size}\. Try "
    ) as raised:
        open_corpus(replace(config, vocab_size=size))
    assert not Path(config.root).exists() or not list(Path(config.root).iterdir())
    limit = int(str(raised.value).rpartition("=")[2])
    assert len(open_corpus(replace(config, vocab_size=limit)).vocabulary) == limit


def test_a_corpus_whose_words_are_none_is_told_as_without_pieces(text_folder: Write) -> None:
    with pytest.raises(UserError, match=r"data\.min_count=2 leaves no word"):
        open_corpus(in_pieces(text_folder(train="a b\n")))
    with pytest.raises(UserError, match="the train split must hold at least one word"):
        open_corpus(in_pieces(text_folder(train="\n", name="empty")))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "sentencepiece.model").write_bytes(b"x"), "sentencepiece.model is not the one that"),
        (lambda path: (path / "words.txt").write_bytes(b"x"), "words.txt is not the one that meta.json names"),
        (lambda path: (path / "words.txt").unlink(), "words.txt cannot be read"),
        (lambda path: (path / "test.words.bin").write_bytes(b"x"), "test.words.bin has 1 bytes where meta.json says"),
        (lambda path: change_meta(path, lambda meta: meta.update(vocabulary_files=3)), "meta.json lacks"),
    ],
)
def test_an_unsound_folder_is_refused(corpus: Corpus, damage: Callable[[Path], None], reason: str) -> None:
    damage(corpus.path)
    with pytest.raises(UserError, match="Move that folder away") as raised:
        Corpus.open(corpus.path)
    assert reason in str(raised.value)


def test_a_model_that_is_none_or_of_other_pieces_is_refused(corpus: Corpus) -> None:
    files = corpus.vocabulary.files()
    assert SubwordVocabulary.from_files(files).files() == files
    for change in ({"sentencepiece.model": b"nonsense"}, {"vocab.tsv": b"</s>\t2\n<unk>\t0\n"}):
        with pytest.raises(UserError, match=r"sentencepiece\.model must be"):
            SubwordVocabulary.from_files(files | change)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["data=text8", "data.tokenizer=sentencepiece"], "data.tokenizer=sentencepiece needs data.vocab_size"),
        (["data=pydoc", "data.vocab_size=500"], "data.vocab_size belongs to data.tokenizer=sentencepiece"),
        (["data=europarl", "data.tokenizer=bpe"], "data.tokenizer must be one of words, sentencepiece; got 'bpe'"),
        (["data=zipf", "data.tokenizer=sentencepiece"], "data.tokenizer is not a setting"),
    ],
)
def test_settings_that_do_not_go_together_are_told(command: Command, arguments: list[str], expected: str) -> None:
    done = command("lm/prepare.py", *arguments, check=2)
    assert done.stderr.startswith(expected)
    assert len(done.stderr.splitlines()) == 1


def test_the_embedded_corpus_can_be_cut_into_pieces(command: Command, workspace: Path) -> None:
    told = command("lm/prepare.py", "data=pydoc", "data.tokenizer=sentencepiece", "data.vocab_size=600").stdout
    assert "600 pieces, among them <unk> (0 times in training)" in told
    assert "rare words" in told
    config = PydocConfig("pydoc", str(workspace / "data"), 2, tokenizer=Tokenizer.sentencepiece, vocab_size=600)
    pieces, words = open_corpus(config), open_corpus(replace(config, tokenizer=Tokenizer.words, vocab_size=None))
    assert pieces.extent("train").words == len(words.split("train"))


# ---- any text ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary() -> SubwordVocabulary:
    counts = count_words(line.split() for line in TEXTS["train"].splitlines())
    found = learn_pieces(Vocabulary.from_counts(counts.items(), min_count=3), size=PIECES, counts=counts.items)
    assert isinstance(found, SubwordVocabulary)
    return found


def together(blocks: Any) -> tuple[list[int], list[int], list[int], list[int]]:
    """Ids, marks, sums, and where parts end, whatever the blocks."""
    read = list(blocks)
    starts = accumulate((len(block.ids) for block in read), initial=0)
    ends = [start + end for start, block in zip(starts, read, strict=False) for end in block.part_ends]
    sums = [sum(block[i] for block in read) for i in (1, 2, 3)]
    ids, marks = (
        [x for block in read for x in column(block).tolist()] for column in (lambda b: b.ids, lambda b: b.marks)
    )
    return ids, marks, sums, ends


@settings(deadline=None, max_examples=100)
@given(
    parts=st.lists(ODD_TEXTS.filter(bool), max_size=3),
    pattern=st.sampled_from([WHITESPACE, SPACES, WORD_PATTERN]),
    sentence_words=st.sampled_from([None, 1, 3]),
    chunk_size=st.sampled_from([1, 5, 64]),
)
def test_any_text_is_spelt_whole_and_the_scanner_agrees(
    vocabulary: SubwordVocabulary, parts: list[str], pattern: str, sentence_words: int | None, chunk_size: int
) -> None:
    text = text_of({"test": [part.encode() for part in parts]}, TokenRule(pattern), sentence_words=sentence_words)
    ids, marks, sums, ends = together(encode.encode_plainly(text, vocabulary=vocabulary)["test"])
    with TemporaryDirectory() as folder:
        scanned = fast_encode.encode_text(
            text, vocabulary=vocabulary, scratch=Path(folder), threads=2, chunk_size=chunk_size
        )
        found = together(scanned["test"])
    assert found[:3] == (ids, marks, sums)
    if sentence_words is None:  # else parts need not end where sentences do
        assert found[3] == ends
    words = [word for sentence in encode.read_sentences(text, "test") for word in sentence.words]
    if not any("▁" in word or word in (UNK, EOS) for word in words):
        joiner = PieceJoiner(TokenRule(SPACES))
        assert "".join(joiner.add(p) for p in vocabulary.decode(ids) if p != EOS) == " ".join(words)
        assert vocabulary.unk_id not in ids
    assert sum(mark & WORD_END > 0 for mark in marks) == len(words) + sum(
        bool(sentence.words) for sentence in encode.read_sentences(text, "test")
    )


def test_a_lone_mark_of_sentencepiece_is_unknown_but_there(vocabulary: SubwordVocabulary) -> None:
    assert vocabulary.encode(["▁", "</s>"]).tolist() == [vocabulary.unk_id, vocabulary.eos_id]
    assert not vocabulary.knows("▁")
    assert vocabulary.knows("Ω") and vocabulary.knows(EOS) and not vocabulary.knows(UNK)


def test_pieces_of_punctuation_stand_where_writing_puts_it() -> None:
    joiner = PieceJoiner(TokenRule(WORD_PATTERN))
    pieces = ["▁a", "b", "▁", "(", "▁c", "▁)", "▁,", "▁<unk>", "<unk>", "▁", "<0xC3>", "<0xA9>", "▁x", "<0xC3>", "▁y"]
    assert "".join(map(joiner.add, pieces)) == "ab (c), <unk> <unk> é x\ufffd y"
    joiner.end()
    assert [joiner.add("▁z"), joiner.add("<0xC3>")] == ["z", ""]
    joiner.end()
    assert joiner.add("▁z") == "z"
