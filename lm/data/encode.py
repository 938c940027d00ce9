"""Text to ids in two passes: count the training words, then give every word its id.

The plain way, in plain Python; memory is bounded by the table of distinct words and by one sentence.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat

import numpy as np

from lm.data.corpus import SPLITS
from lm.data.vocabulary import Ids, Vocabulary, count_words
from lm.data.write import Content, progress

_BLOCK = 1 << 18

Sentences = Callable[[str], Iterable[list[str]]]
"""Reads a split from its beginning, one list of words a sentence, each time it is called."""


def read_twice(sentences: Sentences, *, min_count: int) -> Content:
    """Count the training split now; encode each split, `</s>` after every sentence, when it is asked for."""
    counts = count_words(_watched(sentences("train"), description="train: counting"))
    vocabulary = Vocabulary.from_counts(counts.items(), min_count=min_count)
    splits = {split: encode_sentences(sentences(split), vocabulary=vocabulary) for split in SPLITS}
    return Content(vocabulary, splits)


def encode_sentences(sentences: Iterable[list[str]], *, vocabulary: Vocabulary) -> Iterator[Ids]:
    """The ids of the sentences, `</s>` after each, in blocks of bounded size."""
    lookup, unk, eos = vocabulary.ids.get, vocabulary.unk_id, vocabulary.eos_id
    block: list[int] = []
    for sentence in sentences:
        block.extend(map(lookup, sentence, repeat(unk)))
        block.append(eos)
        if len(block) >= _BLOCK:
            yield np.array(block, np.int64)
            block.clear()
    if block:
        yield np.array(block, np.int64)


def _watched(sentences: Iterable[list[str]], *, description: str) -> Iterator[list[str]]:
    with progress(description) as bar:
        for sentence in sentences:
            yield sentence
            bar.update(len(sentence))
