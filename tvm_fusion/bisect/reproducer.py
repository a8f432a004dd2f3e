"""A folder that shows a wrong or slow kernel again, as small as can be.

module.json     the operators of the kernels alone, where they show it by themselves, else the
                model, as TVM keeps it
module.py       the same to read
plan.json       with the kernels to blame, and no others of this package
inputs.npz      on which it was so
reproduce.py    builds it and says what it finds; its status is 1 while it is so
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from .._version import __version__
from ..check.allowance import Reference
from ..check.compiled import judged, plainly_lowered
from ..check.inputs import numpy_dtype
from ..check.repair import captured_values
from ..check.verify import Verification, rounded_to
from ..config import card_names, load_policy, profile_names, resolve_target
from ..errors import InputError, TvmFusionError
from ..flow.planned import Planned
from ..host.atomic_files import replace_file
from ..ir.weights import with_values
from ..plan.plan import FusionPlan, PlannedGroup
from ..transform.apply.region_module import group_modules
from .parts import Part, Parts
from .slow import SlowParts, slow_parts
from .wrong import Wrong

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 30  # of weights and inputs; more are not written to anybody's disk

SCRIPT = '''\
"""{title}

tvm_fusion {version}, TVM {tvm}: {why}
"""

import sys
from pathlib import Path

from tvm_fusion.bisect.reproducer import read, {again}

found = {again}(read(Path(__file__).parent, {target}, {policy}))
print(found)
sys.exit(found.is_bad)
'''


@dataclass(frozen=True)
class Case:
    """What a folder holds: a function with a plan, and inputs."""

    planned: Planned
    inputs: Sequence[Any]


@dataclass(frozen=True)
class Again:
    """What a reproducer found."""

    is_bad: bool
    text: str

    def __str__(self) -> str:
        return self.text


def wrong_case(parts: Parts, wrong: Wrong) -> Case:
    """The operators of a wrong kernel on what the model gives them, if it is wrong by itself, else
    the model.
    """
    whole = Case(parts.only(wrong.parts), wrong.inputs)
    (part, *others) = wrong.parts
    if others or not parts.is_one_kernel(part):
        return whole
    for group in part:
        try:
            alone, values = _alone(parts.planned, group)
            case = Case(alone, values(wrong.inputs))
            if not verified(case).passed:
                return case
        except (TvmFusionError, ValueError, KeyError) as error:
            logger.info("%s is not by itself in the reproducer: %s", group.ops, error)
    return whole


def slow_case(parts: Parts, part: Part) -> Case:
    """The operators of a slow kernel, if it is slow by itself, else the model with it."""
    whole = Case(parts.only([part], written=True), ())
    if not parts.is_one_kernel(part):
        return whole
    try:
        case = Case(_alone(parts.planned, part[0])[0], ())
        return case if slow_parts(Parts(case.planned)).found else whole
    except (TvmFusionError, ValueError, KeyError) as error:
        logger.info("the reproducer holds the whole model: %s", error)
        return whole


def _alone(
    planned: Planned, group: PlannedGroup
) -> tuple[Planned, Callable[[Sequence[Any]], list[Any]]]:
    """A group as a module of its own, and the values that the model gives it on some inputs."""
    case = group_modules(planned.low, planned.graph, planned.plan, group)
    params = case.unfused["main"].params

    def values(inputs: Sequence[Any]) -> list[Any]:
        value = captured_values(planned, [case], inputs)
        pairs = zip(case.inputs, params, strict=True)
        return [rounded_to(value(e), p.ty) for e, p in pairs]

    options = (planned.target, planned.hw, planned.policy)
    found = Planned.of(case.unfused, *options)
    names = tuple(op.name for op in found.graph.ops)
    plan = replace(
        found.plan, groups=(PlannedGroup(names, group.kernel_class),), refusals=(), evidence=None
    )
    return Planned.of(case.unfused, *options, plan), values


def verified(case: Case) -> Verification:
    """The verdict on a case by the check's own rule."""
    planned = case.planned
    reference = Reference(plainly_lowered(planned), case.inputs, planned.target)
    return judged(planned.build().built, [reference])[0]


def wrong_again(case: Case) -> Again:
    """Builds a case and holds it against float64."""
    found = verified(case)
    said = found.why or f"right: worst error {found.worst_error:.3g}"
    return Again(not found.passed, said)


