"""Plans that were searched before, on disk: the same module, device and policy are planned once.

    <cache folder>/plans/<key>.json

The key holds all that decides a plan: the module with its constants, the target, the numbers of the
device and of its residual, the policy, this package (each of its files by size and time), TVM and
the compiler that probes. The names of operators, tensors and their wiring are compared when a plan
is read. Nothing is kept while a kernel class or a rewrite of the user's is registered: its code is
not in the key. `TVM_FUSION_PLAN_CACHE=0` searches each time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tvm

from .._version import __version__
from ..config import HardwareProfile, Policy, shipped_file
from ..config.digest import digest
from ..cost.learned.learned import residual_file
from ..errors import BuildError, InputError, PlanError
from ..host import interrupts
from ..host.atomic_files import replace_file
from ..host.cache_folder import cache_dir, make_folder
from ..ir.graph import FusionGraph
from ..ir.weights import content_hash
from ..kernels import registry
from ..kernels.registry import families
from ..plan.plan import FusionPlan
from ..runtime.build.cuda_compiler import find_compiler
from ..transform.rewrites import rewrites

# What plans and kernels depend on beside the model: a part of the key of all that is kept.


def all_ours(hw: HardwareProfile) -> bool:
    """Whether all kernel classes are this package's: the code of others is in no key."""
    own = "tvm_fusion."
    return all(type(k).__module__.startswith(own) for k in families(hw))


def is_kept(hw: HardwareProfile) -> bool:
    """Whether plans, and what is compiled of them, are kept on disk."""
    return is_wanted() and all_ours(hw) and rewrites.all_ours(hw)


def is_wanted() -> bool:
    """Whether the environment lets plans be kept on disk."""
    return os.environ.get(VARIABLE) != "0"


def surroundings(target: tvm.target.Target, hw: HardwareProfile, policy: Policy) -> list[Any]:
    """The versions, the package, the target, the numbers of the device and of its residual, the
    policy, the kernel classes and the compiler that probes, as plain values.
    """
    return [
        __version__,
        tvm.__version__,
        package_state(),
        str(target),
        hw.name,
        hw.fingerprint(),
        repr(policy),
        [k.name for k in families(hw)],
        _residual_state(hw),
        _compiler(policy),
    ]


@cache
def package_state() -> str:
    """Of each file of the package its size and time: a change makes all entries new."""
    return digest(sorted(_states(str(Path(__file__).parents[1]), "")))


def _states(folder: str, inner: str) -> Iterator[tuple[str, int, int]]:
    """Path, size and time of all source files, 600 of them: by `scandir`, in a third of the time
    that `Path.rglob` takes.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            path = f"{inner}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _states(entry.path, path)
            elif entry.name.endswith(".py"):
                found = entry.stat()
                yield path, found.st_size, found.st_mtime_ns


def _residual_state(hw: HardwareProfile) -> list[str]:
    files = (residual_file(hw), shipped_file(f"{hw.name}.residual.json"))
    return [hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.is_file()]


def _compiler(policy: Policy) -> list[str]:
    """What probes kernels while planning."""
    if policy.probe == "off":
        return []
    try:
        compiler = find_compiler()
    except BuildError:
        return []
    return [compiler.kind, compiler.path, compiler.version]


VARIABLE = "TVM_FUSION_PLAN_CACHE"
_FORMAT = 2
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kept:
    """Where the plan of a module lies, if it was planned before.

    Attributes
    ----------
    path : Path
    found : FusionPlan or None
        Not yet compared with a graph: see `fits`.
    names : list
        What the operators and tensors of its graph are called.
    """

    path: Path
    found: FusionPlan | None
    names: list[Any]

    @classmethod
    def of(
        cls, mod: tvm.IRModule, target: tvm.target.Target, hw: HardwareProfile, policy: Policy
    ) -> Kept | None:
        """The place for a module's plan and what lies there; None where plans are not kept."""
        if not is_kept(hw):
            return None
        path = cache_dir() / "plans" / f"{_key(mod, target, hw, policy)}.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, FusionPlan.from_dict(data["plan"], str(path)), data["names"])
        except FileNotFoundError:
            return cls(path, None, [])
        except (OSError, ValueError, KeyError, TypeError, PlanError) as error:
            logger.warning("the plan %s cannot be read and is made again: %s", path, error)
            return cls(path, None, [])

    def fits(self, graph: FusionGraph) -> bool:
        """Whether the plan that was found is one for this graph."""
        if self.found is None or self.names != _names(graph):
            return False
        try:
            self.found.check(graph, registry.names())
        except PlanError:
            return False
        return True

    def keep(self, graph: FusionGraph, plan: FusionPlan) -> None:
        """Write a plan, if it can be read back as it is; a folder that cannot be written is left
        alone.
        """
        interrupts.check()  # of what an interrupt left out nothing is kept
        text = json.dumps({"plan": plan.to_dict(), "names": _names(graph)})
        try:
            if FusionPlan.from_dict(json.loads(text)["plan"]) != plan:
                logger.info("the plan is not kept: it does not read back as it is")
                return
            make_folder(self.path.parent)
            replace_file(self.path, text)
        except (OSError, InputError, PlanError) as error:
            logger.warning("cannot keep the plan %s: %s", self.path, error)


def _names(graph: FusionGraph) -> list[Any]:
    ops = [[op.name, op.region] for op in graph.ops]
    return [graph.function, ops, [t.name for t in graph.tensors]]


def _key(mod: tvm.IRModule, target: tvm.target.Target, hw: HardwareProfile, policy: Policy) -> str:
    return digest([_FORMAT, content_hash(mod), *surroundings(target, hw, policy)])
