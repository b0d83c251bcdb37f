"""Records a small run and the default names of runs, for tests/run/test_today.py.

    python -m tests.run.record_today

A later version must resume this run with the losses that this version had, and must give these names. Record
again only for a deliberate change of the format or of numerics, and give the reason in the commit.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.flag import flag_table
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.data.permute import mix64_int
from tests.cli import ROOT, losses, trained
from tests.cli import run as run_program
from tests.data.corpora import write_counts, write_lists
from tests.run.test_run_name import BESIDE, another

TODAY = Path(__file__).parent / "today.zip"  # folders data and run, losses.json, run_names.json
SHAPE = ("--model_variant=tiny", "--num_layers=2", "--hidden_size=16", "--num_attention_heads=2")
SHAPE = (*SHAPE, "--ffn_hidden_size=32", "--vocab_size=64", "--seq_length=32", "--precision=fp32")
SOURCES = ("--datasets=web,code", "--weights=2,1", "--sep_token=3", "--logical_shards=8")
LENGTH = ("--batch_size=4", "--num_steps=6", "--report_interval=1", "--checkpoint_interval=3")
OPTIM = ("--learning_rate=1e-2", "--optimizer=muon")
# what a flag needs beside it on a command line, where test_run_name.BESIDE does not say so
NEEDS = {
    **dict.fromkeys(
        ("eval_data_path", "eval_datasets", "eval_steps", "test_steps"), "--eval_interval=5"
    ),
    **dict.fromkeys(
        ("loss_scale", "loss_scale_window", "loss_scale_hysteresis"), "--precision=fp16"
    ),
    "min_loss_scale": "--precision=fp16",
    "float8_scaling": "--precision=float8",
    "stochastic_rounding": "--precision=bf16_pure",
    "init_new_tokens": "--init_from_hf=folder",
    "lr_gamma": "--lr_schedule=step --lr_step_size=9",
    "lr_step_size": "--lr_schedule=step",
    "lr_power": "--lr_schedule=polynomial",
    "recompute_ops": "--recompute=ops",
    "selective_checkpointing": "--recompute=blocks",
    "resuming_dataset": "--ckpt_load_path=folder",
    "sample_prompts": "--sample_interval=5",
    "tracker_entity": "--trackers=wandb",
}
FLAGS = (*SHAPE, *SOURCES, *LENGTH, *OPTIM)


def flags(data: Path, run: Path) -> list[str]:
    """The flags of the recorded run, on these folders."""
    return [*FLAGS, f"--data_path={data}", f"--output_dir={run}"]


def command_lines() -> list[str]:
    """Flags of the program: each flag with another value, and what the pages show."""
    lines = []
    for name, spec in flag_table(TrainConfig).items():
        values: dict[str, Any] = {**BESIDE.get(name, {}), name: another(name, spec)}
        line = shlex.join(f"--{each}={_as_text(value)}" for each, value in values.items())
        lines += [line, f"{NEEDS[name]} {line}"] if name in NEEDS else [line]
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        text = page.read_text().replace("\\\n", " ")
        lines += re.findall(r"main_training\.py +(--[^`$#|>&;\n]*)", text)
    return sorted({" ".join(line.split()) for line in lines})


def name_of(line: str) -> str:
    """The default name of the run of these flags. Call it in an empty folder."""
    return parse_flags(TrainConfig, shlex.split(line)).run_name


def _run_names() -> dict[str, str]:
    """Flags → the default name of their run, for all that the program takes."""
    names = {}
    for line in command_lines():
        with suppress(
            ValueError, SystemExit
        ):  # the program refuses it, or the quotes of a page are cut
            names[line] = name_of(line)
    return names


def _as_text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _write_data(root: Path) -> None:
    """Documents of tokens below 64, which depend on no library's random generator."""
    counts = []
    for number, name in enumerate(
        ("web/shard-00000.arrow", "web/shard-00001.arrow", "code/shard-00000.arrow")
    ):
        documents = []
        for i in range(24):
            drawn = [
                mix64_int(number * 1_000_003 + i * 1_009 + place) for place in range(i * 5 % 61)
            ]
            documents.append(np.array([each % 60 + 4 for each in drawn], dtype=np.int64))
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_lists(root / name, documents, vocab_size="64")
        counts.append((name, len(documents), sum(map(len, documents))))
    write_counts(root, counts)


def main(keeps_names: bool = True) -> None:
    """Records the run, and with `keeps_names=False` also the names of runs."""
    with tempfile.TemporaryDirectory() as folder:
        data, run, kept = Path(folder, "data"), Path(folder, "run"), Path(folder, "kept")
        _write_data(data)
        assert run_program(*flags(data, run), "--exit_step=3").returncode == 75
        shutil.copytree(data, kept / "data")
        shutil.copytree(
            run, kept / "run", ignore=shutil.ignore_patterns(".lock", "tensorboard", "log.txt")
        )
        trained(*flags(data, run))
        (kept / "losses.json").write_text(json.dumps(losses(run)))
        with ZipFile(TODAY) as archive:  # names stay, or a run would start again at step 0
            names = json.loads(archive.read("run_names.json")) if keeps_names else {}
        os.chdir(data)
        names = names or _run_names()
        (kept / "run_names.json").write_text(json.dumps(names, indent=1, sort_keys=True))
        shutil.make_archive(str(TODAY.with_suffix("")), "zip", kept)


if __name__ == "__main__":
    main()
