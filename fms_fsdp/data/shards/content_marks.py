"""Marks of the content of shards, so that a resume notices a shard written anew under its old name and
counts."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence

import numpy as np

from fms_fsdp.data.shards.files import Files

_SAMPLED_SHARDS, _SAMPLED_BYTES = 16, 4096


def content_marks(files: Files, paths: Sequence[str]) -> str:
    """Returns two hex digits for each of up to 16 shards spread over a source's, a hash of size and the 4 KiB
    in the middle.

    The marks tell of shards written anew with other tokens but the same names and counts; "--" stands for a
    shard that cannot be read.
    """
    marks, sampled = [], _sampled_paths(paths)
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


def changed_shard(paths: Sequence[str], before: str, now: str) -> str | None:
    """Returns the first shard whose marks differ, None if there is none. Shards that could not be read are
    left out."""
    for i, path in enumerate(_sampled_paths(paths)):
        a, b = before[2 * i : 2 * i + 2], now[2 * i : 2 * i + 2]
        if a != b and "--" not in (a, b):
            return path
    return None


def _sampled_paths(paths: Sequence[str]) -> list[str]:
    places = {i * (len(paths) - 1) // (_SAMPLED_SHARDS - 1) for i in range(_SAMPLED_SHARDS)}
    return [paths[place] for place in sorted(places)]
