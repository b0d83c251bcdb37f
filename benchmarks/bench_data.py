"""Measures the data stream against its targets and writes one result file.

    python benchmarks/bench_data.py [--data=FOLDER] [--tokens=300e6] [--steps=2000] [--output=FILE]
        [--against=CHECKOUT]

With --against, the script of another checkout measures the same corpora, interleaved with this one. It makes (once) a corpus of 300 M tokens in 500,000 lognormal documents, 3 sources, 64 files, in both layouts.
It reads the corpus at S = 4096, 2 rows a batch, one rank, on one thread. Every measurement is a process of
its own, timed after its imports. The same process also measures the speed of a plain memory copy of the same
batches. "warm" means that the files are in the page cache, "cold" that they were removed from it
(posix_fadvise) before the process started.

The reference scale (1.47 T tokens, 2.0 G documents, 100,000 files, 20 sources) has a counts file in which
every name stands for one real shard of 20,000 documents.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from result_file import HELP, write_result

from fms_fsdp.config import DataConfig
from fms_fsdp.data.batch import empty_batch
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.data.storage import Storage
from fms_fsdp.data.stream import TokenStream, build_stream

SEQ_LENGTH, ROWS, VOCAB, SEP = 4096, 2, 50_000, 0
SOURCES = {"web": (40, 0.7), "code": (16, 0.2), "books": (8, 0.1)}  # files, weight
REFERENCE_FILES, REFERENCE_SOURCES, REFERENCE_DOCS = 100_000, 20, 20_000
REFERENCE_BATCH = 1024

TARGETS = {
    "tokens_per_cpu_s": ">= 30e6",
    "tokens_per_cpu_s_batch_at": ">= 42e6",
    "first_batch_s": "<= 0.05",
    "state_bytes": "<= 4096",
    "masked_share": "< 0.001",
    "memory_mib": "<= 100",
}


# --- corpora ---


def document_lengths(rng: np.random.Generator, num_docs: int, num_tokens: int) -> np.ndarray:
    lengths = rng.lognormal(0.0, 1.2, size=num_docs)
    scaled: np.ndarray = np.maximum(1, lengths * (num_tokens / lengths.sum())).astype(np.int64)
    return scaled


def write_shard(path: Path, lengths: np.ndarray, tokens: np.ndarray, layout: str) -> None:
    """Writes documents of these lengths cut from `tokens`: lists of uint16, or record batches of uint32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if layout == "lists":
        kind = pa.large_list(pa.field("item", pa.uint16(), nullable=False))
        facts = {
            "n_docs": len(lengths),
            "n_tokens": int(offsets[-1]),
            "max_token_id": VOCAB - 1,
            "vocab_size": VOCAB,
            "sep_token": SEP,
        }
        metadata = {key: str(value) for key, value in facts.items()} | {
            "has_eos": "false",
            "dtype": "uint16",
        }
        schema = pa.schema([pa.field("tokens", kind, nullable=False)], metadata=metadata)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for start in range(0, len(lengths), 65_536):
                part = offsets[start : start + 65_537]
                values = pa.array(tokens[part[0] : part[-1]].astype(np.uint16))
                array = pa.LargeListArray.from_arrays(pa.array(part - part[0]), values, type=kind)
                writer.write_batch(pa.record_batch([array], schema=schema))
    else:
        schema = pa.schema([pa.field("tokens", pa.uint32())])
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for start, stop in zip(offsets[:-1], offsets[1:], strict=True):
                values = pa.array(tokens[start:stop], type=pa.uint32())
                writer.write_batch(pa.record_batch([values], schema=schema))


