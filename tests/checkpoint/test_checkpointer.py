"""Saving and loading: exact, in the background, complete or absent, and without running code of a file."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pickle
import re
import shutil
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from fms_fsdp.__main__ import main as command
from fms_fsdp.checkpoint import folders
from fms_fsdp.checkpoint.folders import (
    FILES,
    INDEX,
    METADATA,
    STATE,
    Checksum,
    checkpoint_steps,
    clean_up,
    complete_steps,
    corrupt_files,
    delete,
    find_checkpoint,
    leftovers,
    problem,
    read_files,
    read_metadata,
)
from fms_fsdp.checkpoint.io import SaveFailed, collect_tensors, load_checkpoint, write_checkpoint
from fms_fsdp.config import CheckpointConfig, OptimConfig, TrainConfig
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.errors import UserError
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.init import init_weights
from fms_fsdp.models.llama import Llama
from fms_fsdp.optim.optimizers import Optimizers, build_optimizers
from fms_fsdp.run.checkpoints import CheckpointManager
from fms_fsdp.state import CurrentStep, TrainMetadata
from tests.checkpoint.signing import sign
from tests.distributed.launch import run_ranks
from tests.specs import resolved


def shape(width: int = 8) -> TransformerConfig:
    return TransformerConfig(1, width, width, 1, 1, 16, max_seq_len=4)


ALONE = Mesh(ParallelDims("none"), 0, "cpu")
RECORD = resolved(TrainConfig(), model=shape()).saved_with


def state_of(step: int) -> TrainMetadata:
    return TrainMetadata(step, tokens_seen=96, **RECORD)


def made(seed: int, width: int = 8) -> tuple[nn.Module, Optimizers]:
    model = Llama(shape(width))
    init_weights(model, seed)
    optimizer = build_optimizers(OptimConfig(), model)
    tokens = torch.arange(4)[None] + seed
    model(tokens, tokens.roll(-1, 1))[0].backward()
    optimizer.step(lambda base: base, torch.tensor(1.0))
    optimizer.zero_grad()
    return model, optimizer


def values(model: nn.Module, optimizer: Optimizers) -> list[torch.Tensor]:
    states = [value for _, value in sorted(optimizer.state_dict().items())]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *states]]


def saved(
    root: Path, *steps: int, in_background: bool = False, width: int = 8
) -> list[torch.Tensor]:
    """Checkpoints of a model of seed 0 for `steps`; what was in it."""
    root.mkdir(exist_ok=True)
    model, optimizer = made(0, width)
    manager, state = manager_of(root, model, optimizer, in_background=in_background)
    for step in steps:
        state.step = step
        manager.save(state, wait=False)
    manager.close()
    return values(model, optimizer)


def manager_of(
    root: Path, model: nn.Module, optimizers: Optimizers, *, in_background: bool, **more: Any
) -> tuple[CheckpointManager, Any]:
    """The checkpoints of a launch that starts at step 0, and its state, which tests change."""
    flags = {name: more.pop(name) for name in list(more) if name.startswith("keep_")}
    section = CheckpointConfig(checkpoint_interval=1, async_checkpoint=in_background, **flags)
    run: Any = SimpleNamespace(config=SimpleNamespace(checkpoint=section), saved_with=RECORD)
    stream = SimpleNamespace(state_dict=dict)
    seen: dict[str, Any] = dict(
        tokens_seen=96, sequences_seen=0, val_loss=None, current=CurrentStep(), loss_scale=None
    )
    health = dict(non_finite_steps=0, last_finite_step=0, evaluation_pending=False)
    ends = dict(step=0, num_steps=100, stop_reason="", is_done=False)
    state: Any = SimpleNamespace(
        model=model, optimizers=optimizers, stream=stream, **seen, **ends, **health
    )
    run_dir: Any = SimpleNamespace(checkpoints=root, attempt=1, folder=root.parent)
    mesh: Any = SimpleNamespace(is_main=not dist.is_initialized() or dist.get_rank() == 0)

    def ignore(*_: object, **__: object) -> None: ...

    others: Any = SimpleNamespace(settle=ignore, alive=ignore, event=more.pop("event", ignore))
    return CheckpointManager(run, run_dir, mesh, state, others, others, others, **more), state


@pytest.mark.parametrize("in_background", [False, True])
def test_save_and_load_keep_every_bit(tmp_path: Path, in_background: bool) -> None:
    before = saved(tmp_path, 3, in_background=in_background)
    model, optimizer = made(1)
    checkpoint = find_checkpoint(tmp_path)
    assert checkpoint is not None and checkpoint.step == 3 and checkpoint.metadata.tokens_seen == 96
    load_checkpoint(checkpoint.folder, model, optimizer, is_alone=True)
    assert all(map(torch.equal, before, values(model, optimizer)))
    weights_only, fresh = made(2)
    moments = values(nn.Identity(), fresh)
    load_checkpoint(checkpoint.folder, weights_only, None, is_alone=True)
    assert torch.equal(before[0], next(weights_only.parameters()))
    assert all(map(torch.equal, moments, values(nn.Identity(), fresh)))


def test_weights_that_model_lacks_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 3)
    model, _ = made(1)
    del model.head.norm
    load_checkpoint(tmp_path / "step_3", model, None, is_alone=True)
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warnings == [
        f"skipped 1 tensor of {tmp_path}/step_3 that the model does not have: head.norm.weight"
    ]


def test_training_continues_during_background_save(tmp_path: Path) -> None:
    """Changes after `save` returns are not saved."""
    model, optimizer = made(0, width=256)
    before = values(model, optimizer)
    manager, state = manager_of(tmp_path, model, optimizer, in_background=True)
    for state.step in (1, 2):  # the second reuses the first one's host memory
        manager.save(state, wait=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    manager.close()
    again, other = made(1, width=256)
    load_checkpoint(tmp_path / "step_1", again, other, is_alone=True)
    assert all(map(torch.equal, before, values(again, other)))
    load_checkpoint(tmp_path / "step_2", again, other, is_alone=True)
    assert all(not parameter.any() for parameter in again.parameters())


def test_background_saves_start_no_openmp_threads_beside_those_of_the_loop(tmp_path: Path) -> None:
    """With more of them than cores, libgomp lets each sleep at once, and small steps take twice as long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        manager, _ = manager_of(tmp_path, *made(0), in_background=True)
        assert manager._pool.submit(torch.get_num_threads).result() == 1
        with ThreadPoolExecutor(1) as other:
            assert other.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2
        manager.close()
    finally:
        torch.set_num_threads(num_threads)


