"""`python -m fms_fsdp inspect`: the data of any step of a run, and the validity of token shards.

Nothing is recorded during training for `inspect step`. It computes the data of a step from the
run's flags and checkpoint by the functions that training uses, for any past or future step.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from fms_fsdp.config import DataConfig
from fms_fsdp.config.values import counted
from fms_fsdp.data.batch import IGNORED_LABEL, array_fingerprint
from fms_fsdp.data.corpus import Corpus, Source, check_shard, check_tokenizer, open_corpus
from fms_fsdp.data.kept_tokenizer import find_tokenizer, unk_warnings
from fms_fsdp.data.order import Address
from fms_fsdp.data.permute import I64
from fms_fsdp.data.sequences import Columns
from fms_fsdp.data.shards import CONVERT, Shard, ShardError
from fms_fsdp.data.stream import TokenStream
from fms_fsdp.errors import MissingInput, UserError
from fms_fsdp.files import read_json_object
from fms_fsdp.run.data_stream import open_stream
from fms_fsdp.run.resume_point import choose_checkpoint
from fms_fsdp.state import RunConfig, read_run_config
from fms_fsdp.tools.tool_flags import StepConfig, VerifyConfig

EXCERPT = 80  # tokens and characters
SLICE_TOKENS = 1 << 20
MAX_PROBLEMS = 5  # per shard
PROGRESS_INTERVAL_S = 5.0


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    step      of the checkpoint that the run would resume from, 0 without one
    changes   settings that the newest launch changed after that step, as log lines
    """

    stream: TokenStream
    step: int
    changes: list[str]


def print_step(config: StepConfig) -> None:
    """Prints the documents and tokens of a step. The command `inspect step`."""
    if not config.run or config.step is None:
        raise UserError("--run and --step are required; set --run=runs/NAME --step=N")
    start_s = time.perf_counter()
    with open_run_data(config.run, config.data_path) as data:
        stream = data.stream
        step = config.step
        addresses = stream.order.addresses(step)
        first, stop = _parse_rows(config.rows, len(addresses))
        batch = stream.global_batch(step)
        digest = f"{array_fingerprint(batch.tokens, batch.labels, 0):016x}"
        decode = None
        if config.text:
            path = stream.section.data_path
            tokenizer = find_tokenizer(path)
            if tokenizer is None:
                raise UserError(f"--text requires a tokenizer in {path}; remove --text")
            decode = tokenizer.decode
        if not config.json:
            size = f"{len(addresses)} sequences of {stream.section.seq_length} tokens"
            print(f"step {step}: {size}{_format_plan(data, step)}")
        for row in range(first, stop):
            record: dict[str, Any] = {"step": step, "row": row}
            record |= describe_sequence(stream, addresses[row], batch, row)
            if decode is not None:
                for segment in record["pieces"]:
                    at = segment["at"]
                    length = segment["stop"] - segment["start"]
                    ids = batch.tokens[row, at : at + min(length, EXCERPT)]
                    segment["text"] = decode(ids.tolist())
            if config.json:
                print(json.dumps(record | {"data_fingerprint": digest}))
            else:
                print(_format_sequence(record))
        if not config.json:
            print(f"data_fingerprint {digest}\n({time.perf_counter() - start_s:.2f} s)")


@contextmanager
def open_run_data(folder: str, data_path: str = "") -> Iterator[RunData]:
    """Opens the data of a run after the checkpoint that the run would resume from.

    Raises:
        UserError: there is no such run, or its data has changed or is missing.
    """
    run = _read_run(folder)
    cfg = run.located
    section = _data_section(run, data_path)
    # --resume is about one launch, and the run directory may have moved since.
    root = cfg.checkpoint.ckpt_save_path or f"{folder}/checkpoints"
    flags = replace(cfg.checkpoint, resume="auto", ckpt_save_path=root)
    resume = choose_checkpoint(replace(cfg, checkpoint=flags))
    corpus = open_corpus(section)
    # One rank reads the global batch.
    batch = replace(run.batch, batch_size=run.batch.batch_size * run.batch.dp_size, dp_size=1)
    cfg = replace(cfg, data=section)
    opened, changes = open_stream(cfg, batch, run.model.vocab_size, corpus, resume)
    with closing(cast(TokenStream, opened)) as stream:
        if resume.is_resume and not resume.fresh_data:
            _open_removed_sources(stream, resume.start.data["sources"])
        yield RunData(stream, resume.start.step, changes)


def _read_run(folder: str) -> RunConfig:
    path = Path(folder, "config.json")
    if not path.is_file():
        raise MissingInput(f"--run={folder} must be a run directory with config.json; see runs/")
    return read_run_config(read_json_object(path, fix="restore it"), path)


