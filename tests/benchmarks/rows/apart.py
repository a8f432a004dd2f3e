"""Rows of a suite on a CPU, where each compiler has a process of its own (`bench.apart`).

A call of ours is the plain one, with its checks and conversions of torch tensors, as the peers'
are.
"""

import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from tvm_fusion.bench.apart import Call, Failed, Process, in_rounds
from tvm_fusion.bench.patience import within
from tvm_fusion.calibrate.cpu.host_profile import VARIABLE as CALIBRATE
from tvm_fusion.config import resolve_target
from tvm_fusion.runtime.timing.timing import Timing

from .. import workloads
from ..peers.names import FLEX
from ..peers.registry import outputs_of, peer
from ..record import OURS, PRODUCTS, REFERENCES, UNFUSED, compare, empty_row, note_error
from ..workloads.instance import Instance
from .accuracy import CEILINGS, checked_error, reference
from .ours import Ours
from .products import products_alone
from .setup import Setup, exact_float32
from .together import limit_us


class Field:
    """The processes of a run, one for each compiler; they last over its rows.

    Attributes
    ----------
    rates : mapping of str to Any
        What was measured of this machine with so many threads, before the others ran beside: plans
        and limits are made with these. Empty: they are as shipped.
    """

    def __init__(self, setup: Setup, threads: int) -> None:
        self._setup, self._threads = setup, threads
        # What the processes make of a name; a target is not sent, it is found again by its name
        self._sent = replace(setup, target=None, hw=None)
        self._processes: dict[str, Process] = {}
        with self._new(functools.partial(find_rates, setup.named)) as alone:
            self.rates = alone.make()

    def __enter__(self) -> "Field":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            process.close()

    def measure(self, name: str) -> dict[str, Any]:
        """Return the row of one workload."""
        labels = (OURS, *self._setup.peers_of(name))
        row = empty_row(name, labels[1:], workloads.workload(name).plain)
        row |= {"clock": "wall", "quartiles_us": {}, "least_us": {}, "samples": {}}
        start = time.monotonic()
        made = self._made(row, labels)
        times, failures = in_rounds({x: self._processes[x] for x in made}, self._setup.repeats)
        row["failures"].update(failures)
        for label, timing in times.items():
            _note_time(row, label, timing)
        compare(row)
        row["spent_s"] = round(time.monotonic() - start, 1)
        return row

    def _made(self, row: dict[str, Any], labels: tuple[str, ...]) -> list[str]:
        """Have all processes make their calls, side by side; return those that did."""
        for label in labels:
            self._process(label).begin(row["name"])
        made = []
        for label in labels:
            try:
                facts = self._processes[label].finish()
            except Failed as failure:
                row["failures"][label] = str(failure)
                continue
            row |= facts["instance"]
            if "ours" in facts:
                row |= facts["ours"]
            if facts["note"]:
                row["notes"][label] = facts["note"]
            note_error(row, label, facts["error"], CEILINGS[row["dtype"]])
            made.append(label)
        return made

    def _process(self, label: str) -> Process:
        if label not in self._processes:
            calibrated = bool(self.rates)
            make = functools.partial(make_call, label, self._sent, self._threads, calibrated)
            self._processes[label] = self._new(make)
        return self._processes[label]

    def _new(self, make: Callable[..., Any]) -> Process:
        return Process(make, self._threads, instructions=self._setup.instructions)


def find_rates(target: Any) -> tuple[Call, Mapping[str, Any]]:
    """Nothing to time; the rates of a target, measured if they never were with these threads."""
    return lambda: None, resolve_target(target)[1].measured


def make_call(
    label: str, setup: Setup, threads: int, calibrated: bool, name: str
) -> tuple[Call, dict[str, Any]]:
    """Return a checked call of a workload by one compiler, and what is written down of it.

    Parameters
    ----------
    setup : Setup
        Of the run, without `target` and `hw`.
    calibrated : bool
        Whether the machine was measured; if not, it is not now, beside the other processes.
    """
    if not calibrated:
        os.environ[CALIBRATE] = "0"
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    if label.startswith("torch.") or label == FLEX:
        torch.compiler.reset()  # what it compiled for the last workload
    exact_float32()
    target, hw = resolve_target(setup.named)
    setup = replace(setup, target=target, hw=hw)
    instance = setup.instance(name)
    wanted, flop = reference(instance)
    ours = Ours(instance, setup)
    with within(None if label in (OURS, UNFUSED) else setup.patience_s):
        call = _call(label, instance, ours, setup)
        error = 0.0 if label == PRODUCTS else checked_error(call, instance.inputs, wanted)
    outputs = outputs_of(
        instance.module(*instance.inputs)
    )  # some models do not run on meta tensors
    limit = limit_us(instance, outputs, round(flop * instance.flop_share), hw)
    facts = {
        "instance": {"shape": instance.shape, "dtype": instance.dtype, "limit_us": limit},
        "note": getattr(call, "note", None),
        "error": error,
    }
    return call, facts | ({"ours": ours.facts} if label == OURS else {})


def _call(label: str, instance: Instance, ours: Ours, setup: Setup) -> Call:
    if label == PRODUCTS:
        return products_alone(instance)
    if label in (OURS, UNFUSED):
        compiled = ours.fused if label == OURS else ours.unfused
        return lambda: compiled(*instance.inputs)
    return peer(label)(instance, setup.target)


def _note_time(row: dict[str, Any], label: str, timing: Timing) -> None:
    if label == OURS or label in REFERENCES:
        row["ours_us" if label == OURS else f"{label}_us"] = timing.median_us
    else:
        row["peers_us"][label] = timing.median_us
    row["quartiles_us"][label] = [timing.low_us, timing.high_us]
    row["least_us"][label] = min(timing.values_us)
    row["samples"][label] = timing.samples
