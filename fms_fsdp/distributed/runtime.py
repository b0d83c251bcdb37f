"""Processes and devices: world, process group, decisions of rank 0."""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from fms_fsdp.config import ParallelConfig, TrainingConfig
from fms_fsdp.distributed.world import World
from fms_fsdp.errors import (
    RunFailed,
    UserError,
    is_for_user,
    is_storage_failure,
    read_failed,
)
from fms_fsdp.process import keep_freed_memory, raise_open_file_limit

T = TypeVar("T")
_OTHER_FILES = 64  # that rank 0 opens besides its sockets: data, logs, libraries
KEEP_ALIVE_S = 15.0  # less than the shortest timeout of collectives, a minute


def restarts_in_agent_store() -> bool:
    """Returns whether restarted workers meet in the store of torchrun's agent, which outlives them.

    With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, rank 0 of each attempt opens a store of its own.
    """
    return (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
    )


def _store_of_attempt(world: World, timeout: timedelta) -> dist.Store:
    """Returns an empty store within the store of torchrun's agent (collective).

    The agent's store still has the keys of earlier attempts, and no variable of torchrun names an
    attempt on all nodes: an agent whose own workers were well does not count the restart. So rank 0
    draws a name. Another rank asks for the name with a key that no earlier process had, and
    confirms the answer. Until then rank 0 repeats its answers: the first question that it finds may
    be one of an earlier attempt.
    """
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timeout,
    )
    key = uuid.uuid4().hex
    if world.rank > 0:
        store.set(f"question of rank {world.rank}", key)
        name = store.get(f"answer to {key}").decode()
        store.set(f"{name}: rank {world.rank} confirms", "")
        return dist.PrefixStore(name, store)

    name = key
    deadline = time.monotonic() + timeout.total_seconds()
    missing = list(range(1, world.size))
    while missing:
        missing = [rank for rank in missing if not store.check([f"{name}: rank {rank} confirms"])]
        for rank in missing:
            question = f"question of rank {rank}"
            if store.check([question]):
                store.set(f"answer to {store.get(question).decode()}", name)
        if missing and time.monotonic() > deadline:
            seconds = round(timeout.total_seconds())
            raise RunFailed(f"rank {missing[0]} did not connect to rank 0 within {seconds} s")
        time.sleep(0.01)
    return dist.PrefixStore(name, store)


def pick_device(world: World) -> torch.device:
    """Returns this rank's GPU, or the CPU if the machine has none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if world.local_rank >= (count := torch.cuda.device_count()):
        raise UserError(
            f"--nproc_per_node={world.local_size} must not exceed the node's {count} GPUs; "
            f"use {count} or fewer"
        )
    return torch.device("cuda", world.local_rank)


def init_distributed(
    section: ParallelConfig, training: TrainingConfig, world: World, device: torch.device
) -> None:
    """Seeds, sets kernels and CPU memory, and starts the process group unless the strategy is none
    (collective).

    nccl serves GPU tensors and gloo CPU tensors, so that small agreements never wait for the GPU.

    Raises:
        UserError: rank 0 cannot listen, or may not open a file for each rank.
    """
    random.seed(training.seed)
    np.random.seed(training.seed % 2**32)
    torch.manual_seed(training.seed)
    torch.set_float32_matmul_precision(section.matmul_precision)
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if world.size == 1 and (section.sharding_strategy or "none").lower() == "none":
        return
    # gloo's lazy connections (TORCH_GLOO_LAZY_INIT=1) need fewer files, but look up a peer in the
    # store of rank 0 at any time: a rank fails in its last collective if rank 0 has ended.
    check_open_file_limit(world, raise_open_file_limit())
    is_nccl = device.type == "cuda" and section.dist_backend != "gloo"
    timeout = collective_timeout(section)
    meeting: dict[str, Any] = {}  # by default the variables of torchrun
    if world.size == 1:
        meeting = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    elif restarts_in_agent_store():
        store = _store_of_attempt(world, timeout)
        meeting = {"store": store, "rank": world.rank, "world_size": world.size}
    backend = "cpu:gloo,cuda:nccl" if is_nccl else "gloo"
    try:
        # No device_id: with it, groups of axes are split off with nccl's options for gloo too.
        dist.init_process_group(backend, timeout=timeout, **meeting)
    except dist.DistNetworkError as error:
        raise _port_error(error) or error from error


def check_open_file_limit(world: World, limit: int) -> None:
    """Raises UserError if this rank may not open enough files.

    gloo connects all ranks of a group when it is created, and may end the process without an error
    if it meets the limit. There are two groups, for training and for checkpoints; rank 0 also has
    the store.
    """
    sockets_per_rank = 3 if world.rank == 0 else 2
    needed = sockets_per_rank * world.size + _OTHER_FILES
    if limit < needed:
        raise UserError(
            f"ulimit -n={limit} must be at least {needed} for {world.size} ranks; raise the hard "
            f"limit on this node, e.g. docker run --ulimit nofile={2 * needed}",
            on_one_rank=world.local_rank == 0,
        )


def _port_error(error: dist.DistNetworkError) -> UserError | None:
    """Returns why rank 0 cannot listen for the other ranks; None if the error is another one."""
    port = os.environ["MASTER_PORT"]
    text = str(error)
    if "EADDRINUSE" in text:
        return UserError(
            f"MASTER_PORT={port} must be free on rank 0's machine, but another process uses it; "
            "end that process, or export another MASTER_PORT on every rank",
            on_one_rank=True,
        )
    if "EACCES" in text:
        return UserError(
            f"MASTER_PORT={port} must be a port that this user may open; export one above 1023 on "
            "every rank",
            on_one_rank=True,
        )
    return None


def collective_timeout(section: ParallelConfig) -> timedelta:
    """Returns the timeout of collectives: a minute after the watchdog, which records stacks first.

    The group that writes checkpoints has a longer one (run/checkpoints.py).
    """
    return timedelta(seconds=section.collective_timeout_s + 60)


def shut_down() -> None:
    """Destroys the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def run_on_rank0(function: Callable[[], T]) -> T:
    """Runs `function` on rank 0 and broadcasts its result or its error to all ranks (collective).

    Raises:
        UserError: an error that the user can fix.
        RunFailed: another error, on the other ranks.
    """
    if not dist.is_initialized():
        return function()
    box: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box[0] = function()
        except Exception as error:
            failure = error
            box[1] = _for_other_ranks(error)
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        if isinstance(box[1], RunFailed) and failure is not None and is_storage_failure(failure):
            raise box[1] from failure
        raise failure or box[1]
    return cast(T, box[0])


