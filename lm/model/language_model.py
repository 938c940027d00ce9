"""embedding -> recurrent core -> output layer.

Shapes: T steps, B streams, E embedding width, D width of the hidden state, V words.
"""

from torch import Tensor, nn

from lm.config.model import ModelConfig
from lm.model.cores.lstm import LSTM, State
from lm.optim.row_table import SparseTable
from lm.output.base import OutputLayer


class LanguageModel(nn.Module):
    """p(next word | words so far), with the words so far summed up in a recurrent state."""

    def __init__(self, config: ModelConfig, *, vocab_size: int, output: OutputLayer, embedding_by_rows: bool) -> None:
        super().__init__()
        self.embedding = SparseTable(vocab_size, config.embedding_size, by_rows=embedding_by_rows)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.core = LSTM(config)
        self.output = output

    def read(self, inputs_TB: Tensor, state: State) -> tuple[Tensor, State]:
        """Hidden states (T, B, D) after each word, without dropout: the way of evaluation and generation."""
        hidden_TBD, new_state = self.core(self.embedding(inputs_TB), state, None)
        return hidden_TBD, new_state

    def initial_state(self, num_streams: int) -> State:
        return self.core.initial_state(num_streams, device=self.embedding.weight.device)


def detach(state: State) -> State:
    """The same state, cut from the graph that made it: where back-propagation through time is truncated."""
    return [(output.detach(), cell.detach()) for output, cell in state]


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
