"""Hierarchical softmax over a binary Huffman tree (Morin and Bengio 2005; word2vec): each word is a path of turns.

    p(word | hidden) = product over the inner nodes of its path of sigmoid(turn * node . hidden)

A token costs one dot product per node on its path: on average about the entropy of the unigram distribution in bits.
That is little arithmetic but many memory reads; the paper calls such trees highly suboptimal on modern hardware. A step
reads and updates only nodes on its targets' paths, so the nodes are stored in a `SparseTable`.

Shapes: N scored tokens, D width, V words, I = V - 1 inner nodes, U nodes in a step, M turns on paths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from lm.config.groups import OutputConfig, plugin
from lm.optim.sparse_table import SparseTable
from lm.output.base import IGNORE_INDEX, Description, LayerSizes, OutputLayer, Plan, as_rows, flatten
from lm.output.logits import precomputed, slices
from lm.output.maxent import NgramContexts, NgramScores

Integers = NDArray[np.int64]


class Tree(NamedTuple):
    """Paths from the root to each word. Inner nodes are numbered by decreasing count; the root is 0."""

    start_V: Integers
    """The path of word w spans start_V[w] to start_V[w + 1]."""
    node_M: Integers
    """Inner nodes along each path, starting at the root."""
    turn_M: Integers
    """1 or -1: the child that the path takes at the node."""


def huffman_tree(counts: NDArray[Any]) -> Tree:
    """Build the tree from counts in decreasing order; ties are broken by word id, so the result is deterministic."""
    vocab_size = len(counts)
    parent, turn = _merge(counts[::-1].tolist())
    root = len(parent) - 1
    # Walk all paths from word to root, first to count the turns, then to record them.
    length_V, word, node = np.zeros(vocab_size, np.int64), np.arange(vocab_size), np.arange(vocab_size)[::-1]
    while len(inner := np.flatnonzero(node != root)):
        word, node = word[inner], parent[node[inner]]
        length_V[word] += 1
    start_V = np.concatenate([[0], np.cumsum(length_V)])
    node_M, turn_M = np.empty((2, start_V[-1]), np.int64)
    place, node = start_V[1:].copy(), np.arange(vocab_size)[::-1]
    while len(inner := np.flatnonzero(node != root)):
        place, node = place[inner] - 1, node[inner]
        node_M[place], turn_M[place] = root - parent[node], turn[node]
        node = parent[node]
    return Tree(start_V, node_M, turn_M)


def _merge(totals: list[int]) -> tuple[Integers, Integers]:
    """Merge the two smallest nodes until one is left; return (parent, turn) of each node. Counts increase."""
    vocab_size = len(totals)
    parent, turn = np.zeros((2, 2 * vocab_size - 1), np.int64)
    roots = [(total, node) for node, total in enumerate(totals)]  # sorted, so it is a heap
    for new in range(vocab_size, len(parent)):
        (first_total, first), (second_total, second) = heappop(roots), heappop(roots)
        heappush(roots, (first_total + second_total, new))
        parent[first] = parent[second] = new
        turn[first], turn[second] = 1, -1
    return parent, turn


CHUNK_TURNS = 1 << 12
"""Number of turns whose vectors are in memory simultaneously."""


@dataclass(frozen=True)
class PathPlan(Plan):
    """Turns on the paths of a batch's targets."""

    rows_U: Tensor | None
    """Nodes used by the whole batch; None in evaluation."""
    token_M: Tensor
    """Index of the scored token for each turn."""
    node_M: Tensor
    """Node of each turn, as an index into `rows_U`."""
    turn_M: Tensor
    """Direction of each turn, 1 or -1."""


