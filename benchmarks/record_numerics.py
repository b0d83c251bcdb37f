"""Records losses and gradient norms to the last bit, before and after a change that must not alter them.

    python benchmarks/record_numerics.py --output=before.json      # in the commit before the change
    python benchmarks/record_numerics.py --output=after.json --against=before.json

It runs 20 steps of a small model on synthetic tokens for every combination of precision, sharding and mode,
with a global batch of 8 rows. For each combination the table says whether all 40 numbers are the same bits,
or how different they are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLAGS = [
    "--model_variant=tiny",
    "--use_dummy_dataset=True",
    "--seq_length=64",
    "--global_batch_size=8",
]
FLAGS += [
    "--num_steps=20",
    "--report_interval=1",
    "--trackers=none",
    "--checkpoint_interval=0",
    "--save_last=False",
]
PRECISIONS = {"fp32": "--mixed_precision=False", "bf16": "--mixed_precision=True"}
SHARDINGS = {  # name → ranks, flags
    "none": (1, []),
    "fsdp 1": (1, ["--sharding_strategy=fsdp"]),
    "ddp 2": (2, ["--sharding_strategy=ddp"]),
    "fsdp 2": (2, ["--sharding_strategy=fsdp"]),
    "ddp 4": (4, ["--sharding_strategy=ddp"]),
    "fsdp 4": (4, ["--sharding_strategy=fsdp"]),
    "hsdp 4": (4, ["--sharding_strategy=hsdp", "--hsdp_shard_size=2"]),
}
MODES = {
    "eager": [],
    "compiled": ["--use_torch_compile=True"],
    "recomputation": ["--fsdp_activation_checkpointing=True"],
    "accumulation": ["--batch_size=1"],
    "document mask": ["--document_mask=True"],
}


def record(ranks: int, flags: list[str]) -> list[str]:
    """Losses and gradient norms of a run, by step, as hexadecimal floats."""
    launcher = (
        []
        if ranks == 1
        else "-m torch.distributed.run --standalone --local-addr=127.0.0.1".split()
        + [f"--nproc_per_node={ranks}"]
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            *launcher,
            "main_training.py",
            *FLAGS,
            *flags,
            f"--output_dir={folder}/run",
        ]
        settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        result = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    records = [line for line in map(json.loads, lines) if "loss" in line and "event" not in line]
    return [float(line[name]).hex() for line in records for name in ("loss", "grad_norm")]


def difference(before: list[str], after: list[str]) -> str:
    """ "same bits", or the largest relative difference."""
    if before == after:
        return "same bits"
    pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(before, after, strict=True)]
    return f"{max(abs(a - b) / abs(a) for a, b in pairs):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--shardings", default=",".join(SHARDINGS))
    given = parser.parse_args()
    found: dict[str, list[str]] = {}
    for precision, sharding, mode in itertools.product(
        PRECISIONS, given.shardings.split(","), MODES
    ):
        ranks, flags = SHARDINGS[sharding]
        name = f"{precision}, {sharding}, {mode}"
        found[name] = record(ranks, [PRECISIONS[precision], *flags, *MODES[mode]])
        before = json.loads(given.against.read_text()) if given.against else {}
        print(
            f"{name:36} {difference(before[name], found[name]) if name in before else 'recorded'}",
            flush=True,
        )
        given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
