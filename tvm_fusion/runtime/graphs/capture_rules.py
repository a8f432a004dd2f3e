"""How calls are captured into CUDA graphs, and which modules cannot be.

A graph repeats the launches of one call. What a call does on the host between its launches is not
repeated: it must depend on the shapes of the inputs alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm

from ...errors import ConfigError
from ..calls.launch_count import builtin_calls, call_sites

# Builtins of the VM that compute with shapes, views and memory, and read no tensor's values.
HARMLESS_BUILTINS = frozenset(
    "vm.builtin." + name
    for name in (
        "alloc_shape_heap",
        "alloc_storage",
        "alloc_tensor",
        "check_func_info",
        "check_prim_value_info",
        "check_shape_info",
        "check_string_info",
        "check_tensor_info",
        "check_tuple_info",
        "copy",
        "ensure_zero_offset",
        "make_prim_value",
        "make_shape",
        "make_tuple",
        "match_prim_value",
        "match_shape",
        "null_value",
        "reshape",
        "shape_of",
        "tuple_getitem",
        "tuple_reset_item",
    )
)
_WHY_NOT = {
    "vm.builtin.tensor_to_shape": "a shape depends on the values of a tensor",
    "vm.builtin.read_if_cond": "a branch depends on the values of a tensor",
    "vm.builtin.to_device": "a tensor moves between devices",
    "vm.builtin.cuda_graph.run_or_capture": "TVM captures parts of it (use_cuda_graph) already",
}


@dataclass(frozen=True, slots=True)
class CudaGraphOptions:
    """How calls are captured.

    Attributes
    ----------
    static_outputs : bool
        Return the same memory from every call with inputs of the same shapes: it overwrites what
        the one before returned. Otherwise outputs are the caller's.
    max_shapes : int
        For how many lists of input shapes a graph is kept; the one not used for longest goes first.
        Each holds memory for intermediates, and for outputs if they are static.
    """

    static_outputs: bool = False
    max_shapes: int = 8

    def __post_init__(self) -> None:
        if type(self.static_outputs) is not bool:
            raise ConfigError(
                f"cuda_graph: static_outputs is no bool: {self.static_outputs!r}"
                "; give True or False"
            )
        if type(self.max_shapes) is not int or self.max_shapes < 1:
            raise ConfigError(f"cuda_graph: max_shapes must be 1 or more, got {self.max_shapes!r}")

    @classmethod
    def of(cls, value: Any) -> "CudaGraphOptions | None":
        """Return the options that a caller spelt: a bool, None, a mapping, or options.

        Raises
        ------
        ConfigError
            For a key that does not exist, or a value out of range.
        """
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"cuda_graph: expected a bool or a mapping of options, got {value!r}")
        if unknown := sorted(set(value) - set(cls.__slots__)):
            raise ConfigError(
                f"cuda_graph: unknown option {unknown[0]!r}; there are {', '.join(cls.__slots__)}"
            )
        return cls(**value)


def refusal_of_executable(executable: tvm.runtime.Executable, function: str = "main") -> str | None:
    """Why calls of a function cannot be captured, as far as the built module tells; None if not."""
    for name in builtin_calls(executable, function):
        if name not in HARMLESS_BUILTINS:
            return f"{_WHY_NOT.get(name, 'what it does on the host is not repeated')} ({name})"
    for name in call_sites(executable, function):
        if not executable.mod.implements_function(name, query_imports=True):
            return f"it calls {name}, which is no kernel: a graph would not call it again"
    return None