def slow_again(case: Case) -> Again:
    """Times the kernels of a case beside what they stand for."""
    found = slow_parts(Parts(case.planned))
    return Again(bool(found.found), told_slow(Parts(case.planned), found))


def told_slow(parts: Parts, found: SlowParts) -> str:
    """What was timed, a line for each slow kernel."""
    lines = [
        f"{parts.label(s.part)}: {s.together.median_us:.3g} us ({s.together.low_us:.3g} - "
        f"{s.together.high_us:.3g}), what it stands for {s.apart.median_us:.3g} us "
        f"({s.apart.low_us:.3g} - {s.apart.high_us:.3g})"
        for s in found.found
    ]
    return "\n".join(lines) or f"none of {found.timed} kernels is slower than what it stands for"


def write(folder: Path, case: Case, why: str, slow: bool = False) -> Path:
    """Writes the folder; the path of its script.

    Raises
    ------
    InputError
        It cannot be written, or the model is too large.
    """
    planned = case.planned
    text = tvm.ir.save_json(with_values(planned.mod))
    arrays, kinds = _packed(case.inputs)
    size = len(text) + sum(array.nbytes for array in arrays.values())
    if size > MOST_BYTES:
        raise InputError(
            f"no reproducer in {folder}: the model has {size / 1e9:.1f} GB; take a smaller one"
        )
    script = SCRIPT.format(
        title="A slow kernel" if slow else "Wrong numbers",
        version=__version__,
        tvm=tvm.__version__,
        why=" ".join(why.replace("\\", "/").replace('"', "'").split()),
        again="slow_again" if slow else "wrong_again",
        target=_named(planned),
        policy=repr(asdict(planned.policy)),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "inputs.npz", **arrays)
    except OSError as error:
        raise InputError(
            f"cannot write the reproducer {folder}: {error.strerror}; name another --out"
        ) from error
    for name, content in (
        ("module.json", text),
        ("module.py", planned.mod.script(show_meta=False)),
        ("plan.json", planned.plan.to_json()),
        ("inputs.json", json.dumps(kinds)),
        ("reproduce.py", script),
    ):
        replace_file(folder / name, content + "\n")
    return folder / "reproduce.py"


def _named(planned: Planned) -> Any:
    """A GPU by its profile's name, where it has one: devices share architectures."""
    named = planned.hw.kind == "cuda" and planned.hw.name in (*profile_names(), *card_names())
    return repr(planned.hw.name) if named else json.loads(str(planned.target))


def read(folder: Path, target: Any, policy: Any) -> Case:
    """What `write` wrote, as a case; parameters as for `tvm_fusion.compile`."""
    mod = tvm.ir.load_json((folder / "module.json").read_text(encoding="utf-8"))
    tvm_target, hw = resolve_target(
        target if isinstance(target, str) else tvm.target.Target(target)
    )
    plan = FusionPlan.load(folder / "plan.json")
    planned = Planned.of(mod, tvm_target, hw, load_policy(policy), plan)
    kinds = json.loads((folder / "inputs.json").read_text(encoding="utf-8"))
    with np.load(folder / "inputs.npz") as arrays:
        return Case(replace(planned, fuses_beside=False), [_value(kind, arrays) for kind in kinds])


def _packed(inputs: Sequence[Any]) -> tuple[dict[str, np.ndarray], list[Any]]:
    """Arrays as bytes that NumPy can store, and what each input is: [name, dtype, shape], the
    numbers of a shape, or a list of inputs.
    """
    arrays: dict[str, np.ndarray] = {}

    def kind(value: Any) -> Any:
        if isinstance(value, list):
            return {"list": [kind(v) for v in value]}
        if isinstance(value, tuple | int):
            return {"plain": value}
        array = np.asarray(value)
        name = f"input_{len(arrays)}"
        arrays[name] = np.frombuffer(array.tobytes(), np.uint8)
        return {"array": name, "dtype": str(array.dtype), "shape": array.shape}

    return arrays, [kind(value) for value in inputs]


def _value(kind: dict[str, Any], arrays: Any) -> Any:
    if "list" in kind:
        return [_value(k, arrays) for k in kind["list"]]
    if "plain" in kind:
        plain = kind["plain"]
        return tuple(plain) if isinstance(plain, list) else plain
    flat = np.frombuffer(arrays[kind["array"]].tobytes(), numpy_dtype(kind["dtype"]))
    return flat.reshape(kind["shape"]).copy()
