"""Out of memory: one paragraph that names what to lower and by how much.

Absurd sizes are rejected before anything is allocated: on a CPU the kernel would let the process grow and then kill it
without a word.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import torch

from lm.config.registry import find_plugin
from lm.config.schema import TrainConfig
from lm.config.validate import plain_values, typed
from lm.data.text.vocabulary import Vocabulary
from lm.runs.memory_estimate import scoring_needs, training_needs
from lm.system.errors import UserError, is_shortage
from lm.system.memory import free_memory, size_of

SURELY_TOO_MUCH = 1.1
"""Settings are refused before they are tried if their estimate exceeds what is free by this factor."""
COMFORTABLE = 0.9
"""Advice is to need no more than this share of what is free."""


def check_fits(config: TrainConfig, vocabulary: Vocabulary, device: torch.device, *, num_ranks: int = 1) -> None:
    """Refuse settings that surely need more memory than there is, before anything is allocated."""
    free = free_memory(device)
    try:
        needs = training_needs(config, vocabulary, num_ranks=num_ranks)
    except RuntimeError:  # sizes whose product is not even a number any more
        raise UserError(
            f"model.hidden_size={config.model.hidden_size}, model.embedding_size={config.model.embedding_size} and "
            f"{len(vocabulary):,} words make a model of more bytes than can be counted. Try model=lstm"
        ) from None
    if free is not None and needs.total > SURELY_TOO_MUCH * free:
        raise UserError(
            f"These settings need about {size_of(needs.total)} of memory ({needs}), but {size_of(free)} are free on "
            f"{device}. {training_advice(config, vocabulary, free=free, num_ranks=num_ranks)}"
        )


def explain_training_oom(
    config: TrainConfig, vocabulary: Vocabulary, device: torch.device, *, num_ranks: int = 1
) -> AbstractContextManager[None]:
    free = free_memory(device)  # asked before the run takes its own
    advice = partial(training_advice, config, vocabulary, free=free, num_ranks=num_ranks)
    return explain_oom(device, doing="building or training the model", advice=advice)


@contextmanager
def explain_oom(device: torch.device, *, doing: str, advice: Callable[[], str]) -> Iterator[None]:
    """Turn running out of memory into one paragraph; `advice` says what to lower."""
    try:
        yield
        return
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
    # Here, where the error no longer holds on to the frames that hold the memory.
    raise UserError(f"Out of memory on {device} while {doing}. {advice()} What was saved before is kept.")


def training_advice(config: TrainConfig, vocabulary: Vocabulary, *, free: int | None, num_ranks: int = 1) -> str:
    """The least change of settings that fits into what is free, and what it needs."""
    now = training_needs(config, vocabulary, num_ranks=num_ranks).total
    # Where the estimate was wrong and it should have fitted, the least that helps is to need clearly less.
    budget = COMFORTABLE * min(now, free if free is not None else now)
    for setting, changed in _remedies(config, num_words=len(vocabulary), num_ranks=num_ranks):
        needs = training_needs(changed, vocabulary, num_ranks=num_ranks).total
        if needs <= budget:
            return f"Try {setting}, which needs about {size_of(needs)} instead of {size_of(now)}."
    return f"These settings need about {size_of(now)}, and nothing short of another model makes them fit."


def scoring_advice(config: TrainConfig, vocabulary: Vocabulary) -> str:
    """Fewer pieces at once change no figure."""
    now, batch_size = scoring_needs(config, vocabulary), config.evaluate.batch_size
    if batch_size == 1:
        return f"The model and about {size_of(now)} beside it are needed at least; another device may have them."
    fewer = max(1, batch_size // 4)
    less = scoring_needs(replace(config, evaluate=replace(config.evaluate, batch_size=fewer)), vocabulary)
    return (
        f"Try evaluate.batch_size={fewer} instead of {batch_size}, which needs about {size_of(less)} beside the model "
        f"instead of {size_of(now)} and changes no figure."
    )


def _remedies(config: TrainConfig, *, num_words: int, num_ranks: int) -> Iterator[tuple[str, TrainConfig]]:
    """Changes of settings that save memory, those first that change the training least."""
    trainer, model = config.trainer, config.model
    if not config.output.fused:
        config = replace(config, output=replace(config.output, fused=True))
        yield "output.fused=true", config
    groups = trainer.micro_batches
    while 2 * groups <= trainer.batch_size // num_ranks:
        groups *= 2
        yield f"trainer.micro_batches={groups}", replace(config, trainer=replace(trainer, micro_batches=groups))
    size = model.maxent.size
    while model.maxent.order and size // 2 >= num_words:  # as long as every softmax fits in
        size //= 2
        fewer = replace(model, maxent=replace(model.maxent, size=size))
        yield f"model.maxent.size={size}", replace(config, model=fewer)
    if config.output.name != "adaptive" and not model.tie:
        adaptive = find_plugin("output", "adaptive").settings(name="adaptive")
        yield "output=adaptive", replace(config, output=adaptive)
    hidden, embedding = model.hidden_size, model.embedding_size
    while max(hidden, embedding) > 16:
        hidden, embedding = (hidden, embedding // 2) if embedding > hidden else (hidden // 2, embedding)
        if model.tie:
            hidden = embedding = min(hidden, embedding)
        smaller = model.resized(hidden_size=hidden, embedding_size=embedding)
        before, after = plain_values(model), plain_values(smaller)
        named = " ".join(f"model.{key}={typed(value)}" for key, value in after.items() if value != before[key])
        yield named, replace(config, model=smaller)
