"""Marks of what shards hold, so that one written anew under its old name and counts is noticed on resume."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING

import numpy as np

from fms_fsdp.data.shards.files import Files

if TYPE_CHECKING:
    from fms_fsdp.data.shards.manifest import Source

_SAMPLED_SHARDS, _SAMPLED_BYTES = 16, 4096


def content_marks(files: Files, source: Source) -> str:
    """Returns two hex digits for each of up to 16 shards spread over the source, a hash of size and the 4 KiB
    in the middle.

    They tell of shards written anew with other tokens but the same names and counts; "--" stands for one that
    cannot be read.
    """
    sampled = [source.paths[i] for i in _sampled_shards(len(source.paths))]
    marks = []
    for path in sampled:
        with contextlib.suppress(OSError):
            files.prefetch(path, np.array([files.size(path) // 2]), np.array([_SAMPLED_BYTES]))
    for path in sampled:
        try:
            size = files.size(path)
            sample = files.pread(path, _SAMPLED_BYTES, size // 2)
            marks.append(hashlib.blake2b(sample + size.to_bytes(8, "little"), digest_size=1).hexdigest())
        except OSError:
            marks.append("--")
    files.close()
    return "".join(marks)


def changed_shard(source: Source, before: str, now: str) -> str | None:
    """Returns the first shard whose marks differ, those that could not be read left out; None if there is
    none."""
    for i, file in enumerate(_sampled_shards(len(source.paths))):
        a, b = before[2 * i : 2 * i + 2], now[2 * i : 2 * i + 2]
        if a != b and "--" not in (a, b):
            return source.paths[file]
    return None


def _sampled_shards(count: int) -> list[int]:
    return sorted({i * (count - 1) // (_SAMPLED_SHARDS - 1) for i in range(_SAMPLED_SHARDS)})
