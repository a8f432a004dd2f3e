"""Libraries as times: run in a process of its own that holds one task's inputs and reference.

A trial is right before it is timed: its outputs, poisoned before, are compared with a float64
reference that TVM's default schedules compute on the same device from the same inputs. Where that
reference cannot be had, the untuned kernel stands for it.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from ..check._loops import order_loops
from ..check.reference import to_float64
from ..errors import Unsupported
from ..ir.extents import ASSUMED_SYMBOLIC_EXTENT
from ..runtime.build import build_functions
from ..runtime.plan_timing import relative_spread
from .building import BuiltChoice, Place
from .numbers import Wanted, error_of, wide, wrong
from .site import Call, Here, Site, site_bytes
from .tasks import key_of, without_stamps

logger = logging.getLogger(__name__)

NARROWEST_FIRST = ("float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """Libraries of one task to be checked and timed side by side.

    Attributes
    ----------
    workload : str
        JSON of the PrimFunc.
    outputs : int
        How many of its last parameters it writes.
    choices : tuple of BuiltChoice
        The first is the untuned one.
    repeats : int
    place : Place
    seed : int
        Of the inputs.
    """

    workload: str
    outputs: int
    choices: tuple[BuiltChoice, ...]
    repeats: int
    place: Place
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one choice of a request does.

    Attributes
    ----------
    samples_us : tuple of float
        Empty where its numbers are wrong.
    error : float or None
        Relative to the largest number of the reference.
    why : str
        What is wrong with its numbers; empty where they are right.
    reference : "float64" or "untuned"
    """

    samples_us: tuple[float, ...] = ()
    error: float | None = None
    why: str = ""
    reference: str = "float64"

    @property
    def us(self) -> float:
        """The median time of a call in microseconds."""
        return statistics.median(self.samples_us)

    @property
    def spread(self) -> float:
        """Interquartile range over median."""
        return relative_spread(self.samples_us)


class Task:
    """The inputs, outputs and reference of one task on a device.

    Parameters
    ----------
    func : tirx.PrimFunc
        Without stamps.
    request : MeasureRequest
        Of this task.
    site : Site
    """

    def __init__(self, func: tirx.PrimFunc, request: MeasureRequest, site: Site) -> None:
        self.func, self.site = func, site
        self.outputs, self.target = request.outputs, request.place.resolved()[0]
        self.wanted: list[Wanted] | None = None
        self.reference = "float64"
        self._sizes: dict[str, int] = {}
        values = [self._drawn(n, p, request.seed) for n, p in enumerate(func.params)]
        self.values = values
        self.tensors = [v if isinstance(v, int) else site.tensor(v) for v in values]

    @property
    def bytes(self) -> int:
        """That its tensors take on the device, the reference included."""
        sizes = [site_bytes(v) for v in self.values if not isinstance(v, int)]
        kept = [site_bytes(w.reference) for w in self.wanted or ()]
        return sum(sizes) + sum(kept)

    # ---- values
    def _extent(self, extent: Any) -> int:
        if isinstance(extent, tirx.IntImm):
            return int(extent)
        tvm_ffi.structural_walk(
            extent,
            (tirx.Var, lambda v: self._sizes.setdefault(v.name, ASSUMED_SYMBOLIC_EXTENT)),
        )
        number = (tirx.Var, lambda v: tirx.IntImm(str(v.ty.dtype), self._sizes[v.name]))
        return int(tvm.sym.Analyzer().simplify(tvm_ffi.structural_map(extent, number)))

    def _drawn(self, number: int, param: Any, seed: int) -> Any:
        if not isinstance(param.ty, tirx.BufferType):
            return self._sizes.setdefault(param.name, ASSUMED_SYMBOLIC_EXTENT)
        shape = tuple(self._extent(e) for e in param.ty.shape)
        return self.site.draw(shape, str(param.ty.dtype), (seed, number))

    # ---- calls
    def call(self, choice: BuiltChoice) -> Call:
        """A library's function on this task's tensors."""
        return Call(self.site.load(choice.path), choice.symbol, tuple(self.tensors))

    def run(self, call: Any) -> list[Any]:
        """The outputs of one call that finds poison where it writes."""
        written = list(zip(self.values, self.tensors, strict=True))[-self.outputs :]
        for value, tensor in written:
            self.site.poison(value, tensor)
        call()
        self.site.device.sync()
        return [self.site.value(value, tensor) for value, tensor in written]

    def expect(self, untuned: Any) -> None:
        """Finds out what the outputs should be; `untuned` is the first choice's call."""
        first = self.run(untuned)
        try:
            references = self._float64()
        except Exception as error:  # whatever TVM's default schedules do not compute
            logger.info("no float64 reference, the untuned kernel stands for it: %s", error)
            self.reference = "untuned"
            references = [wide(value) for value in first]
        narrowest = self._narrowest()
        params = self.func.params[-self.outputs :]
        self.wanted = []
        for param, value, reference in zip(params, first, references, strict=True):
            dtype = str(param.ty.dtype)
            if "float" in dtype:
                error = error_of(value, reference)[0]
                self.wanted.append(Wanted(dtype, narrowest, reference, error))
            else:
                self.wanted.append(Wanted(dtype, narrowest, value))

    def _narrowest(self) -> str:
        found = {str(p.ty.dtype) for p in self.func.params if isinstance(p.ty, tirx.BufferType)}
        return next((d for d in NARROWEST_FIRST if d in found), "float32")

    def _float64(self) -> list[Any]:
        """The outputs in float64, by TVM's default schedules."""
        symbol = "reference"
        function = widened(self.func, self.outputs).with_attr("global_symbol", symbol)
        library, _ = build_functions(tvm.IRModule({symbol: function}), self.target)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "reference.so"
            library.export_library(str(path))
            function = self.site.load(path)[symbol]
        values = [v if isinstance(v, int) else wide(v) for v in self.values]
        tensors = [v if isinstance(v, int) else self.site.tensor(v) for v in values]
        function(*tensors)
        self.site.device.sync()
        written = list(zip(values, tensors, strict=True))[-self.outputs :]
        return [self.site.value(value, tensor) for value, tensor in written]


