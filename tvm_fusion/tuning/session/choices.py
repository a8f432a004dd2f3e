"""Ways to write the kernel of a task, as texts that a database can keep.

A *class* choice is a configuration of the task's kernel class, written as
`RowConfig(form=reg,threads=256,...)`; `default` is what the class writes untuned. A *trace* choice
is a MetaSchedule trace as compact JSON (`replay`). A text says nothing by itself: read back, a
class choice is one of those that the class offers for this very function, and any other text is
stale.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tvm import tirx

from ...check.sequential import STANDARD_ERRORS
from ...config import HardwareProfile, Policy
from ...errors import Unsupported
from ...kernels.registry import family
from ..database.trial import Trial
from .tasks import CLASS, without_stamps

CLASS_CHOICE, TRACE_CHOICE = "class", "trace"
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to write a kernel.

    Attributes
    ----------
    kind : "class" or "trace"
    text : see the module docstring
    predicted_us : of one launch; None where nothing predicts it
    like : of `default`, the text of the configuration that it writes
    """

    kind: str
    text: str
    predicted_us: float | None = None
    like: str = ""


def text_of(config: Any) -> str:
    """The text of a configuration of a kernel class: its type and fields.

    Examples
    --------
    >>> from tvm_fusion.kernels.gemm.simt.config import SimtConfig
    >>> text_of(SimtConfig(64, 64, 16, 4, 4))
    'SimtConfig(block_m=64,block_n=64,block_k=16,thread_m=4,thread_n=4)'
    """
    if config is None:
        return DEFAULT
    values = ",".join(f"{f.name}={_plain(getattr(config, f.name))}" for f in fields(config))
    return f"{type(config).__name__}({values})"


def _plain(value: Any) -> str:
    return str(value.value if isinstance(value, enum.Enum) else value)


def fields_of(text: str) -> dict[str, str]:
    """The fields of a text, and under `type` the name before them.

    Examples
    --------
    >>> fields_of("SimtConfig(block_m=64,block_n=32)")
    {'type': 'SimtConfig', 'block_m': '64', 'block_n': '32'}
    """
    name, _, rest = text.partition("(")
    found = {"type": name}
    for part in rest.removesuffix(")").split(","):
        key, separator, value = part.partition("=")
        if separator:
            found[key] = value
    return found


def class_choices(
    workload: tirx.PrimFunc, hw: HardwareProfile, policy: Policy
) -> list[tuple[Choice, Any]]:
    """What the kernel class of a workload offers, the best guess first, with the configurations.

    The first is `default`: the best configuration, which has no choice of its own.

    Raises
    ------
    Unsupported
        The class cannot write the function.
    """
    name = str(workload.attrs[CLASS])
    if name == "stock":
        return [(Choice(CLASS_CHOICE, DEFAULT), None)]
    ranked = ranked_configs(without_stamps(workload), name, hw, policy)
    best_us, best = ranked[0] if ranked else (None, None)
    default = Choice(CLASS_CHOICE, DEFAULT, best_us, text_of(best))
    choices, seen = [(default, None)], {DEFAULT, default.like}
    for us, config in ranked:
        text = text_of(config)
        if text not in seen:
            seen.add(text)
            choices.append((Choice(CLASS_CHOICE, text, us), config))
    return choices


def ranked_configs(
    func: tirx.PrimFunc, class_name: str, hw: HardwareProfile, policy: Policy
) -> Sequence[tuple[float | None, Any]]:
    """Predicted microseconds (None where the class gives none) and configurations of a class."""
    found = family(class_name).ranked(func, hw, policy)
    return [(None if s is None else s * 1e6, config) for s, config in found]


def config_of(workload: tirx.PrimFunc, text: str, hw: HardwareProfile, policy: Policy) -> Any:
    """The configuration that a text stands for; None for `default`.

    Raises
    ------
    Unsupported
        The class does not offer it for this function: the text is of another version, or of
        another function.
    """
    for choice, config in class_choices(workload, hw, policy):
        if text in (choice.text, choice.like):
            return config
    raise Unsupported(f"{workload.attrs[CLASS]} does not offer {text} for this function")


def chosen(trials: Iterable[Trial], certain_gain: float) -> Trial | None:
    """The fastest choice of those that are surely faster than the untuned one; else that one.

    Of trials with different numbers of samples those with at least as many as the untuned kernel's
    count: after a final these are the finalists, and the best of many short trials, which looks
    faster than it is, does not win over them. Trials that are not `checked` do not count.

    Parameters
    ----------
    trials : iterable of Trial
        Of one workload, each choice once.
    certain_gain : float
        Share by which a choice must be faster than the untuned one.

    Returns
    -------
    Trial or None
        None where the untuned kernel was not measured and checked.
    """
    ok = {t.text: t for t in trials if t.ok and t.checked}
    untuned = ok.get(DEFAULT)
    if untuned is None:
        return None
    fair = [t for t in ok.values() if len(t.samples_us) >= len(untuned.samples_us)]
    faster = [t for t in fair if is_surely_faster(t, untuned, certain_gain)]
    return min(faster, key=lambda t: (t.us, t.text), default=untuned)


def is_surely_faster(trial: Trial, untuned: Trial, certain_gain: float) -> bool:
    """Whether the median is so much shorter, and the means differ by more than noise explains.

    That is `check.sequential.STANDARD_ERRORS` standard errors of the difference of two means with
    unequal variances (Welch 1947).
    """
    if not trial.us < (1 - certain_gain) * untuned.us:
        return False
    ours, theirs = trial.samples_us, untuned.samples_us
    if min(len(ours), len(theirs)) < 2:
        return False
    error = math.hypot(*(statistics.stdev(s) / math.sqrt(len(s)) for s in (ours, theirs)))
    return statistics.mean(theirs) - statistics.mean(ours) > STANDARD_ERRORS * error
