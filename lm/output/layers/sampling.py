"""Layers trained on a sample of the vocabulary. Evaluation and inference are exact over the whole vocabulary.

Each step draws S words with replacement from a distribution q, once for the whole batch. A step reads and updates only
sampled and target rows, so the word vectors are stored in a `SparseTable`.

- `sampled`: sampled softmax (importance sampling; "sampling" in section 5). Each distinct sampled word counts once. A
  word is sampled with probability 1 - (1 - q)^S; the log of that is subtracted from its logit, so the sampled sum
  estimates the full sum. The target is always included, once. As S grows, the loss approaches the full softmax's.
- `nce`: noise-contrastive estimation (Gutmann and Hyvärinen 2010; Mnih and Teh 2012). The score s is used as a
  log-probability up to one constant, p(word) = exp(s - log Z). Each target is distinguished from the step's S noise
  words by P(not noise) = sigmoid(s - log Z - log(S q)). Scores are initialized to the word's log-frequency plus log Z,
  so the model starts out normalized; `evaluate.normalize=false` skips the normalizer.
- `blackout`: BlackOut (Ji et al. 2015). A softmax over the target and the draws, weighted by 1/q, is trained to tell
  them apart. A word that was drawn several times counts several times:

      p~(word) = exp(s) / q, divided by its sum over the target and all draws other than the target,
      loss = -log p~(target) - sum over these draws of log(1 - p~(draw)).

Shapes: N scored tokens, n in a chunk, D width, V words, S draws, U rows in a step: first the sample, then targets that
were not drawn.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from lm.config.groups import OutputConfig, Range, plugin
from lm.optim.sparse_table import SparseTable
from lm.output.base import IGNORE_INDEX, Description, LayerSizes, Plan
from lm.output.fused import LogitBias
from lm.output.layers.full import JointSoftmax, log_unigram
from lm.output.logits import RowLoss, softmax_in_place
from lm.output.maxent import NgramScores
from lm.system.jit import compiled

Floats = NDArray[np.float64]
Sampler = Literal["unigram", "power", "log_uniform"]
COLUMN = np.dtype([("keep", np.float32), ("alias", np.int32)])
"""Column w of the alias table: word w with probability `keep`, otherwise word `alias`."""


@dataclass
class SamplingConfig(OutputConfig):
    """Layers trained on a sample of the vocabulary."""

    sample_fraction: Annotated[float, Range(above=0, most=1)] = 0.2
    """Draws per step, as a fraction of the vocabulary; the paper uses 0.2."""
    sampler: Sampler = "unigram"
    """Draw words by count (`unigram`), by count raised to `power`, or `log_uniform` in their rank."""
    power: Annotated[float, Range(least=0, most=1)] = 0.75
    """Exponent of the counts for `sampler=power`: 0 is uniform, 1 is `unigram`."""


def sampling_distribution(counts: NDArray[Any], *, sampler: Sampler, power: float) -> NDArray[np.float64]:
    """Return q for each word; never zero, because words with count 0 can also be targets."""
    if sampler == "log_uniform":
        ranks = np.arange(len(counts), dtype=np.float64)
        return np.asarray(np.log1p(1 / (ranks + 1)) / np.log(len(counts) + 1))
    weights = np.maximum(np.asarray(counts, dtype=np.float64), 1) ** (1 if sampler == "unigram" else power)
    return np.asarray(weights / weights.sum())


@dataclass(frozen=True)
class SamplingPlan(Plan):
    """A step's sample, and the targets' positions in it."""

    rows_U: Tensor
    """Distinct word ids: the sampled ones, then targets that were not sampled."""
    times_U: Tensor
    """How often each word was drawn."""
    bias_U: Tensor
    """Bias added to the scores."""
    column_N: Tensor
    """Index of each target in `rows_U`."""
    num_drawn: int


class SampledLayer(JointSoftmax):
    """Full-softmax scores, trained only on sampled and target rows."""

    def __init__(
        self,
        settings: SamplingConfig,
        *,
        width: int,
        counts: NDArray[Any],
        offset: NDArray[np.float64] | None = None,
        sparse: bool = False,
    ) -> None:
        super().__init__(width=width, vocab_size=len(counts), offset=offset)
        self.num_samples = max(1, round(settings.sample_fraction * len(counts)))
        self.table = SparseTable(len(counts), width, sparse=sparse)
        # Kept on the host, where plans are made, regardless of the default device.
        probability_V = sampling_distribution(counts, sampler=settings.sampler, power=settings.power)
        self.probability_V = torch.from_numpy(probability_V)
        self.alias_table = alias_table(probability_V)
        self.reset_parameters()

    @classmethod
    def build(cls, settings: Any, sizes: LayerSizes) -> "SampledLayer":
        return cls(settings, width=sizes.width, counts=sizes.counts, sparse=sizes.sparse)

    @abstractmethod
    def bias(self, rows_U: Tensor, times_U: Tensor) -> Tensor:
        """Compute the score bias for a step's rows on the host; `times_U` is how often each was drawn."""

    def weights(self) -> list[Tensor]:
        return [self.table.weight]

    def plan(self, targets: Tensor, *, generator: torch.Generator | None = None) -> SamplingPlan:
        self.check_range(targets)
        target_N = targets[targets != IGNORE_INDEX].numpy()
        uniform_S = torch.rand(self.num_samples, generator=generator, dtype=torch.float64, device="cpu")
        sample, times, index_V = draw(uniform_S.numpy(), self.alias_table)
        column_N = index_V[target_N].astype(np.int64)
        missed, index = np.unique(target_N[column_N < 0], return_inverse=True)
        column_N[column_N < 0] = len(sample) + index
        rows_U = torch.from_numpy(np.concatenate([sample, missed]))
        times_U = torch.from_numpy(np.concatenate([times, np.zeros_like(missed)]))
        return SamplingPlan.of(
            targets,
            rows_U=rows_U,
            times_U=times_U,
            bias_U=self.bias(rows_U, times_U),
            column_N=torch.from_numpy(column_N),
            num_drawn=len(sample),
        )

    def plans(
        self, targets_TB: Tensor, groups: Sequence[slice], *, generator: torch.Generator | None = None
    ) -> tuple[SamplingPlan, ...]:
        whole = self.plan(targets_TB, generator=generator)
        scored_TB = targets_TB != IGNORE_INDEX
        column_TB = torch.zeros_like(targets_TB).masked_scatter_(scored_TB, whole.column_N)
        parts = []
        for group in groups:
            part = Plan.of(targets_TB[:, group])
            column_N = column_TB[:, group][scored_TB[:, group]]
            parts.append(replace(whole, num_scored=part.num_scored, rows_N=part.rows_N, column_N=column_N))
        return tuple(parts)

    def logit_bias(self, plan: SamplingPlan, *, dtype: torch.dtype) -> LogitBias:
        """Return each row's bias; targets that were not drawn are visible only to tokens with that target."""
        return LogitBias(plan.bias_U.to(dtype), private_from=plan.num_drawn)

    def candidates(
        self, plan: Plan, target_N: Tensor, ngrams: NgramScores | None
    ) -> tuple[list[Tensor], Tensor, LogitBias]:
        assert isinstance(plan, SamplingPlan)
        weight_UD = self.table(plan.rows_U, plan.rows_U)
        return [weight_UD], plan.column_N, self.logit_bias(plan, dtype=weight_UD.dtype)

    def describe(self, counts: NDArray[Any] | None = None) -> Description:
        return super().describe(counts) | {"samples": self.num_samples}


