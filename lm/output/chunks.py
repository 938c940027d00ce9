"""How many logits `fused.py` holds at once: the sizes of its chunks."""

import math

CHUNK_ELEMENTS = 1 << 22
"""Logits held at once, unless the weight is so large that more make no difference: 16 MiB of float32."""
GPU_CHUNK_ELEMENTS = 1 << 27
"""On a GPU, where chunks cost launches and there is no cache to stay in: 512 MiB of float32. Sized by free memory,
chunks would round sums differently in each process, and a resumed run would not match the uninterrupted one."""
FEWEST_ROWS = 128
"""Below this the products read the weights more often than they compute with them."""
WHOLE_ROWS, WHOLE_ELEMENTS = 512, 1 << 25
"""Up to this many rows and logits, as in a rare cluster, form one chunk: smaller products would be slow."""
WIDE_WORDS, THINNEST_WIDTH, THIN_WIDTH = 1 << 16, 16, 64
"""Beyond this many words a fourth product costs less than the traffic of a wide chunk, if the width is the thinnest; if
it is thin, the product costs little enough to be spent on memory, where the logits are too many for one chunk."""
BLOCK_ELEMENTS = 1 << 19
"""Logits of a block in the two passes by words: 2 MiB of float32, near the processor."""


def most_logits(num_rows: int, *, num_words: int, num_weights: int, kind: str) -> int:
    """Logits held at once on a kind of device, for the memory estimate; the two passes by words hold fewer."""
    return num_words * chunk_rows(num_rows, num_words=num_words, num_weights=num_weights, kind=kind)


def chunk_rows(num_rows: int, *, num_words: int, num_weights: int, kind: str) -> int:
    """Rows of a chunk, such that chunks are about equal."""
    if kind != "cpu":
        num_chunks = math.ceil(num_rows * num_words / GPU_CHUNK_ELEMENTS)
        return max(1, math.ceil(num_rows / max(1, num_chunks)))
    if num_rows <= WHOLE_ROWS and num_rows * num_words <= WHOLE_ELEMENTS:
        return max(1, num_rows)
    # A chunk as large as the weights is allowed anyway: their gradient, which is no smaller, has to be held too.
    most = max(CHUNK_ELEMENTS, num_weights) // num_words
    num_chunks = max(1, math.ceil(num_rows / max(most, FEWEST_ROWS)))
    return max(1, math.ceil(num_rows / num_chunks))


def is_wide_and_thin(num_rows: int, num_words: int, width: int) -> bool:
    """Whether logits are better computed twice, block of words by block of words, than held in chunks of rows."""
    most = THIN_WIDTH if num_rows * num_words > WHOLE_ELEMENTS else THINNEST_WIDTH
    return num_rows > 0 and num_words > WIDE_WORDS and width <= most


def block_words(num_rows: int) -> int:
    """Words of a block in the two passes by words: whole cache lines; see `aligned`."""
    return max(16, BLOCK_ELEMENTS // num_rows // 16 * 16)
