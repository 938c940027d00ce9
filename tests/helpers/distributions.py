"""Reference distributions for sampling, and a goodness-of-fit test."""

import torch
from torch import Tensor


def defined_distribution(
    log_prob: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    exclude_id: int | None = None,
) -> Tensor:
    """The distribution `sample` must draw from: exclude, temper, truncate, renormalize."""
    probs = (log_prob / temperature).softmax(0)
    if exclude_id is not None:
        probs[exclude_id] = 0
        probs /= probs.sum()
    kept = probs.argsort(descending=True)[:top_k]
    probs = torch.zeros_like(probs).index_copy(0, kept, probs[kept] / probs[kept].sum())
    if top_p is not None:
        kept = kept[: int((probs[kept].cumsum(0) < top_p).sum()) + 1]
        probs = torch.zeros_like(probs).index_copy(0, kept, probs[kept])
    return probs / probs.sum()


def chi_square(found: Tensor, probs: Tensor, num_draws: int) -> float:
    """Return the chi-square p-value (Wilson-Hilferty approximation), pooling rare words."""
    expected = probs * num_draws
    common = expected >= 5
    found = torch.cat([found[common], found[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    keep = expected > 0
    assert not found[~keep].any(), "a word was drawn whose probability is 0"
    statistic, freedom = ((found - expected)[keep] ** 2 / expected[keep]).sum(), max(1, int(keep.sum()) - 1)
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    return float(1 - torch.special.ndtr(z))
