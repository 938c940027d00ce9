"""Huffman tree: an optimal prefix code. The layer itself is tested together with all others."""

import heapq
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.output.layers.hsm_huffman import huffman_tree


def least_total_length(counts):
    """Return the optimal total code length: every merge adds one step to all words below it."""
    heap, total = list(counts), 0
    heapq.heapify(heap)
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return total


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(1, 1000), min_size=1, max_size=60))
def test_tree_is_an_optimal_prefix_code(counts):
    counts = sorted(counts, reverse=True)
    tree = huffman_tree(np.array(counts))
    start = tree.start_V.tolist()
    paths = [list(zip(tree.node_M[a:b].tolist(), tree.turn_M[a:b].tolist(), strict=True)) for a, b in pairwise(start)]
    assert sum(count * len(path) for count, path in zip(counts, paths, strict=True)) == least_total_length(counts)
    codes = ["".join("+" if turn > 0 else "-" for _, turn in path) for path in paths]
    assert all(a == b or not b.startswith(a) for a in codes for b in codes)
    # Each node corresponds to exactly one sequence of turns.
    leads_to = {(code[:i], path[i][0]) for code, path in zip(codes, paths, strict=True) for i in range(len(path))}
    assert len(leads_to) == len({lead for lead, _ in leads_to}) == len({node for _, node in leads_to})
    assert {node for _, node in leads_to} == set(range(len(counts) - 1))
    # Nodes are numbered by decreasing count, so frequently used rows are close together.
    below = [
        sum(c for c, path in zip(counts, paths, strict=True) if node in dict(path)) for node in range(len(counts) - 1)
    ]
    assert below == sorted(below, reverse=True)
