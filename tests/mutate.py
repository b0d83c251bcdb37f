"""Would the tests notice? Puts one small fault at a time into a copy of the code and runs the quick tests on it.

    bash scripts/mutate.sh --sample=60 --seed=1

    every place where a fault can be put ─ seed ─▶ sample ─▶ copy with the fault ─▶ the tests nearest to it, then all others
                                                             └ the test that fails must pass without the fault

The checkout is read, never written. Each verdict is a line of a file in `--work`, so a run that was stopped goes on where it
was. A survivor either changes no behaviour, which a person must judge, or shows a test that is missing.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEAR_TIMEOUT_S, ALL_TIMEOUT_S = 600, 2400
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "in": "not in"}
ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "//", "&": "|", "|": "&", "<<": ">>", "**": "*"}
QUIET = re.compile(
    r"(runtime\.)?(log|warnings)\.|print\(|show_progress\(|self\._print\("
)  # what is said, not what is done


@dataclass(frozen=True)
class Fault:
    """Characters [start, stop) of a file, and what stands there instead."""

    path: str
    line: int
    kind: str
    start: int
    stop: int
    before: str
    after: str


class Places(ast.NodeVisitor):
    """Collects the places of a file where a fault can be put."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text, self.found = path, text, list[Fault]()
        self._lines = [0]
        for line in text.encode().splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def _offset(self, line: int, column: int) -> int:
        """Characters before a place that ast gives in bytes."""
        return len(self.text.encode()[: self._lines[line - 1] + column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _add(self, node: ast.expr | ast.stmt, kind: str, start: int, stop: int, after: str) -> None:
        self.found.append(Fault(self.path, node.lineno, kind, start, stop, self.text[start:stop], after))

    def _between(self, node: ast.expr, left: ast.expr, right: ast.expr, kind: str, table: dict[str, str]) -> None:
        start, stop = self._span(left)[1], self._span(right)[0]
        match = re.fullmatch(r"([\s)]*)(\S+(?: in| not)?)([\s(]*)", self.text[start:stop])
        if match and match[2] in table:
            self._add(node, kind, start + match.start(2), start + match.end(2), table[match[2]])

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for left, right in zip(sides, sides[1:], strict=False):
            self._between(node, left, right, "comparison", COMPARISONS)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._between(node, node.left, node.right, "arithmetic", ARITHMETIC)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._between(node, node.values[0], node.values[1], "logic", {"and": "or", "or": "and"})
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            start, _ = self._span(node)
            self._add(node, "logic", start, self._span(node.operand)[0], "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, "constant", *self._span(node), str(not node.value))
        elif isinstance(node.value, int):
            self._add(node, "constant", *self._span(node), str(node.value + 1))
        elif isinstance(node.value, float):
            self._add(node, "constant", *self._span(node), repr(node.value * 2 + 1))

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            start, stop = self._span(node.test)
            self._add(node.test, "condition", start, stop, f"not ({self.text[start:stop]})")
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not QUIET.match(ast.unparse(node.value)):
            self._add(node, "lost call", *self._span(node), "pass")
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, "lost error", *self._span(node), "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        """Left out, like texts and types: nothing depends on them."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """As asserts."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in [*node.args.defaults, *node.args.kw_defaults, *node.body]:
            if part is not None:
                self.visit(part)


def chosen(sample: int, seed: int) -> list[Fault]:
    """A sample that has as much of each kind as there is."""
    by_kind: dict[str, list[Fault]] = {}
    for path in sorted((ROOT / "fms_fsdp").rglob("*.py")):
        places = Places(str(path.relative_to(ROOT)), path.read_text())
        places.visit(ast.parse(places.text))
        for fault in places.found:
            by_kind.setdefault(fault.kind, []).append(fault)
    draw = random.Random(seed)
    for faults in by_kind.values():
        draw.shuffle(faults)
    turns = [
        fault
        for turn in zip(*(faults[:sample] for _, faults in sorted(by_kind.items())), strict=False)
        for fault in turn
    ]
    return turns[:sample]


def imports(path: Path) -> set[Path]:
    """Files of this repository that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and node.value == "main_training.py":
            names.add("main_training")  # it is run, not imported
    files = [ROOT / f"{name.replace('.', '/')}.py" for name in names]
    return {file for file in files if file.is_file()}


def by_distance(fault: Fault) -> list[tuple[int, str]]:
    """Test files with the number of imports between each and the fault, the nearest first; those of the fault's own name at 0."""
    known: dict[Path, set[Path]] = {}
    found = []
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        reached, edge, distance = {test}, {test}, 0
        while edge and ROOT / fault.path not in reached:
            edge = set().union(*(known.setdefault(file, imports(file)) for file in edge)) - reached
            reached, distance = reached | edge, distance + 1
        distance = distance if edge else 99
        found.append((0 if test.stem == f"test_{Path(fault.path).stem}" else distance, str(test.relative_to(ROOT))))
    return sorted(found)


def copy_tree(target: Path) -> Path:
    """A copy of the working tree without what git ignores, in place of what a stopped run left."""
    shutil.rmtree(target, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def first_failure(tree: Path, tests: list[str], skipped: set[str], timeout_s: float) -> str:
    """The first test that fails in `tree`, "timeout", or "" where all pass."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "not slow",
        "--tb=no",
        "-rfE",
        "-p",
        "no:cacheprovider",
    ]
    process = subprocess.Popen(
        [*command, *(f"--deselect={name}" for name in sorted(skipped)), *tests],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # with whatever a test left behind
        except ProcessLookupError:
            pass
    if process.returncode in (0, 5):  # 5: no test was left
        return ""
    names = re.findall(r"^(?:FAILED|ERROR) (tests/\S+\.py(?:::[^\n]*?)?)(?= - |$)", output, re.MULTILINE)
    return names[0] if names else f"pytest: {output[-300:]}"


def judge(fault: Fault, clean: Path, faulty: Path, sound: set[str], broken: set[str], reach: int) -> str:
    """What noticed the fault, "" if nothing did. `sound`, `broken`: tests known to pass, or fail, without any.

    `reach`: tests more imports away than this are left out.
    """
    path = faulty / fault.path
    original = path.read_text()
    path.write_text(original[: fault.start] + fault.after + original[fault.stop :])
    try:
        tests = [(distance, name) for distance, name in by_distance(fault) if distance <= reach]
        near = [name for distance, name in tests if distance <= 1]
        far = [name for distance, name in tests if distance > 1]
        for group, timeout_s in ((near, NEAR_TIMEOUT_S), (far, ALL_TIMEOUT_S)):
            while group:
                noticed = first_failure(faulty, group, broken, timeout_s)
                if not noticed or not noticed.startswith("tests/") or noticed in sound:
                    break
                if not first_failure(clean, [noticed], set(), timeout_s):
                    sound.add(noticed)
                    break
                broken.add(noticed)  # it fails without the fault too
            if group and noticed:
                return noticed
        return ""
    finally:
        path.write_text(original)


def verdicts(faults: list[Fault], log: Path, reach: int) -> Iterator[tuple[Fault, str]]:
    """Each fault with what noticed it, as far as `log` knows from there."""
    lines = log.read_text().splitlines() if log.exists() else []
    known = {json.dumps(entry["fault"]): entry["noticed"] for entry in map(json.loads, lines)}
    trees: list[Path] = []
    sound, broken = set[str](), set[str]()
    for fault in faults:
        key = json.dumps(asdict(fault))
        if key not in known:
            trees = trees or [copy_tree(log.with_suffix(f".{name}")) for name in ("clean", "faulty")]
            known[key] = judge(fault, trees[0], trees[1], sound, broken, reach)
            with open(log, "a") as file:
                file.write(json.dumps({"fault": asdict(fault), "noticed": known[key]}) + "\n")
        yield fault, known[key]
    for tree in trees:
        shutil.rmtree(tree)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="puts small faults into a copy of the code and looks which the quick tests notice"
    )
    parser.add_argument("--sample", type=int, default=60, help="faults to try")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "mutants", help="copies and verdicts"
    )
    parser.add_argument(
        "--reach", type=int, default=99, help="leave out tests more imports away; 1 is quick, and misses some"
    )
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    log = given.work / f"seed{given.seed}_reach{given.reach}.jsonl"
    faults = chosen(given.sample, given.seed)
    killed = 0
    for count, (fault, noticed) in enumerate(verdicts(faults, log, given.reach), 1):
        killed += bool(noticed)
        change = f"{fault.before.splitlines()[0]} → {fault.after.splitlines()[0] if fault.after else 'nothing'}"
        verdict = f"killed by {noticed}" if noticed else "SURVIVED"
        print(
            f"{time.strftime('%H:%M')} {count}/{len(faults)} {fault.path}:{fault.line} {fault.kind}: {change}: {verdict}",
            flush=True,
        )
    print(
        f"{killed} of {len(faults)} faults noticed: {100 * killed / max(1, len(faults)):.0f} % (seed {given.seed}; {log})"
    )


if __name__ == "__main__":
    main()
