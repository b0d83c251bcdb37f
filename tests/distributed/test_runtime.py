"""The world of a process, by the variables of torchrun."""

from __future__ import annotations

import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fms_fsdp import versions
from fms_fsdp.config import TrainConfig
from fms_fsdp.distributed import runtime
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.runtime import _store_of_attempt, check_open_file_limit
from fms_fsdp.distributed.world import World
from fms_fsdp.errors import UserError
from fms_fsdp.run.checks import machine_notes
from fms_fsdp.run.machine import Machine
from tests.cli import TINY
from tests.distributed.launch import run_ranks
from tests.specs import machine
from tests.warm import launch


def test_long_torchrun_variable_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "9" * 5000)
    with pytest.raises(ValueError) as caught:
        World.from_env()
    assert str(caught.value).startswith("WORLD_SIZE=999") and len(str(caught.value)) < 400


def test_attempt_ignores_keys_of_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of torchrun's agent outlives the workers."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    open_store = partial(_store_of_attempt, timeout=timedelta(seconds=60))
    ranks = [World(rank, rank, 3, 3) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        before = list(threads.map(open_store, ranks))
        before[0].set("address", "of the first attempt")
        stores = list(threads.map(open_store, ranks))
    assert not any(store.check(["address"]) for store in stores)
    stores[1].set("address", "of the second attempt")
    assert {store.get("address") for store in stores} == {b"of the second attempt"}
    assert before[2].get("address") == b"of the first attempt"


def _work_beyond_the_timeout() -> tuple[list[Path], str, int]:
    """Returns rank 0's result, found after the timeout of collectives, and its error; then the result
    of this rank, of which rank 1 takes that long."""
    runtime.KEEP_ALIVE_S = 0.2

    def listing() -> list[Path]:
        time.sleep(3)
        return [Path("a")]

    def failing() -> None:
        raise UserError("--data_path=x is not a folder; correct it")

    group = dist.distributed_c10d._get_default_group()
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=2))
    found = runtime.run_long_on_rank0(listing)
    with pytest.raises(UserError) as caught:
        runtime.run_long_on_rank0(failing)

    def own() -> int:
        if dist.get_rank() == 1:
            time.sleep(3)
        return dist.get_rank()

    return found, str(caught.value), runtime.run_long_on_every_rank(own)


@pytest.mark.slow
def test_long_work_of_a_rank_meets_no_timeout() -> None:
    expected = [Path("a")], "--data_path=x is not a folder; correct it"
    found = run_ranks(_work_beyond_the_timeout, 3)
    assert found == [(*expected, rank) for rank in range(3)]


def test_store_of_several_agents_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of one node, or with a store per attempt, restart without a limit."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    get_notes = partial(machine_notes, TrainConfig(), machine(), ParallelDims("none"))
    (note,) = get_notes()
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node" in note
    for name, value in (
        ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),
        ("TORCHELASTIC_MAX_RESTARTS", "0"),
        ("GROUP_WORLD_SIZE", "1"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not list(get_notes())


def test_help_with_incomplete_launch_variables_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "1")
    ended = launch(["--help"])
    assert ended.returncode == 0 and "usage" in ended.stdout.lower() and not ended.stderr


def limit_open_files(soft: int, hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow  # twelve ranks
def test_small_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    """With a connection between every two ranks, rank 0 alone has more than 40 files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    flags = [*TINY, "--num_steps=1", "--checkpoint_interval=1", f"--output_dir={tmp_path}"]
    ended = launch(flags, 12, before=partial(limit_open_files, 40, hard))
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert (tmp_path / "checkpoints" / "step_1" / "__11_0.distcp").exists()


def test_too_few_open_files_are_an_error() -> None:
    """One rank of each node says so."""
    for rank, needed in ((0, 3136), (1, 2112), (8, 2112)):
        with pytest.raises(UserError) as caught:
            check_open_file_limit(World(rank, rank % 8, 1024, 8), 1024)
        assert f"ulimit -n=1024 must be at least {needed} for 1024 ranks" in str(caught.value)
        assert caught.value.on_one_rank == (rank % 8 == 0)
    check_open_file_limit(World(0, 0, 1024, 8), 4096)


def reach_limit() -> None:
    """Makes this process meet the limit where rank 0 has checked another one."""
    if os.environ["RANK"] == "1":
        runtime.raise_open_file_limit = lambda: 1 << 16  # type: ignore[assignment]
        limit_open_files(14, 14)


@pytest.mark.slow  # ten seconds until the harness ends rank 0
def test_rank_without_free_files_says_so(tmp_path: Path) -> None:
    flags = [*TINY, "--num_steps=1", f"--output_dir={tmp_path / 'run'}"]
    ended = launch(flags, 2, before=reach_limit)
    line = "[rank 1] failed: this process may not open more files; raise the limit"
    assert line in ended.stderr, ended.stderr[-3000:]


def test_commit_is_of_this_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIT_DIR, as in a hook of git, had the commit of the other repository recorded."""
    own = versions._git_state.__wrapped__()
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    assert versions._git_state.__wrapped__() == own


def machine_and_git_calls(num_ranks: int) -> tuple[str, int]:
    own = World(dist.get_rank(), dist.get_rank(), num_ranks, num_ranks)
    device = torch.device("cpu")
    measured = Machine.here(own, device).measured(device)
    return measured.versions["torch"], versions._git_state.cache_info().misses


def test_rank_0_alone_asks_git() -> None:
    assert run_ranks(machine_and_git_calls, 2, 2) == [
        (torch.__version__, 1),
        (torch.__version__, 0),
    ]
