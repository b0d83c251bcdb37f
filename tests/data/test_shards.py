import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from fms_fsdp.data.sequences import Lru
from fms_fsdp.data.shards import MissingShardError, Shard, ShardError
from fms_fsdp.data.storage import Storage
from tests.data.corpora import Documents, random_documents, write_lists, write_scalars

DOCUMENTS = random_documents(np.random.default_rng(0), 3000)


def open_shard(path: Path, delimiter: int = 0) -> Shard:
    return Storage(str(path.parent)).open_shard(path.name, delimiter)


def read_all(path: Path, delimiter: int = 0) -> Documents:
    shard = open_shard(path, delimiter)
    starts, addresses = shard.documents
    lengths = np.diff(starts) - delimiter
    assert shard.num_docs == len(lengths) and shard.num_tokens == lengths.sum()
    pairs = zip((lengths * shard.width).tolist(), addresses.tolist(), strict=True)
    return [shard.ids(shard.read(size, address)) for size, address in pairs]


def same(a: Documents, b: Documents) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("dtype", "large"),
    [("uint8", True), ("uint16", True), ("uint16", False), ("uint32", True), ("int64", False)],
)
def test_lists_are_read_as_written(tmp_path: Path, dtype: str, large: bool) -> None:
    documents = [document % 256 for document in DOCUMENTS] if dtype == "uint8" else DOCUMENTS
    write_lists(tmp_path / "a.arrow", documents, dtype=dtype, large=large)
    assert same(read_all(tmp_path / "a.arrow", delimiter=1), documents)


def test_ids_of_16_bits_have_no_masks(tmp_path: Path) -> None:
    table = pa.table({"tokens": pa.array([[3, 60_001]], pa.large_list(pa.uint16()))})
    table = table.replace_schema_metadata({"has_masks": "true"})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert open_shard(tmp_path / "a.arrow").last_tokens(1) == [60_001]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
def test_record_batch_per_document_is_read(tmp_path: Path, dtype: str) -> None:
    write_scalars(tmp_path / "a.arrow", DOCUMENTS, dtype=dtype)
    assert same(read_all(tmp_path / "a.arrow"), DOCUMENTS)


def test_record_batches_of_different_forms_are_rejected(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("tokens", pa.uint32())])
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        for i, document in enumerate(DOCUMENTS):
            metadata = {"note": "x" * i} if i % 3 else None
            batch = pa.record_batch([pa.array(document, type=pa.uint32())], schema=schema)
            writer.write_batch(batch, custom_metadata=metadata)
    with pytest.raises(ShardError, match="has record batches of different forms; rewrite"):
        read_all(tmp_path / "a.arrow")


def test_empty_documents_and_shards_are_read(tmp_path: Path) -> None:
    empty = [np.array([], dtype=np.int64)] * 3
    write_lists(tmp_path / "a.arrow", empty)
    write_scalars(tmp_path / "b.arrow", empty)
    write_lists(tmp_path / "c.arrow", [])
    write_scalars(tmp_path / "d.arrow", [])
    assert [len(read_all(tmp_path / f"{name}.arrow")) for name in "abcd"] == [3, 3, 0, 0]


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_buffers_are_rejected(tmp_path: Path, codec: str) -> None:
    write_scalars(tmp_path / "a.arrow", [np.arange(5000)], compression=codec)
    match = r"^shard a.arrow has compressed buffers.*; rewrite .* `python -m fms_fsdp convert"
    with pytest.raises(ShardError, match=match):
        read_all(tmp_path / "a.arrow")


def test_truncated_shards_are_rejected(tmp_path: Path) -> None:
    write_lists(tmp_path / "a.arrow", DOCUMENTS)
    data = (tmp_path / "a.arrow").read_bytes()
    for kept in (0, 5, 31, len(data) // 3, len(data) - 1):
        (tmp_path / "a.arrow").write_bytes(data[:kept])
        with pytest.raises(ShardError, match=r"shard a.arrow is not a complete"):
            read_all(tmp_path / "a.arrow")


def test_shard_that_shrinks_once_open_is_rejected(tmp_path: Path) -> None:
    write_lists(tmp_path / "a.arrow", DOCUMENTS)
    opened = open_shard(tmp_path / "a.arrow")
    os.truncate(tmp_path / "a.arrow", opened.size - 3)
    with pytest.raises(ShardError, match="shard a.arrow is truncated by 3 bytes; restore"):
        opened.read(10, opened.size - 10)


def test_corrupt_metadata_is_rejected(tmp_path: Path) -> None:
    write_lists(tmp_path / "a.arrow", DOCUMENTS, tokenizer_digest="text")
    data = (tmp_path / "a.arrow").read_bytes()
    length = int.from_bytes(data[-10:-6], "little")
    footer = data[: -10 - length] + b"\xff" * length + data[-10:]
    for corrupt in (footer, data.replace(b"text", b"\xff\xfe\xfd\xfc")):
        (tmp_path / "a.arrow").write_bytes(corrupt)
        with pytest.raises(ShardError, match=r"shard a.arrow has corrupt metadata"):
            read_all(tmp_path / "a.arrow")


def test_other_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "text.arrow").write_text("hello " * 100)
    tokens = pa.array([[1, None, 2]], type=pa.large_list(pa.uint16()))
    for name, column in (("text", pa.array(["a", "b"])), ("tokens", tokens)):
        table = pa.table({name: column})
        path = tmp_path / f"{'strings' if name == 'text' else 'null'}.arrow"
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    for name, error, words in (
        ("none", MissingShardError, "shard none.arrow does not exist"),
        ("text", ShardError, "is not a complete Arrow IPC file"),
        ("strings", ShardError, "must have one column `tokens`, not 'text'"),
        ("null", ShardError, "null"),
    ):
        with pytest.raises(error, match=words):
            read_all(tmp_path / f"{name}.arrow")


