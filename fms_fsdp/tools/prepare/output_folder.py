"""The folder that `prepare` and `convert` fill: what it holds, what is under way, how it becomes complete.

    OUT/SOURCE/shard-00000.arrow …    OUT/tokenizer.model
    OUT/meta/                         counts.csv, summary.json, tokenizer.json
    OUT/validation/, OUT/test/        data folders of their own with the same sources
    OUT/.partial/SOURCE/SPLIT/…       shards of a source under way
    OUT/meta/prepare/SOURCE/          its journal: plan.json, slice-N.json

Invariants: a source folder appears complete or not at all; a journal entry vouches for shards that are there;
the counts file comes last.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fms_fsdp.atomic import write_json
from fms_fsdp.data.tokenizer import Tokenizer
from fms_fsdp.errors import UserError
from fms_fsdp.run.lock import lock_folder
from fms_fsdp.safe_names import safe_name
from fms_fsdp.tools.prepare.documents import Slice
from fms_fsdp.tools.prepare.encode import SPLITS, ShardEntry, SliceResult
from fms_fsdp.tools.prepare.input_files import InputFile
from fms_fsdp.tools.prepare.shard_writer import write_counts
from fms_fsdp.tools.prepare.stats import Stats


@dataclass(frozen=True)
class PreparedSource:
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

    def finished(self) -> dict[int, SliceResult]:
        """The slices of the journal whose shards are all there.

        A source that lost a shard after a part of it was published counts as not begun.
        """
        results = {}
        for entry in self.slices:
            path = self.journal / f"slice-{entry.index:05d}.json"
            if path.is_file():
                result = _read_entry(path)
                if all(self._has(shard) for shard in result["shards"]):
                    results[entry.index] = result
        is_waiting = all((self.partial / split).is_dir() for split in splits_of(results.values()))
        return results if is_waiting or len(results) == len(self.slices) else {}

    def _has(self, shard: ShardEntry) -> bool:
        folder = self.partial / shard["split"]
        folder = folder if folder.is_dir() else self.final(shard["split"])  # else: published already
        path = folder / shard["file"]
        return path.is_file() and path.stat().st_size == shard["bytes"]

    def publish(self, splits: set[str]) -> None:
        """Moves the finished folders of `splits` to their places; those of an overwritten source go first.

        Goes on where an earlier call was stopped: a folder that is not there any more is published.
        """
        for pattern in ("hashes-*.npy", "duplicates-*.npy", ".*.tmp"):  # the last: of a killed process
            for path in self.journal.glob(pattern):
                path.unlink()
        if not self.partial.is_dir():
            return
        for split in SPLITS:
            made, final, old = self.partial / split, self.final(split), self.partial / f"old-{split}"
            if split in splits and not made.is_dir():
                continue
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
                final.rename(old)
            if split in splits:
                final.parent.mkdir(parents=True, exist_ok=True)
                made.rename(final)
        shutil.rmtree(self.partial)


def splits_of(results: Iterable[SliceResult]) -> set[str]:
    """The splits that have shards."""
    return {shard["split"] for result in results for shard in result["shards"]}


@contextmanager
def lock_output(output: Path) -> Iterator[None]:
    """Makes the folder and keeps a second `prepare` or `convert` out of it; removes it if it stays empty."""
    made = [folder for folder in (output, *output.parents) if not folder.exists()]
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"must be a folder that can be made: {error.strerror}; choose another"
        raise UserError(f"--output ({output}) {rule}") from error
    with lock_folder(output, patience_s=0.0, remedy="wait for its end, or choose another --output"):
        try:
            yield
        finally:
            if made and os.listdir(output) == [".lock"]:
                (output / ".lock").unlink()
                for folder in made:
                    folder.rmdir()


def save_tokenizer(output: Path, tokenizer: Tokenizer, trained_on: dict[str, Any] | None = None) -> None:
    """Keeps a copy of the tokenizer with the shards, and meta/tokenizer.json that describes it."""
    tokenizer.save(output)
    write_json(output / "meta" / "tokenizer.json", {**asdict(tokenizer.vocabulary), "trained_on": trained_on})


def check_plans(
    output: Path,
    sources: Sequence[PreparedSource],
    keys: Sequence[dict[str, Any]],
    digest: str,
    overwrite: bool,
) -> None:
    """Compares this call with what the output holds, and writes the plans of its sources.

    `keys` hold all that the shards of each source depend on, `digest` is that of the tokenizer.

    Raises:
        UserError: a source was made otherwise, or by another program, or with another tokenizer.
    """
    known = {path.parent.name: json.loads(path.read_text()) for path in _journals(output, "plan.json")}
    names = [source.name for source in sources]
    for name, plan in known.items():
        other = plan["tokenizer_digest"]
        if name not in names and "" not in (other, digest) and other != digest:
            remedy = "leave out --tokenizer and --train_tokenizer to use that one, or choose another folder"
            raise UserError(f"--output ({output}) holds source {name} made with another tokenizer; {remedy}")
    for source, key in zip(sources, keys, strict=True):
        plan = known.get(source.name)
        if overwrite or plan == key:
            continue
        if plan is not None:
            changed = ", ".join(name for name in sorted({*key, *plan}) if plan.get(name) != key.get(name))
            rule = f"holds source {source.name} made with other {changed}"
            raise UserError(f"--output ({output}) {rule}; choose another folder, or --overwrite=True")
        if source.final(SPLITS[0]).exists():
            rule = f"has a folder {source.name} that prepare did not make"
            raise UserError(f"--output ({output}) {rule}; choose another name or folder")
    for source, key in zip(sources, keys, strict=True):
        if known.get(source.name) != key:
            shutil.rmtree(source.journal, ignore_errors=True)
            shutil.rmtree(source.partial, ignore_errors=True)
            write_json(source.journal / "plan.json", key)


def finish(
    output: Path, sources: Sequence[PreparedSource], results: dict[str, dict[int, SliceResult]]
) -> dict[str, Stats]:
    """Publishes the sources and writes the counts; returns what each was made of.

    Raises:
        UserError: a source is empty.
    """
    stats = {}
    for source in sources:
        name, found = source.name, sorted(results[source.name].items())
        stats[name] = Stats.merge(result["stats"] for _, result in found)
        if SPLITS[0] not in splits_of(results[name].values()):
            reasons = stats[name].reasons() or "no records"
            raise UserError(f"--input: source {name} has no documents left to train on; {reasons}")
    for source in sources:
        source.publish(splits_of(results[source.name].values()))
    with suppress(OSError):
        (output / ".partial").rmdir()  # if nothing else is under way in it
    _write_counts(output)
    return stats


def _journals(output: Path, pattern: str = "") -> list[Path]:
    return sorted((output / "meta" / "prepare").glob(f"*/{pattern}"))


def _read_entry(path: Path) -> SliceResult:
    """A journal entry. Raises: UserError where it names other files than shards of its source."""
    try:
        result: SliceResult = json.loads(path.read_text())
        named = [(shard["split"], shard["file"]) for shard in result["shards"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        named = [("", "")]
    for split, file in named:
        if split not in SPLITS:
            raise UserError(f"{path} is not what prepare wrote; remove the file")
        safe_name(file, str(path))
    return result


def _write_counts(output: Path) -> None:
    """Writes the counts of all published sources, also of earlier calls, and what each was made of."""
    rows, summary = defaultdict[str, list[tuple[str, int, int]]](list), dict[str, Any]()
    for journal in _journals(output):
        if (output / ".partial" / journal.name).exists() or not (output / journal.name).is_dir():
            continue
        results = list(map(_read_entry, sorted(journal.glob("slice-*.json"))))
        for shard in (shard for result in results for shard in result["shards"]):
            name = f"{journal.name}/{shard['file']}"
            rows[shard["split"]].append((name, shard["documents"], shard["tokens"]))
        summary[journal.name] = vars(Stats.merge(result["stats"] for result in results))
    write_json(output / "meta" / "summary.json", summary)
    for split in reversed(SPLITS):
        path = (output if split == SPLITS[0] else output / split) / "meta" / "counts.csv"
        if rows[split] or path.exists():
            write_counts(path, rows[split])
