"""Checks the rules of the house that the linters do not know, and prints the figures of its size.

    python scripts/house.py            # checks and prints
    python scripts/house.py --write    # also writes the sizes into the pages that show them

Sizes are lines of code: no blank lines, no comments, no docstrings. *extras* and *tools* are the folders of
that name in the package, with what starts the tools, and *core* is its rest with main_training.py. Core
imports neither of them: it loads what a run has chosen by name (fms_fsdp/parts.py). Exit status: 0, or 1 with
one line for each broken rule. docs/development.md tells the rules. Standard library only.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "fms_fsdp"
ENTRY = "main_training.py"
APART = ("extras", "tools")  # folders that core does not import
BUDGETS = {
    "core": 8700,
    "extras": 2900,
    "tools": 3700,
    "axes": 1300,
    "planner": 1340,
}  # what the house is to come to
# what breaks the rule; lower these when the house shrinks
CEILINGS = {"core": 10740, "extras": 3277, "tools": 4720, "axes": 1168, "planner": 1325}
# what only a run with tp, cp or pp loads
AXES = tuple(
    f"parallel/{name}"
    for name in ("tensor", "vocabulary", "context", "tiles", "messages", "pipeline", "rules")
)
AXES += ("models/stages", "predict/shares")
# what only a prediction of speed loads
PLANNER = (
    *(f"planner/{name}" for name in ("__init__", "plan", "search", "choice", "days", "answers")),
    *(f"planner/{name}" for name in ("words", "bars", "auto", "dry_run")),
    *("predict/hardware", "predict/curves", "predict/speed"),
)
LOADED_APART = {"axes": AXES, "planner": PLANNER}
PAGES = ("README.md", "docs/performance.md")  # show the sizes, in hundreds, in the first column of a table
LONGEST_LINE, LONGEST_FUNCTION, LONGEST_FILE = 110, 60, 400
# Who may import whom, from the bottom: a module may import its own unit and the units of earlier lines.
LAYERS = [
    ["errors"],
    ["config", "safe_names", "atomic", "console", "cpu_tuning"],
    ["parts"],
    ["flags"],
    ["runtime"],
    ["mesh"],
    ["sharded"],
    ["data"],
    ["models"],
    ["predict"],
    ["parallel", "optim"],
    ["state", "record"],
    ["checkpoint"],
    ["spec"],
    ["run"],
    ["planner"],
    ["observe"],
    ["evaluate"],
    ["train", "hooks"],
    ["extras"],
    ["tools"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Rooms with lines, functions or files that are still too long, rooms that are still too dense, and types that
# are still defined twice. The lists only shrink.
STILL_LONG: list[str] = []
STILL_DENSE: list[str] = []
STILL_TWICE: set[str] = set()
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
COMMENTS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def python_files(*folders: str) -> list[Path]:
    """The Python files below the folders, sorted; a folder may be a file."""
    found = set[Path]()
    for folder in folders:
        found |= set((ROOT / folder).rglob("*.py")) | (
            {ROOT / folder} if (ROOT / folder).is_file() else set()
        )
    return sorted(found)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_file(name: str, root: Path | None = None) -> Path | None:
    """The file of a dotted name below the root, by default the project's; None where there is none."""
    stem = (root or ROOT).joinpath(*name.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def imported(path: Path, root: Path | None = None) -> set[str]:
    """Full names of the modules that a file imports: at its top, in functions, and by a text.

    Leading dots are resolved below the root, by default the project's. What is imported under `if
    TYPE_CHECKING:` from extras, for names of types, does not count. A text names a module, as
    "fms_fsdp.train" or "fms_fsdp.train:train"; a text that begins with a package, as
    f"fms_fsdp.tools.{name}", counts as all its modules.
    """
    names, for_types = set[str](), set(_for_types(path))
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(of_types)) if node in for_types and of_types.startswith(
                f"{PACKAGE}.extras."
            ):
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
    return names


