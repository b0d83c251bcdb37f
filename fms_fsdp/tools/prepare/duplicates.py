"""Exact copies of documents over all slices of a call: hashes of every slice, then marks on later copies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fms_fsdp.data.order.permute import hash64
from fms_fsdp.tools.prepare.documents import Document, read_part
from fms_fsdp.tools.prepare.encode import SliceJob, TextReader

_HASHES_IN_MEMORY = 1 << 25  # 64-bit hashes compared at a time, about 1 GB of working memory


def hash_slice(job: SliceJob) -> None:
    """Writes the hash of every document of the slice, in order."""
    reader = job.recipe.reader
    assert isinstance(reader, TextReader)
    records = (record for part in job.slice.parts for record in read_part(part, reader.form))
    hashes = [hash64(record.data) for record in records if isinstance(record, Document)]
    _save(job.in_journal("hashes.npy"), np.array(hashes, dtype=np.uint64))


def mark_copies(jobs: Sequence[SliceJob]) -> None:
    """Writes for every job which of its documents equal an earlier one, in the order of the jobs.

    Memory is bounded by buckets of hashes.
    """
    arrays = [np.load(job.in_journal("hashes.npy"), mmap_mode="r") for job in jobs]
    starts = np.cumsum([0, *map(len, arrays)])
    marks = np.zeros(starts[-1], dtype=bool)
    num_buckets = -(-len(marks) // _HASHES_IN_MEMORY) or 1
    edges = [i * (1 << 64) // num_buckets for i in range(num_buckets + 1)]  # of the hashes
    for low, high in pairwise(edges):
        places, values = list[npt.NDArray[np.int64]](), list[npt.NDArray[np.uint64]]()
        for start, array in zip(starts[:-1], arrays, strict=True):
            found = np.flatnonzero((array >= np.uint64(low)) & (array <= np.uint64(high - 1)))
            places.append(start + found)
            values.append(array[found])
        _, first = np.unique(np.concatenate(values), return_index=True)
        where = np.concatenate(places)
        marks[where] = True
        marks[where[first]] = False
    for job, mark in zip(jobs, np.split(marks, starts[1:-1]), strict=True):
        _save(job.in_journal("duplicates.npy"), mark)


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        np.save(file, array)
    temporary.replace(path)
