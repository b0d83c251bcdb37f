"""Text → token shards: `python -m fms_fsdp prepare`.

    inputs ── plan ── [tokenizer] ── [hash: find duplicates] ── encode, one process per slice ── publish ── counts file
                                                                    │
                                          OUT/.partial/SOURCE/…, journal OUT/meta/prepare/SOURCE/slice-N.json

Invariants: the shards are a function of the inputs and the options, not of `num_workers` or of how often the command was killed. A source folder
appears complete or not at all: slices are written and renamed under `.partial`, their journal entry follows, and when all are there the folder is
moved to its place. The counts file comes last. Layout of the output:

    SOURCE/shard-00000.arrow …   tokenizer.model   meta/counts.csv   meta/tokenizer.json   meta/summary.json
    validation/ and test/: data folders of their own with the same sources, when --split asks for them
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fms_fsdp.config import flag
from fms_fsdp.data.documents import Document, InputFile, Slice, TextFormat, find_files, plan_slices, read_part
from fms_fsdp.data.encode import SPLITS, SliceJob, Stats, encode_slice, hash_slice, mark_duplicates, too_many_bad
from fms_fsdp.data.shard_writer import ShardInfo, write_counts, write_json
from fms_fsdp.data.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer, train_sentencepiece
from fms_fsdp.data.workers import available_cores, note, run_jobs

_LAYOUT_VERSION = 1  # part of every plan: raise it when the same input gives other shards
_BYTES_PER_TOKEN = 3  # sizes slices so that one rarely fills more than a shard
_RESERVED = ("meta", "validation", "test")


@dataclass(frozen=True)
class PrepareConfig:
    """What to read, how to turn it into tokens, where to put it."""

    input: str = flag("", "NAME=PATH[,NAME=PATH…]: a source and its file, folder or quoted glob; a NAME may repeat")
    output: str = flag("", "folder for the shards: the --data_path of training")
    tokenizer: str = flag("", "byte, a sentencepiece model, a tokenizer.json, or a folder (default: the output's own)")
    train_tokenizer: bool = flag(False, "train a sentencepiece model on a sample of the inputs first")
    vocab_size: int | None = flag(None, "tokens of the trained model (default: 32000)", minimum=300, maximum=1 << 20)
    tokenizer_type: str = flag("bpe", "kind of the trained model", choices=("bpe", "unigram"))
    tokenizer_sample_mb: int = flag(64, "text to train the model on, in MB, spread over the inputs", minimum=1)
    eos_token: str = flag("", "the token that ends a document (default: the tokenizer's own)")
    append_eos: bool = flag(False, "store that token in the shards; by default the loader adds it")
    text_key: str = flag("text", "JSON key or Parquet column of the text; several, a,b, are joined by a line end")
    text_separator: str = flag("", r"cuts text files into documents, \n and \t may be used (default: one per file)")
    include: tuple[str, ...] = flag((), "patterns of file names to read from folders, such as *.py,*.md (default: all)")
    exclude: tuple[str, ...] = flag((), "patterns of file names to pass over, such as test/*")
    min_tokens: int = flag(1, "drop shorter documents", minimum=1)
    max_tokens: int | None = flag(None, "drop longer documents", minimum=1)
    limit_docs: int | None = flag(None, "read only that many documents of each source", minimum=1)
    dedup: bool = flag(False, "drop exact copies of earlier documents, over all sources of this call")
    split: tuple[float, ...] = flag((1.0,), "shares train[,validation[,test]] by document hash, such as 949,50,1")
    max_bad_lines: int = flag(100, "stop when a source has more malformed records", minimum=0)
    shard_tokens: int = flag(1 << 24, "tokens of a shard, about; a slice of input fills one", minimum=1)
    num_workers: int | None = flag(
        None, "processes (default: one per core); the result does not depend on it", minimum=1
    )
    overwrite: bool = flag(False, "replace sources that were prepared from other inputs or with other options")

    def __post_init__(self) -> None:
        if not self.output:
            raise ValueError("--output is missing; name the folder for the shards")
        if self.train_tokenizer and self.tokenizer:
            raise ValueError(f"--tokenizer ({self.tokenizer}) and --train_tokenizer exclude each other; leave one out")
        if self.vocab_size is not None and not self.train_tokenizer:
            raise ValueError(
                f"--vocab_size ({self.vocab_size}) is for a tokenizer to train; add --train_tokenizer=True"
            )
        if not 1 <= len(self.split) <= 3 or min(self.split) < 0 or self.split[0] <= 0:
            raise ValueError(f"--split ({_commas(self.split)}) must be one to three shares, the first above 0")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"--max_tokens ({self.max_tokens}) must not be below --min_tokens ({self.min_tokens})")

    @property
    def form(self) -> TextFormat:
        return TextFormat(self.text_key, self.text_separator.replace("\\n", "\n").replace("\\t", "\t"))


@dataclass(frozen=True)
class SourcePlan:
    """A source of this call: what it is made of and where its journal lies."""

    name: str
    files: tuple[InputFile, ...]
    slices: tuple[Slice, ...]
    output: Path

    @property
    def journal(self) -> Path:
        return self.output / "meta" / "prepare" / self.name

    @property
    def partial(self) -> Path:
        return self.output / ".partial" / self.name

    def final(self, split: str) -> Path:
        return self.output / self.name if split == SPLITS[0] else self.output / split / self.name

    @functools.cached_property
    def inputs_digest(self) -> str:
        listing = [(file.name, file.size, file.mtime_ns) for file in self.files]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16]

    def finished(self) -> dict[int, dict[str, Any]]:
        """The journal's slices whose shards are all there. A published source that lost one counts as not begun."""
        results = {}
        for entry in self.slices:
            path = self.journal / f"slice-{entry.index:05d}.json"
            if path.is_file():
                result = json.loads(path.read_text())
                if all(self._has(shard) for shard in result["shards"]):
                    results[entry.index] = result
        return results if self.partial.is_dir() or len(results) == len(self.slices) else {}

    def _has(self, shard: dict[str, Any]) -> bool:
        folder = self.partial / shard["split"] if self.partial.is_dir() else self.final(shard["split"])
        path = folder / shard["file"]
        return path.is_file() and bool(path.stat().st_size == shard["bytes"])


