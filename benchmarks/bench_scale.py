"""Measures how the costs of a run grow with its ranks, shards, files and sources.

    python benchmarks/bench_scale.py [--sizes=8,32,128] [--parts=ranks,shards,…] [--output=FILE]

The parts and their unit, of which each size has as many:

    ranks      forks on this machine: gloo's sockets, and two saves of a small model
    shards     ranks of a simulated run of --variant on the meta device: plan and .metadata of a save
    files      1,000 files of data, in 10 sources: listing and opening
    slices     100 slices of prepare: what the parent process does for them
    documents  100,000 documents: memory of prepare --dedup
    sources    sources of a training of 20 steps: bytes of a report
    latency    (not by default) checkpoints of a run, and sources of 10 files: calls of the file system, each of
               which strace delays by 5 ms as a network might; requires strace, and the right to trace

A column of the printed tables is a size, and the last one the exponent of the growth: 0 is constant, 1 linear,
2 quadratic. CPU seconds count one process. Each measurement is a process of its own.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from result_file import about_machine, parser_of, write_result
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from fms_fsdp.checkpoint.folders import CompleteCheckpoints, checkpoint_steps, find_checkpoint
from fms_fsdp.checkpoint.io import collect_tensors, load_checkpoint, write_checkpoint
from fms_fsdp.checkpoint.plans import SavePlans
from fms_fsdp.checkpoint.retention import KeepPolicy
from fms_fsdp.config import FP32, DataConfig, OptimConfig, ParallelConfig, TrainingConfig
from fms_fsdp.console import table
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.data.storage import Storage
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import gather_objects, init_distributed, run_on_rank0
from fms_fsdp.distributed.world import World
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.parallel.fsdp import apply_fsdp
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.prepare import encode
from fms_fsdp.prepare.documents import TextFormat
from fms_fsdp.prepare.input_files import Slice
from fms_fsdp.prepare.prepare_flags import ShardsConfig
from fms_fsdp.prepare.writer import PreparedSource, ShardInfo, SliceResult, Stats
from fms_fsdp.run.checkpoints import delete_old
from fms_fsdp.state import TrainMetadata

ROOT = Path(__file__).resolve().parent.parent
FORK = multiprocessing.get_context(
    "fork"
)  # a rank is a fork: importing torch 128 times would take minutes
TIMEOUT = timedelta(minutes=10)
FILES, FILES_PER_SOURCE = 1000, 100
SLICES = 100
DOCUMENTS = 100_000
SLOW_CALLS = "%file,getdents64,fsync,fdatasync"
DELAY_US = 5000
Values = dict[str, float]


@contextmanager
def cpu_time(values: Values, name: str) -> Iterator[None]:
    """Adds the CPU seconds of this process within the context to `values`."""
    begin = time.process_time()
    yield
    values[name] = time.process_time() - begin


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- ranks ---


def measure_ranks(size: int, folder: Path, flags: Any) -> Values:
    """Starts the ranks, and returns the values of rank 0 and of rank 1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = FORK.SimpleQueue()
    ranks = [
        FORK.Process(target=run_rank, args=(rank, size, port, folder, results))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
    if failed:
        raise RuntimeError(f"rank {failed[0]} of {size} failed")
    found = dict[int, Values](results.get() for _ in range(min(2, size)))  # they fit into the pipe
    other = found[min(1, size - 1)]
    return {
        "sockets of rank 0": found[0]["sockets"],
        "sockets of rank 1": other["sockets"],
        "connecting, CPU s of rank 1": other["connect_s"],
        "first save, CPU s of rank 0": found[0]["save 1"],
        "second save, CPU s of rank 0": found[0]["save 2"],
    }


def run_rank(rank: int, size: int, port: int, folder: Path, results: Any) -> None:
    """Connects as a launch does, runs one collective of each kind, and saves twice."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    os.environ["LOCAL_WORLD_SIZE"] = f"{size}"
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    section = ParallelConfig(sharding_strategy="fsdp", use_torch_compile=False)
    values = Values()
    with cpu_time(values, "connect_s"):
        init_distributed(section, TrainingConfig(), World.from_env(), cpu)
        mesh = Mesh(ParallelDims("fsdp", dp_shard=size), rank, "cpu", TIMEOUT)
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        mesh.sum(torch.ones(1), "world")
        run_on_rank0(lambda: None)
        gather_objects(rank)
    config = TransformerConfig(2, 128, 128, 1, 1, 256, max_seq_len=16)
    model = parallelize(config, section, mesh, device=cpu, precision=FP32, seed=1)
    tensors = collect_tensors(model, build_optimizers(OptimConfig(), model, FP32))
    plans = SavePlans()  # the second save uses the plan of the first
    for step in (1, 2):
        with cpu_time(values, f"save {step}"):
            write_checkpoint(tensors, folder, TrainMetadata(step), group=group, plans=plans)
    links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()]
    values["sockets"] = sum(link.startswith("socket:") for link in links)
    if rank < 2:
        results.put((rank, values))
    dist.barrier()
    os._exit(0)  # the end of gloo's threads is not measured


# --- shards of a simulated run ---


def measure_shards(size: int, folder: Path, flags: Any) -> Values:
    """Plans a save of the model over `size` ranks; the plans of the ranks are those of rank 0, moved."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    with patch.object(dist.ProcessGroup, "set_timeout"):  # the fake group has no timeout
        mesh = Mesh(ParallelDims("fsdp", dp_shard=size), 0, "cpu")
    config = replace(VARIANTS[flags.variant], num_layers=flags.layers)
    with torch.device("meta"):
        model = build_model(config)
    apply_fsdp(model, ParallelConfig(), mesh, FP32)
    tensors = collect_tensors(model, build_optimizers(OptimConfig(), model, FP32))
    planner = DefaultSavePlanner()
    planner.set_up_planner(tensors, None, True)
    own = planner.create_local_plan()
    pickled = [pickle.dumps(plan_of_rank(own, rank, size)) for rank in range(size)]
    values = Values()
    values["plan of a rank, KB"] = len(pickled[-1]) / 1e3
    with cpu_time(values, "plan of all, CPU s of rank 0"):
        plans = [pickle.loads(plan) for plan in pickled]
        plans, metadata = planner.create_global_plan(plans)
        for plan in plans:
            pickle.dumps(plan)
    data = pickle.dumps(metadata)
    values[".metadata, MB"] = len(data) / 1e6
    with cpu_time(values, "reading .metadata, CPU s"):
        pickle.loads(data)
    values["peak, MiB"] = peak_mib()
    return values


def plan_of_rank(plan: SavePlan, rank: int, size: int) -> SavePlan:
    """Returns rank 0's plan with the offsets and sizes of another rank's shards."""
    items = list[WriteItem]()
    for item in plan.items:
        data = item.tensor_data
        if item.type != WriteItemType.SHARD or data is None:
            items.append(item)
            continue
        rows = data.size[0]
        rows_per_rank = -(-rows // size)
        start = min(rank * rows_per_rank, rows)
        num_rows = min(rows_per_rank, rows - start)
        offsets = torch.Size([start, *data.chunk.offsets[1:]])
        sizes = torch.Size([num_rows, *data.chunk.sizes[1:]])
        moved = replace(data, chunk=ChunkStorageMetadata(offsets, sizes))
        index = MetadataIndex(item.index.fqn, offsets)
        items.append(replace(item, index=index, tensor_data=moved))
    return SavePlan(items, None, plan.planner_data)


# --- files ---


def measure_files(size: int, folder: Path, flags: Any) -> Values:
    """Lists and opens 1,000 files times `size`."""
    num_files = FILES * size
    write_corpus(folder, num_files, FILES_PER_SOURCE)
    values = Values()
    with cpu_time(values, "listing, CPU s"):
        storage = Storage(str(folder))
        num_listed = len(storage.sizes)
    assert num_listed == num_files + 1, num_listed
    with cpu_time(values, "opening, CPU s"):
        corpus = open_corpus(DataConfig(data_path=str(folder), seq_length=64), storage)
    values["sent to each rank, MB"] = len(pickle.dumps(corpus)) / 1e6
    values["peak, MiB"] = peak_mib()
    return values


def write_corpus(folder: Path, num_files: int, files_per_source: int) -> None:
    """Writes shards of one document, which are links to few files, and their counts."""
    rows = ["dataset/filename,documents,tokens"]
    for number in range(num_files):
        if number % FILES == 0:  # a file has at most 65,000 hard links
            one = folder / f".shard-{number}.arrow"
            num_tokens = write_shard(one)
        source = f"source-{number // files_per_source:05d}"
        path = folder / source / f"shard-{number:07d}.arrow"
        if number % files_per_source == 0:
            path.parent.mkdir()
        os.link(one, path)
        rows.append(f"{source}/{path.name},1,{num_tokens}")
    (folder / "meta").mkdir()
    (folder / "meta" / "counts.csv").write_text("\n".join(rows), encoding="utf-8")


def write_shard(path: Path, num_tokens: int = 1000) -> int:
    """Writes a shard of one document; returns its tokens."""
    metadata = {"n_docs": "1", "n_tokens": str(num_tokens), "vocab_size": "256", "sep_token": "0"}
    metadata |= {"has_eos": "false", "max_token_id": "1"}
    tokens = pa.array([np.ones(num_tokens, np.uint16)], pa.large_list(pa.uint16()))
    column = pa.field("tokens", tokens.type, nullable=False)
    schema = pa.schema([column], metadata=metadata)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([tokens], schema=schema))
    return num_tokens


# --- prepare ---


def measure_slices(size: int, folder: Path, flags: Any) -> Values:
    """Runs `make_shards` with workers that return at once."""
    slices = tuple(Slice(number, ()) for number in range(SLICES * size))
    source = PreparedSource("source", (), slices, folder)
    reader = encode.TextReader(TextFormat(), "byte", "", False, 1, None)
    settings = encode.ShardSettings(reader, ShardInfo(257, 256, ""), (1.0,), 1 << 24)
    stats = vars(Stats(records=10, documents=10, tokens=100))

    def run_at_once(
        work: object, jobs: Sequence[encode.SliceJob], workers: int, label: str
    ) -> Iterator[tuple[encode.SliceJob, SliceResult]]:
        for job in jobs:
            yield job, SliceResult(shards=[], stats=stats)

    vars(encode).update(run_jobs=run_at_once, publish=lambda *_: {})
    values = Values()
    with cpu_time(values, "parent process, CPU s"):
        encode.make_shards(ShardsConfig(output=str(folder)), [source], settings)
    return values


def measure_documents(size: int, folder: Path, flags: Any) -> Values:
    """Marks copies among documents, 100,000 in each slice."""
    reader = encode.TextReader(TextFormat(), "byte", "", False, 1, None)
    settings = encode.ShardSettings(reader, ShardInfo(257, 256, ""), (1.0,), 1 << 24)
    rng = np.random.default_rng(0)
    jobs = list[encode.SliceJob]()
    for number in range(size):
        jobs.append(encode.SliceJob("source", Slice(number, ()), settings, folder, folder))
        hashes = rng.integers(0, 1 << 63, DOCUMENTS, dtype=np.uint64)
        np.save(jobs[-1].file("hashes.npy"), hashes)
    values = Values()
    before = peak_mib()
    with cpu_time(values, "marking copies, CPU s"):
        encode.mark_copies(jobs)
    values["bytes per document"] = (peak_mib() - before) * 2**20 / (DOCUMENTS * size)
    return values


# --- sources ---


def measure_sources(size: int, folder: Path, flags: Any) -> Values:
    """Trains the tiny model for 20 steps on `size` sources."""
    for number in range(size):
        path = folder / "data" / f"source-{number:05d}" / "shard.arrow"
        path.parent.mkdir(parents=True)
        write_shard(path)
    settings = f"--data_path={folder}/data --output_dir={folder}/run --model_variant=tiny"
    settings += " --seq_length=64 --num_steps=20 --report_interval=1 --global_batch_size=2"
    settings += " --trackers=none"
    command = [sys.executable, "main_training.py", *settings.split()]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "run" / "metrics.jsonl").read_bytes().splitlines()
    reports = [line for line in lines if "loss" in json.loads(line)]
    return {"a report, KB": sum(map(len, reports)) / len(reports) / 1e3}


