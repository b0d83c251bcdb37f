"""Measures export and loading against a plain copy of the same bytes on the same disk, in one run.

    python benchmarks/bench_export.py [--variant=194m --rounds=5 --folder=FOLDER --output=FILE]

copy     the weight file read and written in pieces, forced to disk: as many bytes as an export writes
export   the checkpoint of a training, with its optimizer's moments → safetensors, fp32
load     safetensors → a model in memory (`fms_fsdp.load_model`)

All take turns in each round, each in a new process; a ratio is the median over rounds of a copy's time over
the other's. Every file is in the page cache, as after a run. The time is that of the command without the
start of Python and its imports, which is given beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from result_file import HELP, about_machine, write_result

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch._dynamo  # noqa: E402, F401 # else torch imports it in the midst of the work

import fms_fsdp  # noqa: E402
from fms_fsdp.tools.export import ExportConfig  # noqa: E402
from fms_fsdp.tools.export import main as export  # noqa: E402

PIECE = 16 << 20
Work = Callable[[Path, Path], None]
TRAINING = ["--use_dummy_dataset=True", "--num_steps=1", "--batch_size=1", "--seq_length=64"]


def plain_copy(source: Path, target: Path) -> None:
    with open(source, "rb", buffering=0) as reader, open(target, "wb", buffering=0) as writer:
        while piece := reader.read(PIECE):
            writer.write(piece)
        os.fsync(writer.fileno())


def export_to(source: Path, target: Path) -> None:
    export(ExportConfig(path=str(source), output=str(target), dtype="fp32", max_shard_gb=1e3))


def load_from(source: Path, target: Path) -> None:
    fms_fsdp.load_model(str(source))
    target.touch()


def seconds_of(work: Work, source: Path, target: Path) -> float:
    """The time of the work, after which the disk is idle again."""
    os.sync()
    begin = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        work(source, target)
    seconds = time.perf_counter() - begin
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    return seconds


def measure(folder: Path, variant: str, rounds: int) -> dict[str, Any]:
    training, weights = folder / "training", folder / "weights"
    flags = [f"--model_variant={variant}", *TRAINING, f"--output_dir={training}"]
    subprocess.run(
        [sys.executable, ROOT / "main_training.py", *flags], check=True, stdout=sys.stderr
    )
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "fms_fsdp", "export", "--help"], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    start_s = time.perf_counter() - begin
    export_to(training, weights)
    file = weights / "model.safetensors"
    works: dict[str, tuple[Work, Path]] = {
        "copy": (plain_copy, file),
        "export": (export_to, training),
        "load": (load_from, weights),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    with multiprocessing.get_context("spawn").Pool(
        1, maxtasksperchild=1
    ) as pool:  # a new process each time
        for _ in range(rounds):
            for name, (work, source) in works.items():
                times[name].append(pool.apply(seconds_of, (work, source, folder / f"new_{name}")))
    result: dict[str, Any] = {"bytes": file.stat().st_size, "start_s": round(start_s, 2)}
    result |= {f"{name}_s": [round(seconds, 3) for seconds in each] for name, each in times.items()}
    for name in list(works)[1:]:
        ratios = [copy / own for copy, own in zip(times["copy"], times[name], strict=True)]
        result[f"{name}_over_copy"] = round(statistics.median(ratios), 3)
        print(f"{name}: {result[f'{name}_over_copy']} x the copy's rate", file=sys.stderr)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", default="194m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure (default: the temporary folder)"
    )
    parser.add_argument("--output", type=Path, help=HELP)
    args = parser.parse_args()
    machine = about_machine()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measure(Path(folder), args.variant, args.rounds)
    write_result({**machine, "variant": args.variant, "target": 0.7, **result}, args.output)


if __name__ == "__main__":
    main()
