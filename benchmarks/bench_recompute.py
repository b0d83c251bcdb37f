"""Measures what each way of recomputation keeps, and what it costs: eager and compiled.

    python benchmarks/bench_recompute.py [--variant=quickstart --seq_length=512 --batch_size=16 --output=FILE]

counted    bytes that one eager forward pass keeps for its backward pass, on this process's own model; not for
           ops, whose outputs torch keeps where no hook sees them
measured   peak memory of a run with these flags, and of one with a batch of one row beside it
time       median milliseconds of a step, of the reports after the first, in the same run

Every case is a run of main_training.py on synthetic tokens; the cases take turns, so that what disturbs the
machine disturbs all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from result_file import HELP, about_machine, write_result

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
CASES = {
    "none": ["--recompute=none"],
    "cheap": ["--recompute=cheap"],
    "ops": ["--recompute=ops"],
    "blocks 1/2": ["--recompute=blocks", "--selective_checkpointing=1/2"],
    "blocks": ["--recompute=blocks"],
}


def run_case(options: argparse.Namespace, flags: list[str], rows: int) -> dict[str, float]:
    """Median step time in ms and peak memory in GiB of one run.

    Raises:
        RuntimeError: it ended with another status than 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        shape = [f"--model_variant={options.variant}", f"--seq_length={options.seq_length}"]
        usual = [
            "--use_dummy_dataset=True",
            "--report_interval=1",
            "--trackers=none",
            "--save_last=False",
        ]
        length = [f"--batch_size={rows}", f"--num_steps={options.steps}", f"--output_dir={folder}"]
        command = [sys.executable, "main_training.py", *shape, *usual, *length, *flags]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(flags)}: {(ended.stdout + ended.stderr)[-2000:]}")
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "step_time_ms" in record]
    times = [record["step_time_ms"] for record in records[2:]]
    return {
        "step_ms": statistics.median(times),
        "peak_gib": max(each["peak_mem_gib"] for each in records),
    }


def counted_bytes(options: argparse.Namespace, flags: list[str]) -> int:
    """What an eager forward pass of one row keeps for the backward pass."""
    import torch

    from fms_fsdp.config import BF16, TrainConfig
    from fms_fsdp.config.parse import parse_flags
    from fms_fsdp.distributed.axes import ParallelDims
    from fms_fsdp.distributed.mesh import Mesh
    from fms_fsdp.models.variants import resolve_model
    from fms_fsdp.parallel.parallelize import parallelize

    cfg = parse_flags(TrainConfig, [f"--model_variant={options.variant}", *flags])
    config = resolve_model(cfg.model, seq_length=options.seq_length)
    mesh, cpu = Mesh(ParallelDims("none"), 0, "cpu"), torch.device("cpu")
    model = parallelize(config, cfg.parallel, mesh, device=cpu, precision=BF16, seed=1)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.zeros(1, options.seq_length, dtype=torch.long)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens)
    return sum(size for place, size in kept.items() if place not in weights)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", default="quickstart")
    parser.add_argument("--seq_length", type=int, default=512)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument(
        "--steps", type=int, default=8, help="of a run; those after the second are timed"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, help=HELP)
    options = parser.parse_args()
    pairs = [pair for pair in itertools.product(CASES, (False, True)) if pair != ("cheap", False)]
    found: dict[tuple[str, bool], list[dict[str, float]]] = {pair: [] for pair in pairs}
    for _ in range(options.rounds):
        for name, compiled in pairs:
            flags = [*CASES[name], f"--use_torch_compile={compiled}"]
            many = run_case(options, flags, options.batch_size)
            found[name, compiled].append(
                many | {"one_row_gib": run_case(options, flags, 1)["peak_gib"]}
            )
    results: list[dict[str, Any]] = []
    for (name, compiled), each in found.items():
        row: dict[str, Any] = {"case": name, "compiled": compiled}
        row |= {key: round(statistics.median(one[key] for one in each), 3) for key in each[0]}
        row["kept_mib_a_row"] = (
            None
            if compiled or name == "ops"
            else round(counted_bytes(options, CASES[name]) / 2**20, 1)
        )
        results.append(row)
        print(row, flush=True)
    write_result(about_machine() | {"results": results}, options.output)


if __name__ == "__main__":
    main()
