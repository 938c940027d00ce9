"""Huffman's binary tree over words: frequent words get short codes.

Shapes: V words, I = V - 1 inner nodes, M steps on the paths of all words.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.system.jit import compiled

Integers = NDArray[np.int64]


class Tree(NamedTuple):
    """The paths from the root to each word. Inner nodes are numbered by decreasing count; the root is 0."""

    start_V: Integers
    """The path of word w is at start_V[w] to start_V[w + 1]."""
    node_M: Integers
    """Inner nodes, the root first."""
    turn_M: Integers
    """1 or -1: which child of the node the path goes to."""


def huffman_tree(counts: NDArray[Any]) -> Tree:
    """The tree of counts in decreasing order; ties are broken by word id, so the same counts give the same tree."""
    vocab_size = len(counts)
    if vocab_size == 1:
        return Tree(np.array([0, 0]), np.empty(0, np.int64), np.empty(0, np.int64))
    parent_K, turn_K = _merge(np.asarray(counts[::-1], dtype=np.int64))
    depth_K = _depths(parent_K)
    # Leaves were numbered by increasing count; inner nodes after them, in the order they were made.
    leaf_V = np.arange(vocab_size)[::-1]
    start_V = np.concatenate([[0], np.cumsum(depth_K[leaf_V])])
    node_M, turn_M = _paths(parent_K, turn_K, leaf_V, start_V)
    return Tree(start_V, len(parent_K) - 1 - node_M, turn_M)


@compiled
def _merge(counts: Integers) -> Any:
    """Join the two smallest nodes until one is left: (parent of each node, which child it is). Counts increase."""
    vocab_size = len(counts)
    total = np.empty(2 * vocab_size - 1, np.int64)
    total[:vocab_size] = counts
    parent, turn = np.full(len(total), -1, np.int64), np.ones(len(total), np.int64)
    leaf, inner = 0, vocab_size  # the smallest of either kind that has no parent yet
    for new in range(vocab_size, len(total)):
        total[new] = 0
        for child in range(2):
            if leaf < vocab_size and (inner >= new or total[leaf] <= total[inner]):
                smallest, leaf = leaf, leaf + 1
            else:
                smallest, inner = inner, inner + 1
            total[new] += total[smallest]
            parent[smallest] = new
            turn[smallest] = 1 - 2 * child
    return parent, turn


@compiled
def _depths(parent: Integers) -> Any:
    depth = np.zeros(len(parent), np.int64)
    for node in range(len(parent) - 2, -1, -1):  # parents have higher numbers
        depth[node] = depth[parent[node]] + 1
    return depth


@compiled
def _paths(parent: Integers, turn: Integers, leaves: Integers, start: Integers) -> Any:
    nodes, turns = np.empty(start[-1], np.int64), np.empty(start[-1], np.int64)
    for word in range(len(leaves)):
        node = leaves[word]
        for place in range(start[word + 1] - 1, start[word] - 1, -1):
            nodes[place], turns[place] = parent[node], turn[node]
            node = parent[node]
    return nodes, turns
