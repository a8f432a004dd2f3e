"""Tuning: measured choices for the kernels of a plan, kept in a database.

tvm_fusion.tune(model, target, database="tuned")
compiled = tvm_fusion.compile(model, target, database="tuned")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .measure.measuring import Meter
    from .measure.processes import Worker
    from .session.result import TuneResult
    from .session.session import Session
    from .session.settings import Settings


def tune(
    model: Any,
    target: Any = None,
    *,
    database: str | Path,
    settings: str | Path | Mapping[str, Any] | Settings | None = None,
    trials: int | None = None,
    minutes: float | None = None,
    policy: Any = None,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    builders: Sequence[Worker] | None = None,
    meters: Sequence[Meter] | None = None,
    watch: Callable[[Session], None] | None = None,
) -> TuneResult:
    """Measures choices for the kernels of a model's plan and keeps them in a database.

    Of a module of several public functions the kernels of all are tuned, equal ones once, and the
    plan of each is settled.

    `tvm_fusion.compile(model, target, database=database)` uses them, and so do pipelines: see
    `tvm_fusion.TuningDatabase` and `tvm_fusion.transform.Fuse`. A session that was interrupted or
    killed goes on where it was with the same call.

    Parameters
    ----------
    model, target, policy, example_inputs, dynamic_shapes
        As for `tvm_fusion.compile`.
    database : str or Path
        A database, an empty folder, or a path where none is yet: a new database is made there. It
        holds a folder for each device and version.
    settings : str, Path, mapping, Settings or None
        A file like `configs/tune_default.toml`, or values by name
        (`tuning.session.settings.Settings` has them all); what is not named is as in that file.
    trials : int, optional
        Most trials of this call, in place of the settings'.
    minutes : float, optional
        Most minutes of this call, in place of the settings'; planning and final measurements are
        included, and 0 is no limit.
    builders : sequence of Worker, optional
        What compiles kernels (`tuning.measure.workshop.make_builders`); by default processes on
        this machine that end with the session. What is given stays, for the next session.
    meters : sequence of Meter, optional
        What measures them (`tuning.remote.rpc.meters_of`: devices of other machines); by default a
        process on this machine that ends with the session.
    watch : callable, optional
        Called with the `Session` after each trial.

    Returns
    -------
    TuneResult
        `print` shows what was tuned, the time before and after, and the folder; `.tasks` are the
        kernels, `.plan` is the plan as measurements settle it, or those of several functions by
        name.

    Raises
    ------
    ConfigError
        A setting is unknown or has no sense.
    InputError
        The model cannot be used, or has no kernel that could be tuned; the path of the database
        cannot be written, or holds something else.
    TargetError
        This machine cannot run what is tuned, and no `meters` are given.

    Examples
    --------
    >>> result = tvm_fusion.tune(model, "llvm", database="tuned", minutes=2)   # doctest: +SKIP
    >>> print(result)                                                          # doctest: +SKIP
    """
    from .session.tune import tune as run

    return run(
        model,
        target,
        database=database,
        settings=settings,
        trials=trials,
        minutes=minutes,
        policy=policy,
        example_inputs=example_inputs,
        dynamic_shapes=dynamic_shapes,
        builders=builders,
        meters=meters,
        watch=watch,
    )
