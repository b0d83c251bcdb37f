"""Measures the precisions that this machine has: speed, bytes a parameter, loss after the same tokens.

    python benchmarks/bench_precision.py --output=precision.json [--variant=quickstart --steps=300]

tokens/s    median of the reports after the fifth, of runs that take turns
bytes       a parameter: weights, gradients and moments, by their types, and a checkpoint, by its files
loss        on validation text, after all steps; the same rows and first weights in every precision

Every case is a run of main_training.py on the quickstart's text, which `bash scripts/train.sh` prepares. A
CPU has no products in fp16 or 8 bits: there these two are left out, unless --cases names them. Flags after
`--` go to every run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from result_file import HELP, about_machine, write_result

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
CASES = {
    "fp32": ["--precision=fp32"],
    "bf16": ["--precision=bf16"],
    "bf16, bf16 moments": ["--precision=bf16", "--optimizer_state_dtype=bf16"],
    "bf16_pure": ["--precision=bf16_pure"],
    "bf16_pure, rounded to nearest": ["--precision=bf16_pure", "--stochastic_rounding=False"],
    "fp16": ["--precision=fp16"],
    "float8": ["--precision=float8"],
}
FIXED = "--datasets=stdlib,packages,prose --weights=2,2,1 --report_interval=1 --trackers=none"


def run_case(
    options: argparse.Namespace, flags: list[str], steps: int, save: bool
) -> dict[str, float]:
    """Trains; returns tokens/s and, where it evaluates, the loss and the bytes of the checkpoint.

    Raises:
        RuntimeError: it ended with another status than 0.
    """
    shape = [f"--model_variant={options.variant}", f"--seq_length={options.seq_length}"]
    length = [f"--batch_size={options.batch_size}", f"--num_steps={steps}", f"--save_last={save}"]
    evaluate = [f"--eval_interval={steps}", "--eval_steps=20"] if save else []
    with tempfile.TemporaryDirectory() as folder:
        places = [f"--data_path={options.data.resolve()}", f"--output_dir={folder}"]
        command = [
            sys.executable,
            "main_training.py",
            *FIXED.split(),
            *shape,
            *length,
            *evaluate,
            *places,
        ]
        command += [*flags, *options.flags]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(flags)}: {(ended.stdout + ended.stderr)[-2000:]}")
        records = list(map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines()))
        rates = [each["tokens_per_sec_per_device"] for each in records if "loss" in each][5:]
        found = {"tokens_per_sec": statistics.median(rates)}
        if save:
            files = Path(folder, "checkpoints", f"step_{steps}").rglob("*.distcp")
            found["checkpoint_bytes"] = sum(file.stat().st_size for file in files)
            found["validation_loss"] = next(
                each["eval/loss"] for each in records if "eval/loss" in each
            )
    return found


def kept_bytes(flags: list[str]) -> float:
    """Bytes a parameter that a run keeps in memory: weights, gradients, moments."""
    from fms_fsdp.config import NUM_BYTES, TrainConfig
    from fms_fsdp.config.parse import parse_flags

    section = parse_flags(TrainConfig, flags).precision
    precision = section.resolve(section.named or "fp32")
    return (
        NUM_BYTES[precision.weights]
        + NUM_BYTES[precision.gradients]
        + 2 * NUM_BYTES[precision.state]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=ROOT / "data" / "quickstart", help="prepared text"
    )
    parser.add_argument("--variant", default="quickstart")
    parser.add_argument("--seq_length", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300, help="of the run whose loss counts")
    parser.add_argument("--timed_steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", help=", ".join(name.replace(", ", " + ") for name in CASES))
    parser.add_argument("--output", type=Path, help=HELP)
    parser.add_argument("flags", nargs="*", help="more flags of main_training.py, after --")
    options = parser.parse_args()
    names = [name for name in CASES if torch.cuda.is_available() or name not in ("fp16", "float8")]
    if options.cases:
        names = [name.replace(" + ", ", ") for name in options.cases.split(",")]
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            speeds[name].append(
                run_case(options, CASES[name], options.timed_steps, False)["tokens_per_sec"]
            )
    results: list[dict[str, Any]] = []
    for name in names:
        trained = run_case(options, CASES[name], options.steps, True)
        row = {"case": name, "kept_bytes_a_parameter": kept_bytes(CASES[name])} | trained
        results.append(
            row | {"tokens_per_sec": statistics.median(speeds[name]), "rounds": speeds[name]}
        )
        print(results[-1], flush=True)
    write_result(about_machine() | {"fixed": FIXED, "results": results}, options.output)


if __name__ == "__main__":
    main()
