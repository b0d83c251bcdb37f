"""Would the tests notice? Puts one small fault at a time into a copy of the code and runs the tests.

    bash scripts/mutate.sh --sample=60 --seed=1
    bash scripts/mutate.sh --per_package=10 --nearest --slow
    bash scripts/mutate.sh --faults=VERDICTS.jsonl --nearest --slow

    places for a fault ─ seed ─▶ sample ─▶ copy with the fault ─▶ the tests that run its line, nearest first
    quick suite under `coverage`, once ─▶ line → tests           └ the test that fails must fail again, and
                                                                   pass without the fault

With `--nearest` there is no run under coverage: a fault meets the quick tests of its module and of its package
alone (class Nearest), so it may survive where another package's test would notice it. With `--slow` a fault
that survives these also meets the slow tests of the same files.

The script reads the checkout and never writes to it. Each verdict is a line of a file in `--work`, so a run
that was stopped continues. `--faults` takes the faults of such a file and finds each in the present code by its
function, text and line. So the same faults can be tried before and after a change of the tests. The test that
noticed a fault before is tried first.

A fault is *killed* by a test, *survived* if all tests passed, had *no time* if the budget ended before the
tests, had *no tests* if none ran, or is *gone* if its line has changed since. A fault that survives changes no
behaviour, which a person must judge, or a test is missing.
"""

from __future__ import annotations

import argparse
import ast
import itertools
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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests import layers

