"""Softmax cross-entropy that never stores all logits: the loss and gradient shared by all output layers.

A softmax here covers the words of one or more *segments*. Segment i scores its K_i words by multiplying its input
(N, D_i) with its weight (K_i, D_i); the logits of all segments are concatenated. The full softmax is one segment.
D-softmax has one per cluster. In a hierarchy, the root and each leaf are separate softmaxes with one segment.

The gradient of the loss with respect to the logits is softmax - onehot, which is known as soon as the logits are.
Each chunk of logits is converted to gradients while it is still in the cache, then overwritten by the next chunk. The
(N, K) matrix is split in one of two ways:

- by rows: logits, softmax in place, three matmuls. The mean's scale is multiplied into the (n, D) factors of these
  matmuls, never into the (n, K) chunk.
- by words, for wide and thin clusters, where a chunk of rows would be too large or have too few rows. Pass one computes
  the normalizer block by block; pass two recomputes each block, because an extra thin matmul is cheaper than the memory
  traffic. Without gradients, as in evaluation, pass one is enough at any width.

Nothing here calls torch.exp: on a CPU it is ten times slower when results underflow below 1e-38, as in a saturated
softmax. torch.softmax, torch.log_softmax and torch.exp2 do not slow down, and are faster anyway.

Shapes: N scored tokens, n in a chunk, D width, K words, P with padding, k in a block; `_1` is a kept dimension of
size one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output.logits import (
    RowLoss,
    aligned,
    block_words,
    chunk_rows,
    cross_entropy,
    is_wide_and_thin,
    log_softmax_in_place,
    precomputed,
    product,
    product_dtype,
    slices,
    smoothed,
    sum_dtype,
    without_autocast,
)
from lm.output.maxent import NgramScores

LOG2_E = math.log2(math.e)
Scale = float | Tensor
"""Factor of the row losses in the objective: one number, or one per row, (N, 1)."""


@dataclass(frozen=True)
class Group:
    """An independent softmax within one call: scores these rows over these words only."""

    rows: slice
    words: slice


@dataclass(frozen=True)
class LogitBias:
    """Bias added to the logits."""

    bias_K: Tensor | None = None
    private_from: int | None = None
    """Columns from this index on are visible only to rows that have them as targets; None if all are visible."""
    ngrams: NgramScores | None = None
    """N-gram scores, which differ between rows."""
    grad_K: Tensor | None = None
    """Receives the gradient of the bias; None if not needed."""

    @property
    def is_empty(self) -> bool:
        return self.bias_K is None and self.private_from is None and self.ngrams is None

    def select(self, rows: slice) -> "LogitBias":
        return self if self.ngrams is None else replace(self, ngrams=self.ngrams.select(rows))

    def add_to(self, logits_nK: Tensor, target_n1: Tensor) -> None:
        """Add bias and n-gram scores in place, and mask private columns."""
        if self.bias_K is not None:
            logits_nK.add_(self.bias_K)
        if self.ngrams is not None:
            self.ngrams.add_to(logits_nK)
        if self.private_from is not None:
            private = torch.arange(self.private_from, logits_nK.size(1), device=logits_nK.device)
            logits_nK[:, self.private_from :].masked_fill_(private != target_n1, -torch.inf)

    @property
    def needs_gradient(self) -> bool:
        return self.grad_K is not None or (self.ngrams is not None and self.ngrams.grad_L is not None)

    def add_gradient(self, grad_nK: Tensor, *, scale: Scale) -> None:
        """Accumulate the logits' gradient into the bias, and unscaled into the n-gram weights."""
        if self.grad_K is not None:
            if isinstance(scale, Tensor):
                self.grad_K.add_((grad_nK * scale).sum(0))
            else:
                self.grad_K.add_(grad_nK.sum(0), alpha=scale)
        if self.ngrams is not None:
            self.ngrams.add_gradient(grad_nK)


NO_BIAS = LogitBias()


@dataclass(frozen=True)
class Segment:
    """Input and weight in the matmul dtype, with buffers for their gradients (None if not needed)."""

    input_ND: Tensor
    weight_KD: Tensor
    grad_input_ND: Tensor | None = None
    grad_weight_KD: Tensor | None = None

    @property
    def needs_gradient(self) -> bool:
        return self.grad_input_ND is not None or self.grad_weight_KD is not None

    def select(self, group: Group) -> "Segment":
        return Segment(
            self.input_ND[group.rows],
            self.weight_KD[group.words],
            None if self.grad_input_ND is None else self.grad_input_ND[group.rows],
            None if self.grad_weight_KD is None else self.grad_weight_KD[group.words],
        )


