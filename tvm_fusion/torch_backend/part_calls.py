"""The calls of one part: compiled for its weights and sizes, and again where those change."""

import logging
import operator
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _disable_current_modes
from tvm.ir import IRModule

from tvm_fusion.compilation import compiler
from tvm_fusion.config import resolve_target
from tvm_fusion.errors import ConfigError, DividedByZero, OutOfRange, TargetError
from tvm_fusion.frontends.torch.graphs import from_graph
from tvm_fusion.frontends.torch.refusals import OperatorsRefused
from tvm_fusion.frontends.torch.written.writes import adds
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.runtime.graphs.capture import torch_captures
from tvm_fusion.torch_backend.options import BackendOptions
from tvm_fusion.torch_backend.part_graphs import Given, OfTensors, ReadyPart, SizesUnknown, ready
from tvm_fusion.torch_backend.partition import is_operator
from tvm_fusion.transform.layouts.memory_formats import takes_formats

_log = logging.getLogger(__name__)
_version = operator.attrgetter("_version")  # rises when a tensor is written to
_place = torch.Tensor.data_ptr  # is another one after `weight.data = other`

MAX_BUILDS = 16  # of one part, for different weights, numbers and (where static) shapes; all
# others run in torch
MOST_CHANGES = 2  # of a weight's values; after so many it is no constant any more


