"""The counts files of a corpus, meta/*counts*.csv: documents and tokens of every shard.

    dataset/filename,documents,tokens
    web/shard-00000.arrow,31250,20480000
    /gpfs/old/corpus/code/shard-00000.arrow,990,1048576

Invariant: a row stands for one shard below the corpus's folder, or for none. Rows may have been written where
the corpus had another root (extras/foreign_counts.py).
"""

from __future__ import annotations

import fnmatch
import gc
import re
from collections.abc import Collection

from fms_fsdp.data.shards.files import Files
from fms_fsdp.errors import StorageError, UserError
from fms_fsdp.parts import load_part
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
                raise UserError(f"the file has {size:,} bytes, more than {LARGEST_TABLE:,}")
            rows.update(_parse(files.pread(table, size, 0)))
        except StorageError:
            raise
        except (ValueError, LookupError) as error:  # pyarrow's are of these kinds
            raise UserError(
                f"counts file ({table}) must hold `dataset/filename,documents,tokens`: "
                f"{' '.join(str(error).split())}; correct or remove the file"
            ) from None
    known = frozenset(paths)
    counts = rows if rows.keys() <= known else load_part("foreign_counts").place_rows(rows, known)
    for path, (docs, tokens) in counts.items():
        safe_name(path, TABLES, folders=True)
        if docs < 0 or tokens < 0:
            raise UserError(
                f"{TABLES} gives shard {path} a count below 0 ({min(docs, tokens)}); correct the count"
            )
    return counts


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
