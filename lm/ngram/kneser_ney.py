"""Interpolated Kneser-Ney smoothing (Chen and Goodman, 1999), with one or three discounts per order.

    p(w | h) = (a(h w) - D(a(h w))) / a(h .) + back-off(h) p(w | h without its first word)

a(h w) is the n-gram's count if it has the highest order or begins a sentence; otherwise the number of distinct words
preceding it. The discount D is D1, D2 or D3 if a(h w) is 1, 2 or more. back-off(h) is the discounted mass. Unigrams
are interpolated with the uniform distribution over the vocabulary.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lm.ngram.counting import Counts
from lm.ngram.model import NgramModel
from lm.ngram.trie import Numbers, Trie
from lm.system.console import say

Discounts = tuple[float, float, float]
"""Discounts D1, D2 and D3 of one order."""
FALLBACK = 0.5
"""Discount for texts where it cannot be estimated."""


def estimate(
    counts: Counts,
    *,
    modified: bool,
    min_counts: Sequence[int],
    eos_id: int,
    advance: Callable[[], object] = lambda: None,
) -> tuple[NgramModel, list[Discounts]]:
    """Estimate a model from counts; return it with each order's discounts.

    N-grams with a count below their order's `min_counts` are pruned. `advance` is called after each order.
    """
    trie = counts.trie
    probs_M, back_offs_L = np.empty(len(trie.words_M)), np.ones(trie.edges[-2])
    contexts_M = trie.contexts()
    chosen: list[Discounts] = []
    for order in range(1, trie.order + 1):
        adjusted = adjusted_counts(counts, order, eos_id=eos_id)
        discounts, problem = choose_discounts(adjusted, modified=modified)
        chosen.append(discounts)
        if problem:
            say(f"order {order}: {problem}")
        nodes = trie.nodes(order)
        kept = counts.occurrences_M[nodes] >= min_counts[order - 1]
        by_count = np.array([0.0, *discounts])
        discount = by_count[np.minimum(adjusted, 3)]
        if order == 1:
            probs_M[nodes] = (adjusted - discount + discount.sum() / len(adjusted)) / adjusted.sum()
        else:
            lower = trie.nodes(order - 1)
            contexts = contexts_M[nodes] - lower.start
            totals, taken = (
                np.bincount(contexts, amounts, minlength=lower.stop - lower.start)
                for amounts in (adjusted, np.where(kept, discount, adjusted))
            )
            np.divide(taken, totals, out=back_offs_L[lower], where=totals > 0)
            np.divide(adjusted - discount, totals[contexts], out=probs_M[nodes])
            probs_M[nodes] += back_offs_L[lower][contexts] * probs_M[trie.parents(order)]
        advance()
    del contexts_M
    if max(min_counts) > 1:
        thresholds = [0, *min_counts[1:]]  # keep all words
        kept_M = np.concatenate([counts.occurrences_M[trie.nodes(n)] >= t for n, t in enumerate(thresholds, 1)])
        trie, probs_M, back_offs_L = pruned(trie, kept_M, probs_M, back_offs_L)
    model = NgramModel(trie, np.log(probs_M, out=probs_M), np.log(back_offs_L, out=back_offs_L), eos_id=eos_id)
    return model, chosen


def adjusted_counts(counts: Counts, order: int, *, eos_id: int) -> Numbers:
    """Counts for the highest order and sentence starts, otherwise the number of distinct preceding words."""
    trie, nodes = counts.trie, counts.trie.nodes(order)
    occurrences = counts.occurrences_M[nodes]
    if order == trie.order:
        return occurrences
    before = np.diff(trie.children_L[nodes.start : nodes.stop + 1])
    return before if order == 1 else np.where(trie.words_M[nodes] == eos_id, occurrences, before)


def choose_discounts(adjusted: Numbers, *, modified: bool) -> tuple[Discounts, str | None]:
    """Estimate discounts from the number of n-grams with counts 1 to 4; also return a warning if that fails."""
    n1, n2, n3, n4 = (int(np.count_nonzero(adjusted == count)) for count in range(1, 5))
    numbers = f"n-grams counted 1 to 4 times: {n1:,}, {n2:,}, {n3:,}, {n4:,}"
    if not n1 or not n2:
        return (FALLBACK,) * 3, f"cannot estimate a discount ({numbers}); using {FALLBACK}"
    single = n1 / (n1 + 2 * n2)
    if not modified:
        return (single,) * 3, None
    if n3 and n4:
        d2, d3 = 2 - 3 * single * n3 / n2, 3 - 4 * single * n4 / n3
        if 0 < d2 < 2 and 0 < d3 < 3:
            return (single, d2, d3), None
    return (single,) * 3, f"cannot estimate three discounts ({numbers}); using a single one, {single:.3f}"


def pruned(
    trie: Trie, kept_M: NDArray[np.bool_], probs_M: NDArray[np.float64], back_offs_L: NDArray[np.float64]
) -> tuple[Trie, NDArray[np.float64], NDArray[np.float64]]:
    """Keep only the selected nodes; parents and contexts of kept nodes must also be kept."""
    kept_before = np.append(0, np.cumsum(kept_M))
    kept_L = kept_M[: len(back_offs_L)]
    # A node's kept children start after all kept nodes before its first child.
    starts = kept_before[trie.children_L[:-1][kept_L]]
    children_L = np.append(starts, kept_before[-1]).astype(np.int32)
    kept = Trie(trie.words_M[kept_M], children_L, kept_before[trie.edges].tolist())
    return kept, probs_M[kept_M], back_offs_L[kept_L]
