"""Layers with one softmax over the whole vocabulary: the exact softmax (section 3.3) and its self-normalized variant.

The vocabulary is split into segments. Each segment scores its words by a linear map of a view of the hidden state. The
full softmax is one segment that sees the whole hidden state. A fixed `offset` can be added to each word's score.

The self-normalized softmax (Devlin et al. 2014; Andreas and Klein 2015) adds alpha (log Z)^2 to the loss, which keeps
the sum of the exponentiated scores near one. A score can then be used as a log-probability: scoring a word costs one
dot product instead of one per vocabulary word (`evaluate.normalize=false`). Scores are initialized to each word's
log-frequency, so log Z starts near zero.

Shapes: N scored tokens, n in a chunk, D width, V words.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from lm.config.groups import OutputConfig, Range, plugin
from lm.output.base import IGNORE_INDEX, LayerSizes, OutputLayer, Plan, as_rows, flatten
from lm.output.clusters.partition import consecutive
from lm.output.fused import LogitBias, softmax_loss, softmax_nll
from lm.output.logits import RowLoss, cross_entropy, softmax_in_place
from lm.output.maxent import NgramContexts, NgramScores, SoftmaxRows


class JointSoftmax(OutputLayer):
    """p(word | hidden) proportional to exp(score), normalized over all words."""

    offset_V: Tensor | None

    def __init__(self, *, width: int, vocab_size: int, offset: NDArray[np.float64] | None = None) -> None:
        super().__init__(width=width, vocab_size=vocab_size)
        # Not saved in checkpoints, because it is derived from the counts.
        self.register_buffer("offset_V", None if offset is None else torch.from_numpy(offset), persistent=False)

    def views(self, hidden_ND: Tensor) -> Sequence[Tensor]:
        """Return each segment's view of the hidden state, (N, D_i); the full hidden state by default."""
        return [hidden_ND]

    @abstractmethod
    def weights(self) -> Sequence[Tensor]:
        """Return each segment's word vectors, (K_i, D_i); segments are in word-id order."""

    def rows_by_word(self) -> list[tuple[Tensor, list[int]]] | None:
        return consecutive(self.weights())

    def row_loss(self, plan: Plan) -> RowLoss:
        """Return the loss applied to each token's scores."""
        return cross_entropy

    def plan(self, targets: Tensor, *, generator: torch.Generator | None = None) -> Plan:
        self.check_range(targets)
        return Plan.of(targets)

    def softmax_rows(self, plan: Plan) -> list[SoftmaxRows]:
        rows_N = torch.arange(plan.num_scored, device="cpu") if plan.rows_N is None else plan.rows_N
        zeros_N = torch.zeros_like(rows_N)
        return [SoftmaxRows(rows_N, zeros_N, zeros_N + self.vocab_size)]

    def loss(
        self, hidden: Tensor, targets: Tensor, plan: Plan | None = None, ngrams: Sequence[NgramScores] = ()
    ) -> Tensor:
        plan = plan or self.plan(targets.cpu()).to(targets.device)
        hidden_ND, target_N = flatten(hidden, targets)
        weights, target_N, bias = self.candidates(plan, target_N, ngrams[0] if ngrams else None)
        views, row_loss = self.views(plan.scored(hidden_ND)), self.row_loss(plan)
        return softmax_loss(views, weights, target_N, scale=plan.scale, bias=bias, row_loss=row_loss)

    def candidates(
        self, plan: Plan, target_N: Tensor, ngrams: NgramScores | None
    ) -> tuple[Sequence[Tensor], Tensor, LogitBias]:
        """Return the words scored in a training step: their vectors, the target indices among them, and their bias."""
        return self.weights(), plan.scored(target_N), self._bias(ngrams)

    @torch.no_grad()
    def nll(self, hidden: Tensor, targets: Tensor, contexts: NgramContexts | None = None) -> Tensor:
        # Unscored targets are replaced by a valid word id and masked afterwards, so evaluation never synchronizes.
        ignored = targets == IGNORE_INDEX
        target_N = targets.masked_fill(ignored, 0).flatten()
        bias = self._bias(None if contexts is None else contexts.of_softmax(0, self.vocab_size))
        nll_N = softmax_nll(self.views(as_rows(hidden)), self.weights(), target_N, bias=bias)
        return nll_N.view(targets.shape).masked_fill(ignored, 0)

    def assumed_log_z(self) -> Tensor | float:
        """Log-normalizer that a `self_normalized` layer is trained to have."""
        return 0.0

    @torch.no_grad()
    def unnormalized_nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """For `self_normalized` layers: log Z minus the target's score, 0 if ignored; reads one row per token."""
        ignored = targets == IGNORE_INDEX
        target_N = targets.masked_fill(ignored, 0).flatten()
        (view_ND,), (weight_VD,) = self.views(as_rows(hidden)), self.weights()
        score_N = (view_ND * weight_VD[target_N]).sum(-1)
        if self.offset_V is not None:
            score_N = score_N + self.offset_V[target_N].to(score_N.dtype)
        return (self.assumed_log_z() - score_N).view(targets.shape).masked_fill(ignored, 0)

    def log_prob(self, hidden: Tensor, contexts: NgramContexts | None = None) -> Tensor:
        views = self.views(as_rows(hidden))
        scores_NV = torch.cat([F.linear(x, w) for x, w in zip(views, self.weights(), strict=True)], dim=-1)
        if self.offset_V is not None:
            scores_NV = scores_NV + self.offset_V.to(scores_NV.dtype)
        if contexts is not None:
            contexts.of_softmax(0, self.vocab_size).add_to(scores_NV)
        return scores_NV.log_softmax(-1).view(*hidden.shape[:-1], self.vocab_size)

    def _bias(self, ngrams: NgramScores | None) -> LogitBias:
        offset_V = None if self.offset_V is None else self.offset_V.to(self.weights()[0].dtype)
        return LogitBias(offset_V, ngrams=ngrams)


