"""Waiting threads, freed memory, the allocator and garbage collection."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fms_fsdp.process import (
    available_cores,
    keep_freed_memory,
    let_gpu_memory_grow,
    process_age_s,
    raise_open_file_limit,
    set_thread_waiting,
)
from tests.cli import ROOT


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, {"GOMP_SPINCOUNT": "3000"}),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, {"GOMP_SPINCOUNT": "3000"}),
        ({"LOCAL_WORLD_SIZE": "2"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "8"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ({"OMP_NUM_THREADS": "zero"}, {"GOMP_SPINCOUNT": "3000"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {}),
        ({"GOMP_SPINCOUNT": "7"}, {}),
    ],
)
def test_threads_spin_if_each_has_a_core(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], chosen: dict[str, str]
) -> None:
    """Variables of the user are kept."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "environ", dict(given))
    set_thread_waiting()
    assert os.environ == given | chosen


@pytest.mark.parametrize("given", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", ""])
def test_gpu_memory_grows_in_place_by_default(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    before = {given: "backend:cudaMallocAsync"} if given else {}
    monkeypatch.setattr(os, "environ", dict(before))
    let_gpu_memory_grow()
    assert os.environ == (before or {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})


@pytest.mark.parametrize("module", ["main_training", "fms_fsdp.__main__"])
def test_commands_set_the_allocator_before_torch(tmp_path: Path, module: str) -> None:
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


@pytest.mark.slow
def test_imports_are_not_garbage_collected() -> None:
    program = """
import gc
searched = []
gc.callbacks.append(lambda phase, details: searched.append(details["generation"]))
import main_training
# Rejects the batch after all imports.
status = main_training.main(["--use_dummy_dataset=True", "--batch_size=2", "--global_batch_size=3"])
print(status, 2 in searched, gc.isenabled())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["2", "False", "True"], done.stderr


# In forks of one process that has imported torch: for each choice, whether freed memory is kept, and how many
# pages the system had to fill while 30 blocks of 48 MiB were made and freed.
_FAULTS = """
import os, resource, torch
from fms_fsdp.process import keep_freed_memory
torch.set_num_threads(1)  # a fork has no other threads
for choice in ("usual", "kept", "set by the user"):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    if choice == "set by the user":
        os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"
    is_kept = choice != "usual" and keep_freed_memory()
    for _ in range(20):
        torch.ones(12 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(30):
        torch.ones(12 << 20)
    print(is_kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_freed_memory_is_reused_without_new_pages() -> None:
    """A page may be 4 KiB or 2 MiB, so the blocks need some thousand pages or some hundred."""
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    usual, kept, of_user = (line.split() for line in done.stdout.splitlines())
    assert kept[0] == "True" and int(kept[1]) < int(usual[1]) / 20
    assert of_user[0] == "False"


def test_mallopt_gets_the_documented_values(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((1_024, 4_096), 4_096),
        ((1_024, 1_048_576), 65_536),
        ((1_024, resource.RLIM_INFINITY), 65_536),
        ((100_000, 200_000), 100_000),
        ((4_096, 4_096), 4_096),
    ],
)
def test_soft_limit_of_open_files_is_raised(
    limits: tuple[int, int], raised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that is higher already stays."""
    applied = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: applied[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: applied.append(pair))
    assert raise_open_file_limit() == raised
    assert applied[-1] == (raised, limits[1])


def test_age_of_process_ignores_uptime_of_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """lxcfs virtualises /proc/uptime alone: the age was negative."""
    age_s = process_age_s()
    read_text = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, **how: "0.5 0.5" if path.name == "uptime" else read_text(path, **how),
    )
    assert age_s <= process_age_s() < age_s + 60


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ({}, 64),
    ],
)
def test_quota_of_a_container_limits_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], quota: int
) -> None:
    """A pod of 8 CPUs on a node of 192 started 192 workers."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert available_cores(tmp_path) == quota
