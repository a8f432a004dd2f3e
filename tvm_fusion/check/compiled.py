"""Checks what the compiler built, and never lets wrong numbers through: where the module as a whole
is wrong, as little of it as need be gives way (`repair`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

from .._version import __version__
from ..config import HardwareProfile, Policy
from ..errors import (
    BuildError,
    DividedByZero,
    InputError,
    OutOfRange,
    Unsupported,
    VerificationError,
)
from ..flow.planned import BuiltPlan, Planned
from ..host.atomic_files import replace_file
from ..host.cache_folder import cache_dir, make_folder
from ..host.stages import stepped
from ..ir.weights import with_values
from ..plan.plan import PlannedGroup
from ..runtime.build.build import Built
from ..runtime.build.guards import may_refuse
from ..runtime.build.version_names import edges_among
from ..transform.apply.materialize import materialize
from .allowance import Reference
from .bounds.rounded_products import with_rounded_products
from .checked_sizes import draw_count, drawn_inputs, inputs_at, is_extreme, symbols_of
from .index_checks import IndexChecks, quick_checks
from .plain import plain_module
from .reference import runner
from .repair import OthersOf, Repair
from .verify import Verification, judge_outputs, outputs_on
from .written_memory import with_written

logger = logging.getLogger(__name__)

MOST_DRAWS = 64  # of inputs, where a model refuses some

# A PrimFunc, its class, the device and the policy in, the configuration that it is written in out.
Configured = Callable[[tirx.PrimFunc, str, HardwareProfile, Policy], str | None]


@dataclass
class Checked:
    """What a check ended with.

    Attributes
    ----------
    made : BuiltPlan
        What passed, or the last that did not.
    verification : Verification
    group_errors : dict of str to float
        Of each group that was checked on its own, by name of its PrimFunc.
    tried : list of str
        What was run in turn until it passed; one entry where the first did.
    wrong : dict of str to (PlannedGroup, str)
        The groups that were wrong by themselves and gave way, by name of their PrimFunc, and why.
    references : sequence of Reference
        What it was held against.
    alone : IRModule or None
        The model as TVM alone lowers it, where nothing else was right.
    kernels : int
        How many kernels were checked in place of the module as a whole (`check.kernels`); 0 if that
        was.
    on_examples : bool
        It was checked on the example inputs, as the model refuses random ones.
    """

    made: BuiltPlan
    verification: Verification
    group_errors: dict[str, float] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)
    wrong: dict[str, tuple[PlannedGroup, str]] = field(default_factory=dict)
    references: Sequence[Reference] = ()
    alone: tvm.IRModule | None = None
    kernels: int = 0
    on_examples: bool = False

    @property
    def inputs(self) -> Sequence[Any]:
        """Ordinary ones, that the model takes."""
        if self.references:
            return self.references[0].inputs
        return drawn_inputs(self.made.planned.mod)


def check_compiled(
    made: BuiltPlan,
    others: OthersOf,
    every_group: bool = False,
    examples: Callable[[], Sequence[Any] | None] = lambda: None,
) -> Checked:
    """Compares a build with float64, and what gave way in it, until one passes or none is left.

    Parameters
    ----------
    made : BuiltPlan
        The fused module.
    others : callable
        Gives what may compute an operator whose kernel is wrong.
    every_group : bool
        Check each group on its own even if the module as a whole is right.
    examples : callable
        Gives inputs that the model is known to take, if there are any, for one that refuses what is
        drawn.

    Returns
    -------
    Checked
        Its `verification` has passed unless TVM's own code is wrong, too.
    """
    mod = plainly_lowered(made.planned)
    on_examples = False
    try:
        references = references_of(made.planned, mod)
        references += _at_edges(references[0], made, mod)
    except RefusesAll as error:
        references = _references_on(examples(), made.planned, mod)
        if not references:
            raise
        on_examples = True
        logger.warning("%s; it is checked on the example inputs", error.what)
    repair, goes_on = Repair(mod, others), every_group
    while goes_on:
        made, goes_on = repair.without_wrong_groups(made, references[0].inputs)
    while True:
        (verification, inputs), goes_on = judged(made.built, references), False
        if not verification.passed:
            made, goes_on = repair.step(made, verification, inputs)
        if not goes_on:
            found = (repair.errors, repair.tried, repair.wrong, references, repair.alone)
            return Checked(made, verification, *found, on_examples=on_examples)


def checked_again(checked: Checked, made: BuiltPlan) -> Checked:
    """What a check ended with, of the same function in another build."""
    verification, _ = judged(made.built, checked.references)
    return replace(checked, made=made, verification=verification)


class RefusesAll(VerificationError):
    """A model refuses all inputs that were drawn; `what` says so alone."""

    def __init__(self) -> None:
        self.what = (
            f"the model refuses {MOST_DRAWS} random inputs in turn (an index out of range, or an "
            "integer divided by zero)"
        )
        super().__init__(
            f"{self.what}: it cannot be verified on them; give example inputs that it takes, or "
            "pass verify=False"
        )


def _references_on(
    inputs: Sequence[Any] | None, planned: Planned, mod: tvm.IRModule
) -> list[Reference]:
    """The reference on given inputs; none where there are none, or the model refuses them too."""
    if inputs is None:
        return []
    reference = _reference(mod, inputs, planned.target)
    return [reference] if _takes(reference, None) else []


def _reference(mod: tvm.IRModule, inputs: Sequence[Any], target: tvm.target.Target) -> Reference:
    """A reference of the outputs, and of what is left in inputs that are written to."""
    shown, written = with_written(mod)
    found = Reference(shown, inputs, target)
    found.written = written
    return found


def references_of(planned: Planned, mod: tvm.IRModule) -> list[Reference]:
    """What TVM's lowering of the model gives on each draw of inputs; sizes that it cannot run at
    are left out. Of inputs that the model refuses (an index out of range) others are drawn, on a
    GPU too as far as that can be told (`index_checks`).

    Raises
    ------
    RefusesAll
    """
    first = _reference(mod, drawn_inputs(planned.mod), planned.target)
    others = [
        first.on(drawn_inputs(planned.mod, n, mod), ceiling=not is_extreme(n))
        for n in range(1, draw_count(mod))
    ]
    if symbols_of(planned.mod["main"]):
        others = [reference for reference in others if _runs(reference)]
    references = [first, *others]
    if not may_refuse(mod):
        return references
    on_cpu = planned.target.kind.name == "llvm"
    checks = None if on_cpu else quick_checks(planned.mod, planned.target)
    if not on_cpu and checks is None:
        return references
    more = (first.on(drawn_inputs(planned.mod, n, mod)) for n in range(len(references), MOST_DRAWS))
    taken = (r for r in itertools.chain(references, more) if _takes(r, checks))
    if found := list(itertools.islice(taken, len(references))):
        return found
    if checks is not None:
        logger.warning(
            "an index of the model is out of range on %d random inputs in turn: it is checked as a "
            "GPU reads it, at the nearest element",
            MOST_DRAWS,
        )
        return references
    raise RefusesAll


def _at_edges(first: Reference, made: BuiltPlan, mod: tvm.IRModule) -> list[Reference]:
    """References at the sizes on both sides of where versions of kernels take turns, if the model
    takes whatever is drawn.
    """
    kernels = itertools.chain.from_iterable(made.built.kernels.values())
    if not (edges := edges_among(kernels)) or may_refuse(mod):
        return []
    found = (first.on(inputs) for inputs in inputs_at(made.planned.mod, edges, mod))
    return [reference for reference in found if _runs(reference)]


def _takes(reference: Reference, checks: IndexChecks | None) -> bool:
    """Whether a model takes the inputs of a reference, as that says, or checks of indices."""
    try:
        if checks is None:
            _ = reference.on_arrays or reference.outputs
        else:
            checks.refuse(reference.inputs)
    except (OutOfRange, DividedByZero) as error:
        logger.info("not checked on inputs that the model refuses: %s", error)
        return False
    except BuildError as error:  # of what computes the indices: nobody asked for that
        if checks is None:
            raise
        logger.info("indices are not looked at: %s", error)
    return True


def _runs(reference: Reference) -> bool:
    try:
        return bool(reference.outputs)
    except Exception as error:  # whatever an operator raises that gets shapes it does not take
        logger.info("not checked at sizes that the model does not take: %s", error)
        return False


def judged(built: Built, references: Sequence[Reference]) -> tuple[Verification, Sequence[Any]]:
    """The verdict on a build on the inputs of all references, or on the first that it fails on, and
    these inputs. What is not finite is told of the first ones, which are ordinary.
    """
    run = runner(built, written=references[0].written)
    worst, not_finite = 0.0, None
    for reference in stepped("inputs checked", references, len(references)):
        found = judge_outputs(outputs_on(run, reference), reference)
        worst = max(worst, found.worst_error)
        not_finite = found.not_finite if not_finite is None else not_finite
        if not found.passed:
            break
    return replace(found, worst_error=worst, not_finite=not_finite), reference.inputs


def plainly_lowered(planned: Planned) -> tvm.IRModule:
    """What the reference is made from: the model as TVM lowers it, where TVM can."""
    try:
        found = plain_module(planned.mod, planned.target)
    except Exception as error:  # TVM raises whatever an operator's legalization raises
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        logger.warning("the reference is of this package's lowering: TVM alone has %s", reason[0])
        found = planned.whole.mod
    return with_rounded_products(found, planned.policy)


# ---- What a user gets instead of a module with wrong numbers: an error that says what is wrong and
# where, and a folder that shows it again.
#
#     $TVM_FUSION_CACHE/wrong/<hash>/module.json      the model, as TVM keeps it
#                                    reproduce.py     compiles it and prints the report

MOST_BYTES = 1 << 30  # of weights; more are not written to anybody's disk

SCRIPT = '''\
"""Wrong numbers with tvm_fusion {version}, TVM {tvm}: {why}"""

from pathlib import Path

import tvm
from tvm import tirx

import tvm_fusion

folder = Path(__file__).parent
module = tvm.ir.load_json((folder / "module.json").read_text())
target = tvm.target.Target({target})
policy = {policy}
compiled = tvm_fusion.compile(module, target, policy=policy, verify="report")
print(compiled.report.full())
'''


def wrong_numbers(checked: Checked, configured: Configured) -> VerificationError:
    """The error for a function that no fallback makes right, with a reproducer where one can be
    written.

    Names the outputs, the worst elements, each group that is wrong by itself with its kernel and
    configuration (`configured` tells it), and what was tried.
    """
    planned = checked.made.planned
    name = planned.source.function
    where = "" if name == "main" else f"function {name}: "
    lines = [f"{where}wrong numbers, whatever is compiled: {checked.verification.why}"]
    for name, (group, why) in checked.wrong.items():
        ops, how = "+".join(group.ops), _how(planned, group, configured)
        lines.append(f"  {ops} is wrong by itself (kernel {name}, class {how}): {why}")
    if not checked.wrong:
        lines.append("  no group of the plan is wrong by itself")
    lines.append("  tried: " + "; ".join(checked.tried))
    folder = write_reproducer(planned, checked.verification.why)
    if folder is not None:
        lines.append(f"  to see it again, and to report it: python {folder / 'reproduce.py'}")
    lines.append('  verify="report" returns the module all the same')
    return VerificationError("\n".join(lines))


def _how(planned: Planned, group: PlannedGroup, configured: Configured) -> str:
    """The class of a group and the configuration that its kernel is written in."""
    name = group.kernel_class
    try:
        made = materialize(planned.low, planned.graph, planned.plan)
        func = made.mod[made.functions[group.ops]]
        text = configured(func, name, planned.hw, planned.policy)
    except (KeyError, Unsupported):  # cut meanwhile: its function is gone
        return name
    return f"{name}, {text}" if text is not None else name


def write_reproducer(planned: Planned, why: str) -> Path | None:
    """Write the folder; None, with a warning, where that is not possible."""
    text = tvm.ir.save_json(with_values(planned.mod))
    if len(text) > MOST_BYTES:
        logger.warning("no reproducer: the model has %.1f GB", len(text) / 1e9)
        return None
    folder = cache_dir() / "wrong" / hashlib.sha256(text.encode()).hexdigest()[:16]
    script = SCRIPT.format(
        version=__version__,
        tvm=tvm.__version__,
        why=why.replace("\\", "/").replace('"', "'"),
        target=json.loads(str(planned.target)),
        policy=repr(asdict(planned.policy)),
    )
    try:
        make_folder(folder)
        replace_file(folder / "module.json", text)
        replace_file(folder / "reproduce.py", script)
    except (OSError, InputError) as error:
        logger.warning("no reproducer: %s", error)
        return None
    return folder
