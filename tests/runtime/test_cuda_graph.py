"""Calls as CUDA graphs: what is captured, copied, returned, ordered, dropped and refused."""

import gc
import threading
import time

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

from tvm_fusion.compilation.compiler import compile, explain
from tvm_fusion.errors import ConfigError, InputError, TargetError
from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.calls import compiled_module
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.runtime.graphs import capture
from tvm_fusion.runtime.graphs.capture_rules import CudaGraphOptions, refusal_of_executable

from ..support.fake_cuda_graph import FakeDriver, captured_on_cpu
from ..support.runtime_cases import (
    H200,
    LLVM,
    call_in_sequence,
    relax_module,
    softmax_reshape_relu,
    symbolic_sum,
    two_kernel_prim_func,
)


def chain(rows=64, columns=32) -> tvm.IRModule:
    """relu(softmax(x) + x) as three kernels, with intermediates in memory."""

    def emit(bb, x):
        y = bb.emit(relax.op.add(bb.emit(relax.op.nn.softmax(x)), x))
        return relax.op.nn.relu(y)

    return relax_module(emit, ("x", (rows, columns), "float32"))


def chain_of(x):
    return torch.relu(torch.softmax(x, -1) + x)


def sums(n=5, m=3, seed=0):
    torch.manual_seed(seed)
    return torch.randn(n, 8), torch.randn(n, m)


def check_sums(outputs, x, y):
    torch.testing.assert_close(outputs[0], torch.softmax(x, -1))
    torch.testing.assert_close(outputs[1][0], y.sum(1))


def test_the_second_call_is_one_launch_and_follows_its_inputs(monkeypatch):
    compiled, driver = captured_on_cpu(monkeypatch, chain())
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(64, 32)
        torch.testing.assert_close(compiled(x), chain_of(x))
    assert len(driver.said("capture")) == 1
    assert len(driver.said("launch")) == 2
    assert compiled.cuda_graph_refusal is None


def test_outputs_are_the_callers_own_unless_static_ones_are_asked_for(monkeypatch):
    for options, kept in ((True, True), ({"static_outputs": True}, False)):
        compiled, _ = captured_on_cpu(monkeypatch, chain(), options)
        x = torch.randn(64, 32)
        first = compiled(x)
        copy = first.clone()
        second = compiled(x + 1)
        assert torch.equal(first, copy) == kept
        assert (first.data_ptr() == second.data_ptr()) != kept


def test_what_others_compute_between_launches_does_not_reach_into_a_graph(monkeypatch):
    compiled, _ = captured_on_cpu(monkeypatch, chain(), {"static_outputs": True})
    plain = CompiledModule.of(build(chain(), LLVM))
    x = torch.randn(64, 32)
    result = compiled(x)
    wanted = chain_of(x)
    others = [plain(torch.full((64, 32), float(i))) for i in range(8)]
    torch.testing.assert_close(result, wanted)
    kept = [other.clone() for other in others]
    compiled(x)
    assert all(torch.equal(a, b) for a, b in zip(others, kept, strict=True))


@pytest.mark.parametrize("kind", ["numpy", "torch", "tvm"])
def test_every_kind_of_tensor_goes_in_and_comes_out(monkeypatch, kind):
    compiled, driver = captured_on_cpu(monkeypatch, symbolic_sum())
    wrap, unwrap = {
        "numpy": (torch.Tensor.numpy, torch.from_numpy),
        "torch": (lambda t: t, lambda t: t),
        "tvm": (lambda t: tvm.runtime.tensor(t.numpy()), lambda t: torch.from_numpy(t.numpy())),
    }[kind]
    kept = []
    for seed in range(3):
        x, y = sums(seed=seed)
        outputs = compiled(wrap(x), wrap(y))
        assert type(outputs[0]) is type(wrap(x))
        kept.append((outputs, x, y))
    for outputs, x, y in kept:
        check_sums((unwrap(outputs[0]), (unwrap(outputs[1][0]),)), x, y)
    assert len(driver.said("capture")) == 1


def test_strided_and_differentiable_inputs_give_the_same_numbers(monkeypatch):
    compiled, _ = captured_on_cpu(monkeypatch, chain())
    x = torch.randn(64, 32)
    wanted = compiled(x)
    big_endian = x.numpy().astype(">f4")
    variants = (x.T.contiguous().T, torch.nn.Parameter(x), np.asfortranarray(x.numpy()), big_endian)
    for variant in variants:
        assert np.array_equal(np.asarray(compiled(variant)), wanted.numpy())


