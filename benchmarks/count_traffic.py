"""Counts the messages and file operations of a run in a simulated world, and writes one result file.

    python benchmarks/count_traffic.py [--world_size=1024] [--files=2000] [--steps=10] [--output=FILE]

One rank of that world runs `main_training.py` in a process group of torch's "fake" backend, whose collectives
return at once. A second rank runs with the values that the first one broadcast. The script counts collectives
over all ranks, and the operations of each rank on the file system of the corpus. A collective over N ranks in
a ring takes 2 (N - 1) hops. It measures no time.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from result_file import HELP, write_result

SEP, VOCAB, SEQ_LENGTH, PER_NODE = 0, 1000, 64, 8
SOURCES = ("web", "code", "books", "talks")


def make_corpus(root: Path, num_files: int) -> None:
    """`num_files` files in all, every one a copy of the same small shard."""
    import numpy as np
    import pyarrow as pa

    tokens = pa.array(np.arange(600, dtype=np.uint16) % (VOCAB - 1) + 1)
    documents = pa.LargeListArray.from_arrays(pa.array(range(0, 601, 60), pa.int64()), tokens)
    shard = root / "shard.arrow"
    root.mkdir(parents=True)
    with pa.ipc.new_file(shard, pa.schema([("tokens", documents.type)])) as writer:
        writer.write_batch(pa.record_batch([documents], names=["tokens"]))
    rows = [("dataset/filename", "documents", "tokens")]
    for i in range(num_files):
        name = f"{SOURCES[i % len(SOURCES)]}/shard-{i:05}.arrow"
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(shard, root / name)
        rows.append((name, "10", "600"))
    shard.unlink()
    (root / "meta").mkdir()
    with open(root / "meta" / "counts.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)


class Tape:
    """What rank 0 broadcast, in order: recorded there, played back on the other rank."""

    def __init__(self, file: Path) -> None:
        self._file, self._recording = file, not file.exists()
        self._values: list[Any] = [] if self._recording else pickle.loads(file.read_bytes())

    def pass_on(self, value: Any) -> Any:
        if not self._recording:
            return self._values.pop(0)
        self._values.append(value)
        self._file.write_bytes(pickle.dumps(self._values))
        return value


def simulate(
    world_size: int, rank: int, data: Path, steps: int, folder: Path
) -> dict[str, dict[str, int]]:
    """Runs one rank in this process; returns its operations before the first rows ("start") and after."""
    counts: dict[str, Counter[str]] = {"start": Counter(), "steps": Counter()}
    phase = ["start"]
    count_file_operations(data, lambda name: counts[phase[0]].update([name]))
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(PER_NODE),
    }
    os.environ |= {
        "LOCAL_RANK": str(rank % PER_NODE),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    import torch.distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist: Any = (
        torch.distributed
    )  # some of its functions, and one of ours, are replaced by counting ones
    begin, begin_group = dist.init_process_group, dist.new_group
    dist.init_process_group = lambda *_, **__: begin(
        "fake", store=FakeStore(), rank=rank, world_size=world_size
    )
    dist.new_group = lambda *_, **__: begin_group(backend="fake")
    count_collectives(dist, Tape(folder / "tape"), lambda name: counts[phase[0]].update([name]))
    import main_training
    from fms_fsdp.data import stream as data_stream
    from fms_fsdp.run import run_dir

    # The ranks run one after another: the probe file of rank 0 is gone when the next one looks.
    run_dir.check_shared = lambda *_: None  # type: ignore[assignment]

    stream: Any = data_stream.TokenStream
    read = stream.batch

    def first_batch(*arguments: Any) -> Any:
        phase[0] = "steps"
        return read(*arguments)

    stream.batch = first_batch
    flags = [
        "--model_variant=tiny",
        f"--seq_length={SEQ_LENGTH}",
        "--batch_size=1",
        f"--num_steps={steps}",
    ]
    flags += [
        f"--data_path={data}",
        f"--sep_token={SEP}",
        f"--vocab_size={VOCAB}",
        "--trackers=none",
    ]
    flags += [
        "--save_last=False",
        "--checkpoint_interval=0",
        "--report_interval=1000",
        "--collective_timeout_s=60",
    ]
    status = main_training.main([*flags, f"--output_dir={folder / f'run{rank}'}"])
    assert status == 0, status
    return {name: dict(sorted(found.items())) for name, found in counts.items()}


def count_file_operations(data: Path, note: Callable[[str], None]) -> None:
    """Has `note` called for each listing, stat, open and read below `data`."""
    folder = str(data)
    descriptors: set[int] = set()
    stat, pread, opened = os.stat, os.pread, os.open

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.listdir", "os.scandir", "open") and str(arguments[0]).startswith(folder):
            note("open" if event == "open" else "list a folder")

    def count_stat(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
        if str(path).startswith(folder):
            note("stat")
        return stat(path, *arguments, **named)

    def count_open(path: Any, *arguments: Any, **named: Any) -> int:
        descriptor = opened(path, *arguments, **named)
        (descriptors.add if str(path).startswith(folder) else descriptors.discard)(descriptor)
        return descriptor

    def count_pread(descriptor: int, *arguments: Any) -> bytes:
        if descriptor in descriptors:
            note("read a block")
        return pread(descriptor, *arguments)

    sys.addaudithook(listen)
    os.stat = count_stat
    os.open = count_open
    os.pread = count_pread


def count_collectives(dist: Any, tape: Tape, note: Callable[[str], None]) -> None:
    """Has `note` called for each collective over all ranks; broadcasts go over `tape`."""

    def wrap(name: str) -> None:
        plain = getattr(dist, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            group = named.get("group")
            if group is None or dist.get_world_size(group) == dist.get_world_size():
                on_device = any(getattr(part, "is_cuda", False) for part in arguments)
                note(f"{name}{' on the GPU' if on_device else ''}")
            if name == "broadcast_object_list":
                arguments[0][:] = [tape.pass_on(value) for value in arguments[0]]
                return None
            result = plain(*arguments, **named)
            if name == "broadcast":
                arguments[0].copy_(tape.pass_on(arguments[0].clone()))
            return result

        setattr(dist, name, counted)

    for name in (
        "all_reduce",
        "broadcast",
        "broadcast_object_list",
        "all_gather_object",
        "barrier",
    ):
        wrap(name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world_size", type=int, default=1024)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=Path, help=HELP)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        counts = simulate(
            given.world_size, given.rank, given.folder / "data", given.steps, given.folder
        )
        (given.folder / f"counts{given.rank}.json").write_text(json.dumps(counts))
        os._exit(0)
    ranks: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_corpus(folder / "data", given.files)
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        for rank in (0, 13):
            command = [
                sys.executable,
                __file__,
                f"--rank={rank}",
                f"--folder={folder}",
                f"--steps={given.steps}",
            ]
            subprocess.run(
                [*command, f"--world_size={given.world_size}"],
                check=True,
                stdout=subprocess.DEVNULL,
                env=environment,
            )
            ranks[f"rank {rank}"] = json.loads((folder / f"counts{rank}.json").read_text())
    for rank_name, phases in ranks.items():
        for phase, counts in phases.items():
            print(
                f"{rank_name}, {phase}: {', '.join(f'{count} x {what}' for what, count in counts.items())}"
            )
    shape = {"world_size": given.world_size, "files": given.files, "steps": given.steps}
    write_result({"command": " ".join(sys.argv), **shape, "counts": ranks}, given.output)


if __name__ == "__main__":
    main()
