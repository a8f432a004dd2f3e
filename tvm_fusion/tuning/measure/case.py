"""The inputs of one task, and what its outputs should be.

The reference is what TVM's default schedules compute in float64 on the same device from the same
inputs, and how far roundings may lead from it is found out there, too (`check.allowance`). Where
they cannot, the untuned kernel stands for it.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

from ...check.allowance import bounds_of, no_bounds
from ...check.bounds.noise import Draw, call_number, disturbed
from ...check.bounds.rounded_products import operands_in
from ...check.checked_sizes import order_loops
from ...check.inputs import extent_of
from ...check.reference import to_float64
from ...check.rules import TOLERANCES, OutputCheck, check_output, namespace, wide
from ...errors import Unsupported
from ...ir.extents import ASSUMED_SYMBOLIC_EXTENT, known_sizes
from ...ir.parts import written_parts
from ...runtime.build.build import build_functions
from .building import BuiltChoice
from .site import Call, Site

logger = logging.getLogger(__name__)

OVERFLOWING = ("float16", "float8_e4m3fn", "float8_e5m2")  # what ordinary numbers may overflow
NEAR = 0.5  # of the largest number


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an output should be.

    Attributes
    ----------
    narrowest : str
        The narrowest float that the kernel reads, keeps or writes.
    reference : array
        In float64; the untuned kernel's numbers where there is no reference.
    untuned : array or None
        The untuned kernel's numbers; None where they are the reference.
    bound : callable or None
        Finds what roundings do to each element (`check.allowance`); None where that cannot be
        known.
    """

    dtype: str
    narrowest: str
    reference: Any
    untuned: Any = None
    bound: Callable[[], Any] | None = None

    def check(self, given: Any) -> OutputCheck:
        """The verdict on what a kernel gives. What roundings do takes 14 runs in float64: it is
        found out only if the verdict depends on it.
        """
        if self.bound is None:
            return self._check(given, None)
        close = self._close(given)
        return close if close.passed else self._check(given, self.bound())

    def _close(self, given: Any) -> OutputCheck:
        """The verdict if no rounding made anything of itself."""
        return self._check(given, no_bounds([self.reference])[0])

    def _check(self, given: Any, bound: Any) -> OutputCheck:
        return check_output(given, self.untuned, self.reference, self.dtype, self.narrowest, bound)

    @property
    def arrays(self) -> list[Any]:
        """What it keeps."""
        return [a for a in (self.reference, self.untuned) if a is not None]

    @property
    def cancels(self) -> bool:
        """Whether roundings make so much of themselves that an error above the ceiling passes."""
        if self.bound is None or self.dtype not in TOLERANCES:
            return False
        if self._close(self.untuned).passed:
            return False
        ceiling = max(TOLERANCES[name].ceiling for name in (self.dtype, self.narrowest))
        return self.check(self.untuned).limit > ceiling

    @property
    def is_near_limit(self) -> bool:
        """Whether a number of the reference is so large that a rounding may make it infinite."""
        if self.dtype not in OVERFLOWING:
            return False
        xp = namespace(self.reference)
        return bool((xp.abs(self.reference) > NEAR * TOLERANCES[self.dtype].largest).any())


def wrong(given: Sequence[Any], wanted: Sequence[Wanted]) -> tuple[str, float]:
    """Why outputs are not right (empty if they are), and the largest error that is a number."""
    worst = 0.0
    for number, (array, want) in enumerate(zip(given, wanted, strict=True)):
        check = want.check(array)
        if math.isfinite(check.error):
            worst = max(worst, check.error)
        if not check.passed:
            return f"output {number}: {check.why}", worst
    return "", worst


NARROWEST_FIRST = ("float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32", "float64")
DRAWS = ("normal", "small", "positive")  # kinds of inputs, in the order in which they are tried
CHANGEABLE = ("float16", "bfloat16", "float32", "float64")
SMALL = 2.0**-4  # what is multiplied three times over is 2^-12 of what it would be
LEAST = 2.0**-4  # of positive values: a root, a logarithm or a quotient of them is harmless