def prepare(config: PrepareConfig) -> dict[str, Stats]:
    """Turns the inputs into shards and returns what was read and written, by source. Picks up where an earlier call was stopped.

    Raises:
        ValueError, FileNotFoundError: bad options or inputs, or an output made from others.
    """
    output = Path(config.output).expanduser()
    plans = [_plan(config, name, paths, output) for name, paths in _parse_input(config.input).items()]
    output.mkdir(parents=True, exist_ok=True)
    with _locked(output):
        tokenizer = _settle_tokenizer(config, output, plans)
        results = _encode(config, tokenizer, plans)
        stats = {}
        for plan in plans:
            stats[plan.name] = total = Stats.merge(Stats.from_json(r["stats"]) for r in results[plan.name].values())
            if not any(shard["split"] == SPLITS[0] for r in results[plan.name].values() for shard in r["shards"]):
                raise ValueError(f"--input: source {plan.name} has no documents left to train on; {total.reasons()}")
        for plan in plans:
            _publish(plan)
        _write_counts(output)
    return stats


def _parse_input(text: str) -> dict[str, list[str]]:
    """NAME → its paths. A comma that is not followed by NAME= belongs to the path."""
    sources: dict[str, list[str]] = {}
    for item in re.split(r",(?=[^,=/]*=)", text):
        name, equals, path = item.partition("=")
        if not equals or not path:
            raise ValueError(f"--input ({text}) must be NAME=PATH[,NAME=PATH…]; for example web=data/web,code=src")
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or name in _RESERVED:
            raise ValueError(
                f"--input ({name}) must name a source with letters, digits, _ . - and not be one of {', '.join(_RESERVED)}"
            )
        sources.setdefault(name, []).append(path)
    return sources


