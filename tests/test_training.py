"""Runs on one process: the files of a run, exact resumes, signals."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.cli import TINY, events, losses, metrics, run, status, trained
from tests.warm import running

FIELDS = (
    "attempt step tokens_seen samples_seen time loss loss_mean perplexity grad_norm grad_norm_mean "
    "grad_norm_max skipped_steps lr batch_rows batch_tokens tokens_per_sec_per_device tokens_per_sec "
    "tflops_per_device step_time_ms data_wait_ms forward_backward_ms forward_ms backward_ms clip_ms "
    "optimizer_ms eval_ms checkpoint_ms logging_ms mem_gib peak_mem_gib eta_s finish_at data_fingerprint"
).split()


@pytest.fixture
def whole(eight_steps: Path) -> Path:
    """Eight steps without a stop, a checkpoint at every second; not to be changed."""
    return eight_steps


def test_run_leaves_all_its_files(whole: Path) -> None:
    files = (
        "checkpoints config.json config.1.json log.txt .lock metrics.jsonl status.json tensorboard"
    )
    assert {path.name for path in whole.iterdir()} == set(files.split())
    steps = {"step_2", "step_4", "step_6", "step_8"}
    assert {path.name for path in (whole / "checkpoints").iterdir()} == {".lock", *steps}
    ended = {"status": "finished", "step": 8, "reason": "finished 8 steps", "worlds": [[0, 1]]}
    assert status(whole) == ended
    records = metrics(whole)
    assert list(records) == list(range(1, 9)) and records[1].keys() >= set(FIELDS)
    assert records[8]["tokens_seen"] == 8 * 2 * 64
    assert records[1]["loss"] == pytest.approx(math.log(512), rel=0.05)
    config = json.loads((whole / "config.json").read_text())
    assert config["data"]["seq_length"] == 64
    assert config["resolved"]["model"]["num_params"] > 100_000


def test_first_report_has_no_rate(whole: Path) -> None:
    """Its only step compiles and warms up: it said `47 tok/s/device … 8:31:52 left`."""
    lines = re.findall(r"step \d/8  loss .*", (whole / "log.txt").read_text())
    shown = [("tok/s" in line, " left" in line) for line in lines]
    assert shown == [(False, False)] + 7 * [(True, True)]
    assert metrics(whole)[1]["eta_s"] > 0  # metrics.jsonl keeps its fields


def test_report_has_means_of_its_interval(whole: Path, tmp_path: Path) -> None:
    """Lines between reports have step and time only."""
    argv = (*TINY[:-1], "--report_interval=4", "--print_interval=2", "--checkpoint_interval=2")
    more = ("--num_steps=8", "--trackers=none", "--diagnostics=True", "--log_num_zeros=True")
    output = trained(*argv, *more, f"--output_dir={tmp_path}")
    assert "\r" not in output and "\x1b" not in output and not (tmp_path / "tensorboard").exists()
    assert re.findall(r"^\d\d:\d\d:\d\d step (\d)/8$", output, re.MULTILINE) == ["2", "6"]
    every, some = metrics(whole), metrics(tmp_path)
    assert list(some) == [1, 4, 8]
    for first, last in ((1, 1), (2, 4), (5, 8)):  # all steps have the same number of labels
        between, record = [every[step] for step in range(first, last + 1)], some[last]
        mean = sum(each["loss"] for each in between) / len(between)
        assert record["loss"] == every[last]["loss"]
        assert record["loss_mean"] == pytest.approx(mean)
        assert record["grad_norm_max"] == max(each["grad_norm"] for each in between)
        assert record["host_rss_gib"] > 0 and "shm_gib" in record and "grad_zeros" in record
    assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
    assert record["forward_backward_ms"] == record["forward_ms"] + record["backward_ms"] > 0
    phases = ("data_wait", "forward_backward", "clip", "optimizer")
    total = sum(record[f"{name}_ms"] for name in phases)
    assert 0.5 * record["step_time_ms"] < total <= record["step_time_ms"]
    assert record["checkpoint_ms"] > 0
    (end,) = events(tmp_path, "end")
    assert end["step"] == 8
    assert min(end[f"{name}_s"] for name in ("forward", "backward", "optimizer", "logging")) > 0


def test_resumed_run_is_bit_equal(whole: Path, tmp_path: Path) -> None:
    kept = tmp_path / "checkpoints" / "step_2"
    shutil.copytree(whole / "checkpoints" / "step_2", kept)
    trained(*TINY, "--num_steps=8", "--checkpoint_interval=2", f"--output_dir={tmp_path}")
    for step, record in metrics(tmp_path).items():
        for name in ("loss", "lr", "grad_norm", "tokens_seen", "data_fingerprint"):
            assert record[name] == metrics(whole)[step][name]
    assert list(metrics(tmp_path)) == [3, 4, 5, 6, 7, 8]
    assert tensors(tmp_path / "checkpoints" / "step_8") == tensors(whole / "checkpoints" / "step_8")


def tensors(folder: Path) -> dict[str, bytes]:
    """Name → bytes of every tensor of a checkpoint."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def test_load_path_continues_or_starts_afresh(whole: Path, tmp_path: Path) -> None:
    argv = [*TINY, f"--ckpt_load_path={whole / 'checkpoints' / 'step_4'}"]
    trained(*argv, "--num_steps=6", f"--output_dir={tmp_path / 'on'}")
    assert losses(tmp_path / "on") == losses(whole)[4:6]
    argv = [*TINY, f"--ckpt_load_path={whole}", "--load_model_only=True"]  # a run directory
    output = trained(*argv, "--num_steps=1", f"--output_dir={tmp_path / 'fresh'}")
    assert f"loading weights only, from step 8 of {whole / 'checkpoints'}" in output
    ((step, record),) = metrics(tmp_path / "fresh").items()
    first = metrics(whole)[1]
    assert step == 1 and record["data_fingerprint"] == first["data_fingerprint"]
    assert record["loss"] != first["loss"]


