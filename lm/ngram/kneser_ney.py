"""Interpolated Kneser-Ney smoothing (Chen and Goodman, 1999), with one or three discounts per order; pruning.

    p(w | h) = (a(h w) - D(a(h w))) / a(h .) + back-off(h) p(w | h without its first word)

a(h w) is the n-gram's count if it has the highest order or begins a sentence; otherwise the number of distinct words
preceding it. The discount D is D1, D2 or D3 if a(h w) is 1, 2 or more. back-off(h) is the discounted mass. Unigrams
are interpolated with the uniform distribution over the vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.ngram.model import Arrays, Floats, NgramModel
from lm.ngram.trie import Advance, Counts, Numbers, Trie
from lm.system.console import say
from lm.system.jit import compiled

Discounts = tuple[float, float, float]
"""Discounts D1, D2 and D3 of one order."""
FALLBACK = 0.5
"""Discount for texts where it cannot be estimated."""


def estimate(
    counts: Counts, *, modified: bool, min_counts: Sequence[int], eos_id: int, advance: Advance = lambda: None
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


# ---- relative-entropy pruning (Stolcke, 1998) ------------------------------------------------------------------------


LEAST = 1e-9
"""Minimum mass left for words that a context was not seen with."""


def renormalized(trie: Trie, probs_M: Floats, *, eos_id: int) -> NgramModel:
    """Build a model with back-offs computed from its probabilities.

    Back-off of h: (1 - sum of p(w | h)) / (1 - sum of p(w | h without its first word)), over the n-grams h w. If the
    probabilities themselves sum to one or more, they are scaled down.
    """
    probs_M, contexts_M = probs_M.copy(), trie.contexts()
    probs_M[trie.nodes(1)] /= probs_M[trie.nodes(1)].sum()
    back_offs_L = np.ones(trie.edges[-2])
    for order in range(2, trie.order + 1):
        nodes, shorter = trie.nodes(order), trie.nodes(order - 1)
        contexts, size = contexts_M[nodes] - shorter.start, shorter.stop - shorter.start
        lower = 1 - np.bincount(contexts, probs_M[trie.parents(order)], minlength=size)
        seen = np.bincount(contexts, probs_M[nodes], minlength=size)
        most = np.where(lower > LEAST, 1 - LEAST, 1)  # no mass is left over if the context was seen with all words
        scale = np.where((seen > most) | (most == 1), most / np.maximum(seen, LEAST), 1)
        probs_M[nodes] *= scale[contexts]
        back_offs_L[shorter] = np.where(lower > LEAST, (1 - seen * scale) / np.maximum(lower, LEAST), 1)
    return NgramModel(trie, np.log(probs_M), np.log(back_offs_L), eos_id=eos_id)


def context_sums(model: NgramModel) -> Iterator[NDArray[np.float32]]:
    """Yield the sum of all words' probabilities without context, then after each context of one word, two words, ..."""
    trie, contexts_M = model.trie, model.trie.contexts()
    sums = np.array([np.exp(model.log_probs_M[trie.nodes(1)]).sum()], np.float32)  # float64 needs too much memory
    yield sums
    for order in range(1, trie.order):
        shorter, sums = sums, np.full(trie.sizes[order - 1], sums.max(initial=0))  # the root is above all words
        above, first, end = trie.edges[max(order - 2, 0)], *trie.edges[order - 1 : order + 1]
        sum_after_contexts(model.arrays, contexts_M, above, first, end, shorter, sums)
        yield sums


@compiled
def sum_after_contexts(
    arrays: Arrays, contexts_M: Any, above: int, first: int, end: int, shorter: Any, sums: Any
) -> None:
    """Compute the sums after the contexts [first, end) from those after the nodes above, without their first words."""
    for parent in range(above, first):
        for context in range(arrays.children_L[parent], arrays.children_L[parent + 1]):
            sums[context - first] = shorter[parent - above]
    for context in range(first, end):
        sums[context - first] *= np.exp(arrays.log_back_offs_L[context])
    for parent in range(first, end):
        for node in range(arrays.children_L[parent], arrays.children_L[parent + 1]):
            context = contexts_M[node]
            backed_off = np.exp(arrays.log_back_offs_L[context] + arrays.log_probs_M[parent])
            sums[context - first] += np.exp(arrays.log_probs_M[node]) - backed_off


def relative_entropies(model: NgramModel, order: int) -> Floats:
    """Return the relative entropy between the model and the one without each n-gram of an order above 1.

    The context's probability is the product of those of its words.
    """
    trie, nodes, contexts_M = model.trie, model.trie.nodes(order), model.trie.contexts()
    log_joint_M = model.log_probs_M.copy()
    for n in range(2, order):
        log_joint_M[trie.nodes(n)] += log_joint_M[contexts_M[trie.nodes(n)]]
    contexts, log_p, log_q = contexts_M[nodes], model.log_probs_M[nodes], model.log_probs_M[trie.parents(order)]
    p, q = np.exp(log_p), np.exp(log_q)
    unseen = 1 - np.bincount(contexts, p)[contexts]
    lower = 1 - np.bincount(contexts, q)[contexts]
    log_back_off = np.log(np.maximum(unseen + p, LEAST) / np.maximum(lower + q, LEAST))
    change = np.maximum(unseen, 0) * (log_back_off - model.log_back_offs_L[contexts])
    entropies: Floats = -np.exp(log_joint_M[contexts]) * (p * (log_q + log_back_off - log_p) + change)
    return entropies


def prune(model: NgramModel, threshold: float) -> NgramModel:
    """Remove n-grams whose removal raises perplexity by less than the fraction `threshold`.

    N-grams that longer ones need are kept.
    """
    trie, contexts_M = model.trie, model.trie.contexts()
    kept_M = np.zeros(len(trie.words_M), bool)
    kept_M[trie.nodes(1)] = True
    for order in range(trie.order, 1, -1):
        nodes = trie.nodes(order)
        kept_M[nodes] |= np.expm1(relative_entropies(model, order)) >= threshold
        kept_M[trie.parents(order)[kept_M[nodes]]] = True
        kept_M[contexts_M[nodes][kept_M[nodes]]] = True
    trie, probs_M, _ = pruned(trie, kept_M, np.exp(model.log_probs_M), model.log_back_offs_L)
    return renormalized(trie, probs_M, eos_id=model.eos_id)
