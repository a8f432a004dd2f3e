"""The house in numbers: files, lines, folders, circles of imports, and imports against its layers.

    python -m tests.support.house

Files, lines and folders are those of the package and of the benchmarks, which are not installed.
All imports count, those inside functions and those for type checkers too. The layers are those of
`tvm_fusion/ARCHITECTURE.md`; what it lists as exceptions may go upwards.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

ROOT = Path(__file__).parents[2]
PACKAGE = "tvm_fusion"
ENDS = ("source", "target")
BENCHMARKS = "tests/benchmarks"
PAGE = ROOT / PACKAGE / "ARCHITECTURE.md"


@dataclass(frozen=True, slots=True, order=True)
class Import:
    """One module imports another; `when` is "top", "function" or "types"."""

    source: str
    target: str
    when: str
    line: int


@dataclass(frozen=True, slots=True)
class House:
    """The modules of the package, by dotted name without the package's own, and their imports."""

    files: Mapping[str, Path]
    imports: tuple[Import, ...]

    def folders(self) -> Counter[str]:
        """How many modules lie in each folder."""
        return modules_by_folder(self.files.values())

    def circles(self) -> list[list[str]]:
        """Sets of modules each of which imports all others, through others or not."""
        names = list(self.files)
        row, column = ([names.index(getattr(i, end)) for i in self.imports] for end in ENDS)
        shape = len(names), len(names)
        graph = csr_matrix((np.ones(len(row)), (row, column)), shape=shape)
        _, component = connected_components(graph, connection="strong")
        found = [
            [n for n, c in zip(names, component, strict=True) if c == k] for k in set(component)
        ]
        return sorted(sorted(c) for c in found if len(c) > 1)

    def pairs(self, layers: Mapping[str, int]) -> set[frozenset[str]]:
        """Pairs of rooms that import each other."""
        room = {name: room_of(name, layers) for name in self.files}
        ways = {(room[i.source], room[i.target]) for i in self.imports}
        return {frozenset((a, b)) for a, b in ways if a != b and (b, a) in ways}

    def inside_functions(self) -> int:
        """Statements within functions that import modules of the package."""
        return len({(i.source, i.line) for i in self.imports if i.when == "function"})

    def upwards(self, layers: Mapping[str, int]) -> list[Import]:
        """Imports of what stands above."""
        level = {name: level_of(name, layers) for name in self.files}
        return [i for i in self.imports if level[i.target] < level[i.source]]


def read_house(root: Path = ROOT) -> House:
    """The house as it stands on disk."""
    paths = sorted((root / PACKAGE).rglob("*.py"))
    files = {_name(path.relative_to(root / PACKAGE)): path for path in paths}
    found = (i for name, path in files.items() for i in _imports(name, path, files))
    return House(files, tuple(sorted(set(found))))


def benchmarks() -> list[Path]:
    """The modules of the benchmarks, and the tests of them."""
    return sorted((ROOT / BENCHMARKS).rglob("*.py"))


def modules_by_folder(paths: Iterable[Path]) -> Counter[str]:
    """How many of some modules lie in each folder."""
    return Counter(str(path.parent.relative_to(ROOT)) for path in paths)


def roots(path: Path) -> set[str]:
    """The packages that a module imports by their full names."""
    nodes = [node for node, _ in _statements(_tree(path))]
    modules = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    modules += [n.module for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
    return {module.partition(".")[0] for module in modules}


def read_layers(page: str) -> dict[str, int]:
    """The layer of each room that a page names, 1 for the uppermost."""
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", page, re.MULTILINE)
    return {room: int(n) for n, rooms in rows for room in re.findall(r"`([\w.]+)`", rooms)}


def read_exceptions(page: str) -> set[tuple[str, str]]:
    """Imports that a page allows to go upwards: importing and imported module."""
    return set(re.findall(r"^- `([\w.]+)` -> `([\w.]+)`", page, re.MULTILINE))


def level_of(name: str, layers: Mapping[str, int]) -> int:
    """The layer of the longest room that a module lies in."""
    return layers[room_of(name, layers)]


def room_of(name: str, layers: Mapping[str, int]) -> str:
    """The longest room that a module lies in."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        room = ".".join(parts[:length])
        if room in layers:
            return room
    raise LookupError(f"{PAGE.name} has no layer for {name}")


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts) or PACKAGE


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(name: str, path: Path, files: Iterable[str]) -> Iterator[Import]:
    folder = path.relative_to(ROOT).parent.parts
    for node, when in _statements(_tree(path)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for target in _targets(node, folder, files):
            if target in files and target != name:
                yield Import(name, target, when, node.lineno)


def _statements(node: ast.AST, when: str = "top") -> Iterator[tuple[ast.stmt, str]]:
    """The statements of a module at any depth, and when they run; no import is an expression."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        when = "function"
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and when == "top":
        when = "types"
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, part, ()):
            if isinstance(inner, ast.stmt):
                yield inner, when
            yield from _statements(inner, when)


def _targets(
    node: ast.Import | ast.ImportFrom, folder: tuple[str, ...], files: Iterable[str]
) -> Iterator[str]:
    """What a statement imports: a module that it takes by name from a package, or the module."""
    if isinstance(node, ast.Import):
        yield from (_inside(alias.name) for alias in node.names)
        return
    base = folder[: len(folder) - node.level + 1] if node.level else ()
    module = ".".join([*base, *([node.module] if node.module else [])])
    for alias in node.names:
        part = _inside(f"{module}.{alias.name}")
        yield part if part in files else _inside(module)


def _inside(module: str) -> str:
    return module.removeprefix(f"{PACKAGE}.")


def _counts(paths: Iterable[Path]) -> str:
    texts = [path.read_text(encoding="utf-8") for path in paths]
    lines = sum(text.count("\n") for text in texts)
    nodes = sum(1 for text in texts for _ in ast.walk(ast.parse(text)))
    return f"{len(texts)} files, {lines} lines, {nodes} nodes of syntax"


def main() -> None:
    house, page = read_house(), PAGE.read_text(encoding="utf-8")
    own = list(house.files.values())
    suites = [path for path in benchmarks() if not path.name.startswith("test_")]
    for what, paths in {"package": own, BENCHMARKS: suites, "both": own + suites}.items():
        print(f"{what}: {_counts(paths)}")
    for folder, count in modules_by_folder(own + suites).most_common(5):
        print(f"{count:4} files in {folder}")
    print(f"{house.inside_functions()} imports inside functions")
    for circle in house.circles():
        print("circle:", ", ".join(circle))
    layers = read_layers(page)
    for pair in sorted(map(sorted, house.pairs(layers))):
        print("each other:", ", ".join(pair))
    upwards = house.upwards(layers)
    by_rooms = defaultdict(list)
    for i in upwards:
        by_rooms[i.source, i.target].append(i)
    for (source, target), found in sorted(by_rooms.items()):
        print(f"upwards: {source} -> {target} ({', '.join(sorted({i.when for i in found}))})")


if __name__ == "__main__":
    main()
