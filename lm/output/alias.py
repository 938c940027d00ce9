"""Many draws from one distribution: Walker's alias method, in Vose's form.

Every column of a table has the same chance and holds at most two words, so a draw costs one look-up however large the
vocabulary is. Columns are kept small, because looking them up is what takes the time.

Shapes: V words, S draws, U distinct words drawn.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.system.jit import compiled

Floats = NDArray[np.float64]
COLUMN = np.dtype([("keep", np.float32), ("alias", np.int32)])
"""Column w holds word w in its first part, `keep` of it, and word `alias` in the rest."""


def alias_table(probability_V: Floats) -> NDArray[Any]:
    """The columns of a distribution over V words, to `draw` from."""
    columns_V = np.empty(len(probability_V), COLUMN)
    columns_V["keep"], columns_V["alias"] = _build(probability_V / probability_V.sum() * len(probability_V))
    return columns_V


@compiled
def _build(share_V: Floats) -> Any:
    keep, alias = share_V.copy(), np.arange(len(share_V))
    small, large = np.empty(len(keep), np.int64), np.empty(len(keep), np.int64)
    num_small = num_large = 0
    for word in range(len(keep)):
        if keep[word] < 1:
            small[num_small] = word
            num_small += 1
        else:
            large[num_large] = word
            num_large += 1
    while num_small and num_large:
        num_small -= 1
        needs, gives = small[num_small], large[num_large - 1]
        alias[needs] = gives
        keep[gives] -= 1 - keep[needs]
        if keep[gives] < 1:
            num_large -= 1
            small[num_small] = gives
            num_small += 1
    for i in range(num_small):  # these are 1 up to rounding
        keep[small[i]] = 1
    return keep, alias


@compiled
def draw(uniform_S: Floats, columns_V: NDArray[Any]) -> Any:
    """One word per number in [0, 1): (distinct words in order, how often each, place of every word or -1)."""
    vocab_size, num_draws = len(columns_V), len(uniform_S)
    place_V = np.zeros(vocab_size, np.int32)  # at first the number of draws
    for i in range(num_draws):
        place = uniform_S[i] * vocab_size
        word = min(int(place), vocab_size - 1)  # rounding may reach the end
        column = columns_V[word]
        place_V[word if place - word < column.keep else column.alias] += 1
    words_U, times_U = np.empty(min(vocab_size, num_draws), np.int64), np.empty(min(vocab_size, num_draws), np.int64)
    found = 0
    for word in range(vocab_size):
        times = place_V[word]
        place_V[word] = -1
        if times:
            words_U[found], times_U[found], place_V[word] = word, times, found
            found += 1
    return words_U[:found], times_U[:found], place_V
