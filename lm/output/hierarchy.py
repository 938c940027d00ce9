"""Layers with two levels: first a root, then, for the words that are not in the root, the cluster the root chose.

p(word | hidden) is p(word | root) for the words of the root's shortlist and p(cluster | root) p(word | cluster) for the
others (sections 3.3 and 4.2 of the paper). The adaptive softmax has a shortlist and a few clusters, the class-based
hierarchical softmax has no shortlist and many classes.

A layer numbers its words by *position*: the shortlist first, then cluster after cluster. The host sorts the tokens
whose words are not in the shortlist by cluster, so that those of a cluster are a slice whose size it knows.

Shapes: N scored tokens, M of them outside the shortlist and sorted by cluster, D width, S words of the shortlist, C
clusters, R = S + C entries of the root.
"""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.data.batches import Plan
from lm.output.base import OutputLayer, plan_scored, scored
from lm.output.drawing import entry_at
from lm.output.fused import Columns, Group, softmax_loss, softmax_nll
from lm.output.logits import cross_entropy
from lm.output.maxent import Slices


class Leaves(NamedTuple):
    """One call's worth of clusters: the rows that it scores, what it sees of them, and the word vectors."""

    rows: slice
    input_MD: Tensor
    weight_KD: Tensor
    groups: Sequence[Group] | None = None


