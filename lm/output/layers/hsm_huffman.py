"""The hierarchical softmax over Huffman's binary tree (Morin and Bengio 2005; word2vec): a word is a path of turns.

    p(word | hidden) = product over the inner nodes of its path of sigmoid(turn * node . hidden)

A token costs one dot product per node of its path: on average about the entropy of the unigram distribution in bits.
That is little arithmetic but many memory reads: the paper calls such trees highly suboptimal on modern hardware. A step
reads and changes only the nodes on its targets' paths, so the nodes are a `SparseTable`.

Shapes: N scored tokens, D width, V words, I = V - 1 inner nodes, U nodes of a step, M turns on paths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from lm.config.groups import OutputConfig
from lm.config.registry import plugin
from lm.data.batches import Plan
from lm.optim.sparse_table import SparseTable
from lm.output.base import Description, LayerSizes, OutputLayer, SoftmaxSize, plan_scored, scored
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


CHUNK_TURNS = 1 << 12
"""Turns whose vectors are held at once."""


@dataclass
class HuffmanConfig(OutputConfig):
    """Hierarchical softmax over a Huffman tree."""

    name: str = "hsm_huffman"


@plugin("output", "hsm_huffman", HuffmanConfig)
class HuffmanSoftmax(OutputLayer):
    """One logistic regression per inner node."""

    def __init__(self, *, width: int, counts: NDArray[Any], fused: bool = True) -> None:
        super().__init__(width=width, vocab_size=len(counts))
        self.fused = fused
        self.tree = huffman_tree(np.maximum(counts, 1))
        self.table = SparseTable(max(1, len(counts) - 1), width)
        self.reset_parameters()

    @classmethod
    def build(cls, settings: HuffmanConfig, sizes: LayerSizes) -> "HuffmanSoftmax":
        return cls(width=sizes.width, counts=sizes.counts, fused=settings.fused)

    def plan(self, targets: Tensor, *, generator: torch.Generator | None = None) -> Plan:
        return self.plans(targets[:, None], [slice(None)], generator=generator)[0]

    def plans(
        self,
        targets_TB: Tensor,
        groups: Sequence[slice],
        *,
        generator: torch.Generator | None = None,  # noqa: ARG002
        words_PB: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[Plan, ...]:
        self.check_range(targets_TB)
        parts = [self._paths(targets_TB[:, group]) for group in groups]
        # All groups and all ranks read the same rows, so that their gradients add up.
        words = torch.unique(self._paths(targets_TB).tensors["node"])
        return tuple(
            Plan(part.tensors | {"words": words, "node": torch.searchsorted(words, part.tensors["node"])}, part.counts)
            for part in parts
        )

    def _paths(self, targets: Tensor) -> Plan:
        """The turns on the paths of the scored targets."""
        plan = plan_scored(targets)
        target_N = targets.flatten().numpy()
        target_N = target_N[plan.tensors["rows"].numpy()] if "rows" in plan.tensors else target_N
        length_N = np.diff(self.tree.start_V)[target_N]
        token_M = np.repeat(np.arange(len(target_N)), length_N)
        within_M = np.arange(len(token_M)) - np.repeat(np.cumsum(length_N) - length_N, length_N)
        place_M = self.tree.start_V[target_N][token_M] + within_M
        arrays = {"token": token_M, "node": self.tree.node_M[place_M], "turn": self.tree.turn_M[place_M]}
        return Plan(plan.tensors | {key: torch.from_numpy(array) for key, array in arrays.items()}, plan.counts)

    def loss(self, hidden: Tensor, targets: Tensor, plan: Plan | None = None) -> Tensor:
        plan = plan or self.plan(targets.cpu()).to(targets.device)
        hidden_ND, _ = scored(hidden, targets, plan=plan)
        nodes_UD = self.table(plan.tensors["words"], plan.tensors["words"])
        token_M, node_M, turn_M = (plan.tensors[key] for key in ("token", "node", "turn"))
        scale = 1 / max(1, plan.counts[0])
        if self.fused:
            return cast(Tensor, _PathLoss.apply(hidden_ND, nodes_UD, token_M, node_M, turn_M, scale))  # type: ignore[no-untyped-call]
        score_M = (hidden_ND[token_M] * nodes_UD[node_M]).sum(1)
        return scale * F.softplus(-turn_M * score_M).sum()

    @torch.no_grad()
    def nll(self, hidden: Tensor, targets: Tensor, contexts: Tensor | None = None) -> Tensor:  # noqa: ARG002
        self.check_range(targets.cpu())
        plan = self._paths(targets.cpu()).to(targets.device)
        hidden_ND, _ = scored(hidden, targets, plan=plan)
        token_M, node_M, turn_M = (plan.tensors[key] for key in ("token", "node", "turn"))
        nll_N = hidden_ND.new_zeros(len(hidden_ND))
        for chunk in _chunks(len(token_M)):
            score_m = (hidden_ND[token_M[chunk]] * self.table.weight[node_M[chunk]]).sum(1)
            nll_N.index_add_(0, token_M[chunk], F.softplus(-turn_M[chunk] * score_m).to(nll_N.dtype))
        if "rows" in plan.tensors:
            nll_N = nll_N.new_zeros(targets.numel()).index_copy_(0, plan.tensors["rows"], nll_N)
        return nll_N.view(targets.shape)

    @cached_property
    def _levels(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Below each level of the tree: (inner nodes, their parents, the turns to them), and at the end the words'."""
        start_V, node_M, turn_M = self.tree
        inside = np.ones(len(node_M), bool)
        inside[start_V[:-1]] = False  # steps that another step leads to
        place_M = np.flatnonzero(inside)
        nodes, first = np.unique(node_M[place_M], return_index=True)
        place = place_M[first]
        depth = place - start_V[np.searchsorted(start_V, place, side="right") - 1]
        levels = [(nodes[depth == d], place[depth == d] - 1) for d in range(1, depth.max(initial=0) + 1)]
        levels.append((np.arange(self.vocab_size), start_V[1:] - 1))
        return [(torch.from_numpy(n), torch.from_numpy(node_M[p]), torch.from_numpy(turn_M[p])) for n, p in levels]

    def log_prob(self, hidden: Tensor, contexts: Tensor | None = None) -> Tensor:  # noqa: ARG002
        hidden_ND = hidden.flatten(0, -2)
        if self.vocab_size == 1:
            return hidden.new_zeros(*hidden.shape[:-1], 1)
        score_NI = F.linear(hidden_ND, self.table.weight)
        log_prob_NI = torch.zeros_like(score_NI)
        *inner, words = ([t.to(hidden.device) for t in level] for level in self._levels)
        for nodes, parents, turns in inner:
            log_prob_NI[:, nodes] = log_prob_NI[:, parents] + F.logsigmoid(turns * score_NI[:, parents])
        _, parents, turns = words
        log_prob_NV = log_prob_NI[:, parents] + F.logsigmoid(turns * score_NI[:, parents])
        return log_prob_NV.view(*hidden.shape[:-1], self.vocab_size)

    def softmaxes(self, num_tokens: int, num_targets: int) -> list[SoftmaxSize]:  # noqa: ARG002
        return [SoftmaxSize(num_tokens, 1, self.table.weight.numel())]

    def gathered(self, num_targets: int) -> int:
        longest = int(np.diff(self.tree.start_V).max())
        return 2 * (CHUNK_TURNS + min(self.vocab_size, num_targets * longest)) * self.width

    def describe(self) -> Description:
        return super().describe() | {"longest_path": int(np.diff(self.tree.start_V).max())}


