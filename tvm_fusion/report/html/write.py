"""A report's JSON as one HTML file that needs nothing else: no network, no build step.

The page is in `page/`: its frame, its style and its scripts in the order in which they stand in the
file. `vendor/` has the layout of graphs by others, with its licence.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from ...errors import InputError
from ...host.atomic_files import replace_file

HERE = Path(__file__).parent
SCRIPTS = ("base", "model", "layout", "graph", "panel", "charts", "app")


def write_html(report: Mapping[str, Any], path: str | Path, title: str = "Fusion report") -> None:
    """Write a report as one HTML file.

    Parameters
    ----------
    report : Mapping
        What `Report.to_json` or `FunctionReports.to_json` gives, or the JSON that a command
        printed. Parts that it lacks are left out of the page.
    path : str or Path
        The file; one that is there is replaced.
    title : str
        Of the page.

    Raises
    ------
    InputError
        It is no report, or the file cannot be written.
    """
    replace_file(Path(path), page_text(report, title))


def page_text(report: Mapping[str, Any], title: str = "Fusion report") -> str:
    """The HTML of a report; see `write_html`."""
    functions = report.get("functions", {"": report})
    one_of_several = isinstance(functions, Mapping) and "functions" in report
    if not one_of_several and not isinstance(report.get("groups"), list):
        raise InputError(
            "no report: its JSON has neither groups nor functions; give what --json printed"
        )
    sources = {
        name: found.get("sources") or {}
        for name, found in functions.items()
        if isinstance(found, Mapping)
    }
    shown = {name: _without_sources(found) for name, found in functions.items()}
    page = Template((HERE / "page" / "page.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=html.escape(title),
        style=(HERE / "page" / "style.css").read_text(encoding="utf-8"),
        report=_embedded({"functions": shown} if one_of_several else shown[""]),
        sources=_embedded(sources),
        script="\n".join(_scripts()),
    )


def _without_sources(report: Any) -> Any:
    """Texts of kernels are most of a report's bytes, and are read when one is opened."""
    if not isinstance(report, Mapping):
        return report
    return {key: value for key, value in report.items() if key not in ("sources", "plan")} | {
        "plan": {key: report.get("plan", {}).get(key) for key in ("policy", "rewrites")}
    }


def _embedded(value: Any) -> str:
    """JSON in a script element: no text of it can end the element, or begin a comment in it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _scripts() -> list[str]:
    layout = (HERE / "vendor" / "dagre.min.js").read_text(encoding="utf-8")
    licence = (HERE / "vendor" / "dagre.LICENSE.txt").read_text(encoding="utf-8")
    layout = layout.partition("//# sourceMappingURL")[0]  # what it names is not in the file
    ours = [(HERE / "page" / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    return [f"/* dagre\n{licence}*/", layout, *ours]
