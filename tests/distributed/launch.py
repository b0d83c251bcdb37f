"""Runs a function on several gloo processes of this machine and returns what each rank returned.

`run_ranks(fn, world_size, *args)` starts `world_size` processes, initialises gloo over a file store in each,
calls `fn(*args)` and returns the list of results by rank. `fn` must be importable (a module-level function).
An exception on any rank is raised here with its traceback.

The processes are forks of one that has imported torch and done nothing else: that takes seconds of a CPU, and
the tests of a worker start hundreds of ranks.
"""

from __future__ import annotations

import gc
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

from tests.warm import tell_coverage  # the module says what the process that is forked has imported


def _worker(
    rank: int,
    world_size: int,
    folder: str,
    environment: dict[str, str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch.distributed as dist

    gc.freeze()  # what the fork inherits
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    tell_coverage()
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        result: tuple[str, Any] = ("ok", fn(*args))
    except BaseException:  # noqa: BLE001 - reported to the parent, which raises it
        result = ("error", traceback.format_exc())
    torch.save(result, os.path.join(folder, f"rank{rank}.pt"))
    if result[0] == "ok":
        dist.barrier()
        gc.collect()
        dist.destroy_process_group()
    os._exit(
        0 if result[0] == "ok" else 1
    )  # a clean exit of gloo's threads is not what is tested here


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Results of `fn(*args)` by rank; raises RuntimeError with the first failing rank's traceback."""
    with tempfile.TemporaryDirectory() as folder:
        processes = mp.start_processes(
            _worker,
            (world_size, folder, dict(os.environ), fn, args),
            nprocs=world_size,
            join=False,
            start_method="forkserver",
        )
        failure: Exception | None = None
        try:
            while not processes.join():
                pass
        except Exception as error:  # a rank exited with a status: its traceback lies in its file
            failure = error
        results = []
        for rank in range(world_size):
            path = os.path.join(folder, f"rank{rank}.pt")
            if os.path.exists(path):
                kind, value = torch.load(path, weights_only=False)
                if kind == "error":
                    raise RuntimeError(f"rank {rank} of {world_size}:\n{value}")
                results.append(value)
        if failure is not None:
            raise failure
        return results
