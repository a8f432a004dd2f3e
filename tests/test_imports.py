"""What a module of the package or of the tests takes from another one is there.

Read off the syntax, so that scripts and nightly tests, which nothing else imports here, are looked
at too: a rename that misses one of them is seen at once.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
OWN = ("tests", "tvm_fusion")
FILES = sorted(path for folder in OWN for path in (ROOT / folder).rglob("*.py"))
GIVEN = {"__doc__", "__file__", "__name__", "__path__"}  # to each module


def name_of(path: Path) -> str:
    """The dotted name of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {name_of(path): path for path in FILES}


@dataclass(frozen=True, slots=True)
class Read:
    """What a module says of names.

    Attributes
    ----------
    bound : at its top level, its imports among them
    imports : line, module, name in it ("" for the module itself), name here
    attributes : line, name, attribute of it
    hidden : names that stand for something else somewhere in the module
    """

    bound: frozenset[str]
    imports: tuple[tuple[int, str, str, str], ...]
    attributes: tuple[tuple[int, str, str], ...]
    hidden: frozenset[str]


def read(text: str, package: str) -> Read:
    """Reads a module of a package; what is kept is small, trees are not."""
    tree = ast.parse(text)
    imports = [i for i in _imports(tree.body, package) if i[1].split(".")[0] in OWN]
    attributes, hidden = [], set()
    # most modules import no module by its name: their expressions need no look
    for node in ast.walk(tree) if any(_names_a_module(i) for i in imports) else ():
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            attributes.append((node.lineno, node.value.id, node.attr))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            hidden.add(node.id)
        elif isinstance(node, ast.arg):
            hidden.add(node.arg)
    return Read(frozenset(_bound(tree.body)), tuple(imports), tuple(attributes), frozenset(hidden))


def _names_a_module(item: tuple[int, str, str, str]) -> bool:
    return f"{item[1]}.{item[2]}" in PATHS


def _imports(body: list[ast.stmt], package: str) -> Iterator[tuple[int, str, str, str]]:
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from ((statement.lineno, a.name, "", "") for a in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            source = _source(statement, package)
            for alias in statement.names:
                yield statement.lineno, source, alias.name, alias.asname or alias.name
        for part in _parts(statement):
            yield from _imports(part, package)


def _parts(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The lists of statements inside a statement."""
    for part in ("body", "orelse", "finalbody"):
        yield getattr(statement, part, [])
    for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
        yield part.body


def _source(node: ast.ImportFrom, package: str) -> str:
    """The module that a `from` names."""
    if not node.level:
        return node.module
    inside = package.split(".")
    inside = inside[: len(inside) - node.level + 1]
    return ".".join([*inside, *filter(None, [node.module])])


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (a.asname or a.name.split(".")[0] for a in statement.names)
        for part in ast.iter_child_nodes(statement):
            if isinstance(part, ast.expr | ast.withitem):
                for node in ast.walk(part):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                        yield node.id
        for part in _parts(statement):
            yield from _bound(part)


@cache
def module(name: str) -> Read:
    path = PATHS[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return read(path.read_text(), package)


def missing(of: Read) -> Iterator[str]:
    """What a module takes from own modules that they do not have."""
    modules = {}
    for line, source, name, here in of.imports:
        inside = f"{source}.{name}"
        if not name or source not in PATHS:
            if source not in PATHS and inside not in PATHS:  # a folder may have no __init__.py
                yield f"line {line}: no module {source}"
        elif inside in PATHS and name not in module(source).bound:
            modules[here] = inside
        elif name not in module(source).bound | GIVEN and not _is_folder(inside):
            yield f"line {line}: {source} has no {name}"
    for line, name, attribute in of.attributes:
        source = None if name in of.hidden else modules.get(name)
        if source and attribute not in module(source).bound | GIVEN | _submodules(source):
            yield f"line {line}: {source} has no {attribute}"


def _is_folder(name: str) -> bool:
    return any(other.startswith(f"{name}.") for other in PATHS)


def _submodules(name: str) -> set[str]:
    start = f"{name}."
    return {p.removeprefix(start).split(".")[0] for p in PATHS if p.startswith(start)}


def test_what_modules_take_from_each_other_is_there():
    found = {name: list(missing(module(name))) for name in PATHS}
    assert {name: what for name, what in found.items() if what} == {}


def test_what_is_not_there_is_found():
    text = (
        "import tests.support.graphs, tests.grphs\n"
        "from tests.support import graphs, cuda_on_cpu as emulator\n"
        "from .graphs import module, modules\n"
        "from tvm_fusion.graphs import module\n"
        "def late():\n"
        "    from tvm_fusion import compile, no_such\n"
        "    emulator.FLAGS, emulator.no_such, graphs.no_such\n"
        "def hides(graphs): ...\n"
    )
    assert list(missing(read(text, "tests.support"))) == [
        "line 1: no module tests.grphs",
        "line 3: tests.support.graphs has no modules",
        "line 4: no module tvm_fusion.graphs",
        "line 6: tvm_fusion has no no_such",
        "line 7: tests.support.cuda_on_cpu has no no_such",
    ]
