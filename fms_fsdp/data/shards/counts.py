"""The counts files of a corpus, meta/*counts*.csv: documents and tokens of every shard.

    dataset/filename,documents,tokens
    web/shard-00000.arrow,31250,20480000
    /gpfs/old/corpus/code/shard-00000.arrow,990,1048576

Invariant: a row stands for one shard below the corpus's folder, or for none. Rows may have been written where
the corpus had another root: roots are what stands before the path of a shard that is there, and the root of
most rows goes first. A row of a shard that is not there loses the first such root that it begins with.
"""

from __future__ import annotations

import fnmatch
import gc
import re
from collections import Counter
from collections.abc import Collection, Iterator

from fms_fsdp.data.shards.files import Files
from fms_fsdp.errors import StorageError, UserError
from fms_fsdp.safe_names import safe_name

META = "meta"
TABLES = f"{META}/*counts*.csv"
LARGEST_TABLE = 1 << 30  # bytes, about 10 million rows
_REPEATED = re.compile(r"^(\./+)+|(?<=/)(\.?/)+")  # what leads nowhere: "./", and "//"
Counts = dict[str, tuple[int, int]]  # (documents, tokens) by the path of the shard


def read_counts(files: Files, paths: Collection[str]) -> Counts:
    """Returns what the counts files among `paths`, the files of the corpus, say. Raises: UserError."""
    rows: Counts = {}
    for table in fnmatch.filter(paths, TABLES):
        try:
            if (size := files.size(table)) > LARGEST_TABLE:
                raise UserError(f"it has {size:,} bytes, more than {LARGEST_TABLE:,}")
            rows.update(_parse(files.pread(table, size, 0)))
        except StorageError:
            raise
        except (ValueError, LookupError) as error:  # pyarrow's are of these kinds
            raise UserError(
                f"counts file ({table}) must hold `dataset/filename,documents,tokens`: "
                f"{' '.join(str(error).split())}; correct or remove it"
            ) from None
    counts = _placed(rows, frozenset(paths))
    for path, (docs, tokens) in counts.items():
        safe_name(path, TABLES, folders=True)
        if docs < 0 or tokens < 0:
            raise UserError(f"{TABLES} gives shard {path} a count below 0 ({min(docs, tokens)}); correct it")
    return counts


def _placed(rows: Counts, known: frozenset[str]) -> Counts:
    """Returns the rows by the paths that shards have, or would have, below this corpus's own root."""
    for start in _starts(next(iter(rows), "")):  # nearly always one root places all
        root = next(iter(rows), "")[:start]
        if all(path.startswith(root) and path[start:] in known for path in rows):
            return {path[start:]: row for path, row in rows.items()}
    votes = Counter(path[:start] for path in rows for start in _starts(path) if path[start:] in known)
    ranked = sorted(votes, key=lambda root: (-votes[root], len(root)))
    ranks = {root: rank for rank, root in enumerate(ranked)}
    counts: Counts = {}
    for path, row in rows.items():
        fitting = sorted(
            (start for start in _starts(path) if path[:start] in ranks), key=lambda i: ranks[path[:i]]
        )
        start = next((start for start in fitting if path[start:] in known), fitting[0] if fitting else 0)
        if path[start:][:1] != "/" and (start == 0 or path[start:] not in counts):
            counts[path[start:]] = row
        # else: written under a root of which no shard is here, or for a second time
    return counts


def _starts(path: str) -> Iterator[int]:
    """Yields where a path may start below a root: at 0, after a first "/", and at the folders in it."""
    yield 0
    for slash in re.finditer("/", path[: max(1, path.rfind("/"))]):
        yield slash.end()


def _parse(data: bytes) -> Counts:
    """Returns the rows. Raises: UserError, LookupError, naming the row (the header is row 1)."""
    from pyarrow import BufferReader, csv, system_memory_pool

    if not data.partition(b"\n")[2].strip():
        return {}
    types = {"f0": "string", "f1": "int64", "f2": "int64"}
    table = csv.read_csv(
        BufferReader(data if data.endswith(b"\n") else data + b"\n"),
        csv.ReadOptions(use_threads=False, autogenerate_column_names=True, skip_rows=1),
        convert_options=csv.ConvertOptions(column_types=types, include_columns=list(types), null_values=[]),
        memory_pool=system_memory_pool(),  # pyarrow's own would keep 24 MiB
    )
    paths, docs, tokens = (column.to_pylist() for column in table.columns)
    if b"./" in data or b"//" in data:
        paths = [_REPEATED.sub("", path) for path in paths]
    collecting = gc.isenabled()
    # 100,000 tuples in a row: the collector would look through all of torch's objects again and again
    gc.disable()
    try:
        return dict(zip(paths, zip(docs, tokens, strict=True), strict=True))
    finally:
        if collecting:
            gc.enable()
