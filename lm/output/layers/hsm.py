"""The class-based hierarchical softmax (section 3.3): p(class | hidden) p(word | class, hidden), both at full width.

`hsm_freq` builds classes by frequency, each with about the same share of the square roots of the counts. `hsm_sim` uses
Brown classes, whose words occur in similar contexts. Class sizes vary widely. Word vectors are stored in class order,
so each class is a slice and nothing is padded.

Shapes: N tokens, D width, V words, C classes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from lm.config.groups import OptionalCount, OutputConfig, plugin
from lm.data.brown import brown_classes
from lm.data.corpus import Corpus
from lm.output.base import Description, LayerSizes
from lm.output.fused import Group
from lm.output.hierarchy import TailBatch, TwoLevelPlan, TwoLevelSoftmax
from lm.output.logits import batched_product, cross_entropy, precomputed, product_dtype, sum_dtype, without_autocast
from lm.output.maxent import NgramScores
from lm.system.errors import UserError


@dataclass
class HierarchicalConfig(OutputConfig):
    """Two-level softmax: classes, then the words in a class."""

    num_classes: OptionalCount = None
    """Number of classes; null for the square root of the vocabulary."""

    supports_maxent = True

    def classes_for(self, vocab_size: int) -> int:
        """Number of classes; by default the square root of the vocabulary size, which balances the two levels."""
        num_classes = max(1, round(math.sqrt(vocab_size))) if self.num_classes is None else self.num_classes
        if not 1 <= num_classes <= vocab_size:
            raise UserError(
                f"output.num_classes must be from 1 to the vocabulary size ({vocab_size}); got {num_classes}. "
                "Try output.num_classes=null for its square root."
            )
        return num_classes


class HierarchicalSoftmax(TwoLevelSoftmax):
    """Two full-width levels without a shortlist; each word's class is part of the layer's state.

    If `classes` is None, words are assigned round-robin so that a trained state can be loaded: shapes depend only on
    the number of words and classes.
    """

    class_of_word_V: Tensor

    def __init__(self, *, width: int, vocab_size: int, num_classes: int, classes: NDArray[Any] | None = None) -> None:
        super().__init__(width=width, vocab_size=vocab_size, shortlist=0, cluster_sizes=[0] * num_classes)
        # Host-side tables are created with numpy, which ignores torch's default device.
        classes = np.arange(vocab_size) % num_classes if classes is None else classes
        self.register_buffer("class_of_word_V", torch.from_numpy(np.array(classes, dtype=np.int64)))
        self.classes = nn.Parameter(torch.empty(num_classes, width))
        self.words = nn.Parameter(torch.empty(vocab_size, width))
        self._index_classes()
        self.register_load_state_dict_post_hook(lambda layer, _: layer._index_classes())  # type: ignore[no-untyped-call]
        self.reset_parameters()

    def _index_classes(self) -> None:
        """Build the tables for host-side plans from the words' classes."""
        classes = self.class_of_word_V.cpu().numpy()
        num_classes = len(self.cluster_sizes)
        sizes = np.bincount(classes, minlength=num_classes)
        if len(classes) != self.vocab_size or len(sizes) != num_classes or not sizes.all():
            raise UserError(
                f"Each of the {self.vocab_size} words must have one of {num_classes} classes, and no class may be "
                f"empty; got {len(classes)} words in {np.count_nonzero(sizes)} of {len(sizes)} classes."
            )
        self.cluster_sizes = sizes.tolist()
        self.padded_sizes = bucket_sizes(self.cluster_sizes)
        order = np.argsort(classes, kind="stable")
        self.word_at_position = torch.from_numpy(order)
        self.position_of_word = torch.from_numpy(np.argsort(order))

    @classmethod
    def build(cls, settings: HierarchicalConfig, sizes: LayerSizes) -> Self:
        vocab_size = len(sizes.counts)
        num_classes = settings.classes_for(vocab_size)
        return cls(width=sizes.width, vocab_size=vocab_size, num_classes=num_classes, classes=sizes.classes)

    def root(self) -> tuple[Tensor, Tensor | None]:
        return self.classes, None

    def plan(self, targets: Tensor, *, generator: torch.Generator | None = None) -> TwoLevelPlan:
        plan = super().plan(targets, generator=generator)
        if self.words.device.type == "cpu":  # processes one class at a time, without padding
            return plan
        return replace(plan, buckets=make_buckets(self.padded_sizes, self.cluster_sizes, plan.counts))

    def add_leaves(self, loss: Tensor, hidden_MD: Tensor, plan: TwoLevelPlan, ngrams: NgramScores | None) -> Tensor:
        if not plan.buckets or ngrams is not None:
            return super().add_leaves(loss, hidden_MD, plan, ngrams)
        return loss + bucketed_loss(hidden_MD, self.words, plan.leaf_M, plan.buckets, scale=plan.scale)

    def leaves(self, hidden_MD: Tensor, counts: Sequence[int]) -> Iterator[TailBatch]:
        rows, words = list(accumulate(counts, initial=0)), self.starts()
        groups = [
            Group(slice(rows[c], rows[c + 1]), slice(words[c], words[c + 1]))
            for c, size in enumerate(self.cluster_sizes)
            if counts[c] and size > 1  # one-word classes have loss 0
        ]
        yield TailBatch(slice(None), hidden_MD, self.words, groups)

    def leaf_scores(self, hidden_ND: Tensor, cluster: int) -> Tensor:
        start, stop = self.starts()[cluster : cluster + 2]
        return F.linear(hidden_ND, self.words[start:stop])

    def describe(self, counts: NDArray[Any] | None = None) -> Description:
        return super().describe(counts) | {
            "classes": len(self.cluster_sizes),
            "largest_class": max(self.cluster_sizes),
            "smallest_class": min(self.cluster_sizes),
        }


