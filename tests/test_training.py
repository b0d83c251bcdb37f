"""The whole line on one process: what a run leaves behind, resumes exactly, and refuses."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.cli import ROOT, TINY, events, losses, metrics, run, status, trained

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


def test_a_run_leaves_everything_in_its_folder(whole: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    assert names == {
        "checkpoints",
        "config.json",
        "config.1.json",
        "log.txt",
        ".lock",
        "metrics.jsonl",
        "status.json",
        "tensorboard",
    }
    ended = {"status": "finished", "step": 8, "reason": "finished 8 steps", "worlds": [[0, 1]]}
    assert status(whole) == ended
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == [
        ".lock",
        "step_2",
        "step_4",
        "step_6",
        "step_8",
    ]
    records = metrics(whole)
    assert list(records) == list(range(1, 9))
    assert all(name in records[1] for name in FIELDS)
    assert records[8]["tokens_seen"] == 8 * 2 * 64
    assert records[1]["loss"] == pytest.approx(math.log(512), rel=0.05)
    config = json.loads((whole / "config.json").read_text())
    assert (
        config["data"]["seq_length"] == 64 and config["resolved"]["model"]["num_params"] > 100_000
    )


def test_the_first_report_of_a_launch_tells_no_rate_and_no_time_left(whole: Path) -> None:
    """Its only step compiles and warms up: `47 tok/s/device … 8:31:52 left` stood there."""
    lines = re.findall(r"step \d/8  loss .*", (whole / "log.txt").read_text())
    assert [("tok/s" in line, " left" in line) for line in lines] == [(False, False)] + 7 * [
        (True, True)
    ]
    assert metrics(whole)[1]["eta_s"] > 0  # metrics.jsonl keeps its fields


def test_a_report_tells_the_mean_of_its_interval_and_where_the_time_went(
    whole: Path, tmp_path: Path
) -> None:
    argv = [
        *TINY[:-1],
        "--report_interval=4",
        "--checkpoint_interval=2",
        "--num_steps=8",
        "--trackers=none",
    ]
    output = trained(*argv, f"--output_dir={tmp_path}")
    assert "\r" not in output and "\x1b" not in output and not (tmp_path / "tensorboard").exists()
    every, some = metrics(whole), metrics(tmp_path)
    assert list(some) == [1, 4, 8]
    for first, last in ((1, 1), (2, 4), (5, 8)):  # all steps have the same number of labels
        between = [every[step] for step in range(first, last + 1)]
        assert some[last]["loss"] == every[last]["loss"]
        assert some[last]["loss_mean"] == pytest.approx(
            sum(record["loss"] for record in between) / len(between)
        )
        assert some[last]["grad_norm_max"] == max(record["grad_norm"] for record in between)
    record = some[8]
    assert (
        record["perplexity"] == pytest.approx(math.exp(record["loss"]))
        and record["samples_seen"] == 16
    )
    assert record["forward_backward_ms"] == record["forward_ms"] + record["backward_ms"] > 0
    parts = sum(
        record[f"{name}_ms"] for name in ("data_wait", "forward_backward", "clip", "optimizer")
    )
    assert (
        0.5 * record["step_time_ms"] < parts <= record["step_time_ms"]
        and record["checkpoint_ms"] > 0
    )
    (end,) = events(tmp_path, "end")
    assert (
        end["step"] == 8
        and min(end[f"{part}_s"] for part in ("forward", "backward", "optimizer")) > 0
    )
    assert end["logging_s"] > 0


def test_a_finished_run_says_so_and_does_nothing(whole: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(whole, tmp_path / "run"))
    before = (whole / "metrics.jsonl").read_bytes()
    output = trained(*TINY, "--num_steps=8", "--checkpoint_interval=2", f"--output_dir={whole}")
    assert "already finished at step 8; raise --num_steps or choose another --run_name" in output
    assert (whole / "metrics.jsonl").read_bytes() == before and status(whole)[
        "status"
    ] == "finished"


@pytest.mark.parametrize("step", [2, 6])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(
    whole: Path, tmp_path: Path, step: int
) -> None:
    shutil.copytree(
        whole / "checkpoints" / f"step_{step}", tmp_path / "checkpoints" / f"step_{step}"
    )
    trained(*TINY, "--num_steps=8", "--checkpoint_interval=2", f"--output_dir={tmp_path}")
    kept = ("loss", "lr", "grad_norm", "tokens_seen", "data_fingerprint")
    expected = {s: {name: r[name] for name in kept} for s, r in metrics(whole).items() if s > step}
    assert {s: {name: r[name] for name in kept} for s, r in metrics(tmp_path).items()} == expected
    assert tensors(tmp_path / "checkpoints" / "step_8") == tensors(whole / "checkpoints" / "step_8")


def tensors(folder: Path) -> dict[str, bytes]:
    """Name → bytes of every tensor of a checkpoint."""
    import torch

    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def test_load_path_continues_and_load_model_only_starts_afresh(whole: Path, tmp_path: Path) -> None:
    load = f"--ckpt_load_path={whole / 'checkpoints' / 'step_4'}"
    trained(*TINY, "--num_steps=8", load, f"--output_dir={tmp_path / 'on'}")
    assert losses(tmp_path / "on") == losses(whole)[4:]
    trained(
        *TINY, "--num_steps=2", load, "--load_model_only=True", f"--output_dir={tmp_path / 'fresh'}"
    )
    records = metrics(tmp_path / "fresh")
    assert list(records) == [1, 2]
    assert records[1]["data_fingerprint"] == metrics(whole)[1]["data_fingerprint"]
    assert records[1]["loss"] != metrics(whole)[1]["loss"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num_steps=6"], "--num_steps=6 is below the newest checkpoint (step 8"),
        (["--num_steps=9", "--num_layers=3"], "--num_layers=3 does not match the checkpoint"),
        (["--num_steps=9", "--vocab_size=99"], "--vocab_size=99 does not match the checkpoint"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    whole: Path, tmp_path: Path, argv: list[str], message: str
) -> None:
    whole = Path(shutil.copytree(whole, tmp_path / "run"))
    before = (whole / "status.json").read_text()
    result = run(*TINY, *argv, f"--output_dir={whole}")
    assert (whole / "status.json").read_text() == before
    assert (
        result.returncode == 2 and result.stderr.startswith("error: ") and message in result.stderr
    )
    assert result.stderr.count("\n") == 1


def test_a_smaller_batch_size_does_not_change_the_global_batch_of_a_run(tmp_path: Path) -> None:
    argv = [*TINY, f"--output_dir={tmp_path}"]
    trained(*argv, "--num_steps=1", "--batch_size=16")
    output = trained(*argv, "--num_steps=2", "--batch_size=5")
    assert (
        "batch: 16 sequences x 1 ranks x 1 steps, now 4 sequences x 1 ranks x 4 steps: the global batch"
        in output
    )
    refused = run(*argv, "--num_steps=3", "--batch_size=5", "--grad_accum_steps=3")
    assert refused.returncode == 2 and "the run's global batch=16 must equal" in refused.stderr
    trained(*argv, "--num_steps=3", "--global_batch_size=2")
    assert [record["batch_rows"] for record in metrics(tmp_path).values()] == [16, 16, 2]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--model_variant=70b", "--use_dummy_dataset=True"],
            "error: --model_variant=70b must fit the ",
        ),
        (["--model_variant=7c", "--use_dummy_dataset=True"], "7b"),
        (["--model_variant=7b", "--sharding_strategy=hsdp"], "--data_path"),
        (["--model_variant=tiny", "--data_path=/no/such/folder"], "/no/such/folder"),
        (
            ["--model_variant=tiny", "--use_dummy_dataset=True", "--num_attention_heads=7"],
            "num_attention_heads=7",
        ),
        (
            ["--model_variant=tiny", "--use_dummy_dataset=True", "--ckpt_load_path=/none"],
            "--ckpt_load_path=/none",
        ),
        (
            ["--model_variant=tiny", "--use_dummy_dataset=True", "--output_dir=/proc/nowhere"],
            "/proc/nowhere",
        ),
        (
            ["--model_variant=tiny", "--dataset_builder=no.such:thing"],
            "--dataset_builder=no.such:thing",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(
    tmp_path: Path, argv: list[str], message: str
) -> None:
    output = (
        [] if any("--output_dir" in item for item in argv) else [f"--output_dir={tmp_path / 'run'}"]
    )
    result = run(*argv, "--num_steps=1", *output)
    assert result.returncode == 2, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], result.stderr
    assert not (tmp_path / "run").exists()


def test_sigterm_saves_and_asks_to_be_resumed(tmp_path: Path) -> None:
    argv = [*TINY, "--num_steps=100000", f"--output_dir={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "main_training.py", *argv], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while (
        not (tmp_path / "metrics.jsonl").exists()
        or len((tmp_path / "metrics.jsonl").read_text().splitlines()) < 3
    ):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    assert status(tmp_path)["status"] == "running"
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 75
    stopped = status(tmp_path)
    assert stopped["status"] == "resume_me" and "SIGTERM" in stopped["reason"]
    assert (tmp_path / "checkpoints" / f"step_{stopped['step']}").is_dir()
    trained(*TINY, f"--num_steps={stopped['step'] + 2}", f"--output_dir={tmp_path}")
    assert (
        status(tmp_path)["status"] == "finished"
        and metrics(tmp_path)[stopped["step"] + 1]["attempt"] == 2
    )


def test_a_stream_of_ones_own_is_trained_on_and_resumed(tmp_path: Path) -> None:
    argv = [
        "--model_variant=tiny",
        "--dataset_builder=tests.data.custom_stream:build",
        "--data_kwargs=stride=2",
        "--seq_length=64",
        "--report_interval=1",
        f"--output_dir={tmp_path}",
    ]
    trained(*argv, "--num_steps=2")
    trained(*argv, "--num_steps=3")
    prints = [record["data_fingerprint"] for record in metrics(tmp_path).values()]
    assert len(set(prints)) == 3


def test_the_dummy_pattern_is_learned(tmp_path: Path) -> None:
    trained(
        *TINY,
        "--num_steps=150",
        "--batch_size=8",
        "--learning_rate=5e-3",
        f"--output_dir={tmp_path}",
    )
    found = losses(tmp_path)
    assert found[-1] < 0.6 * found[0], (found[0], found[-1])


def test_every_report_counts_the_zeros_of_its_own_step(tmp_path: Path) -> None:
    trained(
        *TINY,
        "--log_num_zeros=True",
        "--report_interval=3",
        "--num_steps=6",
        f"--output_dir={tmp_path}",
    )
    assert {
        step: "grad_zeros" in record for step, record in metrics(tmp_path).items()
    } == dict.fromkeys((1, 3, 6), True)


def test_bare_lines_between_reports_have_step_and_time_alone(tmp_path: Path) -> None:
    argv = ("--report_interval=4", "--print_interval=2", "--num_steps=7", "--diagnostics=True")
    output = trained(*TINY, *argv, f"--output_dir={tmp_path}")
    bare = [
        line for line in output.splitlines() if re.fullmatch(r"step \d/7 at \d\d:\d\d:\d\d", line)
    ]
    assert [line.split()[1] for line in bare] == ["2/7", "6/7"]  # 4 is a report
    assert all(
        record["host_rss_gib"] > 0 and "shm_gib" in record for record in metrics(tmp_path).values()
    )
    assert list(metrics(tmp_path)) == [1, 4, 7]