def test_background_save_keeps_data_state_of_its_step(tmp_path: Path) -> None:
    model, optimizer = made(0)
    manager, state = manager_of(tmp_path, model, optimizer, in_background=True)
    batches_read = [1]
    state.stream.state_dict = lambda: {"read": batches_read}
    state.step = 1
    has_trained = threading.Event()
    manager._pool.submit(has_trained.wait)
    manager.save(state, wait=False)
    batches_read.append(2)
    has_trained.set()
    manager.close()
    assert read_metadata(tmp_path / "step_1").data == {"read": [1]}


def test_background_save_never_waits_for_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is faked: its stream records who waits for it."""
    model, optimizer = made(0, width=64)  # an optimizer asks torch.accelerator for the real one
    waits: list[str] = []
    stream = SimpleNamespace(device_type="cuda", synchronize=lambda: waits.append("synchronize"))
    for name, fake in {
        "is_available": lambda: True,
        "current_device": lambda: 5,
        "set_device": lambda device: waits.append(f"set_device {device}"),
        "current_stream": lambda *_: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    manager, state = manager_of(tmp_path, model, optimizer, in_background=True)
    state.step = 3
    manager.save(state, wait=False)
    manager.close()
    assert waits == ["set_device 5"]  # its thread belongs to this rank's GPU, not to the first
    assert not is_bad(tmp_path / "step_3")


@pytest.mark.parametrize("why", ["and 0.0 MiB is free", "CUDA error"])
def test_saves_wait_without_memory_for_copies(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: str,
) -> None:
    def cannot_pin(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")

    if why == "CUDA error":
        monkeypatch.setattr("fms_fsdp.run.checkpoints.host_copies", cannot_pin)
    monkeypatch.setattr(logging.getLogger("fms_fsdp"), "propagate", True)
    model, optimizer = made(0)
    manager, state = manager_of(tmp_path, model, optimizer, in_background=True, host_bytes=100)
    for state.step in (1, 2):
        manager.save(state, wait=False)
        assert complete_steps(tmp_path)[-1] == state.step
    manager.close()
    # another test may have given the logger a second way to the root
    (line,) = {record.getMessage() for record in caplog.records if record.name == "fms_fsdp.rank"}
    assert (
        line.startswith("no host memory for background saves (")
        and why in line
        and "\n" not in line
    )


DAMAGES = {
    "flip": lambda content: bytes([content[0] ^ 4]) + content[1:],
    "cut": lambda content: content[:-3],
    "lengthen": lambda content: content + b"x",
    "remove": lambda content: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_corrupt_file_is_noticed(tmp_path: Path, damage: str) -> None:
    saved(tmp_path, 1, 2)
    names = [*read_files(tmp_path / "step_2"), FILES]
    assert set(names) == {"__0_0.distcp", METADATA, INDEX, STATE, FILES}
    for name in names:
        case = tmp_path / name.strip(".")
        for step in ("step_1", "step_2"):
            shutil.copytree(tmp_path / step, case / step)
        folder = case / "step_2"
        content = DAMAGES[damage]((folder / name).read_bytes())
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        wrong = problem(folder) or corrupt_files(folder)[0]
        assert wrong and (name in wrong or name == FILES), (name, wrong)
        found = find_checkpoint(case)
        assert found is not None
        if found.step == 2:  # only a read of every byte tells
            assert damage == "flip" and name in ("__0_0.distcp", INDEX)
            found = find_checkpoint(case, corrupt={folder: wrong})
        assert found is not None and found.step == 1 and folder in found.skipped
        assert command(["ckpt", "verify", f"--path={case}"]) == 2


def is_bad(folder: Path) -> bool:
    return bool(problem(folder) or corrupt_files(folder))


def checksum(*pieces: bytes) -> int:
    total = Checksum()
    for piece in pieces:
        total.update(piece)
    return total.value


@pytest.mark.parametrize("size", [0, 1, 7, 4095, 4096, 4097, 100_000])
def test_checksum_ignores_how_a_file_is_written(size: int) -> None:
    rng = np.random.default_rng(size)
    data = rng.integers(0, 256, size, dtype=np.uint8).tobytes()
    expected = checksum(data)
    for length in (1, 100, 4096, 5000):
        pieces = (data[start : start + length] for start in range(0, size, length))
        assert checksum(*pieces) == expected
    for place in rng.integers(0, max(1, size), 20 if size else 0).tolist():
        flipped = bytes([data[place] ^ (1 << int(rng.integers(8)))])
        assert checksum(data[:place] + flipped + data[place + 1 :]) != expected


def test_misplaced_and_lost_pages_change_the_checksum() -> None:
    pages = [bytes([value]) * 4096 for value in (1, 2, 3)]
    orders = ([0, 1, 2], [1, 0, 2], [0, 2, 1], [0, 1], [0, 1, 1])
    assert len({checksum(*(pages[i] for i in order)) for order in orders}) == 5


def test_only_complete_folders_count(tmp_path: Path) -> None:
    saved(tmp_path, 2, 9, 10)
    partial = tmp_path / "step_11.partial-1"
    shutil.copytree(tmp_path / "step_9", partial)
    shutil.copytree(tmp_path / "step_9", tmp_path / "step_x")
    (tmp_path / "step_12").mkdir()
    (tmp_path / "step_13").write_text("a file")
    assert complete_steps(tmp_path) == [2, 9, 10] and complete_steps(tmp_path / "nowhere") == []
    newest, one = find_checkpoint(tmp_path), find_checkpoint(tmp_path / "step_2")
    assert newest is not None and newest.step == 10 and (tmp_path / "step_12") in newest.skipped
    assert one is not None and one.step == 2
    assert find_checkpoint(tmp_path / "nowhere") is None and find_checkpoint(tmp_path, 3) is None
    with pytest.raises(ValueError, match="step_12: files.json is missing"):
        find_checkpoint(tmp_path / "step_12")
    assert list(clean_up(tmp_path)) == [partial] and leftovers(tmp_path) == []


def test_step_folder_of_another_step_is_an_error(tmp_path: Path) -> None:
    """--ckpt_load_path=…/step_4 --resume_step=2 resumed from step 4."""
    saved(tmp_path, 2, 4)
    same, none = (find_checkpoint(tmp_path / f"step_{step}", step=4) for step in (4, 6))
    assert same is not None and same.step == 4 and none is None
    with pytest.raises(UserError, match="step_4 is not the checkpoint of step 2; name the folder"):
        find_checkpoint(tmp_path / "step_4", step=2)


def test_link_to_missing_folder_is_skipped_aloud(tmp_path: Path) -> None:
    """As to a disk that is not mounted: it counted as deleted, and an older step was resumed silently."""
    saved(tmp_path, 2)
    link = tmp_path / "step_4"
    link.symlink_to(tmp_path / "archive" / "step_4")
    found = find_checkpoint(tmp_path)
    assert found is not None and found.step == 2
    assert found.skipped == {link: "files.json is missing"}
    shutil.rmtree(tmp_path / "step_2")
    with pytest.raises(UserError, match=r"no usable checkpoint \(step_4: files.json is missing\)"):
        find_checkpoint(tmp_path)
    saved(tmp_path, 4)  # no checkpoint of this step could be written
    assert complete_steps(tmp_path) == [4]
    assert leftovers(tmp_path) == [(tmp_path / "step_4.damaged-1", "damaged")]


def test_checkpoint_with_due_export_is_kept(tmp_path: Path) -> None:
    model, optimizer = made(0)
    due = {1}
    manager, state = manager_of(tmp_path, model, optimizer, in_background=False, keep_last_n=1)
    exporter: Any = SimpleNamespace(
        due_steps=lambda: due, finish=lambda alive, is_stopped: due.clear(), close=lambda: None
    )
    manager.exporter = exporter
    for step in (1, 2, 3):
        state.step = step
        manager.save(state, wait=True)
    manager.finish(state)
    assert checkpoint_steps(tmp_path) == [1, 3]
    manager.finish_exports(state, lambda: False)
    assert checkpoint_steps(tmp_path) == [3]
    manager.close()


def test_corrupt_folder_of_same_step_is_renamed(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    (tmp_path / "step_4" / STATE).unlink()
    saved(tmp_path, 4)
    assert complete_steps(tmp_path) == [4]
    assert leftovers(tmp_path) == [(tmp_path / "step_4.damaged-1", "damaged")]


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch exploded",)


def test_loading_runs_no_code_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with right checksums: whoever can write the files can write those too."""
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, 1)
    folder = tmp_path / "step_1"
    (folder / METADATA).write_bytes(pickle.dumps(Bomb()))
    (folder / INDEX).unlink()  # else `.metadata` is not read
    sign(folder)
    assert not problem(folder)
    with pytest.raises(UserError, match="posix.system is not allowed"):
        load_checkpoint(folder, *made(0), is_alone=True)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("in_background", [False, True])
