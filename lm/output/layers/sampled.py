"""The sampled softmax (importance sampling; "sampling" in section 5): trained against a sample of the vocabulary.

Each step draws S words from the unigram distribution q with replacement and keeps the distinct ones for the whole
batch. A word is among them with probability 1 - (1 - q)^S; its logit is lowered by the log of that, so that the sampled
sum is an estimate of the full one. The target always takes part; where it was also drawn it counts once. As S grows the
loss becomes the full softmax's. Evaluation and inference are exact over the whole vocabulary.

A step reads and changes only the rows of the sample and of the targets, so the word vectors are a `SparseTable`.

Shapes: N scored tokens, D width, V words, U rows of a step: the sample first, then the targets it missed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from lm.config.groups import OutputConfig
from lm.config.registry import plugin
from lm.config.rules import Range
from lm.data.plan import Plan
from lm.optim.sparse_table import SparseTable
from lm.output.base import IGNORE_INDEX, Description, LayerSizes, SoftmaxSize, plan_scored, scored
from lm.output.fused import Columns, softmax_loss
from lm.output.joint import JointSoftmax
from lm.output.row_loss import cross_entropy
from lm.system.errors import UserError


@dataclass
class SampledConfig(OutputConfig):
    """Softmax trained against a sample of the vocabulary, exact in evaluation."""

    sample_fraction: Annotated[float, Range(above=0, most=1)] = 0.2
    """Draws per step, as a fraction of the vocabulary; the paper's is 0.2."""


@plugin("output", "sampled", SampledConfig)
class SampledSoftmax(JointSoftmax):
    """The full softmax, trained on samples."""

    def __init__(
        self,
        *,
        width: int,
        counts: np.ndarray,
        num_samples: int,
        fused: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(width=width, vocab_size=len(counts), fused=fused)
        if num_samples < 1:
            raise UserError(
                f"the sampled softmax needs at least 1 sample; got {num_samples}. Try output.sample_fraction=0.2"
            )
        self.num_samples = num_samples
        self.table = SparseTable(len(counts), width)
        # A word that was never seen can still be a target; its correction must be finite.
        unigram = np.maximum(np.asarray(counts, dtype=np.float64), 1)
        unigram /= unigram.sum()
        with np.errstate(divide="ignore"):  # a word that is always drawn: log(1 - 1)
            inclusion = -np.expm1(num_samples * np.log1p(-unigram))
        # Kept on the host, where the plan is made, whatever the default device is.
        self.cumulative_V = torch.from_numpy(np.cumsum(unigram))
        self.correction_V = torch.from_numpy(-np.log(inclusion))
        self.reset_parameters(generator)

    @classmethod
    def build(cls, settings: SampledConfig, sizes: LayerSizes) -> "SampledSoftmax":
        num_samples = max(1, round(settings.sample_fraction * len(sizes.counts)))
        return cls(
            width=sizes.width,
            counts=sizes.counts,
            num_samples=num_samples,
            fused=settings.fused,
            generator=sizes.generator,
        )

    def views(self, hidden_ND: Tensor) -> list[Tensor]:
        return [hidden_ND]

    def weights(self) -> list[Tensor]:
        return [self.table.weight]

    def plan(self, targets: Tensor, *, generator: torch.Generator | None = None) -> Plan:
        self.check_range(targets)
        plan = plan_scored(targets)
        target_N = targets.flatten()
        target_N = target_N[plan.tensors["rows"]] if "rows" in plan.tensors else target_N
        draws = torch.rand(self.num_samples, generator=generator, dtype=torch.float64, device="cpu")
        sample = torch.unique(torch.searchsorted(self.cumulative_V, draws).clamp_(max=self.vocab_size - 1))
        missed = torch.from_numpy(np.setdiff1d(target_N.numpy(), sample.numpy()))
        drawn_N = torch.isin(target_N, sample)
        column_N = torch.where(
            drawn_N, torch.searchsorted(sample, target_N), len(sample) + torch.searchsorted(missed, target_N)
        )
        rows_U = torch.cat([sample, missed])
        tensors = {"words": rows_U, "column": column_N, "bias": self.correction_V[rows_U]}
        return Plan(plan.tensors | tensors, (*plan.counts, len(sample)))

    def plans(
        self, targets_TB: Tensor, groups: Sequence[slice], *, generator: torch.Generator | None = None
    ) -> tuple[Plan, ...]:
        whole = self.plan(targets_TB, generator=generator)
        scored_TB = targets_TB != IGNORE_INDEX
        column_TB = torch.zeros_like(targets_TB).masked_scatter_(scored_TB, whole.tensors["column"])
        parts = []
        for group in groups:
            scored_part = plan_scored(targets_TB[:, group])
            column_N = column_TB[:, group][scored_TB[:, group]]
            tensors = whole.tensors | scored_part.tensors | {"column": column_N}
            parts.append(Plan(tensors, (*scored_part.counts, *whole.counts[1:])))
        return tuple(parts)

    def loss(self, hidden: Tensor, targets: Tensor, plan: Plan | None = None) -> Tensor:
        plan = plan or self.plan(targets.cpu()).to(targets.device)
        num_scored, num_drawn = plan.counts
        hidden_ND, _ = scored(hidden, targets, plan=plan)
        weight_UD = self.table(plan.tensors["words"], plan.tensors["words"])
        columns = Columns(plan.tensors["bias"].to(weight_UD.dtype), shared=num_drawn)
        return softmax_loss(
            [hidden_ND],
            [weight_UD],
            plan.tensors["column"],
            scale=1 / max(1, num_scored),
            columns=columns,
            fused=self.fused,
            row_loss=cross_entropy(self.softmax_in_place),
        )

    def softmaxes(self, num_tokens: int, num_targets: int) -> list[SoftmaxSize]:
        words = min(self.vocab_size, self.num_samples + num_targets)
        return [SoftmaxSize(num_tokens, words, words * self.width)]

    def gathered(self, num_targets: int) -> int:
        return 2 * min(self.vocab_size, self.num_samples + num_targets) * self.width

    def describe(self) -> Description:
        return super().describe() | {"samples": self.num_samples}
