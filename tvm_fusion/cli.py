"""Command line: ``python -m tvm_fusion {compile,explain,verify,bench,report,...}``.

Exit status: 0, or 1 if a check failed, or 2 for bad input, or 130 if interrupted. The report goes
to standard output, and with ``--json`` nothing but one JSON object does.
"""

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import _start
from ._arguments import (
    bisect_arguments,
    calibrate_arguments,
    diff_arguments,
    fuzz_arguments,
    model_arguments,
    model_of,
    operators_arguments,
    pair_of,
    policy_of,
    profile_arguments,
    quiet_argument,
    report_arguments,
    tune_arguments,
)
from ._version import __version__
from .bench import SUITES_ELSEWHERE
from .config import load_policy, resolve_target
from .errors import (
    BAD_INPUT,
    CHECK_FAILED,
    ConfigError,
    InputError,
    PlanError,
    TvmFusionError,
    VerificationError,
)
from .host import interrupts
from .host.logs import TOPICS
from .host.progress import shown
from .host.text_files import read_json, refuse_unwritable

if TYPE_CHECKING:
    from .config import Policy
    from .report.screen import FunctionReports, Report

    Reported = Report | FunctionReports


ENVIRONMENT = f"""environment:
  TVM_FUSION_DUMP=FOLDER     write each stage of a compilation: scripts that run, plan, kernels
  TVM_FUSION_LOG=TOPIC,...   log topics to standard error: {", ".join(TOPICS)}
  TVM_FUSION_CACHE=FOLDER    keep plans, kernels and measurements there
  TVM_FUSION_DEBUG=1         show tracebacks
  NO_COLOR=1                 write neither colours nor moving bars
"""

_COMMANDS = {
    "compile": "plan, fuse, build, verify and time a model",
    "explain": "show the plan and the reasons without building anything",
    "verify": "check the fused model against float64, output by output and group by group",
    "bench": "time a model beside other compilers",
}

# Commands with a room of their own: their `main`, their arguments, and what they do.
_ELSEWHERE = {
    "report": (
        "report.command",
        report_arguments,
        "show what --json printed again, or write it as a page for a browser",
    ),
    "bisect": (
        "bisect.command",
        bisect_arguments,
        "find the kernel that gives wrong numbers or is slow, and write a program that shows it",
    ),
    "diff": (
        "report.diff.command",
        diff_arguments,
        "show what differs between two plans or reports: kernels, bytes, times, refusals",
    ),
    "profile": (
        "profile.command",
        profile_arguments,
        "record calls before and after fusion: time, bytes, bandwidth, gaps, memory, by kernel",
    ),
    "calibrate": (
        "calibrate.command",
        calibrate_arguments,
        "measure the device, and write its profile",
    ),
    "tune": (
        "tuning.command",
        tune_arguments,
        "measure choices for the kernels of a model, and keep them in a database",
    ),
    "fuzz": (
        "fuzz.command",
        fuzz_arguments,
        "run random torch programs unchecked, and compare them with torch in float64",
    ),
    "operators": (
        "report.operators",
        operators_arguments,
        "show which operators of PyTorch or ONNX are converted, and by whom",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return exit_status(lambda: _main(argv))


def exit_status(command: Callable[[], int]) -> int:
    """Run a command and return its exit status; what it raises is a line on standard error."""
    try:
        status = command()
        if status != interrupts.INTERRUPTED:
            interrupts.check()
        return status
    except SystemExit as stop:
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        return _interrupted() if interrupts.received() else _failed(error)


def _failed(error: Exception) -> int:
    """The line and the exit status of an error."""
    if isinstance(error, BrokenPipeError):
        # The reader of the output left; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, TvmFusionError):
        return _fail(str(error), BAD_INPUT if isinstance(error, InputError) else CHECK_FAILED)
    if isinstance(error, MemoryError):
        why = "memory ran out: end other programs, or take a smaller model or a larger machine"
        return _fail(why, CHECK_FAILED)
    hint = "set TVM_FUSION_DEBUG=1 for the traceback"
    return _fail(f"{type(error).__name__}: {error} ({hint})", CHECK_FAILED)


def _interrupted() -> int:
    """Says what is kept, and how to go on; the exit status."""
    from .host.cache_folder import cache_dir

    command = shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]])
    kept = f"plans and kernels that were ready are kept in {cache_dir()}"
    print(f"tvm_fusion: interrupted; {kept}, and this goes on: {command}", file=sys.stderr)
    return interrupts.INTERRUPTED


def _main(argv: Sequence[str] | None) -> int:
    args = _parser().parse_args(argv)
    _begin()
    if args.command in _ELSEWHERE:
        return import_module(f".{_ELSEWHERE[args.command][0]}", __package__).main(args)
    with only_results_on_stdout(), shown(quiet=args.quiet):
        report = _run(args)
        if args.html is not None:
            report.write_html(args.html)
    _print(report, args)
    return _status(report)


def _begin() -> None:
    """Imports TVM; raises InputError where it is not installed, or of another version."""
    try:
        _start.begin()
    except ImportError as error:
        raise InputError(str(error)) from error
    if _start.COMMAND:
        interrupts.note()


