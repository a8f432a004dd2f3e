"""The float64 reference of a module, and how far from it the roundings of right kernels may lead.

The reference is run again, with each operator disturbed as the roundings of its arithmetic would
(`roundings`, `noise`). What the disturbances do to an output says how it is conditioned, through
all operators together, cancellation and amplification included. This is Monte Carlo arithmetic [1],
carried out in float64 with disturbances of the size of the narrow types. The bound of an element is
its largest change over the draws; `rules` says what is made of it.

An integer or a boolean that a disturbance changes (the argmax of a near tie, a comparison) is one
that a rounding may decide. Draws for them are stronger, and each is turned around as well, so that
a tie of two breaks both ways. So is a float that such a draw changes `JUMP` times as much as the
others do: it has gone over a step (floor, a comparison before a `where`), and its bound is the
height of the step.

No kernel, schedule or rewrite of this package has a part in it.

[1] D. S. Parker, Monte Carlo Arithmetic, CSD-970002, University of California, Los Angeles, 1997.
    C. Denis, P. de Oliveira Castro, E. Petit, Verificarlo, 23rd Symposium on Computer Arithmetic,
    2016.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import Expr

from ..errors import BuildError
from .arrays.operations import NotOnArrays
from .arrays.programs import on_arrays
from .bounds.noise import NONE, Draw, call_number, disturbed
from .bounds.rounded_products import operands_in
from .bounds.roundings import equated, rounded
from .plain import LLVM, plain_build
from .reference import build_reference, runner
from .rules import TOLERANCES, name_of, namespace, pieces, wide

logger = logging.getLogger(__name__)

DRAWS = tuple(Draw(seed, 1) for seed in range(1, 9))
DECIDING = tuple(Draw(seed, sign * 16) for seed in (11, 12, 13) for sign in (1, -1))
JUMP = 64.0  # a draw for ties is 16 times as strong as others, and so is what it changes smoothly

_CALLS = (  # of what is not written in TIR, or not here
    "relax.call_dps_packed",
    "relax.call_pure_packed",
    "relax.call_builtin_with_ctx",
    "relax.invoke_closure",
)

Run = Callable[[Draw], Sequence[Any]]


def bounded_reference(
    mod: tvm.IRModule, inputs: Sequence[Any], target: tvm.target.Target | None = None
) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
    """Compute a module in float64, and the bounds of its outputs.

    Parameters
    ----------
    mod : IRModule
        A call_tir module (after LegalizeOps); its `main` is run.
    inputs : sequence
        One value a parameter of `main`, as `reference.run_reference` takes them.
    target : Target, optional
        Where to compute it (default: llvm).

    Returns
    -------
    list of numpy.ndarray
        The outputs, tuples flattened.
    list of numpy.ndarray or None
        For each element, how much a draw changes it: a float, or whether it changes an integer.
        None in a module with calls that cannot be disturbed.
    """
    return _Builds(mod, target).bounded(inputs)


class Reference:
    """A module in float64, and what else its outputs are judged by. Bounds and plain outputs are
    found when they are asked for: most right results are within a few units in the last place and
    need neither.

    Parameters are those of `bounded_reference`.
    """

    def __init__(
        self, mod: tvm.IRModule, inputs: Sequence[Any], target: tvm.target.Target | None = None
    ) -> None:
        self.inputs, self._of = inputs, (mod, target)
        self.ceiling = True  # see `rules.check_output`
        self.written: tuple[int, ...] = ()  # inputs that are outputs of it (`written_memory`)
        self._builds = _Builds(mod, target)

    def with_exact(self, run: Callable[[Sequence[Any]], list[np.ndarray]]) -> Reference:
        """The same, its outputs from a build (`reference.build_references`) that is there."""
        self._builds.exact = run
        return self

    def with_arrays(self, run: Callable[[Sequence[Any]], list[Any]]) -> Reference:
        """The same, its outputs on arrays (`arrays.programs.on_arrays`) those of a run that is
        there.
        """
        self._builds.on_arrays.exact = run
        return self

    def on(self, inputs: Sequence[Any], ceiling: bool = True) -> Reference:
        """The same module on other inputs; nothing is built again."""
        mod, target = self._of
        other = Reference(mod, inputs, target)
        other.ceiling, other._builds, other.written = ceiling, self._builds, self.written
        return other

    @cached_property
    def on_arrays(self) -> Reference | None:
        """The same with nothing compiled, to tell right results right: what seems wrong by it is
        judged again by this one. None where that is not possible.
        """
        other = self.on(self.inputs, self.ceiling)
        other._builds = self._builds.on_arrays
        if other._builds.exact is None:
            return None
        try:
            return other if other.outputs is not None else None
        except NotOnArrays as error:
            logger.info("the reference is compiled: %s", error)
            return None

    @cached_property
    def outputs(self) -> list[Any]:
        """The outputs, tuples flattened."""
        return self._builds.exact(self.inputs)

    @cached_property
    def bounds(self) -> list[np.ndarray | None]:
        """See `bounded_reference`."""
        return self._builds.bounded(self.inputs)[1]

    def growing_bounds(self) -> Iterator[list[Any]]:
        """The `bounds` after each draw: what is within one of them is within the last."""
        bounds = None
        for bounds in self._builds.growing(self.inputs, self.outputs):
            yield bounds
        if bounds is not None:
            self.bounds = bounds

    @cached_property
    def plain(self) -> list[np.ndarray]:
        """The outputs in the module's own dtypes, from TVM's own loops (`plain.plain_build`)."""
        return self._builds.plain(self.inputs)

    @property
    def dtypes(self) -> list[str]:
        """The dtype of each output."""
        return self._builds.dtypes

    @property
    def computed_in(self) -> list[str | None]:
        """The narrowest float on the way to each output (`computed_dtypes`)."""
        return self._builds.computed_in

    @cached_property
    def no_bounds(self) -> list[np.ndarray]:
        """Bounds of outputs that roundings leave as they are."""
        return no_bounds(self.outputs)


class _Builds:
    """What a reference runs, each built when it is first asked for."""

    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target | None) -> None:
        self._mod, self._target = mod, target

    @cached_property
    def exact(self) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        return build_reference(self._mod, target=self._target)

    @cached_property
    def disturbed(self) -> tvm.IRModule | None:
        return disturbed_module(self._mod)

    @cached_property
    def noisy(self) -> Callable[[Sequence[Any]], list[np.ndarray]] | None:
        return _built(self.disturbed, self._target) if self.disturbed is not None else None

    @cached_property
    def plain(self) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        return runner(plain_build(self._mod, self._target or LLVM))

    @cached_property
    def dtypes(self) -> list[str]:
        return dtypes_of(self._mod["main"].ret_ty)

    @cached_property
    def computed_in(self) -> list[str | None]:
        return computed_dtypes(self._mod)

    @cached_property
    def on_arrays(self) -> _OnArrays:
        return _OnArrays(self, self._mod, self._target)

    def bounded(self, inputs: Sequence[Any]) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
        """See `bounded_reference`."""
        run = self.noisy
        if run is None:
            outputs = self.exact(inputs)
            return outputs, [None] * len(outputs)
        return bounds_of(lambda draw: run([*inputs, draw.array()]), any(self.computed_in))

    def growing(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Iterator[list[Any]]:
        """See `Reference.growing_bounds`."""
        run = self.noisy
        if run is None:
            yield [None] * len(outputs)
        elif any(self.computed_in):
            yield from growing_bounds(lambda draw: run([*inputs, draw.array()]), outputs)
        else:
            yield no_bounds(outputs)


class _OnArrays(_Builds):
    """The same on arrays, where nothing is built."""

    def __init__(self, compiled: _Builds, mod: tvm.IRModule, target: Any) -> None:
        super().__init__(mod, target)
        self._compiled = compiled

    @cached_property
    def exact(self) -> Callable[[Sequence[Any]], list[Any]] | None:
        return on_arrays(self._mod, ["main"], self._target).get("main")

    @cached_property
    def noisy(self) -> Callable[[Sequence[Any]], list[Any]] | None:
        mod = self._compiled.disturbed
        return None if mod is None else on_arrays(mod, ["main"], self._target).get("main")

    @property
    def dtypes(self) -> list[str]:
        return self._compiled.dtypes

    @property
    def computed_in(self) -> list[str | None]:
        return self._compiled.computed_in

    def growing(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Iterator[list[Any]]:
        """Those that can be computed this way."""
        if self.noisy is None:
            return
        try:
            yield from super().growing(inputs, outputs)
        except NotOnArrays as error:
            logger.info("bounds are those of a compiled reference: %s", error)


def _built(
    noisy: tvm.IRModule, target: tvm.target.Target | None
) -> Callable[[Sequence[Any]], list[np.ndarray]] | None:
    """The disturbed reference, if TVM's default schedules compile it."""
    try:
        return build_reference(noisy, target=target)
    except BuildError as error:
        logger.warning(
            "no bounds of roundings; errors of TVM's own loops stand for them: %s", error
        )
        return None


