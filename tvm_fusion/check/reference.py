"""The float64 reference of a call_tir module: its own loops, its own inputs, every float widened.

    Before                                          After
    def add(x: Buffer((4,), "float16"), y: ...):    def add(x: Buffer((4,), "float64"), y: ...):
        y[i] = Cast("float16", x[i] * T.float16(2))     y[i] = Cast("float64", x[i] * T.float64(2))

What is not widened:

- coordinates: load-free float arithmetic that ends in an integer or a comparison (the source pixel
  of a resize). It decides what is read, so the reference must decide as the kernel does;
- integers, booleans, and floats below 16 bits;
- what a bit cast looks at: it is rounded to its own type first, which changes no number that comes
  from there.

The finite extremes of a dtype (-65504 in float16, -3.4028235e38 in float32) stand for "below
everything" and become the extremes of float64; any other constant, -1e9 in a mask for example,
keeps its value.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, Expr
from tvm_ffi.serialization import from_json_graph_str

from ..errors import DividedByZero, InputError, OutOfRange, Unsupported
from ..ir.weights import numbers, value_of
from ..kernels.program.expr import HALF_DTYPES
from ..kernels.program.half_bits import half_bits, half_of_bits
from ..runtime.build.build import build_entries
from ..runtime.build.guards import with_guards
from ..runtime.build.kept_nan import RULES as KEPT_NAN
from ..runtime.calls.signature import function_of, virtual_machine
from ..transform.functions.functions import has_branches, rewritten
from ..transform.memory.plan_memory import unbounded
from .checked_sizes import has_large_loops, order_loops
from .inputs import other_numbers
from .plain import LLVM
from .rules import as_array

if TYPE_CHECKING:
    from ..runtime.build.build import Built

# Widen the floats in the node graph of a serialised module; `reference` says which and why.
#
# In the JSON of `tvm.ir.save_json` a node is {"type": ..., "data": ...}; a field of an expression
# is
# the index of another node, and every dtype is a string: in a "dtype" field, or a node of its own.
# One sweep therefore meets the types of all variables, buffers, functions, casts, constants and
# operator attributes.

# Magnitudes that mean "beyond everything"; TVM starts maxima of bfloat16 at the lowest float32.
EXTREMES = {
    "float16": (65504.0,),
    "bfloat16": (3.3895313892515355e38, 3.4028234663852886e38),
    "float32": (3.4028234663852886e38,),
}
LARGEST = 1.7976931348623157e308

Run = Callable[[Sequence[Any]], list[np.ndarray]]

_COMPARISONS = ("prim.EQ", "prim.NE", "prim.LT", "prim.LE", "prim.GT", "prim.GE")
_OPERANDS = ("a", "b", "value", "condition", "true_value", "false_value", "args")
# Functions that exist for one width of a float only.
_BOUND_TO_WIDTH = (
    "tirx.call_extern",
    "tirx.call_pure_extern",
    "tirx.call_llvm_intrin",
    "tirx.call_llvm_pure_intrin",
)


def widen_dtype(dtype: str) -> str:
    """float16, bfloat16, float32, and vectors of them ("float16x8") -> float64; others stay."""
    base, by, lanes = dtype.partition("x")
    return "float64" + by + lanes if base in EXTREMES else dtype


def widen_nodes(nodes: list[dict]) -> None:
    """Widen a node graph in place; new nodes are appended."""
    _refuse_functions(nodes)
    kept = _keep_coordinates(nodes) | _keep_bits(nodes)
    for index, node in enumerate(nodes):
        data = node.get("data")
        if node["type"] == "ir.FloatImm" and index not in kept:
            data["value"] = _widen_extreme(data["value"], _dtype(nodes, index))
    for index, node in enumerate(nodes):
        if index in kept:
            continue
        data = node.get("data")
        if node["type"] in ("DataType", "ffi.String"):
            node["data"] = widen_dtype(data)
        elif isinstance(data, dict) and isinstance(data.get("dtype"), str):
            data["dtype"] = widen_dtype(data["dtype"])


def _widen_extreme(value: float, dtype: str) -> float:
    if abs(value) not in EXTREMES.get(dtype.partition("x")[0], ()):
        return value
    return LARGEST if value > 0 else -LARGEST


def _dtype(nodes: list[dict], index: int) -> str:
    """The dtype of a scalar expression, or an empty string."""
    data = nodes[index].get("data")
    if not isinstance(data, dict) or "ty" not in data:
        return ""
    ty = nodes[data["ty"]]
    return ty["data"]["dtype"] if ty["type"] == "ir.PrimType" else ""


def _is_widened(nodes: list[dict], index: int) -> bool:
    dtype = _dtype(nodes, index)
    return widen_dtype(dtype) != dtype


def _children(node: dict) -> list[int]:
    if node["type"] == "ffi.Array":
        return node["data"]
    return [node["data"][name] for name in _OPERANDS if name in node["data"]]


def _operator(nodes: list[dict], node: dict) -> str:
    """The name of the operator that an expression calls; empty where it calls none."""
    if node["type"] != "ir.Call":
        return ""
    op = nodes[node["data"]["op"]]
    return op["data"] if op["type"] == "ir.Op" else ""


def _refuse_functions(nodes: list[dict]) -> None:
    for index, node in enumerate(nodes):
        name = _operator(nodes, node)
        if name not in _BOUND_TO_WIDTH:
            continue
        if any(_is_widened(nodes, i) for i in [index, *nodes[node["data"]["args"]]["data"]]):
            raise Unsupported(f"{name} on a float has no meaning in float64")


# ---- Bit casts: of the number as its own type holds it.
#
#     reinterpret("int32", x: float32)  ->  reinterpret("int32", Cast("float32", x: float64))
#     reinterpret("float32", i)         ->  Cast("float64", reinterpret("float32", i))
#
# Those of halves become such of float32 (`half_bits`), as TVM lowers none of bfloat16. The extremes
# of a type are those of float64 here, and become its own again.


def _without_halves(call: Call) -> Expr:
    """A bit cast of a half by those of float32; others stay."""
    if not _is_bit_cast(call):
        return call
    (value,) = call.args
    dtype, given = str(call.ty.dtype), str(value.ty.dtype)
    if given in HALF_DTYPES:
        word = tirx.reinterpret("uint32", tirx.Cast("float32", value))
        bits = half_bits(given, word)
        return tirx.Cast(dtype, half_of_bits(dtype, bits) if dtype in HALF_DTYPES else bits)
    if dtype in HALF_DTYPES:
        return tirx.Cast(dtype, half_of_bits(dtype, value))
    return call


def _narrowed(call: Call) -> Expr:
    """A bit cast within the casts that `_keep_bits` keeps narrow; others stay."""
    if not _is_bit_cast(call):
        return call
    (value,) = call.args
    dtype, given = str(call.ty.dtype), str(value.ty.dtype)
    if widen_dtype(given) != given:
        if given == "float32":
            value = _with_own_extremes(value)
        call = tirx.reinterpret(dtype, tirx.Cast(given, value))
    return tirx.Cast(dtype, call) if widen_dtype(dtype) != dtype else call


def _with_own_extremes(value: Expr) -> Expr:
    """A number of float32; where it is an extreme of float64, that of the type it was cast from."""
    source = value
    while isinstance(source, tirx.Cast) and str(source.value.ty.dtype) in EXTREMES:
        source = source.value
    largest = EXTREMES["float32"][0]  # the constant of this type is widened, that of float64 not
    own = EXTREMES[str(source.ty.dtype)][0]
    for sign in (1, -1):
        beyond = value == tirx.FloatImm("float32", sign * largest)
        extreme = tirx.Cast("float32", tirx.FloatImm("float64", sign * own))
        value = tirx.Select(beyond, extreme, value)
    return value


def _is_bit_cast(call: Call) -> bool:
    return isinstance(call.op, tvm.ir.Op) and call.op.name == "tirx.reinterpret"


def _keep_bits(nodes: list[dict]) -> set[int]:
    """Give bit casts, and the casts of what they look at, types of their own; return these."""
    kept = set()
    for index, node in enumerate(list(nodes)):
        if _operator(nodes, node) != "tirx.reinterpret":
            continue
        for i in [index, *nodes[node["data"]["args"]]["data"]]:
            if _is_widened(nodes, i):
                nodes.append(copy.deepcopy(nodes[nodes[i]["data"]["ty"]]))
                kept.add(len(nodes) - 1)
                nodes[i]["data"]["ty"] = len(nodes) - 1
    return kept


def _keep_coordinates(nodes: list[dict]) -> set[int]:
    """Give integers and comparisons own copies of load-free float operands; return the copies."""
    memo: dict[int, bool] = {}
    copies: dict[int, int] = {}

    def load_free(index: int) -> bool:
        if index not in memo:
            node = nodes[index]
            kind = node["type"]
            if kind == "ir.Var":
                memo[index] = _dtype(nodes, index).startswith(("int", "uint", "bool"))
            elif kind.startswith("prim.") or kind in ("ir.Call", "ffi.Array"):
                memo[index] = all(load_free(child) for child in _children(node))
            else:
                memo[index] = kind in ("ir.FloatImm", "ir.IntImm", "ir.StringImm")
        return memo[index]

    def copy(index: int) -> int:
        node = nodes[index]
        kind = node["type"]
        if kind in ("ir.Var", "ir.IntImm", "ir.StringImm"):
            return index
        if index not in copies:
            if kind == "ffi.Array":
                data = [copy(child) for child in node["data"]]
            elif kind == "ir.PrimType":
                data = dict(node["data"])
            else:
                data = node["data"] | {
                    name: copy(node["data"][name])
                    for name in ("ty", *_OPERANDS)
                    if name in node["data"] and not (kind == "ir.FloatImm" and name == "value")
                }
            nodes.append({"type": kind, "data": data})
            copies[index] = len(nodes) - 1
        return copies[index]

    for index in range(len(nodes)):
        node = nodes[index]
        to_integer = node["type"] == "prim.Cast" and _dtype(nodes, index).startswith(
            ("int", "uint", "bool")
        )
        if not to_integer and node["type"] not in _COMPARISONS:
            continue
        fields = ["value"] if to_integer else ["a", "b"]
        operands = [node["data"][name] for name in fields]
        if any(_is_widened(nodes, i) for i in operands) and all(map(load_free, operands)):
            node["data"] |= {name: copy(i) for name, i in zip(fields, operands, strict=True)}
    return set(copies.values())


# Optimising took 200 of the 300 ms of building four little kernels; running them takes 1 ms.
_QUICK = tvm.target.Target({"kind": "llvm", "opt-level": 0})


def widen_array(array: np.ndarray) -> np.ndarray:
    """Widen a half or single precision array to float64, finite extremes to those of float64."""
    extremes = EXTREMES.get(array.dtype.name)
    if extremes is None:
        return array
    wide = array.astype("float64")
    least = min(extremes)
    if not ((wide >= least) | (wide <= -least)).any():  # looking for them takes ten times as long
        return wide
    return np.where(np.isin(np.abs(wide), extremes), np.copysign(LARGEST, wide), wide)


def to_float64(mod: tvm.IRModule) -> tvm.IRModule:
    """Widen every float of a module to float64.

    Parameters
    ----------
    mod : IRModule
        Relax functions and the PrimFuncs that they call (after LegalizeOps); left unchanged.
        High-level operators may be left where they only move data.

    Returns
    -------
    IRModule
        The same module on float64. Built for llvm it computes the reference.

    Raises
    ------
    Unsupported
        A PrimFunc hands a float to an external function.
    """
    for rule in (_without_halves, _narrowed):
        mod = rewritten(mod, [(Call, rule)])
    constants: list[tvm.ir.GenericConst] = []

    def take_out(constant: tvm.ir.GenericConst) -> relax.Expr:
        if not isinstance(constant.value, tvm.runtime.Tensor):
            return constant
        constants.append(constant)
        return relax.Var(f"constant {len(constants) - 1}", constant.ty)

    def put_back(var: relax.Var) -> relax.Expr:
        if not var.name.startswith("constant "):
            return var
        constant = constants[int(var.name.removeprefix("constant "))]
        narrow = numbers(constant)
        if narrow.dtype.name not in EXTREMES:
            return relax.const(value_of(constant))
        return relax.const(widen_array(narrow), "float64")

    hollow = _map_relax(mod, (tvm.ir.GenericConst, take_out))
    graph = json.loads(tvm.ir.save_json(hollow))
    widen_nodes(graph["nodes"])
    # `tvm.ir.load_json` would look for what older versions wrote, which takes ten times as long.
    return _map_relax(from_json_graph_str(json.dumps(graph)), (relax.Var, put_back))


def with_intermediates(mod: tvm.IRModule, entry: str, names: Sequence[str]) -> tvm.IRModule:
    """The module whose `entry` returns (its result, the bindings called `names`...).

    Raises
    ------
    InputError
        `entry` has no binding of that name.
    """
    func = mod[entry]
    bound = {b.var.name: b.var for block in func.body.blocks for b in block.bindings}
    if missing := [name for name in names if name not in bound]:
        raise InputError(
            f"{entry} has no binding called {missing[0]!r}; it cannot be captured; name one of it"
        )
    shown = {
        bound[name]: relax.Var(name, bound[name].ty)
        for name in names
        if isinstance(bound[name], relax.DataflowVar)
    }
    body = tvm_ffi.structural_map(func.body, (relax.DataflowVar, lambda v: shown.get(v, v)))
    captured = [shown.get(bound[name], bound[name]) for name in names]
    result = relax.BlockBuilder().normalize(relax.Tuple([body.body, *captured]))
    body = relax.SeqExpr(body.blocks, result)
    out = mod.clone()
    new = relax.Function(func.params, body, result.ty, func.is_pure, func.attrs)
    out.update_func(mod.get_global_var(entry), new)
    return relax.transform.Normalize()(out)


def build_reference(
    mod: tvm.IRModule,
    entry: str = "main",
    capture: Sequence[str] = (),
    target: tvm.target.Target | None = None,
) -> Run:
    """Build the float64 reference once, to run it on many inputs; see `run_reference`."""
    seen = with_intermediates(mod, entry, capture) if capture else mod
    return build_references(seen, (entry,), target)[entry]


def build_references(
    mod: tvm.IRModule, entries: Sequence[str], target: tvm.target.Target | None = None
) -> dict[str, Run]:
    """`build_reference` of several functions of a module, in one executable."""
    wide = to_float64(mod)
    if target is None or target.kind.name == "llvm":
        llvm = LLVM if has_large_loops(wide) else _QUICK
        guarded = with_guards(order_loops(unbounded(wide)), "llvm")
        with _reference_passes(guarded):
            executable = tvm.compile(rewritten(guarded, KEPT_NAN), llvm)
        device = tvm.cpu()
    else:
        built = build_entries(wide, entries, target, plan_memory=False)
        executable, device = built[entries[0]].executable, built[entries[0]].device
    machine = virtual_machine(executable, device)
    return {name: _run_of(function_of(machine, name, device), device) for name in entries}


def _run_of(function: Callable[..., Any], device: tvm.runtime.Device) -> Run:
    return lambda inputs: flatten(function(*[to_argument(x, widen_array, device) for x in inputs]))


def _reference_passes(mod: tvm.IRModule) -> tvm.transform.PassContext:
    """The current passes without TVM's plan of memory where there are branches, for which it is
    wrong (see `PlanMemoryByTVM`), and without checks of what kernels are called with: the VM calls
    them with what it checked itself, and they are half of what LLVM compiles of small kernels.
    """
    now = tvm.transform.PassContext.current()
    functions = [func for _, func in mod.functions_items()]
    disabled, config = list(now.disabled_pass), dict(now.config)
    if any(has_branches(f) for f in functions if isinstance(f, relax.Function)):
        disabled.append("StaticPlanBlockMemory")
    if not any(_asserts(f) for f in functions if isinstance(f, tirx.PrimFunc)):
        config["tirx.disable_assert"] = True
    return tvm.transform.PassContext(
        now.opt_level, now.required_pass, disabled, instruments=now.instruments, config=config
    )


def _asserts(func: tirx.PrimFunc) -> bool:
    """Whether a function refuses data, as one with guards does."""
    found: list[tirx.AssertStmt] = []
    tvm_ffi.structural_walk(func.body, [(tirx.AssertStmt, found.append)])
    return bool(found)


def run_reference(
    mod: tvm.IRModule,
    inputs: Sequence[Any],
    entry: str = "main",
    capture: Sequence[str] = (),
    target: tvm.target.Target | None = None,
) -> list[np.ndarray]:
    """Compute a module in float64: plain loops on a CPU, TVM's default schedules on a GPU.

    Parameters
    ----------
    mod : IRModule
        A call_tir module (after LegalizeOps).
    inputs : sequence
        One value a parameter: an array in the parameter's own dtype, a tuple of ints (a shape), an
        int.
    entry : str
        The function to run.
    capture : sequence of str
        Names of bindings of `entry` whose values are wanted too.
    target : Target, optional
        Where to compute it (default: llvm).

    Returns
    -------
    list of numpy.ndarray
        The outputs (tuples flattened), then the captured values in the order of `capture`.
    """
    return build_reference(mod, entry, capture, target)(inputs)


def runner(
    built: Built,
    entry: str | None = None,
    look: Callable[..., int] | None = None,
    written: Sequence[int] = (),
) -> Callable[[Sequence[Any]], list[np.ndarray]]:
    """A function of a build, by default that of its signature, from inputs to its outputs as a flat
    list of arrays.

    It is run on other numbers first, in memory that holds no result: what it leaves unwritten, or
    takes over from the call before, is not by chance what it should be. `look` is an instrument of
    the virtual machine for all runs but that one. Behind the outputs comes what is left in the
    inputs whose numbers are `written`.
    """
    device = built.device
    machine = built.machine()
    function = function_of(machine, entry or built.signature.function, device)
    first = True

    def call(values: Sequence[Any]) -> list[np.ndarray]:
        arguments = [to_argument(x, device=device) for x in values]
        return flatten([function(*arguments), *(arguments[i] for i in written)])

    def run(inputs: Sequence[Any]) -> list[np.ndarray]:
        nonlocal first
        with poisoned(device, built.memory.storages()):
            if first:
                with contextlib.suppress(OutOfRange, DividedByZero):  # the others may be refused
                    call(other_numbers(inputs))
                first = False
                if look is not None:
                    machine.set_instrument(look)
            return call(inputs)

    return run


def run_built(built: Built, inputs: Sequence[Any], entry: str | None = None) -> list[np.ndarray]:
    """Run a function of a build once (`runner`)."""
    return runner(built, entry)(inputs)


def to_argument(
    value: Any,
    convert: Callable[[np.ndarray], np.ndarray] = np.asarray,
    device: tvm.runtime.Device | None = None,
) -> Any:
    """An input as the virtual machine takes it: a tensor (of torch, too), a shape for ints, a list
    for a tuple.
    """
    if hasattr(value, "detach"):
        value = as_array(value)
    if isinstance(value, np.ndarray | np.generic):
        return tvm.runtime.tensor(np.asarray(convert(np.asarray(value)), order="C"), device)
    if isinstance(value, tuple) and all(isinstance(item, int) for item in value):
        return tvm_ffi.Shape(value)
    if isinstance(value, list | tuple):
        return [to_argument(item, convert, device) for item in value]
    return value


def flatten(value: Any) -> list[np.ndarray]:
    """The result of a virtual machine, nested or not, as a flat list of arrays."""
    if isinstance(value, tvm.runtime.Tensor):
        return [value.numpy()]
    if isinstance(value, tvm_ffi.Shape | int | float):
        return [np.asarray(value)]
    return [array for item in value for array in flatten(item)]


def _map_relax(mod: tvm.IRModule, callback: tuple) -> tvm.IRModule:
    """Apply a structural map to every Relax function of a copy of the module."""
    out = mod.clone()
    for var, func in mod.functions.items():
        if isinstance(func, relax.Function):
            out.update_func(var, tvm_ffi.structural_map(func, callback))
    return out


# ---- Fresh memory full of numbers that are nobody's result: where a kernel leaves an element
# unwritten, memory that was used before may hold what it should have written.

logger = logging.getLogger(__name__)

# GNU libc fills what it allocates with the complement of this byte (mallopt(3)): with 0x7f, which
# is 3.4e38 in float32 and bfloat16, 1.4e306 in float64, nan in float16, 127 in int8.
_M_PERTURB = -6
_BYTE = 0x80

_EVERYWHERE = 0xFF  # a byte on a GPU: nan in floats, -1 in integers


@contextlib.contextmanager
def poisoned(device: tvm.runtime.Device, sizes: Iterable[int] = ()) -> Iterator[None]:
    """What is allocated inside holds no result of anybody.

    Parameters
    ----------
    device : tvm.runtime.Device
        On a GPU, the pool of the virtual machine is filled. On a CPU every allocation of this
        process is, where its C library is GNU's; with others memory stays as it is.
    sizes : iterable of int
        Bytes of the storages that will be allocated on a GPU, those that live at once each: a
        pool gives out what has the size that is asked for.
    """
    tvm.get_global_func("vm.builtin.memory_manager.clear")()  # the pools keep what was freed
    if device.type != "cpu":
        fill_pool(device, sizes)
        yield
        return
    perturb = _mallopt()
    if perturb is None:
        yield
        return
    perturb(_M_PERTURB, _BYTE)
    try:
        yield
    finally:
        perturb(_M_PERTURB, 0)


@functools.cache
def _mallopt() -> object | None:
    """The C library's function, where it is GNU's."""
    try:
        library = ctypes.CDLL(None)
        return library.mallopt if library.gnu_get_libc_version else None
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no library of the process
        return None


def fill_pool(device: tvm.runtime.Device, sizes: Iterable[int]) -> None:
    """Fill storages of the virtual machine's pool and give them back: those of the same sizes that
    are allocated next are these.
    """
    allocate, torch = _allocator(device), sys.modules.get("torch")
    there = torch is not None and device.type == "cuda" and torch.cuda.is_available()
    held = []
    try:
        for size in sizes:
            storage = allocate(tvm_ffi.Shape([size]))
            if there:
                torch.from_dlpack(storage).fill_(_EVERYWHERE)
            else:
                storage.copyfrom(np.full(size, _EVERYWHERE, "uint8"))
            held.append(storage)
        if there:
            torch.cuda.synchronize()
    except Exception as error:  # out of memory, as the module itself may be
        logger.info("memory is poisoned in part: %s", error)
    device.sync()


@functools.cache
def _allocator(device: tvm.runtime.Device) -> Callable[[tvm_ffi.Shape], tvm.runtime.Tensor]:
    """A function that allocates bytes as a compiled module does."""
    size = tirx.Var("size", "int64")
    shape = relax.Var("shape", relax.ShapeType([size]))
    builder = relax.BlockBuilder()
    with builder.function("main", [shape]):
        call = relax.op.builtin.alloc_tensor(relax.ShapeExpr([size]), "uint8", 0)
        builder.emit_func_output(builder.emit(call))
    executable = tvm.compile(builder.get(), tvm.target.Target("llvm"))
    return relax.VirtualMachine(executable, device)["main"]