def test_full_disk_fails_the_save_only(small_disk: Path, in_background: bool) -> None:
    model, optimizer = made(0, width=158)  # 2.2 MB a checkpoint
    told = list[str]()
    manager, state = manager_of(
        small_disk,
        model,
        optimizer,
        in_background=in_background,
        event=lambda *_, reason: told.append(reason),
    )
    state.step = 1
    manager.save(state, wait=True)
    state.step = 2
    manager.save(state, wait=False)
    manager.close()
    assert len(told) == 1 and re.search("needs .* of disk space, and .* is free", told[0])
    assert complete_steps(small_disk) == [1] and not is_bad(small_disk / "step_1")


def test_stop_without_its_checkpoint_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """status.json said that the run resumes, at a step that was not saved."""
    manager, state = manager_of(tmp_path, *made(0), in_background=False)
    state.step = 1
    manager.save(state, wait=True)
    monkeypatch.setattr("fms_fsdp.checkpoint.io.free_bytes", lambda path: 0)
    state.step = 2
    state.stop_reason = "stopped by SIGTERM"
    manager.save(state, wait=True)
    manager.close()
    assert state.stop_reason.startswith("stopped by SIGTERM (not saved: rank 0: it needs ")
    assert state.stop_reason.endswith("; the newest is of step 1)")