def test_each_size_has_a_graph_from_its_second_call_and_the_oldest_goes_first(monkeypatch):
    compiled, driver = captured_on_cpu(monkeypatch, symbolic_sum(), {"max_shapes": 2})
    captures = []
    for n in (3, 5, 3, 7, 5, 3, 7, 3, 5, 7):
        x, y = sums(n)
        for _ in range(2):
            check_sums(compiled(x, y), x, y)
        captures.append(len(driver.said("capture")))
    assert captures == [1, 2, 2, 3, 4, 5, 6, 6, 7, 8]
    assert len(driver.graphs) == 2


def keepers(before):
    """The threads of graphs that are there since."""
    return [t for t in set(threading.enumerate()) - before if t.name == "tvm_fusion graph"]


def test_thousands_of_calls_of_hundreds_of_sizes_leave_nothing_behind(monkeypatch):
    compiled, driver = captured_on_cpu(monkeypatch, symbolic_sum())
    before = set(threading.enumerate())
    rng = np.random.default_rng(0)
    often = rng.integers(1, 5, 9000)
    sizes = np.where(rng.random(9000) < 0.5, often, rng.integers(1, 501, 9000))
    inputs = {n: sums(n) for n in range(1, 501)}
    for n in (*range(1, 501), *range(1, 501), *map(int, sizes)):
        x, y = inputs[n]
        found = compiled(x, y)
        if n % 50 == 0:
            check_sums(found, x, y)
    most = CudaGraphOptions().max_shapes
    assert len(driver.graphs) == most
    patience = time.monotonic() + 10  # a thread ends a moment after its graph
    while len(keepers(before)) > most and time.monotonic() < patience:
        time.sleep(0.01)
    assert len(keepers(before)) == most
    assert len(driver.said("launch")) > 4000 > 10 * len(driver.said("capture"))


def test_pointers_move_only_with_the_tensors(monkeypatch):
    compiled, driver = captured_on_cpu(monkeypatch, chain(), {"static_outputs": True})
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), chain_of(x))
    assert not driver.said("commit")
    for given in (y, x, x, y):
        torch.testing.assert_close(compiled(given), chain_of(given))
    assert driver.said("commit") == [("commit", 2)] * 3  # two of three kernels read x


def test_one_tensor_given_twice_at_first_is_two_inputs_later(monkeypatch):
    def emit(bb, x, y):
        return relax.op.subtract(bb.emit(relax.op.exp(x)), y)

    two = relax_module(emit, ("x", (8, 8), "float32"), ("y", (8, 8), "float32"))
    compiled, driver = captured_on_cpu(monkeypatch, two)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    for a, b in ((x, x), (x, y), (y, x), (y, y)):
        torch.testing.assert_close(compiled(a, b), torch.exp(a) - b)
    call = compiled.bind(x, x)
    torch.testing.assert_close(torch.from_dlpack(call()), torch.exp(x) - x)
    assert len(driver.said("capture")) == 2


def test_static_outputs_can_be_inputs_of_the_next_call(monkeypatch):
    for wrap in (lambda t: t, tvm.runtime.from_dlpack):
        compiled, _ = captured_on_cpu(monkeypatch, chain(), {"static_outputs": True})
        given = torch.randn(64, 32)
        wanted, value = given, wrap(given)
        for _ in range(4):
            wanted, value = chain_of(wanted), compiled(value)
            torch.testing.assert_close(torch.from_dlpack(value), wanted)


def test_outputs_that_are_views_stay_views(monkeypatch):
    def emit(bb, x):
        y = bb.emit(relax.op.nn.relu(x))
        rows = bb.emit(relax.op.reshape(y, (16, 2)))
        return relax.Tuple([y, rows, bb.emit(relax.op.reshape(x, (2, 16)))])

    for wrap in (lambda t: t, tvm.runtime.from_dlpack):
        compiled, _ = captured_on_cpu(monkeypatch, relax_module(emit, ("x", (4, 8), "float32")))
        for _ in range(3):
            x = torch.randn(4, 8)
            y, rows, same = (torch.from_dlpack(t) for t in compiled(wrap(x)))
            torch.testing.assert_close(y, torch.relu(x))
            torch.testing.assert_close(rows, torch.relu(x).view(16, 2))
            assert rows.data_ptr() == y.data_ptr()
            torch.testing.assert_close(same, x.view(2, 16))
            assert same.data_ptr() == x.data_ptr()


