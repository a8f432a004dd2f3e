"""Run the ONNX backend tests (node, simple, pytorch-operator, pytorch-converted) on llvm.

Worker processes run many tests each, one after the other; a crash or a hang costs the test that
caused it, and the worker is started again. Tests that need a download ("real") are not part of it.

    python tests/support/onnx_conformance.py                            # the committed list, fused
    python tests/support/onnx_conformance.py --mode stock --all         # every test, stock TVM
    python tests/support/onnx_conformance.py --mode stock --all --grow  # adds what passes
    python tests/support/onnx_conformance.py --count                    # the list, by operator
"""

import argparse
import dataclasses
import json
import os
import select
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

LIST = Path(__file__).parents[1] / "data" / "onnx_conformance.txt"
COUNTS = LIST.with_name("onnx_operators.json")
KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")
# stock: TVM alone. frontend: our frontend, then TVM. reference: the float64 reference of `check`,
# rounded. fused: the whole package.
MODES = ("stock", "frontend", "reference", "fused")
START_SECONDS = 180  # a worker imports TVM and builds the test data of two thousand tests
MEMORY_BYTES = 8 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What became of a test: pass, fail (wrong numbers), error (an exception), crash or timeout."""

    name: str
    status: str
    seconds: float
    why: str = ""


# ---- the parent ----------------------------------------------------------------------------------


def worker_command(mode: str) -> list[str]:
    """The command of a worker process."""
    return [sys.executable, str(Path(__file__).resolve()), "--worker", "--mode", mode]


class Worker:
    """One worker process: started when first needed, killed when it hangs, started again.

    It writes a line when it is ready, then answers each name on its standard input with one line of
    JSON: {"status": ..., "why": ...}.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        env = dict(os.environ, TVM_NUM_THREADS="1", OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )
        if not self.line(START_SECONDS):
            self.stop()
            raise RuntimeError("a conformance worker did not start; its standard error says why")

    def stop(self) -> int:
        """End the process, and return its exit status."""
        process, self.process = self.process, None
        process.kill()
        process.stdin.close()
        process.stdout.close()
        return process.wait()

    def line(self, timeout_s: float) -> bytes:
        """The next line of the worker; empty if it has ended, or if nothing comes in time."""
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if readable else b""
        return line if line.endswith(b"\n") else b""

    def run(self, name: str, timeout_s: float) -> Result:
        """Run one test."""
        if self.process is None:
            self.start()
        begin = time.monotonic()
        self.process.stdin.write(name.encode() + b"\n")
        self.process.stdin.flush()
        line = self.line(timeout_s)
        seconds = round(time.monotonic() - begin, 3)
        if line:
            answer = json.loads(line)
            return Result(name, answer["status"], seconds, answer["why"])
        if seconds >= timeout_s:
            self.stop()
            return Result(name, "timeout", seconds, f"no answer within {timeout_s} s")
        self.process.wait()
        return Result(name, "crash", seconds, f"the worker ended with status {self.stop()}")


