"""Errors say what, where, why, and what to do.

Every message that the package raises is read off its syntax; a table provokes those that users of
the command line meet first.
"""

import ast
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import onnx
import pytest
import tvm
from onnx import TensorProto, helper

from tests.profile.test_profile import two_layers
from tvm_fusion import cli
from tvm_fusion.errors import BAD_INPUT

PACKAGE = Path(__file__).parent.parent / "tvm_fusion"
# What kernel writers tell the compiler, which nobody sees as an error.
INTERNAL = {"Unsupported", "TooDeep"}
VERBS = (
    "add|ask|begin|build|call|carry|check|choose|compile|copy|decorate|end|export|fix|free|give|"
    "install|keep|leave|load|look|make|measure|mend|merge|move|name|open|pass|pip|plan|"
    "put|refit|return|run|save|schedule|set|take|trace|try|tune|use|wait|wrap|write"
)
# A clause that begins with a verb, a list of what there is, or what was expected.
ACTION = re.compile(
    rf"(?:^|[;:,.(]\s|\bor\s|\band\s)`?(?:then )?(?:{VERBS})\b"
    r"|\bknown(?::| are\b)|\bthere (?:is|are)\b|did you mean|\bmust be\b|\bha(?:s|ve) to be\b"
    r"|\bis none of\b|\bexpected\b|\btakes\b|\bneeds\b|\bthe same command goes on\b",
    re.IGNORECASE,
)
# Names of what stands for such a list in a message.
HINTS = {"hint", "near", "nearest", "expected", "there"}


def messages(tree: ast.Module, classes: set[str]) -> Iterator[tuple[int, str]]:
    """Line and message of each `raise` of some classes, or of one that is called `error`; what is
    put into a message in braces.
    """
    raised, values = [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            if ast.unparse(node.exc.func) in {*classes, "error"}:
                raised.append(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.JoinedStr | ast.BinOp):
            values[ast.unparse(node.targets[0])] = template(node.value, {})
    for node in raised:
        yield node.lineno, template(node.exc.args[0], values)


def template(node: ast.expr, values: dict[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part, values) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp):
        return template(node.left, values) + template(node.right, values)
    if isinstance(node, ast.IfExp):
        return template(node.body, values) + template(node.orelse, values)
    if isinstance(node, ast.Name) and "{" in values.get(node.id, ""):
        return values[node.id]
    return f"{{{ast.unparse(node)}}}"


def has_action(message: str) -> bool:
    """Whether a message says what to do; one that is all of another error's does."""
    if not re.sub(r"\{[^{}]*\}", "", message).strip():
        return True
    named = set(re.findall(r"\w+", " ".join(re.findall(r"\{[^{}]*\}", message))))
    return bool(ACTION.search(message)) or bool(named & HINTS)


def test_each_message_of_the_package_says_what_to_do():
    errors = ast.parse((PACKAGE / "errors.py").read_text())
    classes = {node.name for node in errors.body if isinstance(node, ast.ClassDef)} - INTERNAL
    found = {
        f"{path.relative_to(PACKAGE)}:{line}": message
        for path in sorted(PACKAGE.rglob("*.py"))
        if "raise " in (text := path.read_text(encoding="utf-8"))
        for line, message in messages(ast.parse(text), classes)
    }
    assert len(found) > 250
    assert {where: text for where, text in found.items() if not has_action(text)} == {}
    assert {where: text for where, text in found.items() if len(text.split()) < 3} == {
        where: text for where, text in found.items() if not re.sub(r"\{[^{}]*\}", "", text).strip()
    }


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("cannot read {path}", False),
        ("{path} is no folder", False),
        ("{path}: the network is down", False),
        ("cannot read {path}: {why}; make it readable", True),
        ("unknown target {name}{nearest(name, known)}", True),
        ("input {name}: expected float32, got {dtype}", True),
        ("{answer.why}", True),
    ],
)
def test_a_message_without_an_action_is_found(message, says):
    assert has_action(message) is says


# ---- What users of the command line meet.