# --- a file system over a network ---


@contextmanager
def slow_files(values: Values, name: str) -> Iterator[None]:
    """Delays each call that names or lists a file, or syncs one; adds their number, and the seconds."""
    command = ["strace", "-f", "-e", f"trace={SLOW_CALLS}"]
    command += ["-e", f"inject={SLOW_CALLS}:delay_enter={DELAY_US}"]
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as calls:
        command += ["-o", calls.name, "-p", f"{os.getpid()}"]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert tracer.stderr is not None
        answer = tracer.stderr.readline()
        if "attached" not in answer:
            raise RuntimeError(f"strace cannot trace this process: {answer}")
        begin = time.perf_counter()
        yield
        values[f"{name}, s"] = time.perf_counter() - begin
        tracer.send_signal(signal.SIGINT)
        tracer.wait()
        # A call that another thread interrupts has two lines, of which the second is "resumed".
        lines = [line for line in calls if "(" in line and " resumed>" not in line]
        values[f"{name}, calls"] = len(lines)


def measure_latency(size: int, folder: Path, flags: Any) -> Values:
    """Chooses among `size` checkpoints, loads, saves and deletes one; lists and opens the data."""
    config = TransformerConfig(2, 128, 128, 1, 1, 256, max_seq_len=16)
    alone = Mesh(ParallelDims("none"), 0, "cpu")
    section = ParallelConfig(use_torch_compile=False)
    model = parallelize(config, section, alone, device=torch.device("cpu"), precision=FP32, seed=1)
    optimizers = build_optimizers(OptimConfig(), model, FP32)
    tensors = collect_tensors(model, optimizers)
    plans = SavePlans()
    root = folder / "checkpoints"
    for step in range(1, size + 1):
        write_checkpoint(tensors, root, TrainMetadata(step), plans=plans)
    corpus = folder / "data"
    corpus.mkdir()
    write_corpus(corpus, 10 * size, 10)
    data = DataConfig(data_path=str(corpus), seq_length=64)
    complete = CompleteCheckpoints()
    for step in checkpoint_steps(root):  # as a run that wrote them knows them
        complete.read(root / f"step_{step}")

    values = Values()
    with slow_files(values, "choosing the newest"):
        newest = find_checkpoint(root)
    assert newest is not None
    with slow_files(values, "loading it"):
        load_checkpoint(newest.folder, model, optimizers, is_alone=True)
    with slow_files(values, "a save"):
        write_checkpoint(tensors, root, TrainMetadata(size + 1), plans=plans)
    with slow_files(values, "deleting the oldest"):
        steps = checkpoint_steps(root)
        delete_old(root, steps, KeepPolicy(last=size), None, complete)
    with slow_files(values, "listing the data"):
        storage = Storage(data.data_path)
        assert len(storage.sizes) == 10 * size + 1  # and meta/counts.csv
    with slow_files(values, "opening the data"):
        open_corpus(data, storage)
    return values


