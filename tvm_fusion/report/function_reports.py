"""The reports of a module of several functions, one for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError
from .facts import FORMAT_VERSION
from .screen import Report


@dataclass(frozen=True, slots=True)
class FunctionReports:
    """What was done with each function of a module.

    Attributes
    ----------
    functions : Mapping of str to Report or str
        By function; text after `load`.
    version : int
        Version of the JSON format.
    """

    functions: Mapping[str, Report | str] = field(hash=False)
    version: int = FORMAT_VERSION

    def __getitem__(self, name: str) -> Report | str:
        """The report of a function; raises InputError where there is none of that name."""
        if name not in self.functions:
            known = ", ".join(self.functions)
            raise InputError(f"there is no report of a function {name!r}, but of {known}")
        return self.functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.functions)

    def __len__(self) -> int:
        return len(self.functions)

    def items(self) -> list[tuple[str, Report | str]]:
        """The reports with the names of their functions."""
        return list(self.functions.items())

    def __str__(self) -> str:
        return self._joined(str)

    def full(self) -> str:
        """Return everything as text; `str` gives one screen of each."""
        return self._joined(lambda found: found if isinstance(found, str) else found.full())

    def to_json(self) -> dict[str, Any]:
        """Return the reports as a JSON-able dict: `version`, and `functions` by name (see
        `Report.to_json`; text of a loaded module stays text).
        """
        functions = {
            name: found if isinstance(found, str) else found and found.to_json()
            for name, found in self.functions.items()
        }
        return {"version": self.version, "functions": functions}

    def _joined(self, text: Callable[[Report | str], str]) -> str:
        parts = (f"function {name}\n{text(found)}" for name, found in self.functions.items())
        return "\n\n".join(part.rstrip("\n") for part in parts)