def test_finished_run_is_left_as_it_is(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    before = (folder / "metrics.jsonl").read_bytes()
    output = trained(*TINY, "--num_steps=8", "--checkpoint_interval=2", f"--output_dir={folder}")
    assert "already finished at step 8; raise --num_steps or choose another --run_name" in output
    assert status(folder)["status"] == "finished"
    for flag, words in (
        ("--num_steps=6", "--num_steps=6 is below the newest checkpoint (step 8"),
        ("--num_layers=3", "--num_layers=3 does not match the checkpoint"),
    ):
        result = run(*TINY, "--num_steps=9", flag, f"--output_dir={folder}")
        assert result.returncode == 2 and result.stderr.count("\n") == 1 and words in result.stderr
        assert status(folder)["status"] == "finished"
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_resume_keeps_the_global_batch(tmp_path: Path) -> None:
    argv = [*TINY, f"--output_dir={tmp_path}"]
    trained(*argv, "--num_steps=1", "--batch_size=16")
    output = trained(*argv, "--num_steps=2", "--batch_size=5")
    assert (
        "16 sequences x 1 rank x 1 accumulation step, now 4 sequences x 1 rank x 4 accumulation steps"
        in output
    )
    trained(*argv, "--num_steps=3", "--global_batch_size=2")
    assert [record["batch_rows"] for record in metrics(tmp_path).values()] == [16, 16, 2]


def test_sigterm_saves_and_asks_to_be_resumed(tmp_path: Path) -> None:
    argv = [*TINY, "--num_steps=100000", f"--output_dir={tmp_path}"]
    records = tmp_path / "metrics.jsonl"
    with running(argv) as process:
        deadline = time.monotonic() + 60
        while not records.exists() or records.read_text().count("\n") < 3:
            assert time.monotonic() < deadline and process.exitcode is None
            time.sleep(0.05)
        assert status(tmp_path)["status"] == "running"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        process.join(60)
        assert process.exitcode == 75
    stopped = status(tmp_path)
    assert stopped["status"] == "resume_me" and "SIGTERM" in stopped["reason"]
    assert (tmp_path / "checkpoints" / f"step_{stopped['step']}").is_dir()
    trained(*TINY, f"--num_steps={stopped['step'] + 1}", f"--output_dir={tmp_path}")
    assert status(tmp_path)["status"] == "finished"
    assert metrics(tmp_path)[stopped["step"] + 1]["attempt"] == 2


def test_users_stream_trains_and_resumes(tmp_path: Path) -> None:
    builder = ("--dataset_builder=tests.data.custom_stream:build", "--data_kwargs=stride=2")
    argv = ("--model_variant=tiny", *builder, *TINY[2:], f"--output_dir={tmp_path}")
    trained(*argv, "--num_steps=2")
    trained(*argv, "--num_steps=3")
    assert len({record["data_fingerprint"] for record in metrics(tmp_path).values()}) == 3


def test_synthetic_pattern_is_learned(tmp_path: Path) -> None:
    flags = ("--num_steps=80", "--batch_size=8", "--learning_rate=5e-3", "--trackers=none")
    trained(*TINY, *flags, f"--output_dir={tmp_path}")
    found = losses(tmp_path)
    assert found[-1] < 0.6 * found[0], (found[0], found[-1])
