"""Small corpora on disk, in both layouts, together with the documents they hold."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fms_fsdp.config import DataConfig
from fms_fsdp.data.corpus import Corpus, open_corpus
from fms_fsdp.data.permute import mix64, mix64_int
from fms_fsdp.data.stream import TokenStream, build_stream

SEP = 3
VOCAB = 5000
Documents = list[np.ndarray]


@dataclass
class Files:
    """What was written: documents by source and by shard, as the stream sees them (with their separator)."""

    root: Path
    documents: dict[str, list[Documents]] = field(default_factory=dict)
    _cache: dict[str, np.ndarray] = field(default_factory=dict)

    def section(self, **changes: Any) -> DataConfig:
        settings: dict[str, Any] = {
            "data_path": str(self.root),
            "sep_token": SEP,
            "logical_shards": 8,
        }
        return DataConfig(**{**settings, **changes})

    def corpus(self, **changes: Any) -> Corpus:
        return open_corpus(self.section(**changes))

    def stream(
        self,
        batch: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 1,
        rampup: tuple[int, ...] = (),
        **changes: Any,
    ) -> TokenStream:
        section = self.section(**changes)
        sizes: dict[str, Any] = {"global_batch_size": batch, "dp_rank": rank, "dp_size": world}
        sizes["rampup"] = rampup
        return build_stream(section, open_corpus(section), seed=seed, vocab_size=VOCAB, **sizes)

    def num_tokens(self, source: str) -> int:
        return int(self._starts(source)[-1])

    def offset(self, source: str, file: int, document: int) -> int:
        """Tokens of the source before a document."""
        return int(self._starts(source)[sum(map(len, self.documents[source][:file])) + document])

    def _starts(self, source: str) -> np.ndarray:
        if source not in self._cache:
            lengths = [len(document) for shard in self.documents[source] for document in shard]
            self._cache[source] = np.cumsum([0, *lengths])
        return self._cache[source]


def random_documents(rng: np.random.Generator, num_tokens: int, mean: float = 40.0) -> Documents:
    """Documents of lognormal length, some of length 0 and 1, about `num_tokens` in all; the separator is not
    in them."""
    documents: Documents = []
    total = 0
    while total < num_tokens:
        kind = rng.random()
        length = (
            0 if kind < 0.03 else 1 if kind < 0.06 else int(rng.lognormal(np.log(mean), 1.0)) + 1
        )
        length = int(min(length, max(1, num_tokens - total)))
        documents.append(rng.integers(SEP + 1, VOCAB, size=length))
        total += length
    return documents


def write_lists(
    path: Path,
    documents: Documents,
    *,
    dtype: str = "uint16",
    chunk: int = 7,
    large: bool = True,
    **metadata: str,
) -> None:
    """Writes the preferred layout: a list per document, `chunk` documents to a record batch."""
    value = pa.field("item", getattr(pa, dtype)(), nullable=False)
    kind = pa.large_list(value) if large else pa.list_(value)
    tokens = sum(map(len, documents))
    facts = {
        "n_docs": str(len(documents)),
        "n_tokens": str(tokens),
        "vocab_size": str(VOCAB),
        "sep_token": str(SEP),
    }
    schema = pa.schema(
        [pa.field("tokens", kind, nullable=False)],
        metadata={**facts, "has_eos": "false", **metadata},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for start in range(0, len(documents), chunk):
            rows = pa.array(
                [document.tolist() for document in documents[start : start + chunk]], type=kind
            )
            writer.write_batch(pa.record_batch([rows], schema=schema))


def write_scalars(
    path: Path, documents: Documents, *, dtype: str = "uint32", compression: str | None = None
) -> None:
    """Writes the fms-fsdp layout: a record batch per document."""
    schema = pa.schema([pa.field("tokens", getattr(pa, dtype)())])
    path.parent.mkdir(parents=True, exist_ok=True)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, schema, options=options) as writer,
    ):
        for document in documents:
            writer.write_batch(
                pa.record_batch([pa.array(document, type=schema.field(0).type)], schema=schema)
            )


def write_counts(root: Path, rows: list[tuple[str, int, int]], name: str = "counts.csv") -> None:
    (root / "meta").mkdir(exist_ok=True)
    with open(root / "meta" / name, "w", newline="") as sink:
        csv.writer(sink).writerows([("dataset/filename", "documents", "tokens"), *rows])


def with_separator(document: np.ndarray) -> np.ndarray:
    return np.append(document, SEP).astype(np.int64)


def fixed_documents(number: int, num_tokens: int) -> Documents:
    """Documents that depend on no library's random generator, for golden values."""
    documents: Documents = []
    while sum(map(len, documents)) < num_tokens:
        state = mix64_int(number * 1_000_003 + len(documents))
        salted = np.arange(state % 90, dtype=np.uint64) + np.uint64(state)
        documents.append((mix64(salted) % np.uint64(VOCAB - SEP - 1)).astype(np.int64) + SEP + 1)
    return documents


def write_corpus(
    root: Path,
    sizes: dict[str, list[int]],
    *,
    seed: int = 0,
    layout: str = "lists",
    stored: bool = False,
    counts: bool = True,
    mean: float = 40.0,
    fixed: bool = False,
) -> Files:
    """Writes sources with shards of about the given numbers of tokens. `stored`: documents end with the
    separator on disk."""
    rng = np.random.default_rng(seed)
    files = Files(root)
    rows = []
    for source, shards in sizes.items():
        files.documents[source] = []
        for i, num_tokens in enumerate(shards):
            plain = (
                fixed_documents(len(rows), num_tokens)
                if fixed
                else random_documents(rng, num_tokens, mean)
            )
            seen = [with_separator(document) for document in plain]
            on_disk = seen if stored else plain
            path = root / source / f"shard-{i:05d}.arrow"
            if layout == "lists":
                write_lists(
                    path, on_disk, dtype=("uint16", "uint32")[i % 2], has_eos=str(stored).lower()
                )
            else:
                write_scalars(path, on_disk)
            files.documents[source].append(seen)
            rows.append((f"{source}/{path.name}", len(on_disk), sum(map(len, on_disk))))
    if counts:
        write_counts(root, rows)
    return files
