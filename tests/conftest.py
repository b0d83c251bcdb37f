"""Settings of the test processes, before torch is imported.

Idle threads sleep, because tests share cores. GPUs are hidden: all tests run on the CPU, wherever they run;
those in tests/gpu give their processes the first of the GPUs back.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from fms_fsdp.errors import note_once

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# kept under another name for tests/gpu, and for test processes of this one
os.environ.setdefault("GPUS_OF_TESTS", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# a shell without job control lets what runs in its background ignore Ctrl-C, and programs hand that on
signal.signal(signal.SIGINT, signal.default_int_handler)


# files whose tests go to any worker, one by one: one worker would still run such a file when all others end
SPREAD = (
    "tests/distributed/test_launches.py",
    "tests/distributed/test_recovery.py",
    "tests/distributed/test_training.py",
    "tests/run/test_launch.py",
    "tests/run/test_resume.py",
    "tests/scripts/test_scripts.py",
    "tests/test_flags_property.py",
    "tests/test_generate.py",
    "tests/test_training.py",
    "tests/hf/test_export.py",
)
MANY_TESTS = 100  # from which on their times are printed
gc.disable()  # until all tests are imported


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Under `--dist=loadfile` the tests of SPREAD go to any worker, one by one and in their order."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file in SPREAD else file

    if config.option.dist != "loadfile":
        return None
    config.option.loadscopereorder = False  # else what is spread would begin last
    return ByFile(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the seconds of all workers, and the slowest tests: each delays every later run."""
    seconds = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
    if len(seconds) < MANY_TESTS:
        return
    total = sum(seconds.values())
    terminalreporter.write_line(
        f"{total:,.0f} s of workers for {len(seconds):,} tests; the slowest:"
    )
    for name, duration in seconds.most_common(10):
        terminalreporter.write_line(f"{duration:6.1f} s  {name}")


@pytest.fixture(scope="session")
def eight_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of eight steps without a stop, a checkpoint at every second."""
    from tests.cli import TINY, made_once, trained

    flags = [*TINY, "--num_steps=8", "--checkpoint_interval=2"]
    return made_once(
        tmp_path_factory, "eight-steps", lambda run: trained(*flags, f"--output_dir={run}")
    )


@pytest.fixture(autouse=True)
def notes_are_told() -> None:
    """A test is told its notes on stderr, and anew: no earlier test's log or note keeps them."""
    log = logging.getLogger("fms_fsdp")
    log.handlers.clear()
    log.propagate = True  # else pytest hands it handlers of its own
    note_once.cache_clear()


@pytest.fixture
def traced_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile traces, checks and divides graphs as usual, and runs them without code of its own."""
    with compiling_by("aot_eager", monkeypatch):
        yield


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile generates code in the slow tests only; in the quick ones it is as in `traced_alone`."""
    with compiling_by(request.param, monkeypatch):
        yield


@contextmanager
def compiling_by(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes torch.compile, and compiled modules, use this backend where the caller names none."""
    import torch

    from fms_fsdp.models.attention import compiled

    torch.compiler.reset()
    compiled.cache_clear()  # it keeps compiled functions
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    yield
    compiled.cache_clear()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with mounted(tmp_path / "disk", "size=4m") as folder:
        yield folder


@pytest.fixture
def disk_without_size(tmp_path: Path) -> Iterator[Path]:
    """A file system that reports 0 blocks, as some of FUSE: a tmpfs without a limit."""
    with mounted(tmp_path / "disk", "size=0") as folder:
        yield folder


@contextmanager
def mounted(folder: Path, option: str) -> Iterator[Path]:
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", option, "tmpfs", folder], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mount.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
