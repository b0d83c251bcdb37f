"""Runs whose batch grows, and lengths in epochs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import TINY, metrics, run, trained
from tests.data.corpora import SEP, write_corpus
from tests.distributed.launch import train_each


@pytest.mark.slow
def test_ramped_micro_batches_train_like_single_sequences(tmp_path: Path) -> None:
    """From 2 to 8 sequences with 4 at once: 2, 4, 3 and 4; on two ranks, which resume, 1, 2, 3 and 4."""
    base = [*TINY, "--mixed_precision=False", "--global_batch_size=8", "--rampup_batch_size=2,2,20"]
    base += ["--num_steps=7", "--checkpoint_interval=3", "--learning_rate=1e-3"]
    fitted = [*base, "--batch_size=4", "--rampup_micro_batch=True"]
    ones = [*base, "--batch_size=1", f"--output_dir={tmp_path}/ones"]
    train_each([ones, [*fitted, f"--output_dir={tmp_path}/alone"]])
    stopped = run(*fitted, "--exit_step=3", f"--output_dir={tmp_path}/parts")
    assert stopped.returncode == 75, stopped.stderr
    trained(*fitted, f"--output_dir={tmp_path}/parts", nproc=2)
    wanted = metrics(tmp_path / "ones")
    assert [record["batch_rows"] for record in wanted.values()] == [2, 2, 2, 2, 4, 4, 6]
    for folder in ("alone", "parts"):
        found = metrics(tmp_path / folder)
        assert list(found) == list(wanted)
        for step, record in wanted.items():
            assert found[step]["data_fingerprint"] == record["data_fingerprint"]
            assert found[step]["loss"] == pytest.approx(record["loss"], rel=1e-5), (folder, step)
    log = (tmp_path / "parts" / "log.txt").read_text()
    assert "2 sequences for 4 steps" in log and "8 sequences from there" in log
    rejected = run(*base, "--batch_size=4", f"--output_dir={tmp_path}/other")
    assert rejected.returncode == 2 and "or --rampup_micro_batch=True" in rejected.stderr


@pytest.mark.slow
def test_blocks_compile_for_each_batch_size(tmp_path: Path) -> None:
    """For nine; torch stops at eight."""
    flags = [*TINY, "--global_batch_size=9", "--rampup_batch_size=1,1,48", "--batch_size=9"]
    flags += ["--num_steps=18", "--rampup_micro_batch=True", "--use_torch_compile=True"]
    flags += ["--num_layers=1", "--seq_length=16"]
    trained(*flags, f"--output_dir={tmp_path}", backend="eager")
    assert {record["batch_rows"] for record in metrics(tmp_path).values()} == set(range(1, 10))


@pytest.mark.slow
def test_length_in_epochs_is_logged_in_steps(tmp_path: Path) -> None:
    files = write_corpus(tmp_path / "corpus", {"a": [3000], "b": [900]}, mean=60)
    base = ["--model_variant=tiny", "--seq_length=32", "--datasets=a,b", "--weights=1,1"]
    base += [f"--data_path={files.root}", f"--sep_token={SEP}", "--global_batch_size=8"]
    run_dir, other = f"--output_dir={tmp_path / 'run'}", tmp_path / "other"
    log = trained(*base, run_dir, "--num_epochs=b:1.5", "--checkpoint_interval=5")
    rows = files.num_tokens("b") // 32
    steps = -(-2 * (rows * 3 // 2) // 8)
    assert f"length: 1.5 epochs of source b end with step {steps:,}" in log
    assert f"finished {steps} steps" in log
    log = trained(*base, run_dir, "--num_epochs=b:2")
    assert f"resuming from step {steps}" in log
    assert "length: 2 epochs of source b end with step" in log
    for flags, text in (
        (["--num_epochs=c:1"], "--num_epochs=c:1 must name a source; use a, b"),
        (["--num_epochs=2", "--use_dummy_dataset=True"], "--use_dummy_dataset cannot be used"),
    ):
        rejected = run(*base, *flags, f"--output_dir={other}")
        assert rejected.returncode == 2 and text in rejected.stderr and not other.exists()
