"""The one pipeline behind `prepare` and `convert`: sources in slices → shards in the output folder.

    sources ── [hash slices: mark copies] ── encode, one process per slice ── publish ── counts file

The shards are a function of the inputs and the options, not of the number of workers or of how often the
command was killed: slices that are in the journal are not made again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from fms_fsdp.config import flag
from fms_fsdp.config.values import joined
from fms_fsdp.errors import UserError
from fms_fsdp.tools.prepare.duplicates import hash_slice, mark_copies
from fms_fsdp.tools.prepare.encode import (
    Reader,
    ShardRecipe,
    SliceJob,
    SliceResult,
    check_bad_lines,
    encode_slice,
)
from fms_fsdp.tools.prepare.output_folder import PreparedSource, finish
from fms_fsdp.tools.prepare.shard_writer import ShardInfo
from fms_fsdp.tools.prepare.stats import Stats
from fms_fsdp.tools.prepare.workers import available_cores, note, run_jobs

_num_bytes = attrgetter("slice.num_bytes")  # of a job


@dataclass(frozen=True)
class ShardsConfig:
    """Which sources to read, and how to cut and place their shards."""

    input: str = flag(
        "", "[NAME=]PATH[,…]: files, folders, quoted globs; NAME defaults to the folder's", positional=True
    )
    output: str = flag("", "folder for the shards: the --data_path of training")
    split: tuple[float, ...] = flag((1.0,), "shares of train[,validation[,test]] by hash of a text: 949,50,1")
    shard_tokens: int = flag(1 << 24, "most tokens of a shard, if no document is longer", minimum=1)
    num_workers: int | None = flag(None, "processes, one per core by default; shards stay equal", minimum=1)
    log_interval: int = flag(100_000, "documents between lines of progress, at ends of slices", minimum=1)
    overwrite: bool = flag(False, "replace sources that were made from other inputs or with other options")

    def __post_init__(self) -> None:
        if not self.output:
            raise UserError("--output is missing; name the folder for the shards")
        if not 1 <= len(self.split) <= 3 or min(self.split) < 0 or self.split[0] <= 0:
            rule = "must be one to three shares, the first above 0"
            raise UserError(f"--split ({joined(self.split)}) {rule}; for example 949,50,1")

    @property
    def folder(self) -> Path:
        return Path(self.output).expanduser()


def make_shards(
    config: ShardsConfig,
    sources: Sequence[PreparedSource],
    reader: Reader,
    info: ShardInfo,
    max_bad_lines: int = 0,
    dedup: bool = False,
) -> dict[str, Stats]:
    """Encodes the slices that are not in the journals yet, in parallel, and completes the output folder.

    Returns what was read and written, by source.

    Raises:
        UserError: an unreadable input, more malformed records than allowed, or a source without documents.
    """
    recipe = ShardRecipe(reader, info, config.split, config.shard_tokens, max_bad_lines, dedup)
    workers = config.num_workers or available_cores()
    jobs, pending, results = list[SliceJob](), list[SliceJob](), dict[str, dict[int, SliceResult]]()
    for source in sources:
        results[source.name] = source.finished()
        for entry in source.slices:
            job = SliceJob(source.name, entry, recipe, source.partial, source.journal)
            jobs.append(job)
            if entry.index not in results[source.name]:
                pending.append(job)
                job.folder.mkdir(parents=True, exist_ok=True)
    if len(pending) < len(jobs):
        note(f"{len(jobs) - len(pending)} of {len(jobs)} slices are there already")
    if recipe.dedup and pending:
        unhashed = [job for job in jobs if not job.in_journal("hashes.npy").is_file()]
        for _ in run_jobs(hash_slice, unhashed, _num_bytes, workers, "hash"):
            pass
        mark_copies(jobs)
    done, told, began = Counter[str](), 0, time.monotonic()
    for job, result in run_jobs(encode_slice, pending, _num_bytes, workers, "encode"):
        stats, finished = result["stats"], results[job.source]
        finished[job.slice.index] = result
        num_bad = sum(each["stats"]["num_bad"] for each in finished.values())
        check_bad_lines(recipe.max_bad_lines, job.source, num_bad, stats["bad"])
        done.update(documents=stats["documents"], tokens=stats["tokens"], bytes=job.slice.num_bytes)
        if done["documents"] - told >= config.log_interval:
            told = done["documents"]
            note(_pace(done, time.monotonic() - began))
    return finish(config.folder, sources, results)


def _pace(done: Counter[str], spent_s: float) -> str:
    """What was encoded so far, and how fast."""
    mb_per_s, documents_per_s = done["bytes"] / 1e6 / spent_s, done["documents"] / spent_s
    rates = f"{mb_per_s:,.1f} MB/s, {documents_per_s:,.0f} docs/s"
    return f"{done['documents']:,} documents, {rates}, {done['tokens'] / 1e6:,.1f}M tokens"
