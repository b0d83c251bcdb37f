"""Compares AdamW and Muon by the validation loss after the same tokens on the quickstart corpus.

    python benchmarks/bench_loss.py --output=loss.json [--steps=1000 --rates=5e-4,1e-3,2e-3,4e-3,8e-3]

Each optimizer trains once with each rate on the first seed; the rate of its least validation loss then trains
with every seed. `share_of_steps` is how many of AdamW's steps Muon needs to reach AdamW's last loss, by the
evaluations of both (null where it never does). Flags after `--` go to every run. Each trial is a run of its
own. Nothing is timed; the figures depend on the flags alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from result_file import HELP, about_machine, write_result

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
FIXED = (
    "--model_variant=quickstart --datasets=stdlib,packages,prose --weights=2,2,1 --seq_length=128 "
    "--batch_size=16 --eval_steps=20 --checkpoint_interval=0 --trackers=none"
).split()
NAMES = ("adamw", "muon")
Curve = dict[int, float]


def run_trial(flags: list[str]) -> Curve:
    """Trains; returns step → validation loss.

    Raises:
        RuntimeError: the run ended with another status than 0.
    """
    given = {flag.partition("=")[0] for flag in flags}
    fixed = [flag for flag in FIXED if flag.partition("=")[0] not in given]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "main_training.py", *fixed, *flags, f"--output_dir={folder}"]
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ)
        )
        if ended.returncode:
            raise RuntimeError(f"{' '.join(flags)}: {ended.stderr[-2000:]}")
        records = [
            json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()
        ]
    return {record["step"]: record["eval/loss"] for record in records if "eval/loss" in record}


def steps_to_reach(curve: Curve, loss: float) -> float | None:
    """The step at which a curve first falls to the loss, between two evaluations by a straight line."""
    before: tuple[int, float] | None = None
    for step, value in sorted(curve.items()):
        if value <= loss:
            if before is None or before[1] <= value:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = step, value
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=ROOT / "data" / "quickstart", help="prepared text"
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--rates", default="5e-4,1e-3,2e-3,4e-3,8e-3", help="rates of each optimizer"
    )
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--evaluations", type=int, default=20, help="evaluations in a run")
    parser.add_argument("--output", type=Path, help=HELP)
    parser.add_argument("flags", nargs="*", help="more flags of main_training.py, after --")
    options = parser.parse_args()
    shared = [f"--data_path={options.data.resolve()}", f"--num_steps={options.steps}"]
    shared += [f"--eval_interval={max(1, options.steps // options.evaluations)}", *options.flags]
    first, *others = options.seeds.split(",")
    trials: list[dict[str, Any]] = []
    curves: dict[str, list[Curve]] = {}

    def tried(name: str, rate: str, seed: str) -> Curve:
        curve = run_trial(
            [*shared, f"--optimizer={name}", f"--learning_rate={rate}", f"--seed={seed}"]
        )
        trials.append({"optimizer": name, "rate": rate, "seed": seed, "validation_loss": curve})
        print(name, rate, seed, curve[max(curve)], flush=True)
        return curve

    best: dict[str, str] = {}
    for name in NAMES:
        found = {rate: tried(name, rate, first) for rate in options.rates.split(",")}
        best[name] = min(found, key=lambda rate: found[rate][max(found[rate])])
        curves[name] = [found[best[name]], *(tried(name, best[name], seed) for seed in others)]
    last = {name: [curve[max(curve)] for curve in each] for name, each in curves.items()}
    reached = [
        steps_to_reach(curve, loss)
        for curve, loss in zip(curves["muon"], last["adamw"], strict=True)
    ]
    record = about_machine() | {
        "fixed": FIXED,
        "best_rate": best,
        "last_loss": {
            name: {"mean": statistics.mean(each), "by_seed": each} for name, each in last.items()
        },
        "share_of_steps": [
            None if step is None else round(step / options.steps, 3) for step in reached
        ],
        "trials": trials,
    }
    print({name: record[name] for name in ("best_rate", "last_loss", "share_of_steps")})
    write_result(record, options.output)


if __name__ == "__main__":
    main()
