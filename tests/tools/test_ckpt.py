"""`ckpt inspect`: the numbers of every tensor of a checkpoint, and its distance from another."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fms_fsdp
from fms_fsdp.__main__ import main
from fms_fsdp.checkpoint import folders
from fms_fsdp.checkpoint.io import CheckpointReader, load_tensor
from fms_fsdp.tools import tensor_stats
from tests.cli import TINY, trained
from tests.hf_folders import weights_of, write_folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, of two ranks with a half of each weight."""
    folder = tmp_path_factory.mktemp("inspected")
    flags = "--num_steps=2 --checkpoint_interval=1 --trackers=none --sharding_strategy=fsdp"
    trained(*TINY, *flags.split(), f"--output_dir={folder}", nproc=2)
    return folder


def inspected(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["ckpt", "inspect", "--json", *flags]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_statistics_are_those_of_the_weights(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, f"--path={run}")
    weights = fms_fsdp.load_model(str(run), step=2)[0].state_dict()
    assert found["step"] == 2 and set(found["tensors"]) == {f"model.{name}" for name in weights}
    for name, weight in weights.items():
        values, exact = found["tensors"][f"model.{name}"], weight.double()
        assert values["shape"] == list(weight.shape) and values["dtype"] == "float32"
        expected = [exact.norm(), exact.mean(), exact.std(correction=0), exact.min(), exact.max()]
        shown = [values[key] for key in ("norm", "mean", "std", "min", "max")]
        assert shown == pytest.approx([value.item() for value in expected])
        assert values["zeros"] == values["non_finite"] == 0
    squares = sum(values["norm"] ** 2 for values in found["tensors"].values())
    assert found["all"]["norm"] == pytest.approx(squares**0.5) and squares > 0


def test_table_has_the_optimizer_state(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "inspect", f"--path={run}", "--step=1", "--optimizer"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.split()[:5] == ["tensor", "shape", "dtype", "norm", "mean"]
    (line,) = (line for line in lines if line.startswith("optimizer.embed.weight.exp_avg "))
    assert "512x128" in line


def test_run_may_be_named_as_a_step(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "step_decay"
    folder.symlink_to(run)
    for command in ("list", "verify"):
        for path in (folder, folder / "checkpoints"):
            assert main(["ckpt", command, f"--path={path}"]) == 0
            printed = capsys.readouterr().out
            assert printed.count("step_") == 2, printed
    assert main(["ckpt", "verify", f"--path={folder}/checkpoints/step_2"]) == 0
    assert "step_1" not in capsys.readouterr().out


def test_zeros_and_non_finite_values_are_counted(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(reader: CheckpointReader, name: str) -> torch.Tensor:
        tensor = load_tensor(reader, name)
        tensor.view(-1)[:32], tensor.view(-1)[32] = 0.0, torch.nan
        return tensor

    monkeypatch.setattr(tensor_stats, "load_tensor", spoiled)
    facts = inspected(capsys, f"--path={run}")["tensors"]["model.head.norm.weight"]
    assert (facts["zeros"], facts["non_finite"], facts["norm"]) == (32 / 128, 1 / 128, None)
    assert inspected(capsys, f"--path={run}")["all"]["norm"] is None
    assert main(["ckpt", "inspect", str(run)]) == 0 and "–" in capsys.readouterr().out


def test_hugging_face_checkpoint_is_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path, "gpt2")
    found = inspected(capsys, f"--path={tmp_path}")
    weights = weights_of("gpt2")
    assert found["step"] is None and set(found["tensors"]) == set(weights)
    for name, weight in weights.items():
        facts = found["tensors"][name]
        assert facts["shape"] == list(weight.shape)
        assert facts["norm"] == pytest.approx(weight.double().norm().item())
    for flag in ("--step=1", "--optimizer=True"):
        assert main(["ckpt", "inspect", f"--path={tmp_path}", flag]) == 2
        assert f"{flag} is not supported with a Hugging" in capsys.readouterr().err


def test_corrupt_checkpoint_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(run / "checkpoints" / "step_1" / "__0_0.distcp", 100)
    assert main(["ckpt", "inspect", f"--path={run}", "--step=1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "step_1" in line


def test_size_skips_files_that_a_run_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_bytes(b"1234")
    (tmp_path / "renamed").write_bytes(b"12")
    is_file = Path.is_file

    def delete_after(path: Path) -> bool:
        found = is_file(path)
        if path.name == "renamed":
            path.unlink()
        return found

    monkeypatch.setattr(Path, "is_file", delete_after)
    assert folders.folder_bytes(tmp_path) == 4
