"""Token ids in the formats of other projects → token shards: `python -m fms_fsdp convert`.

    .idx + .bin   Megatron-LM: int64 lengths and pointers of sequences, documents as ranges of them
    .ds + .index  datatrove: ids of 2 or 4 bytes, and where each document ends
    .parquet      a column of lists of ids
    .arrow        Arrow IPC files or streams with such a column, compressed or not: fms-fsdp's layout too

An end-of-document id at the end of a document is dropped, as shards leave it to the reader: so sources with and without it may be mixed. One file
is one slice; what was interrupted goes on like `prepare`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fms_fsdp.atomic import write_json
from fms_fsdp.config import flag
from fms_fsdp.data.tokenizer import Tokenizer, load_tokenizer
from fms_fsdp.tools.prepare.documents import Part, Slice
from fms_fsdp.tools.prepare.encode import SplitWriters, Stats
from fms_fsdp.tools.prepare.input_files import InputFile, find_files
from fms_fsdp.tools.prepare.output_folder import (
    SourcePlan,
    check_plans,
    describe,
    finish,
    locked,
    parse_input,
    save_tokenizer,
    unique_files,
)
from fms_fsdp.tools.prepare.shard_writer import ShardInfo
from fms_fsdp.tools.prepare.workers import available_cores, count_progress, run_jobs

_PATTERNS = ("*.idx", "*.ds", "*.parquet", "*.arrow")
_COLUMNS = ("tokens", "input_ids")
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

Tokens = npt.NDArray[Any]


@dataclass(frozen=True)
class ConvertConfig:
    """What to convert, and what its ids mean."""

    input: str = flag(
        "", "NAME=PATH[,NAME=PATH…]: a source and its .idx, .ds, .parquet or .arrow files, or their folder"
    )
    output: str = flag("", "folder for the shards: the --data_path of training")
    tokenizer: str = flag(
        "", "the tokenizer that made the ids; says --vocab_size and --eos_id, and is kept with the shards"
    )
    vocab_size: int | None = flag(
        None, "ids lie below it (default: the tokenizer's)", minimum=2, maximum=1 << 32
    )
    eos_id: int | None = flag(None, "the id that ends a document (default: the tokenizer's)", minimum=0)
    column: str = flag("", "column of the ids in Parquet and Arrow files (default: tokens or input_ids)")
    split: tuple[float, ...] = flag(
        (1.0,), "shares train[,validation[,test]] by document hash, such as 949,50,1"
    )
    shard_tokens: int = flag(1 << 24, "tokens of a shard at most, unless one document is longer", minimum=1)
    num_workers: int | None = flag(
        None, "processes (default: one per core); the result does not depend on it", minimum=1
    )
    overwrite: bool = flag(False, "replace sources that were made from other inputs or with other options")

    def __post_init__(self) -> None:
        if not self.output:
            raise ValueError("--output is missing; name the folder for the shards")
        if not self.tokenizer and (self.vocab_size is None or self.eos_id is None):
            raise ValueError("--tokenizer is missing; give it, or both --vocab_size and --eos_id")
        if not 1 <= len(self.split) <= 3 or min(self.split) < 0 or self.split[0] <= 0:
            raise ValueError(f"--split ({self.split}) must be one to three shares, the first above 0")


@dataclass(frozen=True)
class ConvertJob:
    """All that a process must know to convert a file."""

    source: str
    index: int
    path: str
    column: str
    info: ShardInfo
    folder: Path
    journal: Path
    split: tuple[float, ...]
    shard_tokens: int


def convert(config: ConvertConfig) -> dict[str, Stats]:
    """Turns files of token ids into shards and returns what was read and written, by source.

    Raises:
        ValueError, FileNotFoundError: bad options or inputs, or an output made from others.
    """
    output = Path(config.output).expanduser()
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None
    info = _meaning(config, tokenizer)
    plans = [_plan(name, paths, output) for name, paths in parse_input(config.input).items()]
    options = {
        "tokenizer_digest": info.tokenizer_digest,
        "vocab_size": info.vocab_size,
        "eos_id": info.sep_token,
        "column": config.column,
        "split": list(config.split),
        "shard_tokens": config.shard_tokens,
    }
    output.mkdir(parents=True, exist_ok=True)
    with locked(output):
        keys = [{"inputs": plan.inputs_digest, **options} for plan in plans]
        check_plans(output, plans, keys, info.tokenizer_digest, config.overwrite)
        if tokenizer:
            save_tokenizer(output, tokenizer)
        results = {plan.name: plan.finished() for plan in plans}
        jobs = [_job(config, info, plan, entry) for plan in plans for entry in plan.slices]
        pending = [job for job in jobs if job.index not in results[job.source]]
        for job in pending:
            job.folder.mkdir(parents=True, exist_ok=True)
        sizes = [os.path.getsize(_tokens_file(job.path)) for job in pending]
        for job, result in run_jobs(
            convert_file, pending, sizes, config.num_workers or available_cores(), "convert"
        ):
            results[job.source][job.index] = result
        return finish(output, plans, {name: dict(sorted(found.items())) for name, found in results.items()})


def _meaning(config: ConvertConfig, tokenizer: Tokenizer | None) -> ShardInfo:
    """What the ids mean: from the flags, else from the tokenizer."""
    known = tokenizer.vocabulary if tokenizer else None
    size = config.vocab_size or (known.size if known else 0)
    eos_id = config.eos_id if config.eos_id is not None else (known.eos_id if known else 0)
    if eos_id >= size:
        raise ValueError(f"--eos_id ({eos_id}) must lie below --vocab_size ({size})")
    return ShardInfo(size, eos_id, known.digest if known else "")


def _job(config: ConvertConfig, info: ShardInfo, plan: SourcePlan, entry: Slice) -> ConvertJob:
    return ConvertJob(
        source=plan.name,
        index=entry.index,
        path=entry.parts[0].path,
        column=config.column,
        info=info,
        folder=plan.partial,
        journal=plan.journal,
        split=config.split,
        shard_tokens=config.shard_tokens,
    )


def _plan(name: str, paths: Sequence[str], output: Path) -> SourcePlan:
    found: list[InputFile] = []
    for path in paths:
        is_file = os.path.isfile(os.path.expanduser(path))
        found += find_files(path, () if is_file else _PATTERNS, output=output)
    files = unique_files(found)
    parts = [Part(file.path, "tokens", 0, file.size, file.size) for file in files]
    return SourcePlan(name, files, tuple(Slice(i, (part,)) for i, part in enumerate(parts)), output)


def _tokens_file(path: str) -> str:
    """The file that holds the ids."""
    return path.removesuffix(".idx") + ".bin" if path.endswith(".idx") else path


def convert_file(job: ConvertJob) -> dict[str, Any]:
    """Writes the shards of one file and its journal entry, which it returns.

    Raises:
        ValueError: not such a file, or an id outside the vocabulary.
    """
    writers = SplitWriters(job.folder, job.index, job.info, job.split, job.shard_tokens)
    stats = Stats()
    counted = 0
    try:
        for tokens in _documents(job.path, job.column):
            stats.records += 1
            if len(tokens) and tokens[-1] == job.info.sep_token:
                tokens = tokens[:-1]
            if not len(tokens):
                stats.leave_out("empty document")
                continue
            writers.add(tokens, tokens.astype("<u4").tobytes() if len(job.split) > 1 else b"")
            stats.documents += 1
            stats.tokens += len(tokens)
            stats.lengths[len(tokens).bit_length()] += 1
            if stats.tokens - counted > 1 << 20:
                count_progress(0, 0, stats.tokens - counted)
                counted = stats.tokens
        result = {"shards": writers.finish(), "stats": stats.to_json()}
    except (OSError, ValueError, IndexError) as error:  # pa.ArrowInvalid is a ValueError
        raise ValueError(f"--input ({job.path}): {error}; document {stats.records + 1}") from error
    write_json(job.journal / f"slice-{job.index:05d}.json", result)
    count_progress(stats.documents, 0, stats.tokens - counted)
    return result


def _documents(path: str, column: str) -> Iterator[Tokens]:
    if path.endswith(".idx"):
        return _megatron(path)
    if path.endswith(".ds"):
        return _datatrove(path)
    if path.endswith((".parquet", ".arrow")):
        return _table(path, column)
    raise ValueError("is no .idx (of a Megatron pair), .ds, .parquet or .arrow file")


def _megatron(path: str) -> Iterator[Tokens]:
    """Documents of an index and its .bin. Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py."""
    with open(path, "rb") as file:
        if file.read(9) != _MEGATRON_MAGIC:
            raise ValueError("is not a Megatron index (its first bytes are others)")
        version, code = int.from_bytes(file.read(8), "little"), file.read(1)[0]
        if version != 1 or code not in _MEGATRON_TYPES:
            raise ValueError(
                f"is a Megatron index of version {version} with type {code}; known: version 1, integers"
            )
        num_sequences, num_edges = (int.from_bytes(file.read(8), "little") for _ in range(2))
        lengths = np.fromfile(file, "<i4", num_sequences)
        pointers = np.fromfile(file, "<i8", num_sequences)
        edges = np.fromfile(file, "<i8", num_edges)
    if len(edges) != num_edges or (len(edges) and edges[-1] > num_sequences):
        raise ValueError("is truncated or damaged")
    dtype = np.dtype(_MEGATRON_TYPES[code])
    ids = (
        np.memmap(_tokens_file(path), dtype, "r")
        if os.path.getsize(_tokens_file(path))
        else np.empty(0, dtype)
    )
    starts = pointers // dtype.itemsize
    if len(starts) and int((starts + lengths).max()) > len(ids):
        raise ValueError(f"points beyond the end of {_tokens_file(path)}")
    for first, last in zip(edges, edges[1:], strict=False):
        pieces = [ids[starts[i] : starts[i] + lengths[i]] for i in range(first, last)]
        yield np.concatenate(pieces) if pieces else np.empty(0, dtype)


def _datatrove(path: str) -> Iterator[Tokens]:
    """Documents of a .ds file; the width of an id follows from the sizes. Source: datatrove, pipeline/tokens/tokenizer.py."""
    ends = np.fromfile(path + ".index", "<u8").astype(np.int64)
    total, size = int(ends[-1]) if len(ends) else 0, os.path.getsize(path)
    if total and size not in (2 * total, 4 * total):
        raise ValueError(f"has {size} bytes for {total} tokens of its index; expected 2 or 4 each")
    ids: Tokens = np.memmap(path, f"<u{size // total}", "r") if total else np.empty(0, np.uint16)
    start = 0
    for end in ends:
        yield ids[start:end]
        start = int(end)


def _table(path: str, column: str) -> Iterator[Tokens]:
    import pyarrow.parquet as pq

    if path.endswith(".parquet"):
        with pq.ParquetFile(path) as table:
            name = _column(table.schema_arrow, column)
            for batch in table.iter_batches(batch_size=1024, columns=[name]):
                yield from _lists(batch.column(0))
    else:
        with pa.memory_map(path) as source:
            is_file = source.read(6) == b"ARROW1"  # else a stream, as the package datasets writes
            source.seek(max(0, source.size() - 8))
            if not is_file and source.read() != _END_OF_STREAM:
                raise ValueError("is neither an Arrow file nor a whole Arrow stream")
            source.seek(0)
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            name = _column(reader.schema, column, plain=True)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                yield from _lists(batch.column(name))


def _column(schema: pa.Schema, wanted: str, *, plain: bool = False) -> str:
    """The name of the column of ids: lists of integers, or with `plain` integers, a record batch a document.

    Raises:
        ValueError: no such column, or not lists of integers.
    """
    name = wanted or next((name for name in _COLUMNS if name in schema.names), "")
    if name not in schema.names:
        raise ValueError(
            f"has no column {wanted or ' or '.join(_COLUMNS)}, only {', '.join(schema.names)}; see --column"
        )
    kind = schema.field(name).type
    if plain and pa.types.is_integer(kind):
        return name
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(
        kind.value_type
    ):
        raise ValueError(
            f"column {name} holds {kind}, not lists of integers; for text use `python -m fms_fsdp prepare`"
        )
    return name


def _lists(array: pa.Array) -> Iterator[Tokens]:
    is_document = pa.types.is_integer(array.type)
    if array.null_count or (not is_document and array.flatten().null_count):
        raise ValueError("holds nulls among its ids")
    if is_document:
        yield array.to_numpy()
        return
    offsets = array.offsets.to_numpy()
    values = array.values.to_numpy()
    for start, stop in zip(offsets, offsets[1:], strict=False):
        yield values[start:stop]


def main(config: ConvertConfig) -> None:
    """The command: converts, then says what was made."""
    print(describe(convert(config)))
    print(f"shards and counts are in {config.output}; train on them with --data_path={config.output}")