def _data_section(run: RunConfig, data_path: str) -> DataConfig:
    section = run.located.data
    if section.use_dummy_dataset or section.dataset_builder:
        kind = "synthetic tokens" if section.use_dummy_dataset else "data of --dataset_builder"
        raise UserError(f"--run must be trained on token shards, not on {kind}; use another run")
    return replace(section, data_path=data_path or section.data_path)


def _open_removed_sources(stream: TokenStream, known: dict[str, Any]) -> None:
    """Opens sources that earlier steps used and that the flags no longer name, if still there."""
    for name in sorted(set(known) - {source.name for source in stream.corpus.sources}):
        section = replace(stream.section, datasets=(name,), weights=())
        try:
            removed = open_corpus(section, stream.corpus.storage)
        except FileNotFoundError:
            continue  # its sequences have addresses, but no documents
        if removed.sources[0].digest != known[name][0]:
            raise UserError(f"source {name} of earlier steps has changed; restore its shards")
        stream.open_sources(removed)


def describe_sequence(
    stream: TokenStream, address: Address, batch: Columns, row: int
) -> dict[str, Any]:
    """Returns the address of a sequence and its document segments, as JSON values.

    A segment is tokens [start, stop) of a document, at token `at` of the sequence. In shards with
    loss masks, `num_labels` counts its tokens in the loss.
    """
    record: dict[str, Any] = {
        "source": address.source,
        "epoch": address.epoch,
        "sequence": address.n,
        "window": address.window,
        "position": address.position,
    }
    try:
        found = stream.sequence_segments(address)
    except ShardError as error:
        if stream.section.on_missing != "mask":
            raise
        return record | {"masked": str(error), "pieces": []}
    reader = stream.reader(address.source)
    at = 0
    segments = list[dict[str, Any]]()
    has_masks = any(reader.shard(number).has_masks for number in {shard for shard, *_ in found})
    for shard, document, start, stop in found:
        path = reader.source.paths[shard]
        end = at + stop - start
        segment = {"file": path, "document": document, "start": start, "stop": stop, "at": at}
        if has_masks:
            segment["num_labels"] = int((batch.labels[row, at:end] != IGNORED_LABEL).sum())
        segments.append(segment)
        at = end
    return record | {"pieces": segments}


def _parse_rows(text: str, size: int) -> tuple[int, int]:
    """Returns first and stop of `a:b`, of one sequence `a`, or of all."""
    start = 0
    stop = size
    if text:
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
        if match is None:
            stop = 0  # an error below
        else:
            start = int(match[1])
            stop = int(match[2]) if match[2] else start + 1
    if not 0 <= start < stop <= size:
        raise UserError(
            f"--rows={text} must be a:b with 0 <= a < b <= {size}; use 0:{size} for all"
        )
    return start, stop


def _format_plan(data: RunData, step: int) -> str:
    if not 0 < data.step < step:
        return ""
    changes = f", where {'; '.join(data.changes)}" if data.changes else ""
    return f"; planned: the newest checkpoint is of step {data.step}{changes}"


def _format_sequence(record: dict[str, Any]) -> str:
    lines = [
        f"row {record['row']}: {record['source']}, epoch {record['epoch']}, sequence "
        f"{record['sequence']} (window {record['window']}, sequence {record['position']} in it)"
    ]
    if "masked" in record:
        lines.append(f"  masked: {record['masked']}")
    for segment in record["pieces"]:
        length = segment["stop"] - segment["start"]
        at = f"[{segment['at']}, {segment['at'] + length})"
        tokens = f"tokens [{segment['start']}, {segment['stop']})"
        line = f"  {at:<16} {segment['file']}  document {segment['document']}  {tokens}"
        if "num_labels" in segment:
            line += f"  loss on {segment['num_labels']} of {length}"
        lines.append(line)
        text = segment.get("text")
        if text:
            shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
            lines.append(f"      {shown[:EXCERPT]}")
    return "\n".join(lines)


