"""Has a process do without torch, as if it were not installed: TVM imports it wherever it is, 2.9 s
of the 4.5 that a process takes to start (Zen 4).

A None in `sys.modules` would not do: SciPy takes what is there for the module. Runs by itself as
well, before anything of the package is imported, so it imports nothing of it.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class _NoTorch(PathFinder):
    @classmethod
    def find_spec(cls, name: str, *where: Any) -> ModuleSpec | None:
        return None if name == "torch" else super().find_spec(name, *where)


def hide_torch() -> None:
    """From here on torch is not found."""
    sys.meta_path[sys.meta_path.index(PathFinder)] = _NoTorch


def module_command(module: str, torch: bool) -> list[str]:
    """The command of a module in a process of its own, which may import torch or not."""
    if torch:
        return [sys.executable, "-m", module]
    hide = f"runpy.run_path({__file__!r})['hide_torch']()"
    run = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", f"import runpy; {hide}; {run}"]
