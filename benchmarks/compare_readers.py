"""Our reader of shards (`pread`) against pyarrow's own reader on a memory map: why shards are not mapped.

    python benchmarks/compare_readers.py --data=FOLDER_OF_BENCH_DATA [--output=FILE]

For both layouts, in a process for each case: milliseconds to open a shard, tokens/s of
random documents with files in the page cache (warm) and removed from it (cold, posix_fadvise), and MiB of
private memory. Each case runs three times, in turns. At the end a shard is cut to half of its size while it
is open, and read: the exit status of that process is noted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from result_file import HELP, write_result

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from fms_fsdp.data.shards.files import LocalFiles  # noqa: E402
from fms_fsdp.data.shards.shard import Shard  # noqa: E402

NUM_READS, NUM_SHARDS, ROUNDS = 4000, 8, 3
Read = Callable[[int], int]  # number of a document → how many tokens were read
Opened = Callable[[], tuple[int, Read]]  # finds all documents: their number, and what reads one


def open_ours(path: Path) -> Opened:
    files = LocalFiles(str(path.parent))
    shard = Shard(files, path.name, 0)

    def find() -> tuple[int, Read]:
        chunks = np.asarray(shard.chunk_starts)
        found = [shard.documents(c, 0, int(chunks[c + 1] - chunks[c])) for c in range(len(chunks) - 1)]
        addresses = np.concatenate([each.addresses for each in found])
        lengths = np.concatenate([np.diff(each.starts) for each in found])

        def read(document: int) -> int:
            size = int(lengths[document]) * shard.dtype.itemsize
            tokens = np.frombuffer(files.pread(path.name, size, int(addresses[document])), shard.dtype)
            return len(tokens.astype(np.int64))

        return shard.num_docs, read

    return find


def open_mapped(path: Path) -> Opened:
    file = pa.ipc.open_file(pa.memory_map(str(path)))

    def find() -> tuple[int, Read]:
        columns = [file.get_batch(i).column(0) for i in range(file.num_record_batches)]
        starts = np.cumsum([0, *(len(column) for column in columns)])

        if not pa.types.is_large_list(file.schema.field("tokens").type):  # a record batch is a document
            documents = [column.to_numpy() for column in columns]
            return len(documents), lambda document: len(documents[document].astype(np.int64))
        tables = [(column.values.to_numpy(), column.offsets.to_numpy()) for column in columns]

        def read(document: int) -> int:
            batch = int(np.searchsorted(starts, document, side="right")) - 1
            (tokens, offsets), at = tables[batch], document - int(starts[batch])
            return len(tokens[offsets[at] : offsets[at + 1]].astype(np.int64))

        return int(starts[-1]), read

    return find


READERS: dict[str, Callable[[Path], Opened]] = {"ours": open_ours, "mapped": open_mapped}


def private_mib() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:")) / 1024


def forget(paths: list[Path]) -> None:
    """Removes the files from the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(name: str, paths: list[Path]) -> dict[str, float]:
    """One process: opens the shards, then reads random documents of all of them."""
    before, begin = private_mib(), time.perf_counter()
    opened = [READERS[name](path) for path in paths]
    open_ms = 1e3 * (time.perf_counter() - begin) / len(paths)
    shards = [find() for find in opened]
    rng, tokens, begin = np.random.default_rng(0), 0, time.perf_counter()
    for _ in range(NUM_READS):
        num_docs, read = shards[int(rng.integers(len(shards)))]
        tokens += read(int(rng.integers(num_docs)))
    rate = tokens / (time.perf_counter() - begin)
    return {"open_ms": open_ms, "tokens_per_s": rate, "private_mib": private_mib() - before}


def cut_while_open(name: str, path: Path) -> None:
    """Reads the last document of a shard that loses its second half after it is opened."""
    num_docs, read = READERS[name](path)()
    os.truncate(path, path.stat().st_size // 2)
    read(num_docs - 1)


def child(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout or (done.stderr.strip().splitlines() or [""])[-1]


def compare(data: Path) -> Iterator[dict[str, Any]]:
    for layout in ("lists", "documents"):
        paths = sorted(data.glob(f"{layout}-*/*/*.arrow"))[:NUM_SHARDS]
        if not paths:
            raise SystemExit(f"error: --data ({data}) must hold {layout}-*; run bench_data.py --data={data}")
        for state in ("warm", "cold"):
            found: dict[str, list[dict[str, float]]] = {name: [] for name in READERS}
            for _ in range(ROUNDS):
                for name in READERS:
                    if state == "cold":
                        forget(paths)
                    status, text = child("measure", name, *map(str, paths))
                    assert status == 0, text
                    found[name].append(json.loads(text))
            for name, rounds in found.items():
                medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
                yield {"layout": layout, "files": state, "reader": name, **medians, "rounds": rounds}
        for name in READERS:
            copy = data / "cut.arrow"
            copy.write_bytes(paths[0].read_bytes())
            status, text = child("cut", name, str(copy))
            copy.unlink()
            yield {"layout": layout, "reader": name, "cut_exit_status": status, "last_line": text}


def main() -> None:
    if sys.argv[1] == "measure":
        print(json.dumps(measure(sys.argv[2], [Path(path) for path in sys.argv[3:]])))
        return
    if sys.argv[1] == "cut":
        return cut_while_open(sys.argv[2], Path(sys.argv[3]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="the folder that bench_data.py made")
    parser.add_argument("--output", type=Path, help=HELP)
    flags, results = parser.parse_args(), []
    for case in compare(Path(flags.data)):
        print({key: value for key, value in case.items() if key != "rounds"}, flush=True)
        results.append(case)
    write_result({"pyarrow": pa.__version__, "cases": results}, flags.output)


if __name__ == "__main__":
    main()