# ---- interface for layers ------------------------------------------------------------------------------------------


def softmax_loss(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    target_N: Tensor,
    *,
    scale: float,
    bias: LogitBias = NO_BIAS,
    groups: Sequence[Group] | None = None,
    row_loss: RowLoss = cross_entropy,
) -> Tensor:
    """Sum of row losses times `scale`; targets are relative to their group's words.

    Rows and words outside all groups have loss and gradient 0.
    """
    ngrams = bias.ngrams
    tensors = bias.bias_K, None if ngrams is None else ngrams.weight_L, *inputs, *weights

    def compute(wanted: Sequence[bool]) -> tuple[Tensor, list[Tensor | None]]:
        losses_N, gradients = _losses_and_gradients(
            inputs, weights, target_N, scale=scale, bias=bias, groups=groups, row_loss=row_loss, wanted=wanted
        )
        return losses_N.sum() * scale, gradients

    return precomputed(compute, *tensors)


def softmax_losses(
    input_ND: Tensor,
    weight_KD: Tensor,
    target_N: Tensor,
    *,
    scale_N: Tensor,
    in_forward: bool,
    bias_K: Tensor | None = None,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row, and the sum weighted by `scale_N`; both are differentiable.

    If `in_forward`, gradients of the sum are computed in the forward pass. Others compute the logits again, in the
    backward pass. `torch.compile` gets plain operations, which it can trace.
    """
    if torch.compiler.is_compiling():
        logits_NK = F.linear(input_ND, weight_KD, bias_K).to(sum_dtype(input_ND))
        losses_N = F.cross_entropy(logits_NK, target_N, reduction="none", label_smoothing=smoothing)
        return losses_N, (losses_N * scale_N).sum()
    row_loss = smoothed(smoothing, len(weight_KD)) if smoothing else cross_entropy

    def compute(wanted: Sequence[bool], scale: Scale) -> tuple[Tensor, Sequence[Tensor | None]]:
        options: dict[str, Any] = {"bias": LogitBias(bias_K), "groups": None, "row_loss": row_loss, "wanted": wanted}
        return _losses_and_gradients([input_ND], [weight_KD], target_N, scale=scale, **options)

    outputs = _RowLosses.apply(compute, scale_N, in_forward, bias_K, None, input_ND, weight_KD)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], outputs)


def softmax_nll(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    target_N: Tensor,
    *,
    bias: LogitBias = NO_BIAS,
    groups: Sequence[Group] | None = None,
) -> Tensor:
    """-log softmax(logits)[target] per row, without gradients and without storing the logits."""
    options: dict[str, Any] = {"bias": bias, "groups": groups, "row_loss": log_softmax_in_place}
    return _losses_and_gradients(inputs, weights, target_N, scale=1.0, **options)[0]


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Any, scale_N: Tensor, in_forward: bool, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.compute, ctx.scale_N, ctx.wanted = compute, scale_N, ctx.needs_input_grad[3:]
        losses_N, ctx.grads = compute(ctx.wanted if in_forward else (), scale_N[:, None])
        return losses_N, (losses_N * scale_N).sum()

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor | None, grad_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        if grad_N is None and grad_sum is not None and any(grad is not None for grad in grads or ()):
            return None, None, None, *(None if grad is None else grad.mul_(grad_sum) for grad in grads)
        scale_N = torch.zeros_like(ctx.scale_N) if grad_sum is None else ctx.scale_N * grad_sum
        scale_N = scale_N if grad_N is None else scale_N + grad_N
        return None, None, None, *ctx.compute(ctx.wanted, scale_N[:, None])[1]


@torch.no_grad()
def _losses_and_gradients(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    target_N: Tensor,
    *,
    scale: Scale,
    bias: LogitBias,
    groups: Sequence[Group] | None,
    row_loss: RowLoss,
    wanted: Sequence[bool] = (),
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss of each row, and the gradients of `scale` times their sum.

    `wanted` and the gradients are ordered: bias, n-gram weights, inputs, weights; None if not wanted.
    """
    tensors, ngrams = (*inputs, *weights), bias.ngrams
    want_bias, want_ngrams, *want_tensors = wanted or [False] * (2 + len(tensors))
    grad_bias_K = torch.zeros_like(bias.bias_K) if bias.bias_K is not None and want_bias else None
    grad_ngram_L = torch.zeros_like(ngrams.weight_L) if ngrams is not None and want_ngrams else None
    bias = replace(bias, grad_K=grad_bias_K, ngrams=ngrams and replace(ngrams, grad_L=grad_ngram_L))
    # Groups skip some rows and words, and an empty batch skips all of them.
    new = torch.empty_like if groups is None and target_N.numel() else torch.zeros_like
    grads = [
        new(t, dtype=sum_dtype(t), memory_format=torch.contiguous_format) if want else None
        for t, want in zip(tensors, want_tensors, strict=True)
    ]
    # Use autocast's dtype, but float32 for groups on a CPU: each new bfloat16 matmul shape costs about a millisecond
    # there, and groups have hundreds of shapes per step.
    many_shapes = groups is not None and target_N.device.type == "cpu"
    dtype = sum_dtype(inputs[0]) if many_shapes else product_dtype(inputs[0])
    with without_autocast(target_N):
        factors, half = [t.to(dtype) for t in tensors], len(inputs)
        parts = zip(factors[:half], factors[half:], grads[:half], grads[half:], strict=True)
        segments = [Segment(*part) for part in parts]
        losses_N = _losses(segments, target_N, scale=scale, bias=bias, groups=groups, row_loss=row_loss)
    if grad_ngram_L is not None:
        grad_ngram_L.mul_(scale)
    cast_grads = [None if grad is None else grad.to(t.dtype) for grad, t in zip(grads, tensors, strict=True)]
    return losses_N, [grad_bias_K, grad_ngram_L, *cast_grads]


# ---- splitting the (N, K) matrix by rows or by words ---------------------------------------------------------------


def _losses(
    segments: Sequence[Segment],
    target_N: Tensor,
    *,
    scale: Scale,
    bias: LogitBias,
    groups: Sequence[Group] | None,
    row_loss: RowLoss,
) -> Tensor:
    """Return the loss of each row; fill in the segments' gradients of `scale` times their sum."""
    if groups is not None:
        losses_N = segments[0].input_ND.new_zeros(len(target_N), dtype=sum_dtype(segments[0].input_ND))
        for group in groups:
            chosen = [segment.select(group) for segment in segments]
            target_n = target_N[group.rows]
            part = bias.select(group.rows)
            losses_N[group.rows] = _by_rows(chosen, target_n, scale=scale, bias=part, row_loss=row_loss)
        return losses_N
    # Splitting by words is for CPU caches; on a GPU its blocks would be thousands of kernel launches.
    is_cross_entropy = row_loss in (cross_entropy, log_softmax_in_place)
    if is_cross_entropy and bias.is_empty and len(target_N) and target_N.device.type == "cpu":
        if not any(segment.needs_gradient for segment in segments):
            log_sum_N, target_logit_N = _normalizers(segments, target_N)
            return log_sum_N - target_logit_N
        if len(segments) == 1 and is_wide_and_thin(len(target_N), *segments[0].weight_KD.shape):
            return _by_words(segments[0], target_N, scale=scale)
    return _by_rows(segments, target_N, scale=scale, bias=bias, row_loss=row_loss)


def _by_rows(
    segments: Sequence[Segment], target_N: Tensor, *, scale: Scale, bias: LogitBias, row_loss: RowLoss
) -> Tensor:
    edges = list(accumulate((len(s.weight_KD) for s in segments), initial=0))
    cuts = [slice(a, b) for a, b in pairwise(edges)]
    num_weights, kind = sum(s.weight_KD.numel() for s in segments), target_N.device.type
    rows = chunk_rows(len(target_N), num_words=edges[-1], num_weights=num_weights, kind=kind)
    input_ND = segments[0].input_ND
    losses_N = input_ND.new_empty(len(target_N), dtype=sum_dtype(input_ND))
    buffer_nP = aligned(losses_N, rows, edges[-1], factors=input_ND.dtype)
    wanted = bias.needs_gradient or any(segment.needs_gradient for segment in segments)
    for chunk in slices(len(target_N), rows):
        target_n1 = target_N[chunk, None]
        padded_nP = buffer_nP[: len(target_n1)]
        padded_nP[:, edges[-1] :] = -torch.inf
        logits_nK = padded_nP[:, : edges[-1]]
        for segment, cut in zip(segments, cuts, strict=True):
            product(segment.input_ND[chunk], segment.weight_KD.t(), out=logits_nK[:, cut])
        part = bias.select(chunk)
        part.add_to(logits_nK, target_n1)
        losses_N[chunk] = row_loss(padded_nP, target_n1).squeeze(1)
        if wanted:
            scale_n = scale[chunk] if isinstance(scale, Tensor) else scale
            part.add_gradient(logits_nK, scale=scale_n)
            _add_gradients(segments, cuts, chunk, grad_nP=padded_nP, scale=scale_n)
    return losses_N


def _add_gradients(
    segments: Sequence[Segment], cuts: Sequence[slice], chunk: slice, *, grad_nP: Tensor, scale: Scale
) -> None:
    """Accumulate a chunk's gradients; `scale * grad_nP` is the gradient of its padded logits."""
    grad_nP = grad_nP.to(segments[0].input_ND.dtype)  # keeps the padding, so rows stay aligned
    for segment, cut in zip(segments, cuts, strict=True):
        if segment.grad_weight_KD is not None:
            scaled_nD = (segment.input_ND[chunk] * scale).to(segment.input_ND.dtype)
            product(grad_nP[:, cut].t(), scaled_nD, out=segment.grad_weight_KD, add=chunk.start > 0)
        if segment.grad_input_ND is not None:
            product(grad_nP[:, cut], segment.weight_KD, out=segment.grad_input_ND[chunk]).mul_(scale)


def _normalizers(segments: Sequence[Segment], target_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's log-normalizer and target logit.

    A block's logits stay in the cache, which is twice as fast on a CPU as chunks of rows.
    """
    input_ND, num_rows = segments[0].input_ND, len(target_N)
    log_sum_N = input_ND.new_full((num_rows,), -torch.inf, dtype=sum_dtype(input_ND))
    target_logit_N = torch.empty_like(log_sum_N)
    buffer, other = log_sum_N.new_empty(2, num_rows, block_words(num_rows))
    start = 0
    for segment in segments:
        for block in slices(len(segment.weight_KD), block_words(num_rows)):
            size = block.stop - block.start
            logits_Nk, log_probs_Nk = buffer[:, :size], other[:, :size]
            product(segment.input_ND, segment.weight_KD[block].t(), out=logits_Nk)
            # A block's log-normalizer is any logit minus its log-probability; torch.logsumexp is 50% slower.
            torch.log_softmax(logits_Nk, 1, out=log_probs_Nk)
            log_sum_N = torch.logaddexp(log_sum_N, logits_Nk[:, 0] - log_probs_Nk[:, 0])
            word_N = target_N - start
            logit_N = logits_Nk.gather(1, word_N.clamp(0, size - 1)[:, None]).squeeze(1)
            target_logit_N = torch.where((word_N >= 0) & (word_N < size), logit_N, target_logit_N)
            start += size
    return log_sum_N, target_logit_N


def _by_words(segment: Segment, target_N: Tensor, *, scale: Scale) -> Tensor:
    input_ND, weight_KD = segment.input_ND, segment.weight_KD
    dtype = sum_dtype(input_ND)
    log_sum_N, target_logit_N = _normalizers([segment], target_N)
    size = block_words(len(target_N))
    buffer = log_sum_N.new_empty(len(target_N) * size)
    target_weight_ND = weight_KD[target_N].to(dtype)
    grad_input_ND, grad_weight_KD = segment.grad_input_ND, segment.grad_weight_KD
    scaled_ND = (input_ND * scale).to(input_ND.dtype)
    grad_input_DN = input_ND.new_zeros(input_ND.size(1), len(target_N), dtype=dtype)
    for block in slices(len(weight_KD), size):
        # Words first: with a small D, the matmuls below are up to three times faster in this layout.
        logits_kN = buffer.view(size, len(target_N))[: block.stop - block.start]
        product(weight_KD[block], input_ND.t(), out=logits_kN)
        torch.add(log_sum_N * -LOG2_E, logits_kN, alpha=LOG2_E, out=logits_kN)
        probs_kN = logits_kN.exp2_().to(input_ND.dtype)
        if grad_weight_KD is not None:
            product(probs_kN, scaled_ND, out=grad_weight_KD[block])
        product(weight_KD[block].t(), probs_kN, out=grad_input_DN, add=True)
    if grad_weight_KD is not None:
        grad_weight_KD.index_add_(0, target_N, scaled_ND.to(dtype), alpha=-1)
    if grad_input_ND is not None:
        torch.sub(grad_input_DN.t(), target_weight_ND, out=grad_input_ND).mul_(scale)
    return log_sum_N - target_logit_N
