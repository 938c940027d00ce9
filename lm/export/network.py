"""The parts of a language model as ONNX graphs: inputs, cores and output layers.

Shapes: T steps, B streams, E input width, D output width, M memory, S = M + T, H heads, W width of a head, G gates,
V words.
"""

from collections.abc import Sequence
from typing import Any

import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from lm.export.graph import Graph
from lm.model.base import Core, Input, State
from lm.model.cores.feedforward import Feedforward
from lm.model.cores.recurrent import SCRN, RecurrentStack, SigmoidRNN
from lm.model.cores.transformer import Block, Transformer
from lm.model.inputs.adaptive import AdaptiveInput
from lm.model.inputs.table import TableInput, TiedTable
from lm.output.base import OutputLayer
from lm.output.hierarchy import TwoLevelSoftmax
from lm.output.layers.adaptive import AdaptiveSoftmax
from lm.output.layers.dsoftmax import DSoftmax
from lm.output.layers.full import JointSoftmax
from lm.output.layers.hsm import HierarchicalSoftmax
from lm.system.errors import UserError

REST = torch.iinfo(torch.int64).max
"""End of a slice that reaches the end."""


def embed(g: Graph, layer: Input, ids_TB: str, vocab_size: int) -> str:
    """Word vectors (T, B, E); those of an input with more than a table are computed here, once for each word."""
    if isinstance(layer, AdaptiveInput):
        return adaptive_input(g, layer, ids_TB)
    if isinstance(layer, TiedTable):
        return g.rows(layer.word_vectors()[0], ids_TB)
    return g.rows(layer.weight if isinstance(layer, TableInput) else layer(torch.arange(vocab_size)), ids_TB)


def adaptive_input(g: Graph, layer: AdaptiveInput, ids_TB: str) -> str:
    result = ""
    for cluster, (start, table) in enumerate(zip(layer.starts, layer.weights(), strict=True)):
        vectors = g.rows(table, g.Clip(g.Sub(ids_TB, start), 0, layer.sizes[cluster] - 1))
        if cluster:
            inside_TB1 = g.Unsqueeze(g.GreaterOrEqual(ids_TB, start), [-1])
            vectors = g.Where(inside_TB1, g.linear(vectors, layer.projections[cluster - 1]), result)
        result = vectors
    return result


# ---- cores -----------------------------------------------------------------------------------------------------


def run_core(g: Graph, core: Core, x_TBE: str, state: State) -> tuple[str, State]:
    """Return hidden states (T, B, D) and the state after the last step."""
    if isinstance(core, RecurrentStack):
        after = []
        for layer, before in zip(core.layers, state, strict=True):
            assert isinstance(layer, nn.RNNBase)
            x_TBE, new = (projected if layer.proj_size else recurrent)(g, layer, x_TBE, before)
            after.append(new)
        return x_TBE if core.projection is None else g.linear(x_TBE, core.projection.weight), after
    if isinstance(core, SCRN):
        return scrn(g, core, x_TBE, state)
    if isinstance(core, Feedforward):
        return feedforward(g, core, x_TBE, state)
    if isinstance(core, Transformer):
        return transformer(g, core, x_TBE, state)
    raise UserError(f"{type(core).__name__} has no ONNX graph. Try format=torch.")


GATES = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2]}
"""Order of ONNX's gates, as indices of torch's."""
ACTIVATIONS = {"RNN_TANH": "Tanh", "RNN_RELU": "Relu"}


def recurrent(g: Graph, layer: nn.RNNBase, x_TBE: str, before: Any) -> tuple[str, Any]:
    """One layer by ONNX's operator of the same name."""
    order = GATES.get(layer.mode, [0])

    def gates(weight: Tensor) -> Tensor:
        return torch.cat([weight.chunk(len(order))[index] for index in order])

    weights, biases = [gates(weight) for weight in layer.all_weights[0][:2]], layer.all_weights[0][2:]
    stored = [g.Unsqueeze(g.weight(weight), [0]) for weight in weights]
    states = before if isinstance(before, tuple) else (before,)
    options: dict[str, Any] = {"hidden_size": layer.hidden_size, "outputs": 1 + len(states)}
    if layer.mode == "GRU":
        options["linear_before_reset"] = 1
    elif layer.mode != "LSTM":
        options["activations"] = ["Sigmoid" if isinstance(layer, SigmoidRNN) else ACTIVATIONS[layer.mode]]
    bias = torch.cat([gates(bias) for bias in biases])[None] if biases else ""
    hidden_T1BD, *after = g.add(layer.mode.partition("_")[0], x_TBE, *stored, bias, "", *states, **options)
    return g.Squeeze(hidden_T1BD, [1]), tuple(after) if len(after) > 1 else after[0]


