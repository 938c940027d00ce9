"""Brown classes of a corpus for `hsm_sim`: computed once by exchange clustering and cached beside the corpus."""

import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.system.console import say
from lm.system.errors import UserError
from lm.system.files import write_whole

Integers = NDArray[np.int64]

FORMAT = 1
"""Part of the file's name; incremented when a change of the clustering changes the classes."""


def brown_classes(
    tokens: NDArray[Any],
    *,
    vocab_size: int,
    num_classes: int,
    cache_dir: Path,
    corpus_hash: str,
) -> Integers:
    """The class of each word, from the training tokens (or their memory map) or from the cache.

    The cache is keyed by the corpus's hash and the number of classes. The objective, the mutual information
    of adjacent classes, is printed. No class is empty, and the same text always gives the same classes.
    """
    check_num_classes(num_classes, vocab_size=vocab_size)
    path = cache_dir / f"brown-{FORMAT}-{corpus_hash[:16]}-{num_classes}.npz"
    kept = _load(path, vocab_size=vocab_size, num_classes=num_classes)
    if kept is not None:
        classes, information = kept
        say(f"{num_classes} Brown classes from {path}: mutual information {information:.4f} nats")
        return classes
    # Importing numba costs a second, which the cache avoids.
    from lm.data.exchange import count_pairs, exchange, mutual_information

    start = time.monotonic()
    followers, predecessors = count_pairs(tokens, vocab_size=vocab_size)
    *_, classes = exchange(followers, predecessors, num_classes=num_classes)
    information = mutual_information(classes, followers)
    seconds = time.monotonic() - start
    say(f"{num_classes} Brown classes in {seconds:.0f} s: mutual information {information:.4f} nats, kept in {path}")
    cache_dir.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):  # another run has just written the same classes
        write_whole(path, lambda file: np.savez_compressed(file, classes=classes, mutual_information=information))
    return classes


def check_num_classes(num_classes: int, *, vocab_size: int) -> None:
    if not 1 <= num_classes <= vocab_size:
        raise UserError(
            f"output.num_classes must be from 1 to the vocabulary size ({vocab_size}); got {num_classes}. "
            "Try output.num_classes=null for its square root."
        )


def _load(path: Path, *, vocab_size: int, num_classes: int) -> tuple[Integers, float] | None:
    """The cached classes, if the file is intact and of these sizes."""
    try:
        with np.load(path) as content:
            classes, information = content["classes"], float(content["mutual_information"])
    except (FileNotFoundError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    sound = classes.shape == (vocab_size,) and np.array_equal(np.unique(classes), np.arange(num_classes))
    return (classes.astype(np.int64), information) if sound else None
