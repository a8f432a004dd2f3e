"""Files of small databases in tests: copied, damaged, and read again."""

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tvm_fusion.tuning.database import Database
from tvm_fusion.tuning.database.lines import parse_workload

from .tune_database_tools import DEVICE, TARGET, content, fill, records_of, stock_records

GUARD, WORK, RECORDS = FILES = (
    "guard.jsonl",
    "database_workload.json",
    "database_tuning_record.json",
)
ORPHANS = "they count, but MetaSchedule cannot see them"


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


def bytes_of(folder):
    """The files of a database."""
    return {name: (folder / name).read_bytes() for name in FILES}


def lines(folder, name):
    """The lines of a file, with their ends."""
    return (folder / name).read_bytes().splitlines(keepends=True)


def write(folder, name, found):
    """The inverse of `lines`."""
    (folder / name).write_bytes(b"".join(found))


def edit(folder, number, change):
    """Change the value of one line of the records."""
    found = lines(folder, RECORDS)
    value = json.loads(found[number])
    change(value)
    found[number] = json.dumps(value).encode() + b"\n"
    write(folder, RECORDS, found)


def insert(folder, name, number, raw):
    """Put a line into a file."""
    found = lines(folder, name)
    found.insert(number, raw)
    write(folder, name, found)


def quarantined(folder):
    """Reasons by file, of all lines in the quarantine."""
    found = {}
    place = folder / "quarantine"
    for path in sorted(place.iterdir()) if place.exists() else ():
        reasons = [json.loads(line)["why"] for line in path.read_text().splitlines()]
        found.setdefault(path.name.rsplit(".", 2)[0], []).extend(reasons)
    return found


def reopened(folder):
    """The database, after it is repaired: sound in itself, for MetaSchedule, and lasting."""
    database = Database.open(folder, DEVICE, target=TARGET)
    found = content(database)
    seen = {parse_workload(raw).key for raw in lines(folder, WORK)}
    assert stock_records(folder) == records_of([x for x in found if x[0] in seen])
    before = [(folder / name).read_bytes() for name in FILES]
    again = Database.open(folder, DEVICE)
    assert content(again) == found
    assert [p for p in again.problems if ORPHANS not in p.why] == []
    assert [(folder / name).read_bytes() for name in FILES] == before
    return database


def reasons(database):
    """All problems as one text."""
    return " | ".join(map(str, database.problems))


def without(found, *numbers):
    """A list without some of its elements."""
    return [x for n, x in enumerate(found) if n not in numbers]
