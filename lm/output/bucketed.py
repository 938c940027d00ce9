"""Score many small classes in a few batched matmuls. On a GPU, kernel launches cost more than padding.

Looping over classes, as on a CPU, would launch thousands of kernels per step. Here, classes of similar size share a
bucket, and each class's tokens are split into small tiles. A bucket is one batch of tiles, padded to its largest class
and to whole tiles. Padding contributes no loss and no gradient.

Shapes: M tokens sorted by class, D width, V words in class order, C classes, G tiles in a bucket, T tokens in a tile,
K words in a bucket's largest class, rounded up for alignment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.output.logits import batched_product, cross_entropy, precomputed, product_dtype, sum_dtype, without_autocast

MAX_BUCKETS = 8
TILE = 16
"""Tokens per tile; most classes need one tile per batch."""
ALIGNED = 8
"""Class sizes are padded to a multiple of this, to align bfloat16 rows for tensor cores."""


@dataclass(frozen=True)
class Bucket:
    """Tiles of similarly sized classes."""

    max_words: int
    rows_GT: Tensor
    """Tokens of each tile; arbitrary tokens as padding."""
    used_GT: Tensor
    """1.0 for real tokens, 0.0 for padding."""
    first_G: Tensor
    """First word of each tile's class."""
    size_G: Tensor
    """Number of words in each tile's class."""


def bucket_sizes(class_sizes: Sequence[int]) -> NDArray[np.int64]:
    """Return each class's padded size; bucket boundaries are geometrically spaced."""
    sizes = np.asarray(class_sizes)
    edges = np.geomspace(max(2, sizes.min()), max(2, sizes.max()), MAX_BUCKETS + 1)[1:-1]
    bucket_C = np.searchsorted(edges, sizes)
    largest = np.zeros(MAX_BUCKETS, np.int64)
    np.maximum.at(largest, bucket_C, -(-sizes // ALIGNED) * ALIGNED)
    return np.asarray(largest[bucket_C])


def make_buckets(padded_C: NDArray[np.int64], sizes: Sequence[int], counts: Sequence[int]) -> tuple[Bucket, ...]:
    """Build the buckets on the host for a batch with `counts[c]` tokens in class c."""
    sizes_C, counts_C = np.asarray(sizes), np.asarray(counts)
    starts_C, rows_C = np.cumsum(sizes_C) - sizes_C, np.cumsum(counts_C) - counts_C
    buckets = []
    for words in np.unique(padded_C):
        classes = np.flatnonzero((padded_C == words) & (counts_C > 0) & (sizes_C > 1))  # one-word classes have loss 0
        if not len(classes):
            continue
        tiles = -(-counts_C[classes] // TILE)
        class_G = np.repeat(classes, tiles)
        tile_G = np.arange(len(class_G)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        inside_GT = tile_G[:, None] * TILE + np.arange(TILE)
        used_GT = inside_GT < counts_C[class_G, None]
        rows_GT = np.where(used_GT, rows_C[class_G, None] + inside_GT, 0)
        parts = (rows_GT, used_GT.astype(np.float32), starts_C[class_G], sizes_C[class_G])
        buckets.append(Bucket(int(words), *map(torch.from_numpy, parts)))
    return tuple(buckets)


def bucketed_loss(
    input_MD: Tensor, weight_VD: Tensor, target_M: Tensor, buckets: Sequence[Bucket], *, scale: float
) -> Tensor:
    """Sum of each token's cross-entropy over its class's words, times `scale`."""

    @torch.no_grad()
    def compute(_: Sequence[bool]) -> tuple[Tensor, list[Tensor]]:
        dtype, wide = product_dtype(input_MD), sum_dtype(input_MD)
        grad_MD, grad_VD = (torch.zeros_like(t, dtype=wide) for t in (input_MD, weight_VD))
        loss = torch.zeros((), dtype=wide, device=input_MD.device)
        with without_autocast(input_MD):
            factors = input_MD.to(dtype), weight_VD.to(dtype)
            for bucket in buckets:
                loss += _add_bucket(*factors, target_M, bucket, grad_MD, grad_VD, scale=scale)
        return loss * scale, [grad_MD.to(input_MD.dtype), grad_VD.to(weight_VD.dtype)]

    return precomputed(compute, input_MD, weight_VD)


def _add_bucket(
    input_MD: Tensor,
    weight_VD: Tensor,
    target_M: Tensor,
    bucket: Bucket,
    grad_MD: Tensor,
    grad_VD: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Return the bucket's summed loss; add its gradients to `grad_MD` and `grad_VD`."""
    (num_tiles, tile), words = bucket.rows_GT.shape, bucket.max_words
    rows, width = bucket.rows_GT.flatten(), input_MD.size(1)
    inside_K = torch.arange(words, device=input_MD.device)
    # Indices past the last class may point to any word, because they are masked.
    word_GK = (bucket.first_G[:, None] + inside_K).clamp_(max=len(weight_VD) - 1).flatten()
    input_GTD = input_MD.index_select(0, rows).view(num_tiles, tile, width)
    weight_GKD = weight_VD.index_select(0, word_GK).view(num_tiles, words, width)
    wide = grad_MD.dtype
    logits_GTK = batched_product(input_GTD, weight_GKD.transpose(1, 2), dtype=wide)
    logits_GTK.masked_fill_((inside_K >= bucket.size_G[:, None])[:, None], -torch.inf)
    used_GT = bucket.used_GT.to(wide)
    target_n1 = (target_M.index_select(0, rows).view_as(used_GT) * bucket.used_GT.long()).view(-1, 1)
    loss_GT = cross_entropy(logits_GTK.view(-1, words), target_n1).view_as(used_GT)
    grad_GTK = logits_GTK.mul_((used_GT * scale)[:, :, None]).to(input_MD.dtype)
    grad_GKD = batched_product(grad_GTK.transpose(1, 2), input_GTD, dtype=wide)
    grad_VD.index_add_(0, word_GK, grad_GKD.view(-1, width))
    grad_MD.index_add_(0, rows, batched_product(grad_GTK, weight_GKD, dtype=wide).view(-1, width))
    return (loss_GT * used_GT).sum()
