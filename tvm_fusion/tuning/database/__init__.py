"""Trials on disk: for each device a file of JSON lines, each with a checksum.

    D/<device folder>/trials.jsonl    workloads, trials (failures too) and plans

The file is only appended to, one line a trial. `TuningDatabase` shows it to MetaSchedule, `export`
writes MetaSchedule's own folder, and `import_folders` reads one.
"""

from .folders import Folders, check_place, device_folder, device_folders, find_database, folder_of
from .metaschedule import short_key, workload_key
from .replay import trace_text
from .store import Database
from .tools import check, export, import_folders, merge
from .trial import Trial

__all__ = [
    "Database",
    "Folders",
    "Trial",
    "check",
    "check_place",
    "device_folder",
    "device_folders",
    "export",
    "find_database",
    "folder_of",
    "import_folders",
    "merge",
    "short_key",
    "trace_text",
    "workload_key",
]