class Case:
    """The inputs, outputs and reference of one task on a device.

    Parameters
    ----------
    func : tirx.PrimFunc
        Without stamps.
    outputs : int
        How many of its last parameters it writes.
    seed : int
        Of the inputs.

    Attributes
    ----------
    wanted : list of Wanted or None
        What the outputs should be; None before `expect`.
    reference : "float64" or "untuned"
        What said so.
    values, tensors : list
        Of all parameters: as the site has them, and as a library takes them.
    """

    def __init__(
        self,
        func: tirx.PrimFunc,
        outputs: int,
        seed: int,
        target: tvm.target.Target,
        site: Site,
    ) -> None:
        self.func, self.outputs, self.target, self.site = func, outputs, target, site
        self.wanted: list[Wanted] | None = None
        self._bounds: list[Any] | None = None
        self.reference = "float64"
        self._seed = seed
        self._sizes = defaultdict(lambda: ASSUMED_SYMBOLIC_EXTENT)  # by name
        known = known_sizes(func).items()
        self._sizes |= {s.name: b.nearest(ASSUMED_SYMBOLIC_EXTENT) for s, b in known}
        self._draw(DRAWS[0])

    @property
    def bytes(self) -> int:
        """That its tensors take on the device, the reference included."""
        arrays = [v for v in self.values if not isinstance(v, int)]
        arrays += [a for w in self.wanted or () for a in w.arrays]
        arrays += [bound for bound in self._bounds or () if bound is not None]
        return sum(a.nbytes for a in arrays)

    # ---- values
    def _draw(self, kind: str) -> None:
        self.values = [self._drawn(n, p, kind) for n, p in enumerate(self.func.params)]
        tensors = [v if isinstance(v, int) else self.site.tensor(v) for v in self.values]
        self.tensors = tensors

    def _drawn(self, number: int, param: Any, kind: str) -> Any:
        if not isinstance(param.ty, tirx.BufferType):
            return self._sizes[param.name]
        shape = tuple(extent_of(e, self._sizes) for e in param.ty.shape)
        dtype = str(param.ty.dtype)
        value = self.site.draw(shape, dtype, (self._seed, number))
        return changed(value, kind) if dtype in CHANGEABLE else value

    # ---- calls
    def call(self, choice: BuiltChoice) -> Call:
        """A library's function on this task's tensors, those packed that it takes so."""
        tensors = list(self.tensors)
        for position, panels in choice.panels:
            tensors[position] = self.site.tensor(panels.of(self.values[position]))
        return Call(self.site.load(choice.path), choice.symbol, tuple(tensors))

    def run(self, call: Any) -> list[Any]:
        """The outputs of one call that finds poison where it writes."""
        written = list(zip(self.values, self.tensors, strict=True))[-self.outputs :]
        for value, tensor in written:
            self.site.poison(value, tensor)
        call()
        self.site.device.sync()
        found = [self.site.value(value, tensor) for value, tensor in written]
        return written_parts(self.func, found)

    def expect(self, untuned: BuiltChoice) -> None:
        """Finds out what the outputs should be, with inputs that tell right from wrong: those for
        which no output comes near the largest number of its type, and the untuned kernel is right.
        Where there are none, normal ones.
        """
        try:
            exact = self._float64(self.func)
        except Exception as error:  # whatever TVM's default schedules do not compute
            logger.info("no float64 reference, the untuned kernel stands for it: %s", error)
            exact, self.reference = None, "untuned"
        for kind in (*DRAWS, DRAWS[0]):
            if kind != DRAWS[0] or self.wanted is not None:
                self._draw(kind)
            first = self.run(self.call(untuned))
            found = []
            if exact is not None:
                try:
                    found = self._in_float64(exact)
                except Exception as error:  # such as too little memory for twice the bytes
                    logger.info("the untuned kernel stands for the float64 reference: %s", error)
                    exact, self.reference = None, "untuned"
            self.wanted = self._wanted(first, found)
            unfit = any(w.is_near_limit or w.cancels for w in self.wanted)
            if not wrong(first, self.wanted)[0] and not unfit:
                return

    def _wanted(self, first: Sequence[Any], references: Sequence[Any]) -> list[Wanted]:
        """`first` is what the untuned kernel gives: the reference, where there is no other."""
        self._bounds = None
        narrowest = self._narrowest()
        dtypes = [str(p.ty.dtype) for p in self.func.params[-self.outputs :]]
        if not references:
            return [Wanted(d, narrowest, wide(x)) for d, x in zip(dtypes, first, strict=True)]
        found = enumerate(zip(dtypes, references, first, strict=True))
        return [
            Wanted(d, narrowest, ref, x, partial(self._bound, number))
            for number, (d, ref, x) in found
        ]

    def _bound(self, number: int) -> Any:
        """What roundings do to an output, with the inputs as they are now."""
        if self._bounds is None:
            try:
                self._bounds = self._found_bounds()
            except Exception as error:  # of TVM's default schedules, or too little memory
                logger.info("what roundings do is not known: %s", error)
                self._bounds = [None] * self.outputs
        return self._bounds[number]

    def _found_bounds(self) -> list[Any]:
        noisy = self._float64(disturbed(self.func, len(self.func.params) - self.outputs))
        call = self.site.tensor(call_number(0))

        def run(draw: Draw) -> list[Any]:
            drawn = self.site.tensor(draw.array())
            return self._in_float64(noisy, drawn, call)

        return bounds_of(run)[1]

    def _narrowest(self) -> str:
        found = {str(p.ty.dtype) for p in self.func.params if isinstance(p.ty, tirx.BufferType)}
        narrowest = next((d for d in NARROWEST_FIRST if d in found), "float32")
        rounded = operands_in(self.func)
        return rounded if rounded and narrowest == "float32" else narrowest

    def _float64(self, func: tirx.PrimFunc | None) -> Any:
        """This task's function, or that with parameters for disturbances before its outputs, in
        float64, by TVM's default schedules.
        """
        if func is None or "tirx.is_scheduled" in (func.attrs or {}):
            raise Unsupported("the function is scheduled")
        on_cpu = self.target.kind.name == "llvm"
        function = widened(func, on_cpu).with_attr("global_symbol", "reference")
        library, _ = build_functions(tvm.IRModule({"reference": function}), self.target)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "reference.so"
            library.export_library(str(path))
            return self.site.load(path)["reference"]

    def _in_float64(self, function: Any, *disturbances: Any) -> list[Any]:
        """The outputs of what `_float64` made."""
        values = [v if isinstance(v, int) else wide(v) for v in self.values]
        tensors = [v if isinstance(v, int) else self.site.tensor(v) for v in values]
        first = len(values) - self.outputs
        function(*tensors[:first], *disturbances, *tensors[first:])
        self.site.device.sync()
        written = list(zip(values, tensors, strict=True))[first:]
        found = [self.site.value(value, tensor) for value, tensor in written]
        return written_parts(self.func, found)


def changed(value: Any, kind: str) -> Any:
    """Normal values as those of another kind of `DRAWS`."""
    if kind == "small":
        return value * SMALL
    return abs(value) + LEAST if kind == "positive" else value


def widened(func: tirx.PrimFunc, on_cpu: bool) -> tirx.PrimFunc:
    """The PrimFunc with every float in float64 (`check.reference`).

    Parameters
    ----------
    func : tirx.PrimFunc
    on_cpu : bool
        Whether loops are put in an order that caches take; TVM's rules for GPUs want them plain.

    Raises
    ------
    Unsupported
        It hands a float to an external function, or has parameters that are no tensors.
    """
    if not all(isinstance(p.ty, tirx.BufferType) for p in func.params):
        raise Unsupported("a parameter is no tensor")
    mod = to_float64(tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")}))
    return (order_loops(mod) if on_cpu else mod)["kernel"]