def run_all(
    names: Sequence[str],
    command: Sequence[str],
    workers: int = 2,
    timeout_s: float = 60,
    report: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Run `names` in `workers` processes and return one result a test, in the order of `names`."""
    pending, results, lock = list(reversed(names)), {}, threading.Lock()
    failures: list[Exception] = []

    def drain() -> None:
        worker = Worker(command)
        try:
            while True:
                with lock:
                    if not pending or failures:
                        return
                    name = pending.pop()
                result = worker.run(name, timeout_s)
                with lock:
                    results[name] = result
                    if report:
                        report(result)
        except Exception as error:
            failures.append(error)
        finally:
            if worker.process:
                worker.stop()

    threads = [threading.Thread(target=drain) for _ in range(min(workers, len(names)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[name] for name in names]


def read_list(path: Path = LIST) -> list[str]:
    """The names of the committed list."""
    return [line for line in path.read_text().split("\n") if line and not line.startswith("#")]


def grow_list(passed: Iterable[str], path: Path = LIST) -> int:
    """Add names to the list, which never loses one; returns its new length."""
    known = read_list(path) if path.exists() else []
    names = sorted(set(known) | set(passed))
    head = (
        "# ONNX backend tests that must pass fused on llvm. This list only grows:\n"
        "# python tests/support/onnx_conformance.py --mode stock --all --grow\n"
    )
    path.write_text(head + "\n".join(names) + "\n")
    return len(names)


def counts_by_operator() -> dict[str, list[int]]:
    """Of each operator the tests in the committed list, and all there are, of tests whose model has
    no other operator.
    """
    listed, found = set(read_list()), {}
    for name, case in load_cases().items():
        operators = {node.op_type for node in model_of(case).graph.node}
        if len(operators) == 1 and not name.endswith("_cuda"):
            count = found.setdefault(*operators, [0, 0])
            count[0] += name in listed
            count[1] += 1
    return dict(sorted(found.items()))


# ---- the worker ----------------------------------------------------------------------------------


def load_cases() -> dict:
    """Every test case by name; random test data is the same in every process."""
    import numpy as np

    warnings.simplefilter("ignore")
    np.random.seed(0)  # the onnx package draws its test data from the global generator
    from onnx.backend.test.loader import load_model_tests

    return {case.name: case for kind in KINDS for case in load_model_tests(kind=kind)}


def model_of(case):
    """The model of a test case."""
    import onnx

    if case.model is not None:
        return case.model
    return onnx.load(os.path.join(case.model_dir, "model.onnx"))


def data_of(case) -> tuple:
    """(model, [(inputs, expected outputs)]) of a test case."""
    import onnx
    from onnx import numpy_helper

    model = model_of(case)
    if case.model is not None:
        return model, case.data_sets

    def read(path: Path, value_info):
        proto, convert = {
            "sequence_type": (onnx.SequenceProto, numpy_helper.to_list),
            "optional_type": (onnx.OptionalProto, numpy_helper.to_optional),
        }.get(value_info.type.WhichOneof("value"), (onnx.TensorProto, numpy_helper.to_array))
        return convert(proto.FromString(path.read_bytes()))

    def read_set(folder: Path, prefix: str, infos) -> list:
        count = len(list(folder.glob(f"{prefix}_*.pb")))
        return [read(folder / f"{prefix}_{i}.pb", infos[i]) for i in range(count)]

    folders = sorted(Path(case.model_dir).glob("test_data_set*"))
    graph = model.graph
    return model, [
        (read_set(f, "input", graph.input), read_set(f, "output", graph.output)) for f in folders
    ]


def prepare(model, mode: str) -> Callable:
    """An ONNX model -> a function from NumPy inputs to a list of outputs, computed on llvm."""
    import tvm
    from tvm import relax

    if mode == "stock":
        from tvm.relax.frontend.onnx import from_onnx

        mod = from_onnx(model)
    else:
        from tvm_fusion.frontends import load

        mod = load(model)
    if mode == "fused":
        import tvm_fusion

        return tvm_fusion.compile(mod, target="llvm", verify=False)
    if mode == "reference":
        from tvm_fusion.check.reference import build_reference

        reference = build_reference(relax.transform.LegalizeOps()(mod))
        return lambda *inputs: reference(inputs)

    executable = tvm.compile(mod, target=tvm.target.Target({"kind": "llvm"}))
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    return lambda *inputs: main(*[tvm.runtime.tensor(x) for x in inputs])


def to_numpy(value):
    """Results, nested or not, as NumPy arrays; a shape is a vector of integers."""
    import numpy as np

    if isinstance(value, tuple) and all(isinstance(item, int) for item in value):
        return np.asarray(value, "int64")
    if hasattr(value, "numpy"):
        return value.numpy()
    if isinstance(value, np.ndarray):
        return value
    return [to_numpy(item) for item in value]


def check(case, mode: str) -> None:
    """Run one test; raises AssertionError when the numbers differ."""
    import numpy as np
    import onnx
    from onnx.backend.test.runner import Runner

    model, data_sets = data_of(case)
    run = prepare(model, mode)
    for inputs, expected in data_sets:
        tensors = [
            onnx.numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x
            for x in [*inputs, *expected]
        ]
        inputs, expected = tensors[: len(inputs)], tensors[len(inputs) :]
        if not all(isinstance(x, np.ndarray | np.generic) for x in inputs):
            raise TypeError("an input is no tensor")
        outputs = to_numpy(run(*[np.asarray(x) for x in inputs]))
        if isinstance(outputs, np.ndarray):
            outputs = [outputs]
        if mode == "reference":
            outputs = [
                y.astype(x.dtype) if y.dtype == np.float64 else y
                for x, y in zip(expected, outputs, strict=True)
            ]
        Runner.assert_similar_outputs(expected, outputs, case.rtol, case.atol)


def work(mode: str) -> None:
    """Read test names from stdin, write one JSON line a test to what stdout was at the start."""
    import resource

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    sys.modules["torch"] = None  # TVM imports it where it finds it, which takes 3 s
    cases = load_cases()

    def send(status: str, why: str = "") -> None:
        print(json.dumps({"status": status, "why": why}), file=answers, flush=True)

    send("ready")
    for line in sys.stdin:
        try:
            check(cases[line.strip()], mode)
        except AssertionError as error:
            send("fail", str(error)[:2000])
        except Exception as error:
            send("error", f"{type(error).__name__}: {error}"[:2000])
        else:
            send("pass")


def main() -> int:
    """The command line; exit status 1 when a test of the list does not pass."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mode", choices=MODES, default="fused")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--all", action="store_true", help="every test, not only the list")
    parser.add_argument("--grow", action="store_true", help="add the tests that pass to the list")
    parser.add_argument("--count", action="store_true", help=f"write {COUNTS.name} from the list")
    parser.add_argument("--match", default="", help="only tests with this text in their name")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=60, help="seconds a test may take")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if options.worker:
        work(options.mode)
        return 0
    if options.count:
        COUNTS.write_text(json.dumps(counts_by_operator(), indent=0) + "\n")
        return 0

    names = sorted(load_cases()) if options.all else read_list()
    names = [name for name in names if options.match in name]

    def report(result: Result) -> None:
        if result.status != "pass" and not options.all:
            print(f"{result.status:8}{result.name}: {result.why.splitlines()[-1:]}", flush=True)

    begin = time.monotonic()
    command = worker_command(options.mode)
    results = run_all(names, command, options.workers, options.timeout, report)
    counts = Counter(result.status for result in results)
    print(f"{dict(sorted(counts.items()))} in {time.monotonic() - begin:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(r) for r in results], indent=0))
    if options.grow:
        print(f"{grow_list(r.name for r in results if r.status == 'pass')} tests in {LIST}")
    return 0 if options.all or counts["pass"] == len(names) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
