"""Two-level layers: a root and, for words outside the root, the cluster selected by the root.

p(word | hidden) is p(word | root) for words in the root's shortlist and p(cluster | root) p(word | cluster) for the
others (sections 3.3 and 4.2 of the paper). The adaptive softmax has a shortlist and a few clusters; the class-based
hierarchical softmax has no shortlist and many classes.

A layer numbers its words by *position*: the shortlist first, then cluster by cluster. The host sorts tokens outside
the shortlist by cluster, so each cluster's tokens are a slice of known size.

Shapes: N scored tokens, M of them outside the shortlist and sorted by cluster, D width, S shortlist words, C clusters,
R = S + C entries in the root.
"""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output.base import OutputLayer, Plan, as_rows, flatten, inverse_cdf
from lm.output.fused import Group, LogitBias, softmax_loss, softmax_nll
from lm.output.maxent import NgramContexts, NgramScores, SoftmaxRows


@dataclass(frozen=True)
class TwoLevelPlan(Plan):
    """Tokens of a batch, sorted by cluster."""

    root_N: Tensor
    """Each token's target in the root."""
    leaf_M: Tensor
    """Each token's target within its cluster."""
    leaf_rows_M: Tensor
    """Flat positions of the tokens outside the shortlist."""
    cluster_M: Tensor
    counts: tuple[int, ...]
    """Number of tokens in each cluster."""
    buckets: tuple[Any, ...] = ()
    """Padded batches of small classes, for GPUs."""


class TailBatch(NamedTuple):
    """Arguments of one fused-loss call: tokens, their inputs and the word vectors."""

    rows: slice
    input_MD: Tensor
    weight_KD: Tensor
    groups: Sequence[Group] | None = None