def damaged_offset(path: Path, document: int, change: int) -> None:
    """Adds `change` to the place at which a document of the first chunk starts."""
    shard = open_shard(path)
    block, (_, buffers, _) = shard._blocks[0], shard._batches[0]
    body = int(block["offset"] + block["metadata"])
    at = body + int(buffers["first"][1]) + 8 * document
    data = bytearray(path.read_bytes())
    data[at : at + 8] = (
        int.from_bytes(data[at : at + 8], "little", signed=True) + change
    ).to_bytes(8, "little", signed=True)
    path.write_bytes(data)


MANY = [np.full(1 + i % 7, i % 4000) for i in range(6000)]


@pytest.mark.parametrize(
    ("document", "change"),
    [(0, -8), (0, 3), (0, -(1 << 40)), (6000, 1), (6000, -1), (3000, -40), (3000, 40)],
)
def test_wrong_offsets_are_rejected(tmp_path: Path, document: int, change: int) -> None:
    """A first offset below 0 would give the bytes before the tokens as tokens."""
    write_lists(tmp_path / "a.arrow", MANY, chunk=6000)
    damaged_offset(tmp_path / "a.arrow", document, change)
    match = r"shard a.arrow has offsets that do not match its length; rewrite the shard"
    with pytest.raises(ShardError, match=match):
        read_all(tmp_path / "a.arrow", 1)


@pytest.mark.parametrize("chunk", [6000, 2500])
def test_documents_inside_chunk_are_found(tmp_path: Path, chunk: int) -> None:
    write_lists(tmp_path / "a.arrow", MANY, chunk=chunk)
    shard = open_shard(tmp_path / "a.arrow", 1)
    starts = np.cumsum([0, *(len(document) + 1 for document in MANY)])
    assert shard.documents[0].tolist() == starts.tolist()
    for number in (0, 1, 511, 513, 2499, 2500, 3001, 5998, 5999):
        address = int(shard.documents[1][number])
        data = shard.read(len(MANY[number]) * shard.width, address)
        assert np.array_equal(shard.ids(data), MANY[number])


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", ["lists", "scalars"])
def test_flipped_bit_is_named_or_keeps_lengths(tmp_path: Path, layout: str, every: int) -> None:
    path, rng, is_list = tmp_path / "a.arrow", np.random.default_rng(0), layout == "lists"
    documents = random_documents(rng, 400 if is_list else 120)
    write_lists(path, documents, chunk=12) if is_list else write_scalars(path, documents)
    whole, named = path.read_bytes(), 0
    for at in range(0, len(whole), every):
        data = bytearray(whole)
        data[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        try:
            found = read_all(path, delimiter=int(is_list))
        except ShardError as error:
            message = str(error)
            assert message.startswith("shard a.arrow ") and "\n" not in message
            assert len(message) < 300
            named += 1
        else:
            assert sum(map(len, found)) == sum(map(len, documents))
    assert named > len(whole) // every // 8


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"sep_token": "-3"}, "has sep_token='-3', which must be an integer"),
        ({"vocab_size": "²"}, r"has vocab_size='\\xb2'"),
        ({"max_token_id": "9" * 5000}, "has max_token_id=.* must be an integer"),
        ({"has_eos": "True\n"}, r"has has_eos='True\\n', which must be true or false"),
        ({"n_docs": "8"}, "has 2, but its metadata has n_docs=8"),
        ({"n_tokens": "1"}, "has 70, but its metadata has n_tokens=1"),
    ],
)
def test_ambiguous_metadata_is_rejected(
    tmp_path: Path, metadata: dict[str, str], words: str
) -> None:
    write_lists(tmp_path / "a.arrow", [np.arange(10, 40), np.arange(50, 90)], **metadata)
    with pytest.raises(ShardError, match=rf"^shard a.arrow {words}.*; rewrite the shard") as caught:
        read_all(tmp_path / "a.arrow")
    assert len(str(caught.value)) < 300


def test_cache_drops_least_recently_used() -> None:
    made: list[str] = []

    def make(key: str, size: int) -> np.ndarray:
        made.append(key)
        return np.zeros(size, np.uint8)

    cache: Lru[np.ndarray] = Lru(10, make)
    for key, size in (("a", 4), ("b", 4), ("a", 4), ("c", 4), ("a", 4), ("b", 4)):
        cache(key, size)
    assert made == ["a", "b", "c", "b"]
    cache("large", 100)
    cache("large", 100)
    assert made[4:] == ["large"]
