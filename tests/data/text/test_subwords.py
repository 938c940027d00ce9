"""Subwords spell the text, have true counts, and are reproducible."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from lm.data.corpora.pydoc import PydocConfig
from lm.data.corpora.text import TextConfig
from lm.data.corpus import Corpus, open_corpus
from lm.data.source import SPLITS
from lm.data.text.subwords import KNOWN, WORD_END, SubwordVocabulary
from lm.data.text.tokenize import WHITESPACE, WORD_PATTERN, PieceJoiner, TokenRule
from lm.data.text.vocabulary import EOS, UNK
from lm.system.errors import UserError
from tests.conftest import ROOT, Command
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


@pytest.mark.slow
def test_killed_then_repeated_gives_the_same_bytes(config: TextConfig, corpus: Corpus, tmp_path: Path) -> None:
    """Kill preparation while it learns subwords and while it writes."""
    arguments = ["data=text", f"data.dir={config.dir}", "data.min_count=3", f"data.root={tmp_path}/other"]
    arguments += ["data.tokenizer=sentencepiece", f"data.vocab_size={PIECES}"]
    command = [sys.executable, "-m", "lm.prepare", *arguments]
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


@pytest.mark.parametrize("size", [20, 100_000])
def test_impossible_size_names_a_possible_one(config: TextConfig, size: int) -> None:
    with pytest.raises(
        UserError, match=rf"data\.vocab_size must be at (most|least) \d+.*; got {size}\. Try "
    ) as raised:
        open_corpus(replace(config, vocab_size=size))
    assert not Path(config.root).exists() or not list(Path(config.root).iterdir())
    limit = int(str(raised.value).rpartition("=")[2].rstrip("."))
    assert len(open_corpus(replace(config, vocab_size=limit)).vocabulary) == limit


def test_no_words_is_a_user_error(text_folder: Write) -> None:
    with pytest.raises(UserError, match=r"data\.min_count must be at most 1"):
        open_corpus(in_pieces(text_folder(train="a b\n")))
    with pytest.raises(UserError, match="train split must contain at least one word"):
        open_corpus(in_pieces(text_folder(train="\n", name="empty")))


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


def test_damaged_or_wrong_model_raises(corpus: Corpus) -> None:
    files = corpus.vocabulary.files()
    assert SubwordVocabulary.from_files(files).files() == files
    for change in ({"sentencepiece.model": b"nonsense"}, {"vocab.tsv": b"</s>\t2\n<unk>\t0\n"}):
        with pytest.raises(UserError, match=r"sentencepiece\.model must"):
            SubwordVocabulary.from_files(files | change)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["data=text8", "data.tokenizer=sentencepiece"], "data.tokenizer=sentencepiece"),
        (["data=pydoc", "data.vocab_size=500"], "data.vocab_size"),
        (["data=europarl", "data.tokenizer=bpe"], "data.tokenizer"),
        (["data=zipf", "data.tokenizer=sentencepiece"], "data.tokenizer"),
    ],
)
def test_inconsistent_settings_name_the_key(command: Command, arguments: list[str], expected: str) -> None:
    done = command("lm/prepare.py", *arguments, check=2)
    assert done.stderr.startswith(expected)
    assert len(done.stderr.splitlines()) == 1


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
