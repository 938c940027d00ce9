"""The built-in corpus: distinct paragraphs, and splits that do not overlap."""

import platform
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.data.corpora.pydoc import PydocConfig, topics
from lm.data.corpus import Corpus, open_corpus
from lm.data.source import SPLITS
from lm.data.text.paragraphs import distinct_paragraphs, group_similar, split_paragraphs
from lm.data.text.tokenize import WORD_PATTERN, TokenRule
from lm.system.errors import UserError
from tests.helpers.overlap import shared_12_grams


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return open_corpus(PydocConfig(root=str(tmp_path_factory.mktemp("root"))))


def test_splits_are_80_10_10_and_do_not_overlap(corpus: Corpus) -> None:
    sizes = np.array([len(corpus.split(split)) for split in SPLITS])
    assert np.abs(sizes / sizes.sum() - [0.8, 0.1, 0.1]).max() < 0.01
    assert max(shared_12_grams(corpus, split) for split in ("valid", "test")) <= 0.02


def test_every_paragraph_of_the_reference_occurs_once() -> None:
    rule = PydocConfig().token_rule
    splits = split_paragraphs(list(distinct_paragraphs(topics(), rule=rule)), valid_from=0.8, test_from=0.9)
    counts = Counter(paragraph for split in SPLITS for paragraph in splits[split])
    assert set(counts.values()) == {1}
    prose = {
        tuple(rule.words(paragraph))
        for text in topics()
        for paragraph in text.split("\n\n")
        if paragraph.strip() and not any(line.strip(" -=*+~^|.") == "" for line in paragraph.splitlines())
    }
    assert len(prose) > 1000
    assert prose <= set(counts)


def test_text_is_lowercase_prose_without_drawn_lines(corpus: Corpus) -> None:
    text = " ".join(corpus.vocabulary.decode(corpus.split("train")))
    assert "the" in corpus.vocabulary.words[:8]
    assert text == text.lower()
    assert "* " * 12 not in text  # underlines of headings
    assert len(corpus.split("train")) > 30_000
    assert corpus.path.name == f"pydoc-{platform.python_version()}-min2"


def test_words_and_characters_are_those_of_the_paragraphs(corpus: Corpus) -> None:
    lines = distinct_paragraphs(topics(), rule=PydocConfig().token_rule)
    records = corpus.meta["splits"].values()
    assert sum(record["words"] for record in records) == sum(map(len, lines))
    assert sum(record["characters"] for record in records) == sum(len(line) + 1 for line in lines.values())
    num_sentences = sum(int((corpus.split(split) == corpus.vocabulary.eos_id).sum()) for split in SPLITS)
    assert num_sentences == len(lines)


def test_preparation_is_repeatable(corpus: Corpus, tmp_path: Path) -> None:
    again = open_corpus(PydocConfig(root=str(tmp_path)))
    assert again.meta == corpus.meta
    assert all(again.split(split).tobytes() == corpus.split(split).tobytes() for split in SPLITS)


def test_python_without_topics_names_another_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UserError, match="data=zipf"):
        open_corpus(PydocConfig(root=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


# ---- paragraphs ------------------------------------------------------------------------------------------------------


def test_drawn_lines_and_repetitions_are_dropped() -> None:
    text = "Title\n=====\n\nA first\nparagraph.\n \na FIRST paragraph.\n\n-----  ----\n\nMore."
    lines = distinct_paragraphs([text], rule=TokenRule(WORD_PATTERN, lowercase=True))
    assert lines == {
        ("title",): "Title",
        ("a", "first", "paragraph", "."): "A first paragraph.",
        ("more", "."): "More.",
    }


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=16).map(tuple), unique=True, max_size=12))
def test_groups_are_the_connected_components_of_shared_runs(paragraphs: list[tuple[str, ...]]) -> None:
    runs = [{p[i : i + 10] for i in range(len(p) - 9)} for p in paragraphs]
    groups = [{number} for number in range(len(paragraphs))]
    for one, first in enumerate(runs):
        for other, second in enumerate(runs[:one]):
            if first & second and groups[one] is not groups[other]:
                merged = groups[one] | groups[other]
                for number in merged:
                    groups[number] = merged
    assert group_similar(paragraphs) == [min(group) for group in groups]


def test_large_group_goes_to_training() -> None:
    common = tuple(f"common{number}" for number in range(12))
    alike = [(*common, f"ending{number}") for number in range(60)]
    others = [tuple(f"word{number}-{index}" for index in range(5)) for number in range(600)]
    splits = split_paragraphs(alike + others, valid_from=0.8, test_from=0.9)
    assert set(alike) <= set(splits["train"])
    sizes = [sum(map(len, splits[split])) for split in SPLITS]
    assert np.allclose(np.array(sizes) / sum(sizes), [0.8, 0.1, 0.1], atol=0.01)
