"""Would the tests notice? Puts one small fault at a time into a copy of the code and runs the tests.

    bash scripts/mutate.sh --sample=60 --seed=1

    places for a fault ─ seed ─▶ sample ─▶ copy with the fault ─▶ the tests that run its line, nearest first
    quick suite under `coverage`, once ─▶ line → tests           └ the test that fails must pass without it

With `--nearest` there is no run under coverage: a fault meets the quick tests of its module and of its package
alone, so it may survive where another package's test would notice it.

The script reads the checkout and never writes to it. Each verdict is a line of a file in `--work`, so a run
that was stopped continues. A fault that no test notices changes no behaviour, which a person must judge, or a
test is missing.
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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coverage import Coverage, CoverageData

ROOT = Path(__file__).parent.parent
HANG_S = 120
PYTEST = ["-m", "pytest", "-v", "-m", "not slow", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
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


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes on which behaviour depends: no assertions, texts, logs or types."""
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
    yield node
    for child in filter(None, children):
        yield from nodes(child)


def faults_of(path: Path) -> Iterator[Fault]:
    """Yields the faults that can be put into a file."""
    content, name = path.read_bytes(), str(path.relative_to(ROOT))
    lines = [0, *itertools.accumulate(map(len, content.splitlines(keepends=True)))]

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

    for node in nodes(ast.parse(content)):
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
            before = content[start:stop].decode()
            kind = type(node).__name__
            yield Fault(name, getattr(node, "lineno", 0), kind, start, stop, before, after)


def chosen(sample: int, seed: int) -> list[Fault]:
    """Returns a sample that has as many faults of each kind as there are."""
    by_kind: dict[str, list[Fault]] = {}
    for path in sorted((ROOT / "fms_fsdp").rglob("*.py")):
        for fault in faults_of(path):
            by_kind.setdefault(fault.kind, []).append(fault)
    draw = random.Random(seed)
    for faults in by_kind.values():
        draw.shuffle(faults)
    turns = itertools.zip_longest(*(faults for _, faults in sorted(by_kind.items())))
    return [fault for turn in turns for fault in turn if fault][:sample]


class Covered:
    """Which tests run a line of the code: of every process that a test starts, too."""

    def __init__(self, work: Path) -> None:
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
            [sys.executable, *PYTEST, "-p", "tests.mutate", "tests"],
            cwd=tree,
            env=environment(tree) | {"COVERAGE_PROCESS_START": str(config)},
            stdout=subprocess.DEVNULL,
        )
        combine = ["combine", f"--rcfile={config}", f"--data-file={data}", str(parts)]
        subprocess.run([sys.executable, "-m", "coverage", *combine], check=True)
        shutil.rmtree(tree)

    def tests(self, fault: Fault) -> list[str]:
        """Returns the tests that ran a line, without their cases; whole files if a fixture ran it."""
        files = [name for name in self._data.measured_files() if name.endswith(f"/{fault.path}")]
        found = set[str]()
        for name in files:
            for context in self._data.contexts_by_lineno(name).get(fault.line, []):
                found |= {re.sub(r"\[.*| \(\w+\)", "", part) for part in context.split("|")}
        return sorted(name for name in found if name.startswith("tests/"))


def package_of(fault: Fault) -> str:
    """Returns the package of a fault; `fms_fsdp` for a module outside one."""
    folders = Path(fault.path).parent.parts
    return folders[min(1, len(folders) - 1)]


class Nearest:
    """The tests of a fault's package, in place of those that run its line."""

    def tests(self, fault: Fault) -> list[str]:
        folder = f"tests/{package_of(fault)}"
        return [folder] if (ROOT / folder).is_dir() else []


def environment(tree: Path) -> dict[str, str]:
    """Returns the variables of a process that takes its code from the tree."""
    own = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    return os.environ | own


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
    """Returns the first test that fails in `tree`; "hang" if one does not end; "" if all pass in time."""
    deselected = [f"--deselect={name}" for name in sorted(skipped)]
    output = tree.with_suffix(".log")
    with open(output, "w") as file:
        process = subprocess.Popen(
            [sys.executable, *PYTEST, "-x", *deselected, *tests],
            cwd=tree,
            env=environment(tree),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        process.wait(timeout=budget_s)
    except subprocess.TimeoutExpired:
        while process.poll() is None:  # the running test may end, or hang
            time.sleep(1)
            idle_s = time.time() - output.stat().st_mtime
            if not 1 <= idle_s <= HANG_S:
                return "hang" if idle_s > HANG_S else ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes of its tests
        process.wait()
    if process.returncode in (0, 5):  # 5: no test was left
        return ""
    text = output.read_text(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+\.py(?:::[^\n]*?)?)(?= - |$)", text, re.M)
    return failed[1] if failed else f"pytest: {text[-300:]}"


def judge(
    fault: Fault,
    clean: Path,
    faulty: Path,
    covered: Covered | Nearest,
    sound: set[str],
    budget_s: float,
) -> str:
    """What noticed the fault within the budget, or "". `sound`: tests that pass without any fault."""
    path, broken, begin = faulty / fault.path, set[str](), time.monotonic()
    original, (_, package, *_) = path.read_bytes(), Path(fault.path).parts
    path.write_bytes(original[: fault.start] + fault.after.encode() + original[fault.stop :])
    own = [str(file.relative_to(faulty)) for file in faulty.glob(f"tests/**/test_{path.stem}.py")]
    tests = own + sorted(covered.tests(fault), key=lambda name: f"tests/{package}/" not in name)
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
        path.write_bytes(original)


def verdicts(
    faults: list[Fault], log: Path, budget_s: float, nearest: bool
) -> Iterator[tuple[Fault, str]]:
    """Each fault with what noticed it, as far as `log` knows from there."""
    lines = log.read_text().splitlines() if log.exists() else []
    known = {json.dumps(entry["fault"]): entry["noticed"] for entry in map(json.loads, lines)}
    trees: list[Path] = []
    covered, sound = Nearest() if nearest else Covered(log.parent), set[str]()
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    work = Path(tempfile.gettempdir()) / "mutants"
    parser.add_argument("--sample", type=int, default=60, help="faults to try")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample")
    parser.add_argument("--work", type=Path, default=work, help="folder of copies and verdicts")
    parser.add_argument("--budget_s", type=float, default=300, help="seconds of tests per fault")
    parser.add_argument("--nearest", action="store_true", help="only the tests of the package")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    log = given.work / f"{'nearest' if given.nearest else 'seed'}{given.seed}.jsonl"
    faults, killed = chosen(given.sample, given.seed), Counter[str]()
    judged = verdicts(faults, log, given.budget_s, given.nearest)
    for count, (fault, noticed) in enumerate(judged, 1):
        killed[package_of(fault)] += bool(noticed)
        before, after = (text.partition("\n")[0] for text in (fault.before, fault.after))
        verdict = f"killed by {noticed}" if noticed else "SURVIVED"
        place = f"{count}/{len(faults)} {fault.path}:{fault.line} {fault.kind}"
        print(f"{place}: {before} → {after or 'nothing'}: {verdict}", flush=True)
    for package, number in sorted(Counter(map(package_of, faults)).items()):
        print(f"{package}: {killed[package]} of {number}")
    print(f"{killed.total()} of {len(faults)} faults noticed (seed {given.seed}; {log})")


if __name__ == "__main__":
    main()
