"""Recurrent cores (section 3.2 of the paper): LSTM, GRU, Elman networks, IRNN and SCRN, using torch's kernels.

- LSTM: the paper's core.
- GRU (Chung et al., 2014).
- RNN, the Elman network: h_t = f(A x_t + R h_{t-1} + b).
- IRNN (Le, Jaitly and Hinton, 2015; Table 2 lists one with 4 layers): h_t = max(0, A x_t + R h_{t-1} + b), initialized
  to a multiple of R = 1, and b = 0.
- SCRN (Mikolov et al., 2014): slow units s_t = (1 - a) B x_t + a s_{t-1} next to fast units
  h_t = sigmoid(P s_t + A x_t + R h_{t-1}). The slow units do not depend on the fast ones, so they are computed first,
  and h is a recurrent layer over [x_t, s_t].

Shapes: T steps, B streams, E input width, D output width, H cell width, S slow units.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from lm.config.groups import ModelConfig, Range, Rate, Width, plugin
from lm.model.base import Core, State
from lm.model.regularization import DropoutMasks, drop, drop_weights
from lm.system.devices import recurrent_dtype
from lm.system.tree import map_leaves


class SigmoidRNN(nn.RNN):
    """One layer of h_t = sigmoid(A x_t + R h_{t-1} + b)."""

    def forward(  # type: ignore[override]
        self, input_TBE: Tensor, before_1BH: Tensor, weights: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        input_HE, recurrent_HH, *biases = weights or self.all_weights[0]
        bias_H = recurrent_HH.sum(1) / 4
        for one_H in biases:
            bias_H = bias_H + one_H / 2
        weights = [input_HE / 2, recurrent_HH / 4, bias_H, torch.zeros_like(bias_H)]
        hidden_TBH, after_1BH = run_kernel(self, input_TBE, 2 * before_1BH - 1, weights)
        return (1 + hidden_TBH) / 2, (1 + after_1BH) / 2


def run_layer(
    layer: nn.RNNBase, input_TBE: Tensor, before: State, weights: Sequence[Tensor] | None = None
) -> tuple[Tensor, State]:
    """Run a layer with the given weights, or with its own."""
    if isinstance(layer, SigmoidRNN):
        return layer.forward(input_TBE, before, weights)
    if weights is None and not (input_TBE.is_cuda and torch.is_autocast_enabled("cuda")):
        hidden_TBH, after = layer(input_TBE, before)
        return hidden_TBH, after
    return run_kernel(layer, input_TBE, before, weights or layer.all_weights[0])


def run_kernel(layer: nn.RNNBase, input_TBE: Tensor, before: State, weights: Sequence[Tensor]) -> tuple[Tensor, State]:
    """Call torch's kernel of a layer with these weights.

    cuDNN needs one dtype (`recurrent_dtype`) and all weights in one buffer.
    """
    autocast: AbstractContextManager[object] = nullcontext()
    if input_TBE.is_cuda:
        autocast = torch.autocast("cuda", enabled=False)
        dtype = recurrent_dtype(input_TBE)
        matrices_first = sorted(range(len(weights)), key=lambda index: -weights[index].dim())
        buffer = torch.cat([weights[index].flatten() for index in matrices_first]).to(dtype)
        parts = torch.split(buffer, [weights[index].numel() for index in matrices_first])
        weights = [parts[matrices_first.index(i)].view(weight.shape) for i, weight in enumerate(weights)]
        input_TBE, before = input_TBE.to(dtype), map_leaves(lambda state: state.to(dtype), before)
    kernel = getattr(torch, layer.mode.lower())  # lstm, gru, rnn_tanh or rnn_relu
    has_bias = any(weight.dim() == 1 for weight in weights)
    with autocast:
        hidden_TBH, *after = kernel(input_TBE, before, weights, has_bias, 1, 0.0, layer.training, False, False)
    return hidden_TBH, tuple(after) if layer.mode == "LSTM" else after[0]


@dataclass
class StackConfig(ModelConfig):
    """Stacked recurrent layers."""

    layers: Annotated[int, Range(least=1, most=1000)] = 1
    """Number of stacked layers."""
    projection: Annotated[int | None, Range(least=1, most=1e9)] = None
    """Project the core's output to this width (LSTM-2048-512: 512); null for no projection."""

    @property
    def width(self) -> int:
        return self.projection or self.hidden_size

    def problems(self) -> Iterator[str]:
        if self.projection is not None and self.projection >= self.hidden_size:
            yield (
                f"model.projection must be below model.hidden_size ({self.hidden_size}); got {self.projection}. "
                "Try model.projection=null."
            )


