"""`python -m lm.export`: write a model with its state as inputs and outputs, and its vocabulary next to it."""

import io
import warnings
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lm.config.inference import ExportConfig
from lm.data.text.vocabulary import Vocabulary
from lm.inference.open_model import open_model
from lm.model.inputs.char_cnn import CharCNN
from lm.model.language_model import LanguageModel
from lm.output.layers.hsm_huffman import HuffmanSoftmax
from lm.system.console import say
from lm.system.errors import UserError
from lm.system.files import write_bytes
from lm.system.memory import size_of
from lm.system.tree import leaves, map_leaves

PROTOBUF_LIMIT = (1 << 31) - 1
"""Maximum size of an ONNX file in bytes."""


@torch.no_grad()
def export(config: ExportConfig) -> None:
    """Write the model and its vocabulary."""
    assert config.checkpoint is not None and config.out is not None
    path = Path(config.out)
    loaded = open_model(config.checkpoint, device="cpu", which=config.which, verify=config.verify)
    model = loaded.model
    if not isinstance(model, LanguageModel) or model.maxent is not None:
        kind = "n-gram weights (model.maxent)" if isinstance(model, LanguageModel) else loaded.title
        raise UserError(f"checkpoint must be a neural model without n-gram weights to be exported; got {kind}.")
    if isinstance(model.output, HuffmanSoftmax):
        raise UserError(
            "output=hsm_huffman has no static graph, because each word has a different path. Export another layer."
        )
    if config.scores == "topk":
        model.check_k(config.k)
    content = as_onnx(model, loaded.vocabulary, config) if config.format == "onnx" else as_program(model)
    write_bytes(path, content)
    beside = {path.with_name(f"{path.stem}.{name}"): data for name, data in loaded.vocabulary.files().items()}
    for file, data in beside.items():
        write_bytes(file, data)
    say(f"{path} ({size_of(len(content))}), with its vocabulary in {', '.join(map(str, beside))}")


def as_onnx(model: LanguageModel, vocabulary: Vocabulary, config: ExportConfig) -> bytes:
    """Build the graph: ids (batch, length) and states to log-probabilities and new states."""
    try:
        from onnx import TensorProto, helper

        from lm.export.graph import Graph
        from lm.export.network import embed, log_probs, run_core
    except ImportError:
        raise UserError("format=onnx needs the package onnx. Try pip install onnx onnxruntime.") from None
    graph, numbers = Graph(int8=config.quantize is not None), count()
    zeros = model.initial_state(1)
    state = map_leaves(lambda _: f"state_{next(numbers)}", zeros)
    vectors_TBE = embed(graph, model.input, graph.Transpose("ids", perm=[1, 0]), model.vocab_size)
    hidden_TBD, after = run_core(graph, model.core, vectors_TBE, state)
    scores = log_probs(graph, model.output, graph.Transpose(hidden_TBD, perm=[1, 0, 2]))
    grid: list[Any] = ["batch", "length"]
    words = {"ids": grid, **({"targets": grid} if config.scores == "targets" else {})}
    results = {"log_probs": (scores, TensorProto.FLOAT, [*grid, model.vocab_size])}
    if config.scores == "targets":
        chosen = graph.GatherElements(scores, graph.Unsqueeze("targets", [-1]), axis=-1)
        results["log_probs"] = graph.Squeeze(chosen, [-1]), TensorProto.FLOAT, grid
    elif config.scores == "topk":
        best, ids = graph.TopK(scores, [config.k], axis=-1, outputs=2)
        results["log_probs"] = best, TensorProto.FLOAT, [*grid, config.k]
        results["top_ids"] = ids, TensorProto.INT64, [*grid, config.k]
    sizes = [[tensor.size(0), "batch", *tensor.shape[2:]] for tensor in leaves(zeros)]
    for name, new, shape in zip(leaves(state), leaves(after), sizes, strict=True):
        results[f"new_{name}"] = new, TensorProto.FLOAT, shape
    for name, (value, _, _) in results.items():
        graph.nodes.append(helper.make_node("Identity", [value], [name]))
    info = helper.make_tensor_value_info
    inputs = [info(name, TensorProto.INT64, shape) for name, shape in words.items()]
    inputs += [info(name, TensorProto.FLOAT, shape) for name, shape in zip(leaves(state), sizes, strict=True)]
    outputs = [info(name, kind, shape) for name, (_, kind, shape) in results.items()]
    made = helper.make_graph(graph.nodes, "language_model", inputs, outputs, graph.initializers)
    onnx_model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(onnx_model, {"eos_id": str(vocabulary.eos_id), "unk_id": str(vocabulary.unk_id)})
    if onnx_model.ByteSize() > PROTOBUF_LIMIT:
        raise UserError(f"An ONNX file holds at most 2 GiB; got {size_of(onnx_model.ByteSize())}. Try quantize=int8.")
    return bytes(onnx_model.SerializeToString())


class Program(nn.Module):
    """One step as a function of tensors: ids (B, 1) and states to log-probabilities (B, 1, V) and states."""

    def __init__(self, model: LanguageModel, state: Any) -> None:
        super().__init__()
        self.model, self.state = model, state

    def forward(self, ids_B1: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        given = iter(state)
        hidden_1BD, after = self.model(ids_B1.t(), map_leaves(lambda _: next(given), self.state))
        return self.model.output.log_prob(hidden_1BD.transpose(0, 1)), *leaves(after)


def as_program(model: LanguageModel) -> bytes:
    """Serialize a `torch.export` program of one step, because recurrent layers are unrolled; the batch is dynamic."""
    if isinstance(model.input, CharCNN):  # each word's vector is computed once
        vectors_VE = model.input(torch.arange(model.vocab_size))
        model.input = nn.Embedding.from_pretrained(vectors_VE)  # type: ignore[no-untyped-call]
    state, file, batch = model.initial_state(2), io.BytesIO(), torch.export.Dim("batch", max=1 << 16)
    shapes = {0: batch}, tuple({1: batch} for _ in leaves(state))
    ids_B1 = torch.zeros(2, 1, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The tensor attributes self")  # nn.LSTM's own list of its weights
        program = torch.export.export(Program(model, state), (ids_B1, *leaves(state)), dynamic_shapes=shapes)
    torch.export.save(program, file)
    return file.getvalue()
