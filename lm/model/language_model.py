"""The model: input -> core -> output layer.

Shapes: T steps, B streams, E embedding width, D width of the hidden state, V words.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lm.data.batches import Plan
from lm.model.base import Core, DropoutMasks, Input, State
from lm.model.predictor import HiddenPredictions, Predictions, Predictor
from lm.output.base import OutputLayer


class LanguageModel(Predictor):
    """p(next word | words so far), with the words so far summed up in the core's state."""

    def __init__(self, input: Input, core: Core, output: OutputLayer) -> None:
        super().__init__()
        self.input, self.core, self.output = input, core, output
        self.vocab_size, self.cutoffs, self.hidden_width = output.vocab_size, output.cutoffs, output.width

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def initial_state(self, num_streams: int) -> State:
        """The state before the first word: the core's and, with n-gram weights, the last words that were read."""
        state = self.core.initial_state(num_streams, device=self.device)
        if self.output.maxent is None:
            return state
        return {"core": state, "words": self.output.maxent.no_history(num_streams, device=self.device)}

    def forward(self, words_TB: Tensor, state: State) -> tuple[Tensor, State]:
        """Hidden states (T, B, D) after each word, without dropout, and the core's state after the last one."""
        hidden_TBD, state = self.core(self.input(words_TB), state, None)
        return hidden_TBD, state

    def read(self, words_TB: Tensor, state: State) -> tuple[Predictions, State]:
        """What is expected after each word, and the state after the last one."""
        maxent = self.output.maxent
        if maxent is None:
            hidden_TBD, state = self(words_TB, state)
            return HiddenPredictions(hidden_TBD, self.output), state
        hidden_TBD, core_state = self(words_TB, state["core"])
        words_PB = torch.cat([state["words"], words_TB])
        predictions = HiddenPredictions(hidden_TBD, self.output, maxent.contexts(words_PB))
        return predictions, {"core": core_state, "words": words_PB[len(words_TB) :]}

    def ids_of_unseen(self, words: Sequence[str]) -> list[int] | None:
        return self.input.ids_of_unseen(words)

    def loss(
        self,
        embedded_TBE: Tensor,
        targets_TB: Tensor,
        state: State,
        *,
        plan: Plan | None = None,
        masks: DropoutMasks | None = None,
    ) -> tuple[Tensor, State]:
        """The training loss, mean over the targets, from words that the input has embedded; and the state after them.

        A step embeds its words once, even where it is computed in micro-batches. The state is the core's alone: the
        words that n-gram weights go by are in the plan, which is made from the text.
        """
        hidden_TBD, state = self.core(embedded_TBE, state, masks)
        return self.output.loss(hidden_TBD, targets_TB, plan), state


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
