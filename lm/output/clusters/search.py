"""Finds the fastest clusters under a cost model: exact dynamic programming by divide and conquer (section 4.3).

Words are sorted by decreasing count, so clusters are ranges and only the J cutoffs are free. F(b) is the share of
tokens among the first b words. A tail over words a..b sees q = B (F(b) - F(a)) tokens and costs
max(floor, c + p (b-a) q + w (b-a) + t q). A head of b words costs the same with q = B. These costs satisfy the
quadrangle inequality: as the end of a tail moves right, its best start never moves left. So adding a tail costs
O(V log V): solve the middle end by trying all possible starts, then solve each half with the starts on its side.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lm.output.clusters.cost_model import BlockCost
from lm.system.jit import compiled, inlined

Floats = NDArray[np.float64]


def best_cutoffs(
    shares: Floats, *, tokens: float, head: Sequence[float], tails: Sequence[Sequence[float]], min_head: int
) -> tuple[list[int], float]:
    """Return the fastest cutoffs for one head and len(tails) tails, and their predicted seconds.

    `shares` are the words' shares of the tokens, decreasing. Costs are (floor, constant, per_pair, per_word,
    per_token). The head has at least `min_head` words and one entry per tail. No cluster is empty.
    """
    num_words, num_tails = len(shares), len(tails)
    assert 1 <= min_head <= num_words - num_tails
    cumulative = np.concatenate([[0.0], np.cumsum(shares)]) * tokens
    cost = BlockCost(*head).seconds(np.arange(num_words + 1) + num_tails, tokens)  # the head sees every token
    cost[:min_head] = np.inf
    starts = []
    for i, tail in enumerate(tails):
        last = i == num_tails - 1
        cost, start = _add_tail(cost, cumulative, np.asarray(tail, np.float64), last)
        starts.append(start)
    end = num_words
    cutoffs: list[int] = []
    for start in reversed(starts):
        end = int(start[end])
        cutoffs.insert(0, end)
    return cutoffs, float(cost[num_words])


@inlined
def _tail_cost(cumulative: Floats, cost: Floats, a: int, b: int) -> float:
    words, tokens = b - a, cumulative[b] - cumulative[a]
    return float(max(cost[0], cost[1] + cost[2] * words * tokens + cost[3] * words + cost[4] * tokens))


@compiled
def _add_tail(before: Floats, cumulative: Floats, cost: Floats, last: bool) -> tuple[Floats, NDArray[np.int64]]:
    """For each b, return the lowest cost of the first b words with one more tail ending at b, and that tail's start.

    For the last tail, only b = V is solved.
    """
    num_words = len(before) - 1
    after = np.full(num_words + 1, np.inf)
    start = np.zeros(num_words + 1, np.int64)
    # Each entry: ends lo..hi still to solve, and the range least..most of their best starts.
    stack = [(num_words if last else 1, num_words, 0, num_words - 1)]
    while stack:
        lo, hi, least, most = stack.pop()
        if lo > hi:
            continue
        middle = (lo + hi) // 2
        best, best_start = np.inf, min(least, middle - 1)
        for a in range(least, min(most, middle - 1) + 1):
            value = before[a] + _tail_cost(cumulative, cost, a, middle)
            if value < best:
                best, best_start = value, a
        after[middle], start[middle] = best, best_start
        stack.append((lo, middle - 1, least, best_start))
        stack.append((middle + 1, hi, best_start, most))
    return after, start