def no_bounds(outputs: Iterable[Any]) -> list[Any]:
    """Bounds of outputs that roundings leave as they are: one number that is seen everywhere."""
    return [_nothing(output) for output in outputs]


def _nothing(output: Any) -> Any:
    zero = 0.0 if _is_float(output) else False
    if namespace(output) is np:
        return np.broadcast_to(np.asarray(zero), output.shape)
    dtype = namespace(output).float64 if _is_float(output) else namespace(output).bool
    return output.new_full((), zero, dtype=dtype).expand(output.shape)


def bounds_of(run: Run, rounds: bool = True) -> tuple[list[Any], list[Any]]:
    """The undisturbed outputs of a run, and how much draws change each of their elements; without
    draws where nothing is rounded.
    """
    reference = list(run(NONE))
    grown = growing_bounds(run, reference) if rounds else ()
    return reference, deque(chain([no_bounds(reference)], grown), maxlen=1).pop()


def growing_bounds(run: Run, reference: Sequence[Any]) -> Iterator[list[Any]]:
    """How much draws change each element of a reference, after each draw."""
    bounds = no_bounds(reference)
    for draw in DRAWS:
        bounds = _larger(bounds, map(_change, run(draw), reference))
        yield bounds
    steps = bounds
    for draw in DECIDING:
        changes = map(_change, run(draw), reference)
        steps = _larger(steps, map(_jump, changes, bounds, reference))
        yield steps


