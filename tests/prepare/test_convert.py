"""Token files of other projects to shards: the same ids, one end of document."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fms_fsdp.config import DataConfig
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.data.shards import NO_LOSS
from fms_fsdp.prepare.command import prepare
from fms_fsdp.prepare.convert import convert
from fms_fsdp.prepare.prepare_flags import ConvertConfig, PrepareConfig
from fms_fsdp.prepare.writer import Stats, describe
from tests.data.corpora import write_scalars

EOS = 7


def random_documents(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(8, 60_000, length).tolist() for length in rng.integers(1, 50, 120)]


def write_megatron(
    path: Path, documents: list[list[int]], code: int, kind: str, sequences: int = 1
) -> None:
    """Writes each document as that many sequences, as Megatron splits sentences."""
    dtype = np.dtype(kind)
    parts = [part for row in documents for part in np.array_split(np.array(row, dtype), sequences)]
    path.with_suffix(".bin").write_bytes(b"".join(part.tobytes() for part in parts))
    lengths = [len(part) for part in parts]
    pointers = np.cumsum([0, *lengths[:-1]]) * dtype.itemsize
    edges = np.arange(len(documents) + 1) * sequences
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(parts), len(edges))
    arrays = np.array(lengths, "<i4"), pointers.astype("<i8"), edges.astype("<i8")
    data = header + b"".join(array.tobytes() for array in arrays)
    path.with_suffix(".idx").write_bytes(data)


def write_datatrove(path: Path, documents: list[list[int]], kind: str) -> None:
    path.write_bytes(b"".join(np.array(row, kind).tobytes() for row in documents))
    ends = np.cumsum([len(row) for row in documents]).astype("<u8")
    Path(f"{path}.index").write_bytes(ends.tobytes())
    Path(f"{path}.metadata").write_text("tokenizer|2\n1\n1T")


def run(output: Path, inputs: str, **options: Any) -> dict[str, Stats]:
    settings = {"vocab_size": 60_000, "eos_id": EOS, "num_workers": 1, **options}
    return convert(ConvertConfig(inputs, str(output), **settings))


def rows(folder: Path) -> list[list[int]]:
    return [
        row
        for path in sorted(folder.glob("*.arrow"))
        for row in pa.ipc.open_file(path).read_all().column("tokens").to_pylist()
    ]


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    documents = random_documents(0)
    ended = [[*row, EOS] for row in documents]
    write_megatron(tmp_path / "m2", documents, 8, "<u2")
    write_megatron(tmp_path / "m4", ended, 4, "<i4", sequences=3)
    write_datatrove(tmp_path / "d2.ds", ended, "<u2")
    write_datatrove(tmp_path / "d4.ds", documents, "<u4")
    table = pa.table({"input_ids": pa.array(ended, pa.list_(pa.int32())), "id": range(120)})
    pq.write_table(table, tmp_path / "p.parquet", row_group_size=13)
    with pa.ipc.new_stream(tmp_path / "s.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    # upstream fms-fsdp: one document per record batch
    write_scalars(tmp_path / "c.arrow", list(map(np.array, ended)), compression="zstd")
    schema = pa.schema([("tokens", pa.list_(pa.uint32()))])
    with pa.ipc.new_file(tmp_path / "a.arrow", schema) as writer:
        for row in ended:
            writer.write_batch(pa.record_batch([pa.array([row], schema.types[0])], schema=schema))
    names = "m2.idx m4.idx d2.ds d4.ds p.parquet s.arrow c.arrow a.arrow".split()
    inputs = ",".join(f"{name.replace('.', '_')}={tmp_path / name}" for name in names)
    stats = run(tmp_path / "out", inputs, shard_tokens=500)
    num_tokens = sum(map(len, documents))
    for name, source in stats.items():
        assert rows(tmp_path / "out" / name) == documents, name
        assert source.tokens == num_tokens
    corpus = open_corpus(DataConfig(data_path=str(tmp_path / "out"), seq_length=32))
    assert (corpus.vocab_size, corpus.sep_token, len(corpus.sources)) == (60_000, EOS, len(names))
    assert {source.num_tokens for source in corpus.sources} == {num_tokens + len(documents)}


def test_held_out_files_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They were trained on in silence."""
    table = pa.table({"input_ids": [[1, 2, 3]]})
    for name in ("x/train-0.parquet", "x/test-0.parquet", "y/a.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / name)
    run(tmp_path / "x_out", f"x={tmp_path}/x")
    assert "source x consists of several splits, test, train, and" in capsys.readouterr().err
    run(tmp_path / "y_out", f"y={tmp_path}/y")
    assert "splits" not in capsys.readouterr().err
    texts = tmp_path / "texts.txt"
    texts.write_text("|".join(map(str, range(99))))
    made = PrepareConfig(
        f"web={texts}", f"{tmp_path}/made", tokenizer="byte", text_separator="|", split=(50.0, 50.0)
    )
    prepare(made)
    run(tmp_path / "again", f"z={tmp_path}/made")
    assert "source z consists of several splits, train, validation" in capsys.readouterr().err
    run(tmp_path / "train", f"z={tmp_path}/made/web")
    assert "splits" not in capsys.readouterr().err


def test_padding_and_masked_ids_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were trained on in silence."""
    columns: dict[str, list[list[int]]] = {
        "input_ids": [[1, 2, 3, 0]],
        "attention_mask": [[1, 1, 1, 0]],
        "labels": [[-100, 2, 3, -100]],
    }
    pq.write_table(pa.table(columns), tmp_path / "p.parquet")
    with pa.ipc.new_stream(tmp_path / "a.arrow", pa.table(columns).schema) as writer:
        writer.write_table(pa.table(columns))
    write_datatrove(tmp_path / "d.ds", [[1, 2, 3]], "<u2")
    (tmp_path / "d.ds.loss").write_bytes(bytes([0, 1, 1]))
    for name in ("p.parquet", "a.arrow"):
        run(tmp_path / name[0], f"{name[0]}={tmp_path / name}")
        note = f"source {name[0]} has padding or ids without a label (attention_mask, labels)"
        assert note in capsys.readouterr().err
    run(tmp_path / "d", f"x={tmp_path}/d.ds")
    assert "without a label (d.ds.loss)" in capsys.readouterr().err
    # as run_clm.py of transformers writes them
    columns |= {"attention_mask": [[1, 1, 1, 1]], "labels": columns["input_ids"]}
    table = pa.table(columns).append_column("loss_mask", pa.array([[["x"]]]))
    pq.write_table(table, tmp_path / "full.parquet")
    run(tmp_path / "f", f"x={tmp_path}/full.parquet")
    assert "padding" not in capsys.readouterr().err


@pytest.mark.parametrize("partner", ["x.bin", "y.ds.index"])
def test_repaired_partner_is_read_again(tmp_path: Path, partner: str) -> None:
    documents = random_documents(1)
    write_megatron(tmp_path / "x.idx", documents, 8, "<u2")
    write_datatrove(tmp_path / "y.ds", documents, "<u2")
    whole = (tmp_path / partner).read_bytes()
    (tmp_path / partner).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    os.utime(tmp_path / partner, ns=(0, 0))
    inputs = f"web={tmp_path / partner.replace('.bin', '.idx').removesuffix('.index')}"
    run(tmp_path / "out", inputs)
    (tmp_path / partner).write_bytes(whole)
    with pytest.raises(ValueError, match="made with other inputs"):
        run(tmp_path / "out", inputs)
    run(tmp_path / "out", inputs, overwrite=True)
    assert rows(tmp_path / "out/web") == documents


def test_megatron_sequences_outside_of_documents_are_rejected(tmp_path: Path) -> None:
    """The index of a program that ended before it closed its last document."""
    write_megatron(tmp_path / "x.idx", [[1, 2], [3, 4], [5, 6]], 8, "<u2")
    index = (tmp_path / "x.idx").read_bytes()
    num_edges_at = len(b"MMIDIDX\x00\x00") + struct.calcsize("<QBQ")
    shorter = index[:num_edges_at] + struct.pack("<Q", 3) + index[num_edges_at + 8 : -8]
    (tmp_path / "x.idx").write_bytes(shorter)
    with pytest.raises(ValueError, match="its documents do not have all of its 3 sequences"):
        run(tmp_path / "out", f"web={tmp_path / 'x.idx'}")


def test_masked_and_16_bit_shards_are_converted_together(tmp_path: Path) -> None:
    lists = pa.large_list(pa.uint32())
    chat = pa.table({"tokens": pa.array([[1 | NO_LOSS, 2]], lists)})
    chat = chat.replace_schema_metadata({"has_masks": "true"})
    web = pa.table({"tokens": pa.array([[3, 60_001]], pa.large_list(pa.uint16()))})
    for name, table in (("chat", chat), ("web", web)):
        with pa.ipc.new_file(str(tmp_path / f"{name}.arrow"), table.schema) as writer:
            writer.write_table(table)
    inputs = f"chat={tmp_path}/chat.arrow,web={tmp_path}/web.arrow"
    run(tmp_path / "out", inputs, vocab_size=60_002)
    assert rows(tmp_path / "out/chat") == [[1 | NO_LOSS, 2]]
    assert rows(tmp_path / "out/web") == [[3, 60_001]]


def test_folder_of_known_formats_is_split(tmp_path: Path) -> None:
    folder, output = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    parts = [random_documents(seed) for seed in range(3)]
    write_datatrove(folder / "a.ds", parts[0], "<u2")
    write_megatron(folder / "c", parts[1], 8, "<u2")
    pq.write_table(pa.table({"tokens": parts[2]}), folder / "d.parquet")
    (folder / "README.md").write_text("not tokens")
    run(output, f"x={folder}", num_workers=2, split=(3.0, 1.0))
    held_out = rows(output / "validation/x")
    assert held_out and sorted(rows(output / "x") + held_out) == sorted(sum(parts, []))


def test_prepare_adds_a_source_to_converted(tmp_path: Path) -> None:
    pq.write_table(pa.table({"tokens": [[104, 105, 257], [33]]}), tmp_path / "x.parquet")
    (tmp_path / "y.txt").write_text("hello")
    output = tmp_path / "out"
    convert(ConvertConfig(f"x={tmp_path}/x.parquet", str(output), tokenizer="byte", num_workers=1))
    prepare(PrepareConfig(f"y={tmp_path}/y.txt", str(output), num_workers=1))
    assert rows(output / "x") == [[104, 105], [33]] and rows(output / "y") == [list(b"hello")]
    counts = (output / "meta/counts.csv").read_text().splitlines()
    assert counts[1:] == ["x/shard-00000.arrow,2,3", "y/shard-00000.arrow,1,5"]


def test_other_eos_than_the_tokenizers_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"tokens": [[104, 105, 3]]}), tmp_path / "x.parquet")
    inputs = f"x={tmp_path}/x.parquet"
    run(tmp_path / "same", inputs, vocab_size=None, eos_id=257, tokenizer="byte")
    assert "EOS" not in capsys.readouterr().err
    run(tmp_path / "other", inputs, vocab_size=None, eos_id=3, tokenizer="byte")
    assert "--eos_id=3 is not the EOS token of --tokenizer (257)" in capsys.readouterr().err
    assert rows(tmp_path / "other/x") == [[104, 105]]


def test_corrupt_or_foreign_file_is_named(tmp_path: Path) -> None:
    documents = random_documents(1)
    write_megatron(tmp_path / "cut", documents, 8, "<u2")
    write_datatrove(tmp_path / "odd.ds", documents, "<u2")
    for name in ("cut.bin", "odd.ds"):
        os.truncate(tmp_path / name, (tmp_path / name).stat().st_size - 2)
    write_megatron(tmp_path / "floats", documents, 6, "<f4")
    write_megatron(tmp_path / "later", documents, 8, "<u2")
    with open(tmp_path / "later.idx", "r+b") as index:
        index.seek(9)
        index.write(b"\x02")  # its version
    write_datatrove(tmp_path / "back.ds", [[1, 2, 3, 4]], "<u2")
    (tmp_path / "back.ds.index").write_bytes(np.array([3, 1, 4], "<u8").tobytes())
    write_megatron(tmp_path / "back", [[1, 2], [3], [4]], 8, "<u2")
    write_megatron(tmp_path / "short", [[1, 2], [3], [4]], 8, "<u2")
    for name, at, value in (
        ("back", -16, struct.pack("<q", 0)),  # the third of the edges 0, 1, 2, 3
        ("short", 34, struct.pack("<i", -2)),  # the first length
    ):
        index = bytearray((tmp_path / f"{name}.idx").read_bytes())
        start = at % len(index)
        index[start : start + len(value)] = value
        (tmp_path / f"{name}.idx").write_bytes(index)
    (tmp_path / "other.idx").write_bytes(b"TNTIDX\x00\x00" * 9)
    (tmp_path / "other.bin").write_bytes(b"")
    (tmp_path / "alone.ds").write_bytes(b"\x01\x00")
    (tmp_path / "empty.ds").write_bytes(b"\x01\x00")
    (tmp_path / "empty.ds.index").touch()
    (tmp_path / "x.npy").write_bytes(b"")
    for name, column in {
        "string": ["a"],
        "null": [[1, None]],
        "big": [[1], [EOS], [2, 60_000], [3]],
        "negative": [[1, -1]],
    }.items():
        pq.write_table(pa.table({"tokens": column}), tmp_path / f"{name}.parquet")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "text.parquet")
    table = pa.table({"tokens": documents})
    with pa.ipc.new_stream(tmp_path / "s.arrow", table.schema) as writer:
        writer.write_table(table)
    os.truncate(tmp_path / "s.arrow", (tmp_path / "s.arrow").stat().st_size - 8)
    for name, words in [
        ("cut.idx", "points beyond the end of"),
        ("odd.ds", "expected 2 or 4 each"),
        ("floats.idx", "version 1, type 6; it must be"),
        ("later.idx", "version 2, type 8; it must be"),
        ("other.idx", "not a Megatron index"),
        ("back.idx", "the index is truncated or corrupt"),
        ("short.idx", "the index is truncated or corrupt"),
        ("back.ds", "its index is corrupt, a document ends before it begins"),
        ("alone.ds", "No such file"),
        ("empty.ds", "has 2 bytes for 0 tokens of its index"),
        ("text.parquet", "has no column tokens or input_ids, only text"),
        ("string.parquet", "not lists of integers"),
        ("null.parquet", "ids contain nulls"),
        ("big.parquet", r"document 3: token id 60000 is outside the vocabulary of 60,000"),
        ("negative.parquet", r"token id -1 "),
        ("x.npy", "must be an .idx"),
        ("s.arrow", "neither an Arrow file nor a complete Arrow stream"),
    ]:
        with pytest.raises(ValueError, match=words) as error:
            run(tmp_path / "out", f"x={tmp_path / name}", overwrite=True)
        assert name in str(error.value) and not (tmp_path / "out/x").exists()


def test_vocab_size_and_eos_id_are_required(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--vocab_size and --eos_id"):
        ConvertConfig("x=y", "out", vocab_size=10)
    with pytest.raises(ValueError, match=r"--eos_id=10 must be below"):
        run(tmp_path, "x=y", vocab_size=10, eos_id=10)


def test_ids_have_no_characters_per_token() -> None:
    ids, text = Stats(documents=1, tokens=9), Stats(documents=1, tokens=10, chars=25)
    told = describe({"web": ids})
    assert told.count(" –  ") == 4 and "0.00" not in told
    assert "2.50" in describe({"web": text})
