"""What measures through a session with an RPC server: of this package (`serve`), or TVM's own."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ...runtime.timing.timing import L2_CLEANING_BYTES
from ..measure.measuring import MeasureRequest, measure
from ..measure.processes import Answer
from ..measure.site import Arrays, Call
from ..serve import MEASURE

SERVED_S = 3600  # after which a server of this package ends a session
STOCK_S = 600  # the same of TVM's own; a kernel that hangs blocks it until then
MIN_SAMPLE_S = 200e-6  # shorter calls are repeated within a sample


class Libraries:
    """Libraries at a server, each sent once.

    A library has a name of its own there: one that is loaded must not be written again.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._names: dict[tuple[Path, int], str] = {}

    def name(self, path: Path) -> str:
        """The name of a library at the server."""
        key = (path, path.stat().st_mtime_ns)
        if key not in self._names:
            name = f"{len(self._names)}-{path.name}"
            self._session.upload(str(path), name)
            self._names[key] = name
        return self._names[key]


class Remote(Arrays):
    """A device behind a session with TVM's own server."""

    def __init__(self, session: Any, kind: str) -> None:
        super().__init__(session.device(kind))
        self.session, self.kind = session, kind
        self._libraries = Libraries(session)

    def load(self, path: Path) -> Any:
        """A library at the server."""
        return self.session.load_module(self._libraries.name(path))

    def samples(
        self, calls: Sequence[Call], kernels: Sequence[int], repeats: int
    ) -> list[list[float]]:
        """Microseconds of each call, interleaved; on a GPU the L2 is cleaned before each."""
        numbers = [self._number(call) for call in calls]
        found: list[list[float]] = [[] for _ in calls]
        for _ in range(repeats):
            for samples, call, number in zip(found, calls, numbers, strict=True):
                samples.append(self._seconds(call, number) * 1e6)
        return found

    def _number(self, call: Call) -> int:
        """How often a call is repeated within a sample: once where the L2 is cleaned before."""
        once = self._seconds(call, 1)
        return 1 if self.kind == "cuda" else max(1, int(MIN_SAMPLE_S / max(once, 1e-7)))

    def _seconds(self, call: Call, number: int) -> float:
        evaluate = call.library.time_evaluator(
            call.symbol,
            self.device,
            number=number,
            repeat=1,
            cache_flush_bytes=L2_CLEANING_BYTES if self.kind == "cuda" else 0,
        )
        return evaluate(*call.tensors).mean


class Link(Protocol):
    """What measures through a session; `lasts_s` is how long the session may last."""

    lasts_s: float
    is_ours: bool
    session: Any

    def measure(self, request: MeasureRequest, limit_s: float) -> Answer: ...


class Served:
    """A session with a server of this package."""

    lasts_s, is_ours = SERVED_S, True

    def __init__(self, session: Any) -> None:
        self.session = session
        self._measure = session.get_function(MEASURE)
        self._libraries = Libraries(session)

    def measure(self, request: MeasureRequest, limit_s: float) -> Answer:
        """What the server's measuring process answers within a time."""
        message = pickle.dumps((request.moved(self._libraries.name), limit_s))
        return pickle.loads(bytes(self._measure(message)))


class Stock:
    """A session with TVM's own server."""

    lasts_s, is_ours = STOCK_S, False

    def __init__(self, session: Any) -> None:
        self.session = session
        self._site: Remote | None = None

    def measure(self, request: MeasureRequest, limit_s: float) -> Answer:
        """As `measuring.measure`; the time limit is that of the session."""
        if self._site is None:
            kind = request.place.resolved()[0].kind.name
            self._site = Remote(self.session, "cpu" if kind == "llvm" else kind)
        return Answer("ok", measure(request, self._site))
