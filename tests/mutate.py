"""Would the tests notice? Puts one small fault at a time into a copy of the code and runs the tests.

    bash scripts/mutate.sh --sample=60 --seed=1

    places for a fault ─ seed ─▶ sample ─▶ copy with the fault ─▶ the tests that run its line, nearest first
    quick suite under `coverage`, once ─▶ line → tests           └ the test that fails must pass without it

The script reads the checkout and never writes to it. Each verdict is a line of a file in `--work`, so a run
that was stopped continues. A fault that no test notices changes no behaviour, which a person must judge, or a
test is missing.
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

from coverage import Coverage, CoverageData

from tests.layers import imported

ROOT = Path(__file__).parent.parent
HANG_S = 120
PYTEST = ["-m", "pytest", "-v", "-m", "not slow", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
COMPARISONS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is": "is not",
    "in": "not in",
}
ARITHMETIC = {
    "+": "-",
    "-": "+",
    "*": "+",
    "/": "*",
    "//": "*",
    "%": "//",
    "&": "|",
    "|": "&",
    "<<": ">>",
    "**": "*",
}
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
        return self._offset(node.lineno, node.col_offset), self._offset(
            node.end_lineno, node.end_col_offset
        )

    def _add(self, node: ast.expr | ast.stmt, kind: str, start: int, stop: int, after: str) -> None:
        self.found.append(
            Fault(self.path, node.lineno, kind, start, stop, self.text[start:stop], after)
        )

    def _between(
        self, node: ast.expr, left: ast.expr, right: ast.expr, kind: str, table: dict[str, str]
    ) -> None:
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


def distances(fault: Fault) -> dict[str, int]:
    """Test files with their number of imports up to the fault; 0: of its name, 99: no imports lead there."""
    known: dict[Path, set[Path]] = {}
    found = {}
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        reached, edge, distance = {test}, {test}, 0
        while edge and ROOT / fault.path not in reached:
            edge = set().union(*(known.setdefault(file, imports(file)) for file in edge)) - reached
            reached, distance = reached | edge, distance + 1
        own = test.stem == f"test_{Path(fault.path).stem}"
        found[str(test.relative_to(ROOT))] = 0 if own else distance if edge else 99
    return found


def imports(path: Path) -> set[Path]:
    """Files of this repository that a file imports, or runs as a command."""
    names = imported(path)
    if "main_training.py" in path.read_text():
        names.add("main_training")
    files = [ROOT / f"{name.replace('.', '/')}.py" for name in names]
    return {file for file in files if file.is_file()}


class Covered:
    """Which tests run a line of the code: of every process that a test starts, too."""

    def __init__(self, work: Path) -> None:
        data, config = work / "coverage.db", work / "coverage.ini"
        if not data.exists():
            tree = copy_tree(work / "covered")
            config.write_text(f"""[run]
