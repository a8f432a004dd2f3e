"""How the CUDA writer cuts a row group."""

from __future__ import annotations

from ..forms import Form, Writer
from .candidates import row_ranked
from .config import RowConfig
from .kernel import emit_row
from .pieces import read_rows
from .versions import write_row_versions

WRITER = Writer(
    "reductions of rows",
    read_rows,
    (Form("row", RowConfig, row_ranked, lambda p, hw, config: emit_row(p, config, hw)),),
    write_row_versions,
)
