import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from fms_fsdp.data.shards.files import LocalFiles
from fms_fsdp.data.shards.ipc import ArrowFile, MissingShardError, ShardError
from fms_fsdp.data.shards.lru import Lru
from fms_fsdp.data.shards.shard import Shard
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
    """An array that came from a slice with nulls elsewhere may carry a validity buffer: lengths then lie
    elsewhere."""
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
        ShardError,
        match=r"^shard \(a.arrow\) has compressed buffers.*; "
        r"write the shard anew with `python -m fms_fsdp convert",
    ):
        read_all(tmp_path / "a.arrow")


@pytest.mark.parametrize("kept", [0, 5, 31, 0.3, 0.9, -1])
def test_truncated_shards_are_refused(tmp_path: Path, kept: float) -> None:
    write_lists(tmp_path / "a.arrow", DOCUMENTS)
    data = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(data[: int(kept * len(data)) if 0 < kept < 1 else int(kept)])
    with pytest.raises(ShardError, match=r"shard \(a.arrow\) (is empty|is not a whole)"):
        read_all(tmp_path / "a.arrow")


def test_a_shard_that_shrinks_after_it_was_measured_is_refused(tmp_path: Path) -> None:
    write_lists(tmp_path / "a.arrow", DOCUMENTS)
    opened = ArrowFile(LocalFiles(str(tmp_path)), "a.arrow")
    os.truncate(tmp_path / "a.arrow", opened.size - 3)
    with pytest.raises(ShardError, match=r"shard \(a.arrow\) ends 3 bytes early; the file is truncated"):
        opened.read(10, opened.size - 10)


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
    with pytest.raises(ShardError, match="must have one column `tokens`, not 'text'"):
        Shard(LocalFiles(str(tmp_path)), "strings.arrow", 0)


def test_null_tokens_are_refused(tmp_path: Path) -> None:
    table = pa.table({"tokens": pa.array([[1, None, 2]], type=pa.large_list(pa.uint16()))})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ShardError, match="null"):
        Shard(LocalFiles(str(tmp_path)), "a.arrow", 0)


def damaged_offset(path: Path, document: int, change: int) -> None:
    """Adds `change` to the place at which a document of the first chunk starts."""
    shard = Shard(LocalFiles(str(path.parent)), path.name, 0)
    at = int(shard._offsets_at[0]) + 8 * document
    data = bytearray(path.read_bytes())
    data[at : at + 8] = (int.from_bytes(data[at : at + 8], "little", signed=True) + change).to_bytes(
        8, "little", signed=True
    )
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("document", "change"), [(0, -8), (0, 3), (0, -(1 << 40)), (-1, 1), (-1, -1), (-1, 1 << 40)]
)
def test_offsets_that_do_not_span_the_chunk_are_refused_instead_of_read(
    tmp_path: Path, document: int, change: int
) -> None:
    """A first offset below 0 would give the bytes before the tokens as tokens."""
    documents = [np.arange(100 * i, 100 * i + 40) for i in range(50)]
    write_lists(tmp_path / "a.arrow", documents, chunk=50)
    damaged_offset(tmp_path / "a.arrow", document % 51, change)
    shard = Shard(LocalFiles(str(tmp_path)), "a.arrow", 1)
    start = (document % 51) * 41 - (document < 0)
    with pytest.raises(
        ShardError, match=r"shard \(a.arrow\) has offsets that disagree with its length; write the shard anew"
    ):
        shard.documents(0, start, start + 1)


MANY = [np.full(1 + i % 7, i % 4000) for i in range(6000)]


@pytest.mark.parametrize("change", [-40, 40, 1 << 50, -(1 << 50)])
def test_offsets_that_fall_in_the_middle_of_a_chunk_are_refused(tmp_path: Path, change: int) -> None:
    write_lists(tmp_path / "a.arrow", MANY, chunk=6000)
    damaged_offset(tmp_path / "a.arrow", 3000, change)
    shard = Shard(LocalFiles(str(tmp_path)), "a.arrow", 1)
    start = sum(len(document) + 1 for document in MANY[:3000])
    with pytest.raises(ShardError, match=r"shard \(a.arrow\) has offsets that disagree with its length"):
        shard.documents(0, start, start + 20)
    assert shard.documents(0, 0, 20).first == 0  # only what is around is read