def test_bind_launches_over_the_callers_own_memory(monkeypatch):
    compiled, driver = captured_on_cpu(monkeypatch, chain())
    x = torch.randn(64, 32)
    call = compiled.bind(x)
    for _ in range(2):
        torch.testing.assert_close(torch.from_dlpack(call()), chain_of(x))
        x.add_(1)
    assert not driver.said("commit")
    assert len(driver.said("launch")) == 2


def test_a_graph_on_another_stream_needs_no_event(monkeypatch):
    compiled, driver = captured_on_cpu(monkeypatch, chain())
    x = torch.randn(64, 32)
    for stream in (7, 7, 8, 7):
        driver.stream = stream
        torch.testing.assert_close(compiled(x), chain_of(x))
    assert [entry[-1] for entry in driver.said("launch")] == [7, 8, 7]
    assert not driver.said("wait")
    assert not driver.said("record")


def test_one_kernel_on_another_stream_waits_for_its_launch_before(monkeypatch):
    one = relax_module(lambda bb, x: relax.op.nn.relu(x), ("x", (8, 8), "float32"))
    compiled, driver = captured_on_cpu(monkeypatch, one)
    x = torch.randn(8, 8)
    compiled(x)
    driver.log.clear()
    for stream in (7, 7, 8, 8, 7):
        driver.stream = stream
        torch.testing.assert_close(compiled(x), x.relu())
    said = [entry[0] for entry in driver.log if entry[0] != "commit"]
    assert said[:4] == ["launch", "launch", "synchronize", "launch"]
    assert said[4:] == ["record", "launch", "record", "wait", "launch", "record"]


def test_a_call_inside_the_callers_own_capture_is_not_a_graph(monkeypatch):
    compiled, driver = captured_on_cpu(monkeypatch, chain())
    driver.captured_by_caller = True
    x = torch.randn(64, 32)
    torch.testing.assert_close(compiled(x), chain_of(x))
    assert not driver.said("launch")
    assert not driver.said("capture")


def test_memory_of_calls_in_the_callers_own_capture_is_lent_to_nobody_else(monkeypatch):
    """A graph of torch's writes there whenever it is launched."""
    compiled, driver = CompiledModule.of(build(chain(), LLVM)), FakeDriver()
    monkeypatch.setattr(capture, "CudaDriver", lambda index: driver)
    x = torch.randn(64, 32)

    def lent() -> set[int]:
        """Where the storages of a call are."""
        seen = set()

        def look(_function, name, before, result, *_):
            if name == "vm.builtin.alloc_tensor" and not before:
                seen.add(int(result.data_ptr()))

        compiled.vm.set_instrument(look)
        torch.testing.assert_close(compiled(x), chain_of(x))
        compiled.vm._set_instrument(None)
        return seen

    assert lent() & lent()  # the pool lends the same again
    monkeypatch.setattr(compiled, "_on_cuda", True)
    monkeypatch.setattr(compiled_module, "torch_captures", lambda: True)
    torch.testing.assert_close(compiled(x), chain_of(x))
    held = {address for _, found in compiled._captures._storages for address in found}
    assert held
    assert driver.said("relaxed")
    monkeypatch.setattr(compiled_module, "torch_captures", lambda: False)
    assert not held & lent()


def test_a_capture_that_fails_leaves_plain_calls_and_a_reason(monkeypatch, caplog):
    compiled, driver = captured_on_cpu(monkeypatch, chain())
    driver.refuses = "cuGraphInstantiateWithFlags: not supported"
    x = torch.randn(64, 32)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), chain_of(x))
    assert "not supported" in compiled.cuda_graph_refusal
    assert len([r for r in caplog.records if "no CUDA graph" in r.message]) == 1
    torch.testing.assert_close(torch.from_dlpack(compiled.bind(x)()), chain_of(x))
    driver.refuses = None
    compiled.cuda_graph = True
    compiled(x)
    compiled(x)
    assert len(driver.said("launch")) == 1


def test_graphs_end_with_the_switch_and_with_the_module(monkeypatch):
    threads = threading.active_count()
    compiled, driver = captured_on_cpu(monkeypatch, symbolic_sum())
    for n in (3, 3, 4, 4):
        compiled(*sums(n))
    call = compiled.bind(*sums(5))
    assert len(driver.graphs) == 3
    compiled.cuda_graph = False
    assert len(driver.graphs) == 1
    check_sums(compiled(*sums()), *sums())
    del call, compiled
    gc.collect()
    assert not driver.graphs
    for thread in threading.enumerate():
        if thread.name == "tvm_fusion graph":
            thread.join(5)
    assert threading.active_count() <= threads


