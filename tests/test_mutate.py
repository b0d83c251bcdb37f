"""The tool that puts faults into the code (tests/mutate.py): it finds them again, and judges them."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from tests import mutate

CODE = """
def double(count):
    if count < 1:
        return 0
    return count * 2


def half(count):
    return count // 2
"""
TEST = "from fms_fsdp import sums\n\n\ndef test_double():\n    assert sums.double(3) == 6\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one module and its test."""
    root = tmp_path / "project"
    for name, text in {"fms_fsdp/sums.py": CODE, "tests/test_sums.py": TEST}.items():
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    monkeypatch.setattr(mutate, "ROOT", root)
    return root


def test_faults_are_found_after_edits(project: Path) -> None:
    log = project / "verdicts.jsonl"
    before = mutate.all_faults()
    for fault in before:
        mutate.record(log, fault, mutate.Verdict(mutate.SURVIVED))
    module = project / "fms_fsdp/sums.py"
    module.write_text(
        CODE.replace("count // 2", "count // 3").replace("def d", "LIMIT = 1\n\n\ndef d")
    )

    found, gone = mutate.found_again(log, mutate.all_faults())
    assert {fault.scope for fault in gone} == {"half"}
    assert {fault.scope for fault in found} == {"double"}
    for fault in found:
        assert module.read_bytes()[fault.start : fault.stop].decode() == fault.before
    assert json.loads(log.read_text().splitlines()[0])["fault"] == asdict(before[0])


def test_verdict_says_whether_tests_ended(project: Path) -> None:
    tests = ["tests/test_sums.py"]
    survived = mutate.run_tests(project, tests, mutate.QUICK, budget_s=600, hang_s=600)
    assert (survived.outcome, survived.num_passed) == (mutate.SURVIVED, 1)
    no_time = mutate.run_tests(project, tests, mutate.QUICK, budget_s=-600, hang_s=600)
    assert no_time.outcome == mutate.NO_TIME
    none = mutate.run_tests(project, tests, mutate.SLOW, budget_s=600, hang_s=600)
    assert none.outcome == mutate.NO_TESTS
    assert mutate.of_both(no_time, survived).outcome == mutate.NO_TIME


def test_each_package_has_its_faults() -> None:
    faults = mutate.chosen_of_packages(mutate.all_faults(), per_package=2, seed=1)
    packages = [mutate.package_of(fault) for fault in faults]
    assert len(faults) == 2 * len(set(packages))
    assert packages[: len(packages) // 2] == packages[len(packages) // 2 :]
    for fault in faults:
        assert mutate.Nearest().tests(fault), fault.path


@pytest.mark.slow
def test_failure_without_fault_is_not_a_kill(project: Path) -> None:
    broken = "\n\ndef test_broken():\n    assert False\n"
    (project / "tests/test_sums.py").write_text(broken + TEST + "\n")
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    (fault,) = [fault for fault in mutate.all_faults() if fault.before == "*"]
    limits = mutate.Limits(quick_s=600, slow_s=600, hang_s=600)
    judge = mutate.Judge(project.parent / "work/log.jsonl", mutate.Nearest(), limits)
    verdict = judge.judge(fault, slow=True)
    again = judge.judge(fault, slow=True, known_test="tests/test_sums.py::test_double")
    judge.close()
    assert verdict.outcome == mutate.KILLED
    assert verdict.test == "tests/test_sums.py::test_double"
    assert verdict.excluded == ["tests/test_sums.py::test_broken"]
    assert (again.outcome, again.test) == (mutate.KILLED, verdict.test)
    assert not again.excluded  # no other test ran
