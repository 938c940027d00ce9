"""What `what=clusters` measures on: counts, sizes, and the cost model whose predictions are put to the test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm.benchmark.candidates import Workload, prepare
from lm.benchmark.measure import interleaved_medians
from lm.output.clusters.choice import ClusterChoice, choose, predict
from lm.output.clusters.cost_model import CostModel
from lm.output.clusters.settings import Objective

HEAD_COVERAGE = 0.75
"""As `conf/output/adaptive.yaml` ships it."""


@dataclass(frozen=True)
class Bench:
    """What is measured on, and the model that predicts it."""

    counts: NDArray[np.int64]
    width: int
    tokens: int
    repeats: int
    model: CostModel

    def choose(self, num_tails: int | None = None, *, objective: Objective = Objective.as_built) -> ClusterChoice:
        return choose(
            self.counts,
            width=self.width,
            tokens=self.tokens,
            model=self.model,
            num_tails=num_tails,
            objective=objective,
            head_coverage=HEAD_COVERAGE,
        )

    def predict(self, cutoffs: Sequence[int]) -> ClusterChoice:
        return predict(cutoffs, counts=self.counts, width=self.width, tokens=self.tokens, model=self.model)

    def measure(self, choices: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """Seconds of a training step of the layer with each of these cutoffs."""
        steps = {}
        for name, cutoffs in choices.items():
            _, steps[name] = prepare("adaptive", Workload(self.counts, list(cutoffs), self.width, self.tokens))
        return interleaved_medians(steps, repeats=self.repeats)
