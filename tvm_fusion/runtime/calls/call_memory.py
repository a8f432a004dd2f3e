"""How much device memory one call takes: read off the planned module, and measured.

Planned are the weights, and the storages that are alive at the same time while `main` runs, its
outputs among them. Not counted are the inputs, which are the caller's, and machine code.
"""

import ast
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from ...errors import InputError, TargetError
from ...plan.group_view import dtype_bytes
from ...transform.functions.functions import operator_name
from ..graphs.driver import CudaDriver

Size = int | str  # bytes: a number, or Python's spelling of an expression in symbolic extents

_KILLS = ("relax.memory.kill_storage", "relax.memory.kill_tensor")
_NO_TENSOR = frozenset()
_UNKNOWN = "unknown"  # a symbol that nobody gives a value


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Device memory of one call.

    Attributes
    ----------
    weights_bytes : int
        The constants, which stay on the device between calls.
    outputs : tuple of (int or str)
        Bytes of the storages that outputs lie in.
    peaks : tuple of tuple of (int or str)
        Bytes of the storages alive at the same time, at every moment that may be the worst.
    """

    weights_bytes: int
    outputs: tuple[Size, ...] = ()
    peaks: tuple[tuple[Size, ...], ...] = ()

    def peak_bytes(self, extents: Mapping[str, int] | None = None) -> int | None:
        """Weights, and the most that lives at once beside them.

        Parameters
        ----------
        extents : Mapping of str to int, optional
            The symbolic extents by name; without one of them the result is None.
        """
        try:
            alive = max((_sum(peak, extents or {}) for peak in self.peaks), default=0)
        except KeyError:
            return None
        return self.weights_bytes + alive

    def storages(self) -> list[int]:
        """Bytes of the storages that live at once, as many of each size as do at any moment; those
        of symbolic size are left out.
        """
        most: Counter[int] = Counter()
        for moment in (self.outputs, *self.peaks):
            most |= Counter(size for size in moment if isinstance(size, int))
        return list(most.elements())

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `from_json`."""
        return {"weights": self.weights_bytes, "outputs": self.outputs, "peaks": self.peaks}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "MemoryPlan":
        """Inverse of `to_json`; raises KeyError, SyntaxError or TypeError for other values."""
        peaks = tuple(tuple(map(_size, peak)) for peak in value["peaks"])
        weights = value["weights"]
        if type(weights) is not int:
            raise TypeError(f"weights of {weights!r} bytes")
        return cls(weights, tuple(map(_size, value["outputs"])), peaks)


def _size(value: Any) -> Size:
    if type(value) not in (int, str):
        raise TypeError(f"a storage of {value!r} bytes")
    if isinstance(value, str):
        ast.parse(value, mode="eval")
    return value


def planned_memory(mod: tvm.IRModule, function: str = "main") -> MemoryPlan:
    """Return the memory of a call of a function; storages are planned and killed after their last
    use. The weights are those of all functions of the module, which stay on the device together.
    """
    walk = _Walk(mod, function)
    outputs = walk.function(mod[function], Counter())
    return MemoryPlan(
        _weights_bytes(mod),
        tuple(walk.sizes[storage] for storage in sorted(outputs)),
        walk.worst(),
    )


def measured_call_bytes(
    call: Callable[[], Any], device: tvm.runtime.Device, driver: CudaDriver | None = None
) -> int:
    """Return what one call takes from a CUDA device, its outputs included, and its inputs and the
    weights not: what memory was free before less what is free after it, to about 2 MB.

    Runs the call twice (the first loads kernels), and empties TVM's pools. What others take or give
    back meanwhile is counted too.

    Raises
    ------
    TargetError
        If the device is no CUDA device.
    """
    if device.type != "cuda":
        raise TargetError("memory is measured on CUDA devices; a plan says what a CPU needs")
    driver = driver or CudaDriver(device.index)
    clear = tvm.get_global_func("vm.builtin.memory_manager.clear")
    with driver.current():
        call()
        driver.synchronize()
        clear()
        before = driver.free_bytes()
        outputs = call()
        driver.synchronize()
        used = before - driver.free_bytes()
        del outputs
    return max(0, used)


