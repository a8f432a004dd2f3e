"""What a compilation did, as values: the source of the terminal text and of the JSON object."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..runtime.timing.timing import FUSED, UNFUSED, TimeReport
from .network import DeviceReport, GraphReport, Repeat

FORMAT_VERSION = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantity with and without fusion; None where nothing was counted or run."""

    fused: float | None = None
    unfused: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times less the fused module needs; None if that is not known."""
        if not self.fused or self.unfused is None:
            return None
        return self.unfused / self.fused


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of the check against float64.

    Attributes
    ----------
    passed : bool
        Whether every output is as exact as the error rule asks.
    worst_error : float
        Largest error of an output relative to the largest magnitude of its reference.
    not_finite : float
        Largest share of an output that is NaN or infinite in the reference: of those elements it
        is only known that they are so in ours, too.
    source : str or None
        The framework that the model comes from, if it was held against that: "PyTorch" on the
        example inputs, or "onnx.reference" on those of the check.
    source_error : float or None
        The largest error of an output beside that of the framework, in its own dtype; None where
        the two were not compared.
    source_note : str or None
        What was not compared, and why.
    source_failure : str or None
        What says that the framework's model is another function, if it is.
    kernels : int
        How many distinct kernels were checked, each on the inputs of one of its uses, in place of
        the outputs; 0 where all was computed in float64.
    on_examples : bool
        Whether it was checked on the example inputs alone, as the model refuses random ones.
    """

    passed: bool
    worst_error: float
    not_finite: float = 0.0
    source: str | None = None
    source_error: float | None = None
    source_note: str | None = None
    source_failure: str | None = None
    kernels: int = 0
    on_examples: bool = False


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One kernel of the plan.

    Attributes
    ----------
    name : str
        Name of the group's PrimFunc.
    ops : tuple of str
        The operations it computes, as the plan names them.
    composites : tuple of str
        The operators of the model that they come from ("softmax", "rms_norm").
    kernel_class : str
        Name of the kernel class that wrote it.
    launches : int
        Device launches of one call.
    early : bool
        Whether it is launched before the kernel in front of it has ended, and waits for that
        (`runtime.build.early_launches`).
    versions : tuple of str
        Ranges of its symbolic size ("up to 64", "beyond"), each with a kernel of its own, of which
        a call launches one; none where one kernel is for all.
    bytes_fused, bytes_unfused : int
        Memory traffic of the group, and of those operators of the model, one by one, that it
        computes: over all groups, and what was rewritten away (`Facts.bytes_elsewhere`), the sums
        are the report's `bytes`.
    predicted_us, unfused_predicted_us : float
        Times from the cost model.
    terms : Mapping of str to float
        The parts of `predicted_us` by resource, in microseconds.
    measured_us : float or None
        Time of the kernel, if it ran.
    roofline_share : float or None
        Share of the device's limit that the kernel reaches: measured if it ran, else predicted.
    registers : int or None
        Registers a thread, if the kernel was compiled for a GPU.
    spill_bytes : int or None
        Bytes a thread stores and loads for want of registers, if the kernel was compiled.
    code_bytes : int or None
        Machine code of the kernel, if it was compiled for a GPU.
    error : float or None
        Error against float64, if it was checked.
    fallback : str or None
        Why the unfused version runs instead, if it does.
    evidence : Mapping or None
        Why it is taken to be faster than its operations one by one (`plan.plan.Evidence`), if it
        computes several.
    assumed_l2 : Mapping of str to float
        Bytes, by tensor, that the prediction takes to lie in the L2 when the kernel starts.
    tuned : Mapping or None
        What tuning chose, if it measured the kernel: the `choice` ("default" is the untuned kernel,
        "trace" a schedule of MetaSchedule), its time `us` and that of the untuned kernel
        `untuned_us` by themselves, and the key of the `workload` in the database; or why the choice
        is `stale`. Or what is built `instead_of` a configuration that spilled registers: the
        `choice`, both predicted times and the bytes that a thread spills.
    label : str
        What a model's author knows it by: "layers.3.mlp: matmul, gelu", without the module where
        that is not known.
    modules, lines : tuple of str
        Paths of the modules whose operators it computes, and lines of their source.
    reads, writes : tuple of int
        The tensors of the graph that it reads from and leaves in memory.
    flops : float or None
        Operations of one call; None where that depends on symbolic extents.
    same_as : int or None
        Index of the first group with the same kernel and shapes, if this is not it.
    rejected : int or None
        Index of the first refusal that it is named in.
    measured : TimeReport or None
        Time of its launches in one call with its quartiles, if it ran by itself on a clock.
    """

    name: str
    ops: tuple[str, ...]
    composites: tuple[str, ...]
    kernel_class: str
    launches: int
    bytes_fused: int
    bytes_unfused: int
    predicted_us: float
    unfused_predicted_us: float
    terms: Mapping[str, float] = field(default_factory=dict, hash=False)
    measured_us: float | None = None
    roofline_share: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    code_bytes: int | None = None
    error: float | None = None
    fallback: str | None = None
    evidence: Mapping[str, Any] | None = field(default=None, hash=False)
    assumed_l2: Mapping[str, float] = field(default_factory=dict, hash=False)
    early: bool = False
    versions: tuple[str, ...] = ()
    tuned: Mapping[str, Any] | None = field(default=None, hash=False)
    label: str = ""
    modules: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    flops: float | None = None
    same_as: int | None = None
    rejected: int | None = None
    measured: TimeReport | None = None

    @property
    def time_us(self) -> float:
        """Measured, where that was done, else predicted."""
        return self.predicted_us if self.measured_us is None else self.measured_us


@dataclass(frozen=True, slots=True)
class RefusalReport:
    """A fusion that was not done.

    Attributes
    ----------
    code : str
        Name of the refusal's code.
    where : tuple of str
        The operations or groups that stay apart.
    why : str
        The reason in one sentence.
    numbers : Mapping of str to float
        What the decision was based on.
    flip : str or None
        The one action that would turn it, after its kind: "dtype: ..." (`report.flip`).
    cost_us : float or None
        What the refusal costs by the cost model, in microseconds: the time apart less that
        together, where that is known, else what the launches take beyond the limit of one.
    kernel_class : str or None
        The class that refuses, of those asked the one that came closest.
    """

    code: str
    where: tuple[str, ...]
    why: str
    numbers: Mapping[str, Any] = field(default_factory=dict, hash=False)
    flip: str | None = None
    cost_us: float | None = None
    kernel_class: str | None = None


@dataclass(frozen=True, slots=True)
class PairReport:
    """Why two parts of a model are, or are not, one kernel.

    Attributes
    ----------
    launches : tuple of str
        The launches of the two, by the first and the last operator of each.
    relation : str
        How they stand to each other: one kernel, tensors between them, operands in common, or not
        neighbours, with what lies between.
    price : str
        What fusing them saves or costs by the cost model.
    kernels : str
        The two launches in words: their places in the model where these are known, and classes.
    between : tuple of str
        Launches on paths between them: fusing the two means fusing these, too.
    saves_us : float or None
        Microseconds that one kernel saves (less than 0: costs); None where no class can.
    apart_us, together_us, limit_us : float or None
        Predicted times of all these launches apart and of one kernel, and the least that one could
        take.
    kernel_class : str or None
        The class that computes both, or could.
    refusals : tuple of RefusalReport
        Why they are apart, the most telling reason first, then those of the other kernel classes.
    names : tuple of str
        As they were asked for.
    """

    launches: tuple[str, ...]
    relation: str
    price: str
    kernels: str = ""
    between: tuple[str, ...] = ()
    saves_us: float | None = None
    apart_us: float | None = None
    together_us: float | None = None
    limit_us: float | None = None
    kernel_class: str | None = None
    refusals: tuple[RefusalReport, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """A launch that does nothing but permute or copy a tensor.

    Attributes
    ----------
    name : str
        Name of the launch's PrimFunc.
    ops : tuple of str
        Its operations.
    predicted_us : float
        What it costs by the cost model.
    bytes : int
        Memory traffic.
    reads, writes : tuple of str
        Inputs and constants of the model that it reads, results that it writes: no kernel stands
        there that could absorb it.
    neighbours : tuple of RefusalReport
        Why the launches before and behind it did not, one at least for each.
    readers : int
        Launches that read what it writes.
    """

    name: str
    ops: tuple[str, ...]
    predicted_us: float
    bytes: int
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    neighbours: tuple[RefusalReport, ...] = ()
    readers: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What was fused, why, what it saved, and how right it is.

    Attributes
    ----------
    target : str
        Name of the hardware profile.
    launches, bytes : Comparison
        Device launches and memory traffic in bytes of one call of the model.
    plan : Mapping
        The plan as a JSON-able value.
    groups : tuple of GroupReport
        The kernels, in the order in which they run.
    refusals : tuple of RefusalReport
        The fusions that were not done, the most valuable first.
    layouts : tuple of LayoutReport
        Those launches that change a layout only, and why they are not part of another.
    verify : Verification or None
        None if nothing was checked.
    bound : plan.search.bound.Bound or None
        How far the plan can be from the cheapest one, if that was asked for and could be told.
    times : Mapping of str to TimeReport
        Time of one call with its quartiles: "fused", "unfused", and other compilers by name.
    version : int
        Version of the JSON format.
    memory : Comparison
        Device memory in bytes that a call needs at its peak, as planned: weights, intermediates and
        outputs; None where that depends on symbolic extents.
    measured_memory_bytes : int or None
        The same for the fused module as the device saw it, if it ran on a GPU.
    cuda_graph : str or None
        Whether calls are captured into a CUDA graph, and if not, why; None if not asked for.
    threads : int or None
        Threads that kernels run on; None on a GPU, and for a plan that was not built.
    call_us : Comparison
        Wall-clock time of a call in microseconds, as one graph (`fused`) and launch by launch.
    pair : PairReport or None
        The answer about two parts of the model, where it was asked for (`explain --why`).
    unlearned : str or None
        Why the learned correction of the device's times is not used, if it has one that is not.
    plain : Mapping of str to str
        The PrimFuncs that no rule could schedule, and how they run: right, but slow
        (`runtime.build.plain_schedule`).
    device : DeviceReport or None
        The rates that the plan was made by.
    graph : GraphReport or None
        The lowered model: operators, tensors, and where they come from.
    repeats : tuple of Repeat
        Runs of equal groups, as the layers of a model are.
    timeline : mapping of str to (tuple of int or None)
        "fused" and "unfused": bytes of intermediates and results that are in memory while each
        launch runs; None where extents are symbolic.
    bytes_elsewhere : int
        Traffic of the unfused model's operators that no group computes, since they were rewritten.
    assumed : mapping of str to int
        The sizes that predictions take symbolic extents for.
    sources : Callable or None
        Gives the text of each kernel (`report.sources.SourceReport`), by the name of its group;
        asked for by `to_json(sources=True)`.
    """

    target: str
    launches: Comparison
    bytes: Comparison
    plan: Mapping[str, Any] = field(hash=False)
    groups: tuple[GroupReport, ...] = ()
    refusals: tuple[RefusalReport, ...] = ()
    verify: Verification | None = None
    times: Mapping[str, TimeReport] = field(default_factory=dict, hash=False)
    version: int = FORMAT_VERSION
    bound: Any = None
    memory: Comparison = Comparison()
    measured_memory_bytes: int | None = None
    cuda_graph: str | None = None
    call_us: Comparison = Comparison()
    layouts: tuple[LayoutReport, ...] = ()
    threads: int | None = None
    plain: Mapping[str, str] = field(default_factory=dict, hash=False)
    unlearned: str | None = None
    device: DeviceReport | None = None
    graph: GraphReport | None = None
    repeats: tuple[Repeat, ...] = ()
    timeline: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict, hash=False)
    bytes_elsewhere: int = 0
    assumed: Mapping[str, int] = field(default_factory=dict, hash=False)
    sources: Callable[[], Mapping[str, Any]] | None = field(
        default=None, hash=False, compare=False, repr=False
    )
    pair: PairReport | None = None

    @property
    def time_us(self) -> Comparison:
        """Median times of a call in microseconds, fused and unfused."""
        medians = (self.times.get(name, TimeReport()).median_us for name in (FUSED, UNFUSED))
        return Comparison(*medians)

    def to_json(self, sources: bool = False) -> dict[str, Any]:
        """Return the report as a JSON-able dict; numbers that JSON has no form for become None.
        With `sources` the text of the kernels is in it.

        Each entry of `times` also says what its quartiles allow: whether the fused module is
        "faster", "slower" or makes "no difference", and by which `ratio` of the medians if it does.
        """
        order = ("version", "target", "launches", "bytes", "time_us", "verify", "plan", "groups")
        named = (f.name for f in fields(self) if f.name != "sources")
        data = {name: _jsonable(getattr(self, name)) for name in named}
        data["sources"] = _jsonable(self.sources()) if sources and self.sources else {}
        data["time_us"] = _jsonable(self.time_us)
        ours = self.times.get(FUSED)
        for name, found in self.times.items():
            if ours is not None and name != FUSED:
                verdict = ours.verdict(found)
                data["times"][name]["verdict"] = verdict and verdict.value
                data["times"][name]["ratio"] = ours.ratio(found)
        return {key: data.pop(key) for key in order} | data


def _jsonable(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _jsonable(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
