"""The folder that `prepare` and `convert` fill: what it holds, what is under way in it, how it becomes complete.

    OUT/SOURCE/shard-00000.arrow …    OUT/tokenizer.model    OUT/meta/{counts.csv, summary.json, tokenizer.json}
    OUT/validation/, OUT/test/        data folders of their own with the same sources
    OUT/.partial/SOURCE/SPLIT/…       shards of a source under way      OUT/meta/prepare/SOURCE/{plan, slice-N}.json   its journal

Invariants: a source folder appears complete or not at all; a journal entry vouches for shards that are there; the counts file comes last.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fms_fsdp.atomic import write_json
from fms_fsdp.data.tokenizer import Tokenizer
from fms_fsdp.safe_names import safe_name
from fms_fsdp.tools.prepare.documents import Slice
from fms_fsdp.tools.prepare.encode import SPLITS, Stats
from fms_fsdp.tools.prepare.input_files import InputFile
from fms_fsdp.tools.prepare.shard_writer import write_counts

_RESERVED = ("meta", "validation", "test")


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
        """The journal's slices whose shards are all there. A source that lost one after a part of it was published counts as
        not begun."""
        results = {}
        for entry in self.slices:
            path = self.journal / f"slice-{entry.index:05d}.json"
            if path.is_file():
                result = _read_entry(path)
                if all(self._has(shard) for shard in result["shards"]):
                    results[entry.index] = result
        splits = {shard["split"] for result in results.values() for shard in result["shards"]}
        is_waiting = all((self.partial / split).is_dir() for split in splits)
        return results if is_waiting or len(results) == len(self.slices) else {}

    def _has(self, shard: dict[str, Any]) -> bool:
        folder = self.partial / shard["split"]
        path = (folder if folder.is_dir() else self.final(shard["split"])) / shard[
            "file"
        ]  # else: published already
        return path.is_file() and bool(path.stat().st_size == shard["bytes"])


def parse_input(text: str) -> dict[str, list[str]]:
    """NAME → its paths. A comma that is not followed by NAME= belongs to the path."""
    sources: dict[str, list[str]] = {}
    for item in re.split(r",(?=[^,=/]*=)", text):
        name, equals, path = item.partition("=")
        if not equals or not path:
            raise ValueError(
                f"--input ({text}) must be NAME=PATH[,NAME=PATH…]; for example web=data/web,code=src"
            )
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or name in _RESERVED:
            raise ValueError(
                f"--input ({name}) must name a source with letters, digits, _ . - and not be one of {', '.join(_RESERVED)}"
            )
        sources.setdefault(name, []).append(path)
    return sources


def unique_files(found: Sequence[InputFile]) -> tuple[InputFile, ...]:
    """The files without those that an earlier one leads to as well."""
    return tuple({os.path.realpath(file.path): file for file in reversed(found)}.values())[::-1]


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Keeps a second `prepare` out of the folder; the lock dies with the process."""
    with open(output / ".prepare.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"--output ({output}) is being written by another prepare; wait for it"
            ) from None
        yield


def save_tokenizer(output: Path, tokenizer: Tokenizer, trained_on: dict[str, Any] | None = None) -> None:
    """Keeps a copy of the tokenizer with the shards, and meta/tokenizer.json that describes it."""
    tokenizer.save(output)
    write_json(output / "meta" / "tokenizer.json", {**asdict(tokenizer.vocabulary), "trained_on": trained_on})


def check_plans(
    output: Path, plans: Sequence[SourcePlan], keys: Sequence[dict[str, Any]], digest: str, overwrite: bool
) -> None:
    """Compares this call with what the output holds, and writes the plans of its sources; `keys` are all that their shards depend on.

    Raises:
        ValueError: a source was made otherwise, or by another program, or with another tokenizer than that of `digest`.
    """
    names = [plan.name for plan in plans]
    for path in sorted((output / "meta" / "prepare").glob("*/plan.json")):
        other = path.parent.name
        known_digest = json.loads(path.read_text())["tokenizer_digest"]
        if other not in names and "" not in (known_digest, digest) and known_digest != digest:
            raise ValueError(
                f"--output ({output}) holds source {other} made with another tokenizer; leave out --tokenizer and "
                "--train_tokenizer to use that one, or choose another folder"
            )
    for plan, key in zip(plans, keys, strict=True):
        path = plan.journal / "plan.json"
        known = json.loads(path.read_text()) if path.is_file() else None
        if overwrite or known == key:
            continue
        if known is not None:
            changed = ", ".join(name for name in sorted({*key, *known}) if known.get(name) != key.get(name))
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


def finish(
    output: Path, plans: Sequence[SourcePlan], results: dict[str, dict[int, dict[str, Any]]]
) -> dict[str, Stats]:
    """Publishes the sources and writes the counts; returns what each was made of.

    Raises:
        ValueError: a source is empty.
    """
    stats = {
        name: Stats.merge(Stats.from_json(result["stats"]) for result in found.values())
        for name, found in results.items()
    }
    for name, found in results.items():
        if not any(shard["split"] == SPLITS[0] for result in found.values() for shard in result["shards"]):
            raise ValueError(
                f"--input: source {name} has no documents left to train on; {stats[name].reasons() or 'no records'}"
            )
    for plan in plans:
        _publish(
            plan, {shard["split"] for result in results[plan.name].values() for shard in result["shards"]}
        )
    with suppress(OSError):
        (output / ".partial").rmdir()  # if nothing else is under way in it
    _write_counts(output)
    return stats


def _publish(plan: SourcePlan, splits: set[str]) -> None:
    """Moves the finished folders of a source, those of `splits`, to their places, the old ones of an overwritten source out
    of the way first. Goes on where an earlier call was stopped: a folder that is not there any more is published."""
    for pattern in ("hashes-*.npy", "duplicates-*.npy"):
        for path in plan.journal.glob(pattern):
            path.unlink()
    if not plan.partial.is_dir():
        return
    for split in SPLITS:
        made, final, old = plan.partial / split, plan.final(split), plan.partial / f"old-{split}"
        if split in splits and not made.is_dir():
            continue
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        if split in splits:
            final.parent.mkdir(parents=True, exist_ok=True)
            made.rename(final)
    shutil.rmtree(plan.partial)


def _read_entry(path: Path) -> dict[str, Any]:
    """Returns a journal entry. Raises: ValueError for one that names other files than shards of its source."""
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        named = [(shard["split"], shard["file"]) for shard in result["shards"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        named = [("", "")]
    for split, file in named:
        if split not in SPLITS:
            raise ValueError(f"{path} is not what prepare wrote; remove it")
        safe_name(file, str(path))
    return result


def _write_counts(output: Path) -> None:
    """Writes the counts of all published sources of the output, of earlier calls too, and a summary of what each was made of."""
    rows: dict[str, list[tuple[str, int, int]]] = {split: [] for split in SPLITS}
    summary = {}
    for journal in sorted((output / "meta" / "prepare").iterdir()):
        if (output / ".partial" / journal.name).exists() or not (output / journal.name).is_dir():
            continue
        results = [_read_entry(path) for path in sorted(journal.glob("slice-*.json"))]
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