class Parser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Elsewhere(argparse.Action):
    """An option that the command had while it ran the suites, too."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(SUITES_ELSEWHERE)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tvm_fusion",
        description="Fuse the operators of a model.",
        epilog=ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in _COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        _add_common_arguments(command)
    output = commands.choices["compile"]
    output.add_argument("-o", "--output", metavar="FILE", help="save the compiled module (.so)")
    for option, count in (("--suite", "?"), ("--list", 0), ("--merge", "*")):
        commands.choices["bench"].add_argument(
            option, nargs=count, action=_Elsewhere, help=argparse.SUPPRESS
        )
    for command in (output, commands.choices["bench"]):
        command.add_argument(
            "--peers",
            metavar="PEER,...",
            default=None,
            help="compilers to time beside it: tvm, torch.eager, torch.compile, jax, onnxruntime, "
            "openvino, or none; default: tvm,torch.eager,torch.compile",
        )
        help_text = "capture whole calls into CUDA graphs"
        command.add_argument("--cuda-graph", action="store_true", default=None, help=help_text)
    for name in ("compile", "explain", "bench"):
        help_text = "write the report as one page for a browser, too"
        commands.choices[name].add_argument("--html", metavar="FILE", help=help_text)
    for name, (_, add_arguments, what) in _ELSEWHERE.items():
        add_arguments(commands.add_parser(name, help=what, description=what))
    explain = commands.choices["explain"]
    explain.add_argument(
        "--why",
        metavar="A,B",
        help="why are these two (operators, groups, composites, modules) not one kernel, and what "
        "would that save?",
    )
    explain.add_argument(
        "--probe",
        action="store_true",
        help="compile the kernels (nvcc, no GPU) and show their registers, spills and code",
    )
    explain.add_argument(
        "--bound",
        action="store_true",
        help="say how far the plan can be from the cheapest one (small graphs)",
    )
    for command in (output, explain):
        help_text = "use the kernels that `tune` kept here"
        command.add_argument("--database", metavar="DIR", help=help_text)
        command.add_argument(
            "--measure",
            action="store_true",
            help="time the fusions in doubt, and keep those that are faster",
        )
        command.add_argument(
            "--budget", metavar="S", type=float, help="seconds that --measure may take"
        )
    return parser


def _add_common_arguments(command: argparse.ArgumentParser) -> None:
    model_arguments(command)
    quiet_argument(command)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument(
        "--full", action="store_true", default=None, help="print everything, not one screen of it"
    )
    command.set_defaults(output=None, html=None, why=None, peers="none")


def _run(args: argparse.Namespace) -> "Reported":
    """Do what the command says and return its report."""
    from .bench.peers import peers_of
    from .compilation import compiler

    # Everything a user may have mistyped is checked before the model is read. The target is passed
    # on as it was given: a profile of the user's own is not the one that its Target would select.
    target, _ = resolve_target(args.target)
    options = {
        "target": args.target,
        "policy": _with_budget(load_policy(policy_of(args.policy)), args),
        "plan": _plan_file(args.plan),
    }
    peers = peers_of(args.peers)
    if args.why is not None:
        pair_of(args.why)
    for path in (args.output, args.html):
        if path is not None:
            refuse_unwritable(path, "file")
    model = model_of(args, target)
    if args.command == "explain":
        names = ("probe", "measure", "bound", "database", "why")
        asked = {name: getattr(args, name) for name in names}
        return compiler.explain(model, **options, **asked)
    if args.command == "bench":
        from .bench.compare import bench

        return bench(model, **options, cuda_graph=args.cuda_graph, peers=peers)
    if args.command == "verify":
        return _verified(compiler.compile(model, **options, verify="report").report)
    how = {"measure": args.measure, "cuda_graph": args.cuda_graph, "database": args.database}
    if peers:
        from .bench.compare import compile_beside

        compiled = compile_beside(model, peers, **options, **how)
    else:
        compiled = compiler.compile(model, **options, **how, time=True)
    if args.output is not None:
        compiled.save(args.output)
    return compiled.report


def _verified(report: "Reported") -> "Reported":
    reports = [one for _, one in _each(report)]
    if all(one.verify is None for one in reports):
        target = reports[0].target
        raise VerificationError(
            f"nothing was verified: this machine cannot run {target}"
            "; run it where there is one, or with --target llvm"
        )
    return report


def _each(report: "Reported") -> list[tuple[str, "Report"]]:
    """The reports of a model's functions; one without a name for a model of one."""
    from .report.screen import FunctionReports

    return report.items() if isinstance(report, FunctionReports) else [("", report)]


def _with_budget(policy: "Policy", args: argparse.Namespace) -> "Policy":
    """The policy, with the budget of the command line where it names one."""
    budget = getattr(args, "budget", None)
    if budget is None:
        return policy
    if not args.measure:
        raise ConfigError(
            "--budget: the seconds of --measure, which is not asked for"
            "; add --measure, or leave --budget out"
        )
    return replace(policy, measure_budget_s=budget)


def _plan_file(path: str | None) -> Path | None:
    if path is None:
        return None
    read_json(path, "plan", PlanError)
    return Path(path)


def _print(report: "Reported", args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(report.to_json(), allow_nan=False))
    else:
        for name, one in _each(report):
            if name:
                print(f"function {name}")
            _print_one(one, args)
    sys.stdout.flush()


def _print_one(report: "Report", args: argparse.Namespace) -> None:
    from .report.screen import screen
    from .report.text import show
    from .report.why import why

    if args.why:
        print(why(report))
    elif args.full or args.command in ("explain", "verify"):
        show(report, sys.stdout)
    else:
        print(screen(report, "--demo" if args.demo else args.model))


def _status(report: "Reported") -> int:
    checks = [one.verify for _, one in _each(report) if one.verify is not None]
    return 0 if all(check.passed for check in checks) else CHECK_FAILED


def _fail(message: str, status: int) -> int:
    """Print one line, or raise the exception in flight if TVM_FUSION_DEBUG asks for it."""
    if os.environ.get("TVM_FUSION_DEBUG", "0") not in ("", "0"):
        raise
    print(f"tvm_fusion: error: {' '.join(message.split())}", file=sys.stderr)
    return status


@contextlib.contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """Send to standard error what libraries and compilers print to standard output."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
