"""What a model leaves in the inputs that it writes into is checked with its outputs."""

import pytest
import torch
import tvm
import tvm_ffi
from torch import nn
from tvm import tirx

import tvm_fusion
from tvm_fusion.check.compiled import judged, plainly_lowered, references_of
from tvm_fusion.check.written_memory import with_written
from tvm_fusion.flow import planned as flow
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.transform.functions.functions import with_functions

SIZE, ROWS = 8, 3


class Cached(nn.Module):
    """Writes rows into a cache, and reads those that it has written, as a causal mask does."""

    def forward(self, x, cache, start):
        places = torch.arange(ROWS) + start
        kept = cache.index_copy_(0, places, x * 2)
        seen = torch.arange(SIZE)[:, None] < start + ROWS
        return torch.where(seen, kept, 0.0).sum(0)


def arguments():
    made = torch.Generator().manual_seed(0)
    return (
        torch.randn(ROWS, 4, generator=made),
        torch.randn(SIZE, 4, generator=made),
        torch.tensor(2),
    )


def stores(change, number=0):
    """A function whose stores into one of its parameters are changed."""

    def changed(func):
        into = func.params[number]

        def store(node):
            return change(node) if node.buffer.same_as(into) else node

        return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.BufferStore, store)]))

    return changed


def elsewhere(node):
    row, *rest = node.indices
    return tirx.BufferStore(node.buffer, node.value, [(row + 1) % SIZE, *rest])


def other_value(node):
    return tirx.BufferStore(node.buffer, node.value + tirx.const(0.01, "float32"), node.indices)


def neighbour_too(node):
    _, *rest = node.indices
    last = tirx.BufferStore(node.buffer, node.value, [tirx.const(SIZE - 1, "int64"), *rest])
    return tirx.SeqStmt([node, last])


def one_left_out(node):
    _, *rest = node.indices
    return tirx.IfThenElse(rest[0] > 0, node, None)


WRONG = {f.__name__: f for f in (elsewhere, other_value, neighbour_too, one_left_out)}


def planted(monkeypatch, change, name="write", number=0):
    """Materialized modules whose functions of a name are changed in what they store into a
    parameter: by default, those that write in place.
    """
    materialize, done = flow.materialize, []

    def wrong(*args):
        found = materialize(*args)
        functions = dict(found.mod.functions_items())
        gvar = next(g for g in functions if g.name_hint.startswith(name))
        functions[gvar] = stores(change, number)(functions[gvar])
        done.append(gvar.name_hint)
        return flow.Materialized(
            with_functions(found.mod, functions), found.groups, found.functions
        )

    monkeypatch.setattr(flow, "materialize", wrong)
    return done


@pytest.fixture(scope="module")
def model():
    return planned_function(Cached(), "llvm", example_inputs=arguments())


@pytest.fixture(scope="module")
def references(model):
    return references_of(model, plainly_lowered(model))


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_write_is_found(wrong, model, references, monkeypatch):
    done = planted(monkeypatch, WRONG[wrong])
    found, _ = judged(model.build().built, references)
    assert done
    assert not found.passed


# Always: a wrong write is found, and what is never written (`test_repair`).
@pytest.mark.nightly
def test_a_write_that_no_output_shows_gives_way(monkeypatch, caplog):
    planted(monkeypatch, neighbour_too)
    given, expected = arguments(), arguments()
    compiled = tvm_fusion.compile(Cached(), "llvm", example_inputs=arguments())
    assert any("wrong numbers" in r.message for r in caplog.records)
    torch.testing.assert_close(compiled(*given), Cached()(*expected))
    torch.testing.assert_close(given[1], expected[1])


def test_a_right_write_passes_and_compiles_no_reference(model):
    fresh = references_of(model, plainly_lowered(model))
    found, _ = judged(model.build().built, fresh)
    assert found.passed
    assert len(found.outputs) == 2
    assert not any("exact" in vars(r._builds) for r in fresh)


def test_a_module_that_writes_nothing_stays_as_it_is():
    mod = tvm.IRModule({"main": tvm.relax.Function([], tvm.relax.const(1.0), is_pure=True)})
    mod = tvm.relax.transform.Normalize()(mod)
    assert with_written(mod) == (mod, ())
