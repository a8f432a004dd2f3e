"""Modules that were compiled before, on disk: a second process plans, builds and checks nothing.

    <cache folder>/modules/<key>/module.so      kernels and the code that calls them, no weights
                                 facts.pickle   the plan, the report, how weights are computed
                                 written.json   the module that was built, its weights parameters

The key holds all that decides what is compiled (`plan_cache.surroundings`, what was asked for, the
passes that are switched off, what the environment says of kernels), and the model without the
numbers of its weights: these are computed anew from the model's own. Nothing is kept of models of
several functions, with a plan or a database that a caller gives, with times, for a device that is
not here, with checks of indices, or while a kernel class or rewrite of a user's is registered; nor
where plans are not kept (`TVM_FUSION_PLAN_CACHE=0`). The `MOST_MODULES` used last stay.

A module is written on a thread of its own while the caller goes on with it; the process does not
end, and does not fork, before that is done.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import tvm

from ..check.index_checks import wanted
from ..config.digest import digest
from ..errors import BuildError, InputError
from ..flow.functions import ReadModel
from ..flow.plan_cache import is_kept, surroundings
from ..flow.planned import Planned
from ..host.atomic_files import replace_bytes, replace_file
from ..host.cache_folder import by_use, cache_dir, make_folder, mark_used
from ..host.logs import dump_folder
from ..ir import convention
from ..ir.weights import (
    Weight,
    as_parameters,
    content_hash,
    restored,
    weights_of,
    with_parameters_bound,
)
from ..kernels.gpu.ahead import asked
from ..report.screen import Report
from ..runtime.build.build import Built, build_functions
from ..runtime.build.cuda_compiler import flags_of_environment
from ..runtime.build.weight_values import WeightValues
from ..runtime.calls.compiled_module import CompiledModule
from ..runtime.calls.sidecar import library_of
from ..runtime.calls.signature import load_library
from ..transform.layouts.memory_formats import MemoryFormats
from .one_function import Wishes

logger = logging.getLogger(__name__)

MOST_MODULES = 256
NEW = "new_"
LEAST_S = 0.3  # what takes less is compiled again: writing it takes 0.1 s
_FORMAT = 3
_LIBRARY, _FACTS, _WRITTEN = "module.so", "facts.pickle", "written.json"
_writing: dict[Path, threading.Thread] = {}


@dataclass(frozen=True)
class Kept:
    """The place of a model that is compiled as it is wished for.

    Attributes
    ----------
    folder : Path
    model : ReadModel
    wishes : Wishes
    """

    folder: Path
    model: ReadModel
    wishes: Wishes

    @classmethod
    def of(cls, model: ReadModel, wishes: Wishes) -> Kept | None:
        """The place of a model; None where nothing of it is kept."""
        given = model.tuned is not None or any(p is not None for p in model.plans.values())
        if given or wishes.timed or list(model.mods) != ["main"] or wishes.verify == "report":
            return None
        here = tvm.runtime.device_from_target(model.target).exist
        if not (here and is_kept(model.hw)) or dump_folder() is not None or wanted():
            return None
        return cls(cache_dir() / "modules" / _key(model, wishes), model, wishes)

    def found(self) -> CompiledModule | None:
        """What was compiled before; None where nothing was, or it cannot be read."""
        writing = _writing.get(self.folder)
        if writing is not None:
            writing.join()
        if not (self.folder / _FACTS).is_file():
            return None
        try:
            compiled = self._read()
            mark_used(self.folder)
        except Exception as error:  # damaged, or of weights that the plan does not fit
            logger.warning("the module in %s is made again: %s", self.folder, error)
            shutil.rmtree(self.folder, ignore_errors=True)
            return None
        return compiled

    def _read(self) -> CompiledModule:
        facts = pickle.loads((self.folder / _FACTS).read_bytes())
        mod, seen = convention.taken_from(self.model.mods["main"])
        target = self.model.target
        weights = restored(facts["origins"], weights_of(mod))
        own = {name: tuple(weights[n] for n in each) for name, each in facts["weights"].items()}
        values = WeightValues(own, target, build_functions)
        values.begin()
        behind = [weights[name] for name in facts["written"]]
        written = partial(_with_constants, self.folder / _WRITTEN, behind)
        library = load_library(self.folder / _LIBRARY)
        built = Built(library, target, **facts["built"], weights=values, written=written)
        compiled = CompiledModule.of(built, facts["plan"])
        compiled.launches, compiled.uncapturable = facts["launches"], facts["uncapturable"]
        values.settle()
        compiled.cuda_graph = self.wishes.cuda_graph
        compiled.verification, compiled.told = facts["verification"], facts["told"]
        compiled.report = self._report
        formats = MemoryFormats.of_module(mod)
        compiled.signature = compiled.signature.in_formats(formats)
        compiled.follow(seen)
        return compiled

    def _report(self, compiled: CompiledModule) -> Report:
        """The report, of the model planned as it was."""
        model, plan = self.model, compiled.plan
        mod, to = model.mods["main"], (model.target, model.hw, model.policy)
        planned = Planned.of(mod, *to, plan, function="main")
        planned = replace(planned, plan=plan, given=False, cuts=compiled.told.cuts)
        made = planned.write().built(compiled.built)
        return compiled.told.report(made, compiled.verification, compiled.launches)

    def keep(self, compiled: CompiledModule) -> None:
        """Write what was compiled and has run, behind the caller's back; what cannot be written is
        left, and logged.
        """
        try:
            write = self._writer(compiled)
        except BuildError as error:
            logger.info("the module is not kept: %s", error)
            return
        thread = threading.Thread(target=self._keep, args=(write,), name="tvm_fusion keeps")
        _writing[self.folder] = thread
        try:
            thread.start()
        except RuntimeError:  # the process ends
            del _writing[self.folder]
            self._keep(write)

    def _keep(self, write: Callable[[Path], None]) -> None:
        ours = self.folder.parent
        try:
            make_folder(ours)
            with tempfile.TemporaryDirectory(dir=ours, prefix=NEW) as new:
                write(Path(new))
                shutil.rmtree(self.folder, ignore_errors=True)
                Path(new).rename(self.folder)
                Path(new).mkdir()  # for what takes the temporary folder away
            _forget_old(ours)
        except (OSError, BuildError, InputError, pickle.PicklingError) as error:
            logger.info("the module is not kept: %s", error)
        finally:
            if _writing.get(self.folder) is threading.current_thread():
                del _writing[self.folder]

    def _writer(self, compiled: CompiledModule) -> Callable[[Path], None]:
        """What writes the files of a module into a folder, on any thread."""
        built = compiled.built
        left = ("executable", "target", "weights", "written", "device")
        plain = {f.name: getattr(built, f.name) for f in fields(Built) if f.name not in left}
        facts = {
            "built": plain | {"kernels": dict(built.kernels), "resources": dict(built.resources)},
            "plan": compiled.plan,
            "verification": compiled.verification,
            "told": compiled.told,
            "launches": compiled.launches,
            "uncapturable": compiled.uncapturable,
            "weights": built.weights.names(),
            "origins": built.weights.origins,
        }
        compiled.settle_machine()
        library = library_of(built.executable, self.folder / _LIBRARY)

        def write(folder: Path) -> None:
            hollow, found = as_parameters(built.written(), ["main"])
            facts["written"] = [weight.name for weight in found["main"]]
            replace_bytes(folder / _FACTS, pickle.dumps(facts))
            replace_file(folder / _WRITTEN, tvm.ir.save_json(hollow))
            library(folder / _LIBRARY)

        return write


def settle() -> None:
    """Waits for what is being written."""
    for thread in tuple(_writing.values()):
        if thread is not threading.current_thread():
            thread.join()


if hasattr(os, "register_at_fork"):  # nothing forks on Windows
    os.register_at_fork(before=settle)


def _with_constants(path: Path, weights: Sequence[Weight]) -> tvm.IRModule:
    """A module that was written, with the numbers of the weights that it takes."""
    mod = tvm.ir.load_json(path.read_text(encoding="utf-8"))
    return with_parameters_bound(mod, [weight.tensor() for weight in weights])


def _key(model: ReadModel, wishes: Wishes) -> str:
    context = tvm.transform.PassContext.current()
    passes = sorted(map(str, context.disabled_pass)), str(dict(context.config))
    content = content_hash(model.mods["main"])
    around = surroundings(model.target, model.hw, model.policy)
    kernels = asked(), flags_of_environment()
    about = [repr(wishes), *passes, sys.version_info[:2], *kernels]
    return digest([_FORMAT, content, *about, *around])


def _forget_old(folder: Path) -> None:
    """Only the modules that were used last stay."""
    kept = [found for found in folder.iterdir() if not found.name.startswith(NEW)]
    for found in by_use(kept)[MOST_MODULES:]:
        shutil.rmtree(found, ignore_errors=True)
