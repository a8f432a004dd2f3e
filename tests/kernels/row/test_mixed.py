"""Mixed CUDA kernels (rows with sums over the rows): numbers on the CPU emulator, resources, and
which groups the class takes.
"""

import dataclasses

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile, resolve_target
from tvm_fusion.errors import Unsupported
from tvm_fusion.flow.planned import Planned
from tvm_fusion.kernels.column.kernel import emit_column
from tvm_fusion.kernels.column.rank import column_configs
from tvm_fusion.kernels.program.analysis import analyze
from tvm_fusion.kernels.program.narrow import narrow_indices
from tvm_fusion.kernels.program.program import ReduceKind
from tvm_fusion.kernels.row.config import Form
from tvm_fusion.kernels.row.kernel import RowConfig, emit_row, row_configs
from tvm_fusion.kernels.row.mixed import emit_mixed, mixed_configs

from ...support.cuda_on_cpu import compile_cubins, cuda_source, run_cuda_on_cpu
from ...support.graphs import module, plan_of
from ...support.kernel_cases import Case, fuse, outputs_of
from ...support.kernel_checks import assert_right
from ...support.mixed_cases import (
    fused_layer_norm,
    fused_rms_norm,
    layer_norm_backward,
    layer_norm_inputs,
)

H200, A100 = load_profile("nvidia_h200"), load_profile("nvidia_a100")


def check(case: Case, config: RowConfig | None = None, exact: bool = False) -> None:
    """The kernel of a case gives the case's numbers."""
    func = case.func()
    program = analyze(func, exact)
    kernel = emit_mixed(program, config or mixed_configs(program, H200)[0], H200)
    assert_right(case, func, kernel)


