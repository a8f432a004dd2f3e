"""Trials on disk: a guard in front of MetaSchedule's JSON files.

    D/<device folder>/
        database_workload.json, database_tuning_record.json    as MetaSchedule writes and reads them
        guard.jsonl    a line with a checksum for each workload and each trial, failures too
        quarantine/    what was wrong with the files, with reasons
        plans/         plans with the choices that were found for them
        lock

MetaSchedule's own database ends the process on a blank line, refuses the whole file for one that is
torn, and gives records to other kernels when workload lines change places. Here each line is
checked before TVM sees it, and trials are known by the structural hash of their workload.
"""

from ..measure.trial_record import Trial
from .checking import CheckReport, FolderReport, check
from .exporting import Exported, ExportReport, export
from .folder_state import Problem
from .folders import (
    Folders,
    compiler_version,
    device_folder,
    device_folders,
    find_database,
    folder_of,
)
from .merging import Merged, MergeReport, merge
from .open_folder import check_place
from .protocol import Store, Stores
from .store import Database
from .workload_lines import short_key, trace_text, workload_key

__all__ = [
    "CheckReport",
    "Database",
    "ExportReport",
    "Exported",
    "FolderReport",
    "Folders",
    "MergeReport",
    "Merged",
    "Problem",
    "Store",
    "Stores",
    "Trial",
    "check",
    "check_place",
    "compiler_version",
    "device_folder",
    "device_folders",
    "export",
    "find_database",
    "folder_of",
    "merge",
    "short_key",
    "trace_text",
    "workload_key",
]