def measure(request: MeasureRequest, site: Site | None = None) -> list[Measurement]:
    """Checks the choices of a request and times those that are right, interleaved."""
    task = _task(request, site)
    calls = [task.call(choice) for choice in request.choices]
    if task.wanted is None:
        task.expect(calls[0])
    verdicts = [wrong(task.run(call), task.wanted) for call in calls]
    right = [i for i, (why, _) in enumerate(verdicts) if not why]
    found = [Measurement(error=e, why=why, reference=task.reference) for why, e in verdicts]
    if right:
        kernels = [request.choices[i].kernels for i in right]
        samples = task.site.samples([calls[i] for i in right], kernels, request.repeats)
        for i, times in zip(right, samples, strict=True):
            found[i] = Measurement(tuple(times), verdicts[i][1], "", task.reference)
    return found


_kept: OrderedDict[tuple, Task] = OrderedDict()


def _task(request: MeasureRequest, site: Site | None) -> Task:
    """The tensors of a request's task; those of the last tasks are kept while there is room."""
    func = without_stamps(tvm.ir.load_json(request.workload))
    key = (key_of(func), request.seed, request.place.target, id(site))
    if key not in _kept:
        site = site or Here.of(request.place.resolved()[0])
        while len(_kept) > 1 and sum(t.bytes for t in _kept.values()) > site.room_bytes:
            _kept.popitem(last=False)
        _kept[key] = Task(func, request, site)
    _kept.move_to_end(key)
    return _kept[key]


def forget() -> None:
    """Drops all tensors that are kept."""
    _kept.clear()


def widened(func: tirx.PrimFunc, outputs: int) -> tirx.PrimFunc:
    """The PrimFunc with every float in float64 (`check.reference`).

    Raises
    ------
    Unsupported
        It looks at the bits of a float, or has parameters that are no tensors.
    """
    if not all(isinstance(p.ty, tirx.BufferType) for p in func.params):
        raise Unsupported("a parameter is no tensor")
    types = [relax.TensorType(list(p.ty.shape), str(p.ty.dtype)) for p in func.params]
    builder = relax.BlockBuilder()
    gvar = builder.add_func(func.with_attr("global_symbol", "kernel"), "kernel")
    params = [relax.Var(f"p{i}", ty) for i, ty in enumerate(types[:-outputs])]
    with builder.function("main", params):
        with builder.dataflow():
            out = types[-outputs:]
            call = relax.op.call_tir(gvar, params, out if outputs > 1 else out[0])
            result = builder.emit_output(call)
        builder.emit_func_output(result)
    return order_loops(to_float64(builder.get()))["kernel"]