def sums_of_other_kinds(bb, x, y):
    """Row sums; the maximum, minimum and product of the elements over groups of rows."""
    total = bb.emit(op.sum(x, axis=[-1]))
    shape = tuple(int(extent) for extent in x.ty.shape)
    view = bb.emit(op.reshape(bb.emit(op.multiply(x, y)), (2, shape[0] // 2, shape[1])))
    results = [bb.emit(reduce(view, axis=[1])) for reduce in (op.max, op.min, op.prod)]
    return relax.Tuple([total, *results])


def sums_of_other_kinds_of(x, y):
    view = (x * y).reshape(2, -1, x.shape[1])
    return [x.sum(-1), view.max(1), view.min(1), view.prod(1)]


OTHER_KINDS = Case(
    "other kinds",
    sums_of_other_kinds,
    (((8, 256), "float32"), ((8, 256), "float32")),
    sums_of_other_kinds_of,
)

CASES = [
    fused_layer_norm(24, 256, "float16", 4),
    fused_layer_norm(15, 256, "bfloat16", 5),
    fused_layer_norm(14, 256, "float32", 2),
    fused_layer_norm(12, 512, "float16", 3, given=False),
    fused_layer_norm(6, 250, "float16", 2),
    fused_layer_norm(6, 129, "float16", 2),
    fused_layer_norm(9, 130, "float32", 3),
    fused_layer_norm(7, 320, "float16", 1),
    fused_rms_norm(21, 256, "float16", 3),
    fused_rms_norm(10, 1024, "bfloat16", 2),
    OTHER_KINDS,
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_and_sums_over_rows_have_the_right_numbers(case):
    check(case)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "config",
    [
        RowConfig(Form.BULK, 32, stages=2),
        RowConfig(Form.BULK, 64, stages=3),
        RowConfig(Form.BULK, 32, cluster=2, stages=2),
        RowConfig(Form.BULK, 32, width=4, stages=4),
        RowConfig(Form.REGISTERS, 32),
        RowConfig(Form.REGISTERS, 96),
        RowConfig(Form.REGISTERS, 32, width=2),
        RowConfig(Form.REGISTERS, 32, cluster=2),
    ],
    ids=lambda config: config.tag,
)
def test_every_form_gives_the_same_numbers(config):
    check(fused_layer_norm(20, 512, "float16", 4), config)


def test_exact_rounding_is_kept():
    check(fused_layer_norm(8, 256, "float16", 2), exact=True)


def test_every_listed_configuration_runs():
    case = fused_rms_norm(6, 512, "float16", 2)
    configs = mixed_configs(analyze(case.func()), H200)
    assert {config.form for config in configs} == {Form.BULK, Form.REGISTERS}
    assert len(set(configs)) == len(configs)
    for config in configs:
        check(case, config)


def test_a_device_without_bulk_copies_gets_plain_loads():
    program = analyze(CASES[0].func())
    configs = mixed_configs(program, A100)
    assert {config.form for config in configs} == {Form.REGISTERS}
    emit_mixed(program, configs[0], A100)


def test_rows_beyond_one_block_are_spread_over_a_cluster():
    program = analyze(fused_layer_norm(512, 32768, "float16", 128).func())
    assert mixed_configs(program, H200)[0].cluster > 1


# ---- the program


def test_the_program_has_groups_of_rows_and_what_is_summed_over_them():
    program = narrow_indices(analyze(CASES[0].func()))
    assert program.rows == (4, 6)
    assert program.columns == 256
    assert [a.kind for a in program.accumulations] == [ReduceKind.SUM] * 2
    assert program.index_dtype == "int32"
    assert str(program).count("  sum ") == 2


def test_statistics_from_the_same_rows_are_earlier_phases():
    program = analyze(CASES[3].func())
    assert program.phases == 3
    assert sorted(a.phase for a in program.accumulations) == [0, 2]


def test_the_kernel_stores_each_sum_once_behind_the_loop_over_rows():
    program = analyze(CASES[0].func())
    source = cuda_source(emit_mixed(program, mixed_configs(program, H200)[0], H200))
    assert source.count("store16_wb(") - 1 >= 4  # two sums of eight float32 a thread


# ---- resources


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_large_kernels_compile_without_spills(dtype):
    cases = {
        "given": fused_layer_norm(8192, 4096, dtype, 256),
        "from_x": fused_layer_norm(8192, 4096, dtype, 256, given=False),
        "rms": fused_rms_norm(8192, 4096, dtype, 256),
    }
    kernels = {}
    for name, case in cases.items():
        program = analyze(case.func())
        for number, config in enumerate(mixed_configs(program, H200)):
            kernels[f"{name}_{number}"] = emit_mixed(program, config, H200)
    found = compile_cubins(kernels)
    assert len(found) == len(kernels)
    assert {r.kernel: r.spill_bytes for r in found} == dict.fromkeys(kernels, 0)


# ---- refusals


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (RowConfig(Form.LOOP, 32), "mixed rows of form loop"),
        (RowConfig(Form.REGISTERS, 16, rows=2), "mixed rows"),
        (RowConfig(Form.REGISTERS, 2048), "blocks of 2048 threads"),
        (RowConfig(Form.REGISTERS, 32, width=16, cluster=32), "cluster"),
    ],
    ids=["loop", "several rows", "threads", "cluster"],
)
def test_configurations_that_do_not_suit_are_refused(config, reason):
    program = analyze(CASES[0].func())
    with pytest.raises(Unsupported, match=reason):
        emit_mixed(program, config, H200)


def test_a_program_without_sums_over_rows_is_refused():
    def row_sum(bb, x):
        return op.sum(x, axis=[-1])

    program = analyze(fuse(row_sum, ((8, 256), "float32")))
    with pytest.raises(Unsupported, match="does not sum over rows"):
        emit_mixed(program, RowConfig(Form.REGISTERS, 32), H200)


def test_row_kernels_refuse_sums_over_rows():
    program = analyze(CASES[0].func())
    bare = dataclasses.replace(program, accumulations=())
    with pytest.raises(Unsupported, match="sums over the rows"):
        emit_row(program, row_configs(bare, H200)[0], H200)


def test_sums_over_groups_of_different_sizes_are_refused():
    def emit(bb, x):
        total = bb.emit(op.sum(x, axis=[-1]))
        views = [bb.emit(op.reshape(x, (s, 24 // s, 256))) for s in (2, 4)]
        return relax.Tuple([total, *(bb.emit(op.sum(view, axis=[1])) for view in views)])

    with pytest.raises(Unsupported, match="sums over rows of 2 kinds"):
        analyze(fuse(emit, ((24, 256), "float32")))


# ---- the class


def classes(mod) -> list[str]:
    return [g.kernel_class for g in plan_of(mod).plan.groups if g.kernel_class != "view"]


def row_and_column_sums(rows, columns, emit_rows=lambda bb, x: op.sum(x, axis=[-1])):
    def emit(bb, x):
        return relax.Tuple([bb.emit(emit_rows(bb, x)), bb.emit(op.sum(x, axis=[0]))])

    return module(emit, ((rows, columns), "float32"))


def test_row_sums_and_column_sums_of_one_tensor_share_a_kernel():
    assert classes(row_and_column_sums(8192, 4096)) == ["mixed", "column"]


def test_rows_too_short_for_a_warp_stay_apart():
    assert "mixed" not in classes(row_and_column_sums(2**20, 64))


def test_argmax_rows_stay_apart():
    mod = row_and_column_sums(8192, 4096, lambda bb, x: op.argmax(x, axis=-1))
    assert "mixed" not in classes(mod)


def test_what_reads_the_partial_sums_is_another_kernel():
    mod = module(layer_norm_backward(), *layer_norm_inputs(8192, 4096, "float16"))
    mixed = [g for g in plan_of(mod).plan.groups if g.kernel_class == "mixed"]
    assert len(mixed) == 1
    assert sum(name.endswith("_part") for name in mixed[0].ops) == 2


def test_the_plan_of_layer_norm_backward_is_written_as_planned():
    target, hw = resolve_target("nvidia_h200")
    mod = module(layer_norm_backward(), *layer_norm_inputs(8192, 4096, "float16"))
    planned = Planned.of(mod, target, hw, load_policy(None))
    assert planned.write().planned.cuts == {}


def test_numbers_do_not_depend_on_the_size_of_the_mean():
    case = fused_layer_norm(12, 256, "float32", 3, given=False)
    far = dataclasses.replace(
        case, make={0: lambda rng: (100 + rng.standard_normal((12, 256))).astype("float32")}
    )
    func = far.func()
    program = analyze(func)
    kernel = emit_mixed(program, mixed_configs(program, H200)[0], H200)
    arrays = far.arrays()
    outputs = outputs_of(func, len(arrays))
    run_cuda_on_cpu(kernel, [*arrays, *outputs])
    for got, expected in zip(outputs, far.expected(arrays), strict=True):
        assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


def test_the_finishing_sums_of_two_parameters_share_a_kernel_with_the_right_numbers():
    def emit(bb, a, b):
        sums = [bb.emit(op.sum(t, axis=[0])) for t in (a, b)]
        return relax.Tuple([bb.emit(op.astype(total, "float16")) for total in sums])

    inputs = (((24, 64), "float32"), ((24, 64), "float32"))
    case = Case("finish", emit, inputs, lambda a, b: [a.sum(0), b.sum(0)])
    func = case.func()
    program = analyze(func)
    kernel = emit_column(program, column_configs(program, H200)[0], H200)
    assert_right(case, func, kernel)


def test_statistics_of_shifted_columns_have_the_right_numbers_on_the_device():
    """The first launch of a GroupNorm over NHWC: shift, two sums over the outer axes."""

    def emit(bb, x):
        first = bb.emit(op.strided_slice(x, [0, 1, 2, 3], [0] * 4, [2, 1, 1, 320], [1, 1, 1, 10]))
        first = bb.emit(op.reshape(bb.emit(op.astype(first, "float32")), (2, 1, 1, 32, 1)))
        wide = bb.emit(op.astype(bb.emit(op.reshape(x, (2, 8, 8, 32, 10))), "float32"))
        shifted = bb.emit(op.subtract(wide, first))
        square = bb.emit(op.multiply(shifted, shifted))
        return relax.Tuple([bb.emit(op.sum(t, axis=[1, 2])) for t in (shifted, square)])

    def reference(x):
        wide = x.reshape(2, 8, 8, 32, 10)
        shifted = wide - wide[:, :1, :1, :, :1]
        return [shifted.sum((1, 2)), (shifted**2).sum((1, 2))]

    case = Case("shifted", emit, (((2, 8, 8, 320), "float16"),), reference)
    func = case.func()
    program = analyze(func)
    kernel = emit_column(program, column_configs(program, H200)[0], H200)
    assert_right(case, func, kernel)


def test_statistics_of_shifted_rows_have_the_right_numbers_on_the_device():
    """The first launch of a batch norm over NCHW: one shift a channel, two sums over h and w."""

    def emit(bb, x):
        first = bb.emit(op.strided_slice(x, [0, 2, 3], [0] * 3, [1] * 3))
        first = bb.emit(op.astype(first, "float32"))
        shifted = bb.emit(op.subtract(bb.emit(op.astype(x, "float32")), first))
        square = bb.emit(op.multiply(shifted, shifted))
        return relax.Tuple([bb.emit(op.sum(t, axis=[2, 3])) for t in (shifted, square)])

    def reference(x):
        shifted = x - x[:1, :, :1, :1]
        return [shifted.sum((2, 3)), (shifted**2).sum((2, 3))]

    case = Case("shifted rows", emit, (((3, 2, 8, 16), "float16"),), reference)
    func = case.func()
    program = analyze(func)
    kernel = emit_row(program, row_configs(program, H200)[0], H200)
    assert_right(case, func, kernel)


@pytest.mark.one_in(10)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("columns", [1000, 4098, 8191, 16392, 65536])
def test_what_the_class_takes_it_can_write(columns, dtype):
    target, hw = resolve_target("nvidia_h200")
    mod = module(layer_norm_backward(), *layer_norm_inputs(2048, columns, dtype, False))
    planned = Planned.of(mod, target, hw, load_policy(None))
    assert planned.write().planned.cuts == {}


def test_a_sum_of_one_element_is_no_sum_of_columns():
    def emit(bb, x):
        one = bb.emit(op.sum(x, axis=-1, keepdims=True))
        return [one, bb.emit(op.sum(bb.emit(op.subtract(x, one))))]

    p = plan_of(module(emit, ((8, 1024, 1), "float16")), policy="aggressive")
    assert p.launches
    assert all(g.kernel_class != "mixed" for g in p.plan.groups)
