"""The model: input -> core -> output layer, plus the n-gram weights of `model.maxent`.

Shapes: T steps, B streams, P steps including history words, E embedding width, D width of the hidden state, V words.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lm.config.groups import ModelConfig, find_plugin
from lm.config.schema import TrainConfig
from lm.data.batches import DistinctWords
from lm.data.text.vocabulary import Vocabulary
from lm.model.base import Core, Input, InputSizes, State
from lm.model.predictor import HiddenPredictions, Predictions, Predictor
from lm.model.regularization import DropoutMasks, drop, drop_words, penalties
from lm.output.base import OutputLayer, Plan, build_output
from lm.output.maxent import NO_WORD, MaxEnt, NgramContexts, TouchedRows
from lm.system.randomness import seed_for


class LanguageModel(Predictor):
    """p(next word | previous words), with the history summarized in the core's state."""

    def __init__(
        self,
        input: Input,
        core: Core,
        output: OutputLayer,
        maxent: MaxEnt | None = None,
        *,
        settings: ModelConfig | None = None,
    ) -> None:
        """`settings` are for regularization in training; None for none."""
        super().__init__()
        self.input, self.core, self.output, self.maxent = input, core, output, maxent
        self.settings = settings or ModelConfig("unregularized")
        self.vocab_size, self.cutoffs, self.hidden_width = output.vocab_size, output.cutoffs, output.width
        self.looks_back = core.looks_back
        self.look_back = 0 if maxent is None else maxent.look_back
        """Number of words before a batch that `plan_output` needs."""
        self.num_penalties = int(bool(self.settings.activation_penalty or self.settings.change_penalty))
        """Number of penalties that `loss` returns."""

    # ---- inference ----

    def initial_state(self, num_streams: int) -> State:
        """Return the state before the first word: the core's state and, with n-gram weights, the most recent words."""
        state = self.core.initial_state(num_streams, device=self.device)
        if self.maxent is None:
            return state
        words_HB = torch.full((self.maxent.look_back, num_streams), NO_WORD, device=self.device)
        return {"core": state, "words": words_HB}

    def forward(self, words_TB: Tensor, state: State) -> tuple[Tensor, State]:
        """Return hidden states (T, B, D) after each word, without dropout, and the core's final state."""
        hidden_TBD, state = self.core(self.input(words_TB), state, None)
        return hidden_TBD, state

    def read(self, words_TB: Tensor, state: State) -> tuple[Predictions, State]:
        """Return predictions after each word, and the state after the last one."""
        if self.maxent is None:
            hidden_TBD, state = self(words_TB, state)
            return HiddenPredictions(hidden_TBD, self.output), state
        hidden_TBD, core_state = self(words_TB, state["core"])
        words_PB = torch.cat([state["words"], words_TB])
        contexts = NgramContexts(self.maxent, self.maxent.contexts(words_PB))
        state = {"core": core_state, "words": words_PB[len(words_TB) :]}
        return HiddenPredictions(hidden_TBD, self.output, contexts), state

    def ids_of_unseen(self, words: Sequence[str]) -> list[int] | None:
        return self.input.ids_of_unseen(words)

    # ---- training ----

    def plan_output(
        self, targets_TB: Tensor, groups: Sequence[slice], *, words_PB: Tensor, generator: torch.Generator
    ) -> tuple[Plan, ...]:
        """Plan the output layer for each micro-batch; `words_PB` are the inputs, starting `look_back` words early."""
        plans = self.output.plans(targets_TB, groups, generator=generator)
        if self.maxent is None:
            return plans
        contexts_TBO, rows_of = self.maxent.contexts(words_PB), self.output.softmax_rows
        whole = rows_of(self.output.plan(targets_TB))
        touched = TouchedRows([self.maxent.starts(r, contexts_TBO) for r in whole], [r.length_N for r in whole])
        return tuple(
            replace(plan, ngrams=self.maxent.plan(rows_of(plan), contexts_TBO[:, group], touched))
            for plan, group in zip(plans, groups, strict=True)
        )

    def embed(self, words_TB: Tensor, distinct: DistinctWords, masks: DropoutMasks) -> Tensor:
        """Embed a batch's words, with word dropout: once per step, even if it is split into micro-batches."""
        return drop_words(self.input(words_TB, distinct), distinct, masks, self.settings.word_dropout)

    def loss(
        self, embedded_TBE: Tensor, targets_TB: Tensor, state: State, *, plan: Plan, masks: DropoutMasks | None = None
    ) -> tuple[list[Tensor], State]:
        """Return the mean training loss on embedded words and any penalty to add, and the core's state after them."""
        settings = self.settings
        embedded_TBE = drop(embedded_TBE, masks, settings.rate(settings.input_dropout), layer="embedding")
        hidden_TBD, state = self.core(embedded_TBE, state, masks)
        dropped_TBD = drop(hidden_TBD, masks, settings.rate(settings.output_dropout), layer="output")
        ngrams = self.maxent.scores(plan.ngrams) if self.maxent is not None and plan.ngrams is not None else []
        loss = self.output.loss(dropped_TBD, targets_TB, plan, ngrams)
        return [loss, *penalties(hidden_TBD, dropped_TBD, settings)], state


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def build_model(config: TrainConfig, vocabulary: Vocabulary, *, classes: NDArray[Any] | None = None) -> LanguageModel:
    """Build a freshly initialized model on torch's default device; the weights are determined by the seed.

    `classes` is the result of the layer's `word_classes`. It can be omitted if loaded weights provide the classes.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, "weights"))
        output = build_output(config.output, width=config.model.width, counts=vocabulary.counts, classes=classes)
        sparse, tied = config.optim.embedding != "dense", config.model.tie
        sizes = InputSizes(config.model.embedding_size, vocabulary, output, sparse=sparse, tied=tied)
        input = find_plugin("input", config.input.name).target.build(config.input, sizes)
        core = find_plugin("model", config.model.name).target(config.model)
    maxent, ngrams = None, config.model.maxent
    if ngrams.order:
        largest = max(output.softmax_sizes())
        maxent = MaxEnt(ngrams, vocab_size=len(vocabulary), unk_id=vocabulary.unk_id, largest_softmax=largest)
    return LanguageModel(input, core, output, maxent, settings=config.model)
