from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from fms_fsdp.data.arrow_shard import MissingShardError, Shard, ShardError
from fms_fsdp.data.files import LocalFiles
from fms_fsdp.data.lru import Lru
from tests.data.corpora import Documents, random_documents, write_lists, write_scalars

DOCUMENTS = random_documents(np.random.default_rng(0), 3000)


def read_all(path: Path, delimiter: int = 0) -> Documents:
    files = LocalFiles(str(path.parent))
    shard = Shard(files, path.name, delimiter)
    documents = []
    for index, length in enumerate(np.diff(shard.chunk_starts).tolist()):
        found = shard.documents(index, 0, length) if length else None
        if found is None:
            documents += [np.array([], dtype=np.int64)] * shard.num_docs
            continue
        missing = found.first - len(documents)  # documents of length 0 at a chunk's edge overlap nothing
        documents += [np.array([], dtype=np.int64)] * missing
        for size, address in zip(np.diff(found.starts) - delimiter, found.addresses, strict=True):
            raw = files.pread(path.name, int(size) * shard.dtype.itemsize, int(address))
            documents.append(np.frombuffer(raw, shard.dtype))
    documents += [np.array([], dtype=np.int64)] * (shard.num_docs - len(documents))
    assert shard.num_docs == len(documents)
    assert shard.num_tokens == sum(map(len, documents))
    return documents


def same(a: Documents, b: Documents) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("large", [True, False])
def test_lists_are_read_as_written(tmp_path: Path, dtype: str, large: bool) -> None:
    write_lists(tmp_path / "a.arrow", DOCUMENTS, dtype=dtype, large=large)
    assert same(read_all(tmp_path / "a.arrow", delimiter=1), DOCUMENTS)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
def test_a_record_batch_per_document_is_read_as_written(tmp_path: Path, dtype: str) -> None:
    write_scalars(tmp_path / "a.arrow", DOCUMENTS, dtype=dtype)
    assert same(read_all(tmp_path / "a.arrow"), DOCUMENTS)


def test_record_batches_of_unlike_shape_are_read_one_by_one(tmp_path: Path) -> None:
    """An array that came from a slice with nulls elsewhere may carry a validity buffer: lengths then lie elsewhere."""
    schema = pa.schema([pa.field("tokens", pa.uint32())])
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for i, document in enumerate(DOCUMENTS):
            metadata = {"note": "x" * i} if i % 3 else None
            batch = pa.record_batch([pa.array(document, type=pa.uint32())], schema=schema)
            writer.write_batch(batch, custom_metadata=metadata)
    assert same(read_all(tmp_path / "a.arrow"), DOCUMENTS)


def test_shards_of_nothing_but_empty_documents_are_read(tmp_path: Path) -> None:
    empty = [np.array([], dtype=np.int64)] * 3
    write_lists(tmp_path / "a.arrow", empty)
    write_scalars(tmp_path / "b.arrow", empty)
    write_lists(tmp_path / "c.arrow", [])
    assert [len(read_all(tmp_path / name)) for name in ("a.arrow", "b.arrow", "c.arrow")] == [3, 3, 0]


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_buffers_are_refused_with_the_remedy(tmp_path: Path, codec: str) -> None:
    write_scalars(tmp_path / "a.arrow", [np.arange(5000)], compression=codec)
    with pytest.raises(
        ShardError, match=r"shard \(a.arrow\) has compressed buffers.*; write it anew with `python -m fms_fsdp convert"
    ):
        read_all(tmp_path / "a.arrow")


@pytest.mark.parametrize("kept", [0, 5, 31, 0.3, 0.9, -1])
def test_truncated_shards_are_refused(tmp_path: Path, kept: float) -> None:
    write_lists(tmp_path / "a.arrow", DOCUMENTS)
    data = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(data[: int(kept * len(data)) if 0 < kept < 1 else int(kept)])
    with pytest.raises(ShardError, match=r"shard \(a.arrow\) (is empty|is not a whole)"):
        read_all(tmp_path / "a.arrow")


def test_damaged_metadata_is_an_error_of_the_shard(tmp_path: Path) -> None:
    write_lists(tmp_path / "a.arrow", DOCUMENTS)
    data = bytearray((tmp_path / "a.arrow").read_bytes())
    length = int.from_bytes(data[-10:-6], "little")
    data[-10 - length : -10] = b"\xff" * length
    (tmp_path / "a.arrow").write_bytes(data)
    with pytest.raises(ShardError, match=r"shard \(a.arrow\) has damaged metadata"):
        read_all(tmp_path / "a.arrow")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingShardError, match=r"shard \(none.arrow\) is missing"):
        Shard(LocalFiles(str(tmp_path)), "none.arrow", 0)
    (tmp_path / "text.arrow").write_text("hello " * 100)
    with pytest.raises(ShardError, match="is not a whole Arrow IPC file"):
        Shard(LocalFiles(str(tmp_path)), "text.arrow", 0)
    table = pa.table({"text": ["a", "b"]})
    with pa.ipc.new_file(str(tmp_path / "strings.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ShardError, match="must have one column `tokens`, not text"):
        Shard(LocalFiles(str(tmp_path)), "strings.arrow", 0)


def test_null_tokens_are_refused(tmp_path: Path) -> None:
    table = pa.table({"tokens": pa.array([[1, None, 2]], type=pa.large_list(pa.uint16()))})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ShardError, match="null"):
        Shard(LocalFiles(str(tmp_path)), "a.arrow", 0)


def test_open_files_are_bounded(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i}").write_bytes(bytes([i] * 8))
    files = LocalFiles(str(tmp_path), max_open=4)
    for i in list(range(20)) + [3, 17]:
        assert files.pread(f"{i}", 4, 2) == bytes([i] * 4)
        assert len(files._open) <= 4
    files.close()


def test_walk_follows_links_but_not_in_circles(tmp_path: Path) -> None:
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.arrow").touch()
    (tmp_path / "root" / "a" / "up").symlink_to(tmp_path / "root")
    (tmp_path / "root" / "b").symlink_to(tmp_path / "other")
    (tmp_path / "root" / ".hidden").touch()
    assert list(LocalFiles(str(tmp_path / "root")).walk("")) == ["b/x.arrow"]


def test_cache_evicts_what_was_used_longest_ago() -> None:
    gone: list[str] = []
    cache: Lru[str, str] = Lru(10, on_evict=gone.append)
    for key, cost in (("a", 4), ("b", 4)):
        cache.put(key, key, cost)
    assert cache.get("a") == "a"
    cache.put("c", "c", 4)
    assert gone == ["b"] and cache.get("b") is None and cache.total_cost == 8
    cache.put("large", "large", 100)
    assert gone == ["b", "a", "c"] and cache.get("large") == "large"
