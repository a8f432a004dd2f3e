"""Between a trial and a record of ``database_tuning_record.json``, in plain values.

A configuration of a kernel class is kept as a trace that puts it on the root block of the workload,
which changes no kernel and which MetaSchedule can read:

    sch.annotate(sch.get_sblock("root"), "tvm_fusion.config", "RowConfig(form=reg,threads=256)")
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from ..measure.trial_record import Trial, check_text
from .workload_lines import ENTRY, Facts

ANNOTATION = "tvm_fusion.config"
_BLOCK = "b0"


def payload_of(trial: Trial, facts: Facts, target: dict[str, Any]) -> list[Any]:
    """The record of an ok trial, without the line number of its workload."""
    trace = _annotation(trial.text, facts) if trial.kind == "class" else json.loads(trial.text)
    return [trace, [us * 1e-6 for us in trial.samples_us], target, facts.arguments]


def _annotation(text: str, facts: Facts) -> list[Any]:
    return [
        [
            ["GetSBlock", [], [facts.root, ENTRY], [_BLOCK]],
            ["Annotate", [_BLOCK, f'"{text}"'], [ANNOTATION], []],
        ],
        [],
    ]


def choice_of(payload: list[Any]) -> tuple[str, str]:
    """Kind and text of the choice that a record is of."""
    trace = payload[0]
    text = _annotated(trace)
    if text is not None:
        return "class", text
    return "trace", json.dumps(trace, separators=(",", ":"))


def _annotated(trace: list[Any]) -> str | None:
    """The text of `_annotation`; None for any other trace."""
    match trace:
        case [
            [
                ["GetSBlock", [], [str(), _], [str(block)]],
                ["Annotate", [str(where), str(quoted)], [str(name)], []],
            ],
            [],
        ] if (where, name) == (block, ANNOTATION) and quoted == f'"{quoted[1:-1]}"':
            text = quoted[1:-1]
        case _:
            return None
    try:
        check_text("class", text)
    except ValueError:
        return None
    return text


def trial_of(payload: list[Any], day: str) -> Trial:
    """The trial that a record without a line in ``guard.jsonl`` tells of.

    Nothing says that its numbers were compared, so that its `error` is None.
    """
    kind, text = choice_of(payload)
    samples = tuple(second * 1e6 for second in payload[1])
    us = statistics.median(samples)
    why = "read from a record without a line in guard.jsonl"
    return Trial(kind, text, "ok", us, samples_us=samples, why=why, date=day)
