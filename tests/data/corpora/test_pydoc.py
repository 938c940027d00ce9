"""The built-in corpus: distinct paragraphs, and splits that hold next to nothing of training."""

import platform
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lm.data.corpora.pydoc import PydocConfig, topics
from lm.data.corpus import Corpus
from lm.data.prepare import open_corpus
from lm.data.source import SPLITS
from lm.data.text.paragraphs import distinct_paragraphs, split_paragraphs
from lm.data.text.vocabulary import EOS
from lm.system.errors import UserError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return open_corpus(PydocConfig(root=str(tmp_path_factory.mktemp("root"))))


def paragraphs_of(corpus: Corpus, split: str) -> list[tuple[str, ...]]:
    text = " ".join(corpus.vocabulary.decode(corpus.split(split)))
    return [tuple(paragraph.split()) for paragraph in text.split(EOS) if paragraph.strip()]


@pytest.mark.parametrize("split", ["valid", "test"])
def test_at_most_two_percent_of_the_12_grams_stand_in_training(corpus: Corpus, split: str) -> None:
    def grams(name: str) -> list[bytes]:
        return [window.tobytes() for window in np.lib.stride_tricks.sliding_window_view(corpus.split(name), 12)]

    training = set(grams("train"))
    held_out = grams(split)
    assert sum(gram in training for gram in held_out) <= 0.02 * len(held_out)


def test_splits_are_near_80_10_10(corpus: Corpus) -> None:
    sizes = np.array([len(corpus.split(split)) for split in SPLITS])
    assert np.abs(sizes / sizes.sum() - [0.8, 0.1, 0.1]).max() < 0.01


def test_no_paragraph_stands_twice_and_none_is_lost() -> None:
    from pydoc_data.topics import topics as texts

    rule = PydocConfig().token_rule
    distinct = list(distinct_paragraphs(topics(), rule=rule))
    splits = split_paragraphs(distinct, valid_from=0.8, test_from=0.9)
    counts = Counter(paragraph for split in SPLITS for paragraph in splits[split])
    assert set(counts.values()) == {1}
    # Every paragraph of prose of the reference is in one of the splits.
    prose = {
        tuple(rule.words(paragraph))
        for text in texts.values()
        for paragraph in text.split("\n\n")
        if paragraph.strip() and not any(line.strip(" -=*+~^|.") == "" for line in paragraph.splitlines())
    }
    assert len(prose) > 1000
    assert prose <= set(counts)


def test_it_reads_as_the_reference_does(corpus: Corpus) -> None:
    text = " ".join(corpus.vocabulary.decode(corpus.split("train")))
    assert "the" in corpus.vocabulary.words[:8]
    assert text == text.lower()
    assert "* " * 12 not in text  # underlines of headings
    assert len(corpus.split("train")) > 30_000


def test_the_python_version_is_recorded(corpus: Corpus) -> None:
    assert corpus.meta["versions"]["python"] == platform.python_version()
    assert corpus.path.name == f"pydoc-{platform.python_version()}-min2"


def test_characters_and_words_are_those_of_the_paragraphs(corpus: Corpus) -> None:
    lines = distinct_paragraphs(topics(), rule=PydocConfig().token_rule)
    records = corpus.meta["splits"].values()
    assert sum(record["words"] for record in records) == sum(map(len, lines))
    assert sum(record["characters"] for record in records) == sum(len(line) + 1 for line in lines.values())


def test_it_is_the_same_each_time_and_differs_by_min_count(corpus: Corpus, tmp_path: Path) -> None:
    again = open_corpus(PydocConfig(root=str(tmp_path)))
    assert again.meta == corpus.meta
    assert all(again.split(split).tobytes() == corpus.split(split).tobytes() for split in SPLITS)
    larger = open_corpus(PydocConfig("pydoc", str(tmp_path), 1))
    assert len(larger.vocabulary) > len(again.vocabulary)
    assert larger.vocabulary.counts[larger.vocabulary.unk_id] == 0


def test_a_python_without_the_reference_is_pointed_to_zipf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UserError, match="data=zipf"):
        open_corpus(PydocConfig(root=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