class _PathLoss(torch.autograd.Function):
    """Loss and gradients of the turns chunk by chunk in the forward pass; the backward pass hands the gradients out."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        nodes_UD: Tensor,
        token_M: Tensor,
        node_M: Tensor,
        turn_M: Tensor,
        scale: float,
    ) -> Tensor:
        grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=nodes_UD.dtype)
        grad_nodes_UD = torch.zeros_like(nodes_UD)
        total = nodes_UD.new_zeros(())
        for chunk in _chunks(len(token_M)):
            token_m, node_m, turn_m = token_M[chunk], node_M[chunk], turn_M[chunk]
            hidden_mD = hidden_ND.index_select(0, token_m).to(nodes_UD.dtype)
            nodes_mD = nodes_UD.index_select(0, node_m)
            wrong_m = -turn_m * (hidden_mD * nodes_mD).sum(1)
            total += F.softplus(wrong_m).sum()
            grad_m1 = (-turn_m * wrong_m.sigmoid()).mul_(scale)[:, None]
            grad_hidden_ND.index_add_(0, token_m, nodes_mD.mul_(grad_m1))
            grad_nodes_UD.index_add_(0, node_m, hidden_mD.mul_(grad_m1))
        ctx.save_for_backward(grad_hidden_ND.to(hidden_ND.dtype), grad_nodes_UD)
        return total * scale

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, grad_nodes_UD = ctx.saved_tensors
        return grad_hidden_ND * grad_outputs[0], grad_nodes_UD * grad_outputs[0], None, None, None, None


def _chunks(total: int) -> list[slice]:
    return [slice(start, min(start + CHUNK_TURNS, total)) for start in range(0, total, CHUNK_TURNS)]
