"""Choices of kernel classes: each is a kernel of its own, and what is surely faster is taken."""

import random
from statistics import median

import pytest
import tvm_ffi
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.kernels.registry import family
from tvm_fusion.tuning.database.trial import Trial
from tvm_fusion.tuning.session.choices import (
    CLASS_CHOICE,
    DEFAULT,
    chosen,
    class_choices,
    config_of,
)
from tvm_fusion.tuning.session.tasks import without_stamps, workload_of

from ..support.kernel_cases import chain, fuse

H200 = load_profile("nvidia_h200")
POLICY = load_policy("default")


def softmax(bb, x):
    return op.nn.softmax(x)


def turned(bb, x, y):
    return op.add(bb.emit(op.permute_dims(x, [1, 0])), y)


def turned_twice(bb, x):
    return op.permute_dims(bb.emit(op.exp(bb.emit(op.permute_dims(x, [1, 0])))), [1, 0])


def beside_its_transpose(bb, x, y):
    """The program itself wants no tiles, its sibling does."""
    return relax.Tuple([bb.emit(op.exp(x)), bb.emit(op.permute_dims(bb.emit(op.exp(y)), [1, 0]))])


def column_sums(bb, x):
    return op.sum(bb.emit(op.astype(x, "float32")), axis=0)


def rows_and_columns(bb, x):
    wide = bb.emit(op.astype(x, "float32"))
    rows = bb.emit(op.sum(wide, axis=1, keepdims=True))
    columns = bb.emit(op.sum(bb.emit(op.reshape(wide, (16, 64, 512))), axis=1))
    return relax.Tuple([bb.emit(op.multiply(wide, rows)), columns])


def product(bb, x, y):
    return op.matmul(x, y)


def of(shape, dtype="float16"):
    return shape, dtype


CASES = {
    "pointwise": ("pointwise", chain, of((64, 512))),
    "odd rows": ("pointwise", chain, of((64, 509))),
    "transpose": ("transpose", turned, of((256, 512)), of((512, 256))),
    "transposes that cancel": ("transpose", turned_twice, of((256, 512))),
    "sibling of a transpose": ("transpose", beside_its_transpose, of((256, 512)), of((256, 512))),
    "short rows": ("row", softmax, of((4096, 100))),
    "rows": ("row", softmax, of((4096, 4096))),
    "odd rows, streamed": ("row", softmax, of((64, 5003))),
    "long rows": ("row", softmax, of((64, 65536))),
    "one wide row": ("row", softmax, of((1, 3), "float32")),
    "column": ("column", column_sums, of((1024, 512))),
    "mixed": ("mixed", rows_and_columns, of((1024, 512))),
    "products on CUDA cores": ("gemm", product, of((64, 48), "float32"), of((48, 80), "float32")),
    "product of one row": ("gemm", product, of((1, 512)), of((512, 256))),
    "product": ("gemm", product, of((512, 256)), of((256, 512))),
}


# A case of each class, and of rows in memory and streamed; all in the nightly run.
OFTEN = ("pointwise", "transpose", "rows", "odd rows, streamed", "column", "mixed", "product")


@pytest.fixture(
    params=[n if n in OFTEN else pytest.param(n, marks=pytest.mark.nightly) for n in CASES]
)
def workload(request):
    name, emit, *inputs = CASES[request.param]
    return workload_of(fuse(emit, *inputs), name, POLICY)


def written(workload, config):
    name = str(workload.attrs["tvm_fusion.class"])
    kernel = family(name).write(without_stamps(workload), H200, POLICY, config)
    return tvm_ffi.structural_hash(kernel)


@pytest.mark.parametrize("most", [8, pytest.param(None, marks=pytest.mark.nightly)])
def test_every_choice_is_another_kernel(workload, most):
    choices = class_choices(workload, H200, POLICY)
    choices = choices[:: -(-len(choices) // (most or len(choices)))]  # from the first to the last
    assert len(choices) > 1
    kernels = {}
    for choice, config in choices:
        kernels.setdefault(written(workload, config), []).append(choice.text)
    assert [texts for texts in kernels.values() if len(texts) > 1] == []


def test_default_is_the_first_configuration(workload):
    (default, none), *others = class_choices(workload, H200, POLICY)
    assert (default.text, none) == (DEFAULT, None)
    name = str(workload.attrs["tvm_fusion.class"])
    first = family(name).ranked(without_stamps(workload), H200, POLICY)[0][1]
    assert written(workload, None) == written(workload, first)
    assert default.like not in {choice.text for choice, _ in others}
    assert config_of(workload, default.like, H200, POLICY) is None


def test_transposes_offer_tiles_where_a_load_is_worth_one():
    def kinds(case):
        name, emit, *inputs = CASES[case]
        found = class_choices(workload_of(fuse(emit, *inputs), name, POLICY), H200, POLICY)
        return {type(config).__name__ for _, config in found[1:]}

    assert kinds("transpose") == {"TransposeConfig", "DirectConfig"}
    assert kinds("transposes that cancel") == {"PointwiseConfig"}
    assert kinds("sibling of a transpose") == {"PointwiseConfig"}


# ---- which choice is taken

FAST = "Way(way=fast)"


def trial(text, us, spread=0.0, count=45, error=0.0):
    """A trial whose samples have this mean and standard deviation."""
    draw = random.Random(text)
    samples = tuple(draw.gauss(us, spread) for _ in range(count)) if spread else (us,) * count
    return Trial(CLASS_CHOICE, text, "ok", median(samples), 0.0, samples, error)


@pytest.mark.parametrize(
    ("us", "spread", "taken"),
    [
        (9.0, 0.1, FAST),
        (9.95, 0.0, DEFAULT),  # faster by less than is asked for
        (9.8, 1.0, DEFAULT),  # the noise explains it
        (9.8, 0.1, FAST),
        (11.0, 0.1, DEFAULT),
    ],
)
def test_a_choice_has_to_be_surely_faster(us, spread, taken):
    trials = [trial(DEFAULT, 10.0, spread), trial(FAST, us, spread)]
    assert chosen(trials, 0.01).text == taken


def test_the_fastest_of_those_that_surely_are():
    trials = [trial(DEFAULT, 10.0, 0.1), trial(FAST, 9.5, 0.1), trial("Way(way=noisy)", 9.4, 2.0)]
    assert chosen(trials, 0.01).text == FAST


def test_finalists_count_and_short_trials_do_not():
    trials = [trial(DEFAULT, 10.0), trial(FAST, 5.0, count=9), trial("Way(way=final)", 9.0)]
    assert chosen(trials, 0.01).text == "Way(way=final)"


def test_one_sample_is_not_sure():
    trials = [trial(DEFAULT, 10.0, count=1), trial(FAST, 5.0, count=1)]
    assert chosen(trials, 0.01).text == DEFAULT


def test_numbers_that_nobody_compared_do_not_count():
    assert chosen([trial(DEFAULT, 10.0), trial(FAST, 5.0, error=None)], 0.01).text == DEFAULT
    assert chosen([trial(DEFAULT, 10.0, error=None), trial(FAST, 5.0)], 0.01) is None
    assert chosen([trial(FAST, 5.0)], 0.01) is None


def test_only_times_without_a_comparison_are_unchecked():
    found = [trial(FAST, 5.0), trial(FAST, 5.0, error=None), Trial(CLASS_CHOICE, FAST, "crash")]
    assert [t.checked for t in found] == [True, False, True]
