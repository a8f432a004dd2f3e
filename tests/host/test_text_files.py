"""Files of users' that cannot be read or written are errors of this package that say why."""

import json
import os
from pathlib import Path

import pytest

from tvm_fusion import InputError, PlanError, cli
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.host.text_files import read_json, read_text, refuse_unwritable
from tvm_fusion.plan.plan import FusionPlan, load_plans
from tvm_fusion.runtime.calls.sidecar import read_sidecar


def missing(path: Path) -> None:
    pass


def folder(path: Path) -> None:
    path.mkdir()


def empty(path: Path) -> None:
    path.touch()


def binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00{}")


def broken(path: Path) -> None:
    path.write_text('{"groups": [1,\n 2')


def other(path: Path) -> None:
    path.write_text('{"something": "else"}')


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


STATES = (missing, folder, empty, binary, broken, other, deep)


READERS = {
    "plan": (".json", load_plans),
    "one plan": (".json", FusionPlan.load),
    "policy": (".toml", load_policy),
    "profile": (".toml", load_profile),
    "module": (".so.json", lambda path: read_sidecar(path.with_suffix(""))),
}
FINE = {("policy", "empty")}  # a policy that changes nothing


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
@pytest.mark.parametrize("what", READERS)
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(what, state, tmp_path):
    suffix, read = READERS[what]
    path = tmp_path / f"file{suffix}"
    if what == "module":
        path.with_suffix("").touch()
    state(path)
    if (what, state.__name__) in FINE:
        assert read(path)
        return
    with pytest.raises(InputError) as error:
        read(path)
    said = str(error.value)
    assert path.name.removesuffix(".json") in said
    assert "\n" not in said
    assert len(said) > len(str(path)) + 10


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (missing, "there is no such plan file"),
        (folder, "is a folder, no plan: name a file in it"),
        (empty, "the plan is empty: write it again"),
        (binary, "no text in UTF-8: byte 0 is 0xff"),
        (broken, "not JSON, so no plan: .* at line 2, column 3"),
        (deep, "nested too deep"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_reason_is_told(state, said, tmp_path):
    path = tmp_path / "plan.json"
    state(path)
    with pytest.raises(PlanError, match=said):
        read_json(path, "plan", PlanError)


def test_a_file_that_may_not_be_read_says_so(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(InputError, match=r"x: the plan cannot be read: Permission denied"):
        read_text(tmp_path / "x", "plan")


WRITERS = {"plan": lambda path: FusionPlan("main", "", "", "", ()).save(path)}


@pytest.mark.parametrize("what", [*WRITERS, "module"])
def test_what_cannot_be_written_is_refused_before_it_is_made(what, tmp_path, monkeypatch):
    write = WRITERS.get(what, lambda path: refuse_unwritable(path, what))
    with pytest.raises(InputError, match=f"cannot write the {what} .*: it is a folder"):
        write(tmp_path)
    with pytest.raises(InputError, match="there is no such directory"):
        write(tmp_path / "nowhere" / "x")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="no permission; name another folder"):
        write(tmp_path / "x")


def test_a_plan_that_is_written_replaces_the_old_one_whole(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text("old")
    FusionPlan("main", "f", "d", "p", ()).save(file)
    assert json.loads(file.read_text())["device"] == "d"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--plan", "{folder}"],
        ["--plan", "{empty}.json"],
        ["--policy", "{folder}/x.toml"],
        ["--target", "{empty}.toml"],
        ["--database", "{empty}.json"],
        ["-o", "{folder}"],
        ["-o", "{empty}.json/x.so"],
    ],
    ids=" ".join,
)
def test_the_command_line_says_it_in_a_line_before_it_reads_the_model(arguments, tmp_path, capsys):
    for suffix in (".json", ".toml"):
        (tmp_path / f"empty{suffix}").touch()
    (tmp_path / "sub").mkdir()
    names = {"folder": tmp_path / "sub", "empty": tmp_path / "empty"}
    given = [argument.format(**names) for argument in arguments]
    assert cli.main(["compile", "--demo", "--peers", "none", *given]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("tvm_fusion: error: ")
    assert str(tmp_path) in said