@plugin("output", "hsm_huffman", OutputConfig)
class HuffmanSoftmax(OutputLayer):
    """One logistic regression per inner node."""

    def __init__(self, *, width: int, counts: NDArray[Any], sparse: bool = False) -> None:
        super().__init__(width=width, vocab_size=len(counts))
        self.tree = huffman_tree(np.maximum(counts, 1))
        self.table = SparseTable(max(1, len(counts) - 1), width, sparse=sparse)
        self.reset_parameters()

    @classmethod
    def build(cls, settings: OutputConfig, sizes: LayerSizes) -> "HuffmanSoftmax":
        return cls(width=sizes.width, counts=sizes.counts, sparse=sizes.sparse)

    def plan(self, targets: Tensor, *, generator: torch.Generator | None = None) -> PathPlan:
        return self.plans(targets.reshape(-1, 1), [slice(None)], generator=generator)[0]

    def plans(
        self, targets_TB: Tensor, groups: Sequence[slice], *, generator: torch.Generator | None = None
    ) -> tuple[PathPlan, ...]:
        self.check_range(targets_TB)
        # All groups and ranks read the same rows, so their gradients can be summed.
        rows_U = torch.unique(self._paths(targets_TB).node_M)
        parts = [self._paths(targets_TB[:, group]) for group in groups]
        return tuple(replace(part, rows_U=rows_U, node_M=torch.searchsorted(rows_U, part.node_M)) for part in parts)

    def _paths(self, targets: Tensor) -> PathPlan:
        """Return the turns on the scored targets' paths, with nodes as rows of the full table."""
        target_N = targets[targets != IGNORE_INDEX].numpy()
        length_N = np.diff(self.tree.start_V)[target_N]
        token_M = np.repeat(np.arange(len(target_N)), length_N)
        within_M = np.arange(len(token_M)) - np.repeat(np.cumsum(length_N) - length_N, length_N)
        step_M = self.tree.start_V[target_N][token_M] + within_M
        parts = token_M, self.tree.node_M[step_M], self.tree.turn_M[step_M]
        token, node, turn = map(torch.from_numpy, parts)
        return PathPlan.of(targets, rows_U=None, token_M=token, node_M=node, turn_M=turn)

    def loss(
        self, hidden: Tensor, targets: Tensor, plan: Plan | None = None, ngrams: Sequence[NgramScores] = ()
    ) -> Tensor:
        plan = plan or self.plan(targets.cpu()).to(targets.device)
        assert isinstance(plan, PathPlan)
        hidden_ND = plan.scored(flatten(hidden, targets)[0])
        return path_loss(hidden_ND, self.table(plan.rows_U, plan.rows_U), plan)

    @torch.no_grad()
    def nll(self, hidden: Tensor, targets: Tensor, contexts: NgramContexts | None = None) -> Tensor:
        self.check_range(targets.cpu())
        plan = self._paths(targets.cpu()).to(targets.device)
        hidden_ND = plan.scored(flatten(hidden, targets)[0])
        nll_N = hidden_ND.new_zeros(len(hidden_ND))
        for chunk in slices(len(plan.token_M), CHUNK_TURNS):
            token_m = plan.token_M[chunk]
            score_m = (hidden_ND[token_m] * self.table.weight[plan.node_M[chunk]]).sum(1)
            nll_N.index_add_(0, token_m, F.softplus(-plan.turn_M[chunk] * score_m).to(nll_N.dtype))
        return plan.spread(nll_N, targets.shape)

    def log_prob(self, hidden: Tensor, contexts: NgramContexts | None = None) -> Tensor:
        hidden_ND = as_rows(hidden)
        plan = self._paths(torch.arange(self.vocab_size, device="cpu")).to(hidden.device)
        score_NI = F.linear(hidden_ND, self.table.weight)
        log_prob_NV = score_NI.new_zeros(len(hidden_ND), self.vocab_size)
        for chunk in slices(len(plan.token_M), CHUNK_TURNS):
            turns_Nm = F.logsigmoid(plan.turn_M[chunk] * score_NI[:, plan.node_M[chunk]])
            log_prob_NV = log_prob_NV.index_add(1, plan.token_M[chunk], turns_Nm)
        return log_prob_NV.view(*hidden.shape[:-1], self.vocab_size)

    def describe(self, counts: NDArray[Any] | None = None) -> Description:
        return super().describe(counts) | {"longest_path": int(np.diff(self.tree.start_V).max())}


def path_loss(hidden_ND: Tensor, nodes_UD: Tensor, plan: PathPlan) -> Tensor:
    """Mean loss per token, computed in chunks of turns."""

    @torch.no_grad()
    def compute(_: Sequence[bool]) -> tuple[Tensor, list[Tensor]]:
        grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=nodes_UD.dtype)
        grad_nodes_UD = torch.zeros_like(nodes_UD)
        total = nodes_UD.new_zeros(())
        for chunk in slices(len(plan.token_M), CHUNK_TURNS):
            token_m, node_m, turn_m = plan.token_M[chunk], plan.node_M[chunk], plan.turn_M[chunk]
            hidden_mD = hidden_ND.index_select(0, token_m).to(nodes_UD.dtype)
            nodes_mD = nodes_UD.index_select(0, node_m)
            wrong_m = -turn_m * (hidden_mD * nodes_mD).sum(1)
            total += F.softplus(wrong_m).sum()
            grad_m1 = (-turn_m * wrong_m.sigmoid()).mul_(plan.scale)[:, None]
            grad_hidden_ND.index_add_(0, token_m, nodes_mD.mul_(grad_m1))
            grad_nodes_UD.index_add_(0, node_m, hidden_mD.mul_(grad_m1))
        return total * plan.scale, [grad_hidden_ND.to(hidden_ND.dtype), grad_nodes_UD]

    return precomputed(compute, hidden_ND, nodes_UD)
