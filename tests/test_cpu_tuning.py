"""How threads wait, by what shares the cores; what becomes of freed memory."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fms_fsdp.cpu_tuning import keep_freed_memory, let_gpu_memory_grow, set_thread_waiting
from tests.cli import ROOT


@pytest.mark.parametrize(
    ("given", "spins"),
    [
        ({}, True),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"LOCAL_WORLD_SIZE": "2"}, False),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "8"}, False),
        ({"OMP_NUM_THREADS": "zero"}, True),
    ],
)
def test_threads_spin_only_where_each_has_a_core(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], spins: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "environ", dict(given))
    set_thread_waiting()
    chosen = {name: text for name, text in os.environ.items() if name not in given}
    assert chosen == ({"GOMP_SPINCOUNT": "3000"} if spins else {"OMP_WAIT_POLICY": "PASSIVE"})


@pytest.mark.parametrize("given", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    set_thread_waiting()
    assert os.environ == given


@pytest.mark.parametrize("given", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", ""])
def test_gpu_memory_grows_in_place_unless_the_user_set_the_allocator(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    before = {given: "backend:cudaMallocAsync"} if given else {}
    monkeypatch.setattr(os, "environ", dict(before))
    let_gpu_memory_grow()
    assert os.environ == (before or {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})


@pytest.mark.parametrize("module", ["main_training", "fms_fsdp.__main__"])
def test_every_command_sets_the_allocator_before_torch_is_there(
    tmp_path: Path, module: str
) -> None:
    """A torch of ours tells the setting that it finds."""
    (tmp_path / "torch.py").write_text(
        "import os; raise SystemExit(os.environ['PYTORCH_CUDA_ALLOC_CONF'])"
    )
    argv = ["evaluate"] if module != "main_training" else ["--use_dummy_dataset=True"]
    environment = {name: text for name, text in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-m", module, *argv],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stderr.strip() == "expandable_segments:True"


def test_python_looks_for_garbage_after_all_modules_are_there_and_not_in_them() -> None:
    program = """
import gc
searched = []
gc.callbacks.append(lambda phase, details: searched.append(details["generation"]))
import main_training
status = main_training.main(["--use_dummy_dataset=True"])  # rejects WORLD_SIZE after all imports
print(status, 2 in searched, gc.isenabled())
"""
    env = os.environ | {"WORLD_SIZE": "x"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.stdout.split() == ["2", "False", "True"], done.stderr


# Prints how many pages the system had to fill while 30 blocks of 48 MiB were made and freed.
_FAULTS = """
import resource, sys, torch
from fms_fsdp.cpu_tuning import keep_freed_memory
print(keep_freed_memory() if sys.argv[1] == "kept" else None)
for _ in range(20):
    torch.ones(12 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30):
    torch.ones(12 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _told(choice: str, env: dict[str, str] | None = None) -> tuple[str, int]:
    command = [sys.executable, "-c", _FAULTS, choice]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **(env or {})}, check=True
    )
    answer, faults = done.stdout.split()
    return answer, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_memory_that_was_freed_is_taken_again_without_new_pages() -> None:
    """A page may be 4 KiB or 2 MiB, so the blocks need some thousand pages or some hundred."""
    usual, kept = _told("usual")[1], _told("kept")
    assert kept[0] == "True"
    assert kept[1] < usual / 20


def test_what_the_user_chose_for_the_allocator_stays() -> None:
    assert _told("kept", {"MALLOC_TRIM_THRESHOLD_": "131072"})[0] == "False"


def test_the_allocator_is_told_what_its_manual_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the numbers of malloc.h: M_MMAP_THRESHOLD is -3, M_TRIM_THRESHOLD -1, and -1 trims never."""
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    calls = list[tuple[int, int]]()

    def mallopt(parameter: int, value: int) -> int:
        calls.append((parameter, value))
        return int(value != 2**31 - 1)  # an old glibc

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    assert keep_freed_memory()
    assert calls == [(-3, 2**31 - 1), (-3, 2**25), (-1, -1)]
