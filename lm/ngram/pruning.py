"""Relative-entropy pruning (Stolcke, 1998), and back-offs that make probabilities sum to one."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.ngram.kneser_ney import pruned
from lm.ngram.model import Arrays, Floats, NgramModel
from lm.ngram.trie import Trie
from lm.system.jit import compiled

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