# ---- sampling with Walker's alias method (Vose's variant) -----------------------------------------------------------
#
# Each table column is equally likely and holds at most two words, so a draw costs one lookup at any vocabulary size.
# Columns are compact because lookups dominate the time.


def alias_table(probability_V: Floats) -> NDArray[Any]:
    """Build the alias table of a distribution over V words, for `draw`."""
    columns_V = np.empty(len(probability_V), COLUMN)
    columns_V["keep"], columns_V["alias"] = _build(probability_V / probability_V.sum() * len(probability_V))
    return columns_V


@compiled
def _build(share_V: Floats) -> Any:
    keep, alias = share_V.copy(), np.arange(len(share_V))
    small, large = np.empty(len(keep), np.int64), np.empty(len(keep), np.int64)
    num_small = num_large = 0
    for word in range(len(keep)):
        if keep[word] < 1:
            small[num_small] = word
            num_small += 1
        else:
            large[num_large] = word
            num_large += 1
    while num_small and num_large:
        num_small -= 1
        needs, gives = small[num_small], large[num_large - 1]
        alias[needs] = gives
        keep[gives] -= 1 - keep[needs]
        if keep[gives] < 1:
            num_large -= 1
            small[num_small] = gives
            num_small += 1
    for i in range(num_small):  # these equal 1 up to rounding
        keep[small[i]] = 1
    return keep, alias


@compiled
def draw(uniform_S: Floats, columns_V: NDArray[Any]) -> Any:
    """Map uniform samples to words; return (sorted distinct words, draws of each, index of each word or -1)."""
    vocab_size, num_draws = len(columns_V), len(uniform_S)
    index_V = np.zeros(vocab_size, np.int32)  # first used to count draws
    for i in range(num_draws):
        position = uniform_S[i] * vocab_size
        word = min(int(position), vocab_size - 1)  # rounding may reach the end
        column = columns_V[word]
        index_V[word if position - word < column.keep else column.alias] += 1
    words_U, times_U = np.empty(min(vocab_size, num_draws), np.int64), np.empty(min(vocab_size, num_draws), np.int64)
    num_words = 0
    for word in range(vocab_size):
        times = index_V[word]
        index_V[word] = -1
        if times:
            words_U[num_words], times_U[num_words], index_V[word] = word, times, num_words
            num_words += 1
    return words_U[:num_words], times_U[:num_words], index_V