def model_of(nodes, out, **inputs) -> onnx.ModelProto:
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()]
    result = [helper.make_tensor_value_info("out", TensorProto.FLOAT, out)]
    graph = helper.make_graph(nodes, "graph", info, result)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with broken models, plans, policies and profiles, and a whole model."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "empty.onnx").touch()
    (folder / "damaged.onnx").write_bytes(b"\x08\x99this is no protobuf")
    relu = [helper.make_node("Relu", ["missing"], ["out"])]
    det = [helper.make_node("Det", ["x"], ["out"])]
    (folder / "invalid.onnx").write_bytes(model_of(relu, [4], x=[4]).SerializeToString())
    (folder / "det.onnx").write_bytes(model_of(det, [], x=[4, 4]).SerializeToString())
    (folder / "damaged.pt2").write_bytes(b"no archive")
    texts = {
        "model.json": tvm.ir.save_json(two_layers()),
        "number.json": tvm.ir.save_json(tvm.runtime.convert([1])),
        "damaged.json": "{",
        "nothing.py": "x = 1\n",
        "raises.py": "raise ValueError('no')\n",
        "syntax.py": "def f(:\n",
        "words.txt": "words\n",
        "plan.json": "{}",
        "list.json": "[]",
        "other.json": json.dumps({"groups": "none"}),
        "policy.toml": 'name = "mine"\nmin_gian = 1\n',
        "broken.toml": "name = \n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "folder.onnx").mkdir()
    return folder


# Arguments, and what the message names. Files stand in the folder where the command runs.
CASES = [
    ("compile", "COMMAND.*compile|model --demo"),
    ("compile none.onnx", "none.onnx"),
    ("compile folder.onnx", "folder.onnx"),
    ("compile words.txt", r"words.txt.*'.txt'.*\.onnx"),
    ("compile empty.onnx", "empty.onnx: holds no graph"),
    ("compile damaged.onnx", "damaged.onnx: is no ONNX model"),
    ("compile invalid.onnx", "invalid.onnx: onnx.checker"),
    ("compile det.onnx", "det.onnx: .*Det"),
    ("compile damaged.pt2", "damaged.pt2"),
    ("compile damaged.json", "damaged.json: is no JSON of TVM"),
    ("compile number.json", "number.json: holds a"),
    ("compile nothing.py", "nothing.py: defines no IRModule"),
    ("compile raises.py", "raises.py:1: .*ValueError: no"),
    ("compile syntax.py", "syntax.py:1: .*SyntaxError"),
    ("compile model.json --target h21", "unknown target 'h21'"),
    ("compile model.json --target cuda", "no CUDA device"),
    ("compile model.json --target none.toml", "none.toml"),
    ("compile model.json --target broken.toml", "broken.toml: not a TOML file"),
    ("compile model.json --policy min_gian=1", "min_gian.*did you mean 'min_gain'"),
    ("compile model.json --policy min_gain=high", "min_gain.*expected float"),
    ("compile model.json --policy agressive", "agressive.*did you mean 'aggressive'"),
    ("compile model.json --policy policy.toml", "min_gian"),
    ("compile model.json --policy rounding=up", "rounding = 'up' is none of"),
    ("compile model.json --policy exact,min_gain=1", "--policy: expected KEY=VALUE, got 'exact'"),
    ("compile model.json --plan none.json", "none.json"),
    ("compile model.json --plan words.txt", "words.txt"),
    ("compile model.json --plan plan.json", "plan.json"),
    ("compile model.json --plan list.json", "list.json"),
    ("compile model.json --plan other.json", "other.json"),
    ("compile model.json --peers tvm,torhc", "unknown peer 'torhc'; did you mean 'torch'"),
    ("compile model.json --target llvm --cuda-graph", "cuda_graph: the target is llvm"),
    ("compile model.json --budget 5", "--budget.*--measure"),
    ("compile model.json -o none/model.so", "none/model.so"),
    ("compile model.json --database words.txt --target llvm", "words.txt is not a folder"),
    ("compile model.json --database none --target llvm", "there is no database none"),
    ("compile model.json --no-such-option", "--no-such-option"),
    ("verify model.json --output=x", "--output"),
    ("explian model.json", "'explian'"),
    ("explain model.json --target llvm --why lv", "--why"),
    ("explain model.json --target llvm --why lv,gvv", "gvv"),
    ("explain model.json --target llvm --probe", "llvm_cpu is no GPU"),
    ("bench model.json --target h200", "no cuda device"),
    ("profile model.json --target llvm --ncu", "--ncu"),
    ("profile model.json --calls 0", "--calls 0"),
    ("profile model.json --trace none/trace.json", "none/trace.json"),
    ("profile model.json --target h200", "no cuda device"),
    ("calibrate --only bandwith --target llvm", "bandwith"),
    ("calibrate --budget nan --target llvm", "--budget nan"),
    ("calibrate --out none/p.toml --target llvm", "none/p.toml"),
    ("tune model.json", "--work-dir"),
    ("tune model.json --work-dir db --rpc localhost:1", "--rpc needs --key"),
    ("tune model.json --work-dir db --key k", "--key and --token-file"),
    ("tune model.json --work-dir db --settings none.toml", "none.toml"),
    ("tune --db-check --work-dir none", "none"),
    ("fuzz --target llvm --minutes 0", "--minutes"),
    ("report none.json", "none.json"),
    ("report words.txt", "words.txt"),
]
SAID = re.compile(r"tvm_fusion(?: \w+)?: error: \S.*\n")


@pytest.mark.parametrize(("arguments", "named"), CASES, ids=[words for words, _ in CASES])
def test_what_a_user_did_wrong_is_a_line_that_names_it_and_what_to_do(
    files, monkeypatch, capfd, arguments, named
):
    monkeypatch.chdir(files)
    monkeypatch.delenv("TVM_FUSION_DEBUG", raising=False)
    status = cli.main([*arguments.split(), *(["--quiet"] if " " in arguments else [])])
    out, err = capfd.readouterr()
    assert (status, out) == (BAD_INPUT, "")
    assert SAID.fullmatch(err), err
    assert re.search(named, err), err
    assert has_action(err) or "--help)" in err, err


def test_a_compiler_that_is_missing_is_named_with_what_to_install(monkeypatch):
    from tvm_fusion.errors import BuildError
    from tvm_fusion.runtime.build import cuda_compiler

    monkeypatch.setattr(cuda_compiler.shutil, "which", lambda name: None)
    monkeypatch.setattr(cuda_compiler, "nvrtc_version", lambda: None)
    with pytest.raises(BuildError, match=r"nvcc is not on PATH.*Install the CUDA toolkit"):
        partial(cuda_compiler.find_compiler)()
