"""A process that tells of a tuning session (`session`), watched and killed from outside."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MARK = "TVM_FUSION_TUNING_KILLS"  # a variable that all processes of a session inherit
COUNTED_S = 0.5  # between two counts of the processes
PATIENCE_S = 10.0  # for what a killed session started
LONGEST_S = 300.0  # of a session


class WatchedSession:
    """A session in a process group of its own.

    Parameters
    ----------
    command : sequence of str
    temporary : Path
        Where it makes temporary files.

    Attributes
    ----------
    told : list of (float, dict)
        What it said, and when: seconds since it began.
    processes : int
        That it had started and that ran when they were last counted.
    """

    def __init__(self, command: Sequence[str], temporary: Path) -> None:
        self._mark = uuid.uuid4().hex
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `_end`)
        self.told: list[tuple[float, dict[str, Any]]] = []
        self.processes = 0
        self._ends = threading.Event()  # it is about to be killed, or has ended
        self._news = threading.Condition()
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env={**os.environ, MARK: self._mark, "TMPDIR": str(temporary)},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._count, daemon=True).start()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    @property
    def phase(self) -> str:
        """The last phase that it told of."""
        return next((x["phase"] for _, x in reversed(self.told) if "phase" in x), "start-up")

    @property
    def kept(self) -> list[list[Any]]:
        """Keys and trials that it said are kept, as JSON has them."""
        return [what["kept"] for _, what in self.told if "kept" in what]

    def fact(self, name: str) -> Any:
        """What it said under a name, last; None where it did not."""
        return next((what[name] for _, what in reversed(self.told) if name in what), None)

    def wait_until(self, moment_s: float) -> bool:
        """Whether it still runs at a moment."""
        try:
            self._process.wait(max(0.0, moment_s - self.seconds))
        except subprocess.TimeoutExpired:
            return True
        return False

    def wait_for(self, wanted: dict[str, Any], count: int) -> bool:
        """Waits until it has said something `count` times: items that are all in what it says,
        where None stands for any value. Whether it did, and runs.
        """

        def is_said() -> bool:
            said = sum(
                all(k in what and v in (None, what[k]) for k, v in wanted.items())
                for _, what in self.told
            )
            return said >= count or not self._reader.is_alive()

        with self._news:
            while not is_said() and self.seconds < LONGEST_S:
                self._news.wait(0.2)
        return self._process.poll() is None

    def finish(self) -> None:
        """Waits for its end; RuntimeError where it fails."""
        try:
            code = self._process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"the session did not end within {LONGEST_S:g} s") from None
        self._ends.set()
        self._reader.join()
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace")
        self._errors.close()
        if code:
            raise RuntimeError(f"the session ended with {code}: {errors[-2000:]}")

    def kill(self) -> None:
        """SIGKILL to the session's process, not to those that it started."""
        self._ends.set()
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._errors.close()

    def survivors(self) -> tuple[list[str], float]:
        """What a killed session started and what still runs after `PATIENCE_S`, and the seconds
        until there was nothing.
        """
        began = time.monotonic()
        while (left := marked(self._mark)) and time.monotonic() - began < PATIENCE_S:
            time.sleep(0.02)
        return left, time.monotonic() - began

    def _count(self) -> None:
        while not self._ends.wait(COUNTED_S):
            found = len(marked(self._mark)) - 1
            if not self._ends.is_set():
                self.processes = max(0, found)

    def _read(self) -> None:
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith(b'{"') and line.endswith(b"\n"):
                    with self._news:
                        self.told.append((self.seconds, json.loads(line)))
                        self._news.notify_all()


def marked(mark: str) -> list[str]:
    """The commands of the running processes with a value of `MARK`."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes()
                    found.append(command.replace(b"\0", b" ").decode(errors="replace").strip())
            except OSError:  # it ended, or is another user's
                continue
    return found
