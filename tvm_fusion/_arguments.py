"""The arguments of commands that have rooms of their own, and what all commands have in common.

Nothing here imports TVM: `--help` is answered at once.
"""

import argparse
import tomllib
from pathlib import Path
from typing import Any

from .errors import ConfigError, InputError

CALIBRATION_S = 160.0  # all families of benchmarks fit into it on 16 cores
TARGET_HELP = "llvm, cuda, a device like nvidia_h200, or a profile"
POLICY_HELP = "default, conservative, aggressive, a .toml file, or KEY=VALUE[,KEY=VALUE]"


_SIZES = "sizes."


def policy_of(text: str | None) -> Any:
    """A policy's name or path, or the mapping that KEY=VALUE,... spells; sizes.NAME=1:16:512 is a
    list.
    """
    if text is None or "=" not in text:
        return text
    policy: dict[str, Any] = {}
    for item in text.split(","):
        key, separator, value = (part.strip() for part in item.partition("="))
        if not separator:
            raise ConfigError(f"--policy: expected KEY=VALUE, got {item!r}")
        if key.startswith(_SIZES):
            sizes = policy.setdefault("sizes", {})
            sizes[key.removeprefix(_SIZES)] = [_literal(size) for size in value.split(":")]
            continue
        policy[key] = _literal(value)
    return policy


def _literal(text: str) -> Any:
    """A TOML value; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def pair_of(text: str) -> tuple[str, str]:
    """The two names that `--why` asks about."""
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or not all(names):
        raise InputError(f"--why takes two names with a comma between them, got {text!r}")
    return names[0], names[1]


def model_of(args: argparse.Namespace, target: Any) -> Any:
    """The model file's path, or the module of the demo for a resolved target."""
    if args.demo:
        from .demo import demo_module

        return demo_module(target.kind.name)
    if not Path(args.model).is_file():
        raise InputError(f"no such model file: {args.model}; check the path")
    return args.model


def model_arguments(
    command: argparse.ArgumentParser, plan_help: str = "run this plan instead of searching one"
) -> None:
    """Declares the model, and what it is compiled for and by."""
    model = command.add_mutually_exclusive_group(required=True)
    model.add_argument("model", nargs="?", help="a .pt2, .onnx, Relax .py or Relax .json file")
    model.add_argument("--demo", action="store_true", help="a pre-norm transformer block")
    command.add_argument("--target", help=TARGET_HELP)
    command.add_argument("--policy", help=POLICY_HELP)
    command.add_argument("--plan", metavar="FILE", help=plan_help)


