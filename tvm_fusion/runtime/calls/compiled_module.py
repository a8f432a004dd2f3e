"""A compiled model, of one function or several: call it, ask it what it is, save it, load it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from ...config.targets import device_of
from ...errors import InputError, TargetError
from ...ir.convention import Convention
from ...plan.plan import FusionPlan
from ..build import cubin_cache
from ..build.build import Built
from ..graphs.capture import CallersCaptures, torch_captures
from ..graphs.capture_rules import CudaGraphOptions, refusal_of_executable
from ..graphs.mode import GraphMode
from .call_memory import MemoryPlan, measured_call_bytes
from .channels_last import returned, taken
from .later import Later
from .launch_count import count_launches
from .repeated_calls import CallsBySize, Repeated, RepeatedCall
from .sidecar import (
    damage_named,
    export_executable,
    read_sidecar,
    read_state,
    refuse_cut,
    write_sidecar,
    write_state,
)
from .signature import Signature, function_of, load_library, virtual_machine
from .source_calls import SourceCalls
from .tensors import (
    Kind,
    are_negated,
    describe,
    from_tvm,
    kind_of,
    leaves_of,
    result_kind,
    to_argument,
    torch_stream,
)
from .written_inputs import refuse_copies, refuse_lost_writes, write_back

KEEPS = "a call keeps tensors for the next one, or gives inputs new values"


class CompiledModule:
    """What `tvm_fusion.compile` returns for a model of one function; of a module of several, one of
    them (see `CompiledFunctions`).

    Calling it runs the function, `main` unless it has another name. NumPy arrays in give NumPy
    arrays out, torch tensors give torch tensors (by DLPack, without a copy), anything else TVM
    tensors; tuples stay tuples. Inputs are checked first, and copied only where they are not
    contiguous, not aligned, or on another device. Those whose examples lay in torch's
    channels_last when the model was compiled for a GPU are taken so without a copy, and outputs
    that eager execution would give so are (`signature.formats`); NumPy arrays are contiguous.

    Calls from several threads are safe and run one after the other. On CUDA, kernels are launched
    on torch's current stream when torch tensors are given, else on TVM's, and a call returns
    before they end. Memory goes back to a pool as soon as no tensor or array refers to it: whoever
    uses outputs on another stream synchronises first. The pool keeps it for the next call until
    `tvm.get_global_func("vm.builtin.memory_manager.clear")()`.

    On a CPU, kernels run on all physical cores that the process may use, or as many threads as
    `TVM_NUM_THREADS` says before the first call. Where torch is loaded they are those of torch's
    own team, so that calls in turns with its operators do not compete for the cores.

    A model of PyTorch gives what it returns: dicts and data classes, the same tensor twice, views,
    numbers; other tensors have memory of their own. Its complex tensors are taken and given as
    such; in the signature, and as TVM tensors, they are pairs of real numbers along a last axis.
    Tensors that it keeps between calls, or that are loaded later, are in `state_dict`; a call reads
    and renews them.

    A call that is captured by `torch.cuda.graph` keeps its memory from the pool as long as the
    module lives, which has to be as long as the graph does.

    With `cuda_graph` a call is one launch of a CUDA graph, captured after the first call with
    inputs of its shapes, after the second where sizes are symbolic. Outputs are the caller's own
    unless the options say otherwise. Inputs that `main` writes to are copied back where they had to
    be copied.

    Attributes
    ----------
    executable : tvm.relax.VMExecutable or tvm.runtime.Module
        What `relax.VirtualMachine` runs without this package.
    target : tvm.target.Target
    signature : Signature
        The inputs of the function.
    function : str
        Its name in the executable.
    built : Built or None
        The build, with CUDA sources and resources; None after `load`.
    plan : FusionPlan or None
        The fusion plan, set by the compiler.
    report : Report, str or None
        The report, set by the compiler and made when it is first read; text after `load`.
    verification : Verification or None
        What checks found, set by the compiler; None where none were made and after `load`.
    index_checks : callable or None
        Looks at the arguments of a call before it runs, and raises OutOfRange; set by the compiler
        for a GPU where `TVM_FUSION_CHECK_INDICES` asks for it, and by `load` of what was compiled
        so.
    lock : held while a call runs on the host
    memory : MemoryPlan or None
        Device memory that a call takes, by symbolic extents; None for a file of an older version.
    writes : tuple of int
        The inputs that the function writes to.
    own : tuple of bool
        The outputs that have memory of their own, which a NumPy array of the caller can be.
    unread : frozenset of int
        Outputs that callers do not look at: what they get in their places may be None.
    renewed : mapping of int to int
        Outputs that callers write into inputs, by the numbers of both, and do not look at
        otherwise. A captured call that reads nothing of such an input writes there itself, and
        gives None.
    short : callable or None
        A call like the latest one, on a CPU: takes what `call_with` takes, and gives the same, or
        None for inputs that are to be checked. None where every call is checked.
    """

    report = Later()

    def __init__(
        self,
        executable: Any,
        target: tvm.target.Target,
        signature: Signature,
        *,
        built: Built | None = None,
        plan: Any = None,
        report: Any = None,
        beside: CompiledModule | None = None,
    ) -> None:
        """`beside` is another function of the executable: they share a virtual machine."""
        self._executable = executable
        self.target = target
        self.signature = signature
        self.function = signature.function
        self.built = built
        self.plan = plan
        self.report = report
        self.verification: Any = None
        self.told: Any = None  # what the report takes beside the plan, set by the compiler
        self.index_checks: Callable[[Sequence[Any]], None] | None = None
        self._saved_checks: str | None = None  # of `index_checks`, as they were loaded
        self.memory: MemoryPlan | None = built and built.memory
        self.lock = threading.Lock() if beside is None else beside.lock
        self._beside = beside
        self.writes: tuple[int, ...] = built.writes if built else ()
        self.own: tuple[bool, ...] = built.own if built else ()
        self._unread: frozenset[int] = frozenset()
        self._renewed: Mapping[int, int] = {}
        self._again: RepeatedCall | None = None
        self.short: RepeatedCall | None = None
        self._graph_mode = GraphMode()
        self._captures = CallersCaptures()
        self._on_cuda = target.kind.name == "cuda"
        self._source: SourceCalls | None = None

    @classmethod
    def of(
        cls,
        built: Built,
        plan: Any = None,
        report: Any = None,
        beside: CompiledModule | None = None,
    ) -> CompiledModule:
        """Wrap a build."""
        about = {"built": built, "plan": plan, "report": report, "beside": beside}
        return cls(built.executable, built.target, built.signature, **about)

    @cached_property
    def executable(self) -> Any:
        """What `relax.VirtualMachine` runs without this package; made on first use, with copies of
        the weights.
        """
        if self._beside is not None:
            return self._beside.executable
        return self._executable if self.built is None else self.built.complete()

    @cached_property
    def launches(self) -> int:
        """Launches in one call, read off the built module."""
        return count_launches(self)

    @cached_property
    def device(self) -> tvm.runtime.Device:
        """The device that calls run on; raises TargetError where there is none."""
        device = device_of(self.target) if self.built is None else self.built.device
        if not device.exist:
            raise TargetError(
                f"the module is compiled for {self.target.kind.name}, and this machine has no such "
                "device: compile for the target llvm to run on the CPU"
            )
        return device

    def settle_weights(self) -> None:
        """Compute what it holds of the weights of its model, which may change then."""
        if self.built is not None and self.built.weights:
            self.built.weights.settle()

    @cached_property
    def vm(self) -> relax.VirtualMachine:
        """The virtual machine; made on first use, which moves the weights to the device."""
        if self._beside is not None:
            return self._beside.vm
        weights = None if self.built is None else self.built.weights
        return virtual_machine(self._executable, self.device, weights)

    def settle_machine(self) -> None:
        """Make the virtual machine, and the machine code of what it calls on the host."""
        _ = self._main

    @cached_property
    def _main(self) -> Callable[..., Any]:
        try:
            return function_of(self.vm, self.function, self.device)
        except AttributeError as error:
            raise InputError(
                f"the library has no function {self.function!r}: the file beside it is of another "
                "one; copy both again"
            ) from error

    @cached_property
    def _repeated(self) -> Repeated:
        on_cpu, writes = self.device.type == "cpu", bool(self.writes)
        given = self.built and self.built.destinations
        main = self.vm[self.function]
        return Repeated(main, self.lock, on_cpu, self.own, writes, given, given and self._into)

    @property
    def _into(self) -> Callable[..., Any]:
        """What takes the destinations of outputs behind inputs."""
        given, built = self.built.destinations, self._executable
        if given.kernel is not None:
            library = built.jit() if isinstance(built, tvm.runtime.Executable) else built
            if library.implements_function(given.kernel, query_imports=True):
                return library.get_function(given.kernel, query_imports=True)
        return self.vm[given.function]

    @property
    def peak_memory_bytes(self) -> int | None:
        """Weights, intermediates and outputs that are on the device at once, as planned; None if
        that depends on symbolic extents (`memory.peak_bytes` takes them).
        """
        return self.memory and self.memory.peak_bytes()

    def measure_peak_memory(self, *inputs: Any) -> int:
        """Run the function and return what it took from the device in bytes, to about 2 MB, and the
        weights; raises TargetError if the module is not for CUDA.
        """
        arguments = self.arguments(self._given(inputs))
        with self.lock:
            used = measured_call_bytes(lambda: self._main(*arguments), self.device)
        return used + (self.memory.weights_bytes if self.memory else 0)

    @cached_property
    def uncapturable(self) -> str | None:
        """Why calls cannot be captured into a CUDA graph, as far as the module tells."""
        if "gpu" not in self.target.keys:
            return "the module runs on a CPU"
        return refusal_of_executable(self._executable, self.function)

    @property
    def unread(self) -> frozenset[int]:
        """See the attributes of the class; calls that were made ready before are dropped."""
        return self._unread

    @unread.setter
    def unread(self, value: frozenset[int]) -> None:
        self._unread = value
        self.cuda_graph = self.cuda_graph

    @property
    def renewed(self) -> Mapping[int, int]:
        """See the attributes of the class; calls that were made ready before are dropped."""
        return self._renewed

    @renewed.setter
    def renewed(self, value: Mapping[int, int]) -> None:
        self._renewed = dict(value)
        self.cuda_graph = self.cuda_graph

    @property
    def cuda_graph(self) -> CudaGraphOptions | None:
        """How calls are captured into CUDA graphs, None if they are not to be; set it to a bool, a
        mapping of options, or `CudaGraphOptions`. A module for a CPU raises TargetError.
        """
        return self._graph_mode.options

    @cuda_graph.setter
    def cuda_graph(self, value: Any) -> None:
        self._graph_mode.set(self, value)
        self._again = self.short = None

    @property
    def cuda_graph_refusal(self) -> str | None:
        """Why calls run launch by launch though `cuda_graph` is set; None if they do not."""
        return self._graph_mode.refusal(self)

    def __call__(self, *inputs: Any) -> Any:
        """Run the function.

        Parameters
        ----------
        *inputs : numpy.ndarray, torch.Tensor or tvm.runtime.Tensor
            In the order of `signature`, or in tuples, lists and dicts as the model takes them.
            Numbers, texts and None that were among the example inputs stand in their places, or are
            all left out.

        Returns
        -------
        Any
            A tensor, or a tuple of tensors (nested as the model's output is), of the kind given; of
            a model of PyTorch what that returns.

        Raises
        ------
        InputError
            If number, kind, dtype or shape of the inputs are not those of `signature`; symbolic
            extents have to agree between inputs. If a number is another than in the example inputs.
            If weights have no values yet.
        OutOfRange
            If an index is out of range, on a CPU and with `index_checks`.
        TargetError
            If this machine lacks the device.
        """
        if len(inputs) != len(self.signature.inputs):
            inputs = leaves_of(inputs)
        if self._source is not None:
            return self._source_call(inputs)
        return self.call_with(inputs, are_negated(inputs))

    def call_with(self, inputs: Sequence[Any], are_copied: bool = False) -> Any:
        """A call with what the function itself takes, which gives what it returns; errors as above.

        That is not what callers of a model of PyTorch take and give, where it writes into tensors,
        keeps some, or returns more than new ones.

        Parameters
        ----------
        inputs : sequence
        are_copied : bool
            Whether their memory is not what they are (`are_negated`): no call is short.
        """
        if self.index_checks is not None:
            self._check_indices(inputs)
        formats = self.signature.formats
        given = inputs if formats is None else taken(self.signature, inputs)
        is_captured = self._on_cuda and torch_captures()
        again = None if are_copied or is_captured else self._again
        if again is not None:
            result = again(given)
            if result is not None:
                return result if formats is None else returned(formats, result)
        elif self._graph_mode.options is not None and not are_copied:
            result = self._graph_mode.call(self, inputs)
            if result is not NotImplemented:
                return returned(formats, result)
        kind, torch_device = self.check(inputs)
        with self.lock, torch_stream(self.device, kind):
            arguments = self.arguments(inputs)
            result = from_tvm(self.run(arguments), kind, torch_device, self.own)
            write_back(self.writes, inputs, arguments)
            if self._graph_mode.options is None and not are_copied and not is_captured:
                again = self._repeated.call(given, arguments, kind, _flat(result), self.unread)
                self._keep_call(given, again)
            return returned(formats, result)

    def _keep_call(self, given: Sequence[Any], call: RepeatedCall | None) -> None:
        """Have calls with inputs like these be like one that was checked."""
        if not self.signature.is_symbolic:
            self._again = call
        elif call is not None:
            if self._again is None:
                self._again = CallsBySize(self.signature.telling)
            self._again.keep(given, call)
        is_all = not self._on_cuda and self.index_checks is None and self.signature.formats is None
        self.short = self._again if is_all else None

    def _check_indices(self, inputs: Sequence[Any]) -> None:
        kind, _ = self.check(inputs)
        with self.lock, torch_stream(self.device, kind):
            self.index_checks(self.arguments(inputs))

    def _source_call(self, inputs: Sequence[Any]) -> Any:
        """A call with what a model of PyTorch keeps, writes and returns."""
        source, callers = self._source, self._tensors(inputs)
        inputs = source.given(callers)
        kind, torch_device = self.check(inputs)
        if not source.convention.keeps:
            outputs = _flat(self.call_with(inputs, are_negated(inputs)))
            return source.results(self.signature, callers, outputs, kind)
        if self.index_checks is not None:
            self._check_indices(inputs)
        written = [n for n in source.convention.updates if n < len(inputs)]
        refuse_lost_writes(self.signature, written, inputs)
        with source.lock, self.lock, torch_stream(self.device, kind):
            arguments = self.arguments(inputs)
            given = _flat(self.run(arguments))
            source.renew(given, self.own)
            write_back(self.writes, inputs, arguments)
            write_back(written, inputs, {n: given[source.convention.updates[n]] for n in written})
            outputs = from_tvm(given, kind, torch_device, self.own)
        return source.results(self.signature, callers, outputs, kind)

    def _tensors(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """What `main` takes of what a caller gives."""
        count = len(self.signature.inputs)
        return inputs if self._source is None else self._source.tensors_of(inputs, count)

    def bind(self, *inputs: Any) -> Callable[[], Any]:
        """Check and convert inputs once, and return a function that runs this one on them.

        It neither checks (but for `index_checks`) nor converts nor locks: for timing, and for loops
        over fixed buffers. Its outputs are TVM tensors, those in channels_last with strides. With
        `cuda_graph` it launches a graph of its own over these very inputs, on TVM's current stream,
        and every call overwrites the outputs of the one before. An input that it writes to must
        need no copy, or InputError is raised. What stays between calls is read as it is now, and
        new values are outputs.
        """
        inputs = self._given(inputs)
        kind, _ = self.check(inputs)
        with torch_stream(self.device, kind):
            arguments = self.arguments(inputs)
        refuse_copies(self.signature, self.writes, inputs, arguments)
        main, formats = self._main, self.signature.formats
        call = self._graph_mode.bound(self, arguments) or (lambda: main(*arguments))
        call = call if self.index_checks is None else self._checked(call, arguments)
        return call if formats is None else lambda: returned(formats, call())

    def _checked(self, call: Callable[[], Any], arguments: Sequence[Any]) -> Callable[[], Any]:
        def checked() -> Any:
            self.index_checks(arguments)
            return call()

        return checked

    def _given(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """A caller's inputs as the signature has them."""
        tensors = self._tensors(inputs)
        return tensors if self._source is None else self._source.given(tensors)

    def check(self, inputs: Sequence[Any]) -> tuple[Kind, Any]:
        """Check inputs, and return whose tensors they are, and torch's device if torch's."""
        self.signature.check_count(len(inputs))
        pairs = list(zip(self.signature.inputs, inputs, strict=True))
        kinds = [(kind_of(value), value) for spec, value in pairs if spec.dtype is not None]
        self.signature.check([spec.dtype and describe(value) for spec, value in pairs])
        torch_device = next((value.device for kind, value in kinds if kind is Kind.TORCH), None)
        return result_kind([kind for kind, _ in kinds]), torch_device

    def arguments(self, inputs: Sequence[Any]) -> list[Any]:
        """Return inputs as the VM takes them, on the module's device, and what stays between
        calls.
        """
        specs = self.signature.inputs
        refuse_lost_writes(self.signature, self.writes, inputs)
        given = taken(self.signature, inputs)
        found = [to_argument(x, self.device, s) for x, s in zip(given, specs, strict=True)]
        return found if self._source is None else [*found, *self._source.values(self.device)]

    def run(self, arguments: Sequence[Any]) -> Any:
        """Run it on what `arguments` returned, on TVM's current stream, without the lock."""
        try:
            if not self._on_cuda or not torch_captures():
                return self._main(*arguments)
            with self._captures.one(self.vm, self.device):
                return self._main(*arguments)
        except RuntimeError as error:
            self.signature.name_refused(error, arguments)
            raise

    # ---- what stays between calls
    def follow(self, convention: Convention | None) -> None:
        """Take and give what callers of the model do; all parameters of `main` are inputs before,
        those of the state are none after.
        """
        if convention is None:
            return
        source = SourceCalls(convention, self.signature.inputs, self.own)
        if convention.is_plain and not source.shared:
            return
        self._source = source
        own = [s for n, s in enumerate(self.signature.inputs) if n not in self._source.specs]
        self.signature = replace(self.signature, inputs=tuple(own))
        self.writes = tuple(n for n in self.writes if n < len(own))
        if convention.keeps:
            self.uncapturable = KEEPS

    def state_dict(self) -> dict[str, Any]:
        """Copies of the tensors that stay between calls, by their names in the model.

        Returns
        -------
        dict of str to torch.Tensor or numpy.ndarray
            Buffers that the model writes (running statistics, counters, caches), as they are after
            the last call, and weights that were on the meta device, as far as they have values.
            Other weights are constants of the module, and not among them.
        """
        return {} if self._source is None else self._source.state_dict()

    def load_state_dict(self, values: Mapping[str, Any], strict: bool = True) -> None:
        """Give tensors that stay between calls new values.

        Parameters
        ----------
        values : mapping of str to torch.Tensor, numpy.ndarray or tvm.runtime.Tensor
            By their names in the model, with its dtypes and shapes; they are copied. Tied weights
            need one of their names.
        strict : bool
            Refuse names that are no state, and to leave a tensor without values.

        Raises
        ------
        InputError
            As `strict` says, or for another dtype or shape; nothing is changed then.
        """
        if self._source is None and values and strict:
            raise InputError(
                "the compiled model keeps no tensors: its weights are constants. Compile it on the "
                "meta device to load them later"
            )
        if self._source is not None:
            self._source.load_state_dict(values, strict)

    def save(self, path: str | Path) -> Path:
        """Write a shared library, and beside it `<path>.json` with signature, plan and report.

        CUDA kernels are stored as machine code where they were built on a machine with a GPU, else
        as source, compiled (through the cubin cache) where the library is loaded.

        The library also runs without this package, with tvm-ffi and TVM's runtime alone, from
        Python and from C++ (`tutorials/pages/deploying.md`, `tutorials/deploy`). There it is the
        caller's task to say on how many threads: TVM takes half of the cores of an x86 machine,
        unless `TVM_NUM_THREADS` is set before its first kernel, or each thread that calls begins
        with `tvm_ffi.get_global_func("runtime.config_threadpool")(-3, n, ["0", ..., "n-1"])`, the
        cores by number. `load` needs neither.
        """
        path = Path(path)
        export_executable(self.executable, path)
        write_sidecar(path, {"target": self.target.export(), **self.facts()})
        if self._source is not None:
            write_state(path, self._source.state_dict())
        return path

    def facts(self) -> dict[str, Any]:
        """What the library does not say of the function: `load` reads it from the JSON file."""
        return {
            "function": self.function,
            "signature": self._all_parameters.to_json(),
            "bounds": self.signature.bounds_to_json(),
            "formats": self.signature.formats and self.signature.formats.to_json(),
            "launches": self.launches,
            "plan": self.plan and self.plan.to_dict(),
            "report": self.report
            and (self.report if isinstance(self.report, str) else self.report.full()),
            "memory": self.memory and self.memory.to_json(),
            "uncapturable": self.uncapturable,
            "writes": self.writes,
            "own": self.own,
            "index_checks": self._text_of_checks(),
            "convention": self._source and self._source.convention.to_json(),
        }

    def _text_of_checks(self) -> str | None:
        to_json = getattr(self.index_checks, "to_json", None)
        return self._saved_checks if to_json is None else to_json()

    @property
    def _all_parameters(self) -> Signature:
        """The signature of the function itself: what stays between calls is an input."""
        kept = () if self._source is None else self._source.specs.values()
        return replace(self.signature, inputs=(*self.signature.inputs, *kept))

    @classmethod
    def load(cls, path: str | Path) -> Any:
        """Read what `save` wrote.

        Returns
        -------
        CompiledModule or CompiledFunctions
            `CompiledFunctions` for a file that one of these wrote.

        Raises
        ------
        InputError
            If a file is missing, broken, or of another version.
        """
        path = Path(path)
        meta = read_sidecar(path)
        cubin_cache.install()
        refuse_cut(path)
        try:
            library = load_library(path)
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(
                f"cannot load {path}: {error}. A library for CUDA loads only where there is a GPU"
            ) from error
        with damage_named(path):
            target = tvm.target.Target(meta["target"])
            if "functions" not in meta:
                return cls.from_facts(library, target, meta, path)
            members: dict[str, CompiledModule] = {}
            for name, facts in meta["functions"].items():
                beside = next(iter(members.values()), None)
                members[name] = cls.from_facts(library, target, facts, path, beside)
        told = (f"function {name}\n{member.report}" for name, member in members.items())
        return CompiledFunctions(members, "\n\n".join(told))

    @classmethod
    def from_facts(
        cls,
        library: tvm.runtime.Module,
        target: tvm.target.Target,
        meta: Mapping[str, Any],
        path: Path,
        beside: CompiledModule | None = None,
    ) -> CompiledModule:
        """A function of a loaded library, from what `facts` said of it."""
        module = cls(
            library,
            target,
            Signature.from_json(
                meta["signature"],
                meta.get("function", "main"),
                meta.get("formats"),
                meta.get("bounds"),
            ),
            plan=None if meta["plan"] is None else FusionPlan.from_dict(meta["plan"], str(path)),
            report=meta["report"] and str(meta["report"]),
            beside=beside,
        )
        module.launches = int(meta["launches"])
        memory = meta.get("memory")
        module.memory = None if memory is None else MemoryPlan.from_json(memory)
        module.uncapturable = meta.get("uncapturable", "it was saved by an older version")
        module.writes = tuple(map(int, meta.get("writes", ())))
        module.own = tuple(map(bool, meta.get("own", ())))
        module._saved_checks = meta.get("index_checks")
        for checks_of in _readers_of_checks:
            module.index_checks = checks_of(module._saved_checks, target)
        if meta.get("convention"):
            values, names = read_state(path), meta["convention"]["state"]
            kept = {int(number): values[n] for n, number in names.items() if n in values}
            module.follow(Convention.from_json(meta["convention"], kept))
        return module


Checks = Callable[[Sequence[Any]], None]
_readers_of_checks: list[Callable[[str | None, tvm.target.Target], Checks | None]] = []


def check_indices_by(find: Callable[[str | None, tvm.target.Target], Checks | None]) -> None:
    """Says what reads `index_checks` as they were saved: it stands above what it computes with."""
    _readers_of_checks.append(find)


def _flat(result: Any) -> list[Any]:
    """The tensors of a result, which is one or a flat tuple of them."""
    return list(result) if isinstance(result, tuple | list | tvm_ffi.Array) else [result]


# ---- A compiled module of several functions: one executable, each function called by its name.

ENTRY = "main"


class _NoMain(InputError, AttributeError):
    """What is asked of `main`, where there is none; to `hasattr` it is an attribute missing."""


def _of_main(name: str, what: str) -> property:
    """An attribute that is that of `main`."""

    def get(functions: CompiledFunctions) -> Any:
        return getattr(functions._main(f".{name}"), name)

    return property(get, doc=f"{what}: that of `main`; InputError where there is none.")


class CompiledFunctions:
    """What `tvm_fusion.compile` returns for a module of several public functions.

    A function is a `CompiledModule` with a signature, memory, in-place writes, plan, report and
    CUDA graphs of its own:

        compiled["prefill"](x, cache)

    They lie in one executable, which holds constants and kernels that functions share once, and
    have one virtual machine: calls from several threads run one after the other. If there is a
    `main`, calling the module itself runs it, and `signature`, `memory` and what else there is to
    say of a call are those of `main`; `plan`, `report` and `cuda_graph` are by function.

    Attributes
    ----------
    executable : tvm.relax.VMExecutable or tvm.runtime.Module
        With a VM function for each.
    target : tvm.target.Target
    report : FunctionReports, str or None
        The reports of all functions, set by the compiler; text after `load`.
    """

    report = Later()

    def __init__(self, members: Mapping[str, CompiledModule], report: Any = None) -> None:
        self._members = dict(members)
        first = next(iter(self._members.values()))
        self.target = first.target
        self.report = report

    @classmethod
    def of(
        cls, built: Mapping[str, Built], plans: Mapping[str, FusionPlan] | None = None
    ) -> CompiledFunctions:
        """Wrap the builds of `build.build_entries`, with the plan of each function."""
        members: dict[str, CompiledModule] = {}
        for name, one in built.items():
            beside = next(iter(members.values()), None)
            members[name] = CompiledModule.of(one, plans and plans[name], beside=beside)
        return cls(members)

    def __getitem__(self, name: str) -> CompiledModule:
        """The function of a name.

        Raises
        ------
        InputError
            There is none of that name.
        """
        if name not in self._members:
            raise InputError(f"there is no function {name!r} among those compiled: {self._names}")
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def items(self) -> list[tuple[str, CompiledModule]]:
        """The functions with their names, by name."""
        return list(self._members.items())

    def __call__(self, *inputs: Any) -> Any:
        """Run `main`; see `CompiledModule.__call__`.

        Raises
        ------
        InputError
            No function is called `main`: it is not said which to run.
        """
        return self._main("(...)")(*inputs)

    def bind(self, *inputs: Any) -> Callable[[], Any]:
        """Bind `main` to inputs; see `CompiledModule.bind`, and `__call__` for errors."""
        return self._main(".bind(...)").bind(*inputs)

    def measure_peak_memory(self, *inputs: Any) -> int:
        """Run `main`; see `CompiledModule.measure_peak_memory`, and `__call__` for errors."""
        return self._main(".measure_peak_memory(...)").measure_peak_memory(*inputs)

    signature = _of_main("signature", "The inputs of a call")
    function = _of_main("function", "The name of the function that a call runs")
    launches = _of_main("launches", "Launches in one call")
    memory = _of_main("memory", "Device memory that a call takes")
    peak_memory_bytes = _of_main("peak_memory_bytes", "The most device memory that a call takes")
    writes = _of_main("writes", "The inputs that a call writes to")
    own = _of_main("own", "The outputs that have memory of their own")
    built = _of_main("built", "The build")
    uncapturable = _of_main("uncapturable", "Why calls cannot be captured into a CUDA graph")
    cuda_graph_refusal = _of_main("cuda_graph_refusal", "Why calls run launch by launch")

    @property
    def executable(self) -> Any:
        """What `relax.VirtualMachine` runs without this package."""
        return next(iter(self._members.values())).executable

    @property
    def vm(self) -> relax.VirtualMachine:
        """The virtual machine of all functions."""
        return next(iter(self._members.values())).vm

    @property
    def device(self) -> tvm.runtime.Device:
        """The device that calls run on; raises TargetError where there is none."""
        return next(iter(self._members.values())).device

    @property
    def plan(self) -> dict[str, FusionPlan | None]:
        """The plan of each function; what `compile(plan=...)` takes for the same module."""
        return {name: member.plan for name, member in self._members.items()}

    @property
    def cuda_graph(self) -> dict[str, Any]:
        """How calls of each function are captured into CUDA graphs; set it to what
        `CompiledModule.cuda_graph` takes, for all of them.
        """
        return {name: member.cuda_graph for name, member in self._members.items()}

    @cuda_graph.setter
    def cuda_graph(self, value: Any) -> None:
        for member in self._members.values():
            member.cuda_graph = value

    def save(self, path: str | Path) -> Path:
        """Write one shared library, and beside it `<path>.json`; see `CompiledModule.save`."""
        path = Path(path)
        export_executable(self.executable, path)
        functions = {name: member.facts() for name, member in self._members.items()}
        write_sidecar(path, {"target": self.target.export(), "functions": functions})
        return path

    @classmethod
    def load(cls, path: str | Path) -> Any:
        """Read what `save` wrote; see `CompiledModule.load`."""
        return CompiledModule.load(path)

    @property
    def _names(self) -> str:
        return ", ".join(self._members)

    def _main(self, asked: str) -> CompiledModule:
        """The function `main`, of which something is asked."""
        if ENTRY not in self._members:
            raise _NoMain(
                f"the module has several functions ({self._names}) and no {ENTRY!r}: say which "
                f"is meant, as in module[{next(iter(self._members))!r}]{asked}"
            )
        return self._members[ENTRY]
