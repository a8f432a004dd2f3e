"""What commands of the command line have in common."""

import argparse
import tomllib
from pathlib import Path
from typing import Any

from .errors import ConfigError, InputError

INTERRUPTED = 130  # the exit status
TARGET_HELP = "llvm, cuda, a device like nvidia_h200, or a profile"
POLICY_HELP = "default, conservative, aggressive, a .toml file, or KEY=VALUE[,KEY=VALUE]"


def policy_of(text: str | None) -> Any:
    """A policy's name or path, or the mapping that KEY=VALUE,... spells."""
    if text is None or "=" not in text:
        return text
    policy = {}
    for item in text.split(","):
        key, separator, value = (part.strip() for part in item.partition("="))
        if not separator:
            raise ConfigError(f"--policy: expected KEY=VALUE, got {item!r}")
        policy[key] = _literal(value)
    return policy


def _literal(text: str) -> Any:
    """A TOML value; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def model_of(args: argparse.Namespace, target: Any) -> Any:
    """The model file's path, or the module of the demo for a resolved target."""
    if args.demo:
        from .demo import demo_module

        return demo_module(target.kind.name)
    if not Path(args.model).is_file():
        raise InputError(f"no such model file: {args.model}")
    return args.model
