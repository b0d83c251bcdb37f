"""--resuming_dataset: whether the data of a checkpoint from elsewhere go on, or begin afresh."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from fms_fsdp.prepare.command import prepare
from fms_fsdp.prepare.prepare_flags import PrepareConfig
from tests.cli import metrics, trained

FLAGS = ("--model_variant=tiny", "--seq_length=32", "--global_batch_size=4", "--report_interval=1")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("corpus")
    inputs = f"code={sysconfig.get_path('stdlib')}/json"
    prepare(PrepareConfig(inputs, str(folder), tokenizer="byte", include=("*.py",), num_workers=1))
    return (*FLAGS, f"--data_path={folder}")


@pytest.fixture(scope="module")
def whole(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven steps without a stop, a checkpoint at the third."""
    folder = tmp_path_factory.mktemp("whole")
    trained(*flags, "--num_steps=7", "--checkpoint_interval=3", f"--output_dir={folder}")
    return folder


def fingerprints(folder: Path) -> dict[int, str]:
    return {step: record["data_fingerprint"] for step, record in metrics(folder).items()}


@pytest.mark.slow
def test_resuming_dataset_false_begins_afresh(
    flags: tuple[str, ...], whole: Path, tmp_path: Path
) -> None:
    """Step 4 has the sequences of step 1, also after the new run was stopped and resumed."""
    command = (
        *flags,
        "--checkpoint_interval=1",
        f"--ckpt_load_path={whole / 'checkpoints' / 'step_3'}",
        "--resuming_dataset=False",
        f"--output_dir={tmp_path}",
    )
    assert ", with fresh data" in trained(*command, "--num_steps=5")
    trained(*command, "--num_steps=7")
    expected = fingerprints(whole)
    assert len(set(expected.values())) == 7
    assert fingerprints(tmp_path) == {4 + i: expected[1 + i] for i in range(4)}