@plugin("output", "sampled", SamplingConfig)
class SampledSoftmax(SampledLayer):
    """Full softmax trained on samples."""

    def __init__(self, settings: SamplingConfig, **sizes: Any) -> None:
        super().__init__(settings, **sizes)
        with np.errstate(divide="ignore"):  # log(1 - 1) for a word that is always drawn
            inclusion = -np.expm1(self.num_samples * np.log1p(-self.probability_V.numpy()))
        self.correction_V = torch.from_numpy(-np.log(inclusion))

    def bias(self, rows_U: Tensor, times_U: Tensor) -> Tensor:
        return self.correction_V[rows_U]


@dataclass
class NCEConfig(SamplingConfig):
    """Noise-contrastive estimation, exact in evaluation."""

    name: str = "nce"
    log_z: Literal["learned"] | float = 0.0
    """Log-normalizer of the scores: a number, or `learned`."""


@plugin("output", "nce", NCEConfig)
class NCE(SampledLayer):
    """Scores trained to be log-probabilities, with one logistic regression per sampled word."""

    self_normalized = True

    def __init__(self, settings: NCEConfig, *, counts: NDArray[Any], **sizes: Any) -> None:
        fixed = 0.0 if settings.log_z == "learned" else settings.log_z
        start = log_unigram(counts) + fixed  # starts out normalized
        super().__init__(settings, counts=counts, offset=start, **sizes)
        self.log_z = nn.Parameter(torch.zeros(1)) if settings.log_z == "learned" else fixed
        self.bias_V = torch.from_numpy(start) - (self.num_samples * self.probability_V).log()

    def assumed_log_z(self) -> Tensor | float:
        return self.log_z

    def bias(self, rows_U: Tensor, times_U: Tensor) -> Tensor:
        return self.bias_V[rows_U]

    def logit_bias(self, plan: SamplingPlan, *, dtype: torch.dtype) -> LogitBias:
        return LogitBias(plan.bias_U.to(dtype) - self.log_z)

    def row_loss(self, plan: Plan) -> RowLoss:
        assert isinstance(plan, SamplingPlan)
        times_U = plan.times_U.to(self.table.weight.dtype)

        def contrastive(logits_nP: Tensor, target_n1: Tensor) -> Tensor:
            logits_nU = logits_nP[:, : len(times_U)]
            target_logit_n1 = logits_nU.gather(1, target_n1)
            noise_n1 = (F.softplus(logits_nU) @ times_U)[:, None]
            logits_nU.sigmoid_().mul_(times_U)
            logits_nU.scatter_add_(1, target_n1, target_logit_n1.sigmoid() - 1)
            return noise_n1 + F.softplus(-target_logit_n1)

        return contrastive


MIN_REST = 1e-5
"""Lower bound on 1 - p~(draw); its log would be rounding error below this. The target term keeps its gradient."""


@dataclass
class BlackOutConfig(SamplingConfig):
    """BlackOut: discriminative training on a weighted sample, exact in evaluation."""

    name: str = "blackout"
    sampler: Sampler = "power"
    power: Annotated[float, Range(least=0, most=1)] = 0.4


@plugin("output", "blackout", BlackOutConfig)
class BlackOut(SampledLayer):
    """Full-softmax scores, trained to distinguish the target from a weighted sample."""

    def bias(self, rows_U: Tensor, times_U: Tensor) -> Tensor:
        # One column represents all draws of its word.
        return times_U.double().clamp(min=1).log() - self.probability_V[rows_U].log()

    def row_loss(self, plan: Plan) -> RowLoss:
        assert isinstance(plan, SamplingPlan)
        times_U = plan.times_U.clamp(min=1).to(self.table.weight.dtype)

        def discriminative(logits_nP: Tensor, target_n1: Tensor) -> Tensor:
            # The target counts once, no matter how often it was drawn.
            logits_nP.scatter_add_(1, target_n1, -times_U.log()[target_n1])
            loss_n1 = softmax_in_place(logits_nP, target_n1)
            probs_nU = logits_nP[:, : len(times_U)]
            # 1 - p~ of each draw; 1 for the target, which is not a draw.
            one_minus_p_nU = (1 - probs_nU / times_U).scatter_(1, target_n1, 1.0).clamp_(min=MIN_REST)
            loss_n1 -= (one_minus_p_nU.log() @ times_U)[:, None]
            # d loss / d p~ of the draws, times p~; 0 for the target and for clamped draws.
            grad_scale_nU = (
                (probs_nU / one_minus_p_nU).masked_fill_(one_minus_p_nU <= MIN_REST, 0).scatter_(1, target_n1, 0.0)
            )
            probs_nU.mul_(1 - grad_scale_nU.sum(1, keepdim=True)).add_(grad_scale_nU)
            probs_nU.scatter_add_(1, target_n1, probs_nU.new_full(target_n1.shape, -1))
            return loss_n1

        return discriminative