def verify(config: VerifyConfig) -> None:
    """Reads every shard to its last token and prints the problems. The command `inspect verify`.

    Raises:
        UserError: with the number of problems.
    """
    run = None
    section = DataConfig(data_path=config.data_path)
    if config.run:
        run = _read_run(config.run)
        section = _data_section(run, config.data_path)
    if config.datasets:
        section = replace(section, datasets=config.datasets, weights=())
    if config.sep_token is not None:
        section = replace(section, sep_token=config.sep_token)
    corpus = open_corpus(replace(section, seq_length=1, on_missing="mask"), check_shards=False)
    vocab_size = config.vocab_size
    if vocab_size is None:
        vocab_size = corpus.vocab_size if run is None else run.model.vocab_size
    num_shards = sum(len(source.paths) for source in corpus.sources)
    num_corrupt = 0
    num_problems = 0
    start = time.monotonic()
    last_shown = start
    pool = ThreadPoolExecutor(config.num_threads)
    try:
        jobs = [
            pool.submit(find_problems, corpus, source, number, vocab_size)
            for source in corpus.sources
            for number in range(len(source.paths))
        ]
        for done, job in enumerate(as_completed(jobs), 1):
            problems = job.result()
            for problem in problems:
                print(problem, flush=True)
            if problems:
                num_corrupt += 1
                num_problems += len(problems)
            if time.monotonic() - last_shown >= PROGRESS_INTERVAL_S:
                last_shown = time.monotonic()
                progress = f"read {done} of {num_shards} shards, {num_corrupt} with problems"
                print(progress, file=sys.stderr)
    finally:
        pool.shutdown(cancel_futures=True)
    if num_corrupt:
        text = f"found {counted(num_problems, 'problem')} in {num_corrupt} of {num_shards} shards"
        raise UserError(f"{text}; restore the shards named above")
    documents = sum(int(source.docs.sum()) for source in corpus.sources)
    tokens = sum(int(source.tokens.sum()) for source in corpus.sources)
    bound = f"ids below {vocab_size}" if vocab_size else "ids not checked (no --vocab_size)"
    size = f"{documents:,} documents, {tokens:,} tokens, {bound}"
    where = f"{counted(num_shards, 'shard')} of {counted(len(corpus.sources), 'source')}"
    verb = "is" if num_shards == 1 else "are"
    print(f"{where} {verb} valid: {size} ({time.monotonic() - start:.1f} s)")
    for warning in unk_warnings(corpus.storage, [source.name for source in corpus.sources]):
        print(f"warning: {warning}")
    if run:
        with open_run_data(config.run, config.data_path) as data:
            if data.step:
                print(f"the data matches the run's checkpoint of step {data.step}")
            else:
                print("the run has no checkpoint yet, with which its data could be compared")


def find_problems(corpus: Corpus, source: Source, number: int, vocab_size: int | None) -> list[str]:
    """Reads a shard to its last token and returns its problems, one line each."""
    path = source.paths[number]
    problems = list[str]()
    try:
        shard = corpus.storage.open_shard(path, source.delimiter)
        try:
            check_tokenizer(corpus, shard)
            check_shard(source, number, shard, corpus.sep_token, vocab_size)
        except ShardError as error:
            problems.append(str(error))
        limits = list[int]()
        if vocab_size is not None:
            limits.append(vocab_size)
        if shard.metadata.get("max_token_id"):
            limits.append(int(shard.metadata["max_token_id"]) + 1)
        limit = min(limits, default=None)
        width = shard.width
        starts, addresses = shard.documents
        stops = addresses + (np.diff(starts) - source.delimiter) * width
        ends = stops[stops > addresses]  # of documents that have tokens

        def document_of(address: int) -> int:
            return int(addresses.searchsorted(address, side="right")) - 1

        for begin, tokens in _read_tokens(shard, addresses, stops):
            if limit is not None and int(tokens.max()) >= limit:
                i = int(np.argmax(tokens >= limit))
                document = document_of(begin + i * width)
                text = f"token {tokens[i]} in document {document} is not below {limit}"
                problems.append(f"shard {path}: {text}; restore it, or set --vocab_size")
            if source.delimiter == 0 and not problems:  # the separator is stored
                low, high = ends.searchsorted([begin, begin + len(tokens) * width], side="right")
                last = (ends[low:high] - begin) // width - 1
                for i in last[tokens[last] != corpus.sep_token][:1].tolist():
                    document = document_of(begin + i * width)
                    text = f"document {document} ends with {tokens[i]}, not with the separator"
                    problems.append(f"shard {path}: {text} ({corpus.sep_token}); {CONVERT}")
    except ShardError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"shard {path} cannot be read: {error}; check the storage")
    num_hidden = len(problems) - MAX_PROBLEMS
    if num_hidden > 0:
        problems[MAX_PROBLEMS:] = [f"shard {path} has {num_hidden} more problems"]
    return problems


def _read_tokens(shard: Shard, starts: I64, stops: I64) -> Iterator[tuple[int, Any]]:
    """Yields (byte position, tokens) slices of documents at bytes [starts, stops)."""
    gaps = np.flatnonzero(starts[1:] != stops[:-1])  # documents without a gap are read together
    begins = np.append(starts[:1], starts[gaps + 1])
    ends = np.append(stops[gaps], stops[-1:])
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        while begin < end:
            size = min(SLICE_TOKENS * shard.width, end - begin)
            yield begin, shard.ids(shard.read(size, begin))
            begin += size
