"""Text → token shards: `python -m fms_fsdp prepare`.

    inputs ── plan ── [tokenizer] ── [hash: find duplicates] ── encode, one process per slice ── publish ── counts file

The shards are a function of the inputs and the options, not of `num_workers` or of how often the command was killed: slices that are in the
journal are not made again. Where things lie is told in `output_folder`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fms_fsdp.config import flag
from fms_fsdp.data.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer, parse_description
from fms_fsdp.tools.prepare.documents import Document, Slice, TextFormat, json_arrays, plan_slices, read_part
from fms_fsdp.tools.prepare.encode import (
    SliceJob,
    Stats,
    encode_slice,
    hash_slice,
    mark_duplicates,
    too_many_bad,
)
from fms_fsdp.tools.prepare.input_files import find_files
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
from fms_fsdp.tools.prepare.train_tokenizer import train_sentencepiece
from fms_fsdp.tools.prepare.workers import available_cores, note, run_jobs

_LAYOUT_VERSION = 1  # part of every plan: raise it when the same input gives other shards
_BYTES_PER_TOKEN = 3  # sizes slices so that one rarely fills more than a shard


@dataclass(frozen=True)
class PrepareConfig:
    """What to read, how to turn it into tokens, where to put it."""

    input: str = flag(
        "", "NAME=PATH[,NAME=PATH…]: a source and its file, folder or quoted glob; a NAME may repeat"
    )
    output: str = flag("", "folder for the shards: the --data_path of training")
    tokenizer: str = flag(
        "", "byte, a sentencepiece model, a tokenizer.json, or a folder (default: the output's own)"
    )
    train_tokenizer: bool = flag(False, "train a sentencepiece model on a sample of the inputs first")
    vocab_size: int | None = flag(
        None, "tokens of the trained model (default: 32000)", minimum=300, maximum=1 << 20
    )
    tokenizer_type: str = flag("bpe", "kind of the trained model", choices=("bpe", "unigram"))
    tokenizer_sample_mb: int = flag(
        64, "text to train the model on, in MB, spread over the inputs", minimum=1
    )
    eos_token: str = flag("", "the token that ends a document (default: the tokenizer's own)")
    append_eos: bool = flag(False, "store that token in the shards; by default the loader adds it")
    text_key: str = flag(
        "text", "JSON key or Parquet column of the text; several, a,b, are joined by a line end"
    )
    text_separator: str = flag(
        "", r"cuts text files into documents, \n and \t may be used (default: one per file)"
    )
    include: tuple[str, ...] = flag(
        (), "patterns of file names to read from folders, such as *.py,*.md (default: all)"
    )
    exclude: tuple[str, ...] = flag((), "patterns of file names to pass over, such as test/*")
    min_tokens: int = flag(1, "drop shorter documents", minimum=1)
    max_tokens: int | None = flag(None, "drop longer documents", minimum=1)
    limit_docs: int | None = flag(None, "read only that many documents of each source", minimum=1)
    dedup: bool = flag(False, "drop exact copies of earlier documents, over all sources of this call")
    split: tuple[float, ...] = flag(
        (1.0,), "shares train[,validation[,test]] by document hash, such as 949,50,1"
    )
    max_bad_lines: int = flag(100, "stop when a source has more malformed records", minimum=0)
    shard_tokens: int = flag(1 << 24, "tokens of a shard, about; a slice of input fills one", minimum=1)
    num_workers: int | None = flag(
        None, "processes (default: one per core); the result does not depend on it", minimum=1
    )
    overwrite: bool = flag(
        False, "replace sources that were prepared from other inputs or with other options"
    )

    def __post_init__(self) -> None:
        if not self.output:
            raise ValueError("--output is missing; name the folder for the shards")
        if self.train_tokenizer and self.tokenizer:
            raise ValueError(
                f"--tokenizer ({self.tokenizer}) and --train_tokenizer exclude each other; leave one out"
            )
        if self.vocab_size is not None and not self.train_tokenizer:
            raise ValueError(
                f"--vocab_size ({self.vocab_size}) is for a tokenizer to train; add --train_tokenizer=True"
            )
        if not 1 <= len(self.split) <= 3 or min(self.split) < 0 or self.split[0] <= 0:
            raise ValueError(
                f"--split ({_commas(self.split)}) must be one to three shares, the first above 0"
            )
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(
                f"--max_tokens ({self.max_tokens}) must not be below --min_tokens ({self.min_tokens})"
            )

    @property
    def form(self) -> TextFormat:
        return TextFormat(self.text_key, self.text_separator.replace("\\n", "\n").replace("\\t", "\t"))


def prepare(config: PrepareConfig) -> dict[str, Stats]:
    """Turns the inputs into shards and returns what was read and written, by source. Picks up where an earlier call was stopped.

    Raises:
        ValueError, FileNotFoundError: bad options or inputs, or an output made from others.
    """
    output = Path(config.output).expanduser()
    plans = [_plan(config, name, paths, output) for name, paths in parse_input(config.input).items()]
    output.mkdir(parents=True, exist_ok=True)
    with locked(output):
        tokenizer = _settle_tokenizer(config, output, plans)
        return finish(output, plans, _encode(config, tokenizer, plans))


def _plan(config: PrepareConfig, name: str, paths: Sequence[str], output: Path) -> SourcePlan:
    found = [file for path in paths for file in find_files(path, config.include, config.exclude, output)]
    files = unique_files(found)
    if arrays := json_arrays(files, config.form):
        note(
            f"{len(arrays)} .json files hold objects without {config.text_key}, each is read as text: {arrays[0]} …"
        )
    slices = plan_slices(files, config.shard_tokens * _BYTES_PER_TOKEN, config.form, config.limit_docs)
    return SourcePlan(name, files, tuple(slices), output)


def _settle_tokenizer(config: PrepareConfig, output: Path, plans: Sequence[SourcePlan]) -> Tokenizer:
    """The tokenizer given, trained, or already in the output, once it is known that every source of the output goes with it."""
    described = output / "meta" / "tokenizer.json"
    before, before_on = (
        parse_description(described.read_bytes(), str(described)) if described.is_file() else (None, None)
    )
    trained_on = _training_key(config, plans) if config.train_tokenizer else None
    keep = before is not None and (before_on == trained_on if trained_on else not config.tokenizer)
    if before is not None and keep:
        name = str(output / before.file_name) if before.file_name else before.kind
        tokenizer = load_tokenizer(name, config.eos_token or before.eos_token)
        if tokenizer.vocabulary.digest != before.digest:
            raise ValueError(
                f"--output ({output}): {before.file_name} was changed after it was used; restore it"
            )
    elif trained_on:
        if before and not config.overwrite:
            raise ValueError(
                f"--output ({output}) has a tokenizer that was not trained on these inputs with these options; leave out "
                "--train_tokenizer to use it, choose another folder, or --overwrite=True"
            )
        tokenizer = SentencePieceTokenizer(_train(config, plans), "trained", config.eos_token)
    elif config.tokenizer:
        tokenizer = load_tokenizer(config.tokenizer, config.eos_token)
    else:
        raise ValueError(
            "--tokenizer is missing; give byte, a model file or a folder, or --train_tokenizer=True"
        )
    keys = [_plan_key(config, plan, tokenizer, plans) for plan in plans]
    check_plans(output, plans, keys, tokenizer.vocabulary.digest, config.overwrite)
    if not keep:
        save_tokenizer(output, tokenizer, trained_on)
    return tokenizer


def _training_key(config: PrepareConfig, plans: Sequence[SourcePlan]) -> dict[str, Any]:
    """What a trained tokenizer depends on."""
    names = (
        "vocab_size",
        "tokenizer_type",
        "tokenizer_sample_mb",
        "text_key",
        "text_separator",
        "limit_docs",
    )
    key = {name: getattr(config, name) for name in names}
    return {**key, "inputs": {plan.name: plan.inputs_digest for plan in plans}}


def _train(config: PrepareConfig, plans: Sequence[SourcePlan]) -> bytes:
    started = time.monotonic()
    budget = config.tokenizer_sample_mb * 10**6
    text = list(_sample([entry for plan in plans for entry in plan.slices], config.form, budget))
    vocab_size = config.vocab_size or 32_000
    note(
        f"training a {config.tokenizer_type} tokenizer of {vocab_size} on {sum(map(len, text)) / 1e6:.1f} MB"
    )
    model = train_sentencepiece(text, vocab_size, config.tokenizer_type)
    note(f"tokenizer trained in {time.monotonic() - started:.0f} s")
    return model


def _sample(slices: Sequence[Slice], form: TextFormat, budget: int) -> Iterator[str]:
    """Documents spread evenly over the slices, about `budget` bytes of them; at most 16 times that is read."""
    total = sum(entry.num_bytes for entry in slices)
    step = max(1, round(total / (16 * budget)))
    share = min(1.0, budget * step / max(1, total))
    seen = taken = 0
    for entry in slices[::step]:
        for part in entry.parts:
            for record in read_part(part, form):
                if isinstance(record, Document):
                    seen += len(record.data)
                    if taken < share * seen and taken < budget:
                        taken += len(record.data)
                        yield record.text


def _plan_key(
    config: PrepareConfig, plan: SourcePlan, tokenizer: Tokenizer, plans: Sequence[SourcePlan]
) -> dict[str, Any]:
    """All that the shards of a source depend on, as JSON gives it back."""
    names = (
        "text_key",
        "text_separator",
        "limit_docs",
        "min_tokens",
        "max_tokens",
        "dedup",
        "append_eos",
        "shard_tokens",
    )
    return {
        "layout": _LAYOUT_VERSION,
        "inputs": plan.inputs_digest,
        "tokenizer_digest": tokenizer.vocabulary.digest,
        "eos_id": tokenizer.vocabulary.eos_id,
        "split": [share / sum(config.split) for share in config.split],
        **{name: getattr(config, name) for name in names},
        "dedup_over": [f"{other.name}:{other.inputs_digest}" for other in plans] if config.dedup else [],
    }


def _encode(
    config: PrepareConfig, tokenizer: Tokenizer, plans: Sequence[SourcePlan]
) -> dict[str, dict[int, dict[str, Any]]]:
    """Results by source and slice: those in the journals and those made now, in parallel."""
    workers = config.num_workers or available_cores()
    results = {plan.name: plan.finished() for plan in plans}
    jobs = [_job(config, tokenizer, plan, entry) for plan in plans for entry in plan.slices]
    pending = [job for job in jobs if job.slice.index not in results[job.source]]
    done = len(jobs) - len(pending)
    if done:
        note(f"{done} of {len(jobs)} slices are there already")
    for job in pending:
        job.folder.mkdir(parents=True, exist_ok=True)
    if config.dedup and pending:
        unhashed = [job for job in jobs if not job.hashes.is_file()]
        for _ in run_jobs(hash_slice, unhashed, [job.slice.num_bytes for job in unhashed], workers, "hash"):
            pass
        mark_duplicates(jobs)
    bad = {name: sum(r["stats"]["num_bad"] for r in found.values()) for name, found in results.items()}
    for job, result in run_jobs(
        encode_slice, pending, [job.slice.num_bytes for job in pending], workers, "encode"
    ):
        results[job.source][job.slice.index] = result
        bad[job.source] += result["stats"]["num_bad"]
        if bad[job.source] > config.max_bad_lines:
            raise ValueError(too_many_bad(config.max_bad_lines, job.source, result["stats"]["bad"]))
    return {name: dict(sorted(found.items())) for name, found in results.items()}


def _job(config: PrepareConfig, tokenizer: Tokenizer, plan: SourcePlan, entry: Slice) -> SliceJob:
    vocabulary = tokenizer.vocabulary
    return SliceJob(
        source=plan.name,
        slice=entry,
        form=config.form,
        tokenizer=str(plan.output / vocabulary.file_name) if vocabulary.file_name else vocabulary.kind,
        eos_token=vocabulary.eos_token,
        info=ShardInfo(vocabulary.size, vocabulary.eos_id, vocabulary.digest, has_eos=config.append_eos),
        folder=plan.partial,
        journal=plan.journal,
        split=config.split,
        min_tokens=config.min_tokens,
        max_tokens=config.max_tokens,
        dedup=config.dedup,
        shard_tokens=config.shard_tokens,
        max_bad_lines=config.max_bad_lines,
    )


def main(config: PrepareConfig) -> None:
    """The command: prepares, then says what was made."""
    print(describe(prepare(config)))
    print(
        f"shards, tokenizer and counts are in {config.output}; train on them with --data_path={config.output}"
    )


def _commas(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)
