"""Relax scripts, JSON, IRModules, and everything that is no model."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.support.models import run_unfused
from tvm_fusion.errors import FrontendError
from tvm_fusion.frontends import load

SCRIPT = """
from tvm.script import ir as I, relax as R

@I.ir_module
class {name}:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32")) -> R.Tensor(("n", 4), "float32"):
        with R.dataflow():
            y = R.add(x, x)
            R.output(y)
        return y
"""


@I.ir_module
class Doubled:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32")) -> R.Tensor(("n", 4), "float32"):
        with R.dataflow():
            y = R.add(x, x)
            R.output(y)
        return y


@I.ir_module
class Renamed:
    @R.function
    def forward(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        return x


WithConstant = relax.transform.BindParams("main", {"x": np.arange(4, dtype="float32")})(
    tvm.IRModule({"main": Renamed["forward"].with_attr("global_symbol", "main")})
)


@I.ir_module(s_tir=True)
class OnlyTir:
    @T.prim_func(s_tir=True)
    def main(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("copy"):
                vi = T.axis.spatial(4, i)
                y[vi] = x[vi]


@pytest.fixture
def write(tmp_path):
    def write_file(name: str, text: str):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


def test_a_module_is_returned_as_it_is():
    tvm.ir.assert_structural_equal(load(Doubled), Doubled)


def test_a_script_gives_its_module(write):
    mod = load(write("model.py", SCRIPT.format(name="Doubled")))
    tvm.ir.assert_structural_equal(mod, Doubled)


def test_a_script_may_give_its_module_several_names(write):
    path = write("model.py", SCRIPT.format(name="Doubled") + "mod = Doubled\n")
    tvm.ir.assert_structural_equal(load(path), Doubled)


def test_modules_with_an_underscore_do_not_count(write):
    path = write("model.py", SCRIPT.format(name="Doubled") + SCRIPT.format(name="_Helper"))
    tvm.ir.assert_structural_equal(load(path), Doubled)


@pytest.mark.parametrize("mod", [Doubled, WithConstant], ids=["symbolic", "constant"])
def test_what_script_prints_runs_as_a_script(write, mod):
    tvm.ir.assert_structural_equal(load(write("printed.py", mod.script(show_meta=True))), mod)


def test_a_path_may_be_a_string(write):
    tvm.ir.assert_structural_equal(
        load(str(write("model.py", SCRIPT.format(name="Doubled")))), Doubled
    )


def test_json_gives_its_module(write):
    mod = load(write("model.json", tvm.ir.save_json(Doubled)))
    tvm.ir.assert_structural_equal(mod, Doubled)


def test_a_loaded_script_with_a_symbolic_size_runs_for_every_size(write):
    mod = load(write("model.py", SCRIPT.format(name="Doubled")))
    for rows in (1, 7):
        x = np.random.default_rng(rows).random((rows, 4), dtype="float32")
        np.testing.assert_array_equal(run_unfused(mod, x)[0], x + x)


def test_boolean_arithmetic_of_a_given_module_is_made_buildable():
    @I.ir_module
    class Either:
        @R.function
        def main(a: R.Tensor((4,), "bool"), b: R.Tensor((4,), "bool")) -> R.Tensor((4,), "bool"):
            with R.dataflow():
                c = R.add(a, b)
                R.output(c)
            return c

    a, b = np.array([0, 0, 1, 1], "bool"), np.array([0, 1, 0, 1], "bool")
    np.testing.assert_array_equal(run_unfused(load(Either), a, b)[0], a | b)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.py", "x = 1\n", r"empty\.py: defines no IRModule; decorate a class"),
        (
            "two.py",
            SCRIPT.format(name="A") + SCRIPT.format(name="B").replace("R.add", "R.multiply"),
            r"two\.py: defines 2 IRModules \(A, B\); leave one",
        ),
        ("broken.py", "x = = 1\n", r"broken\.py:1: running the script raised SyntaxError"),
        ("raises.py", "\nraise KeyError('k')\n", r"raises\.py:2: .* raised KeyError: 'k'"),
        ("exits.py", "import sys\nsys.exit(3)\n", r"exits\.py:2: .* raised SystemExit"),
        ("broken.json", "{ this is no JSON", r"broken\.json: is no JSON of TVM: .*save_json"),
        ("empty.json", "", r"empty\.json: is no JSON of TVM"),
        ("number.json", tvm.ir.save_json(tvm.tirx.IntImm("int32", 1)), r"holds a IntImm, not an"),
        ("other.json", '{"a": 1}', r"other\.json: is no JSON of TVM"),
        ("model.h5", "", r"model\.h5: unknown kind of model file '\.h5'; known are \.pt2, \.onnx"),
    ],
)
def test_a_file_that_is_no_model_is_refused_in_one_line(write, name, text, message):
    with pytest.raises(FrontendError, match=message) as error:
        load(write(name, text))
    assert "\n" not in str(error.value)


def test_a_script_with_a_type_error_names_the_line(write):
    script = SCRIPT.format(name="Doubled").replace("R.add(x, x)", "R.no_such_operator(x)")
    with pytest.raises(FrontendError, match=r"model\.py:4: running the script raised"):
        load(write("model.py", script))


@pytest.mark.parametrize("name", ["missing.py", "missing.onnx", "missing.pt2", "missing"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(FrontendError, match=rf"{name}: no such file"):
        load(tmp_path / name)


def test_a_folder_is_no_model(tmp_path):
    with pytest.raises(FrontendError, match="not a file"):
        load(tmp_path)


@pytest.mark.parametrize("value", [3, None, ("a", "b", "c"), {"x": 1}])
def test_other_values_are_no_models(value):
    with pytest.raises(FrontendError, match=f"type {type(value).__name__} is no model: give an IR"):
        load(value)


def test_the_only_public_function_is_main():
    loaded = load(Renamed)
    assert [gvar.name_hint for gvar in loaded.get_global_vars()] == ["main"]
    assert loaded["main"].attrs["global_symbol"] == "main"


def test_a_module_of_several_functions_lists_what_it_has():
    several = tvm.IRModule({"forward": Renamed["forward"], "again": again(Renamed["forward"])})
    with pytest.raises(FrontendError, match=r"no function 'main' \(it has again, forward\).*Fuse"):
        load(several)


def again(func: relax.Function) -> relax.Function:
    return relax.utils.copy_with_new_vars(func).with_attr("global_symbol", "again")


def test_a_main_that_is_no_relax_function_is_refused():
    with pytest.raises(FrontendError, match="'main' is a PrimFunc, not a Relax function"):
        load(OnlyTir)


def test_a_module_that_is_not_well_formed_is_refused():
    x, y = (relax.Var(name, relax.TensorType((4,), "float32")) for name in "xy")
    function = relax.Function([x], y, relax.TensorType((4,), "float32"))
    with pytest.raises(FrontendError, match="is not a well-formed Relax module: "):
        load(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}))


def test_example_inputs_only_go_with_a_torch_module():
    with pytest.raises(FrontendError, match=r"only go with a torch\.nn\.Module"):
        load(Doubled, (np.zeros((1, 4)),))