class _Walk:
    """Follows storages through the bindings of a module's functions.

    Attributes
    ----------
    sizes : list of (int or str)
        Bytes by storage.
    """

    def __init__(self, mod: tvm.IRModule, function: str) -> None:
        self._mod = mod
        self._ambiguous = _ambiguous_names(mod[function])
        self.sizes: list[Size] = []
        self._moments: list[frozenset[int]] = []
        self._grew = False
        self._inside: set[relax.Function] = set()

    def worst(self) -> tuple[tuple[Size, ...], ...]:
        """The sizes at each moment that may be the worst; one, if all are numbers."""
        moments = [tuple(self.sizes[s] for s in sorted(moment)) for moment in self._moments]
        if all(isinstance(size, int) for moment in moments for size in moment):
            return (max(moments, key=sum),) if moments else ()
        return tuple(dict.fromkeys(moments))

    def function(self, func: relax.Function, alive: Counter[int]) -> frozenset[int]:
        """Walk a function called while `alive` (references by storage) lives; its outputs."""
        if func in self._inside:
            return self._allocated(_UNKNOWN)
        self._inside.add(func)
        outputs = self._sequence(func.body, {}, alive)
        self._inside.remove(func)
        self._note(alive)
        return outputs

    def _allocated(self, size: Size) -> frozenset[int]:
        self.sizes.append(size)
        self._grew = True
        return frozenset([len(self.sizes) - 1])

    def _sequence(
        self, body: relax.Expr, held: dict[relax.Var, frozenset[int]], alive: Counter[int]
    ) -> frozenset[int]:
        if not isinstance(body, relax.SeqExpr):
            return self._value(body, held, alive)
        for block in body.blocks:
            for binding in block.bindings:
                value = binding.value
                if operator_name(value) in _KILLS:
                    self._note(alive)
                    _release(held.pop(value.args[0], _NO_TENSOR), alive)
                    continue
                held[binding.var] = found = self._value(value, held, alive)
                alive.update(found)
        return held.get(body.body, _NO_TENSOR)

    def _value(
        self, value: relax.Expr, held: dict[relax.Var, frozenset[int]], alive: Counter[int]
    ) -> frozenset[int]:
        """The storages that a value keeps alive."""
        if isinstance(value, relax.Var):
            return held.get(value, _NO_TENSOR)
        if isinstance(value, relax.Tuple):
            return frozenset().union(*(self._value(f, held, alive) for f in value.fields))
        if isinstance(value, relax.TupleGetItem):
            return self._value(value.tuple_value, held, alive)
        if isinstance(value, relax.If):
            branches = (value.true_branch, value.false_branch)
            found = [self._sequence(b, dict(held), Counter(alive)) for b in branches]
            return found[0] | found[1]
        if not isinstance(value, relax.Call):
            return _NO_TENSOR
        if operator_name(value) == "relax.memory.alloc_storage":
            return self._allocated(_bytes(value.args[0].values, self._ambiguous))
        callee = self._mod[value.op] if isinstance(value.op, tvm.ir.GlobalVar) else None
        if isinstance(callee, relax.Function):
            return self.function(callee, Counter(alive))
        if not _holds_tensors(value.ty):
            return _NO_TENSOR
        return frozenset().union(*(held.get(a, _NO_TENSOR) for a in value.args if _is_var(a)))

    def _note(self, alive: Counter[int]) -> None:
        """Remember what is alive, before something dies and after something was allocated."""
        if self._grew:
            self._moments.append(frozenset(storage for storage, n in alive.items() if n > 0))
            self._grew = False


def _release(storages: Iterable[int], alive: Counter[int]) -> None:
    alive.subtract(storages)


def _is_var(value: Any) -> bool:
    return isinstance(value, relax.Var)


def _holds_tensors(ty: Any) -> bool:
    """Whether a call's result may be a tensor; functions that fill their arguments give ()."""
    return bool(ty.fields) if isinstance(ty, relax.TupleType) else isinstance(ty, relax.TensorType)


def _ambiguous_names(main: relax.Function) -> set[str]:
    """Names that several symbolic extents of the inputs have: no value can be given to them."""
    known: list[Any] = []
    for param in main.params:
        for var in relax.analysis.tir_vars_in_type(param.ty):
            if not any(var.same_as(other) for other in known):
                known.append(var)
    counts = Counter(var.name for var in known)
    return {name for name, count in counts.items() if count > 1}


def _bytes(extents: Iterable[Any], ambiguous: Collection[str]) -> Size:
    values = [int(e) if isinstance(e, tvm.tirx.IntImm) else str(e) for e in extents]
    if all(isinstance(v, int) for v in values):
        return math.prod(values)
    if ambiguous:
        return _UNKNOWN
    return " * ".join(f"({v})" for v in values)


def _weights_bytes(mod: tvm.IRModule) -> int:
    """Bytes of all constants, each once."""
    found: dict[int, int] = {}

    def visit(expr: Any) -> None:
        if isinstance(expr, tvm.ir.Constant) and isinstance(expr.value, tvm.runtime.Tensor):
            value = expr.value
            found[int(value.data_ptr())] = value.numel() * dtype_bytes(str(value.dtype))

    for _, func in mod.functions_items():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return sum(found.values())


def _sum(sizes: Iterable[Size], extents: Mapping[str, int]) -> int:
    return sum(s if isinstance(s, int) else evaluated(s, extents) for s in sizes)


def evaluated(text: str, extents: Mapping[str, int]) -> int:
    """The value of an expression such as "4 * n * 8" in symbolic extents, as TVM prints it;
    KeyError for a symbol without a value.
    """
    return _number(ast.parse(text, mode="eval").body, extents)


_OPERATORS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_FUNCTIONS = {"int64": int, "int32": int, "max": max, "min": min}


def _number(node: ast.expr, extents: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return extents[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        parts = (_number(side, extents) for side in (node.left, node.right))
        return _OPERATORS[type(node.op)](*parts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # T.int64(3), T.max
        function = _FUNCTIONS.get(node.func.attr)
        if function is not None:
            return function(*(_number(a, extents) for a in node.args))
    raise InputError(f"memory plan: cannot evaluate {ast.unparse(node)!r}; compile and save again")