class TwoLevelSoftmax(OutputLayer):
    """Root and leaves; subclasses say what the leaves are made of."""

    def __init__(
        self, *, width: int, vocab_size: int, shortlist: int, cluster_sizes: Sequence[int], fused: bool
    ) -> None:
        super().__init__(width=width, vocab_size=vocab_size)
        self.shortlist = shortlist
        self.cluster_sizes = list(cluster_sizes)
        self.fused = fused
        self.word_at_position: Tensor | None = None
        self.position_of_word: Tensor | None = None
        """On the host, each the inverse of the other; None where positions are word ids."""

    @abstractmethod
    def root(self) -> tuple[Tensor, Tensor | None]:
        """The root's weight (R, D), shortlist first, and its bias (R), if any."""

    @abstractmethod
    def leaves(self, hidden_MD: Tensor, counts: Sequence[int]) -> Iterator[Leaves]:
        """The clusters over tokens that are sorted by cluster, `counts[c]` of cluster c."""

    @abstractmethod
    def leaf_scores(self, hidden_ND: Tensor, cluster: int) -> Tensor:
        """The network's scores of the cluster's words, not normalised."""

    def starts(self) -> list[int]:
        """The first position of each cluster, and the vocabulary's size."""
        return list(accumulate(self.cluster_sizes, initial=self.shortlist))

    # ---- training and evaluation ----

    def plan(self, targets: Tensor, *, generator: torch.Generator | None = None) -> Plan:  # noqa: ARG002
        self.check_range(targets)
        plan = plan_scored(targets)
        flat = targets.flatten()
        rows_N = plan.tensors.get("rows", torch.arange(len(flat), device="cpu"))
        position_N = flat[rows_N]
        if self.position_of_word is not None:
            position_N = self.position_of_word[position_N]
        starts = torch.tensor(self.starts(), device="cpu")
        cluster_N = torch.searchsorted(starts, position_N, right=True) - 1  # -1 for the shortlist
        cluster_M, order_M = cluster_N.sort(stable=True)
        counts = torch.bincount(cluster_M + 1, minlength=1 + len(self.cluster_sizes)).tolist()
        cluster_M, order_M = cluster_M[counts[0] :], order_M[counts[0] :]
        tensors = {
            "root": torch.where(cluster_N < 0, position_N, self.shortlist + cluster_N),
            "leaf": position_N[order_M] - starts[cluster_M],
            "leaf_rows": rows_N[order_M],
        }
        return Plan(plan.tensors | tensors, (len(rows_N), *counts[1:]))

    def ngram_slices(self, plan: Plan, contexts: Tensor) -> dict[str, Slices]:
        assert self.maxent is not None
        context_NO, sizes = contexts.flatten(0, -2), torch.tensor(self._softmax_sizes(), device="cpu")
        counts = torch.tensor([0, *plan.counts[1:]], device="cpu")
        rows_N = plan.tensors.get("rows", torch.arange(len(context_NO), device="cpu"))
        scored_by = {"root": (rows_N, torch.zeros_like(rows_N))}
        scored_by["leaf"] = plan.tensors["leaf_rows"], torch.repeat_interleave(counts)
        return {
            name: self.maxent.slices(context_NO[rows], softmax_N=softmax, length_N=sizes[softmax])
            for name, (rows, softmax) in scored_by.items()
        }

    def _softmax_sizes(self) -> list[int]:
        """Entries of the root, and words of each cluster."""
        return [self.shortlist + len(self.cluster_sizes), *self.cluster_sizes]

    def _with_ngrams(self, logits_NK: Tensor, context_NO: Tensor | None, *, softmax: int) -> Tensor:
        if self.maxent is not None:
            assert context_NO is not None, "n-gram weights need the words that were read"
            self.maxent.scores(context_NO, softmax=softmax, length=self._softmax_sizes()[softmax]).add_to(logits_NK)
        return logits_NK

    def loss(self, hidden: Tensor, targets: Tensor, plan: Plan | None = None) -> Tensor:
        plan = plan or self.plan(targets.cpu()).to(targets.device)
        scale = 1 / max(1, plan.counts[0])
        weight_RD, bias_R = self.root()
        hidden_ND, _ = scored(hidden, targets, plan=plan)
        train = partial(softmax_loss, scale=scale, fused=self.fused, row_loss=cross_entropy(self.softmax_in_place))
        columns = Columns(bias_R, ngrams=self.ngrams(plan, "root"))
        loss = train([hidden_ND], [weight_RD], plan.tensors["root"], columns=columns)
        hidden_MD = hidden.flatten(0, -2).index_select(0, plan.tensors["leaf_rows"])
        return self.add_leaves(loss, hidden_MD, plan, train)

    def add_leaves(self, loss: Tensor, hidden_MD: Tensor, plan: Plan, train: Callable[..., Tensor]) -> Tensor:
        """The root's loss and that of the clusters, each by `train`."""
        columns = Columns(ngrams=self.ngrams(plan, "leaf"))
        for rows, input_MD, weight_KD, groups in self.leaves(hidden_MD, plan.counts[1:]):
            target_M = plan.tensors["leaf"][rows]
            loss = loss + train([input_MD], [weight_KD], target_M, columns=columns.select(rows), groups=groups)
        return loss

    @torch.no_grad()
    def nll(self, hidden: Tensor, targets: Tensor, contexts: Tensor | None = None) -> Tensor:
        plan = self.plan(targets.cpu())
        if self.maxent is not None:
            assert contexts is not None, "n-gram weights need the words that were read"
            plan = self.with_ngrams(plan, contexts.cpu())
        plan = plan.to(targets.device)
        hidden_ND, _ = scored(hidden, targets, plan=plan)
        weight_RD, bias_R = self.root()
        columns = Columns(bias_R, ngrams=self.ngrams(plan, "root"))
        root_N = softmax_nll([hidden_ND], [weight_RD], plan.tensors["root"], columns=columns)
        if "rows" in plan.tensors:
            root_N = root_N.new_zeros(targets.numel()).index_copy_(0, plan.tensors["rows"], root_N)
        hidden_MD = hidden.flatten(0, -2).index_select(0, plan.tensors["leaf_rows"])
        leaf_M = root_N.new_zeros(len(hidden_MD))
        columns = Columns(ngrams=self.ngrams(plan, "leaf"))
        for rows, input_MD, weight_KD, groups in self.leaves(hidden_MD, plan.counts[1:]):
            target_M, own = plan.tensors["leaf"][rows], columns.select(rows)
            leaf_M[rows] = softmax_nll([input_MD], [weight_KD], target_M, columns=own, groups=groups)
        return root_N.index_add_(0, plan.tensors["leaf_rows"], leaf_M).view(targets.shape)

    def num_losses(self) -> int:
        return 2

    def scores_per_token(self) -> float:
        assert self.counts is not None
        counts_V = self.counts if self.word_at_position is None else self.counts[self.word_at_position.numpy()]
        sizes_V = np.repeat([0, *self.cluster_sizes], [self.shortlist, *self.cluster_sizes])
        return self._softmax_sizes()[0] + float(np.average(sizes_V, weights=np.maximum(counts_V, 1)))

    # ---- inference ----

    def root_log_prob(self, hidden_ND: Tensor, context_NO: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """log p of the shortlist's words (N, S) and of the clusters (N, C)."""
        log_prob_NR = self._with_ngrams(F.linear(hidden_ND, *self.root()), context_NO, softmax=0).log_softmax(-1)
        words_NS, clusters_NC = torch.split(log_prob_NR, [self.shortlist, len(self.cluster_sizes)], dim=1)
        return words_NS, clusters_NC

    def leaf_log_prob(self, hidden_ND: Tensor, cluster: int, context_NO: Tensor | None = None) -> Tensor:
        """log p(word | cluster, hidden) over the cluster's words."""
        scores_NK = self.leaf_scores(hidden_ND, cluster)
        return self._with_ngrams(scores_NK, context_NO, softmax=1 + cluster).log_softmax(-1)

    def log_prob(self, hidden: Tensor, contexts: Tensor | None = None) -> Tensor:
        hidden_ND, context_NO = hidden.flatten(0, -2), None if contexts is None else contexts.flatten(0, -2)
        words_NS, clusters_NC = self.root_log_prob(hidden_ND, context_NO)
        leaves = (
            clusters_NC[:, c, None] + self.leaf_log_prob(hidden_ND, c, context_NO)
            for c in range(len(self.cluster_sizes))
        )
        log_prob_NV = torch.cat([words_NS, *leaves], dim=1)
        if self.position_of_word is not None:
            log_prob_NV = log_prob_NV[:, self.position_of_word.to(log_prob_NV.device)]
        return log_prob_NV.view(*hidden.shape[:-1], self.vocab_size)

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.check_k(k)
        hidden_ND = hidden.flatten(0, -2)
        words_NS, clusters_NC = self.root_log_prob(hidden_ND)
        best_Nk, position_Nk = F.pad(words_NS, (0, max(0, k - self.shortlist)), value=-torch.inf).topk(k)
        starts = self.starts()
        # The likeliest cluster first: what it brings lets most of the others stay closed.
        for cluster in clusters_NC.amax(0).argsort(descending=True).tolist():
            open_n = (clusters_NC[:, cluster] > best_Nk[:, -1]).nonzero().squeeze(1)
            if not len(open_n):
                continue
            leaf_nK = clusters_NC[open_n, cluster, None] + self.leaf_log_prob(hidden_ND[open_n], cluster)
            score_nk, inside_nk = leaf_nK.topk(min(k, leaf_nK.size(1)))
            both = torch.cat([best_Nk[open_n], score_nk], dim=1).topk(k)
            position_nk = torch.cat([position_Nk[open_n], starts[cluster] + inside_nk], dim=1)
            best_Nk = best_Nk.index_copy(0, open_n, both.values)
            position_Nk = position_Nk.index_copy(0, open_n, position_nk.gather(1, both.indices))
        shape = (*hidden.shape[:-1], k)
        return best_Nk.view(shape), self._words_at(position_Nk).view(shape)

    def draw_word(
        self, hidden_ND: Tensor, uniform_N: Tensor, *, temperature: float = 1.0, without: int | None = None
    ) -> Tensor:
        if temperature != 1:  # it changes a cluster's total mass, which needs all its words
            return super().draw_word(hidden_ND, uniform_N, temperature=temperature, without=without)
        closed = without
        if without is not None and self.position_of_word is not None:
            closed = int(self.position_of_word[without])
        root_NR = torch.cat(self.root_log_prob(hidden_ND), dim=1)
        starts = self.starts()
        if closed is not None and closed < self.shortlist:
            root_NR[:, closed] = -torch.inf
        elif closed is not None:
            cluster = bisect_right(starts, closed) - 1
            root_NR[:, self.shortlist + cluster] += self._open(hidden_ND, cluster, closed=closed).logsumexp(1)
        position_N, rest_N = entry_at(root_NR.softmax(1), uniform_N)
        cluster_N = position_N - self.shortlist
        for cluster in torch.unique(cluster_N[cluster_N >= 0]).tolist():
            rows_n = (cluster_N == cluster).nonzero().squeeze(1)
            leaf_nK = self._open(hidden_ND[rows_n], cluster, closed=closed)
            position_N[rows_n] = starts[cluster] + entry_at(leaf_nK.softmax(1), rest_N[rows_n])[0]
        return self._words_at(position_N)

    def _open(self, hidden_ND: Tensor, cluster: int, *, closed: int | None) -> Tensor:
        """The cluster's log-probabilities, with that of the word at position `closed`, if it is there, set to zero."""
        leaf_NK, start = self.leaf_log_prob(hidden_ND, cluster), self.starts()[cluster]
        if closed is not None and 0 <= closed - start < leaf_NK.size(1):
            leaf_NK[:, closed - start] = -torch.inf
        return leaf_NK

    def _words_at(self, position: Tensor) -> Tensor:
        return position if self.word_at_position is None else self.word_at_position.to(position.device)[position]
