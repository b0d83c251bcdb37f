"""The layers of the package, and who imports whom. Standard library only.

A module imports its own package and packages of earlier entries of `LAYERS`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "fms_fsdp"
ENTRY = "main_training.py"
# Packages of one entry do not import one another.
LAYERS = [
    ["errors", "process"],
    ["compiler", "console", "files", "packages"],
    ["logs", "versions"],
    ["config"],
    ["launch"],
    ["distributed"],
    ["tokenizers"],
    ["data"],
    ["models"],
    ["parallel", "optim"],
    ["state"],
    ["predict"],
    ["checkpoint"],
    ["hf"],
    ["metrics"],
    ["run"],
    ["plan"],
    ["evaluate", "generate", "distill"],
    ["samples"],
    ["train"],
    ["stages"],
    ["prepare"],
    ["tools"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Packages of optional components. Code of a later layer imports them anywhere; any code may import
# those of this table inside the function that uses the component. A default run imports none (tests/run/test_no_part.py).
OPTIONAL = ("tools", "prepare", "hf", "generate", "samples", "distill")
IN_FUNCTIONS = {
    ("models", "hf"),
    ("run", "hf"),
    ("run", "samples"),
    ("run", "distill"),
    ("plan", "hf"),
    ("__init__", "generate"),
    ("train", "samples"),
    ("stages", "hf"),
    ("stages", "samples"),
    ("stages", "distill"),
}


def python_files(*folders: str) -> list[Path]:
    """Returns the Python files below the folders, sorted; a folder may be a file."""
    found = set[Path]()
    for folder in map(ROOT.joinpath, folders):
        found |= {folder} if folder.is_file() else set(folder.rglob("*.py"))
    return sorted(found)


def module_file(name: str, root: Path | None = None) -> Path | None:
    """Returns the file of a dotted module name below the root, or None if there is none."""
    stem = (root or ROOT).joinpath(*name.split("."))
    files = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((path for path in files if path.is_file()), None)


def module_name(file: Path) -> str:
    """Returns the dotted name of a file of the project."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def unit(path: Path) -> str:
    """Returns the package or module directly below the project's package that a file belongs to."""
    return path.relative_to(ROOT / PACKAGE).with_suffix("").parts[0]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path, root: Path | None = None) -> frozenset[str]:
    """Returns the full names of the modules that a file imports, in functions too.

    Relative imports are resolved below the root, by default the project's. Allowed imports of
    optional packages inside functions or under `if TYPE_CHECKING:` do not count. A string that
    names a module of the package, such as "fms_fsdp.train:train", counts; so does an f-string such
    as f"fms_fsdp.tools.{name}", as every module of that package.
    """
    names = set[str]()
    for node, is_late in _nodes(parsed(path)):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module)) if is_late and _may_be_late(path, module):
                continue
            case ast.ImportFrom():
                module = _absolute(node, path, root or ROOT)
                names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
            case ast.Constant(value=str(text)) if re.fullmatch(rf"{PACKAGE}(\.\w+)+(:\w+)?", text):
                names.add(text.partition(":")[0])
            case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]) if re.fullmatch(
                rf"{PACKAGE}(\.\w+)+\.", text
            ):
                names |= {module_name(file) for file in python_files(text.replace(".", "/"))}
    return frozenset(names)


def _nodes(node: ast.AST, is_late: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yields the nodes below one, and whether each is inside a function or under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        child_is_late = is_late or _makes_late(child)
        yield child, child_is_late
        yield from _nodes(child, child_is_late)


def _makes_late(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


def _may_be_late(path: Path, module: str) -> bool:
    """Returns whether a file may import this module inside a function, whatever its layer."""
    _, _, package = module.partition(f"{PACKAGE}.")
    package = package.partition(".")[0]
    in_package = path.is_relative_to(ROOT / PACKAGE)
    return (unit(path) if in_package else path.stem, package) in IN_FUNCTIONS


def _absolute(node: ast.ImportFrom, path: Path, root: Path) -> str:
    """Returns the module of a `from` import with its leading dots resolved."""
    above = path.relative_to(root).parent.parts if node.level else ()
    return ".".join([*above[: len(above) + 1 - node.level], *filter(None, [node.module])])


def import_closure(entry: Path, root: Path | None = None) -> set[Path]:
    """Returns the entry and all files below the root that it imports, directly or indirectly.

    The `__init__.py` files of their folders are included, because Python runs them first.
    """
    root = root or ROOT
    found, waiting = set[Path](), [entry]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            files = [module_file(name, root) for name in imported(path, root)]
            files += [root / f / "__init__.py" for f in path.relative_to(root).parents[:-1]]
            waiting += [file for file in files if file is not None and file.is_file()]
    return found


def upward_imports(path: Path) -> Iterator[str]:
    """Yields a line for each import of a file that LAYERS does not allow."""
    own = unit(path)
    if own == "__init__":
        return
    for name in sorted(imported(path)):
        other = f"{name}.".split(".")[1] if name.startswith(f"{PACKAGE}.") else ""
        if other in LEVEL and other != own and LEVEL[other] >= LEVEL.get(own, -1):
            yield f"{path.relative_to(ROOT)}: {own} must not import {name}, a later or equal layer"


def broken_layers() -> Iterator[str]:
    """Yields a line for each import that points upward, and for each unit without a layer."""
    files = python_files(PACKAGE)
    for name in sorted({unit(path) for path in files} - {"__init__"} - LEVEL.keys()):
        yield f"{PACKAGE}/{name}: must have a place in LAYERS (tests/layers.py)"
    for path in files:
        yield from upward_imports(path)
    for path in sorted(import_closure(ROOT / ENTRY)):
        if path.is_relative_to(ROOT / PACKAGE) and unit(path) in OPTIONAL:
            yield f"{path.relative_to(ROOT)}: must not be imported by {ENTRY}"