def _for_types(path: Path) -> Iterator[ast.AST]:
    """What stands under `if TYPE_CHECKING:`."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from ast.walk(node)


def _absolute(node: ast.ImportFrom, path: Path, root: Path) -> str:
    """The module of `from module import …`, its leading dots replaced by the packages of the file."""
    above = path.relative_to(root).parent.parts if node.level else ()
    return ".".join([*above[: len(above) + 1 - node.level], *filter(None, [node.module])])


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def import_closure(entry: Path, root: Path | None = None) -> set[Path]:
    """The entry and all files below the root that it imports, directly or through others.

    The `__init__.py` of the folders that hold them count too: Python runs them first.
    """
    found, waiting = set[Path](), [entry]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            names = imported(path, root)
            waiting += [file for name in names if (file := module_file(name, root)) is not None]
            waiting += [
                file
                for folder in path.relative_to(root or ROOT).parents[:-1]
                if (file := (root or ROOT) / folder / "__init__.py").is_file()
            ]
    return found


def lines_of_code(path: Path) -> int:
    """Lines that hold code: neither blank nor a comment nor part of a docstring."""
    docstrings, code = set[int](), set[int]()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in COMMENTS:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def sizes() -> dict[str, tuple[int, int]]:
    """Lines of code and number of files of each room."""
    rooms: dict[str, list[Path]] = {"core": [ROOT / ENTRY]} | {name: [] for name in [*APART, *LOADED_APART]}
    for path in python_files(PACKAGE):
        rooms[room(path)].append(path)
    return {name: (sum(map(lines_of_code, files)), len(files)) for name, files in rooms.items()}


def room(path: Path) -> str:
    """The room of a file: core, extras, tools, axes or planner; what starts the tools is one."""
    name = str(path.relative_to(ROOT / PACKAGE).with_suffix(""))
    for apart, names in LOADED_APART.items():
        if name in names:
            return apart
    return {"__main__": "tools"}.get(unit(path), unit(path) if unit(path) in APART else "core")


def unit(path: Path) -> str:
    """The package or module directly below the project's package that a file belongs to."""
    return path.relative_to(ROOT / PACKAGE).with_suffix("").parts[0]


def upward_imports(path: Path) -> Iterator[str]:
    """A line for each import of a file that points upward in LAYERS."""
    own = unit(path)
    if own == "__init__":
        return
    for name in sorted(imported(path)):
        other = f"{name}.".split(".")[1] if name.startswith(f"{PACKAGE}.") else ""
        if other in LEVEL and other != own and LEVEL[other] >= LEVEL.get(own, -1):
            yield f"{_shown(path)}: {own} must not import {name}, which stands above or beside it"


def broken_layers() -> Iterator[str]:
    """Imports that point upward, units that have no layer, and what main_training.py must not import."""
    files = python_files(PACKAGE)
    for name in sorted({unit(path) for path in files} - {"__init__"} - LEVEL.keys()):
        yield f"{PACKAGE}/{name}: must have a line in LAYERS (scripts/house.py)"
    for path in files:
        yield from upward_imports(path)
    for path in sorted(import_closure(ROOT / ENTRY)):
        if path.is_relative_to(ROOT / PACKAGE) and unit(path) in APART:
            yield f"{_shown(path)}: must not be imported by what trains"


def long_lines() -> Iterator[str]:
    """Lines over the limit, docstrings, comments and scripts included."""
    scripts = [*(ROOT / "scripts").glob("*.s*"), ROOT / ".ci" / "run"]
    for path in [*python_files(PACKAGE, "main_training.py", "benchmarks", "scripts", "tests"), *scripts]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > LONGEST_LINE:
                yield f"{_shown(path)}:{number}: {len(line)} characters, at most {LONGEST_LINE} fit in a line"


