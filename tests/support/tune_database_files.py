"""Files of small databases in tests: copied, damaged, and read again."""

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tvm_fusion.tuning.database import Database
from tvm_fusion.tuning.database.store import DAMAGED, TRIALS

from .tune_database_tools import DEVICE, TARGET, content, exported, fill, records_of


@cache
def _sound():
    place = tempfile.TemporaryDirectory()  # removed when the process ends
    return place, fill(Path(place.name) / "D").path


def copy_of_sound(path):
    """A database with `trials_of_all` in a folder that does not exist."""
    return Path(shutil.copytree(_sound()[1], path))


def open_(folder):
    """The database, for writing."""
    return Database.open(folder, DEVICE, target=TARGET)


def lines(folder, name=TRIALS):
    """The lines of a file, with their ends."""
    return (folder / name).read_bytes().splitlines(keepends=True)


def write(folder, found, name=TRIALS):
    """The inverse of `lines`."""
    (folder / name).write_bytes(b"".join(found))


def insert(folder, number, raw, name=TRIALS):
    """Put a line into a file."""
    found = lines(folder, name)
    found.insert(number, raw)
    write(folder, found, name)


def taken_out(folder):
    """Reasons of the lines that were damaged."""
    path = folder / DAMAGED
    return (
        [json.loads(line)["why"] for line in path.read_text().splitlines()] if path.exists() else []
    )


def reopened(folder):
    """The database, after it is repaired: sound in itself, for MetaSchedule, and lasting."""
    database = open_(folder)
    found, modules = content(database), database.modules()
    assert exported(database) == records_of([x for x in _counting(database) if x[0] in modules])
    before = (folder / TRIALS).read_bytes()
    again = Database.open(folder, DEVICE)
    assert content(again) == found
    assert [p for p in again.problems if p.remedy] == []
    assert (folder / TRIALS).read_bytes() == before
    return database


def _counting(database):
    return [(key, trial) for key in database.keys for trial in database.trials(key)]


def reasons(database):
    """All problems as one text."""
    return " | ".join(map(str, database.problems))


def without(found, *numbers):
    """A list without some of its elements."""
    return [x for n, x in enumerate(found) if n not in numbers]
