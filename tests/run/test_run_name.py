"""Which flags name another run, and which leave a run the one it is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fms_fsdp.config import CheckpointConfig, TrainConfig
from fms_fsdp.config.flag import flag_table
from fms_fsdp.config.parse import parse_flags
from tests.cli import run, trained
from tests.data.corpora import write_corpus

IN_THE_NAME_THOUGH_FREE = {
    "init_std",
    "residual_scaled_init",
    "logical_shards",
    "ckpt_load_path",
    "resuming_dataset",
    "load_model_only",
    "init_from_hf",
    "init_new_tokens",
}
OUT_THOUGH_ANNOUNCED = {
    "num_steps",
    "num_tokens",
    "num_samples",
    "num_epochs",
    "skip_steps",
    "lr_decay",
}
# values that fit where the one made from the default would not; and what a flag needs beside it
VALUES: dict[str, Any] = {
    "selective_checkpointing": "1/2",
    "datasets": ("a",),
    "data_kwargs": ("a=b",),
    "trackers": ("wandb",),
    "optimizer_kwargs": ("amsgrad=true",),
    "warmup": "7",
    "lr_decay": "7",
    "num_epochs": "2",
    "rampup_batch_size": (1, 1, 9),
    "lr_step_size": "7",
    "lr_schedule": "linear",
    "min_lr": 1e-6,
    "rope_scaling": "linear:2",
    "attn_window_pattern": "LG",
    "model_builder": "a:b",
    "keep_ranges": "1-2",
}
BESIDE: dict[str, dict[str, Any]] = {
    "weights": {"datasets": ("a",)},
    "load_model_only": {"ckpt_load_path": "x"},
    "attn_window_pattern": {"attn_window": 4},
    **{
        name: {"keep_last_n": 1}
        for name in ("keep_every", "keep_best", "keep_steps", "keep_ranges")
    },
    "keep_best": {"keep_last_n": 1, "eval_interval": 1},
    "data_kwargs": {"dataset_builder": "a:b"},
    "rampup_round": {"rampup_batch_size": (1, 1, 9)},
    "export_interval": {"checkpoint_interval": 1},
    **{name: {"tp_size": 2} for name in ("sequence_parallel", "async_tp")},
}


def parse(*argv: str) -> TrainConfig:
    return parse_flags(TrainConfig, argv)


def another(name: str, spec: Any) -> Any:
    """A value of the flag that is not its default."""
    if name in VALUES:
        return VALUES[name]
    if spec.choices:
        return next(choice for choice in spec.choices if choice != spec.default)
    if "bool" in str(spec.type):
        return not spec.default
    if "tuple" in str(spec.type):
        return (2,) if "int" in str(spec.type) else (2.0,) if "float" in str(spec.type) else ("x",)
    if "str" in str(spec.type):
        return "a:b" if name == "dataset_builder" else "1:2" if name == "skip_steps" else "other"
    return (spec.default or 1) * 2 if "int" in str(spec.type) else (spec.default or 0.5) / 2


def configured(**flags: Any) -> TrainConfig:
    fields, sections = flag_table(TrainConfig), {}
    for part in dataclasses.fields(TrainConfig):
        own = {name: value for name, value in flags.items() if fields[name].section == part.name}
        sections[part.name] = dataclasses.replace(part.default, **own)
    return TrainConfig(**sections)


def test_the_table_says_of_each_flag_whether_it_names_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, spec in flag_table(TrainConfig).items():
        expected = spec.resume != "free" or name in IN_THE_NAME_THOUGH_FREE
        assert spec.in_name == (expected and name not in OUT_THOUGH_ANNOUNCED), name
        if name != "run_name":
            beside = BESIDE.get(name, {})
            changed = configured(**{**beside, name: another(name, spec)})
            assert (changed.run_name != configured(**beside).run_name) == spec.in_name, name


def test_a_flag_at_its_default_names_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so a flag that a later version adds does not."""
    monkeypatch.chdir(tmp_path)
    assert (
        parse("--model_variant=tiny", "--seed=2023", "--learning_rate=3e-4").run_name
        == "tiny-e1f05e7a"
    )


def test_advice_that_names_another_run_names_this_one_too() -> None:
    config = dataclasses.replace(TrainConfig(), checkpoint=CheckpointConfig(ckpt_load_path="a b"))
    assert config.keep_name == f"--run_name={config.run_name}"
    assert parse("--run_name=of mine").keep_name == "--run_name='of mine'"


@pytest.mark.slow
def test_a_finished_run_of_other_data_is_refused_and_not_called_finished(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b")):
        write_corpus(tmp_path / name, {"web": [4000, 4000]}, seed=seed)
    flags = [
        "--model_variant=tiny",
        "--seq_length=64",
        "--vocab_size=5000",
        "--sep_token=3",
        "--num_steps=1",
    ]
    flags.append(f"--output_dir={tmp_path / 'run'}")
    trained(*flags, f"--data_path={tmp_path / 'a'}")
    (tmp_path / "a").rename(tmp_path / "moved")
    other = run(*flags, f"--data_path={tmp_path / 'b'}")
    assert other.returncode == 2 and "in the checkpoint" in other.stderr, (
        other.stdout + other.stderr
    )
    assert other.stderr.strip().endswith("or choose another --run_name")
    assert "already finished" in trained(*flags, f"--data_path={tmp_path / 'moved'}")