def _larger(bounds: list[Any], changes: Iterable[Any]) -> list[Any]:
    return [namespace(b).maximum(b, change) for b, change in zip(bounds, changes, strict=True)]


def _jump(change: Any, bound: Any, reference: Any) -> Any:
    """A change that a draw for ties makes, where it decides something; elsewhere nothing."""
    if not _is_float(reference):
        return change
    xp = namespace(change)
    return xp.where(change > JUMP * bound, change, xp.zeros_like(change))


def _change(given: Any, reference: Any) -> Any:
    """|given - reference| where both are finite floats, 0 elsewhere; whether integers differ."""
    if not _is_float(reference):
        return given != reference
    given, reference = wide(given).reshape(-1), wide(reference)
    flat, shape = reference.reshape(-1), reference.shape
    out = np.empty(len(flat)) if namespace(flat) is np else flat.new_empty(len(flat))
    for own in pieces(len(flat)):
        out[own] = _distance(given[own], flat[own])
    return out.reshape(shape)


def _distance(given: Any, reference: Any) -> Any:
    xp = namespace(reference)
    both = xp.isfinite(given) & xp.isfinite(reference)
    zero = xp.zeros_like(reference)
    return xp.abs(xp.where(both, given, zero) - xp.where(both, reference, zero))


def _is_float(array: Any) -> bool:
    return "float" in name_of(array.dtype)


def disturbed_module(mod: tvm.IRModule) -> tvm.IRModule | None:
    """The module whose `main` takes a draw (`Draw.array`) as one more parameter; None if a call in
    it cannot be disturbed.
    """
    main = mod["main"]
    calls = _Calls(mod)
    body = calls.body(main.body)
    if body is None:
        return None
    out = calls.builder.get().clone()  # it is `mod` itself where no function was added
    params = [*main.params, calls.draw]
    func = relax.Function(params, body, main.ret_ty, main.is_pure, main.attrs)
    out.update_func(out.get_global_var("main"), func)
    return relax.transform.DeadCodeElimination(["main"])(relax.transform.Normalize()(out))