class PartCalls:
    """Runs one part; takes what it takes and returns a tuple of tensors."""

    def __init__(
        self,
        part: fx.GraphModule,
        weights: Collection[int],
        updates: Sequence[tuple[int, int]],
        device: torch.device,
        options: BackendOptions,
        built: Callable[[CompiledModule], None],
    ) -> None:
        """`weights` are the inputs that are constants, `updates` those that are written to, each
        with the result that is its new value; `built` is told of each build.
        """
        self._updates = updates
        self._part, self._options, self._built, self._device = part, options, built, device
        self._weights = tuple(sorted(weights))
        placeholders = part.graph.find_nodes(op="placeholder")
        values = [node.meta["val"] for node in placeholders]
        self._names = [node.name for node in placeholders]
        # what lies elsewhere is copied for a call
        self._may_write = [(i, result) for i, result in updates if values[i].device == device]
        self._shapes_of = [i for i, v in enumerate(values) if _varies(v) and _is_tensor(v)]
        self._numbers = [i for i, v in enumerate(values) if not _is_tensor(v)]
        self._keeps_symbols = True
        self._first: tuple[ReadyPart, IRModule] | None = None
        self._builds: list[_Build] = []  # the one used last comes last
        self._changes: Counter[int] = Counter()  # how often a weight was written to, by input
        self._lock = threading.RLock()
        self._is_named = False  # as one that runs in torch
        self._is_recorded = False

    @property
    def build(self) -> "_Build":
        """What it was compiled to for its latest call."""
        return self._builds[-1]

    def would_run(self, build: "_Build") -> bool:
        """Whether a call with the same weights runs this build, and without a look at others."""
        builds = self._builds
        return bool(builds) and builds[-1] is build and not build.changed()

    def leave_capture(self) -> None:
        """Calls are launched one by one, as another graph records them, until `capture`."""
        self._is_recorded = True

    def capture(self) -> None:
        """Capture calls into CUDA graphs, as the options say."""
        with self._lock:
            self._is_recorded = False
            for build in self._builds:
                if build.run is not None:
                    build.run.module.cuda_graph = self._options.graphs_on(self._device)

    @property
    def names(self) -> list[str]:
        """The inputs by name."""
        return self._names

    def imported(self, values: dict[str, torch.Tensor]) -> None:
        """Import it for the sizes that were traced, with the values of its weights by name.

        Raises
        ------
        OperatorsRefused
            Operators of it cannot be converted.
        """
        inputs = [values.get(name) for name in self._names]
        try:
            self._first = self._import(inputs, keep_symbols=True)
        except SizesUnknown:
            self._keeps_symbols = False
        except OperatorsRefused:
            raise
        except Exception as error:  # each shape is tried by itself
            _log.info("compiled for each shape by itself: %s", error)
            self._keeps_symbols = False

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return self.run(inputs)

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """A call with these inputs."""
        builds = self._builds
        build = builds[-1] if builds else None
        if build is None or (build.is_for_some and not build.fits(inputs)):
            with self._lock:
                build = self._find(inputs)
        run = build.run
        if run is None:
            results = self._part(*inputs)
        else:
            try:
                short = run.module.short if run.is_direct else None
                results = None if short is None else short(inputs)
                if results is None:
                    results = run.call_with(inputs)
            except (DividedByZero, OutOfRange):  # of the caller's, and torch has the same
                raise
            except Exception as error:
                results, run = self._failed_call(build, inputs, error), None
        if self._updates:
            self._update(inputs, results, () if run is None else run.in_place)
        return results

    def _failed_call(
        self, build: "_Build", inputs: Sequence[Any], error: Exception
    ) -> tuple[Any, ...]:
        """The results of a call that did not succeed, from torch, as those of later calls are.
        What was written in place is written again: its old values are not read. The error is raised
        where they are: nobody knows whether something was added to them; and while calls are
        captured, of which nothing has run.
        """
        if self._options.strict or build.run.adds_in_place or torch_captures():
            raise error
        results = self._part(*inputs)
        with self._lock:
            others = [b for b in self._builds if b is not build]
            self._builds = [*others, self._failed(inputs, error)]
        return results

    def _update(
        self, inputs: Sequence[Any], results: Sequence[torch.Tensor], in_place: Collection[int]
    ) -> None:
        """Write new values into inputs where that is not done, and tell torch of all of it."""
        copied = [
            (inputs[number], results[result])
            for number, result in self._updates
            if number not in in_place and results[result] is not None
        ]
        if copied:  # counters of all layers of a cache, on a GPU in one launch
            torch._foreach_copy_(*zip(*copied, strict=True))
        written = [inputs[number] for number, _ in self._updates]
        increment_version([x for x in written if not x.is_inference()])

    def _find(self, inputs: Sequence[Any]) -> "_Build":
        """The build for inputs that the latest one does not fit."""
        self._forget_stale()
        for build in reversed(self._builds):
            if build.fits(inputs):
                self._builds = [*(b for b in self._builds if b is not build), build]
                return build
        return self._build(inputs)

    def _forget_stale(self) -> None:
        """Drop builds with old values of weights; a weight that changes again becomes an input."""
        if self._options.frozen:
            return
        stale = [build for build in self._builds if build.changed()]
        if stale:
            self._drop(stale, stale[-1].changed())

    def forget_weights(self) -> None:
        """All weights may have other values, which their own versions do not tell."""
        with self._lock:
            if not self._options.frozen:
                self._drop(self._builds, self._weights)

    def _drop(self, stale: Sequence["_Build"], changed: Collection[int]) -> None:
        self._builds = [build for build in self._builds if build not in stale]
        self._first = None
        self._changes.update(changed)
        again = {i for i in self._weights if self._changes[i] >= MOST_CHANGES}
        if again:
            self._weights = tuple(i for i in self._weights if i not in again)
            self._builds, self._first = [], None

    def _build(self, inputs: Sequence[Any]) -> "_Build":
        """Compile for these inputs, and keep the result."""
        if len(self._builds) >= MAX_BUILDS:  # nobody gains from compiling for each call
            return self._failed(inputs, f"it was compiled for {MAX_BUILDS} sizes or weights")
        build = None
        if self._keeps_symbols:
            try:
                build = self._compiled(inputs, keep_symbols=True)
            except (ConfigError, TargetError):
                raise
            except Exception as error:  # a kernel build; each shape is tried by itself
                if not self._shapes_of and not self._numbers:
                    build = self._failed(inputs, error)
                _log.info("compiled for each shape by itself: %s", error)
                self._keeps_symbols = False
        if build is None:
            try:
                build = self._compiled(inputs, keep_symbols=False)
            except (ConfigError, TargetError):
                raise
            except Exception as error:  # a kernel build
                build = self._failed(inputs, error)
        self._builds = [*self._builds, build]
        return build

    def _failed(self, inputs: Sequence[Any], why: Exception | str) -> "_Build":
        """The part in torch, once named."""
        if self._options.strict and isinstance(why, Exception):
            raise why
        if not self._is_named:
            count = sum(map(is_operator, self._part.graph.nodes))
            said = str(why).strip() or type(why).__name__  # errors of TVM begin with an empty line
            told = f"tvm_fusion: a part of {count} operators runs in torch: {said}"
            warnings.warn(told, stacklevel=2)
        self._is_named = True
        return self._described(inputs, None, keep_symbols=False)

    def _compiled(self, inputs: Sequence[Any], keep_symbols: bool) -> "_Build":
        # the first call of a graph runs in a mode that looks at each operation of torch, which
        # takes longer than most operations of the part in torch
        with _disable_current_modes(), _current(self._device):
            return self._compiled_alone(inputs, keep_symbols)

    def _compiled_alone(self, inputs: Sequence[Any], keep_symbols: bool) -> "_Build":
        options, device = self._options, self._device
        first, self._first = (self._first if keep_symbols else None), None
        made, mod = first or self._import(inputs, keep_symbols)
        module = compiler.compile(
            mod,
            self._target,
            policy=options.policy_on(device),
            verify=options.verify,
            measure=options.measure,
            cuda_graph=options.graphs_on(device),
            database=options.database,
            source=self._source(made, inputs),
        )
        module.device  # noqa: B018 - a target that this machine lacks is named now
        if self._is_recorded:
            module.cuda_graph = None
        self._built(module)
        return self._described(inputs, _Run(module, made, self._updates, device), keep_symbols)

    def _source(self, made: ReadyPart, inputs: Sequence[Any]) -> tuple[Any, Any] | None:
        """The part in torch and its tensors, to compare with; None where sizes may be others."""
        if self._shapes_of or made.sizes or not made.tensors:
            return None
        weights = {name: inputs[number] for name, number in made.weights.items()}
        tensors = [inputs[i] if o is None else inputs[i].permute(o) for i, o in made.tensors]
        places = {i: place for place, (i, _) in enumerate(made.tensors)}
        updates = {places[i]: result for i, result in self._updates if i in made.in_place}
        return OfTensors(made.graph, weights, updates), tuple(tensors)

    @property
    def _target(self) -> Any:
        kind = self._device.type.replace("cpu", "llvm")
        return kind if self._options.target is None else self._options.target

    def _import(self, inputs: Sequence[Any], keep_symbols: bool) -> tuple[ReadyPart, IRModule]:
        reorders = takes_formats(resolve_target(self._target)[0])
        given = None if keep_symbols else inputs
        with torch.inference_mode(False), torch.no_grad():
            made = ready(self._part, self._weights, given, reorders, self._may_write)
            weights = {name: inputs[number] for name, number in made.weights.items()}
            guards = _guards_of(self._part)
            writes = [node for nodes in made.in_place.values() for node in nodes]
            mod = from_graph(made.graph, weights, "torch.compile", writes)
        if keep_symbols and _guards_of(self._part) != guards:
            raise SizesUnknown  # what was made holds for some sizes only
        return made, mod

    def _described(self, inputs: Sequence[Any], run: "_Run | None", keep_symbols: bool) -> "_Build":
        keeps = keep_symbols and run is not None
        conditions = self._numbers or self._shapes_of
        weights = self._weights if run is not None else ()
        watched = {} if self._options.frozen else {i: inputs[i] for i in weights}
        versioned = {i: x for i, x in watched.items() if not x.is_inference()}
        return _Build(
            run,
            bool(weights or (conditions and not keeps)),
            weights,
            picker(weights),
            [inputs[i] for i in weights],
            versioned,
            list(map(_version, versioned.values())),
            watched,
            list(map(_place, watched.values())),
            [] if keeps else [(i, inputs[i]) for i in self._numbers],
            [] if keeps else [(i, inputs[i].shape) for i in self._shapes_of],
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Build:
    """A compiled part, and what it was compiled for.

    Attributes
    ----------
    run : _Run or None
        None where it runs in torch.
    is_for_some : bool
        Whether there are inputs that it is not right for.
    numbers : tuple of int
        The inputs that are weights.
    pick : callable
        Takes these of all inputs.
    weights : list of torch.Tensor
    versioned : dict of int to torch.Tensor
        The weights that may be written to and whose versions say so, by input.
    versions : list of int
        Theirs.
    watched : dict of int to torch.Tensor
        The weights that may be given other memory, by input.
    places : list of int
        Where theirs is.
    values : list of (input, number)
    shapes : list of (input, torch.Size)
        Empty where all that Dynamo lets pass will do.
    """

    run: "_Run | None"
    is_for_some: bool
    numbers: tuple[int, ...]
    pick: Callable[[Sequence[Any]], Sequence[Any]]
    weights: list[torch.Tensor]
    versioned: dict[int, torch.Tensor]
    versions: list[int]
    watched: dict[int, torch.Tensor]
    places: list[int]
    values: list[tuple[int, Any]]
    shapes: list[tuple[int, torch.Size]]

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether it is right for these inputs."""
        if self.numbers and not all(map(operator.is_, self.pick(inputs), self.weights)):
            return False
        if self.versioned and list(map(_version, self.versioned.values())) != self.versions:
            return False
        if self.watched and list(map(_place, self.watched.values())) != self.places:
            return False
        if self.values and any(inputs[i] != value for i, value in self.values):
            return False
        return not self.shapes or all(inputs[i].shape == shape for i, shape in self.shapes)

    def changed(self) -> set[int]:
        """The weights that were written to, or have other memory."""
        written = zip(self.versioned.items(), self.versions, strict=True)
        moved = zip(self.watched.items(), self.places, strict=True)
        return {number for (number, weight), version in written if _version(weight) != version} | {
            number for (number, weight), place in moved if _place(weight) != place
        }


class _Run:
    """Runs a compiled part on its inputs.

    Attributes
    ----------
    module : CompiledModule
    is_direct : bool
        Whether inputs and results of the part are those of the module.
    in_place : collection of int
        The inputs that it writes to.
    adds_in_place : bool
        Whether it adds to one.
    """

    def __init__(
        self,
        module: CompiledModule,
        made: ReadyPart,
        updates: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> None:
        """`updates` as for `PartCalls`.

        Results may share memory with each other and with constants of the module, of which the
        graph says nothing: those that are not known to have memory of their own are copied.
        """
        self.module, self._made, self._device = module, made, device
        self.in_place = made.in_place.keys()
        self.adds_in_place = any(map(adds, chain.from_iterable(made.in_place.values())))
        module.unread = frozenset(result for i, result in updates if i in made.in_place)
        taken = {i: given for given, (i, order) in enumerate(made.tensors) if order is None}
        module.renewed = {
            result: taken[i]
            for i, result in updates
            if i in taken and i not in made.in_place and module.own[result]
            if made.results[result] == Given(None, device)
        }
        self._shared = [i for i, own in enumerate(module.own) if not own and i not in module.unread]
        numbers = [i for i, _ in made.tensors]
        self._pick = picker(numbers)
        self._is_plain = not made.sizes and not made.lies_elsewhere(device)
        self._is_plain &= all(order is None for _, order in made.tensors)
        self._takes_all = self._is_plain and numbers == list(range(made.count))
        self._has_inputs = bool(numbers)
        self._moved = [
            (i, given.order, None if given.device == device else given.device)
            for i, given in enumerate(made.results)
            if (given.order is not None or given.device != device) and i not in module.unread
        ]
        is_given = not self._moved and not self._shared
        self.is_direct = self._takes_all and self._has_inputs and is_given

    def call_with(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The results for the inputs of the part."""
        if not self._takes_all:
            inputs = self._pick(inputs) if self._is_plain else self._lent(inputs)
        results = self.module.call_with(inputs)
        if not self._has_inputs:  # those of TVM, and nothing is written to
            results = tuple(map(torch.from_dlpack, results))
        if not self._moved and not self._shared:
            return results
        given = list(results)
        for number in self._shared:
            given[number] = given[number].clone()
        for number, order, device in self._moved:
            result = given[number] if order is None else given[number].permute(order)
            given[number] = result if device is None else result.to(device)
        return tuple(given)

    def _lent(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors as the module takes them, and those that have the sizes."""
        ordered = [(inputs[i], order) for i, order in self._made.tensors]
        tensors = [x if order is None else x.permute(order) for x, order in ordered]
        tensors += [torch.empty((inputs[i], 0), dtype=torch.int8) for i in self._made.sizes]
        return [tensor.to(self._device) for tensor in tensors]


def picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes these elements of a sequence."""
    if len(numbers) > 1:
        return operator.itemgetter(*numbers)
    return lambda given: [given[i] for i in numbers]


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """A GPU is the one that code is made for."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _varies(value: torch.Tensor) -> bool:
    return any(isinstance(extent, torch.SymInt) for extent in getattr(value, "shape", ()))


def _guards_of(part: fx.GraphModule) -> tuple[int, int]:
    """How many conditions on symbolic sizes were asked for; those that come after Dynamo made its
    guards are only counted.
    """
    for node in part.graph.nodes:
        value = node.meta.get("val")
        for number in (value, *getattr(value, "shape", ())):
            if isinstance(number, torch.SymInt):
                env = number.node.shape_env
                return len(env.guards), env.counter["ignored_backward_guard"]
    return 0, 0
