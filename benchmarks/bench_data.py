"""Measures the data stream against its targets.

    python benchmarks/bench_data.py [--data=FOLDER] [--tokens=300e6] [--steps=2000] [--output=FILE]

It makes (once) a corpus of --tokens in lognormal documents of 600 tokens, 3 sources, 64 files, in both layouts,
and reads it at 4096 tokens per sequence, 2 sequences per batch, one rank, on one thread. Every measurement is a
process of its own, timed after its imports, with the files in the page cache.

The last part is the share of its time in which a loop with steps of 0.4 s waits for data, if the disk is slow: each
read takes 50 ms, or each tenth a second. The loop waits as a run on a GPU does: for the batch of its step and for
the next two. Rows: this corpus, documents of 64 MiB, and 4,096 sources; columns: batches that are prepared in all.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from result_file import about_machine, parser_of, write_result

from fms_fsdp.config import DataConfig
from fms_fsdp.data import storage
from fms_fsdp.data import stream as stream_module
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.data.stream import TokenStream, build_stream

SEQ_LENGTH, ROWS, VOCAB, SEP = 4096, 2, 50_000, 0
WAITING_STEPS = 30
SOURCES = {"web": (40, 0.7), "code": (16, 0.2), "books": (8, 0.1)}  # files, weight

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
    with open(root / "meta" / "counts.csv", "w", newline="", encoding="utf-8") as sink:
        csv.writer(sink).writerows([("dataset/filename", "documents", "tokens"), *rows])


# --- measurements, each in a process of its own ---


def resident_mib() -> float:
    """Returns the resident memory that is not backed by files."""
    with open("/proc/self/status", encoding="utf-8") as status:
        kib = {line.split(":")[0]: line.split()[1] for line in status if line.startswith("Rss")}
    return int(kib["RssAnon"]) / 1024


def section_of(root: str) -> DataConfig:
    weights = tuple(weight for _, weight in SOURCES.values())
    return DataConfig(
        data_path=root,
        datasets=tuple(SOURCES),
        weights=weights,
        seq_length=SEQ_LENGTH,
        sep_token=SEP,
    )


def open_stream(section: DataConfig, batch: int = ROWS) -> TokenStream:
    corpus = open_corpus(section)
    return build_stream(
        section, corpus, seed=1, vocab_size=VOCAB, global_batch_size=batch, dp_rank=0, dp_size=1
    )


def warm_up_imports() -> None:
    import pyarrow.ipc  # noqa: F401

    import fms_fsdp.data.stream  # noqa: F401

    torch.empty(1)


def measure_speed(root: str, steps: int) -> dict[str, float]:
    stream = open_stream(section_of(root))
    passes, cpu = [], []
    for _ in range(6):
        stream._drop_ahead()
        stream.step = 0
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(steps):
            stream.next_batch()
        passes.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    cpu_start, looked_at = time.process_time(), range(1, steps, 4)
    batches = [stream.batch_at(step) for step in looked_at]
    batch_at_s = time.process_time() - cpu_start
    masked = sum(int((each.labels_BS == -100).sum()) for each in batches)
    tokens = steps * ROWS * SEQ_LENGTH
    stream.close()
    return {
        "tokens_per_s": tokens / min(passes[1:]),
        "tokens_per_cpu_s": tokens / min(cpu[1:]),
        "tokens_per_cpu_s_batch_at": len(looked_at) * ROWS * SEQ_LENGTH / batch_at_s,
        "tokens_per_s_first_pass": tokens / passes[0],
        "masked_share": masked / (len(looked_at) * ROWS * SEQ_LENGTH),
    }


def measure_start(root: str, steps: int) -> dict[str, float]:
    warm_up_imports()
    before = resident_mib()
    start = time.perf_counter()
    stream = open_stream(section_of(root))
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


def measure_resume(root: str, steps: int) -> dict[str, float]:
    warm_up_imports()
    state = open_stream(section_of(root)).state_dict()

    start = time.perf_counter()
    stream = open_stream(section_of(root))
    stream.load_state_dict(state, 200_000)
    stream.next_batch()
    return {"resume_s": time.perf_counter() - start}


def make_large_documents(root: Path) -> None:
    """Writes a source of 8 documents of 64 MiB."""
    if not root.exists():
        tokens = np.random.default_rng(0).integers(1, VOCAB, size=8 << 24, dtype=np.uint32)
        write_shard(root / "web" / "shard-0.arrow", np.full(8, 1 << 24), tokens, "documents")


def make_many_sources(root: Path) -> None:
    """Writes 4,096 sources of 16 documents of 1,024 tokens."""
    tokens = np.random.default_rng(0).integers(1, VOCAB, size=16 << 10, dtype=np.uint32)
    for number in range(0 if root.exists() else 4096):
        path = root / f"s{number}" / "shard-0.arrow"
        write_shard(path, np.full(16, 1 << 10), tokens, "documents")


def measure_waits(root: str, steps: int) -> dict[str, float]:
    """Returns the share of time in which the loop waits, by disk and number of batches prepared."""
    calls = itertools.count(1)
    disk: Any = storage
    read_range_of = storage.read_range_of

    def read_all_slowly(*place: int) -> bytes:
        time.sleep(0.05)
        return read_range_of(*place)

    def read_some_slowly(*place: int) -> bytes:
        if next(calls) % 10 == 0:
            time.sleep(1.0)
        return read_range_of(*place)

    result = {}
    for name, read in (("each read 50 ms", read_all_slowly), ("a tenth 1 s", read_some_slowly)):
        for num_prepared in (3, 5):
            section = DataConfig(data_path=root, seq_length=SEQ_LENGTH, sep_token=SEP)
            with closing(open_stream(section)) as stream:
                stream.next_batch()  # opens what it needs, from the fast disk
                stream._drop_ahead()
                disk.read_range_of = read
                stream_module.STEPS_AHEAD = num_prepared
                waited = 0.0
                start = time.perf_counter()
                for _ in range(steps):
                    before = time.perf_counter()
                    stream.next_batch()
                    stream.read_error_ahead(2)
                    waited += time.perf_counter() - before
                    time.sleep(0.4)
                result[f"{name}, {num_prepared} batches"] = waited / (time.perf_counter() - start)
                disk.read_range_of = read_range_of
    return result


MEASUREMENTS = {
    "speed": measure_speed,
    "start": measure_start,
    "resume": measure_resume,
}
SLOW_DISK = {"waits": measure_waits}


# --- the whole run ---


def in_a_process(measurement: str, root: Path, steps: int) -> dict[str, float]:
    command = [sys.executable, __file__, f"--measure={measurement}"]
    command += [f"--data={root}", f"--steps={steps}"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def main() -> None:
    settings = dict(data=Path("/tmp/bench_data"), tokens=300e6, steps=2000)
    parser = parser_of(__doc__, **settings)
    parser.add_argument("--measure", choices={**MEASUREMENTS, **SLOW_DISK}, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        measure = (MEASUREMENTS | SLOW_DISK)[flags.measure]
        print(json.dumps(measure(str(flags.data), flags.steps)))
        return
    result: dict[str, Any] = about_machine() | {"targets": TARGETS}
    num_tokens = int(flags.tokens)
    for layout in ("lists", "documents"):
        root = flags.data / f"{layout}-{num_tokens}"
        make_corpus(root, num_tokens, num_tokens // 600, layout)
        result[layout] = {}
        for measurement in MEASUREMENTS:
            result[layout] |= in_a_process(measurement, root, flags.steps)
        print(layout, json.dumps(result[layout], indent=1), flush=True)
    large = flags.data / "large-documents"
    many = flags.data / "many-sources"
    make_large_documents(large)
    make_many_sources(many)
    corpora = {"this corpus": flags.data / f"documents-{num_tokens}"}
    corpora |= {"documents of 64 MiB": large, "4,096 sources": many}
    for name, root in corpora.items():
        result[f"waits, {name}"] = in_a_process("waits", root, WAITING_STEPS)
        print(name, json.dumps(result[f"waits, {name}"], indent=1), flush=True)
    write_result(result, flags.output)


if __name__ == "__main__":
    main()