def test_wrong_inputs_are_named_as_without_a_graph(monkeypatch):
    compiled, _ = captured_on_cpu(monkeypatch, symbolic_sum())
    x, y = sums()
    compiled(x, y)
    for wrong in ((x.half(), y), (x[:, :7], y), (x, y[:4]), (x,), (x, 3.0)):
        with pytest.raises(InputError):
            compiled(*wrong)
    n = tvm.tirx.Var("n", "int64")
    mod = relax_module(lambda bb, x: relax.op.nn.relu(x), ("x", (n, n * 2), "float32"))
    squares, _ = captured_on_cpu(monkeypatch, mod)
    with pytest.raises(InputError, match=r"expected x: float32 \(n, \(n \* 2\)\), got \(2, 5\)"):
        squares(torch.zeros(2, 5))


def test_calls_from_several_threads_do_not_disturb_each_other(monkeypatch):
    compiled, _ = captured_on_cpu(monkeypatch, symbolic_sum(), {"max_shapes": 2})
    failures = []

    def work(seed):
        x, y = sums(n=3 + seed, seed=seed)
        for _ in range(10):
            outputs = compiled(x, y)
            if not torch.allclose(outputs[0], torch.softmax(x, -1), atol=1e-6):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (True, CudaGraphOptions()),
        (False, None),
        (None, None),
        ({"max_shapes": 3}, CudaGraphOptions(max_shapes=3)),
        (CudaGraphOptions(static_outputs=True), CudaGraphOptions(static_outputs=True)),
    ],
)
def test_options_are_spelt_in_several_ways(given, wanted):
    assert CudaGraphOptions.of(given) == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"static": True}, "unknown option 'static'; there are static_outputs, max_shapes"),
        ({"max_shapes": 0}, "max_shapes must be 1 or more"),
        ({"static_outputs": 1}, "static_outputs is no bool"),
        ("yes", "expected a bool or a mapping"),
    ],
)
def test_bad_options_are_named(given, message):
    with pytest.raises(ConfigError, match=message):
        CudaGraphOptions.of(given)


def test_a_module_for_the_cpu_says_that_it_has_no_graphs():
    compiled = CompiledModule.of(build(chain(), LLVM))
    with pytest.raises(TargetError, match="compiled for llvm; compile it for the target cuda"):
        compiled.cuda_graph = True
    assert compiled.cuda_graph is None
    with pytest.raises(TargetError, match="the target is llvm"):
        compile(chain(), "llvm", cuda_graph=True)


@pytest.mark.parametrize("command", ["compile", "bench"])
def test_the_command_line_refuses_graphs_on_a_cpu(command, capsys):
    from tvm_fusion.cli import main

    assert main([command, "--demo", "--target", "llvm", "--cuda-graph"]) == 2
    assert "the target is llvm; CUDA graphs need the target cuda" in capsys.readouterr().err


def test_kernels_alone_can_be_captured_and_symbolic_shapes_too():
    for mod in (call_in_sequence({"two": two_kernel_prim_func()}), symbolic_sum()):
        assert refusal_of_executable(build(mod, H200, compile_kernels=False).executable) is None


def data_dependent() -> tvm.IRModule:
    """A reshape to a shape that a tensor holds."""
    x = relax.Var("x", relax.TensorType((6,), "float32"))
    shape = relax.Var("shape", relax.TensorType((2,), "int64"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, shape]):
        extents = bb.emit(relax.op.tensor_to_shape(shape))
        a, b = tvm.tirx.Var("a", "int64"), tvm.tirx.Var("b", "int64")
        extents = bb.match_cast(extents, relax.ShapeType([a, b]))
        bb.emit_func_output(bb.emit(relax.op.reshape(x, (a, b))))
    return bb.get()


def library_call() -> tvm.IRModule:
    """A call of a function that is no kernel of the module."""
    ty = relax.TensorType((4,), "float32")
    x = relax.Var("x", ty)
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(relax.op.call_dps_packed("tests.callback", [x], ty)))
    return bb.get()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (data_dependent, "a shape depends on the values of a tensor"),
        (library_call, "it calls tests.callback, which is no kernel"),
    ],
)
def test_what_the_host_does_in_a_call_refuses_its_capture(make, reason):
    tvm.register_global_func("tests.callback", lambda x, y: None, override=True)
    assert reason in refusal_of_executable(build(make(), LLVM).executable)


