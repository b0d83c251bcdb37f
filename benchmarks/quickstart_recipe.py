"""Trials of the quickstart's recipe: which flags give the fewest bits per byte on held-out text.

    bash scripts/train.sh --num_steps=2  # prepares the text
    python benchmarks/quickstart_recipe.py --output=recipe.json \\
        --batch_size=16 --learning_rate=2e-3 --num_steps=780 \\
        --then --batch_size=8 --learning_rate=2e-3 --num_steps=1300

Each trial is a run of its own, from launch to exit, with the data and model of the quickstart, compiled.
`--then` begins the next trial. The bits per byte depend only on the flags; seconds mean something on a quiet
machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from result_file import HELP, write_result

ROOT = Path(__file__).parent.parent
FIXED = (
    "--model_variant=quickstart --datasets=stdlib,packages,prose --weights=2,2,1 --seq_length=128 "
    "--use_torch_compile=True --eval_interval=1000000 --eval_steps=100000 --checkpoint_interval=0"
).split()


def split_trials(words: list[str]) -> list[list[str]]:
    """The flags of each trial: what stands between the words `--then`."""
    trials: list[list[str]] = [[]]
    for word in words:
        if word == "--then":
            trials.append([])
        else:
            trials[-1].append(word)
    return trials


def run_trial(flags: list[str], data: Path) -> dict[str, Any]:
    """Trains; returns the validation figures, tokens and seconds.

    Raises:
        RuntimeError: the run ended with another status than 0.
    """
    given = {word.partition("=")[0] for word in flags}
    fixed = [word for word in FIXED if word.partition("=")[0] not in given]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "main_training.py", *fixed, f"--data_path={data}", *flags]
        began = time.perf_counter()
        ended = subprocess.run(
            [*command, f"--output_dir={folder}"], cwd=ROOT, capture_output=True, text=True
        )
        seconds = time.perf_counter() - began
        if ended.returncode:
            raise RuntimeError(f"{' '.join(flags)}: {ended.stderr[-2000:]}")
        records = [
            json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()
        ]
    figures = next(record for record in reversed(records) if "eval/loss" in record)
    bits = {name: value for name, value in figures.items() if name.endswith("bits_per_byte")}
    return {
        "flags": " ".join(flags),
        "tokens": figures["tokens_seen"],
        "seconds": round(seconds, 1),
        **bits,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=ROOT / "data" / "quickstart", help="prepared text"
    )
    parser.add_argument("--output", type=Path, help=HELP)
    options, words = parser.parse_known_args()
    trials = []
    for flags in split_trials(words):
        trials.append(run_trial(flags, options.data.resolve()))
        print(trials[-1], flush=True)
    write_result(
        {"command": " ".join(["python", *sys.argv]), "fixed": FIXED, "trials": trials},
        options.output,
    )


if __name__ == "__main__":
    main()