def projected(g: Graph, layer: nn.RNNBase, x_TBE: str, before: Any) -> tuple[str, Any]:
    """An LSTM with projections, which ONNX's operator lacks, as a loop over steps."""
    input_GE, recurrent_GD, *biases, narrow_DH = layer.all_weights[0]
    gates_TBG = g.linear(x_TBE, input_GE, biases[0] + biases[1])
    recurrent_DG, narrow_HD = (g.Transpose(g.weight(weight), perm=[1, 0]) for weight in (recurrent_GD, narrow_DH))
    outer, g.nodes = g.nodes, []
    i, f, new, o = g.Split(g.Add("gates", g.MatMul("hidden", recurrent_DG)), axis=-1, outputs=4)
    cell = g.Add(g.Mul(g.Sigmoid(f), "cell"), g.Mul(g.Sigmoid(i), g.Tanh(new)))
    hidden = g.MatMul(g.Mul(g.Sigmoid(o), g.Tanh(cell)), narrow_HD)
    names = [["hidden", "cell", "gates"], [hidden, cell, g.Identity(hidden)]]
    before_step, after_step = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in part] for part in names
    )
    body, g.nodes = helper.make_graph(g.nodes, "step", before_step, after_step), outer
    start = (g.Squeeze(each, [0]) for each in before)
    *after, hidden_TBD = g.Scan(*start, gates_TBG, outputs=3, body=body, num_scan_inputs=1)
    return hidden_TBD, tuple(g.Unsqueeze(each, [0]) for each in after)


def scrn(g: Graph, core: SCRN, x_TBE: str, state: State) -> tuple[str, State]:
    """The slow units are a linear recurrent layer."""
    keep, width = core.config.memory, core.config.context_size
    weights = [g.Unsqueeze(g.weight(w), [0]) for w in ((1 - keep) * core.context.weight, keep * torch.eye(width))]
    linear: dict[str, Any] = {"activations": ["Affine"], "activation_alpha": [1.0], "activation_beta": [0.0]}
    slow_T1BS, slow_1BS = g.RNN(x_TBE, *weights, "", "", state[0], outputs=2, hidden_size=width, **linear)
    slow_TBS = g.Squeeze(slow_T1BS, [1])
    fast_TBH, fast_1BH = recurrent(g, core.fast, g.Concat(x_TBE, slow_TBS, axis=-1), state[1])
    return g.Concat(fast_TBH, slow_TBS, axis=-1), (slow_1BS, fast_1BH)


def feedforward(g: Graph, core: Feedforward, x_TBE: str, state: State) -> tuple[str, State]:
    words, steps = g.Concat(state, x_TBE, axis=0), g.Shape(x_TBE, end=1)
    windows = [g.Slice(words, [first], g.Add(steps, first), [0]) for first in range(core.config.window)]
    hidden = g.Concat(*windows, axis=-1)
    for layer in core.layers:
        assert isinstance(layer, nn.Linear)
        hidden = g.add(core.config.nonlinearity.capitalize(), g.linear(hidden, layer.weight, layer.bias))
    if core.projection is not None:
        hidden = g.linear(hidden, core.projection.weight)
    return hidden, g.Slice(words, steps, [REST], [0])


