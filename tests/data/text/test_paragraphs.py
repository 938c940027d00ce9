"""Paragraphs that share runs of words stay in one split."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lm.data.source import SPLITS
from lm.data.text.paragraphs import distinct_paragraphs, group_similar, split_paragraphs
from lm.data.text.tokenize import WORD_PATTERN, TokenRule


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
