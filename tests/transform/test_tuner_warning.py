"""What tuners of TVM make of functions whose kernels are written, and of what `Fuse` leaves."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import mkdtemp

import pytest
import tvm
from tvm import relax
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule import relax_integration
from tvm.s_tir.meta_schedule.relax_integration import extract_tasks, tune_relax
from tvm.s_tir.meta_schedule.testing.dummy_object import DummyRunner

from tvm_fusion.ir.quick_stacks import register_tensor_intrinsics
from tvm_fusion.transform import Fuse, Materialize, WriteKernels, plan

from ..benchmarks.tuning.metaschedule import light_build
from ..pipelines.cells import CUDA, LLVM, launches
from ..support.tuned_blocks import (
    PRODUCT,
    TARGET,
    block,
    check_numbers,
    kernels,
)


def _spaces(mod: tvm.IRModule, target: tvm.target.Target = TARGET) -> int:
    """What a tuner of TVM finds to choose from: the design spaces of its tasks."""
    register_tensor_intrinsics()
    found = 0
    for task in extract_tasks(mod, target):
        context = ms.TuneContext(
            mod=task.dispatched[0],
            target=target,
            space_generator="post-order-apply",
            task_name=task.task_name,
        )
        found += len(context.generate_design_space())
    return found


# Always: a tuner that meets nothing else warns.
@pytest.mark.nightly
@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", [TARGET, tvm.target.Target(CUDA)], ids=["llvm", "cuda"])
def test_a_tuner_that_meets_written_kernels_warns_once(target):
    written = Fuse(target)(block())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert _spaces(written, target) == launches(written)["main"] > 1  # each kernel as it is
    [warning] = caught
    assert "Fuse(write=False)" in str(warning.message)


def test_a_tuner_finds_schedules_for_functions_that_are_not_written():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _spaces(Fuse(TARGET, write=False)(block())) > 2


@derived_object
class NoBuilder(ms.builder.PyBuilder):
    """Builds nothing; each result is in a folder of its own, which the tuner removes."""

    def build(self, build_inputs):
        return [ms.builder.BuilderResult(f"{mkdtemp()}/none", None) for _ in build_inputs]


@pytest.fixture
def nothing_is_measured(monkeypatch):
    """TVM's tuners build nothing, and are told random times."""
    monkeypatch.setattr(ms.builder.Builder, "create", lambda *_, **__: NoBuilder())
    monkeypatch.setattr(ms.runner.Runner, "create", lambda *_, **__: DummyRunner())


@contextmanager
def _no_handlers() -> Iterator[None]:
    """MetaSchedule's logger without pytest's handlers: its tuners fail on those without a name."""
    logger = logging.getLogger("tvm.s_tir.meta_schedule")
    before, logger.handlers[:] = logger.handlers[:], []
    try:
        yield
    finally:
        logger.handlers[:] = before


def _tune_relax(folder: str, **options) -> tvm.transform.Pass:
    """`tune_relax` as if it were a pass."""

    @tvm.transform.module_pass(opt_level=0, name="tune_relax")
    def run(mod, _ctx):
        trials = {"max_trials_global": 4, "max_trials_per_task": 2}
        tune_relax(mod, {}, TARGET, folder, **trials, **options)
        return mod

    return run


def _check_tuned(tuner: tvm.transform.Pass, folder: str) -> None:
    """Tune what `Fuse` leaves, apply what was found, write the rest, and look at the numbers."""
    with TARGET, tvm.transform.PassContext(opt_level=3):
        with _no_handlers():
            mod = tuner(Fuse(write=False)(block()))
        found = ms.database.JSONDatabase(work_dir=folder)
        times = [float(r.run_secs[0]) for r in found.get_all_tuning_records()]
        with found:
            applied = relax.transform.MetaScheduleApplyDatabase()(mod)
        written = Fuse()(applied)
    assert sum(time < 1e9 for time in times) == 4  # a failure is kept as 1e10 s
    assert all("tirx.is_scheduled" in f.attrs for f in kernels(applied).values())
    for result in (applied, written):
        check_numbers(tvm.compile(result, TARGET))


QUICK = {"strategy": "replay-trace", "cost_model": "random"}


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize("way", ["tune_relax", "pass"])
def test_a_tuner_that_meets_only_written_kernels_warns_and_ends_at_once(way, tmp_path):
    register_tensor_intrinsics()
    folder, written = str(tmp_path), Fuse(TARGET)(block())
    with TARGET, warnings.catch_warnings(record=True) as caught, _no_handlers():
        warnings.simplefilter("default")
        tuner = _tune_relax(folder, **QUICK)
        if way == "pass":
            tuner = relax.transform.MetaScheduleTuneIRMod({}, folder, max_trials_global=4)
        tvm.ir.assert_structural_equal(tuner(written), written)
    assert len(ms.database.JSONDatabase(work_dir=folder)) == 0
    assert sum("Fuse(write=False)" in str(warning.message) for warning in caught) == 1


def test_a_tuner_is_given_what_is_not_written(tmp_path):
    marked = Materialize(plan(block(), TARGET), TARGET)(block())
    product = marked.get_global_var(PRODUCT)
    left = marked[product].without_attr("tvm_fusion.kernel_class")
    marked.update_func(product, left)
    partly = WriteKernels(TARGET)(marked)
    tasks = extract_tasks(partly, TARGET)
    assert len(tasks) == 2
    with _no_handlers(), pytest.warns(UserWarning, match=r"Fuse\(write=False\)"):
        contexts, weights = relax_integration.extracted_tasks_to_tune_contexts(tasks, str(tmp_path))
    assert [context.task_name for context in contexts] == [PRODUCT]
    assert len(weights) == 1


@pytest.mark.usefixtures("nothing_is_measured")
def test_tune_relax_tunes_what_fuse_leaves(tmp_path):
    register_tensor_intrinsics()
    _check_tuned(_tune_relax(str(tmp_path), **QUICK), str(tmp_path))


@pytest.mark.nightly  # evolution takes its time for each batch
@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize("tuner", ["MetaScheduleTuneIRMod", "static_shape_tuning_pipeline"])
def test_passes_of_tvm_tune_what_fuse_leaves(tuner, tmp_path):
    register_tensor_intrinsics()
    folder, trials = str(tmp_path), {"max_trials_per_task": 2}
    with TARGET:
        made = {
            "MetaScheduleTuneIRMod": lambda: relax.transform.MetaScheduleTuneIRMod(
                params={}, work_dir=folder, max_trials_global=4, **trials
            ),
            "static_shape_tuning_pipeline": lambda: relax.pipeline.static_shape_tuning_pipeline(
                total_trials=4, target=LLVM, work_dir=folder, **trials
            ),
        }[tuner]()
    _check_tuned(made, folder)


@pytest.mark.nightly  # builders and runners of TVM take a minute to start
def test_what_fuse_leaves_is_built_and_measured_by_tvm(tmp_path):
    register_tensor_intrinsics()
    # TVM's own `f_build` imports all tensor intrinsics, on a busy machine for minutes
    builder = ms.builder.LocalBuilder(timeout_sec=300, f_build=light_build())
    runner = ms.runner.LocalRunner(timeout_sec=300)
    measured = {"builder": builder, "runner": runner}
    _check_tuned(_tune_relax(str(tmp_path), **measured, **QUICK), str(tmp_path))
