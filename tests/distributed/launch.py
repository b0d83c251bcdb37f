"""Runs a function on several gloo processes of this machine and returns what each rank returned.

`run_ranks(fn, world_size, *args)` starts `world_size` processes, initialises gloo over a file store in each,
calls `fn(*args)` and returns the list of results by rank. `fn` must be importable (a module-level function).
An exception on any rank is raised here with its traceback.

The processes are forks of one that has imported torch and done nothing else: that takes seconds of a CPU, and
the tests of a worker start hundreds of ranks.

`train_each(launches, num_ranks)` runs whole launches of the program in turn in one group of such forks: the first
call of everything is half the time of a tiny launch, and is paid once.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from fms_fsdp.files import write_atomically
from tests.warm import (  # the module says what the process that is forked has imported
    TIMEOUT_S,
    launch,
    tell_coverage,
)


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


def train_each(
    launches: Sequence[Sequence[str]], num_ranks: int = 0, *, backend: str = "", status: int = 0
) -> None:
    """Runs the launches, each a list of flags, in turn in the same processes.

    Each must end with `status`. `num_ranks` and `backend` are those of `tests.warm.launch`.
    """
    with tempfile.TemporaryDirectory() as ports:
        ended = launch(
            launches[-1],
            num_ranks,
            backend=backend,
            before=partial(_main_of_each, launches[:-1], Path(ports), bool(backend), status),
            timeout_s=TIMEOUT_S * len(launches),
        )
    statuses = set(ended.statuses)
    assert statuses == {status}, f"exit status {statuses}\n{ended.stdout}\n{ended.stderr}"


def _main_of_each(
    launches: Sequence[Sequence[str]], ports: Path, compiles: bool, status: int
) -> None:
    """Runs launches in this process and ends it if one does not end with `status`.

    Then prepares the process for one more launch.
    """
    import main_training

    for number, flags in enumerate(launches):
        _agree_on_port(ports / str(number))
        found = main_training.main(list(flags))
        if found != status:
            print(f"exit status {found} of {' '.join(flags)}", file=sys.stderr, flush=True)
            os._exit(found or 1)
        if compiles:
            _forget_compiled()
    _agree_on_port(ports / str(len(launches)))


def _agree_on_port(file: Path) -> None:
    """Sets MASTER_PORT to one that rank 0 finds free, and writes to the file that the other ranks read.

    Each launch has a port of its own, because a rank could connect to the store of the launch before. It is
    chosen late, because another process could take it.
    """
    rank = os.environ.get("RANK")
    if rank is None:
        return
    if rank == "0":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            write_atomically(file, str(free.getsockname()[1]))
    while not file.exists():
        time.sleep(0.01)
    os.environ["MASTER_PORT"] = file.read_text()


def _forget_compiled() -> None:
    """Drops compiled code, so that the next launch compiles its own."""
    from fms_fsdp.models.attention import compiled

    torch._dynamo.reset()
    compiled.cache_clear()
