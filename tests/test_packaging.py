"""The wheel, the version pins and the cost of importing the package."""

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tvm_fusion import _pins, _start
from tvm_fusion._version import __version__
from tvm_fusion.config import load_policy, load_profile

ROOT = Path(__file__).parent.parent
MODULES = 400  # of 755; 393 when this was written


def run(*command: str, **options) -> str:
    """Run a Python command outside the checkout and return its output."""
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the sources: setuptools writes build/ beside setup.py."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    copy_sources(source)
    run("-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(folder))
    (path,) = folder.glob("*.whl")
    return path


def copy_sources(destination: Path) -> None:
    for pattern in (
        "setup.py",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "configs/*",
        "tvm_fusion/**/*",
    ):
        for file in ROOT.glob(pattern):
            if file.is_file() and "__pycache__" not in file.parts:
                copy = destination / file.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(file.read_bytes())


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel unpacked, as pip would lay it out."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_holds_every_module_of_the_package(installed):
    modules = {p.relative_to(ROOT) for p in (ROOT / "tvm_fusion").rglob("*.py")}
    assert {p.relative_to(installed) for p in installed.rglob("*.py")} == modules


def test_the_wheel_holds_configs_typing_marker_and_licence(installed):
    shipped = {p.name for p in (installed / "tvm_fusion" / "configs").iterdir()}
    assert shipped == {p.name for p in (ROOT / "configs").iterdir()}
    assert (installed / "tvm_fusion" / "py.typed").is_file()
    (licence,) = installed.rglob("LICENSE")
    assert "Apache License" in licence.read_text()


def test_the_wheel_holds_the_page_of_reports_and_the_licence_of_what_it_uses(installed):
    pages = Path("tvm_fusion/report/html")
    data = {p.relative_to(ROOT) for p in (ROOT / pages).rglob("*.*") if p.suffix != ".pyc"}
    assert {pages / "page" / "app.js", pages / "vendor" / "dagre.LICENSE.txt"} < data
    assert {p.relative_to(installed) for p in (installed / pages).rglob("*.*")} == data


@pytest.mark.usefixtures("no_torch")
def test_the_installed_package_finds_its_configs(installed):
    code = "from tvm_fusion.config import load_profile as f; import tvm_fusion.config as c;"
    output = run("-c", f"{code} print(f('h200').num_sms, c.__file__)", cwd=installed)
    assert output.split()[0] == "132"
    assert str(installed) in output


def test_the_metadata_names_licence_python_and_entry_point(installed):
    (info,) = installed.glob("*.dist-info")
    dist = metadata.Distribution.at(info)
    assert dist.version == __version__
    assert dist.metadata["Requires-Python"] == ">=3.11"
    licence = dist.metadata["License-Expression"] or dist.metadata["License"]
    assert licence == "Apache-2.0"
    (script,) = dist.entry_points.select(group="console_scripts")
    assert (script.name, script.value) == ("tvm-fusion", "tvm_fusion.__main__:main")
    assert {"torch", "onnx", "report", "test"} <= set(dist.metadata.get_all("Provides-Extra"))


def test_the_wheel_requires_the_pinned_versions_and_no_gpu_libraries(installed):
    (info,) = installed.glob("*.dist-info")
    required = [r for r in metadata.Distribution.at(info).requires if "extra ==" not in r]
    assert "apache-tvm[popen-pool]==0.27.0.post1" in required
    assert "apache-tvm-ffi<0.1.15,>=0.1.14.post0" in required
    assert not [r for r in required if r.startswith(("xgboost=", "xgboost>", "torch", "nvidia"))]
    assert "xgboost" not in required


def test_a_source_checkout_finds_the_configs_beside_the_package():
    assert load_profile("llvm").kind == "llvm"
    assert load_policy("default").name == "default"
    assert tomllib.loads((ROOT / "configs" / "llvm_cpu.toml").read_text())["name"] == "llvm_cpu"


def test_the_installed_versions_are_the_pinned_ones():
    _pins.check()


@pytest.mark.parametrize(
    ("tvm", "ffi"),
    [
        ("0.26.0", "0.1.14.post1"),
        ("0.27.0", "0.1.14.post1"),
        (None, None),
        (_pins.TVM_VERSION, None),
        (_pins.TVM_VERSION, "0.1.13"),
        (_pins.TVM_VERSION, "0.1.14"),
        (_pins.TVM_VERSION, "0.1.15"),
        (_pins.TVM_VERSION, "0.1.15rc1"),
        (_pins.TVM_VERSION, "0.2.0.post0"),
        (_pins.TVM_VERSION, "unknown"),
    ],
)
def test_other_versions_are_refused_with_the_command_that_repairs_them(monkeypatch, tvm, ffi):
    versions = {"apache-tvm": tvm, "apache-tvm-ffi": ffi}
    monkeypatch.setattr(_pins, "_installed", versions.get)
    with pytest.raises(
        ImportError, match=r"python -m pip install 'apache-tvm\[popen-pool\]==0\.27"
    ):
        _pins.check()


@pytest.mark.parametrize("ffi", ["0.1.14.post0", "0.1.14.post1", "0.1.14.post12"])
def test_every_ffi_within_the_pins_is_accepted(monkeypatch, ffi):
    versions = {"apache-tvm": _pins.TVM_VERSION, "apache-tvm-ffi": ffi}
    monkeypatch.setattr(_pins, "_installed", versions.get)
    _pins.check()


def without_packages(*arguments: str) -> subprocess.CompletedProcess:
    """The command line in a Python that has the standard library only."""
    command = [sys.executable, "-S", "-m", "tvm_fusion", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arguments", ["--version", "--help", "compile --help", "tune --help"])
def test_help_and_version_need_no_tvm(arguments):
    done = without_packages(*arguments.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{__version__}\n" or done.stdout.startswith("usage: tvm_fusion")


@pytest.mark.parametrize("command", ["compile --demo", "tune --demo --work-dir none", "calibrate"])
def test_without_tvm_a_command_says_in_a_line_what_to_install(command):
    done = without_packages(*command.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"tvm_fusion: error: .*found apache-tvm not installed.* "
        r"Repair: python -m pip install 'apache-tvm\[popen-pool\]==.*\n",
        done.stderr,
    )


def test_without_tvm_the_import_fails_with_the_same_words():
    command = [sys.executable, "-S", "-c", "import tvm_fusion"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stderr.splitlines()[-1].startswith("ImportError: tvm_fusion needs apache-tvm ")


@pytest.mark.parametrize(
    ("original", "arguments", "command"),
    [
        ("python -m tvm_fusion compile x", "-m compile x", True),
        ("python -Im tvm_fusion compile x", "-m compile x", True),
        ("python -mtvm_fusion compile x", "-m compile x", True),
        ("python -m pytest tvm_fusion", "-m tvm_fusion", False),
        ("python -m tvm_fusion.other x", "-m x", False),
        ("python /bin/tvm-fusion x", "/bin/tvm-fusion x", True),
        ("python tvm_fusion.py", "tvm_fusion.py", False),
        ("python -c pass --multiprocessing-fork", "/bin/tvm-fusion x", False),  # its child
        ("python", "a b c", False),
    ],
)
def test_the_command_line_knows_itself(monkeypatch, original, arguments, command):
    monkeypatch.setattr(sys, "orig_argv", original.split())
    monkeypatch.setattr(sys, "argv", arguments.split())
    assert _start.is_command() is command


def test_importing_the_package_imports_little_beside_tvm():
    """No optional package, and about a third of its own modules."""
    code = (
        "import sys, tvm; before = set(sys.modules); import tvm_fusion;"
        " print(*(sys.modules.keys() - before))"
    )
    loaded = run("-c", code, cwd=ROOT).split()
    assert {name.partition(".")[0] for name in loaded} <= {"tvm_fusion", "tomllib"}
    assert len(loaded) < MODULES


def test_ci_runs_the_second_command_of_the_readme_as_it_stands():
    commands = [
        line.strip()
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith("    pip install")
    ]
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_every_file_that_the_readme_links_to_exists():
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []
