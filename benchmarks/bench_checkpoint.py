"""Measures the cost of checkpoints as ratios to the limits of the machine, all in one run.

stall  time that the loop waits for a background save, against a copy of the same bytes to host memory
save   bytes on disk per second, fsync included, against a plain writer of equal bytes and process count
load   verified load from a cold page cache, against a plain reader of equal bytes and process count

python benchmarks/bench_checkpoint.py [--variant=194m --ranks=2 --rounds=3 --folder=/tmp]

--folder is on the disk to measure, which needs the space of five checkpoints; the files are removed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from result_file import about_machine, parser_of, write_result

if TYPE_CHECKING:
    from torch import nn

    from fms_fsdp.distributed.mesh import Mesh
    from fms_fsdp.distributed.world import World
    from fms_fsdp.optim.optimizers import Optimizers
    from fms_fsdp.state import TrainMetadata

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
PIECE = 16 << 20


def timed(work: Callable[[], Any]) -> float:
    """Seconds that the slowest rank takes for `work`, all starting together."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    work()
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def plain_write(path: Path, source: memoryview) -> None:
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(source), PIECE):
            file.write(source[start : start + PIECE])
        os.fsync(file.fileno())


def plain_read(path: Path, target: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        start = 0
        while count := file.readinto(target[start : start + PIECE]):
            start += count


def build_run(folder: Path, variant: str) -> tuple[Mesh, nn.Module, Optimizers, TrainMetadata]:
    """Starts the process group, builds the model and its optimizers, and what is recorded of them
    (collective: every rank)."""
    from fms_fsdp.config import TrainConfig
    from fms_fsdp.config.parse import parse_flags
    from fms_fsdp.distributed import runtime
    from fms_fsdp.distributed.mesh import Mesh
    from fms_fsdp.optim.optimizers import build_optimizers
    from fms_fsdp.parallel.parallelize import parallelize
    from fms_fsdp.plan import plan
    from fms_fsdp.run.machine import Machine
    from fms_fsdp.state import TrainMetadata

    flags = [
        f"--model_variant={variant}",
        "--use_dummy_dataset=True",
        "--seq_length=128",
        f"--output_dir={folder / 'run'}",
    ]
    cfg, world = parse_flags(TrainConfig, flags), World.from_env()
    device, seed = runtime.pick_device(world), cfg.training.seed
    runtime.init_distributed(cfg.parallel, cfg.training, world, device)
    run = plan(cfg, Machine.here(world, device).measured(device))
    mesh = Mesh(run.dims, world.rank, device.type)
    model = parallelize(
        run.model, cfg.parallel, mesh, device=device, precision=run.precision, seed=seed
    )
    state = TrainMetadata(0, **run.saved_with)
    return mesh, model, build_optimizers(cfg.optim, model, run.precision, seed), state


def worker(folder: Path, variant: str, rounds: int) -> None:
    """One rank of the measurement; rank 0 writes the result."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from fms_fsdp.checkpoint.folders import find_checkpoint
    from fms_fsdp.checkpoint.io import collect_tensors, load_checkpoint
    from fms_fsdp.config import CheckpointConfig
    from fms_fsdp.distributed.world import World
    from fms_fsdp.run.checkpoints import CheckpointManager

    world = World.from_env()
    mesh, model, optimizer, state = build_run(folder, variant)
    tensors = collect_tensors(model, optimizer)
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()]
    size = sum(t.numel() * t.element_size() for t in local)
    buffers = [torch.empty_like(t, device="cpu") for t in local]
    raw = np.ones(size, dtype=np.uint8).data
    root, mine = folder / "checkpoints", folder / f"plain{world.rank}"
    root.mkdir(exist_ok=True)
    section = CheckpointConfig(checkpoint_interval=1)
    saved_with = {"config": state.config, "resolved": state.resolved}
    run: Any = SimpleNamespace(config=SimpleNamespace(checkpoint=section), saved_with=saved_with)
    values: dict[str, Any] = dict(
        tokens_seen=0, sequences_seen=0, val_loss=None, metrics={}, loss_scale=None
    )
    ends = dict(step=0, num_steps=9999, stop_reason="", is_done=False)
    health = dict(non_finite_steps=0, last_finite_step=0)
    stream = SimpleNamespace(state_dict=dict)
    now: Any = SimpleNamespace(
        model=model, optimizers=optimizer, stream=stream, **values, **ends, **health
    )

    def ignore(*_: object, **__: object) -> None: ...

    run_dir: Any = SimpleNamespace(checkpoints=root, attempt=1, folder=folder)
    others: Any = SimpleNamespace(settle=ignore, alive=ignore, event=ignore)
    manager = CheckpointManager(run, run_dir, mesh, now, others, others, others)
    manager._collect(wait=True)  # the host copies are allocated while the first steps compile
    rows: list[dict[str, float]] = []
    for step in range(rounds + 1):  # the first one warms up: host memory, files, page tables
        row = {"copy_s": timed(lambda: [b.copy_(t) for b, t in zip(buffers, local, strict=True)])}
        if step % 2:
            row["write_s"] = timed(lambda: plain_write(mine, raw))
        now.step = step
        row["stall_s"] = timed(partial(manager.save, now, wait=False))
        row["save_s"] = row["stall_s"] + timed(partial(manager._collect, wait=True))
        if not step % 2:  # by turns: the second of the two finds less of the memory warm
            row["write_s"] = timed(lambda: plain_write(mine, raw))
        for files in (root, folder):
            if world.rank == 0:
                drop_from_page_cache(files)
        row["read_s"] = timed(lambda: plain_read(mine, raw))
        checkpoint = find_checkpoint(root)
        assert checkpoint is not None and checkpoint.step == step
        alone = world.size == 1
        load = partial(load_checkpoint, checkpoint.folder, model, optimizer, is_alone=alone)
        row["load_s"] = timed(load)
        dist.barrier()
        if world.rank == 0:
            print(json.dumps({name: round(value, 3) for name, value in row.items()}), flush=True)
            shutil.rmtree(checkpoint.folder)
        dist.barrier()
        rows.append(row)
    manager.close()
    if world.rank == 0:
        result = summary(rows[1:], size * world.size) | {
            "first_stall_s": rows[0]["stall_s"],
            "rounds": rows,
        }
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    os._exit(0)


def summary(rows: list[dict[str, float]], num_bytes: int) -> dict[str, Any]:
    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    def ratio(upper: str, lower: str) -> float:
        return statistics.median(row[upper] / row[lower] for row in rows)

    return {
        "gib": num_bytes / 2**30,
        "stall_over_copy": ratio("stall_s", "copy_s"),
        "save_over_plain_write": ratio("write_s", "save_s"),
        "load_over_plain_read": ratio("read_s", "load_s"),
        "stall_s": median("stall_s"),
        "save_gib_per_s": num_bytes / 2**30 / median("save_s"),
        "load_gib_per_s": num_bytes / 2**30 / median("load_s"),
    }


def launch_workers(options: argparse.Namespace) -> dict[str, Any]:
    """Runs `worker` on the ranks of torchrun; returns the result that rank 0 wrote."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
    ]
    command += [f"--nproc_per_node={options.ranks}", str(Path(__file__).resolve())]
    command += [f"--{name}={getattr(options, name)}" for name in ("folder", "variant", "rounds")]
    threads = str(max(1, (os.cpu_count() or 1) // options.ranks))
    environment = os.environ | {"OMP_NUM_THREADS": threads}
    subprocess.run([*command, "--worker"], cwd=ROOT, env=environment, check=True)
    result: dict[str, Any] = json.loads(
        (options.folder / "result.json").read_text(encoding="utf-8")
    )
    return result


def main() -> None:
    settings = dict(variant="194m", ranks=2, rounds=8, folder=Path(tempfile.gettempdir()))
    parser = parser_of(__doc__, **settings)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.folder, options.variant, options.rounds)
    from fms_fsdp.process import let_gpu_memory_grow

    let_gpu_memory_grow()  # in the processes of torchrun
    about = about_machine()
    with tempfile.TemporaryDirectory(prefix="bench_checkpoint_", dir=options.folder) as folder:
        options.folder = Path(folder)
        result = launch_workers(options)
    record = about | {"variant": options.variant, "ranks": options.ranks, **result}
    write_result(record, options.output)
    print(json.dumps({name: value for name, value in record.items() if name != "rounds"}, indent=1))


if __name__ == "__main__":
    main()
