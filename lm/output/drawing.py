"""Drawing words: from one uniform number a word, so that a draw depends on its own number and on nothing beside it.

Shapes: N rows, K entries of a distribution.
"""

import torch
from torch import Tensor

from lm.system.errors import UserError


def entry_at(probs_NK: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulative distribution passes `uniform`, and how far into that entry, which is uniform again.

    Rows need not sum to one, and an entry of probability zero is never met. Sums over a large vocabulary need doubles.
    """
    probs_NK = probs_NK.double()
    cumulative_NK = probs_NK.cumsum(-1)
    total_N1 = cumulative_NK[:, -1:]
    # Rounding must not reach the total, behind which there is nothing but words of probability zero.
    reached_N1 = torch.minimum(uniform_N[:, None] * total_N1, total_N1.nextafter(torch.zeros_like(total_N1)))
    entry_N1 = torch.searchsorted(cumulative_NK, reached_N1, right=True)
    inside_N1 = probs_NK.gather(1, entry_N1)
    rest_N1 = (reached_N1 - (cumulative_NK.gather(1, entry_N1) - inside_N1)) / inside_N1
    return entry_N1.squeeze(1), rest_N1.squeeze(1).clamp(0, 1)


def check_sampling(*, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if temperature < 0:
        raise UserError(f"temperature must be at least 0 (0 takes the likeliest word); got {temperature}.")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k must be at least 1; got {top_k}. Leave it out to keep all words.")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p must be above 0 and at most 1; got {top_p}. Leave it out to keep all words.")
