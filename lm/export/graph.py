"""ONNX graphs in Python: `graph.MatMul(a, b)` adds a node and returns the name of its result.

Arguments are names, tensors or Python numbers. All operators are ONNX's own, so any runtime can run the model.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor

SMALLEST = 1 << 10
"""Matrices with fewer weights are not quantized."""


class Graph:
    """Nodes and initializers. With `int8`, a matrix is stored as int8 and a float32 scale per row."""

    def __init__(self, *, int8: bool) -> None:
        self.int8 = int8
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self._stored: dict[Any, tuple[Tensor, str, str | None]] = {}
        self._count = 0

    def __getattr__(self, kind: str) -> Any:
        return partial(self.add, kind)

    def add(self, kind: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; return the name of its output, or a list of names. An empty name omits an input."""
        names = [item if isinstance(item, str) else self.constant(item) for item in inputs]
        results = [self._name(kind) for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, names, results, **attributes))
        return results[0] if outputs == 1 else results

    def constant(self, value: Any) -> str:
        """Store a tensor or Python numbers: integers as int64, others as float32."""
        name = self._name("constant")
        self.initializers.append(numpy_helper.from_array(torch.as_tensor(value).detach().numpy(), name))
        return name

    def weight(self, matrix: Tensor) -> str:
        """Return a matrix as float32."""
        name, scale = self._matrix(matrix)
        return name if scale is None else str(self.Mul(self.Cast(name, to=TensorProto.FLOAT), scale))

    def rows(self, matrix: Tensor, ids: str) -> str:
        """Look up rows of a matrix."""
        name, scale = self._matrix(matrix)
        found = self.Gather(name, ids)
        return str(
            found if scale is None else self.Mul(self.Cast(found, to=TensorProto.FLOAT), self.Gather(scale, ids))
        )

    def linear(self, x: str, weight_KD: Tensor, bias_K: Tensor | None = None) -> str:
        scores = self.MatMul(x, self.Transpose(self.weight(weight_KD), perm=[1, 0]))
        return str(scores if bias_K is None else self.Add(scores, bias_K))

    def split(self, x: str, sizes: Sequence[int]) -> list[str]:
        """Cut the last axis into parts of these sizes."""
        return list(self.Split(x, list(sizes), axis=-1, outputs=len(sizes))) if len(sizes) > 1 else [x]

    def _matrix(self, matrix: Tensor) -> tuple[str, str | None]:
        """Store a matrix once, even if it is shared; return its name and that of its scales, if it has any."""
        key = matrix.data_ptr(), matrix.shape
        if key not in self._stored:
            scale = None
            kept = matrix
            if self.int8 and matrix.numel() >= SMALLEST:
                scale_K1 = matrix.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
                kept, scale = (matrix / scale_K1).round().to(torch.int8), self.constant(scale_K1)
            self._stored[key] = matrix, self.constant(kept), scale  # with the matrix, whose address stays taken
        return self._stored[key][1:]

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}_{self._count}"