def bisect_arguments(command: argparse.ArgumentParser) -> None:
    """Declares the options of `bisect`."""
    quiet_argument(command)
    model_arguments(command, "look at this plan, not a searched one")
    command.add_argument("--database", metavar="DIR", help="use the kernels that `tune` kept here")
    command.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        help="take errors up to this share of an output's largest number as right",
    )
    command.add_argument(
        "--slower", action="store_true", help="look for slow kernels instead of wrong numbers"
    )
    command.add_argument(
        "--out",
        metavar="FOLDER",
        default="bisected",
        help="where the program that shows it again is written (default: %(default)s)",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")


def diff_arguments(command: argparse.ArgumentParser) -> None:
    """Declares the options of `diff`."""
    quiet_argument(command)
    what = "a plan or report: what `--json` printed, or `plan.save` wrote"
    command.add_argument("before", metavar="A", help=what)
    command.add_argument("after", metavar="B", help="what it is compared with")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument("--full", action="store_true", help="print all, and whole lines")


def report_arguments(command: argparse.ArgumentParser) -> None:
    """Declares the options of `report`."""
    quiet_argument(command)
    command.add_argument("report", metavar="REPORT.json", help="what --json printed")
    command.add_argument("--html", metavar="FILE", help="write it as one page for a browser")
    command.add_argument("--full", action="store_true", help="print everything, not one screen")


def quiet_argument(command: argparse.ArgumentParser) -> None:
    """Declares `--quiet`."""
    command.add_argument("--quiet", action="store_true", help="show no progress")


def profile_arguments(command: argparse.ArgumentParser) -> None:
    """Declares the options of `profile`."""
    quiet_argument(command)
    model_arguments(command)
    command.add_argument("--database", metavar="DIR", help="use the kernels that `tune` kept here")
    command.add_argument(
        "--calls", type=int, default=20, metavar="N", help="calls to record (default: %(default)s)"
    )
    command.add_argument(
        "--trace", metavar="FILE", type=Path, help="write the calls for Perfetto (ui.perfetto.dev)"
    )
    command.add_argument(
        "--ncu",
        action="store_true",
        help="print the command that measures the DRAM bytes of each kernel, and run nothing",
    )
    command.add_argument(
        "--once",
        action="store_true",
        help="call the fused model once, for a profiler that waits for cuProfilerStart; launches "
        "stand in NVTX ranges",
    )
    command.add_argument("--full", action="store_true", help="print all kernels, not the first ten")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def calibrate_arguments(command: argparse.ArgumentParser) -> None:
    """Declares the options of `calibrate`."""
    quiet_argument(command)
    command.add_argument(
        "--target", help="cuda, llvm, or a profile's .toml that measured values go on top of"
    )
    command.add_argument(
        "--out",
        metavar="FILE",
        help="the profile to write (default: ./<device>.toml); with --refit, the residual",
    )
    command.add_argument("--only", metavar="NAME,...", help="run these families of benchmarks")
    command.add_argument(
        "--budget",
        metavar="S",
        type=float,
        default=CALIBRATION_S,
        help="seconds (default: %(default)s)",
    )
    command.add_argument(
        "--refit", metavar="FILE", nargs="+", help="fit the learned residual to these samples"
    )


def tune_arguments(command: argparse.ArgumentParser) -> None:
    """Declares the options of `tune`."""
    quiet_argument(command)
    work = command.add_mutually_exclusive_group(required=True)
    work.add_argument("model", nargs="?", help="a .pt2, .onnx, Relax .py or Relax .json file")
    work.add_argument("--demo", action="store_true", help="a pre-norm transformer block")
    work.add_argument("--db-check", action="store_true", help="check a database, line by line")
    work.add_argument(
        "--db-merge", nargs="+", metavar="DIR", help="put databases together, into --work-dir"
    )
    work.add_argument(
        "--db-export", metavar="DIR", help="write plain MetaSchedule databases, without our checks"
    )
    work.add_argument(
        "--db-import", nargs="+", metavar="DIR", help="take MetaSchedule databases over, unchecked"
    )
    command.add_argument(
        "--work-dir", metavar="DIR", type=Path, required=True, help="the folder of the database"
    )
    command.add_argument("--target", help=TARGET_HELP)
    command.add_argument("--policy", help=POLICY_HELP)
    command.add_argument("--trials", type=int, metavar="N", help="most trials of this session")
    command.add_argument(
        "--minutes", type=float, metavar="M", help="most minutes of this session; 0 is no limit"
    )
    command.add_argument("--settings", metavar="FILE", help="a .toml file like configs/tune_*.toml")
    command.add_argument(
        "--rpc", metavar="HOST:PORT", help="measure on the servers of a TVM RPC tracker"
    )
    command.add_argument("--key", help="the key of the tracker's servers to use")
    command.add_argument(
        "--token-file", metavar="FILE", help="has their token; by default TVM_FUSION_TOKEN has it"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")


def operators_arguments(command: argparse.ArgumentParser) -> None:
    """Declares the options of `operators`."""
    quiet_argument(command)
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--torch", action="store_true", help="the core ATen operators of PyTorch")
    which.add_argument("--onnx", action="store_true", help="those of ONNX's default domain")
    command.add_argument("--json", action="store_true", help="print a JSON list")


def fuzz_arguments(command: argparse.ArgumentParser) -> None:
    """Declares the options of `fuzz`."""
    quiet_argument(command)
    command.add_argument("--target", required=True, help=TARGET_HELP)
    command.add_argument(
        "--minutes", type=float, required=True, metavar="M", help="how long to draw programs"
    )
    command.add_argument("--seed", type=int, default=0, metavar="S", help="that of the first")
    command.add_argument(
        "--statements", type=int, default=40, metavar="N", help="most statements of a program"
    )
    command.add_argument(
        "--processes", type=int, default=1, metavar="N", help="programs at the same time"
    )
    command.add_argument(
        "--reduce", type=float, default=120.0, metavar="S", help="seconds to reduce a failure in"
    )
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="for fuzz.json, and a test for each failure"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