class TwoLevelSoftmax(OutputLayer):
    """Root and clusters; subclasses define the clusters."""

    def __init__(self, *, shortlist: int, cluster_sizes: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self.shortlist = shortlist
        self.cluster_sizes = list(cluster_sizes)
        self.word_at_position: Tensor | None = None
        self.position_of_word: Tensor | None = None
        """Inverse of `word_at_position`. Both are on the host, and None if positions are word ids."""

    @abstractmethod
    def root(self) -> tuple[Tensor, Tensor | None]:
        """Return the root's weight (R, D), shortlist first, and its optional bias (R)."""

    @abstractmethod
    def leaves(self, hidden_MD: Tensor, counts: Sequence[int]) -> Iterator[TailBatch]:
        """Yield one batch per cluster; tokens are sorted by cluster, `counts[c]` in cluster c."""

    @abstractmethod
    def leaf_scores(self, hidden_ND: Tensor, cluster: int) -> Tensor:
        """Return the network's unnormalized scores for the cluster's words."""

    def starts(self) -> list[int]:
        """Return each cluster's first position, followed by the vocabulary size."""
        return list(accumulate(self.cluster_sizes, initial=self.shortlist))

    # ---- training and evaluation ----

    def plan(self, targets: Tensor, *, generator: torch.Generator | None = None) -> TwoLevelPlan:
        self.check_range(targets)
        scored = Plan.of(targets)
        flat = targets.flatten()
        rows_N = torch.arange(len(flat), device="cpu") if scored.rows_N is None else scored.rows_N
        position_N = flat[rows_N]
        if self.position_of_word is not None:
            position_N = self.position_of_word[position_N]
        starts = torch.tensor(self.starts(), device="cpu")
        cluster_N = torch.searchsorted(starts, position_N, right=True) - 1  # -1 for the shortlist
        cluster_M, order_M = cluster_N.sort(stable=True)
        in_shortlist, *counts = torch.bincount(cluster_M + 1, minlength=1 + len(self.cluster_sizes)).tolist()
        cluster_M, order_M = cluster_M[in_shortlist:], order_M[in_shortlist:]
        return TwoLevelPlan(
            scored.num_scored,
            scored.rows_N,
            None,
            root_N=torch.where(cluster_N < 0, position_N, self.shortlist + cluster_N),
            leaf_M=position_N[order_M] - starts[cluster_M],
            leaf_rows_M=rows_N[order_M],
            cluster_M=cluster_M,
            counts=tuple(counts),
        )

    def softmax_sizes(self) -> list[int]:
        """Root size, then the size of each cluster."""
        return [self.shortlist + len(self.cluster_sizes), *self.cluster_sizes]

    def softmax_rows(self, plan: Plan) -> list[SoftmaxRows]:
        assert isinstance(plan, TwoLevelPlan)
        device = plan.root_N.device
        sizes = torch.tensor(self.softmax_sizes(), device=device)
        rows_N = torch.arange(len(plan.root_N), device=device) if plan.rows_N is None else plan.rows_N
        zeros_N, softmax_M = torch.zeros_like(rows_N), 1 + plan.cluster_M
        return [
            SoftmaxRows(rows_N, zeros_N, sizes[zeros_N]),
            SoftmaxRows(plan.leaf_rows_M, softmax_M, sizes[softmax_M]),
        ]

    def loss(
        self, hidden: Tensor, targets: Tensor, plan: Plan | None = None, ngrams: Sequence[NgramScores] = ()
    ) -> Tensor:
        plan = plan or self.plan(targets.cpu()).to(targets.device)
        assert isinstance(plan, TwoLevelPlan)
        hidden_ND, _ = flatten(hidden, targets)
        of_root, of_leaf = ngrams or (None, None)
        weight_RD, bias_R = self.root()
        bias = LogitBias(bias_R, ngrams=of_root)
        loss = softmax_loss([plan.scored(hidden_ND)], [weight_RD], plan.root_N, scale=plan.scale, bias=bias)
        return self.add_leaves(loss, hidden_ND.index_select(0, plan.leaf_rows_M), plan, of_leaf)

    def add_leaves(self, loss: Tensor, hidden_MD: Tensor, plan: TwoLevelPlan, ngrams: NgramScores | None) -> Tensor:
        """Add every cluster's loss to the root's loss."""
        for rows, input_MD, weight_KD, groups in self.leaves(hidden_MD, plan.counts):
            bias, target_M = LogitBias(ngrams=ngrams).select(rows), plan.leaf_M[rows]
            part = softmax_loss([input_MD], [weight_KD], target_M, scale=plan.scale, bias=bias, groups=groups)
            loss = loss + part
        return loss

    @torch.no_grad()
    def nll(self, hidden: Tensor, targets: Tensor, contexts: NgramContexts | None = None) -> Tensor:
        plan = self.plan(targets.cpu()).to(targets.device)
        hidden_ND, _ = flatten(hidden, targets)
        of_root, of_leaf = (None, None) if contexts is None else map(contexts.scores, self.softmax_rows(plan))
        weight_RD, bias_R = self.root()
        bias = LogitBias(bias_R, ngrams=of_root)
        root_N = softmax_nll([plan.scored(hidden_ND)], [weight_RD], plan.root_N, bias=bias)
        nll_N = plan.spread(root_N, targets.shape).flatten()
        hidden_MD = hidden_ND.index_select(0, plan.leaf_rows_M)
        leaf_M = nll_N.new_zeros(len(hidden_MD))
        bias = LogitBias(ngrams=of_leaf)
        for part, input_MD, weight_KD, groups in self.leaves(hidden_MD, plan.counts):
            target_M = plan.leaf_M[part]
            leaf_M[part] = softmax_nll([input_MD], [weight_KD], target_M, bias=bias.select(part), groups=groups)
        return nll_N.index_add_(0, plan.leaf_rows_M, leaf_M).view(targets.shape)

    # ---- inference ----

    def root_log_prob(self, hidden_ND: Tensor, contexts: NgramContexts | None = None) -> tuple[Tensor, Tensor]:
        """Log-probabilities of shortlist words (N, S) and clusters (N, C)."""
        log_prob_NR = self._normalized(F.linear(hidden_ND, *self.root()), contexts, softmax=0)
        words_NS, clusters_NC = torch.split(log_prob_NR, [self.shortlist, len(self.cluster_sizes)], dim=1)
        return words_NS, clusters_NC

    def leaf_log_prob(self, hidden_ND: Tensor, cluster: int, contexts: NgramContexts | None = None) -> Tensor:
        """log p(word | cluster, hidden) over the cluster's words."""
        return self._normalized(self.leaf_scores(hidden_ND, cluster), contexts, softmax=1 + cluster)

    @staticmethod
    def _normalized(scores_NK: Tensor, contexts: NgramContexts | None, *, softmax: int) -> Tensor:
        if contexts is not None:
            contexts.of_softmax(softmax, scores_NK.size(1)).add_to(scores_NK)
        return scores_NK.log_softmax(-1)

    def log_prob(self, hidden: Tensor, contexts: NgramContexts | None = None) -> Tensor:
        hidden_ND = as_rows(hidden)
        words_NS, clusters_NC = self.root_log_prob(hidden_ND, contexts)
        leaves = (
            clusters_NC[:, c, None] + self.leaf_log_prob(hidden_ND, c, contexts) for c in range(len(self.cluster_sizes))
        )
        log_prob_NV = torch.cat([words_NS, *leaves], dim=1)
        if self.position_of_word is not None:
            log_prob_NV = log_prob_NV[:, self.position_of_word.to(log_prob_NV.device)]
        return log_prob_NV.view(*hidden.shape[:-1], self.vocab_size)

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        hidden_ND = as_rows(hidden)
        words_NS, clusters_NC = self.root_log_prob(hidden_ND)
        best_Nk, position_Nk = F.pad(words_NS, (0, max(0, k - self.shortlist)), value=-torch.inf).topk(k)
        starts = self.starts()
        # Start with the most likely cluster: after it, most other clusters can be skipped.
        for cluster in clusters_NC.exp().sum(0).argsort(descending=True).tolist():
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

    @torch.no_grad()
    def draw(self, hidden_ND: Tensor, uniform_N: Tensor, *, exclude_id: int | None = None) -> Tensor:
        """Like `OutputLayer.draw`, but computes only the clusters that were drawn.

        Rows that hit the excluded word are drawn again without it, by the position of their number within that word.
        """
        closed = exclude_id
        if exclude_id is not None and self.position_of_word is not None:
            closed = int(self.position_of_word[exclude_id])
        position_N, rest_N = self._draw(hidden_ND, uniform_N, closed=None)
        if closed is not None and len(hit_n := (position_N == closed).nonzero().squeeze(1)):
            position_N[hit_n], _ = self._draw(hidden_ND[hit_n], rest_N[hit_n], closed=closed)
        return self._words_at(position_N)

    def _draw(self, hidden_ND: Tensor, uniform_N: Tensor, *, closed: int | None) -> tuple[Tensor, Tensor]:
        """Return the drawn positions, and where each number lies within its position's share."""
        root_NR = torch.cat(self.root_log_prob(hidden_ND), dim=1)
        starts = self.starts()
        if closed is not None and closed < self.shortlist:
            root_NR[:, closed] = -torch.inf
        elif closed is not None:
            cluster = bisect_right(starts, closed) - 1
            root_NR[:, self.shortlist + cluster] += self._open(hidden_ND, cluster, closed=closed).logsumexp(1)
        position_N, rest_N = inverse_cdf(root_NR.softmax(1), uniform_N)
        cluster_N = position_N - self.shortlist
        for cluster in torch.unique(cluster_N[cluster_N >= 0]).tolist():
            rows_n = (cluster_N == cluster).nonzero().squeeze(1)
            leaf_nK = self._open(hidden_ND[rows_n], cluster, closed=closed)
            entry_n, rest_N[rows_n] = inverse_cdf(leaf_nK.softmax(1), rest_N[rows_n])
            position_N[rows_n] = starts[cluster] + entry_n
        return position_N, rest_N

    def _open(self, hidden_ND: Tensor, cluster: int, *, closed: int | None) -> Tensor:
        """Return the cluster's log-probabilities, excluding the word at position `closed` if it is in the cluster."""
        leaf_NK, start = self.leaf_log_prob(hidden_ND, cluster), self.starts()[cluster]
        if closed is not None and 0 <= closed - start < leaf_NK.size(1):
            leaf_NK[:, closed - start] = -torch.inf
        return leaf_NK

    def _words_at(self, position: Tensor) -> Tensor:
        return position if self.word_at_position is None else self.word_at_position.to(position.device)[position]