@plugin("output", "hsm_freq", HierarchicalConfig)
class FrequencySoftmax(HierarchicalSoftmax):
    """Hierarchical softmax whose classes group words with similar counts."""

    @classmethod
    def build(cls, settings: HierarchicalConfig, sizes: LayerSizes) -> Self:
        classes = frequency_classes(sizes.counts, num_classes=settings.classes_for(len(sizes.counts)))
        settings = replace(settings, num_classes=int(classes.max()) + 1)
        return super().build(settings, sizes._replace(classes=classes))


def frequency_classes(counts: NDArray[Any], *, num_classes: int) -> NDArray[np.int64]:
    """Assign words to classes with about equal shares of sqrt(count); drop empty classes."""
    mass = np.sqrt(np.asarray(counts, dtype=np.float64))
    if not mass.any():
        mass = np.ones_like(mass)
    before = np.cumsum(mass) - mass
    raw = np.minimum(np.floor(num_classes * before / mass.sum()), num_classes - 1)
    return np.unique(raw, return_inverse=True)[1]


@plugin("output", "hsm_sim", HierarchicalConfig)
class SimilaritySoftmax(HierarchicalSoftmax):
    """Hierarchical softmax with classes of words in similar contexts, computed once and cached next to the corpus."""

    @classmethod
    def word_classes(cls, settings: HierarchicalConfig, corpus: Corpus) -> NDArray[Any]:
        return brown_classes(
            corpus.split("train"),
            vocab_size=len(corpus.vocabulary),
            num_classes=settings.classes_for(len(corpus.vocabulary)),
            cache_dir=corpus.path,
            corpus_hash=corpus.meta["splits"]["train"]["sha256"],
        )


# ---- batched matmuls for GPUs ----------------------------------------------------------------------------------------
#
# Score many small classes in a few batched matmuls. On a GPU, kernel launches cost more than padding.
#
# Looping over classes, as on a CPU, would launch thousands of kernels per step. Here, classes of similar size share a
# bucket, and each class's tokens are split into small tiles. A bucket is one batch of tiles, padded to its largest
# class and to whole tiles. Padding contributes no loss and no gradient.
#
# Shapes: M tokens sorted by class, D width, V words in class order, C classes, G tiles in a bucket, T tokens in a tile,
# K words in a bucket's largest class, rounded up for alignment.


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
