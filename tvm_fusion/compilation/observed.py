"""What can be seen of a compilation besides its report: files of each stage, and lines of the
loggers `tvm_fusion.plan`, `.cost` and `.kernels` (`host.logs`).

`TVM_FUSION_DUMP=FOLDER` writes of each function that is compiled or explained

    FOLDER/main_1f0c2a9be07d55c1/00_imported.py     the model as it was read
                                 01_decomposed.py   its composite operators opened
                                 02_lowered.py      primitive operators
                                 03_plan.json       what `--plan` takes
                                 04_fused.py        a PrimFunc for each group
                                 05_written.py      the kernels
                                 06_kernels.ll      LLVM IR of what runs on the host
                                 06_kernels/*.cu    CUDA of each kernel, and its machine code as
                                           *.sass   text where nvdisasm or cuobjdump is there
                                 07_report.txt, 07_report.json
                                 constants_*.json   weights, of which the scripts read theirs

The folder is called after the function and a hash of the model. The scripts are TVMScript that
runs: `python 05_written.py` defines the module, `python -m tvm_fusion compile 00_imported.py`
compiles it. TVM does not print the layouts of empty buffers: what is read of a script of CUDA
kernels may differ in these.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import tvm

from .._version import __version__
from ..config.digest import digest
from ..errors import BuildError, InputError, Unsupported
from ..flow.planned import BuiltPlan, Planned
from ..host.atomic_files import replace_file
from ..host.logs import DUMP, dump_folder, topic
from ..ir.weights import content_hash, with_values
from ..plan.plan import FREE, UNWRITTEN
from ..report.assemble import refusal_report
from ..report.screen import Report
from ..report.text import format_bytes, format_refusal, format_terms, format_time
from ..runtime.build.build import Built
from ..runtime.build.cubin_cache import compile_source
from ..runtime.build.cuda_compiler import cuda_arch, kernel_names
from ..transform.apply.materialize import materialize
from ..transform.pipeline import opened
from ..transform.rewrites.rewrites import known_rewrites
from ..tuning.session.lookup import configuration

LONGEST_NAME = 120
logger = logging.getLogger(__name__)
plan_log, cost_log, kernel_log = (topic(name) for name in ("plan", "cost", "kernels"))

HEADER = '''\
"""{title} (tvm_fusion {version}, TVM {tvm})"""

from pathlib import Path
from typing import TypeVar

import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T
from tvm.tirx.layout import Axis

'''
METADATA = re.compile(r'metadata = tvm\.ir\.load_json\(("""\{.*?\}""")\)\n', re.DOTALL)
READ = 'metadata = tvm.ir.load_json((Path(__file__).parent / "{name}").read_text())\n\n'


def observe_plan(planned: Planned) -> None:
    """A function has its plan: it is told, and dumped up to the kernels that are written."""
    _tell(planned)
    folder = _folder(planned)
    if folder is None:
        return
    _dump_plan(folder, planned)


def observe_built(made: BuiltPlan, report: Callable[[], Report]) -> None:
    """A function is built, and its report can be had; the plan may be another one than it was
    before.
    """
    folder = _folder(made.planned)
    if folder is None:
        return
    _dump_plan(folder, made.planned)
    _dump_kernels(folder, made.built)
    observe_report(made.planned, report())


def observe_report(planned: Planned, report: Report) -> None:
    """A function has its report."""
    folder = _folder(planned)
    if folder is not None:
        _write(folder / "07_report.txt", report.full() + "\n")
        _write(folder / "07_report.json", json.dumps(report.to_json(), allow_nan=False) + "\n")


def _dump_plan(folder: Path, planned: Planned) -> None:
    plan, mod, target = planned.plan, planned.mod, planned.target
    rewrites = known_rewrites(plan.rewrites, planned.policy) if plan.opened else ()
    hw = planned.hw if plan.opened else None
    stages: dict[str, Callable[[], tvm.IRModule]] = {
        "00_imported": lambda: mod,
        "01_decomposed": lambda: opened(mod, target, plan.opened, hw, rewrites),
        "02_lowered": lambda: planned.low,
        "04_fused": planned.fused_functions,
        "05_written": lambda: planned.write().mod,
    }
    for name, module in stages.items():
        dump_script(folder / f"{name}.py", module(), f"{planned.source.function}: {name[3:]}")
    _write(folder / "03_plan.json", json.dumps(plan.to_dict(), indent=1) + "\n")


def dump_script(path: Path, mod: tvm.IRModule, title: str) -> None:
    """Writes a module as a script that defines it, its constants in a file of their own."""
    text = with_values(mod).script(show_meta=True)
    header = HEADER.format(title=title, version=__version__, tvm=tvm.__version__)
    found = METADATA.match(text)
    if found is not None:
        constants = ast.literal_eval(found[1])
        name = f"constants_{hashlib.sha256(constants.encode()).hexdigest()[:12]}.json"
        _write(path.with_name(name), constants)
        header += READ.format(name=name)
        text = text[found.end() :]
    _write(path, f"{header}\n{text}\n")


def _dump_kernels(folder: Path, built: Built) -> None:
    """The code of what was built."""
    library = built.executable.mod
    code = [m.inspect_source("ll") for m in (library, *_imports(library)) if m.kind == "llvm"]
    _write(folder / "06_kernels.ll", "\n".join(code))
    if built.cuda_sources:
        arch = cuda_arch(built.target)
        for source in built.cuda_sources:
            path = folder / "06_kernels" / f"{kernel_names(source)[0][:LONGEST_NAME]}.cu"
            _write(path, source)
            text = _machine_code(source, arch)
            if text is not None:
                _write(path.with_suffix(".sass"), text)


def _imports(module: tvm.runtime.Module) -> list[tvm.runtime.Module]:
    return [m for one in module.imports for m in (one, *_imports(one))]


def _machine_code(source: str, arch: str) -> str | None:
    """The machine code of a CUDA source as text; None where nothing can show it."""
    for name, options in (("nvdisasm", ["-c"]), ("cuobjdump", ["-sass"])):
        path = shutil.which(name)
        if path is None:
            continue
        try:
            binary = compile_source(source, arch).binary
        except BuildError:
            return None
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            run = subprocess.run([path, *options, file.name], capture_output=True, text=True)
        if run.returncode == 0:
            return run.stdout
    return None


def _folder(planned: Planned) -> Path | None:
    """Where a function is dumped; None where nothing is."""
    root = dump_folder()
    if root is None:
        return None
    key = digest(
        [content_hash(planned.mod), str(planned.target), planned.hw.name, planned.policy.name]
    )[:16]
    return Path(root).expanduser() / f"{planned.source.function}_{key}"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except (OSError, InputError) as error:
        raise InputError(
            f"{DUMP}: {path} cannot be written: {error}; name a folder that can be"
        ) from error


# ---- Lines


def _tell(planned: Planned) -> None:
    plan, graph, where = planned.plan, planned.graph, planned.source.function
    launches = [g for g in plan.groups if g.kernel_class not in FREE]
    if plan_log.isEnabledFor(logging.INFO):
        rewritten = f", rewritten by {', '.join(plan.rewrites)}" if plan.rewrites else ""
        plan_log.info(
            "%s: %d operators, %d launches, predicted %s (one by one %s)%s",
            where,
            len(graph.ops),
            len(launches),
            format_time(plan.predicted_us),
            format_time(sum(g.unfused_us for g in launches)),
            rewritten,
        )
        for group in launches:
            plan_log.info("%s: %s: %s", where, group.kernel_class, ", ".join(group.ops))
        for refusal in plan.refusals:
            plan_log.info("%s: refused: %s", where, format_refusal(refusal_report(refusal)))
    if cost_log.isEnabledFor(logging.INFO):
        for group in launches:
            cost_log.info(
                "%s: %s: predicted %s, one by one %s; %s; %s",
                where,
                "+".join(group.ops),
                format_time(group.predicted_us),
                format_time(group.unfused_us),
                format_bytes(group.bytes),
                format_terms(group.terms),
            )
    if kernel_log.isEnabledFor(logging.INFO):
        _tell_kernels(planned)


def _tell_kernels(planned: Planned) -> None:
    found = materialize(planned.low, planned.graph, planned.plan)
    for name, group in found.groups.items():
        how = ""
        if group.kernel_class not in UNWRITTEN:
            try:
                how = configuration(found.mod[name], group.kernel_class, planned.hw, planned.policy)
            except Unsupported as why:
                how = f"cannot be written: {why}"
        kernel_log.info("%s: %s", name, ", ".join(filter(None, (group.kernel_class, how))))