def test_disk_that_fills_while_writing_fails_save(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone else's file takes the room between the look at the disk and the write."""
    model, optimizer = made(0, width=158)
    tensors = collect_tensors(model, optimizer)
    write_checkpoint(tensors, small_disk, state_of(1))
    monkeypatch.setattr("fms_fsdp.checkpoint.io.free_bytes", lambda path: 2**40)
    with pytest.raises(SaveFailed, match="No space left on device|unexpected pos|write"):
        write_checkpoint(tensors, small_disk, state_of(2))
    assert complete_steps(small_disk) == [1] and not is_bad(small_disk / "step_1")
    shutil.rmtree(small_disk / "step_2.partial-1")
    delete(small_disk / "step_1")
    write_checkpoint(tensors, small_disk, state_of(3))
    assert complete_steps(small_disk) == [3]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_folder_without_sync_gets_checkpoints(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
) -> None:
    """None was ever saved on CIFS and gocryptfs. No such file system can be mounted in CI: fsync says so."""
    fsync = os.fsync

    def fsync_of_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_of_files)
    tensors = collect_tensors(*made(0))
    if code == errno.EIO:  # not a missing capability
        with pytest.raises(SaveFailed, match="Input/output error") as raised:
            write_checkpoint(tensors, tmp_path, state_of(1))
        assert raised.value.remedy == f"check the file system of {tmp_path}"
        return
    for step in (1, 2):
        write_checkpoint(tensors, tmp_path, state_of(step))
    assert complete_steps(tmp_path) == [1, 2]
    assert capsys.readouterr().err.count("note: the file system cannot sync folders") == 1