@pytest.mark.parametrize("chunk", [6000, 2500])
def test_document_numbers_far_inside_a_chunk_are_right(tmp_path: Path, chunk: int) -> None:
    write_lists(tmp_path / "a.arrow", MANY, chunk=chunk)
    shard = Shard(LocalFiles(str(tmp_path)), "a.arrow", 1)
    starts = np.cumsum([0, *(len(document) + 1 for document in MANY)])
    for number in (0, 1, 511, 513, 2499, 2500, 3001, 5998, 5999):
        begin, end = int(starts[number]), int(starts[number + 1])
        index = number // chunk
        base = int(shard.chunk_starts[index])
        found = shard.documents(index, begin - base, end - base)
        assert (found.first, (found.starts + base).tolist()) == (number, [begin, end])
        assert shard.span(number) == (begin, end)
        address = int(found.addresses[0])
        assert (
            shard.document_at(address)
            == shard.document_at(address + shard.dtype.itemsize * (end - begin - 2))
            == number
        )


@pytest.mark.parametrize("layout", ["lists", "scalars"])
def test_a_flipped_bit_gives_an_error_that_names_the_shard_or_documents_inside_the_tokens(
    tmp_path: Path, layout: str
) -> None:
    path, rng = tmp_path / "a.arrow", np.random.default_rng(0)
    documents = random_documents(rng, 400 if layout == "lists" else 120)
    write_lists(path, documents, chunk=12) if layout == "lists" else write_scalars(path, documents)
    whole, named = path.read_bytes(), 0
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        try:
            found = read_all(path, delimiter=1 if layout == "lists" else 0)
        except ShardError as error:
            assert (
                str(error).startswith("shard (a.arrow) ") and "\n" not in str(error) and len(str(error)) < 300
            )
            named += 1
        else:
            assert sum(map(len, found)) == sum(map(len, documents))
    assert named > len(whole) // 8


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"sep_token": "-3"}, r"says sep_token \('-3'\), which must be a whole number"),
        ({"sep_token": "three"}, r"says sep_token \('three'\)"),
        ({"vocab_size": "²"}, r"says vocab_size \('\\xb2'\)"),
        ({"max_token_id": "9" * 5000}, "says max_token_id .* must be a whole number"),
        ({"has_eos": "True\n"}, r"says has_eos \('True\\n'\), which must be true or false"),
        ({"n_docs": "8"}, "holds 2 where its metadata says n_docs 8"),
        ({"n_tokens": "1"}, "holds 70 where its metadata says n_tokens 1"),
    ],
)
def test_metadata_that_could_be_misunderstood_is_refused_with_the_shards_name(
    tmp_path: Path, metadata: dict[str, str], words: str
) -> None:
    write_lists(tmp_path / "a.arrow", [np.arange(10, 40), np.arange(50, 90)], **metadata)
    with pytest.raises(
        ShardError, match=rf"^shard \(a.arrow\) {words}.*; write the shard anew with"
    ) as caught:
        Shard(LocalFiles(str(tmp_path)), "a.arrow", 0)
    assert len(str(caught.value)) < 300


def test_metadata_that_is_no_text_is_refused_with_the_shards_name(tmp_path: Path) -> None:
    write_lists(tmp_path / "a.arrow", DOCUMENTS, tokenizer_digest="text")
    data = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(data.replace(b"text", b"\xff\xfe\xfd\xfc"))
    with pytest.raises(ShardError, match=r"shard \(a.arrow\) has damaged metadata"):
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


@pytest.mark.parametrize(("place", "change"), [(0, 1), (-1, -1)])
def test_offsets_that_leave_out_tokens_are_named(tmp_path: Path, place: int, change: int) -> None:
    documents = [np.arange(5, dtype=np.uint16) + 7, np.arange(6, dtype=np.uint16) + 70]
    path = tmp_path / "a.arrow"
    write_lists(path, documents)
    whole = path.read_bytes()
    for kind in (np.int32, np.int64):
        offsets = np.array([0, 5, 11], dtype=kind)
        if whole.count(offsets.tobytes()) == 1:
            changed = offsets.copy()
            changed[place] += change
            path.write_bytes(whole.replace(offsets.tobytes(), changed.tobytes()))
    assert path.read_bytes() != whole
    with pytest.raises(ShardError, match="has offsets that disagree with its length"):
        read_all(path, delimiter=0)