def test_memory_is_planned_for_weights_intermediates_and_outputs():
    weight = np.ones((32, 16), "float32")

    def emit(bb, x):
        product = bb.emit(relax.op.matmul(x, relax.const(weight)))
        product = bb.emit(relax.op.nn.softmax(product))
        return relax.op.nn.relu(bb.emit(relax.op.matmul(product, relax.const(weight.T.copy()))))

    memory = build(relax_module(emit, ("x", (64, 32), "float32")), LLVM).memory
    assert memory.weights_bytes == 2 * weight.nbytes
    assert memory.outputs == (64 * 32 * 4,)
    # softmax(product) beside either its argument or the second product, which is as large as both
    assert memory.peak_bytes() >= memory.weights_bytes + 64 * 16 * 4 + 64 * 32 * 4
    assert memory.peak_bytes() <= memory.weights_bytes + 2 * 64 * 16 * 4 + 2 * 64 * 32 * 4
    assert type(memory).from_json(memory.to_json()) == memory


def test_memory_of_symbolic_shapes_waits_for_their_extents():
    memory = build(symbolic_sum(), LLVM).memory
    assert memory.peak_bytes() is None
    assert memory.peak_bytes({"n": 5, "m": 3}) == 5 * 8 * 4 + 5 * 4
    compiled = CompiledModule.of(build(softmax_reshape_relu(), LLVM))
    assert compiled.peak_memory_bytes == 2 * 128 * 256 * 4
    with pytest.raises(TargetError, match="measured on CUDA devices"):
        compiled.measure_peak_memory(np.zeros((128, 256), "float32"))


def test_two_extents_of_one_name_leave_the_memory_unknown():
    n, other = tvm.tirx.Var("n", "int64"), tvm.tirx.Var("n", "int64")
    mod = relax_module(lambda bb, x: relax.op.nn.relu(x), ("x", (n, other), "float32"))
    assert build(mod, LLVM).memory.peak_bytes({"n": 4}) is None


def test_the_report_has_memory_and_says_whether_calls_are_captured():
    report = compile(chain(), "llvm").report
    assert report.memory.fused > 0
    assert "memory" in str(report)
    assert report.to_json()["cuda_graph"] is None
    captured = compile(chain(), "nvidia_h200", cuda_graph=True)
    assert captured.report.cuda_graph == "captured at the first call"
    assert "graph     captured" in str(captured.report)
    assert captured.plan.to_dict() == explain(
        chain(), "nvidia_h200", policy={"launch": "graph"}
    ).plan | {"policy": captured.plan.policy}


def test_a_loaded_module_knows_memory_and_refusal(tmp_path):
    compiled = CompiledModule.of(build(softmax_reshape_relu(), LLVM))
    loaded = CompiledModule.load(compiled.save(tmp_path / "model.so"))
    assert loaded.peak_memory_bytes == compiled.peak_memory_bytes
    assert loaded.uncapturable == compiled.uncapturable == "the module runs on a CPU"


@pytest.fixture
def on_gpu():
    from tvm_fusion.config import resolve_target

    return resolve_target("cuda")[0]


@pytest.mark.gpu
@pytest.mark.parametrize("static", [False, True])
def test_graphs_on_a_gpu_follow_inputs_shapes_and_streams(on_gpu, static):
    compiled = CompiledModule.of(build(symbolic_sum(), on_gpu))
    compiled.cuda_graph = {"static_outputs": static}
    for stream in (None, torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for n in (5, 129, 5):
                x, y = (t.cuda() for t in sums(n, 300))
                check_sums(compiled(x, y), x, y)
                host = compiled(x.cpu(), y.cpu())
                assert not host[0].is_cuda
                check_sums(host, x.cpu(), y.cpu())
    assert compiled.cuda_graph_refusal is None


@pytest.mark.gpu
def test_kernels_with_scratch_of_their_own_replay_on_a_gpu(on_gpu):
    mod = call_in_sequence({"two": two_kernel_prim_func()})
    compiled = CompiledModule.of(build(mod, on_gpu))
    compiled.cuda_graph = True
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(1024, device="cuda")
        torch.testing.assert_close(compiled(x), (x.relu() + 1).flip(0) * 2)
    assert compiled.cuda_graph_refusal is None


@pytest.mark.gpu
def test_peak_memory_is_measured_on_a_gpu(on_gpu):
    rows = 1 << 14
    compiled = CompiledModule.of(build(softmax_reshape_relu(rows, 4096), on_gpu))
    x = torch.randn(rows, 4096, device="cuda")
    compiled(x)
    planned, measured = compiled.peak_memory_bytes, compiled.measure_peak_memory(x)
    assert planned <= measured + (4 << 20)
    assert measured <= planned + (64 << 20)
