"""Calls answered by processes, each of which may die or hang and is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tvm_fusion.tuning.measure.processes import Answer, Worker, stop_all, wait_for

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "TVM_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def answers(
    function: Callable,
    calls: Sequence[tuple],
    jobs: int,
    limit_s: float,
    setup: Callable[[], None],
    environment: dict[str, str],
) -> Iterator[tuple[tuple, Answer]]:
    """Each call with the answer to `function(*call)`, as they come.

    Parameters
    ----------
    function : callable
        Of a module that can be imported.
    calls : sequence of tuple
        Their arguments.
    jobs : int
        Processes.
    limit_s : float
        Seconds for an answer.
    setup : callable
        Called first in every process.
    environment : dict of str to str
        Variables of the processes.
    """
    workers = [Worker(f"worker {i}", (setup, ()), environment) for i in range(jobs)]
    waiting, asked = list(reversed(calls)), {}
    try:
        while waiting or asked:
            for worker in workers:
                if not worker.busy and waiting:
                    asked[worker.name] = call = waiting.pop()
                    worker.send(function, call, limit_s)
            wait_for(workers, 1.0)
            for worker in workers:
                if (answer := worker.collect()) is not None:
                    yield asked.pop(worker.name), answer
    finally:
        stop_all(workers)
