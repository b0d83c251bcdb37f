"""The world of a process, by the variables of torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from fms_fsdp.distributed.runtime import World
from tests.cli import TINY
from tests.warm import launch

# of a worker of `torchrun --max_restarts=3`
SHARED_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc must be an integer"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be an integer from 1"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 requires RANK"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE=2 requires MASTER_ADDR"),
        ({"RANK": "abc"}, "RANK=abc requires WORLD_SIZE; start with torchrun, or unset RANK"),
        ({"RANK": "2", "WORLD_SIZE": "1"}, "RANK=2 must be an integer from 0 to 0"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 must be"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 must be"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "x"},
            "MASTER_PORT=x must be",
        ),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE=999"),
        (SHARED_STORE, "--max_restarts=3 of torchrun requires a store per attempt"),
    ],
)
def test_wrong_torchrun_variable_is_named(
    changes: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as caught:
        World.from_env()
    assert str(caught.value).startswith(words) and len(str(caught.value)) < 400


def test_restarts_in_shared_store_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of several nodes would find keys of the attempt before."""
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    for name, value in SHARED_STORE.items():
        monkeypatch.setenv(name, value)
    ended = launch([*TINY, "--num_steps=1", f"--output_dir={tmp_path / 'run'}"], 2)
    assert ended.statuses == [2, 2] and ended.stderr.count("\n") == 1
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in ended.stderr
    assert not (tmp_path / "run").exists()
    for name, value in (
        ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),
        ("TORCHELASTIC_USE_AGENT_STORE", "False"),
        ("TORCHELASTIC_MAX_RESTARTS", "0"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            World.from_env()


def test_incomplete_launch_variables_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch took itself for a rank that leaves the printing to another one, and printed nothing."""
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    ended = launch([*TINY, "--num_steps=1", f"--output_dir={tmp_path / 'run'}"])
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and "RANK" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_help_with_incomplete_launch_variables_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "1")
    ended = launch(["--help"])
    assert ended.returncode == 0 and "usage" in ended.stdout.lower() and not ended.stderr