class _Calls:
    """Puts disturbed functions in place of those that a Relax function calls."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self.mod = mod
        self.builder = relax.BlockBuilder(mod)
        self.draw = relax.Var("draw", relax.TensorType((2,), "int64"))
        self._made: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar | None] = {}
        self._rounds: dict[tvm.ir.GlobalVar, tuple[bool, bool]] = {}
        self._count = 0

    def body(self, body: relax.SeqExpr) -> relax.SeqExpr | None:
        """The body on disturbed functions; None where that cannot be."""
        blocks = []
        for block in body.blocks:
            bindings = [self._binding(binding) for binding in block.bindings]
            if None in bindings:
                return None
            blocks.append(type(block)(bindings))
        return relax.SeqExpr(blocks, body.body)

    def _binding(self, binding: relax.Binding) -> relax.Binding | None:
        value = getattr(binding, "value", None)
        if isinstance(value, relax.If):
            return None if _holds_float(value.ty) else binding
        if not isinstance(value, relax.Call) or not isinstance(binding, relax.VarBinding):
            return binding
        func = self._called(value)
        if func is None:
            moves = isinstance(value.op, tvm.ir.Op) and value.op.name not in _CALLS
            return binding if moves or not _holds_float(value.ty) else None
        rounds, compares = self._what(value.args[0], func)
        if not rounds and not (compares and self._computed(value)):
            return binding
        called = self._disturbed(value) if value.op.name == "relax.call_tir" else None
        return None if called is None else relax.VarBinding(binding.var, called)

    def _what(self, gvar: tvm.ir.GlobalVar, func: tirx.PrimFunc) -> tuple[bool, bool]:
        """Whether a function rounds, and whether it compares floats for equality."""
        if gvar not in self._rounds:
            self._rounds[gvar] = bool(rounded(func.body)), equated(func.body)
        return self._rounds[gvar]

    def _computed(self, call: relax.Call) -> bool:
        """Whether a float that a call reads is neither a constant nor a parameter of `main`."""
        given = list(self.mod["main"].params)
        args = call.args[1] if len(call.args) > 1 else ()
        return any(
            _holds_float(arg.ty) and isinstance(arg, relax.Var) and arg not in given for arg in args
        )

    def _called(self, call: relax.Call) -> tirx.PrimFunc | None:
        """The PrimFunc that a call runs."""
        first = call.args[0] if call.args else None
        func = self.mod[first] if isinstance(first, tvm.ir.GlobalVar) else None
        return func if isinstance(func, tirx.PrimFunc) else None

    def _disturbed(self, call: relax.Call) -> relax.Call | None:
        var, args = call.args[0], list(call.args[1])
        if var not in self._made:
            func = disturbed(self.mod[var], len(args))
            if func is not None:
                func = self.builder.add_func(func, f"{var.name_hint}_disturbed")
            self._made[var] = func
        if self._made[var] is None:
            return None
        self._count += 1
        number = relax.const(call_number(self._count), "int64")
        (ty,) = call.ty_args
        outputs = list(ty.fields) if isinstance(ty, relax.TupleType) else ty
        return relax.call_tir(self._made[var], [*args, self.draw, number], outputs)


def _holds_float(ty: Any) -> bool:
    if isinstance(ty, relax.TupleType):
        return any(map(_holds_float, ty.fields))
    return isinstance(ty, relax.TensorType) and "float" in str(ty.dtype)


# ---- The narrowest float that an output is computed in: how exact it can be at all.
#
#     h: float16 = R.call_tir(exp, x)            # rounded to float16
#     y: float32 = R.call_tir(widen, h)          # float32, and as wrong as float16 is
#
# Counted is what is rounded: results of arithmetic and of casts, in every operator between the
# inputs and the output, inside of its loops too. Inputs and constants are as they are, and a value
# that is only moved or picked loses nothing.


def computed_dtypes(mod: tvm.IRModule, entry: str = "main") -> list[str | None]:
    """Find the narrowest float dtype that each output is computed in.

    Parameters
    ----------
    mod : IRModule
        A call_tir module (after LegalizeOps); calls of other functions count with their result.
    entry : str

    Returns
    -------
    list of str or None
        For each output, tuples flattened; None where no float is computed.
    """
    func = mod[entry]
    found = _Finder(mod)
    for binding in (b for block in func.body.blocks for b in block.bindings):
        if hasattr(binding, "value"):
            found.known[binding.var] = found.of(binding.value)
    return found.of(func.body.body)


def narrowest(dtypes: Iterable[str | None]) -> str | None:
    """Return the float dtype that allows the largest error; None of no floats."""
    floats = [d for d in dtypes if d in TOLERANCES]
    return max(floats, key=lambda d: TOLERANCES[d].ceiling, default=None)


@dataclass
class _Finder:
    """The narrowest dtypes behind the values of a function, tuples flattened."""

    mod: tvm.IRModule
    known: dict[relax.Var, list[str | None]] = field(default_factory=dict)
    inside: dict[tvm.ir.GlobalVar, str | None] = field(default_factory=dict)

    def of(self, value: Expr) -> list[str | None]:
        if isinstance(value, relax.Var) and value in self.known:
            return self.known[value]
        if isinstance(value, relax.Tuple):
            return [d for item in value.fields for d in self.of(item)]
        if isinstance(value, relax.TupleGetItem):
            before = value.tuple_value.ty.fields[: value.index]
            first = sum(map(_count, before))
            return self.of(value.tuple_value)[first : first + _count(value.ty)]
        if isinstance(value, relax.Call):
            return [self._of_call(value)] * _count(value.ty)
        return [None] * _count(value.ty)

    def _of_call(self, call: relax.Call) -> str | None:
        """What the call computes in, and its operands are computed in."""
        dtypes = [d for argument in call.args for d in self.of(argument)]
        called = call.args[0] if call.args else None
        if isinstance(called, tvm.ir.GlobalVar) and isinstance(self.mod[called], tirx.PrimFunc):
            if called not in self.inside:
                func = self.mod[called]
                self.inside[called] = narrowest([*rounded(func.body), operands_in(func)])
            dtypes.append(self.inside[called])
        else:
            dtypes += dtypes_of(call.ty)
        return narrowest(dtypes)


def _count(ty: object) -> int:
    return sum(map(_count, ty.fields)) if isinstance(ty, relax.TupleType) else 1


def dtypes_of(ty: object) -> list[str]:
    """The dtypes of the tensors of a type, tuples flattened."""
    if isinstance(ty, relax.TupleType):
        return [d for field in ty.fields for d in dtypes_of(field)]
    return [str(ty.dtype)] if isinstance(ty, relax.TensorType) else []