def late_save(root: str, late_rank: int) -> list[str]:
    """All ranks save, one of them a second after the others."""
    if dist.get_rank() == late_rank:
        time.sleep(1)
    model, optimizer = made(0)
    manager, state = manager_of(Path(root), model, optimizer, in_background=True)
    state.step = 3
    manager.save(state, wait=False)
    manager.close()
    dist.barrier()
    return sorted(path.name for path in (Path(root) / "step_3").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("late_rank", [0, 1])
def test_ranks_reach_a_save_in_any_order(tmp_path: Path, late_rank: int) -> None:
    """A rank makes the folder before rank 0 does: rank 0 neither fails nor removes its files."""
    names = run_ranks(late_save, 2, str(tmp_path), late_rank)
    assert names[0] == names[1] and METADATA in names[0] and STATE in names[0]
    assert not is_bad(tmp_path / "step_3")


def test_unreadable_checkpoint_is_not_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Storage that fails for a moment made valid checkpoints look corrupt, and they were deleted."""
    saved(tmp_path, 1, 2, 3)
    (tmp_path / "step_1" / STATE).unlink()
    open_file = folders.open_file

    def failing(path: Path) -> FileIO:
        if path.parent.name == "step_3":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return open_file(path)

    monkeypatch.setattr(folders, "open_file", failing)
    path = f"--path={tmp_path}"
    assert command(["ckpt", "list", path]) == 0
    assert "files.json cannot be read: Input/output error" in capsys.readouterr().out
    assert command(["ckpt", "prune", path, "--leftovers", "--yes"]) == 0
    assert f"kept {tmp_path}/step_3: files.json cannot be read" in capsys.readouterr().out
    assert sorted(folder.name for folder in tmp_path.glob("step_*")) == ["step_2", "step_3"]
    assert command(["ckpt", "verify", path]) == 2
    assert capsys.readouterr().err.endswith(
        "has 1 checkpoint that cannot be read (step_3); repair the storage, and verify again\n"
    )


def test_ckpt_list_and_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, path = tmp_path / "run" / "checkpoints", f"--path={tmp_path / 'run'}"
    root.mkdir(parents=True)
    saved(root, 1, 2, 3, 4)
    for step in (3, 4):
        (root / f"step_{step}" / STATE).unlink()

    def steps() -> list[str]:
        return sorted(folder.name for folder in root.glob("step_*"))

    assert command(["ckpt", "list", path]) == 0
    head, *listed = capsys.readouterr().out.splitlines()
    assert head.split() == ["checkpoint", "GiB", "tokens", "validation", "loss", "state"]
    assert [line.split()[0] for line in listed] == steps()
    assert listed[0].split()[2] == "96" and listed[0].endswith("complete") and STATE in listed[2]
    prune = ["ckpt", "prune", path]
    assert command([*prune, "--after=1"]) == 0
    assert "would delete" in capsys.readouterr().out and len(steps()) == 4
    assert command([*prune, "--leftovers", "--yes"]) == 0 and steps() == ["step_1", "step_2"]
    assert command([*prune, "--after=1", "--yes"]) == 0 and steps() == ["step_1"]
    assert command([*prune, "--keep_last_n=1", "--yes"]) == 2
    assert "keep_last_n is not a flag; it was removed" in capsys.readouterr().err
    assert command(["ckpt", "verify", path]) == 0 and "valid: 5 files" in capsys.readouterr().out
    empty = tmp_path / "empty"
    empty.mkdir()
    assert command(["ckpt", "verify", f"--path={empty}"]) == 2
    assert "has no checkpoint to verify" in capsys.readouterr().err
    assert command(["ckpt", "list", f"--path={empty}"]) == 0
    assert capsys.readouterr().out == f"no checkpoint in {empty}\n"
    assert command(["ckpt", "list", f"--path={tmp_path / 'nowhere'}"]) == 2