def long_parts() -> Iterator[str]:
    """Functions and files over their limits."""
    for path in python_files(PACKAGE, "main_training.py", "benchmarks", "scripts"):
        count = len(path.read_text().splitlines())
        if count > LONGEST_FILE:
            yield f"{_shown(path)}: {count} lines, at most {LONGEST_FILE} fit in a file"
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > LONGEST_FUNCTION:
                    place = f"{_shown(path)}:{node.lineno}"
                    yield f"{place}: {node.name} has {count} lines, at most {LONGEST_FUNCTION} fit"


def dense_lines() -> Iterator[str]:
    """Comprehensions within a comprehension, and tuples on the left with a slice among them."""
    for path in python_files(PACKAGE, "main_training.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, COMPREHENSIONS):
                if any(isinstance(inner, COMPREHENSIONS) for inner in ast.walk(node) if inner is not node):
                    yield f"{_shown(path)}:{node.lineno}: a comprehension stands within a comprehension"
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                if any(isinstance(part, ast.Slice) for part in ast.walk(node.targets[0])):
                    yield f"{_shown(path)}:{node.lineno}: a slice is assigned to in a tuple"


def types_defined_twice() -> dict[str, list[str]]:
    """Names of classes that stand more than once in the package, with their files."""
    places = defaultdict[str, list[str]](list)
    for path in python_files(PACKAGE):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(_shown(path))
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def broken_rules() -> Iterator[str]:
    """A line for each broken rule."""
    yield from broken_layers()
    yield from (fault for fault in [*long_parts(), *long_lines()] if not fault.startswith(tuple(STILL_LONG)))
    yield from (fault for fault in dense_lines() if not fault.startswith(tuple(STILL_DENSE)))
    for name, files in types_defined_twice().items():
        if name not in STILL_TWICE:
            yield f"class {name}: must be defined once; it stands in {', '.join(files)}"
    for name, (count, _) in sizes().items():
        if count > CEILINGS[name]:
            yield f"{name}: {count:,} lines of code must be at most {CEILINGS[name]:,}"
    for page in map(ROOT.joinpath, PAGES):
        if page.is_file() and with_sizes(page.read_text()) != page.read_text():
            yield f"{_shown(page)}: shows sizes that are not of today; python scripts/house.py --write"


def with_sizes(page: str) -> str:
    """The text of a page with the sizes of today, rounded to hundreds."""
    package = sum(count for count, _ in sizes().values())
    trains = sum(map(lines_of_code, import_closure(ROOT / ENTRY)))
    for name, count in {"package": package, "what starts training imports": trains}.items():
        row = re.escape(f"| lines of code: {name} | ")
        page = re.sub(rf"(?<={row})[\d,]+(?= \|)", f"{round(count, -2):,}", page)
    return page


def figures() -> Iterator[str]:
    """The sizes of today beside their budgets, and what the lists still hold."""
    for name, (count, files) in sizes().items():
        limits = f"budget {BUDGETS[name]:,}, ceiling {CEILINGS[name]:,}"
        yield f"{name}: {count:,} lines of code in {files} files ({limits})"
    lines, parts, dense = list(long_lines()), list(long_parts()), list(dense_lines())
    twice = types_defined_twice()
    yield f"too long: {len(lines)} lines, {len(parts)} functions and files; too dense: {len(dense)} lines"
    yield f"types defined twice: {len(twice)}"
    clean = [room for room in STILL_LONG if not any(fault.startswith(room) for fault in lines + parts)]
    clean += [room for room in STILL_DENSE if not any(fault.startswith(room) for fault in dense)]
    if clean := [*clean, *sorted(STILL_TWICE - twice.keys())]:
        yield f"now clean, take these out of the lists: {', '.join(clean)}"


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def main() -> int:
    """Prints the figures and the broken rules; returns the exit status."""
    if "--write" in sys.argv[1:]:
        for page in map(ROOT.joinpath, PAGES):
            page.write_text(with_sizes(page.read_text()))
    broken = list(broken_rules())
    print("\n".join([*figures(), *broken]))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