def run_long_on_rank0(function: Callable[[], T]) -> T:
    """Returns `function()` of rank 0 as `run_on_rank0` does, also if it outlasts the timeout of
    collectives (collective).

    A thread of rank 0 runs the function. Meanwhile rank 0 broadcasts that it still works.

    Raises:
        UserError, RunFailed: see `run_on_rank0`.
    """
    if not dist.is_initialized():
        return function()
    result: Future[T] = Future()
    if dist.get_rank() == 0:
        # The thread of an executor would delay the exit of a launch that a signal ends.
        threading.Thread(target=_set_result, args=(result, function), daemon=True).start()
    has_ended = torch.zeros(1, dtype=torch.uint8)
    while not has_ended:
        if dist.get_rank() == 0:
            wait([result], KEEP_ALIVE_S)
            has_ended[0] = result.done()
        dist.broadcast(has_ended, src=0)
    return run_on_rank0(result.result)


def run_long_on_every_rank(function: Callable[[], T]) -> T:
    """Returns `function()` of this rank after every rank has called it, also if one of them takes longer
    than the timeout of collectives (collective).

    A thread runs the function. Meanwhile the ranks count those that still work.

    Raises:
        Exception: of `function` on this rank; the other ranks return.
    """
    if not dist.is_initialized():
        return function()
    result: Future[T] = Future()
    threading.Thread(target=_set_result, args=(result, function), daemon=True).start()
    num_working = torch.ones(1, dtype=torch.int64)
    while num_working:
        wait([result], KEEP_ALIVE_S)
        num_working[0] = not result.done()
        dist.all_reduce(num_working)
    return result.result()


def on_every_rank(function: Callable[[], object]) -> None:
    """Calls `function` on every rank; if one raises, every rank raises its error (collective).

    Raises:
        UserError, RunFailed: of the first rank that has one, with its number.
    """
    failure: Exception | None = None
    try:
        function()
    except (UserError, RunFailed, OSError) as error:
        if not dist.is_initialized():
            raise
        failure = error
    own = None if failure is None else _for_other_ranks(failure)
    for rank, found in enumerate(gather_objects(own)):
        if found is not None:
            kind = UserError if isinstance(found, UserError) else RunFailed
            raise kind(f"rank {rank}: {found}" if rank > 0 else str(found)) from failure


def _set_result(result: Future[T], function: Callable[[], T]) -> None:
    try:
        result.set_result(function())
    except BaseException as error:
        result.set_exception(error)


def _for_other_ranks(error: Exception) -> Exception:
    """Returns the error that the other ranks raise where rank 0 raises `error`."""
    if is_for_user(error):
        return UserError(str(error))
    if isinstance(error, RunFailed):
        return error
    if isinstance(error, OSError) and is_storage_failure(error):
        return read_failed(error.filename or "a file", error.strerror)
    return RunFailed(f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}")


def gather_objects(value: T) -> list[T]:
    """Gathers a value of each rank, in the order of ranks (collective)."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def min_over_ranks(values: Sequence[int]) -> list[int]:
    """Reduces each value to its minimum over all ranks (collective)."""
    minima = torch.tensor(values, dtype=torch.int64)
    if dist.is_initialized():
        dist.all_reduce(minima, dist.ReduceOp.MIN)
    return cast(list[int], minima.tolist())


def sum_over_ranks(values: Sequence[int]) -> list[int]:
    """Sums each value over all ranks on the host, without waiting for the device (collective)."""
    sums = torch.tensor(values, dtype=torch.int64)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return cast(list[int], sums.tolist())


class HostCopy:
    """A copy of device values to the host; `read` waits for work queued before the copy, not after."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._event = None
        if values.device.type == "cuda":
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def is_late(self) -> bool:
        """Whether reading may have to wait."""
        return self._event is not None

    def read(self) -> Any:
        """Returns the values as nested lists."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
