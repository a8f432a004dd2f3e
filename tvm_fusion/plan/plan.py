"""The fusion plan: plain data that says which operators run together, as which kernel, what that is
predicted to cost, and why not more.

A plan is made by `search`, or read from JSON, edited by hand and run again. It belongs to one
module (`fingerprint`) and one device.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Container
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tvm

from .._version import __version__
from ..errors import PlanError
from ..host.atomic_files import replace_file
from ..host.text_files import read_json, refuse_unwritable
from ..ir.graph import FusionGraph, OpKind
from .refusal import Refusal, RefusalCode

logger = logging.getLogger(__name__)

PLAN_VERSION = 2
READABLE_VERSIONS = (1, 2)  # version 1 had no evidence
JOIN = "join"  # a concatenation whose parts are written where they belong
NO_KERNEL = ("view", "opaque")  # nothing to write: no launch, or one that is not ours
FREE = (*NO_KERNEL, JOIN)  # no launch of ours
FALLBACK = "fallback"  # any one operator
STOCK = "stock"  # as LegalizeOps made it, where all else failed
UNWRITTEN = (*NO_KERNEL, STOCK)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a fusion is taken to be faster than its operators apart.

    Attributes
    ----------
    kind : str
        "model": the interval of the predicted ratio excludes a loss. "prediction": the policy takes
        the predicted ratio as it is. "measured": both were timed.
    verdict : str
        "sure", "undecided" or "losing".
    ratio, low, high : float
        Time together over time apart, and its interval (three standard errors if measured). What
        was measured was timed beside the same operators as they would run otherwise: one by one,
        or in the fusions that are sure without a measurement.
    together_us, apart_us, error_us : float or None
        Measured medians of both, and the standard error of their difference.
    samples : int or None
        Pairs of samples behind them.
    """

    kind: str
    verdict: str
    ratio: float
    low: float
    high: float
    together_us: float | None = None
    apart_us: float | None = None
    error_us: float | None = None
    samples: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """One launch.

    Attributes
    ----------
    ops : tuple of str
        Names of the bindings it computes, in order.
    recomputed : tuple of str
        Those of `ops` that are computed here although another group owns (and may store) them.
    kernel_class : str
        "view" for a reshape that costs nothing, "join" for a concatenation whose parts are written
        where they belong, "opaque" for a binding that is left as it is.
    predicted_us, unfused_us : float
        Model time of the group, and of its operators one by one.
    bytes, unfused_bytes : float
        Bytes read and written, together and one by one.
    terms : dict of str to float
        The model's terms in microseconds.
    analytic_us : float or None
        Time by the analytic model alone, where the device has a learned residual.
    low_us, high_us : float or None
        Interval of the predicted time, likewise.
    evidence : Evidence or None
        Why it is faster than its operators one by one; None for a single operator. Groups that
        recompute each other's operators are judged together and share it.
    assumed_l2 : dict of str to float
        Bytes, by tensor, that the model takes to lie in the L2 when the launch starts, since a
        launch before it has just written them.
    common_us : float
        On a CPU, what of the predicted time goes into the same instructions as one by one.
    """

    ops: tuple[str, ...]
    kernel_class: str
    recomputed: tuple[str, ...] = ()
    predicted_us: float = 0.0
    unfused_us: float = 0.0
    bytes: float = 0.0
    unfused_bytes: float = 0.0
    terms: dict[str, float] = field(default_factory=dict, hash=False)
    analytic_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    evidence: Evidence | None = None
    assumed_l2: dict[str, float] = field(default_factory=dict, hash=False)
    common_us: float = 0.0


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """All groups of one function in topological order, and the refused neighbours.

    `rewrites` are those applied to the graph before it was planned (`transform.rewrites.rewrites`).
    `opened` says whether composite operators (softmax, norms ...) were opened up before. `evidence`
    is that of all groups together against their operators apart; after `compile --measure`, of the
    whole module against the unfused one. `measured` names the CPU whose own rates it was made with,
    and these, or what the profile of a GPU that nobody measured is derived from; it is empty where
    a profile's were used. `versions` are those of this package and
    of TVM that it was made by; empty in plans before these were kept.
    """

    function: str
    fingerprint: str
    device: str
    policy: str
    groups: tuple[PlannedGroup, ...]
    refusals: tuple[Refusal, ...] = ()
    rewrites: tuple[str, ...] = ()
    opened: bool = True
    evidence: Evidence | None = None
    measured: dict[str, Any] = field(default_factory=dict, hash=False)
    version: int = PLAN_VERSION
    versions: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def predicted_us(self) -> float:
        return sum(g.predicted_us for g in self.groups)

    @property
    def unfused_us(self) -> float:
        return sum(g.unfused_us for g in self.groups)

    def group_of(self, op: str) -> PlannedGroup | None:
        """The group that owns a binding."""
        owners = [g for g in self.groups if op in g.ops and op not in g.recomputed]
        return owners[0] if owners else None

    def with_class(self, op: str, kernel_class: str) -> FusionPlan:
        """The same plan with another kernel class for the group that is this one operator."""
        groups = tuple(
            replace(g, kernel_class=kernel_class) if g.ops == (op,) else g for g in self.groups
        )
        return replace(self, groups=groups)

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["refusals"] = [
            {
                "code": r.code.value,
                "where": list(r.where),
                "why": r.why,
                "numbers": dict(r.numbers),
            }
            for r in self.refusals
        ]
        for group in data["groups"]:
            group["ops"], group["recomputed"] = list(group["ops"]), list(group["recomputed"])
        data["groups"] = list(data["groups"])
        data["rewrites"] = list(data["rewrites"])
        if not self.versions:
            del data["versions"]
        return data

    def to_json(self) -> str:
        """The plan as text: equal plans give equal bytes."""
        return json.dumps(self.to_dict(), indent=1, sort_keys=True)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON; raises InputError where the file cannot be written."""
        refuse_unwritable(path, "plan")
        replace_file(Path(path), self.to_json() + "\n")

    @staticmethod
    def from_dict(data: dict[str, Any], source: str = "plan") -> FusionPlan:
        """Reads a plan back.

        Raises
        ------
        PlanError
            The data is no plan of a version that is known.
        """
        if not isinstance(data, dict) or data.get("version") not in READABLE_VERSIONS:
            found = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise PlanError(
                f"{source}: not a plan of version {PLAN_VERSION} (found {found!r}); "
                "make it again with `explain --json`"
            )
        try:
            groups = tuple(_group_from(g) for g in data["groups"])
            refusals = tuple(
                Refusal(
                    RefusalCode(r["code"]),
                    tuple(r["where"]),
                    r["why"],
                    tuple(sorted(r["numbers"].items())),
                )
                for r in data.get("refusals", ())
            )
            keys = ("function", "fingerprint", "device", "policy")
            rewrites = tuple(data.get("rewrites", ()))
            return FusionPlan(
                **{k: data[k] for k in keys},
                groups=groups,
                refusals=refusals,
                rewrites=rewrites,
                opened=bool(data.get("opened", True)),
                evidence=_evidence_from(data.get("evidence")),
                measured=dict(data.get("measured", {})),
                versions={k: str(v) for k, v in data.get("versions", {}).items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"{source}: broken plan: {error}; make it again with `explain --json`"
            ) from error

    @staticmethod
    def load(path: str | Path) -> FusionPlan:
        """Reads a plan from a JSON file, or the plan of a report.

        Raises
        ------
        PlanError
            The file cannot be read, or holds none, or those of several functions.
        """
        found = load_plans(path)
        if isinstance(found, dict):
            names = ", ".join(found)
            raise PlanError(
                f"{path}: the plans of several functions ({names}), not one plan"
                "; give each function its own"
            )
        return found

    def check_made_for(self, device: str, policy: str, host: str = "") -> None:
        """Raises PlanError where the plan was made for another device or by other versions, naming
        both; another policy, or another CPU's rates than those of `host`, is a warning.
        """
        if self.device != device:
            raise PlanError(
                f"the plan was made for {self.device}, this is {device}: compile for {self.device} "
                f"(`--target {self.device}`), or plan again (`explain --target {device} --json`)"
            )
        others = {k: v for k, v in versions().items() if self.versions.get(k, v) != v}
        if others:
            made = " and ".join(f"{name} {self.versions[name]}" for name in others)
            here = " and ".join(f"{name} {version}" for name, version in others.items())
            raise PlanError(
                f"the plan was made by {made}, this is {here}: plan again with `explain --json`"
            )
        if self.policy != policy:
            logger.warning(
                "the plan was made with the policy %s, not %s: its groups stay as they are",
                self.policy,
                policy,
            )
        made_on = str(self.measured.get("host", ""))
        if made_on and host and made_on != host:
            logger.warning(
                "the plan was made with the rates of %s, this is %s: its groups stay as they are, "
                "its times are made again",
                made_on,
                host,
            )

    def _other_module(self, graph: FusionGraph) -> str:
        """What tells the module of the plan from a graph."""
        if self.function != graph.function:
            return f"its function is {self.function}, this one {graph.function}"
        own, others = {op for g in self.groups for op in g.ops}, {op.name for op in graph.ops}
        said = [
            f"{what} {_some(sorted(names))}"
            for what, names in (("it has", own - others), ("this one has", others - own))
            if names
        ]
        of_same = "operators of the same names, with other shapes, dtypes or wiring"
        print_of = f"fingerprint {self.fingerprint}, here {graph.fingerprint()}"
        return f"{', '.join(said) or of_same} ({print_of})"

    def check(self, graph: FusionGraph, kernel_classes: Container[str] | None = None) -> None:
        """Raises PlanError unless the plan was made for this graph, each of its operators is owned
        by one group, and the groups are of `kernel_classes`, where these are given.
        """
        if self.fingerprint != graph.fingerprint() or self.function != graph.function:
            raise PlanError(
                f"the plan was made for another module: {self._other_module(graph)}; plan again "
                "with `explain --json`"
            )
        if any(not g.ops for g in self.groups):
            raise PlanError("a group of the plan has no operators; take it out")
        owned = Counter(op for g in self.groups for op in g.ops if op not in g.recomputed)
        names = {op.name for op in graph.ops}
        unknown = sorted({op for g in self.groups for op in g.ops} - names)
        if unknown:
            raise PlanError(
                f"the plan names operators the module does not have: {', '.join(unknown[:5])}"
                "; make it again with `explain --json`"
            )
        classes = {g.kernel_class for g in self.groups} - set(UNWRITTEN)
        known = classes if kernel_classes is None else kernel_classes
        strange = sorted(str(name) for name in classes if name not in known)
        if strange:
            raise PlanError(
                f"no kernel class is called {', '.join(strange[:5])}"
                "; register it, or make the plan again with `explain --json`"
            )
        twice = sorted(op for op, owners in owned.items() if owners > 1)
        if twice:
            raise PlanError(
                f"operators owned by several groups of the plan: {', '.join(twice[:5])}"
                "; leave each in one of `ops`, and name it in `recomputed` of the others"
            )
        needed = {op.name for op in graph.ops if op.kind is not OpKind.VIEW}
        missing = sorted(needed - set(owned))
        if missing:
            raise PlanError(
                f"operators in no group of the plan: {', '.join(missing[:5])}; put each into one"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def load_plans(path: str | Path) -> FusionPlan | dict[str, FusionPlan]:
    """Reads a plan from a JSON file, the plan of a report (`explain --json`), or those of a report
    of several functions by their names; raises PlanError.
    """
    data = read_json(path, "plan", PlanError)
    functions = data.get("functions") if isinstance(data, dict) else None
    if isinstance(functions, dict):
        named = {name: _plan_of(one) for name, one in functions.items()}
        return {name: FusionPlan.from_dict(d, f"{path}: {name}") for name, d in named.items()}
    return FusionPlan.from_dict(_plan_of(data), str(path))


def _plan_of(data: Any) -> Any:
    """The plan of a report, or what is none."""
    is_report = isinstance(data, dict) and isinstance(data.get("plan"), dict)
    return data["plan"] if is_report else data


def versions() -> dict[str, str]:
    """The versions that plans are made by."""
    return {"tvm_fusion": __version__, "tvm": tvm.__version__}


def _group_from(data: dict[str, Any]) -> PlannedGroup:
    names = {k: tuple(data.get(k, ())) for k in ("ops", "recomputed")}
    group = PlannedGroup(**{**data, **names, "evidence": _evidence_from(data.get("evidence"))})
    if not all(isinstance(name, str) for name in (*group.ops, *group.recomputed)):
        raise TypeError(f"operators are given by their names, not as {list(group.ops)}")
    times = (group.predicted_us, group.unfused_us, group.bytes, group.unfused_bytes)
    times += (group.common_us,)
    for number in (*times, *group.terms.values(), *group.assumed_l2.values()):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"{number!r} is no number, in the group of {', '.join(group.ops)}")
    return group


def _evidence_from(data: dict[str, Any] | None) -> Evidence | None:
    return None if data is None else Evidence(**data)