PARTS: Mapping[str, Callable[[int, Path, Any], Values]] = {
    "ranks": measure_ranks,
    "shards": measure_shards,
    "files": measure_files,
    "slices": measure_slices,
    "documents": measure_documents,
    "sources": measure_sources,
    "latency": measure_latency,
}
BY_DEFAULT = [part for part in PARTS if part != "latency"]


def measure(part: str, size: int, flags: Any) -> Values:
    """Returns the values of a part at a size, measured in a process of its own."""
    folder = Path(tempfile.mkdtemp(prefix="bench_scale_"))
    try:
        with ProcessPoolExecutor(1, FORK) as pool:
            return pool.submit(PARTS[part], size, folder, flags).result()
    finally:
        shutil.rmtree(folder)


def exponent(sizes: Sequence[int], values: Sequence[float]) -> str:
    """Returns k of value ~ size^k between the first and the last size; – for a value near 0."""
    if len(sizes) < 2 or min(values[0], values[-1]) < 0.005:
        return "–"
    return f"{math.log(values[-1] / values[0]) / math.log(sizes[-1] / sizes[0]):.1f}"


def main() -> None:
    parser = parser_of(
        __doc__, sizes="8,32,128", parts=",".join(BY_DEFAULT), variant="llama3_70b", layers=8
    )
    flags = parser.parse_args()
    sizes = sorted(int(size) for size in flags.sizes.split(","))
    parts = flags.parts.split(",")
    if not set(parts) <= PARTS.keys():
        parser.error(f"--parts={flags.parts} must be some of {','.join(PARTS)}")
    result: dict[str, Any] = about_machine() | {"sizes": sizes, "parts": {}}
    for part in parts:
        found = {size: measure(part, size, flags) for size in sizes}
        result["parts"][part] = found
        rows = list[list[str]]()
        for name in found[sizes[0]]:
            values = [found[size][name] for size in sizes]
            rows.append([name, *(f"{value:,.4g}" for value in values), exponent(sizes, values)])
        print(table([part, *map(str, sizes), "growth"], rows), end="\n\n", flush=True)
    write_result(result, flags.output)


if __name__ == "__main__":
    main()
