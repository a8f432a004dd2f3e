"""compile(): the flow from a model to a verified module, stage by stage; explain(): the same up to
the plan.

    model -> load -> lower -> build_graph -> decide (search) -> [settle regions] -> materialize ->
    write_kernels -> build -> [not slower] -> verify -> report

What stands in brackets runs with `measure` only. A group whose kernel cannot be written, does not
compile, gives wrong numbers or measures slower is cut: its operators run one by one, the report
says why, and the rest of the plan stays.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..check.sequential import Budget
from ..check.source import KernelsAlone, Original
from ..config import Policy, load_policy, resolve_target
from ..cost.probe import candidates_of
from ..cost.probe import probe as compiled_kernels
from ..errors import InputError, TargetError
from ..flow.functions import Plans, planned_functions, read_functions
from ..flow.kernel_writers import writers_beside
from ..flow.planned import Planned
from ..host.stages import table
from ..plan.search.bound import bound_of_plan
from ..report.assemble import planned_report
from ..report.screen import FunctionReports, Report
from ..report.why import asked
from ..runtime.calls.compiled_module import CompiledFunctions, CompiledModule
from ..runtime.graphs.capture_rules import CudaGraphOptions
from .kept_modules import LEAST_S, Kept
from .observed import observe_plan, observe_report
from .one_function import Wishes, contested, has_device, hold_to_source
from .several_functions import compile_functions
from .tuned_parts import TunedParts

if TYPE_CHECKING:
    from .tuned_parts import DatabaseLike

logger = logging.getLogger(__name__)

VERIFY = (True, False, "full", "groups", "report")


@table("compile")
def compile(
    model: Any,
    target: Any = None,
    *,
    policy: Any = None,
    plan: Plans = None,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    verify: bool | str | None = None,
    measure: bool = False,
    time: bool = False,
    cuda_graph: Any = False,
    database: DatabaseLike = None,
    source: tuple[Any, Any] | None = None,
) -> CompiledModule | CompiledFunctions:
    """Fuses and builds a model.

    All public functions of a Relax module are entries of one executable, `main` and those of other
    names; each is planned, checked and reported by itself, as if it were the only one. What they
    call, each other included, is fused in its place.

    Parameters
    ----------
    model : IRModule, torch.nn.Module, (torch.nn.Module, inputs), ExportedProgram, str or Path
        See `tvm_fusion.frontends.load`.
    target : str, Path, tvm.target.Target or None
        "llvm", "cuda", a device's name, a profile; None takes the GPU if there is one, else the
        CPU.
    policy : str, Path, mapping, Policy or None
        See `tvm_fusion.config.load_policy`.
    plan : FusionPlan, path, dict or None
        A plan to run instead of searching one; it has to be made for this module. For a module of
        several functions a mapping from their names to plans; those without one are planned.
    example_inputs, dynamic_shapes
        For a torch.nn.Module, as `torch.export.export` takes them.
    verify : bool, "full", "groups", "report" or None
        Check the result against float64, that of a torch.nn.Module also against PyTorch's own on
        the example inputs and on special values among them, and that of an ONNX model against
        `onnx.reference` (`check.source`, `check.source_onnx`). What gives wrong numbers
        gives way, as little of the plan as need be (`check.repair`); where that mends nothing,
        there is no module but an error.
        Of a large model that is compared with PyTorch each distinct kernel is held against float64
        on the inputs of one of its uses (`check.kernels`); "full" computes all of it in float64.
        "groups" also checks each group by itself; "report" does, too, and returns the module
        whatever was found: its report says so. None asks the policy.
    measure : bool
        Settle by measurements what the cost model cannot decide, for at most
        `policy.measure_budget_s`: fusions in doubt are timed beside their operators apart, then the
        whole module beside the unfused one, and what is not faster is cut. On the CPU of this
        machine fusions in doubt are timed by default where the result is checked, for at most
        `policy.settle_budget_s`. The times are kept for
        `calibrate --refit` (see `check.kept_samples`). A given `plan` is timed as a whole and left
        as it is.
    time : bool
        Time the fused module beside the unfused one, for the report only.
    cuda_graph : bool, mapping or CudaGraphOptions
        Capture whole calls into CUDA graphs (see `runtime.graphs.capture_rules.CudaGraphOptions`),
        and plan for what a launch costs there. A module whose calls cannot be captured runs launch
        by launch, and its report says why.
    database : str, Path or TuningDatabase, optional
        A folder that `tvm_fusion.tune` made: kernels that it measured to be faster than the untuned
        ones are used, and the plan that it settled, if it tuned this module with this policy. By
        default the `TuningDatabase` that is current (`with database:`), if there is one; that it
        has nothing of the target is logged.
    source : (torch.nn.Module, tuple of torch.Tensor), optional
        Of an IRModule that was imported elsewhere: the model that it was, and inputs, to compare it
        with.

    Returns
    -------
    CompiledModule or CompiledFunctions
        Call it with NumPy arrays, torch or TVM tensors; `.report` says what was done, `.plan` is
        the plan. Of a module of several functions each is a `CompiledModule` by its name, as in
        `compiled["decode"](x)`; `.report` and `.plan` are those of all, by name.

    Raises
    ------
    InputError
        The model, target, policy or plan cannot be used, `database` is none or has nothing of the
        target, or `cuda_graph` is asked for on a CPU.
    VerificationError
        The numbers are wrong whatever is compiled, TVM's own code included. It names the element,
        the function if it is one of several, the kernels, and a folder with a program that shows it
        again.
    BuildError
        The module does not build even without fusion.
    """
    graphs = CudaGraphOptions.of(cuda_graph)
    if verify not in (None, *VERIFY):
        raise InputError(f"verify={verify!r} is none of {', '.join(map(repr, (None, *VERIFY)))}")
    if graphs is not None:
        policy = graph_policy(target, policy)
    tuned = TunedParts(database).of
    began = monotonic()
    read = read_functions(model, target, policy, plan, example_inputs, dynamic_shapes, tuned)
    wanted = read.policy.verify if verify is None else verify
    original = Original(*(source or (model, example_inputs)), with_special=source is None)
    beside = wanted is True and original.is_comparable
    wishes = Wishes(wanted, measure, time, graphs, beside=beside, original=original)
    kept = Kept.of(read, wishes)
    found = None if kept is None else kept.found()
    if found is not None:
        return found
    is_compared = bool(source and wanted) and not wishes.timed  # times are taken by themselves
    with writers_beside(), original.run_beside() if is_compared else nullcontext():
        compiled = _checked_beside(read.planned(), wishes, original)
    if kept is not None and monotonic() - began > LEAST_S:
        kept.keep(compiled)
    return compiled


def _checked_beside(
    functions: dict[str, Planned], wishes: Wishes, original: Original
) -> CompiledModule | CompiledFunctions:
    """Compiled; again, and checked as a whole, where a check of its kernels alone is not enough."""
    try:
        compiled = _compiled(functions, wishes, original)
    except KernelsAlone as error:
        logger.info("%s", error)
    else:
        if _is_checked(compiled):
            return compiled
    return _compiled(functions, replace(wishes, beside=False), original)


def _compiled(
    functions: dict[str, Planned], wishes: Wishes, original: Original
) -> CompiledModule | CompiledFunctions:
    compiled = compile_functions(functions, wishes)
    if wishes.verify and isinstance(compiled, CompiledModule):
        (planned,) = functions.values()
        hold_to_source(compiled, planned, original, wishes.verify == "report")
    return compiled


def _is_checked(compiled: CompiledModule | CompiledFunctions) -> bool:
    """Whether a module of which kernels alone were checked was compared with its source."""
    if not isinstance(compiled, CompiledModule):
        return True
    found = compiled.verification
    return found is None or not found.kernels or found.source_error is not None


def graph_policy(target: Any, policy: Any) -> Policy:
    """The policy for a module that runs as a CUDA graph: a saved launch is worth a graph's node.

    Raises
    ------
    TargetError
        The target is no CUDA device.
    """
    kind = resolve_target(target)[0].kind.name
    if kind != "cuda":
        raise TargetError(
            f"cuda_graph: the target is {kind}; CUDA graphs need the target cuda or a GPU's name"
            "; give one, or leave cuda_graph out"
        )
    return replace(load_policy(policy), launch="graph")


@table("explain")
def explain(
    model: Any,
    target: Any = None,
    *,
    policy: Any = None,
    plan: Plans = None,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    measure: bool = False,
    probe: bool = False,
    bound: bool = False,
    database: DatabaseLike = None,
    why: str | None = None,
) -> Report | FunctionReports:
    """Plans a model and reports the plan, or that of each function by its name; parameters as for
    `compile`.

    Nothing is built and no device is needed, unless `measure` asks to time the fusions in doubt. Of
    a `database`, or the current one, the plan that was settled counts, and the report says which
    kernels would be used.
    With `probe` the kernels of all groups are compiled (by nvcc; no GPU is needed) and the report
    has their registers, spills and code. With `bound` (needs SciPy) the report says how far the
    plan can be from the cheapest one, by the cost model, where the graph is small enough to tell.
    With `why`, two names with a comma between them, the report has what concerns these two, and
    says what fusing them saves or costs, and what would turn it (`report.why`).
    """
    tuned = TunedParts(database).of
    functions = planned_functions(
        model, target, policy, plan, example_inputs, dynamic_shapes, tuned
    )
    how = {"measure": measure, "probe": probe, "bound": bound}
    found: dict[str, Report] = {}
    unknown: InputError | None = None
    for name, one in functions.items():
        try:
            found[name] = _explained(one, 1 / len(functions), why=why, **how)
        except InputError as error:
            if why is None:
                raise
            unknown = unknown or error  # another function may have both
    if not found:
        raise unknown
    return FunctionReports(found) if len(functions) > 1 else next(iter(found.values()))


def _explained(
    planned: Planned, share: float, *, measure: bool, probe: bool, bound: bool, why: str | None
) -> Report:
    """The report of one function, which has a share of the budget for measurements."""
    graph, hw, policy = planned.graph, planned.hw, planned.policy
    if measure and not planned.given and has_device(planned):
        planned = contested(planned, Budget(policy.measure_budget_s).share(share))
    if probe and hw.kind != "cuda":
        raise TargetError(
            f"{hw.name} is no GPU: there are no registers to probe"
            "; leave --probe out, or name a GPU"
        )
    observe_plan(planned)
    groups = candidates_of(graph, planned.plan) if probe else []
    found = compiled_kernels(planned.low, graph, groups, hw, policy, planned.target)
    report = planned_report(planned, found)
    if why is not None:
        report = asked(planned, report, why)
    if bound:
        report = replace(report, bound=bound_of_plan(graph, hw, policy, planned.plan))
    observe_report(planned, report)
    return report
