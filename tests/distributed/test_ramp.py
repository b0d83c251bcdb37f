"""A run whose batch grows, killed and taken up by other numbers of ranks, is the run nobody disturbed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fms_fsdp.data.batch import fingerprint
from fms_fsdp.tools.inspect import open_run_data
from tests.cli import ROOT, TINY, metrics, run, trained
from tests.data.corpora import SEP, write_corpus


def killed_after(step: int, flags: list[str]) -> None:
    """Starts a run and kills it, with SIGKILL, once it has reported a step."""
    command = [sys.executable, "main_training.py", *flags]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=settings, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith(f"step {step}/") for line in process.stdout)
        process.kill()


@pytest.mark.slow
def test_a_ramp_survives_a_kill_and_another_world(tmp_path: Path) -> None:
    files = write_corpus(tmp_path / "corpus", {"a": [30_000], "b": [9000]}, mean=60)
    base = [
        "--model_variant=tiny",
        "--mixed_precision=False",
        "--report_interval=1",
        "--seq_length=32",
    ]
    base += [
        f"--data_path={files.root}",
        f"--sep_token={SEP}",
        "--datasets=a,b",
        "--weights=0.37,0.63",
    ]
    base += ["--global_batch_size=16", "--rampup_batch_size=4,4,60", "--checkpoint_interval=5"]
    base += ["--warmup=40samples", "--learning_rate=1e-3"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    said = trained(*base, "--num_samples=300", f"--output_dir={whole}")
    assert "16 sequences = 512 tokens per step, from 4 sequences over 60 samples" in said
    log = (whole / "log.txt").read_text()
    assert "4 sequences for 5 steps, to step 5 and 20 samples" in log
    assert "16 sequences from there" in log
    assert "warmup to step 8 (40 samples, 1,280 tokens)" in log
    killed_after(7, [*base, "--num_samples=300", f"--output_dir={parts}"])
    trained(*base, "--num_samples=300", "--exit_samples=40", f"--output_dir={parts}", nproc=2)
    trained(*base, f"--num_tokens={300 * 32}", f"--output_dir={parts}", nproc=4)
    one, other = metrics(whole), metrics(parts)
    assert list(one) == list(range(1, 26)) and sorted(other) == list(one)
    assert [record["batch_rows"] for record in one.values()] == [4] * 5 + [8] * 3 + [12] * 2 + [
        16
    ] * 15
    assert one[25]["samples_seen"] == 308 and one[25]["tokens_seen"] == 308 * 32
    attempts = [record["attempt"] for _, record in sorted(other.items())]
    assert attempts[5:11] == [2] * 5 + [3], "the second launch takes 40 rows or more from step 5 on"
    for step, record in one.items():
        for name in ("data_fingerprint", "samples_seen", "tokens_seen", "lr", "batch_rows"):
            assert other[step][name] == record[name], (step, name)
        assert other[step]["loss"] == pytest.approx(record["loss"], rel=1e-5)
    with open_run_data(str(parts)) as data:
        assert [len(data.stream.order.addresses(step)) for step in (5, 6, 9, 11)] == [4, 8, 12, 16]
        digest = fingerprint(data.stream.batch_at(9), 0)
        assert f"{digest:016x}" == one[9]["data_fingerprint"]
    refused = run(
        *base, "--num_samples=300", "--batch_size=8", f"--output_dir={tmp_path / 'other'}"
    )
    assert refused.returncode == 2 and "or --batch_size=" in refused.stderr + refused.stdout


def test_micro_steps_of_fewer_rows_train_as_those_of_one_row(tmp_path: Path) -> None:
    """From 2 rows to 8 with 4 at once: 2, 4, 3 and 4, on two ranks 1, 2, 3 and 4; resumed within the ramp."""
    base = [*TINY, "--mixed_precision=False", "--global_batch_size=8", "--rampup_batch_size=2,2,20"]
    base += ["--num_steps=7", "--checkpoint_interval=3", "--learning_rate=1e-3"]
    fitted = [*base, "--batch_size=4", "--rampup_micro_batch=True"]
    trained(*base, "--batch_size=1", f"--output_dir={tmp_path}/ones")
    for ranks in (1, 2):
        trained(*fitted, f"--output_dir={tmp_path}/{ranks}", nproc=ranks)
    trained(*fitted, "--exit_step=3", f"--output_dir={tmp_path}/parts", nproc=2)
    trained(*fitted, f"--output_dir={tmp_path}/parts")
    wanted = metrics(tmp_path / "ones")
    assert [record["batch_rows"] for record in wanted.values()] == [2, 2, 2, 2, 4, 4, 6]
    for folder in ("1", "2", "parts"):
        found = metrics(tmp_path / folder)
        assert list(found) == list(wanted)
        for step, record in wanted.items():
            assert found[step]["data_fingerprint"] == record["data_fingerprint"]
            assert found[step]["loss"] == pytest.approx(record["loss"], rel=1e-5), (folder, step)
    refused = run(*base, "--batch_size=4", f"--output_dir={tmp_path}/other")
    assert (
        refused.returncode == 2
        and "or --rampup_micro_batch=True" in refused.stderr + refused.stdout
    )


def test_blocks_are_compiled_for_each_number_of_rows(tmp_path: Path) -> None:
    """Twelve; torch stops at eight."""
    flags = [
        *TINY,
        "--global_batch_size=12",
        "--rampup_batch_size=1,1,66",
        "--batch_size=12",
        "--num_steps=22",
    ]
    flags += ["--rampup_micro_batch=True", "--use_torch_compile=True", f"--output_dir={tmp_path}"]
    trained(*flags, backend="eager")
    assert {record["batch_rows"] for record in metrics(tmp_path).values()} >= set(range(1, 10))


def test_a_length_in_epochs_says_what_it_means(tmp_path: Path) -> None:
    files = write_corpus(tmp_path / "corpus", {"a": [3000], "b": [900]}, mean=60)
    base = [
        "--model_variant=tiny",
        "--seq_length=32",
        f"--data_path={files.root}",
        f"--sep_token={SEP}",
    ]
    base += [
        "--datasets=a,b",
        "--weights=1,1",
        "--global_batch_size=8",
        f"--output_dir={tmp_path / 'run'}",
    ]
    said = trained(*base, "--num_epochs=b:1.5", "--checkpoint_interval=5")
    rows = files.num_tokens("b") // 32
    steps = -(-2 * (rows * 3 // 2) // 8)
    assert f"length: 1.5 epochs of source b end with step {steps:,}" in said
    assert f"finished {steps} steps" in said
    more = trained(*base, "--num_epochs=b:2")
    assert (
        f"resuming from step {steps}" in more
        and "length: 2 epochs of source b end with step" in more
    )
    for flags, text in (
        (
            ["--num_epochs=c:1"],
            "--num_epochs=c:1 must name a source; use a, b",
        ),
        (
            ["--num_epochs=2", "--use_dummy_dataset=True"],
            "and --use_dummy_dataset cannot be used together",
        ),
    ):
        refused = run(*base, *flags, f"--output_dir={tmp_path / 'other'}")
        assert refused.returncode == 2 and text in refused.stdout + refused.stderr
        assert not (tmp_path / "other").exists()
