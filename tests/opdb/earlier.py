"""What a run takes from earlier results: inductor's outcomes, and rows that it does not make anew.

    --inductor-of F.json    the entries that inductor answered in time there
    --onto F.json           all rows of F.json, but for those that this run judges

A result says which it took (`inductor of`), and of which runs its rows are (`parts`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .exceptions import Entry

Row = dict[str, Any]


class Earlier:
    """Earlier results.

    Parameters
    ----------
    inductor_of : sequence of Path
    onto : Path or None
    """

    def __init__(self, inductor_of: Sequence[Path] = (), onto: Path | None = None) -> None:
        self._results = {path: _read(path) for path in inductor_of}
        self._onto = {} if onto is None else _read(onto)
        self.rows: dict[Entry, Row] = {_entry(row): row for row in self._onto.get("rows", ())}
        self.by_inductor: dict[Entry, Row] = {
            _entry(row): row["inductor"]
            for result in (*self._results.values(), self._onto)
            for row in result.get("rows", ())
            if row.get("inductor", {"outcome": "timeout"})["outcome"] != "timeout"
        }

    @property
    def versions(self) -> dict[str, str] | None:
        """Those that the rows that stay are of."""
        return self._onto.get("versions")

    def with_new(self, rows: Mapping[Entry, Row]) -> list[Row]:
        """The rows that stay, each in its place, and those that this run has."""
        stay = [rows.get(entry, row) for entry, row in self.rows.items()]
        return stay + [row for entry, row in rows.items() if entry not in self.rows]

    def facts(self, rows: Mapping[Entry, Row]) -> dict[str, Any]:
        """What a result says of what was taken."""
        of = [{"file": str(path)} | _made(result) for path, result in self._results.items()]
        found: dict[str, Any] = {"inductor of": [*self._onto.get("inductor of", ()), *of]}
        if self._onto:
            stay = {"entries that stay": len(self.rows.keys() - rows.keys())}
            found["parts"] = [*self._onto.get("parts", ()), _made(self._onto) | stay]
        return found


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _entry(row: Row) -> Entry:
    return row["operator"], row["dtype"]


def _made(result: dict[str, Any]) -> dict[str, Any]:
    """How a result was made."""
    return {key: result[key] for key in ("device", "date", "command", "versions")}
