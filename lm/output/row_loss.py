"""Losses of a row of logits: what a chunk of logits is turned into while it is still in the cache.

Shapes: n rows of a chunk, K words, P with padding; `_1` marks a kept dimension of size one.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

InPlace = Callable[[Tensor, Tensor], Tensor]
"""(logits_nP, target_n1): each row's loss, (n, 1); overwrites the logits. Padding holds -inf."""
SoftmaxInPlace = InPlace
"""Signature of `softmax_in_place`."""


def softmax_in_place(logits_nP: Tensor, target_n1: Tensor) -> Tensor:
    """Each row's cross-entropy, (n, 1); the logits become probabilities."""
    score_n1 = logits_nP.gather(1, target_n1)
    largest_n1 = logits_nP.amax(1, keepdim=True)
    torch.softmax(logits_nP, 1, out=logits_nP)
    # The largest logit less its log-probability is the normaliser; no other's is sure not to have become zero.
    return largest_n1 - logits_nP.amax(1, keepdim=True).log() - score_n1


def log_softmax_in_place(logits_nP: Tensor, target_n1: Tensor) -> Tensor:
    """The same; the logits become log-probabilities, which takes a pass less where nobody wants the gradient."""
    return -torch.log_softmax(logits_nP, 1, out=logits_nP).gather(1, target_n1)


class RowLoss(NamedTuple):
    """A loss of each row of logits, in two forms that agree."""

    in_place: InPlace
    """The logits become the loss's gradient with respect to them."""
    plain: Callable[[Tensor, Tensor], Tensor]
    """(logits_nK, target_n1): each row's loss, (n, 1), for autograd."""
    is_cross_entropy: bool = False
    """Whether it is -log softmax(logits)[target], which can also be computed block of words by block of words."""


def cross_entropy(softmax: SoftmaxInPlace = softmax_in_place) -> RowLoss:
    """-log softmax(logits)[target]."""

    def in_place(logits_nP: Tensor, target_n1: Tensor) -> Tensor:
        loss_n1 = softmax(logits_nP, target_n1)
        logits_nP.scatter_add_(1, target_n1, logits_nP.new_full(target_n1.shape, -1))  # softmax - onehot
        return loss_n1

    return RowLoss(in_place, _plain_cross_entropy, is_cross_entropy=True)


def _plain_cross_entropy(logits_nK: Tensor, target_n1: Tensor) -> Tensor:
    return F.cross_entropy(logits_nK, target_n1[:, 0], reduction="none")[:, None]


CROSS_ENTROPY = cross_entropy()
CROSS_ENTROPY_VALUE = RowLoss(log_softmax_in_place, _plain_cross_entropy, is_cross_entropy=True)
"""The same where nobody wants the gradient: `in_place` leaves log-probabilities behind."""
