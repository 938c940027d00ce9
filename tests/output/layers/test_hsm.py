"""Classes by frequency. The layer itself is tested together with all others."""

import math

import numpy as np
import pytest

from lm.output.layers.hsm import frequency_classes


@pytest.mark.parametrize("num_classes", [1, 3, 7, 20])
@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_classes_cut_the_sum_of_square_roots_of_counts_evenly(num_classes, exponent):
    counts = [math.ceil(5000 / rank**exponent) for rank in range(1, 41)]
    total, before, cut = sum(math.sqrt(count) for count in counts), 0.0, []
    for count in counts:
        cut.append(int(num_classes * before / total))
        before += math.sqrt(count)
    used = sorted(set(cut))  # a frequent word can span several classes, of which all but the first are empty
    classes = frequency_classes(np.array(counts), num_classes=num_classes)
    assert classes.tolist() == [used.index(each) for each in cut]


def test_words_without_counts_are_spread_evenly():
    assert np.bincount(frequency_classes(np.zeros(12), num_classes=3)).tolist() == [4, 4, 4]