ROOT = Path(__file__).parent.parent
QUICK = "not slow"
SLOW = "slow"
PYTEST = ["-m", "pytest", "-v", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
KILLED = "killed"
SURVIVED = "SURVIVED"
NO_TIME = "no time"
NO_TESTS = "no tests"
GONE = "gone"
ERRORS = "tests/test_bad_input.py"
FEW_FILES = 5  # of other packages, that a module without a test file of its own meets
# Files at the top of tests/ that test the repository (docs, packaging, benchmarks), not its modules.
OF_REPOSITORY = (
    "tests/test_benchmarks.py",
    "tests/test_docs.py",
    "tests/test_gpu_session.py",
    "tests/test_how_to_add.py",
    "tests/test_layering.py",
    "tests/test_mutate.py",
    "tests/test_package.py",
)
REPLACED = dict(
    pair.split(":")
    for pair in (
        "<:<=;<=:<;>:>=;>=:>;==:!=;!=:==;is:is not;in:not in;and:or;or:and;"
        "+:-;-:+;*:+;/:*;//:*;%://;&:|;|:&;<<:>>;**:*"
    ).split(";")
)
QUIET = re.compile(r"(runtime\.)?(log|warnings)\.|print\(|show_progress\(|self\._print\(")  # logs


@dataclass(frozen=True)
class Fault:
    """Bytes [start, stop) of a file, and their replacement."""

    path: str
    line: int
    kind: str
    start: int
    stop: int
    before: str
    after: str
    scope: str  # qualified name of the function or class around it; empty at the top of a module
    line_text: str  # without indentation
    occurrence: int  # from 0, among the faults that are equal up to here

    @property
    def place(self) -> tuple[str | int, ...]:
        """Returns where the fault is, which lines added elsewhere do not change."""
        return (self.path, self.scope, self.kind, self.before, self.line_text, self.occurrence)


@dataclass(frozen=True)
class Verdict:
    """The result of trying a fault."""

    outcome: str
    test: str = ""  # the test that noticed the fault, or was running when the time was over
    how: str = ""  # what happened to that test: failed, hang, or what pytest printed at the end
    tests: str = QUICK  # the last set of tests that ran
    num_passed: int = 0  # of both sets
    excluded: Sequence[str] = ()  # tests that failed once, or without the fault too
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.outcome == KILLED and self.how == "failed":
            return f"killed by {self.test}"
        if self.outcome == KILLED:
            return f"killed by {self.test} ({self.how})"
        if self.outcome == NO_TIME:
            return f"no time ({self.num_passed} tests passed)"
        if self.outcome == SURVIVED:
            return f"SURVIVED {self.num_passed} tests"
        return self.outcome


def nodes(node: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yields the nodes on which behaviour depends with their scopes: no assertions, texts, logs or types."""
    children: Iterable[ast.AST | None] = ast.iter_child_nodes(node)
    match node:
        case ast.Assert() | ast.JoinedStr():
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Expr(value=ast.Call() as call) if QUIET.match(ast.unparse(call)):
            return
        case ast.Raise():
            children = []
        case ast.AnnAssign():
            children = [node.value]
        case ast.FunctionDef():
            children = [*node.args.defaults, *node.args.kw_defaults, *node.body]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        scope = f"{scope}.{node.name}" if scope else node.name
    yield scope, node
    for child in filter(None, children):
        yield from nodes(child, scope)


def faults_of(path: Path) -> Iterator[Fault]:
    """Yields the faults that can be put into a file."""
    content = path.read_bytes()
    texts = content.splitlines(keepends=True)
    lines = [0, *itertools.accumulate(map(len, texts))]
    num_seen = Counter[tuple[str, ...]]()

    def span(node: Any) -> tuple[int, int]:
        start, stop = lines[node.lineno - 1], lines[node.end_lineno - 1]
        return start + node.col_offset, stop + node.end_col_offset

    def operators(*sides: ast.expr) -> Iterator[tuple[int, int, str]]:
        for left, right in itertools.pairwise(sides):
            start, stop = span(left)[1], span(right)[0]
            between = content[start:stop].decode()
            match = re.fullmatch(r"[\s)]*(\S+(?: in| not)?)[\s(]*", between)
            if match and match[1] in REPLACED and between.isascii():
                yield start + match.start(1), start + match.end(1), REPLACED[match[1]]

    for scope, node in nodes(ast.parse(content)):
        found: Iterable[tuple[int, int, str]] = []
        match node:
            case ast.Compare():
                found = operators(node.left, *node.comparators)
            case ast.BinOp():
                found = operators(node.left, node.right)
            case ast.BoolOp():
                found = operators(*node.values[:2])
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                start, length = span(node)[0], len("not " if isinstance(node.op, ast.Not) else "-")
                found = [(start, start + length, "")]
            case ast.Constant(value=bool(value)):
                found = [(*span(node), str(not value))]
            case ast.Constant(value=int(value)):
                found = [(*span(node), str(value + 1))]
            case ast.Constant(value=float(value)):
                found = [(*span(node), repr(value * 2 + 1))]
            case ast.If():
                start, stop = span(node.test)
                found = [(start, stop, f"not ({content[start:stop].decode()})")]
            case ast.Expr(value=ast.Call()) | ast.Raise():
                found = [(*span(node), "pass")]
        for start, stop, after in found:
            line = getattr(node, "lineno", 0)
            kind = type(node).__name__
            before = content[start:stop].decode()
            line_text = texts[line - 1].decode().strip()
            equal = (scope, kind, before, line_text)
            yield Fault(
                path=str(path.relative_to(ROOT)),
                line=line,
                kind=kind,
                start=start,
                stop=stop,
                before=before,
                after=after,
                scope=scope,
                line_text=line_text,
                occurrence=num_seen[equal],
            )
            num_seen[equal] += 1


def all_faults() -> list[Fault]:
    """Returns the faults that can be put into the package."""
    faults: list[Fault] = []
    for path in sorted((ROOT / "fms_fsdp").rglob("*.py")):
        faults += faults_of(path)
    return faults


def in_turns(groups: Iterable[list[Fault]]) -> list[Fault]:
    """Returns the first fault of each group, then the second of each, and so on."""
    return [fault for turn in itertools.zip_longest(*groups) for fault in turn if fault]


def chosen(faults: list[Fault], sample: int, seed: int) -> list[Fault]:
    """Returns a sample that has as many faults of each kind as there are."""
    by_kind: dict[str, list[Fault]] = {}
    for fault in faults:
        by_kind.setdefault(fault.kind, []).append(fault)
    draw = random.Random(seed)
    for of_kind in by_kind.values():
        draw.shuffle(of_kind)
    return in_turns(of_kind for _, of_kind in sorted(by_kind.items()))[:sample]


def chosen_of_packages(faults: list[Fault], per_package: int, seed: int) -> list[Fault]:
    """Returns a sample of each package; the packages take turns, so a run that was stopped has all."""
    by_package: dict[str, list[Fault]] = {}
    for fault in faults:
        by_package.setdefault(package_of(fault), []).append(fault)
    return in_turns(chosen(group, per_package, seed) for group in by_package.values())


def found_again(verdict_file: Path, faults: list[Fault]) -> tuple[list[Fault], list[Fault]]:
    """Returns the faults of a verdict file as they are in the present code, and those that are gone."""
    present = {fault.place: fault for fault in faults}
    found: list[Fault] = []
    gone: list[Fault] = []
    for fault in recorded(verdict_file):
        if fault.place in present:
            found.append(present[fault.place])
        else:
            gone.append(fault)
    return found, gone


class Covered:
    """Which tests run a line of the code: of every process that a test starts, too."""

    def __init__(self, work: Path) -> None:
        from coverage import CoverageData  # of the extra dev; the quick tests do without

        data = work / "coverage.db"
        if not data.exists():
            self._record(work, data)
        self._data = CoverageData(str(data))
        self._data.read()

    def _record(self, work: Path, data: Path) -> None:
        """Runs the quick suite under coverage."""
        tree, config, parts = copy_tree(work / "covered"), work / "coverage.ini", work / "parts"
        config.write_text(f"""[run]
source = {tree / "fms_fsdp"}
include = {tree}/fms_fsdp/*
parallel = true
sigterm = true
patch = _exit
data_file = {parts}/{data.name}
context = ${{PYTEST_CURRENT_TEST-none}}
""")
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir()
        print("the quick suite under coverage, once …", flush=True)
        subprocess.run(
            [sys.executable, *PYTEST, "-m", QUICK, "-p", "tests.mutate", "tests"],
            cwd=tree,
            env=environment(tree, work) | {"COVERAGE_PROCESS_START": str(config)},
            stdout=subprocess.DEVNULL,
        )
        combine = ["combine", f"--rcfile={config}", f"--data-file={data}", str(parts)]
        subprocess.run([sys.executable, "-m", "coverage", *combine], check=True)
        shutil.rmtree(tree)

    def tests(self, fault: Fault) -> list[str]:
        """Returns its own file, then the tests that ran its line, without their cases; whole files if a
        fixture ran it."""
        files = [name for name in self._data.measured_files() if name.endswith(f"/{fault.path}")]
        found = set[str]()
        for name in files:
            for context in self._data.contexts_by_lineno(name).get(fault.line, []):
                found |= {re.sub(r"\[.*| \(\w+\)", "", part) for part in context.split("|")}
        tests = sorted(name for name in found if name.startswith("tests/"))
        folder = f"tests/{package_of(fault)}/"
        return own_files(fault) + sorted(tests, key=lambda name: not name.startswith(folder))


class Nearest:
    """The test files of a fault's package, in place of the tests that run its line."""

    def tests(self, fault: Fault) -> list[str]:
        """Returns its own file, those that import its module, and the others of its package.

        The package is its folder in tests/ and the files at the top of tests/ that import anything of it;
        of a module outside a package, all files at the top. Those take seconds: the launches of minutes
        are in folders, or test the repository. A module without a file of its own adds the files of other
        folders that import it, if these are few. The table of errors is of all packages.
        """
        package = package_of(fault)
        module = fault.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        top = module_tests("tests/test_*.py")
        folder: list[str] = []
        if package != "fms_fsdp":
            folder = module_tests(f"tests/{package}/**/test_*.py")
            top = [name for name in top if is_imported(f"fms_fsdp.{package}", name)]
        others: list[str] = []
        if not (ROOT / mirrored_file(fault)).is_file():
            for name in module_tests("tests/*/**/test_*.py"):
                if name not in folder and is_imported(module, name):
                    others.append(name)
        if len(others) > FEW_FILES:
            others = []

        near = own_files(fault)
        near += [name for name in folder + top if is_imported(module, name)]
        near += module_tests(ERRORS)
        if folder:
            files = near + folder + top + others
        else:
            files = near + others + top
        return list(dict.fromkeys(files))


def package_of(fault: Fault) -> str:
    """Returns the package of a fault; `fms_fsdp` for a module outside one."""
    folders = Path(fault.path).parent.parts
    return folders[min(1, len(folders) - 1)]


def module_tests(pattern: str) -> list[str]:
    """Returns the files that test modules."""
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
    return [name for name in files if name not in OF_REPOSITORY]


def mirrored_file(fault: Fault) -> str:
    """Returns the name of the test file at the same place in tests/ as the module."""
    module = Path(fault.path)
    return str(Path("tests", *module.parent.parts[1:], f"test_{module.stem}.py"))


def own_files(fault: Fault) -> list[str]:
    """Returns the test file of its module: at the same place in tests/, otherwise anywhere."""
    mirrored = mirrored_file(fault)
    if (ROOT / mirrored).is_file():
        return [mirrored]
    return module_tests(f"tests/**/{Path(mirrored).name}")


@cache
def imported(name: str) -> frozenset[str]:
    """Returns the modules that a test file imports."""
    return layers.imported(ROOT / name)


def is_imported(module: str, name: str) -> bool:
    """Returns whether a test file imports a module, or one of its package."""
    return any(other == module or other.startswith(f"{module}.") for other in imported(name))


def environment(tree: Path, work: Path) -> dict[str, str]:
    """Returns the variables of a process that takes its code from the tree."""
    variables = dict(os.environ)
    # Without bytecode each process compiles the sources of torch again.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    variables.setdefault("PYTHONPYCACHEPREFIX", str(work / "bytecode"))
    return variables | {"PYTHONPATH": str(tree), "PYTHONUNBUFFERED": "1"}


def pytest_runtest_logstart(nodeid: str) -> None:
    """Tells coverage which test begins: this module is a plugin of the run that finds out what tests run."""
    from coverage import Coverage

    coverage = Coverage.current()
    if coverage:
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
    # Some tests copy the files that git knows.
    subprocess.run(["git", "init", "-q"], cwd=target, check=True)
    subprocess.run(["git", "add", "-A"], cwd=target, check=True)
    return target


@dataclass(frozen=True)
class Limits:
    """Seconds of wall time."""

    quick_s: float  # of the quick tests of a fault
    slow_s: float  # of its slow tests
    hang_s: float  # of a test without output


def run_tests(tree: Path, tests: list[str], marker: str, budget_s: float, hang_s: float) -> Verdict:
    """Runs tests in `tree` up to the first that fails, hangs, or ends after the budget."""
    output = tree.with_suffix(".log")
    deadline = time.time() + budget_s
    how = ""
    with open(output, "w") as file:
        process = subprocess.Popen(
            [sys.executable, *PYTEST, "-m", marker, "-x", *tests],
            cwd=tree,
            env=environment(tree, tree.parent),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,  # of this session: the scheduler gives another session a priority of its own
        )
    try:
        while process.poll() is None and not how:
            time.sleep(0.2)
            written = output.stat().st_mtime
            if time.time() - written > hang_s:
                how = "hang"
            elif written > deadline:  # pytest prints a line when a test ends: that one did not hang
                how = NO_TIME
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes of its tests
        process.wait()

    text = output.read_text(errors="replace")
    num_passed = len(re.findall(r"^tests/.* PASSED", text, re.M))
    begun = re.findall(r"^(tests/\S+\.py::.*?)(?= (?:PASSED|SKIPPED|XFAIL)|\s*$)", text, re.M)
    last = begun[-1] if begun else tests[0]
    if how == NO_TIME:
        return Verdict(NO_TIME, last, how, num_passed=num_passed)
    if how == "hang":
        return Verdict(KILLED, last, how, num_passed=num_passed)
    if process.returncode == 5:
        return Verdict(NO_TESTS)
    if process.returncode == 0:
        return Verdict(SURVIVED if num_passed else NO_TESTS, num_passed=num_passed)
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+\.py(?:::[^\n]*?)?)(?= - |$)", text, re.M)
    if failed:
        return Verdict(KILLED, failed[1], "failed", num_passed=num_passed)
    return Verdict(KILLED, last, f"pytest: {text[-300:]}", num_passed=num_passed)


def of_both(quick: Verdict, slow: Verdict) -> Verdict:
    """Returns the verdict of both sets for a fault that no quick test noticed."""
    if slow.outcome == NO_TESTS:
        return quick
    num_passed = quick.num_passed + slow.num_passed
    excluded = [*quick.excluded, *slow.excluded]
    if quick.outcome == NO_TIME and slow.outcome == SURVIVED:
        return replace(quick, num_passed=num_passed, excluded=excluded)
    return replace(slow, num_passed=num_passed, excluded=excluded)


class Judge:
    """Tries faults in a copy of the code; a second copy, without faults, shows which tests always fail."""

    def __init__(self, log: Path, covered: Covered | Nearest, limits: Limits) -> None:
        self._clean = copy_tree(log.with_suffix(".clean"))
        self._faulty = copy_tree(log.with_suffix(".faulty"))
        self._covered = covered
        self._limits = limits
        self._pass_without_fault = set[str]()

    def close(self) -> None:
        """Removes the copies."""
        shutil.rmtree(self._clean)
        shutil.rmtree(self._faulty)

    def judge(self, fault: Fault, slow: bool, known_test: str = "") -> Verdict:
        """Returns the verdict of the quick tests or, if the fault survives these, of the slow tests.

        `known_test` noticed the fault in another run, and is tried before all of them.
        """
        begin = time.monotonic()
        original = self._clean / fault.path
        content = original.read_bytes()
        path = self._faulty / fault.path
        path.write_bytes(content[: fault.start] + fault.after.encode() + content[fault.stop :])
        # Bytecode is valid for a time and a size: no two versions of a file may share both.
        modified_s = 1_000_000_000 + fault.start  # in 2001, before any checkout
        os.utime(path, (modified_s, modified_s))
        tests = self._covered.tests(fault)
        try:
            verdict = self._notice_of(known_test)
            if verdict.outcome != KILLED:
                verdict = self._first_notice(tests, QUICK, self._limits.quick_s)
            if slow and verdict.outcome != KILLED:
                verdict = of_both(verdict, self._first_notice(tests, SLOW, self._limits.slow_s))
        finally:
            shutil.copy2(original, path)
        return replace(verdict, seconds=round(time.monotonic() - begin, 1))

    def _notice_of(self, test: str) -> Verdict:
        """Returns the verdict of one test; it notices nothing if it is gone."""
        if "::" not in test:
            return Verdict(NO_TESTS)
        both = f"{QUICK} or {SLOW}"
        verdict = run_tests(self._faulty, [test], both, self._limits.slow_s, self._limits.hang_s)
        if verdict.how == "failed" and self._is_by_fault(test):
            return verdict
        return Verdict(NO_TESTS)

    def _first_notice(self, tests: list[str], marker: str, budget_s: float) -> Verdict:
        """Returns the verdict of one set of tests, without those that fail for another reason."""
        deadline = time.monotonic() + budget_s
        excluded: list[str] = []
        while True:
            options = [f"--deselect={name}" for name in excluded]
            left = [name for name in tests if name not in excluded]
            if not left:
                return Verdict(NO_TESTS, tests=marker, excluded=excluded)
            left_s = deadline - time.monotonic()
            verdict = run_tests(self._faulty, left + options, marker, left_s, self._limits.hang_s)
            if verdict.outcome != KILLED or self._is_by_fault(verdict.test):
                return replace(verdict, tests=marker, excluded=excluded)
            excluded.append(verdict.test)

    def _is_by_fault(self, test: str) -> bool:
        """Returns whether a test that failed fails again, and passes without the fault.

        A test may fail once because other programs keep the machine busy.
        """
        if self._passes(self._faulty, test):
            return False
        if test not in self._pass_without_fault and self._passes(self._clean, test):
            self._pass_without_fault.add(test)
        return test in self._pass_without_fault

    def _passes(self, tree: Path, test: str) -> bool:
        """Returns whether a test passes; whether a file can be imported."""
        tests = [test] if "::" in test else [test, "--collect-only"]
        both = f"{QUICK} or {SLOW}"
        verdict = run_tests(tree, tests, both, self._limits.slow_s, self._limits.hang_s)
        return verdict.outcome in (SURVIVED, NO_TESTS)


def verdicts(
    faults: list[Fault],
    log: Path,
    covered: Covered | Nearest,
    limits: Limits,
    slow: bool,
    known_tests: Mapping[tuple[str | int, ...], str] = MappingProxyType({}),
) -> Iterator[tuple[Fault, Verdict]]:
    """Yields each fault with its verdict: that of an earlier run, if `log` has it.

    known_tests   by the place of a fault, the test that noticed it in another run
    """
    known = recorded(log)
    judge: Judge | None = None
    for fault in faults:
        if fault not in known:
            judge = judge or Judge(log, covered, limits)
            known[fault] = judge.judge(fault, slow, known_tests.get(fault.place, ""))
            record(log, fault, known[fault])
        yield fault, known[fault]
    if judge:
        judge.close()


def recorded(log: Path) -> dict[Fault, Verdict]:
    """Returns the verdicts of earlier runs."""
    known: dict[Fault, Verdict] = {}
    if log.exists():
        for line in log.read_text().splitlines():
            entry = json.loads(line)
            known[Fault(**entry["fault"])] = Verdict(**entry["verdict"])
    return known


def record(log: Path, fault: Fault, verdict: Verdict) -> None:
    """Appends a verdict to the file."""
    with open(log, "a") as file:
        file.write(json.dumps({"fault": asdict(fault), "verdict": asdict(verdict)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    work = Path(tempfile.gettempdir()) / "mutants"
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--sample", type=int, default=60, help="faults to try (default: 60)")
    which.add_argument("--per_package", type=int, help="faults to try of each package")
    which.add_argument("--faults", type=Path, help="verdict file whose faults are tried again")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (default: 1)")
    parser.add_argument("--work", type=Path, default=work, help="folder of copies and verdicts")
    parser.add_argument("--nearest", action="store_true", help="only the tests of the package")
    parser.add_argument("--slow", action="store_true", help="slow tests for faults that survive")
    parser.add_argument("--budget_s", type=float, default=600, help="seconds of quick tests")
    parser.add_argument("--slow_budget_s", type=float, default=1200, help="seconds of slow tests")
    parser.add_argument("--hang_s", type=float, default=400, help="seconds of a test that hangs")
    given = parser.parse_args()

    gone: list[Fault] = []
    known_tests: dict[tuple[str | int, ...], str] = {}
    if given.faults:
        name = f"again-{given.faults.stem}"
        faults, gone = found_again(given.faults, all_faults())
        for fault, verdict in recorded(given.faults).items():
            known_tests[fault.place] = verdict.test if verdict.outcome == KILLED else ""
    elif given.per_package:
        name = f"per_package{given.per_package}-seed{given.seed}"
        faults = chosen_of_packages(all_faults(), given.per_package, given.seed)
    else:
        name = f"sample-seed{given.seed}"
        faults = chosen(all_faults(), given.sample, given.seed)
    if given.nearest:
        name += "-nearest"
    if given.slow:
        name += "-slow"
    work = given.work.resolve()  # processes with other folders read it
    work.mkdir(parents=True, exist_ok=True)
    log = work / f"{name}.jsonl"

    outcomes: dict[str, Counter[str]] = {}
    for fault in gone:
        outcomes.setdefault(package_of(fault), Counter())[GONE] += 1
        print(f"{fault.path} {fault.scope}: {fault.line_text}: gone", flush=True)
        if fault not in recorded(log):
            record(log, fault, Verdict(GONE))
    covered = Nearest() if given.nearest else Covered(work)
    limits = Limits(given.budget_s, given.slow_budget_s, given.hang_s)
    judged = verdicts(faults, log, covered, limits, given.slow, known_tests)
    for count, (fault, verdict) in enumerate(judged, 1):
        outcomes.setdefault(package_of(fault), Counter())[verdict.outcome] += 1
        before = fault.before.partition("\n")[0]
        after = fault.after.partition("\n")[0] or "nothing"
        place = f"{count}/{len(faults)} {fault.path}:{fault.line} {fault.kind}"
        print(f"{place}: {before} → {after}: {verdict} ({verdict.seconds:.0f} s)", flush=True)
        if verdict.excluded:
            print(f"  without tests that failed for another reason: {', '.join(verdict.excluded)}")

    total = Counter[str]()
    for package, counts in sorted(outcomes.items()):
        total += counts
        print(f"{package}: {summary(counts)}")
    print(f"total: {summary(total)} ({log})")


def summary(counts: Counter[str]) -> str:
    """Returns the number of faults that were noticed, then the others by outcome."""
    parts = [f"{counts[KILLED]} of {counts.total()} noticed"]
    for outcome, number in sorted(counts.items()):
        if outcome != KILLED:
            parts.append(f"{number} {outcome}")
    return ", ".join(parts)


if __name__ == "__main__":
    main()