def transformer(g: Graph, core: Transformer, x_TBE: str, state: State) -> tuple[str, State]:
    memory, width = core.config.memory, core.width // core.config.heads
    steps = g.Squeeze(g.Shape(x_TBE, end=1), [0])
    key_S = g.Cast(g.Range(0, g.Add(steps, memory), 1), to=TensorProto.FLOAT)
    age_TS = g.Sub(g.Unsqueeze(g.Slice(key_S, [memory], [REST], [0]), [1]), key_S)
    near_TS = g.And(g.GreaterOrEqual(age_TS, 0.0), g.LessOrEqual(age_TS, float(memory)))
    read_BS = g.GreaterOrEqual(key_S, g.Sub(float(memory), g.Transpose(state["read"], perm=[1, 0])))
    visible_B1TS = g.Unsqueeze(g.And(near_TS, g.Unsqueeze(read_BS, [1])), [1])
    mask_B1TS = g.Where(visible_B1TS, 0.0, -torch.inf)
    frequency_W = 10_000 ** (-torch.arange(0, width, 2) / width).repeat(2)
    angle_S11W = g.Unsqueeze(g.Mul(g.Unsqueeze(key_S, [1]), frequency_W), [1, 2])
    sign_W = 1 - 2 * (torch.arange(width) < width // 2).float()
    rotation = g.Cos(angle_S11W), g.Mul(sign_W, g.Sin(angle_S11W))
    hidden = x_TBE if isinstance(core.input, nn.Identity) else g.linear(x_TBE, core.input.weight)
    memories = []
    for block, memory_MBD in zip(core.blocks, state["memories"], strict=True):
        assert isinstance(block, Block)
        context_SBD = g.Concat(memory_MBD, hidden, axis=0)
        memories.append(g.Slice(context_SBD, [-memory], [REST], [0]))
        hidden = g.Add(hidden, attend(g, block, context_SBD, memory, rotation, mask_B1TS))
        wide = g.Relu(g.linear(norm(g, block.feedforward_norm, hidden), block.wide.weight))
        hidden = g.Add(hidden, g.linear(wide, block.narrow.weight))
    read = g.Min(g.Add(state["read"], g.Cast(steps, to=TensorProto.FLOAT)), float(memory))
    return norm(g, core.norm, hidden), {"memories": memories, "read": read}


def attend(g: Graph, block: Block, context_SBD: str, memory: int, rotation: Sequence[str], mask_B1TS: str) -> str:
    context_SBD = norm(g, block.norm, context_SBD)
    query = g.linear(g.Slice(context_SBD, [memory], [REST], [0]), block.query.weight)
    key, value = g.Split(g.linear(context_SBD, block.key_value.weight), axis=-1, outputs=2)
    query, key, value = (g.Reshape(each, [0, 0, block.heads, -1]) for each in (query, key, value))

    def rotate(x: str, cos: str, sin: str) -> str:
        swapped = g.Concat(*reversed(g.Split(x, axis=-1, outputs=2)), axis=-1)
        return str(g.Add(g.Mul(x, cos), g.Mul(swapped, sin)))

    query = rotate(query, *(g.Slice(each, [memory], [REST], [0]) for each in rotation))
    key = rotate(key, *rotation)
    query, value = (g.Transpose(each, perm=[1, 2, 0, 3]) for each in (query, value))
    width = block.query.weight.size(0) // block.heads
    scores_BHTS = g.Mul(g.MatMul(query, g.Transpose(key, perm=[1, 2, 3, 0])), width**-0.5)
    mixed_BHTW = g.MatMul(g.Softmax(g.Add(scores_BHTS, mask_B1TS), axis=-1), value)
    return g.linear(g.Reshape(g.Transpose(mixed_BHTW, perm=[2, 0, 1, 3]), [0, 0, -1]), block.attended.weight)


def norm(g: Graph, layer: nn.LayerNorm, x: str) -> str:
    return str(g.LayerNormalization(x, layer.weight, layer.bias, axis=-1, epsilon=layer.eps))


# ---- output layers --------------------------------------------------------------------------------------------


def log_probs(g: Graph, layer: OutputLayer, hidden: str) -> str:
    """Log-probabilities of all words, (..., V)."""
    if isinstance(layer, JointSoftmax):
        views = [hidden]
        if isinstance(layer, DSoftmax) and layer.projects:
            views += [g.linear(hidden, projection) for projection in layer.projections]
        elif isinstance(layer, DSoftmax):
            views = g.split(hidden, layer.widths)
        scores = g.Concat(*(g.linear(*pair) for pair in zip(views, layer.weights(), strict=True)), axis=-1)
        scores = scores if layer.offset_V is None else g.Add(scores, layer.offset_V.float())
        return str(g.LogSoftmax(scores, axis=-1))
    if isinstance(layer, AdaptiveSoftmax | HierarchicalSoftmax):
        return two_levels(g, layer, hidden)
    raise UserError(f"{type(layer).__name__} has no ONNX graph. Try format=torch.")


def two_levels(g: Graph, layer: TwoLevelSoftmax, hidden: str) -> str:
    """Add each cluster's log-probability to those of its words."""
    sizes = [size for size in (layer.shortlist, *[1] * len(layer.cluster_sizes)) if size]
    root = g.LogSoftmax(g.linear(hidden, *layer.root()), axis=-1)
    parts = g.split(root, sizes)
    parts, clusters = ([], parts) if not layer.shortlist else (parts[:1], parts[1:])
    for log_prob, scores in zip(clusters, leaf_scores(g, layer, hidden), strict=True):
        parts.append(g.Add(log_prob, g.LogSoftmax(scores, axis=-1)))
    joined = g.Concat(*parts, axis=-1)
    return str(joined if layer.position_of_word is None else g.Gather(joined, layer.position_of_word, axis=-1))


def leaf_scores(g: Graph, layer: TwoLevelSoftmax, hidden: str) -> Sequence[str]:
    if isinstance(layer, HierarchicalSoftmax):
        return g.split(g.linear(hidden, layer.words), layer.cluster_sizes)
    assert isinstance(layer, AdaptiveSoftmax)
    # Without a shortlist, the head is a cluster of full width.
    inputs = [hidden] * (len(layer.clusters) - len(layer.projections))
    inputs += [g.linear(hidden, projection) for projection in layer.projections]
    return [g.linear(*pair) for pair in zip(inputs, layer.clusters, strict=True)]