source = {tree / "fms_fsdp"}
include = {tree}/fms_fsdp/*
parallel = true
sigterm = true
patch = _exit
data_file = {work}/parts/{data.name}
context = ${{PYTEST_CURRENT_TEST-none}}
""")
            shutil.rmtree(work / "parts", ignore_errors=True)
            (work / "parts").mkdir()
            more = {
                "COVERAGE_PROCESS_START": str(config),
                "PYTHONPATH": str(tree),
                "PYTHONDONTWRITEBYTECODE": "1",
            }
            tests = [*PYTEST, "-p", "tests.mutate", "tests"]
            print("the quick suite under coverage, once …", flush=True)
            subprocess.run(
                [sys.executable, *tests], cwd=tree, env=os.environ | more, stdout=subprocess.DEVNULL
            )
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "coverage",
                    "combine",
                    f"--rcfile={config}",
                    f"--data-file={data}",
                ]
                + [str(work / "parts")],
                check=True,
            )
            shutil.rmtree(tree)
        self._data = CoverageData(str(data))
        self._data.read()

    def tests(self, fault: Fault) -> list[str]:
        """Names of the tests that ran a line, without their cases; whole files if a fixture ran it."""
        files = [name for name in self._data.measured_files() if name.endswith(f"/{fault.path}")]
        contexts = {
            context
            for name in files
            for context in self._data.contexts_by_lineno(name).get(fault.line, [])
        }
        found = {
            re.sub(r"\[.*| \((?:setup|call|teardown)\)", "", part)
            for c in contexts
            for part in c.split("|")
        }
        return sorted(name for name in found if name.startswith("tests/"))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Tells coverage which test begins: this module is a plugin of the run that finds out what tests run."""
    if coverage := Coverage.current():
        coverage.switch_context(nodeid)


def copy_tree(target: Path) -> Path:
    """A copy of the working tree without what git ignores, in place of what a stopped run left."""
    shutil.rmtree(target, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def first_failure(tree: Path, tests: list[str], skipped: set[str], budget_s: float) -> str:
    """The first test that fails in `tree`; "hang" if one does not end; "" if all pass within the budget."""
    command = [
        sys.executable,
        *PYTEST,
        "-x",
        *(f"--deselect={name}" for name in sorted(skipped)),
        *tests,
    ]
    output = tree.with_suffix(".log")
    with open(output, "w") as file:
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=os.environ
            | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        process.wait(timeout=budget_s)
    except subprocess.TimeoutExpired:
        while process.poll() is None:  # the test that is under way may end, or hang
            time.sleep(1)
            if time.time() - output.stat().st_mtime > HANG_S:
                return "hang"
            if time.time() - output.stat().st_mtime < 1:
                return ""
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # with whatever a test left behind
        except ProcessLookupError:
            pass
        process.wait()
    if process.returncode in (0, 5):  # 5: no test was left
        return ""
    text = output.read_text(errors="replace")
    names = re.findall(
        r"^(?:FAILED|ERROR) (tests/\S+\.py(?:::[^\n]*?)?)(?= - |$)", text, re.MULTILINE
    )
    return names[0] if names else f"pytest: {text[-300:]}"


def judge(
    fault: Fault, clean: Path, faulty: Path, covered: Covered, sound: set[str], budget_s: float
) -> str:
    """What noticed the fault within the budget, or "". `sound`: tests that pass without any fault."""
    path, broken, begin = faulty / fault.path, set[str](), time.monotonic()
    original = path.read_text()
    path.write_text(original[: fault.start] + fault.after + original[fault.stop :])
    far = distances(fault)
    own = [name for name, distance in far.items() if distance == 0]
    tests = own + sorted(
        covered.tests(fault), key=lambda name: far.get(name.partition("::")[0], 99)
    )
    try:
        while tests and (left_s := budget_s - (time.monotonic() - begin)) > 0:
            noticed = first_failure(faulty, tests, broken, left_s)
            if not noticed.startswith("tests/") or noticed in sound:
                return noticed
            if not first_failure(clean, [noticed], set(), budget_s):
                sound.add(noticed)
                return noticed
            broken.add(noticed)  # it fails without the fault too
        return ""
    finally:
        path.write_text(original)


def verdicts(faults: list[Fault], log: Path, budget_s: float) -> Iterator[tuple[Fault, str]]:
    """Each fault with what noticed it, as far as `log` knows from there."""
    lines = log.read_text().splitlines() if log.exists() else []
    known = {json.dumps(entry["fault"]): entry["noticed"] for entry in map(json.loads, lines)}
    trees: list[Path] = []
    covered, sound = Covered(log.parent), set[str]()
    for fault in faults:
        key = json.dumps(asdict(fault))
        if key not in known:
            trees = trees or [
                copy_tree(log.with_suffix(f".{name}")) for name in ("clean", "faulty")
            ]
            known[key] = judge(fault, *trees, covered, sound, budget_s)
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
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "mutants",
        help="copies and verdicts",
    )
    parser.add_argument(
        "--budget_s", type=float, default=300, help="seconds of tests that a fault has to survive"
    )
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    log = given.work / f"seed{given.seed}.jsonl"
    faults = chosen(given.sample, given.seed)
    killed = 0
    for count, (fault, noticed) in enumerate(verdicts(faults, log, given.budget_s), 1):
        killed += bool(noticed)
        change = f"{fault.before.splitlines()[0]} → {fault.after.splitlines()[0] if fault.after else 'nothing'}"
        verdict = f"killed by {noticed}" if noticed else "SURVIVED"
        print(
            f"{time.strftime('%H:%M')} {count}/{len(faults)} {fault.path}:{fault.line} {fault.kind}: "
            f"{change}: {verdict}",
            flush=True,
        )
    print(
        f"{killed} of {len(faults)} faults noticed: {100 * killed / max(1, len(faults)):.0f} % "
        f"(seed {given.seed}; {log})"
    )


if __name__ == "__main__":
    main()
