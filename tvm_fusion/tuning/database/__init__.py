"""Trials on disk: for each device a file of JSON lines, each with a checksum.

    D/<device folder>/trials.jsonl    workloads, trials (failures too) and plans

The file is only appended to, one line a trial. `TuningDatabase` shows it to MetaSchedule,
`tools.export` writes MetaSchedule's own folder, and `tools.import_folders` reads one.
"""

from ..measure.trial_record import Trial
from .folders import (
    Folders,
    Store,
    Stores,
    check_place,
    compiler_version,
    device_folder,
    device_folders,
    find_database,
    folder_of,
)
from .lines import Problem
from .metaschedule import short_key, trace_text, workload_key
from .store import Database
from .tools import (
    Exported,
    FolderReport,
    Report,
    Taken,
    check,
    export,
    import_folders,
    merge,
)

__all__ = [
    "Database",
    "Exported",
    "FolderReport",
    "Folders",
    "Problem",
    "Report",
    "Store",
    "Stores",
    "Taken",
    "Trial",
    "check",
    "check_place",
    "compiler_version",
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
