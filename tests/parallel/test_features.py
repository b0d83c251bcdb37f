"""Launches over every axis, with the features of features.py that need files, and what is rejected.

test_layouts.py trains with the other features.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fms_fsdp.__main__ import main
from fms_fsdp.distributed.world import World
from fms_fsdp.errors import UserError
from fms_fsdp.prepare.command import prepare
from fms_fsdp.prepare.prepare_flags import PrepareConfig
from tests.cli import CORPUS, TINY, last_of_each, metrics, trained
from tests.distributed.launch import train_each
from tests.hf.test_export import differing_logits
from tests.hf_folders import write_folder
from tests.parallel.features import FEATURES
from tests.specs import planned
from tests.warm import COMMANDS, launch

BASE = (
    *TINY,
    "--num_steps=3",
    "--precision=fp32",
    "--global_batch_size=8",
    "--batch_size=4",
    "--num_attention_heads=8",
    "--num_kv_heads=2",
)
AXES = {
    "tp": ["--tp_size=2"],
    "cp": ["--cp_size=2"],
    "pp": ["--pp_size=2"],
}


PAIRS = ("tp pp", "tp cp", "cp pp")
TRACED = (
    "--use_profiler=True",
    "--profiler_wait=0",
    "--profiler_warmup=1",
    "--profiler_active=1",
)


def numbers(folder: Path) -> list[dict[str, float]]:
    """What each step reported and, behind it, what evaluations found."""
    names = ("loss", "grad_norm", "param_norm", "grad_zeros", "z_loss", "eval/loss", "loss_scale")
    records = [record for _, record in sorted(metrics(folder).items())]
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    records += [record for record in lines if "eval/loss" in record]
    return [{name: record[name] for name in names if name in record} for record in records]


def difference(alone: list[dict[str, float]], spread: list[dict[str, float]], rel: float) -> str:
    for step, (one, other) in enumerate(zip(alone, spread, strict=True), 1):
        for name, value in one.items():
            allowed = rel if name in ("loss", "eval/loss") else 10 * rel
            if other[name] != pytest.approx(value, rel=allowed):
                return f"step {step}: {name} {other[name]} in place of {value}"
    return ""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Flags of a run over text, with rows that are packed whole, and what one process made of them."""
    folder = tmp_path_factory.mktemp("packed")
    options: dict[str, Any] = {"tokenizer": "byte", "text_separator": r"\n\n", "num_workers": 1}
    options |= {"split": (88, 8, 4), "limit_docs": 400}
    prepare(PrepareConfig(input=f"pages={CORPUS}", output=str(folder / "data"), **options))
    flags = [flag for flag in BASE if not flag.startswith("--use_dummy")]
    flags += [f"--data_path={folder / 'data'}", "--packing=bestfit", "--document_mask=True"]
    flags += ["--sample_interval=2", "--sample_prompts=The run,A,checkpoints"]
    flags += ["--eval_interval=2", "--eval_steps=1"]
    trained(*flags, f"--output_dir={folder / 'alone'}")
    return flags, folder / "alone"


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Flags of a run from weights of others, with an export, and what one process made of them."""
    folder = tmp_path_factory.mktemp("imported")
    source = write_folder(folder / "llama")
    flags = [
        *TINY[1:],
        "--seq_length=32",
        "--num_steps=2",
        "--precision=fp32",
        "--global_batch_size=4",
    ]
    flags += [f"--init_from_hf={source}", "--checkpoint_interval=2", "--export_interval=2"]
    trained(*flags, f"--output_dir={folder / 'alone'}")
    return flags, folder / "alone"


def assert_packed(run: Path, alone: Path) -> None:
    """Asserts that a run over text trains and generates as on one process, and that it was profiled."""
    assert not difference(numbers(alone), numbers(run), 1e-5)
    assert list((run / "profile_traces").iterdir())
    texts = (run / "samples.txt").read_text()
    assert texts == (alone / "samples.txt").read_text()
    assert texts.count("--- step 2 ---\n") == texts.count("--- step 3 ---\n") == 3


def assert_imported(run: Path, alone: Path) -> None:
    """Asserts that a run from weights of others trains and exports as on one process."""
    assert not difference(numbers(alone), numbers(run), 1e-5)
    wanted = exported(alone)
    found = exported(run)
    assert wanted.keys() == found.keys() and any(name.endswith("weight") for name in wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        "pp",
        "tp",
        "cp",
        *PAIRS,
    ],
)
def test_packing_samples_profiler_and_import_with_axes(
    packed: tuple[list[str], Path], imported: tuple[list[str], Path], tmp_path: Path, axes: str
) -> None:
    names = axes.split()
    over = [flag for name in names for flag in AXES[name]]
    text = [*packed[0], *TRACED, *over, f"--output_dir={tmp_path / 'packed'}"]
    weights = [*imported[0], *over, f"--output_dir={tmp_path / 'imported'}"]
    train_each([last_of_each(text), last_of_each(weights)], 2 ** len(names))
    assert_packed(tmp_path / "packed", packed[1])
    assert_imported(tmp_path / "imported", imported[1])


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """What the exports of a run hold, by the names of files and of tensors."""
    from safetensors.torch import load_file

    content = dict[str, torch.Tensor]()
    for path in sorted((folder / "exports").rglob("*")):
        content[path.name] = torch.zeros(())
        if path.suffix == ".safetensors":
            content |= {name: value.float() for name, value in load_file(path).items()}
    return content


@pytest.mark.parametrize(
    ("feature", "axis"),
    [
        pytest.param(each, axis, id=f"{each.name}-{axis}")
        for each in FEATURES
        for axis in each.refused
    ],
)
def test_features_the_table_rejects_are_rejected(tmp_path: Path, feature: Any, axis: str) -> None:
    flags = feature.flags.replace("MODULE:FUNCTION", "tests.models.builders:build").split()
    flags = last_of_each([*BASE, *flags, *AXES[axis], f"--output_dir={tmp_path / 'run'}"])
    with pytest.raises(UserError, match=f" is not supported with --{axis}_size=2; "):
        planned(flags, World(0, 0, 2, 2))


@pytest.mark.slow  # test_loading.py loads the model of two ranks alone
def test_checkpoint_of_two_axes_is_usable(packed: tuple[list[str], Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [flag for flag in packed[0] if not flag.startswith(("--sample", "--packing"))]
    flags += ["--num_steps=2", "--eval_interval=2", "--eval_steps=2", "--checkpoint_interval=2"]
    flags += ["--export_interval=2", "--pp_size=2", "--tp_size=2"]
    trained(*flags, f"--output_dir={run}", nproc=4)
    while_training = numbers(run)[-1]["eval/loss"]
    for nproc in (0, 2):
        found = launch(["evaluate", f"--path={run}", "--json"], nproc, program=COMMANDS)
        assert found.returncode == 0, found.stderr
        assert json.loads(found.stdout)["eval/loss"] == pytest.approx(while_training, rel=1e-6)
    export = ["export", f"--path={run}", f"--output={tmp_path / 'hf'}", "--dtype=fp32"]
    assert main(export) == 0
    assert differing_logits(str(run), tmp_path / "hf") <= 1e-5
    (export_folder,) = (run / "exports").iterdir()
    assert differing_logits(str(run), export_folder) <= 1e-2