@dataclass
class FullConfig(OutputConfig):
    """Exact softmax over the whole vocabulary."""

    name: str = "full"
    supports_maxent = True


@plugin("output", "full", FullConfig)
class FullSoftmax(JointSoftmax):
    """p(word | hidden) proportional to exp(weight[word] . hidden)."""

    def __init__(self, *, width: int, vocab_size: int, **options: Any) -> None:
        super().__init__(width=width, vocab_size=vocab_size, **options)
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.reset_parameters()

    def weights(self) -> list[Tensor]:
        return [self.weight]

    def word_vectors(self) -> list[Tensor]:
        return [self.weight]


@dataclass
class SelfNormalizedConfig(OutputConfig):
    """Full softmax trained so that its scores need no normalizer."""

    name: str = "self_normalized"
    alpha: Annotated[float, Range(least=0)] = 1.0
    """Weight of (log Z)^2 in the loss: larger values keep log Z closer to zero but hurt perplexity."""


@plugin("output", "self_normalized", SelfNormalizedConfig)
class SelfNormalizedSoftmax(FullSoftmax):
    """Full softmax with a penalty that keeps log Z near zero."""

    self_normalized = True

    def __init__(self, *, counts: NDArray[Any], alpha: float, **options: Any) -> None:
        super().__init__(vocab_size=len(counts), offset=log_unigram(counts), **options)
        self.alpha = alpha

    @classmethod
    def build(cls, settings: SelfNormalizedConfig, sizes: LayerSizes) -> "SelfNormalizedSoftmax":
        return cls(width=sizes.width, counts=sizes.counts, alpha=settings.alpha)

    def row_loss(self, plan: Plan) -> RowLoss:
        def penalized(logits_nP: Tensor, target_n1: Tensor) -> Tensor:
            score_n1 = logits_nP.gather(1, target_n1)
            nll_n1 = softmax_in_place(logits_nP, target_n1)
            log_z_n1 = nll_n1 + score_n1
            logits_nP.mul_(1 + 2 * self.alpha * log_z_n1)
            logits_nP.scatter_add_(1, target_n1, logits_nP.new_full(target_n1.shape, -1))
            return nll_n1 + self.alpha * log_z_n1**2

        return penalized


def log_unigram(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Log-frequency of each word; words with count 0 are treated as seen once."""
    weights = np.maximum(np.asarray(counts, dtype=np.float64), 1)
    return np.asarray(np.log(weights / weights.sum()))
