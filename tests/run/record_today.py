"""Records a small run and the default names of runs, for tests/run/test_today.py.

    python -m tests.run.record_today

A later version must resume this run with the losses that this version had, and must give these names. Record
again only for a deliberate change of the format or of numerics, and give the reason in the commit.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from pathlib import Path
from zipfile import ZipFile

import numpy as np

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.data.permute import mix64_int
from tests.cli import losses, trained
from tests.cli import run as run_program
from tests.data.corpora import write_counts, write_lists

TODAY = Path(__file__).parent / "today.zip"  # folders data and run, losses.json, run_names.json
SHAPE = ("--model_variant=tiny", "--num_layers=2", "--hidden_size=16", "--num_attention_heads=2")
SHAPE = (*SHAPE, "--ffn_hidden_size=32", "--vocab_size=64", "--seq_length=32", "--precision=fp32")
SOURCES = ("--datasets=web,code", "--weights=2,1", "--sep_token=3", "--logical_shards=8")
LENGTH = ("--batch_size=4", "--num_steps=6", "--report_interval=1", "--checkpoint_interval=3")
OPTIM = ("--learning_rate=1e-2", "--optimizer=muon")
FLAGS = (*SHAPE, *SOURCES, *LENGTH, *OPTIM)


def flags(data: Path, run: Path) -> list[str]:
    """The flags of the recorded run, on these folders."""
    return [*FLAGS, f"--data_path={data}", f"--output_dir={run}"]


def name_of(line: str) -> str:
    """The default name of the run of these flags. Call it in an empty folder."""
    return parse_flags(TrainConfig, shlex.split(line)).run_name


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
        ignored = shutil.ignore_patterns(".lock", "tensorboard", "log.txt")
        shutil.copytree(run, kept / "run", ignore=ignored)
        trained(*flags(data, run))
        (kept / "losses.json").write_text(json.dumps(losses(run)))
        with ZipFile(TODAY) as archive:  # names stay, or a run would start again at step 0
            names = json.loads(archive.read("run_names.json"))
        os.chdir(data)
        if not keeps_names:
            names = {line: name_of(line) for line in names}
        (kept / "run_names.json").write_text(json.dumps(names, indent=1, sort_keys=True))
        shutil.make_archive(str(TODAY.with_suffix("")), "zip", kept)


if __name__ == "__main__":
    main()