@dataclass
class RecurrentConfig(StackConfig):
    """Stacked recurrent layers that torch has kernels for."""

    weight_drop: Rate = 0.0
    """DropConnect rate on the recurrent matrices, with one mask per batch (AWD-LSTM: 0.5)."""


@torch.no_grad()
def zero_biases(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if "bias" in name:
            parameter.zero_()


class RecurrentStack(Core):
    """Stacked layers that map (inputs, state) to (outputs, state), like torch's recurrent modules.

    Uses one module per layer instead of torch's `num_layers`, whose dropout between layers would draw from torch's
    global generator and so depend on history.
    """

    def __init__(self, config: RecurrentConfig, make_layer: Callable[[int], nn.RNNBase], *, between: int) -> None:
        """`make_layer` builds a layer for a given input width; `between` is each layer's output width."""
        super().__init__()
        self.config, self.width = config, config.width
        widths = [config.embedding_size] + [between] * (config.layers - 1)
        self.layers = nn.ModuleList(make_layer(width) for width in widths)
        # Project the top layer's output, unless the layers already project theirs.
        self.projection = None if between == self.width else nn.Linear(between, self.width, bias=False)
        zero_biases(self)

    def forward(self, input_TBE: Tensor, state: State, masks: DropoutMasks | None) -> tuple[Tensor, State]:
        """Return the top layer's outputs (T, B, D) and the state after the last step."""
        new_state = []
        hidden = input_TBE
        for index, (layer, before) in enumerate(zip(self.layers, state, strict=True)):
            assert isinstance(layer, nn.RNNBase)
            if index > 0:
                hidden = drop(hidden, masks, self.config.dropout, layer=f"layer {index - 1}")
            weights = None
            if masks is not None and self.config.weight_drop > 0:
                input_HE, recurrent_HH, *others = layer.all_weights[0]
                dropped_HH = drop_weights(recurrent_HH, masks, self.config.weight_drop, layer=f"layer {index}")
                weights = [input_HE, dropped_HH, *others]
            hidden, after = run_layer(layer, hidden, before, weights)
            # Keep the state in float32; under autocast, some CPU kernels return it in bfloat16.
            new_state.append(map_leaves(lambda new, old: new.to(old.dtype), after, before))
        return hidden if self.projection is None else self.projection(hidden), new_state

    def initial_state(self, num_streams: int, *, device: torch.device) -> State:
        return [torch.zeros(1, num_streams, self.config.hidden_size, device=device) for _ in self.layers]


@plugin("model", "lstm", RecurrentConfig)
class LSTM(RecurrentStack):
    """LSTM layers with optional projections (LSTM-2048-512).

    Weights start in U(-0.1, 0.1), forget-gate biases at 1, other biases at 0. Without biases, an LSTM would learn
    offsets in saturated cells, which an evaluation starting from zeros may never reach.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(
            config,
            lambda width: nn.LSTM(width, config.hidden_size, proj_size=config.projection or 0),
            between=config.width,
        )
        # On a CPU, torch warns once that projected LSTMs do not use oneDNN.
        warnings.filterwarnings("ignore", message="LSTM with projections is not supported with oneDNN")
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "weight" in name:
                    parameter.uniform_(-0.1, 0.1)
                if "bias_ih" in name:
                    parameter[config.hidden_size : 2 * config.hidden_size] = 1  # gate order is i, f, g, o

    def initial_state(self, num_streams: int, *, device: torch.device) -> State:
        """Per layer: output (1, B, D) and cell (1, B, H)."""
        sizes = self.width, self.config.hidden_size
        return [tuple(torch.zeros(1, num_streams, size, device=device) for size in sizes) for _ in self.layers]


@plugin("model", "gru", RecurrentConfig)
class GRU(RecurrentStack):
    """GRU layers: 25% fewer weights than an LSTM and no separate cell state.

    Weights start in U(+-1/sqrt(H)) as in torch, biases at 0.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config, lambda width: nn.GRU(width, config.hidden_size), between=config.hidden_size)