def make_corpus(root: Path, num_tokens: int, num_docs: int, layout: str) -> None:
    if (root / "meta" / "counts.csv").exists():
        return
    rng = np.random.default_rng(0)
    num_files = sum(files for files, _ in SOURCES.values())
    rows: list[tuple[str, int, int]] = []
    for source, (files, _) in SOURCES.items():
        for i in range(files):
            lengths = document_lengths(rng, num_docs // num_files, num_tokens // num_files)
            tokens = rng.integers(1, VOCAB, size=int(lengths.sum()), dtype=np.uint32)
            name = f"{source}/shard-{i:05d}.arrow"
            write_shard(root / name, lengths, tokens, layout)
            rows.append((name, len(lengths), len(tokens)))
    (root / "meta").mkdir(exist_ok=True)
    with open(root / "meta" / "counts.csv", "w", newline="") as sink:
        csv.writer(sink).writerows([("dataset/filename", "documents", "tokens"), *rows])


class ReferenceFiles(Storage):
    """100,000 names of shards in 20 folders that stand for one file, and their counts file."""

    def __init__(self, shard: Path, num_tokens: int) -> None:
        super().__init__(str(shard.parent))
        self._shard, per_source = shard.name, REFERENCE_FILES // REFERENCE_SOURCES
        self._files = Storage(str(shard.parent))
        names = [
            f"source-{i // per_source:02d}/shard-{i % per_source:05d}.arrow"
            for i in range(REFERENCE_FILES)
        ]
        table = io.StringIO()
        csv.writer(table).writerows([("dataset/filename", "documents", "tokens")])
        csv.writer(table).writerows((name, REFERENCE_DOCS, num_tokens) for name in names)
        self._counts = table.getvalue().encode()
        self.sizes = dict.fromkeys(names, self.sizes[shard.name])
        self.sizes["meta/counts.csv"] = len(self._counts)

    def read(self, path: str, size: int, offset: int) -> bytes:
        if path.startswith("meta"):
            return self._counts[offset : offset + size]
        return self._files.read(self._shard, size, offset)


# --- measurements, each in a process of its own ---


def resident_mib() -> float:
    """Returns the resident memory that is not backed by files."""
    with open("/proc/self/status") as status:
        kib = {line.split(":")[0]: line.split()[1] for line in status if line.startswith("Rss")}
    return int(kib["RssAnon"]) / 1024


def section_of(root: str, packing: str = "concat") -> DataConfig:
    weights = tuple(weight for _, weight in SOURCES.values())
    return DataConfig(
        data_path=root,
        datasets=tuple(SOURCES),
        weights=weights,
        seq_length=SEQ_LENGTH,
        sep_token=SEP,
        packing=packing,
    )


def open_stream(section: DataConfig, batch: int = ROWS) -> TokenStream:
    corpus = open_corpus(section)
    return build_stream(
        section, corpus, seed=1, vocab_size=VOCAB, global_batch_size=batch, dp_rank=0, dp_size=1
    )


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def warm_up_imports() -> None:
    import pyarrow.ipc  # noqa: F401

    import fms_fsdp.data.stream  # noqa: F401

    torch.empty(1)


def measure_speed(root: str, steps: int, packing: str) -> dict[str, float]:
    stream = open_stream(section_of(root, packing))
    passes, cpu = [], []
    for _ in range(6):
        stream._drop_ahead()
        stream.step = 0
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(steps):
            batch = stream.next_batch()
        passes.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    cpu_start, looked_at = time.process_time(), range(1, steps, 4)
    batches = [stream.batch_at(step) for step in looked_at]
    batch_at_s = time.process_time() - cpu_start
    masked = sum(int((each.labels_BS == -100).sum()) for each in batches)
    target = empty_batch(ROWS, SEQ_LENGTH)
    copy_s = min(
        seconds(lambda: [a.copy_(b) for a, b in zip(target, batch, strict=True)])
        for _ in range(2000)
    )
    tokens = steps * ROWS * SEQ_LENGTH
    rate = tokens / min(passes[1:])
    stream.close()
    return {
        "tokens_per_s": rate,
        "tokens_per_cpu_s": tokens / min(cpu[1:]),
        "tokens_per_cpu_s_batch_at": len(looked_at) * ROWS * SEQ_LENGTH / batch_at_s,
        "tokens_per_s_first_pass": tokens / passes[0],
        "masked_share": masked / (len(looked_at) * ROWS * SEQ_LENGTH),
        "memory_copy_tokens_per_s": ROWS * SEQ_LENGTH / copy_s,
        "share_of_memory_copy": rate * copy_s / (ROWS * SEQ_LENGTH),
    }


def measure_start(root: str, steps: int, packing: str) -> dict[str, float]:
    warm_up_imports()
    before = resident_mib()
    start = time.perf_counter()
    stream = open_stream(section_of(root, packing))
    stream.next_batch()
    first_batch_s = time.perf_counter() - start
    for _ in range(steps):
        stream.next_batch()
    result = {
        "first_batch_s": first_batch_s,
        "memory_mib": resident_mib() - before,
        "open_files": len(os.listdir("/proc/self/fd")),
        "state_bytes": len(json.dumps(stream.state_dict())),
    }
    stream.close()
    return result


def measure_resume(root: str, steps: int, packing: str) -> dict[str, float]:
    warm_up_imports()
    state = open_stream(section_of(root, packing)).state_dict()

    def resume() -> None:
        stream = open_stream(section_of(root, packing))
        stream.load_state_dict(state, 200_000)
        stream.next_batch()
        stream.close()

    return {"resume_s": seconds(resume)}


def measure_reference(root: str, steps: int, packing: str) -> dict[str, float]:
    warm_up_imports()
    shard = Path(root) / "reference.arrow"
    num_tokens = int(json.loads((Path(root) / "reference.json").read_text()))
    files = ReferenceFiles(shard, num_tokens)
    section = DataConfig(data_path=root, seq_length=SEQ_LENGTH, sep_token=SEP, packing=packing)
    before, start = resident_mib(), time.perf_counter()
    corpus = open_corpus(section, files)
    result = {"start_up_s": time.perf_counter() - start, "manifest_mib": resident_mib() - before}
    result["tokens"] = float(sum(source.num_tokens for source in corpus.sources))
    for world in (8, 1024):
        settings = {
            "seed": 1,
            "vocab_size": VOCAB,
            "global_batch_size": REFERENCE_BATCH,
            "dp_size": world,
        }
        start = time.perf_counter()
        stream = build_stream(section, corpus, dp_rank=world // 2, **settings)  # type: ignore[arg-type]
        stream.load_state_dict(stream.state_dict(), 200_000)
        stream.next_batch()
        result[f"resume_s_{world}_ranks"] = time.perf_counter() - start
        rounds = 24 if world == 8 else 24 * 16
        for _ in range(rounds // 4):
            stream.next_batch()
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(rounds):
            stream.next_batch()
        tokens = rounds * REFERENCE_BATCH // world * SEQ_LENGTH
        result[f"tokens_per_cpu_s_{world}_ranks"] = tokens / (time.process_time() - cpu_start)
        result[f"tokens_per_s_{world}_ranks"] = tokens / (time.perf_counter() - start)
        result[f"memory_mib_{world}_ranks"] = resident_mib() - before
        stream.close()
    plan = lambda: stream.order.addresses(123_456)  # noqa: E731
    result["plan_1024_rows_s"] = min(seconds(plan) for _ in range(20))
    result["state_bytes"] = float(len(json.dumps(stream.state_dict())))
    return result


MEASUREMENTS = {
    "speed": measure_speed,
    "start": measure_start,
    "resume": measure_resume,
    "reference": measure_reference,
}


# --- the whole run ---


def drop_from_page_cache(root: Path) -> None:
    for path in root.rglob("*.arrow"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def in_a_process(
    script: Path, measurement: str, root: Path, steps: int, packing: str = "concat"
) -> dict[str, float]:
    command = [
        sys.executable,
        str(script),
        f"--measure={measurement}",
        f"--data={root}",
        f"--steps={steps}",
    ]
    output = subprocess.run(
        [*command, f"--packing={packing}"],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(script.parent.parent)},
    ).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def hardware() -> dict[str, Any]:
    model = next(
        (
            line.split(":")[1].strip()
            for line in open("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        "",
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyarrow": pa.__version__,
        "numpy": np.__version__,
    }


def measure_layout(script: Path, root: Path, steps: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for measurement in ("speed", "start", "resume"):
        found |= in_a_process(script, measurement, root, steps)
    bestfit = in_a_process(script, "speed", root, steps, "bestfit")
    found["tokens_per_s_bestfit"] = bestfit["tokens_per_s"]
    drop_from_page_cache(root)
    found["first_batch_s_cold_files"] = in_a_process(script, "start", root, 1)["first_batch_s"]
    return found


def run(data: Path, num_tokens: int, steps: int, against: Path | None) -> dict[str, Any]:
    scripts = {"": Path(__file__).resolve()}
    if against is not None:
        scripts["against"] = against.resolve() / "benchmarks" / "bench_data.py"
    result: dict[str, Any] = {"hardware": hardware(), "targets": TARGETS}
    cases: list[tuple[str, Path, Callable[[Path, Path], dict[str, float]]]] = []
    for layout in ("lists", "documents"):
        root = data / f"{layout}-{num_tokens}"
        make_corpus(root, num_tokens, num_tokens // 600, layout)
        cases.append((layout, root, lambda script, root: measure_layout(script, root, steps)))
    root = data / "reference"
    if not (root / "reference.json").exists():
        rng = np.random.default_rng(1)
        lengths = document_lengths(rng, REFERENCE_DOCS, 14_680_000)
        tokens = rng.integers(1, VOCAB, size=int(lengths.sum()))
        write_shard(root / "reference.arrow", lengths, tokens, "lists")
        (root / "reference.json").write_text(str(int(lengths.sum())))
    cases.append(
        ("reference", root, lambda script, root: in_a_process(script, "reference", root, steps))
    )
    for name, root, measure in cases:
        for version, script in scripts.items():
            key = f"{name} {version}".strip()
            result[key] = measure(script, root)
            print(key, json.dumps(result[key], indent=1), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default="/tmp/bench_data", help="folder for the corpora, about 2 GB"
    )
    parser.add_argument("--tokens", type=float, default=300e6)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--against", type=Path, help="folder of another checkout to compare with")
    parser.add_argument("--output", type=Path, help=HELP)
    parser.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--packing", default="concat", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        print(json.dumps(MEASUREMENTS[flags.measure](flags.data, flags.steps, flags.packing)))
        return
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
    result |= run(Path(flags.data), int(flags.tokens), flags.steps, flags.against)
    write_result(result, flags.output)


if __name__ == "__main__":
    main()
