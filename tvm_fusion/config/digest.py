"""Keys of plain values, under which results are kept."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def digest(parts: list[Any]) -> str:
    """A key of plain values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
