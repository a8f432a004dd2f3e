"""Weights without their values: constants that stand for them while a model is planned.

    matmul(x, const)     ->     matmul(x, stand-in)         stands for: the constant
    permute_dims(stand-in)   ->   another stand-in          stands for: permute_dims of the first

A large constant of a model is a weight, and nothing that a plan decides depends on its numbers. It
is replaced by a *stand-in*: a constant of its shape and type whose memory nobody fills, but for a
few bytes that say which it is. So it costs nothing to copy, to hash or to hold, all passes take it
for the constant that it is, and what they compute of constants alone is another stand-in, with the
`Recipe` of how it comes from others. The numbers are computed once, in the end (`runtime.build`):
the compiled function takes them as parameters.

Who needs the numbers of a constant asks `numbers`, never its memory.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from ..errors import InputError

LEAST_ELEMENTS = 1 << 16
"""Of a constant that is a weight. Smaller ones (biases, factors of a norm) stay what they are: what
they hold is looked at, for what can be folded and left out.
"""

SAMPLED = 1024
LEAST_DISTINCT = 64
"""Different numbers among the `SAMPLED` of a weight: masks and other patterns have fewer, and
passes look for those.
"""

_KINDS = ("float", "bfloat", "int8", "uint8")
_HEADER_BYTES = 16


class Recipe(Protocol):
    """How the numbers of a weight come from those of others. Equal recipes hash alike, and do the
    same.
    """

    def __hash__(self) -> int: ...

    def digest(self) -> str:
        """What it does, the same in each process."""

    def of(self, arrays: Sequence[np.ndarray]) -> np.ndarray | tvm.runtime.Tensor:
        """The numbers, on the host."""

    def kernel(self) -> tvm.tirx.PrimFunc | None:
        """A function without a schedule that computes them, for a device; None: the host does."""


@dataclass(eq=False)
class Weight:
    """What a stand-in stands for.

    Attributes
    ----------
    name : str
        Which it is among those of its model: the same whenever the model is compiled.
    shape : tuple of int
    dtype : str
    value : Any
        The tensor, of TVM or torch, of a weight of the model itself, on any device; None of others
        until they are computed.
    recipe : Recipe or None
        How others are computed.
    sources : tuple of Weight or tvm.runtime.Tensor
        And of what: weights, and constants that are none.
    settled : bool
        Whether `value` is a module's own: what the model does with its weights changes nothing.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    value: Any = None
    recipe: Recipe | None = None
    sources: tuple[Any, ...] = ()
    settled: bool = False

    @property
    def bytes(self) -> int:
        """The memory that its numbers take."""
        return -(-math.prod(self.shape) * tvm.DataType(self.dtype).bits // 8)

    def tensor(self) -> tvm.runtime.Tensor:
        """The numbers on the host; those of another weight than the model's own are computed."""
        if self.value is None:
            found = self.recipe.of([numbers(source) for source in self.sources])
            if found is None:
                raise InputError(
                    f"weights of other values than those that the plan was made for: "
                    f"{self.recipe.digest()} is not possible; compile the model again"
                )
            return _tensor(found, self.dtype)
        found = self.given()
        return found if found.device.type == "cpu" else found.copyto(tvm.cpu())

    def given(self) -> tvm.runtime.Tensor | None:
        """The tensor that there is, where it lies; None of a weight that is still to be computed.
        It may be the memory of a model of torch.
        """
        if self.value is None or isinstance(self.value, tvm.runtime.Tensor):
            return self.value
        return tvm.runtime.from_dlpack(self.value.detach().contiguous())

    def settle(self, value: tvm.runtime.Tensor) -> None:
        """From now on the numbers are those of a tensor; what they came from is let go."""
        if not self.settled:
            self.value, self.recipe, self.sources, self.settled = value, None, (), True

    def constant(self) -> tvm.ir.GenericConst:
        """The stand-in."""
        return relax.const(_STAND_INS.of(self))


class _StandIns:
    """The stand-ins that there are, by the address of their memory. Each lives as long as a
    constant holds it, and its weight as long as it does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weights: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()
        self._known: weakref.WeakKeyDictionary[Weight, Any] = weakref.WeakKeyDictionary()

    def of(self, weight: Weight) -> tvm.runtime.Tensor:
        """The stand-in of a weight: one tensor."""
        with self._lock:
            memory = self._known.get(weight)
            memory = None if memory is None else memory()
            if memory is None:
                memory = _Memory(weight)
                self._known[weight] = weakref.ref(memory)
                self._weights[memory.address] = memory
            return memory.tensor()

    def weight(self, tensor: tvm.runtime.Tensor) -> Weight | None:
        """What a tensor stands for; None: it is a tensor."""
        memory = self._weights.get(int(tensor.data_ptr())) if len(self._weights) else None
        return None if memory is None else memory.weight


class _Words(np.ndarray):
    """An array that keeps the memory of a stand-in: what DLPack makes of it keeps the array."""

    memory: _Memory


class _Memory:
    """Pages that are reserved and not there, and what they stand for."""

    def __init__(self, weight: Weight) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self.weight = weight
        self._pages = mmap.mmap(-1, max(weight.bytes, _HEADER_BYTES), flags=flags)
        header = hashlib.sha256(weight.name.encode()).digest()[:_HEADER_BYTES]
        self._pages[: len(header)] = header
        self.address = int(np.frombuffer(self._pages, "uint8").ctypes.data)

    def tensor(self) -> tvm.runtime.Tensor:
        words = np.frombuffer(self._pages, "uint8", count=self.weight.bytes).view(_Words)
        words.memory = self
        tensor = tvm.runtime.from_dlpack(words)
        return tensor._create_view(self.weight.shape, self.weight.dtype)


_STAND_INS = _StandIns()


def tensor_of(constant: Any) -> tvm.runtime.Tensor | None:
    """The tensor of a constant, which may be a stand-in; None of what is no constant tensor."""
    value = constant.value if isinstance(constant, tvm.ir.Constant) else constant
    return value if isinstance(value, tvm.runtime.Tensor) else None


def weight_of(constant: Any) -> Weight | None:
    """What a constant, or its tensor, stands for; None: for itself."""
    tensor = tensor_of(constant)
    return None if tensor is None else _STAND_INS.weight(tensor)


def value_of(constant: Any) -> tvm.runtime.Tensor:
    """The tensor of a constant, on the host: that which a stand-in stands for."""
    weight = constant if isinstance(constant, Weight) else weight_of(constant)
    return tensor_of(constant) if weight is None else weight.tensor()


def numbers(constant: Any) -> np.ndarray:
    """The numbers of a constant, of a tensor, or of a weight. Those of a stand-in are computed: to
    be asked for where nothing else will do.
    """
    return value_of(constant).numpy()


def derived(recipe: Recipe, sources: Sequence[Any], shape: Iterable[int], dtype: str) -> Any:
    """The constant that a recipe makes of others, at least one of them a stand-in: a stand-in."""
    parts = tuple(weight_of(source) or tensor_of(source) for source in sources)
    names = [p.name if isinstance(p, Weight) else _content(p) for p in parts]
    name = hashlib.sha256("\n".join([recipe.digest(), *names]).encode()).hexdigest()[:16]
    with _MADE_LOCK:
        made = _MADE.setdefault(next(p for p in parts if isinstance(p, Weight)), {})
        weight = made[name]() if name in made else None
        if weight is None:
            weight = Weight(name, tuple(map(int, shape)), dtype, None, recipe, parts)
            made[name] = weakref.ref(weight)
        return weight.constant()


_MADE_LOCK = threading.Lock()
_MADE: weakref.WeakKeyDictionary[Weight, dict[str, Any]] = weakref.WeakKeyDictionary()


def _content(tensor: tvm.runtime.Tensor) -> str:
    array = np.ascontiguousarray(tensor.numpy())
    return hashlib.sha256(array.reshape(-1).view(np.uint8)).hexdigest()


@dataclass(frozen=True, slots=True)
class ByHost:
    """What NumPy makes of weights, and what it does in words and numbers."""

    name: str
    make: Callable[..., np.ndarray]

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByHost) and other.name == self.name

    def digest(self) -> str:
        """See `Recipe`."""
        return self.name

    def of(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """See `Recipe`."""
        return self.make(*arrays)

    def kernel(self) -> None:
        """See `Recipe`."""


def made(
    name: str, make: Callable[..., np.ndarray], constant: Any, shape: Sequence[int], dtype: str
) -> Any:
    """The constant that `make` makes of the numbers of another, now or in the end.

    Parameters
    ----------
    name : str
        What `make` does, in words and numbers that tell it from all else.
    make : callable
        From an array to one of this shape and type.
    constant : GenericConst
    shape : sequence of int
    dtype : str
    """
    if weight_of(constant) is None:
        return relax.const(np.ascontiguousarray(make(numbers(constant))), dtype)
    return derived(ByHost(name, make), [constant], shape, dtype)


# ---- Weights on disk: how they come from those of a model, without numbers


def origins(weights: Iterable[Weight]) -> list[tuple[Any, ...]]:
    """How weights come from a model's own, as values that can be pickled: for `restored`. To be
    asked for before they are computed.
    """
    rows: list[tuple[Any, ...]] = []
    known: dict[Weight, int] = {}

    def add(weight: Weight) -> int:
        if weight not in known:
            sources = [
                add(s) if isinstance(s, Weight) else (s.numpy(), str(s.dtype))
                for s in weight.sources
            ]
            rows.append((weight.name, weight.shape, weight.dtype, weight.recipe, sources))
            known[weight] = len(rows) - 1
        return known[weight]

    for weight in weights:
        add(weight)
    return rows


def restored(rows: Iterable[tuple[Any, ...]], own: Mapping[str, Weight]) -> dict[str, Weight]:
    """The weights of `origins` by name, of a model that has its `own` by name."""
    made: list[Weight] = []
    for name, shape, dtype, recipe, sources in rows:
        if recipe is None:
            made.append(own[name])
            continue
        parts = tuple(made[s] if isinstance(s, int) else _tensor(*s) for s in sources)
        made.append(Weight(name, shape, dtype, None, recipe, parts))
    return {weight.name: weight for weight in made}


def weights_of(mod: tvm.IRModule) -> dict[str, Weight]:
    """The weights that `main` reads, by name."""
    found: dict[str, Weight] = {}

    def look(constant: Any) -> None:
        weight = weight_of(constant)
        if weight is not None:
            found[weight.name] = weight

    tvm_ffi.structural_walk(mod["main"], [(tvm.ir.GenericConst, look)])
    return found


# ---- Modules with stand-ins, and without


def with_stand_ins(mods: Mapping[str, tvm.IRModule]) -> dict[str, tvm.IRModule]:
    """Modules with a stand-in for each weight of their `main`, by the order in which they are read;
    what several of them read, or hold equal copies of, is one.
    """
    known: dict[tuple, Any] = {}
    alike: dict[tuple, list[Weight]] = {}

    def stand_in(constant: Any) -> Any:
        tensor = tensor_of(constant)
        if tensor is None:
            return constant
        there = weight_of(tensor)  # on a device, where the reader of the model left it
        if there is None and not _is_weight(tensor):
            return constant
        kind = (str(tensor.dtype), tuple(map(int, tensor.shape)))
        key = (int(tensor.data_ptr()) if there is None else there.name, *kind)
        if key not in known:
            value = tensor if there is None else there.value
            others = alike.setdefault((there is None, *kind), [])
            same = (w for w in others if len(mods) > 1 and _equal(w, value))
            weight = next(same, None)
            if weight is None:
                weight = Weight(f"weight {len(known)}", kind[1], kind[0], value)
                others.append(weight)
            known[key] = weight.constant()
        return known[key]

    return {name: _mapped(mod, stand_in, ["main"]) for name, mod in mods.items()}


def _equal(weight: Weight, value: Any) -> bool:
    """Whether a tensor of the same shape and type is that of a weight, bit by bit."""
    pair = (weight, Weight("", weight.shape, weight.dtype, value))
    a, b = (np.ascontiguousarray(w.tensor().numpy()).reshape(-1).view("uint8") for w in pair)
    return np.array_equal(a, b)


def may_be_weight(shape: Iterable[int], dtype: str) -> bool:
    """Whether a constant of a shape and type is a weight, as far as these tell."""
    extents = list(shape)
    packed = "float4" in dtype or "float6" in dtype  # several in a byte
    size = math.prod(extents)
    large = size >= LEAST_ELEMENTS and size > max(extents)  # what has one long axis is a vector
    return large and dtype.startswith(_KINDS) and not packed


def looks_random(sample: np.ndarray) -> bool:
    """Whether numbers that were picked from a constant are those of a weight, and no pattern."""
    words = np.ascontiguousarray(sample).view(f"uint{8 * sample.itemsize}")
    return len(set(words.ravel().tolist())) >= LEAST_DISTINCT  # `np.unique` imports `np.ma`


def _is_weight(tensor: tvm.runtime.Tensor) -> bool:
    if not may_be_weight(map(int, tensor.shape), str(tensor.dtype)):
        return False
    try:
        array = np.from_dlpack(tensor).reshape(-1)  # where it lies
    except (RuntimeError, TypeError, BufferError):  # a type that NumPy lacks, or another device
        array = tensor.numpy().reshape(-1)
    return looks_random(array[:: max(1, array.size // SAMPLED)])


def with_values(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with constants in the places of all stand-ins."""

    def value(constant: Any) -> Any:
        weight = weight_of(constant)
        return constant if weight is None else relax.const(weight.tensor())

    return _mapped(mod, value)


def as_parameters(
    mod: tvm.IRModule, functions: Sequence[str]
) -> tuple[tvm.IRModule, dict[str, tuple[Weight, ...]]]:
    """The module whose functions take their weights behind their inputs, in the order in which they
    are read, and those weights; other functions have their constants.
    """
    out, found = mod.clone(), {}
    for name in functions:
        taken: dict[str, relax.Var] = {}
        weights: dict[str, Weight] = {}

        def parameter(constant: Any, taken=taken, weights=weights) -> Any:
            weight = weight_of(constant)
            if weight is None:
                return constant
            if weight.name not in taken:
                weights[weight.name] = weight
                tensor = relax.TensorType(weight.shape, weight.dtype)
                taken[weight.name] = relax.Var(f"weight{len(taken)}", tensor)
            return taken[weight.name]

        func = mod[name]
        body = _map_constants(func.body, parameter)
        found[name] = tuple(weights.values())
        if taken:
            params = [*func.params, *taken.values()]
            new = relax.Function(params, body, func.ret_ty, func.is_pure, func.attrs)
            out.update_func(mod.get_global_var(name), new)
    return with_values(out), found


def with_parameters_bound(mod: tvm.IRModule, tensors: Sequence[tvm.runtime.Tensor]) -> tvm.IRModule:
    """The module with constants in the places of the last parameters of `main`: the inverse of
    `as_parameters`, of other tensors or of the stand-ins' own.
    """
    params = mod["main"].params
    own = params[len(params) - len(tensors) :]
    values = dict(zip(own, tensors, strict=True))
    return relax.transform.BindParams("main", values)(mod) if values else mod


def content_hash(mod: tvm.IRModule) -> str:
    """What a module is, without the numbers of its weights; the same in each process."""
    hollow, found = as_parameters(mod, ["main"])
    number = tvm_ffi.structural_hash(hollow, map_free_vars=True)
    names = [weight.name for weight in found["main"]]
    return hashlib.sha256("\n".join([str(number), *names]).encode()).hexdigest()


def _mapped(
    mod: tvm.IRModule, of: Callable[[Any], Any], only: Collection[str] | None = None
) -> tvm.IRModule:
    """The module with other constants in its Relax functions, all or some by name; itself where
    none changes.
    """
    changed = {}
    for gvar, func in mod.functions_items():
        chosen = only is None or gvar.name_hint in only
        if chosen and isinstance(func, relax.Function):
            new = _map_constants(func, of)
            if not new.same_as(func):
                changed[gvar] = new
    if not changed:
        return mod
    out = mod.clone()
    for gvar, func in changed.items():
        out.update_func(gvar, func)
    return out


def _map_constants(expr: Any, of: Callable[[Any], Any]) -> Any:
    return tvm_ffi.structural_map(expr, (tvm.ir.GenericConst, of))


def _tensor(found: Any, dtype: str) -> tvm.runtime.Tensor:
    """What a recipe made, as a tensor."""
    if isinstance(found, tvm.runtime.Tensor):
        return found
    return tvm.runtime.tensor(np.ascontiguousarray(found).astype(dtype, copy=False))
