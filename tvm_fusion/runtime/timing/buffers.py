"""Device memory for the tensors of one graph: each once, views as views."""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm

from ...errors import Unsupported
from ...ir.graph import FusionGraph, OpKind
from ...plan.group_view import dtype_bytes

if TYPE_CHECKING:
    from .launch_kernels import Key, LaunchWriter

ALIGNMENT = 256
POISON = 0xFF  # bytes of NaN in every float


class Buffers:
    """Tensors by name, allocated when first asked for.

    Attributes
    ----------
    params : names of the function's parameters, in order
    results : names of what it returns, tuples flattened
    """

    def __init__(self, graph: FusionGraph, writer: LaunchWriter, device: Any) -> None:
        self._graph, self._writer, self._device = graph, writer, device
        self._by_name = {t.name: t for t in graph.tensors}
        self._tensors: dict[Key, Any] = {}
        self._bytes: dict[Key, Any] = {}
        inner = (t for t in graph.tensors if not (t.is_inner or t.is_constant))
        self.params = tuple(t.name for t in inner if t.producer is None)
        self.results = writer.results()

    def tensor(self, key: Key) -> Any:
        """The TVM tensor of a name."""
        if key not in self._tensors:
            self._tensors[key] = self._make(key)
        return self._tensors[key]

    def _make(self, key: Key) -> Any:
        if key.startswith("constant "):
            return self._writer.constant(key).copyto(self._device)
        shape, dtype = self.type_of(key)
        return self.memory(key)._create_view(shape, dtype)

    def type_of(self, key: Key) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a tensor of the graph.

        Raises
        ------
        Unsupported
            An extent is symbolic.
        """
        tensor = self._by_name[key]
        if not all(isinstance(e, int) for e in tensor.shape):
            raise Unsupported(f"{key} has symbolic extents")
        return tensor.shape, tensor.dtype

    def memory(self, key: Key) -> Any:
        """The bytes of a tensor, as a TVM tensor; a view has those of what it looks at."""
        source = self.source(key)
        if source.startswith("constant "):
            return self.tensor(source)
        if source not in self._bytes:
            shape, dtype = self.type_of(source)
            self._bytes[source] = self.allocate(prod(shape) * dtype_bytes(dtype))
        return self._bytes[source]

    def allocate(self, size: int) -> Any:
        """New bytes on the device."""
        return tvm.runtime.empty((max(size, ALIGNMENT),), "uint8", self._device)

    def source(self, key: Key) -> Key:
        """The tensor that a view looks at; any other tensor is its own."""
        if key.startswith("constant "):
            return key
        while (producer := self._by_name[key].producer) is not None:
            op = self._graph.ops[producer]
            if op.kind is not OpKind.VIEW:
                break
            tensor = self._graph.tensors[op.inputs[0]]
            if tensor.is_constant:
                raise Unsupported("a view of a constant")
            key = tensor.name
        return key

    def fill(self, key: Key, value: Any) -> None:
        """Copies an array or a tensor of the same shape and dtype into a buffer."""
        target = self.tensor(key)
        if isinstance(value, np.ndarray):
            target.copyfrom(np.ascontiguousarray(value))
        elif isinstance(value, tvm.runtime.Tensor):
            value.copyto(target)
        else:
            tvm.runtime.from_dlpack(value.detach().contiguous()).copyto(target)

    def poison(self, key: Key) -> None:
        """Fills a tensor with bytes that are NaN in every floating-point dtype."""
        memory = self.memory(key)
        if self._device.type == "cuda" and (torch := sys.modules.get("torch")) is not None:
            torch.from_dlpack(memory).fill_(POISON)
        else:
            memory.copyfrom(np.full(memory.shape, POISON, "uint8"))