def _plan(config: PrepareConfig, name: str, paths: Sequence[str], output: Path) -> SourcePlan:
    found = [file for path in paths for file in find_files(path, config.include, config.exclude)]
    files = tuple({os.path.realpath(file.path): file for file in found}.values())
    slices = plan_slices(files, config.shard_tokens * _BYTES_PER_TOKEN, config.form, config.limit_docs)
    return SourcePlan(name, files, tuple(slices), output)


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Keeps a second `prepare` out of the folder; the lock dies with the process."""
    with open(output / ".prepare.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"--output ({output}) is being written by another prepare; wait for it") from None
        yield


def _settle_tokenizer(config: PrepareConfig, output: Path, plans: Sequence[SourcePlan]) -> Tokenizer:
    """The tokenizer given, trained, or already in the output, once it is known that every source of the output goes with it."""
    described = output / "meta" / "tokenizer.json"
    before = json.loads(described.read_text()) if described.is_file() else None
    trained_on = _training_key(config, plans) if config.train_tokenizer else None
    keep = before is not None and (before["trained_on"] == trained_on if trained_on else not config.tokenizer)
    if before is not None and keep:
        eos_token = config.eos_token or before["eos_token"]
        tokenizer = load_tokenizer(
            str(output / before["file_name"]) if before["file_name"] else before["kind"], eos_token
        )
        if tokenizer.vocabulary.digest != before["digest"]:
            raise ValueError(f"--output ({output}): {before['file']} was changed after it was used; restore it")
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
        raise ValueError("--tokenizer is missing; give byte, a model file or a folder, or --train_tokenizer=True")
    _check_plans(config, output, plans, tokenizer)
    if not keep:
        tokenizer.save(output)
        description = {**asdict(tokenizer.vocabulary), "eos_token": config.eos_token, "trained_on": trained_on}
        write_json(described, description)
    return tokenizer


def _training_key(config: PrepareConfig, plans: Sequence[SourcePlan]) -> dict[str, Any]:
    """What a trained tokenizer depends on."""
    names = ("vocab_size", "tokenizer_type", "tokenizer_sample_mb", "text_key", "text_separator", "limit_docs")
    key = {name: getattr(config, name) for name in names}
    return {**key, "inputs": {plan.name: plan.inputs_digest for plan in plans}}


def _train(config: PrepareConfig, plans: Sequence[SourcePlan]) -> bytes:
    started = time.monotonic()
    budget = config.tokenizer_sample_mb * 10**6
    text = list(_sample([entry for plan in plans for entry in plan.slices], config.form, budget))
    vocab_size = config.vocab_size or 32_000
    note(f"training a {config.tokenizer_type} tokenizer of {vocab_size} on {sum(map(len, text)) / 1e6:.1f} MB")
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


def _check_plans(config: PrepareConfig, output: Path, plans: Sequence[SourcePlan], tokenizer: Tokenizer) -> None:
    """Compares this call with what the output holds, and writes the plans of its sources.

    Raises:
        ValueError: a source was made otherwise, or by another program, or with another tokenizer.
    """
    names = [plan.name for plan in plans]
    for path in sorted((output / "meta" / "prepare").glob("*/plan.json")):
        other = path.parent.name
        if other not in names and json.loads(path.read_text())["tokenizer_digest"] != tokenizer.vocabulary.digest:
            raise ValueError(
                f"--output ({output}) holds source {other} made with another tokenizer; leave out --tokenizer and "
                "--train_tokenizer to use that one, or choose another folder"
            )
    keys = [_plan_key(config, plan, tokenizer, plans) for plan in plans]
    for plan, key in zip(plans, keys, strict=True):
        path = plan.journal / "plan.json"
        known = json.loads(path.read_text()) if path.is_file() else None
        if config.overwrite or known == key:
            continue
        if known is not None:
            changed = ", ".join(name for name in key if known.get(name) != key[name])
            raise ValueError(
                f"--output ({output}) holds source {plan.name} made with other {changed}; choose another folder, "
                "or --overwrite=True"
            )
        if plan.final(SPLITS[0]).exists():
            raise ValueError(
                f"--output ({output}) has a folder {plan.name} that prepare did not make; choose another name or folder"
            )
    for plan, key in zip(plans, keys, strict=True):
        path = plan.journal / "plan.json"
        if not path.is_file() or json.loads(path.read_text()) != key:
            shutil.rmtree(plan.journal, ignore_errors=True)
            shutil.rmtree(plan.partial, ignore_errors=True)
            write_json(path, key)


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
        for split in SPLITS[: len(config.split)]:
            (job.folder / split).mkdir(parents=True, exist_ok=True)
    if config.dedup and pending:
        unhashed = [job for job in jobs if not job.hashes.is_file()]
        for _ in run_jobs(hash_slice, unhashed, [job.slice.num_bytes for job in unhashed], workers, "hash"):
            pass
        mark_duplicates(jobs)
    bad = {name: sum(r["stats"]["num_bad"] for r in found.values()) for name, found in results.items()}
    for job, result in run_jobs(encode_slice, pending, [job.slice.num_bytes for job in pending], workers, "encode"):
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
        eos_token=config.eos_token,
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


def _publish(plan: SourcePlan) -> None:
    """Moves the finished folders of a source to their places, the old ones of an overwritten source out of the way first."""
    if not plan.partial.is_dir():
        return
    for split in SPLITS:
        made, final = plan.partial / split, plan.final(split)
        if final.exists():
            final.rename(plan.partial / f"old-{split}")
        if made.is_dir() and any(made.glob("*.arrow")):
            final.parent.mkdir(parents=True, exist_ok=True)
            made.rename(final)
    for pattern in ("hashes-*.npy", "duplicates-*.npy"):
        for path in plan.journal.glob(pattern):
            path.unlink()
    shutil.rmtree(plan.partial)
    if not any(plan.partial.parent.iterdir()):
        plan.partial.parent.rmdir()


def _write_counts(output: Path) -> None:
    """Writes the counts of all published sources of the output, of earlier calls too, and a summary of what each was made of."""
    rows: dict[str, list[tuple[str, int, int]]] = {split: [] for split in SPLITS}
    summary = {}
    for journal in sorted((output / "meta" / "prepare").iterdir()):
        if (output / ".partial" / journal.name).exists() or not (output / journal.name).is_dir():
            continue
        results = [json.loads(path.read_text()) for path in sorted(journal.glob("slice-*.json"))]
        for shard in (shard for result in results for shard in result["shards"]):
            name = f"{journal.name}/{shard['file']}"
            rows[shard["split"]].append((name, shard["documents"], shard["tokens"]))
        summary[journal.name] = Stats.merge(Stats.from_json(result["stats"]) for result in results).to_json()
    write_json(output / "meta" / "summary.json", summary)
    for split in reversed(SPLITS):
        path = (output if split == SPLITS[0] else output / split) / "meta" / "counts.csv"
        if rows[split] or path.exists():
            write_counts(path, rows[split])


def describe(stats: dict[str, Stats]) -> str:
    """What was read, kept and left out by source, and a histogram of document lengths."""
    lines = [f"{'source':<16}{'documents':>12}{'tokens':>15}{'chars/token':>13}{'tokens/doc':>12}  left out"]
    for name, part in [*stats.items(), ("total", Stats.merge(stats.values()))]:
        per_token, per_document = part.chars / max(1, part.tokens), part.tokens / max(1, part.documents)
        left_out = part.reasons() or "nothing"
        lines.append(
            f"{name:<16}{part.documents:>12,}{part.tokens:>15,}{per_token:>13.2f}{per_document:>12,.0f}  {left_out}"
        )
    lengths = Stats.merge(stats.values()).lengths
    most = max(lengths.values(), default=1)
    lines.append("tokens per document")
    for bucket in range(min(lengths, default=0), max(lengths, default=0) + 1):
        low, high = (1 << bucket) >> 1, (1 << bucket) - 1
        lines.append(
            f"{f'{low:,}–{high:,}':>21} {lengths[bucket]:>12,} {'#' * (40 * lengths[bucket] // most)}".rstrip()
        )
    bad = [where for part in stats.values() for where in part.bad]
    return "\n".join(lines + [f"malformed: {where}" for where in bad])


def main(config: PrepareConfig) -> None:
    """The command: prepares, then says what was made."""
    print(describe(prepare(config)))
    print(f"shards, tokenizer and counts are in {config.output}; train on them with --data_path={config.output}")


def _commas(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)