@dataclass
class RNNConfig(RecurrentConfig):
    """The Elman network."""

    name: str = "rnn"
    nonlinearity: Literal["tanh", "sigmoid"] = "sigmoid"
    """The paper's `sigmoid`, or `tanh`, which saturates at the paper's learning rate (try optim.lr=0.03)."""


@plugin("model", "rnn", RNNConfig)
class RNN(RecurrentStack):
    """Elman layers; weights start in U(+-1/sqrt(H)) as in torch, biases at 0."""

    def __init__(self, config: RNNConfig) -> None:
        kind = SigmoidRNN if config.nonlinearity == "sigmoid" else nn.RNN
        super().__init__(config, lambda width: kind(width, config.hidden_size), between=config.hidden_size)


@dataclass
class IRNNConfig(RecurrentConfig):
    """ReLU layers with the recurrent matrix initialized to the identity."""

    name: str = "irnn"
    identity: Annotated[float, Range(above=0, most=1)] = 0.5
    """Initial diagonal of the recurrent matrix. At 1, states that are never reset grow without bound."""


@plugin("model", "irnn", IRNNConfig)
class IRNN(RecurrentStack):
    """ReLU layers; non-recurrent weights start in U(+-1/sqrt(H)), biases at 0.

    Le et al. start from R = 1 and draw A from N(0, 0.001). They train with SGD on short sequences. In a continuous text
    with Adagrad's first steps of about `lr` per weight, both diverge within 30 steps of the default run: R = 1 with
    every seed tried, and A from N(0, 0.001) with most. R = 0.5 with U(+-1/sqrt(H)) is stable.
    """

    def __init__(self, config: IRNNConfig) -> None:
        size = config.hidden_size
        super().__init__(config, lambda width: nn.RNN(width, size, nonlinearity="relu"), between=size)
        with torch.no_grad():
            for layer in self.layers:
                nn.init.eye_(layer.get_parameter("weight_hh_l0")).mul_(config.identity)


@dataclass
class SCRNConfig(ModelConfig):
    """Fast units for short-term memory and slow units for long-term memory."""

    name: str = "scrn"
    context_size: Width = 40
    """Number of slow units, which are part of the core's output; 40 in the original paper."""
    memory: Annotated[float, Range(least=0, below=1)] = 0.95
    """Decay of the slow units: the fraction kept at each step."""

    @property
    def width(self) -> int:
        return self.hidden_size + self.context_size


@plugin("model", "scrn", SCRNConfig)
class SCRN(Core):
    """One layer of slow and fast units, concatenated in the output; no biases, as in the original."""

    def __init__(self, config: SCRNConfig) -> None:
        super().__init__()
        self.config, self.width = config, config.width
        self.context = nn.Linear(config.embedding_size, config.context_size, bias=False)
        self.fast = SigmoidRNN(config.embedding_size + config.context_size, config.hidden_size, bias=False)

    def forward(self, input_TBE: Tensor, state: State, masks: DropoutMasks | None) -> tuple[Tensor, State]:
        slow_TBS = self._slow_units(self.context(input_TBE).to(state[0].dtype), state[0])
        fast_TBH, after_1BH = self.fast(torch.cat([input_TBE, slow_TBS], dim=-1), state[1])
        hidden_TBD = torch.cat([fast_TBH, slow_TBS.to(fast_TBH.dtype)], dim=-1)
        return hidden_TBD, (slow_TBS[-1:], after_1BH.to(state[1].dtype))

    def _slow_units(self, driven_TBS: Tensor, before_1BS: Tensor) -> Tensor:
        """Compute the slow units after each step."""
        slow, keep = [], self.config.memory
        state_BS = before_1BS[0]
        for step_BS in (1 - keep) * driven_TBS:
            state_BS = torch.add(step_BS, state_BS, alpha=keep)
            slow.append(state_BS)
        return torch.stack(slow)

    def initial_state(self, num_streams: int, *, device: torch.device) -> State:
        """Slow units (1, B, S) and fast units (1, B, H)."""
        sizes = self.config.context_size, self.config.hidden_size
        slow, fast = (torch.zeros(1, num_streams, size, device=device) for size in sizes)
        return slow, fast
