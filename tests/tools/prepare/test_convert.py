"""Token files of other projects → shards: the same ids, one end of document."""

from __future__ import annotations

import shlex
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fms_fsdp.__main__ import main
from fms_fsdp.config import DataConfig
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.tools.prepare.convert import ConvertConfig, convert
from fms_fsdp.tools.prepare.writer import Stats, describe
from tests.data.corpora import write_scalars

EOS = 7


def random_documents(seed: int, high: int = 60_000) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 50, 120)
    return [[int(i) for i in rng.integers(8, high, length)] for length in lengths]


def write_megatron(
    path: Path, documents: list[list[int]], code: int, kind: str, sequences: int = 1
) -> None:
    """Each document in that many sequences, as Megatron splits sentences."""
    pieces = [
        list(map(int, part))
        for row in documents
        for part in np.array_split(np.array(row), sequences)
    ]
    dtype = np.dtype(kind)
    path.with_suffix(".bin").write_bytes(
        b"".join(np.array(piece, dtype).tobytes() for piece in pieces)
    )
    lengths = [len(piece) for piece in pieces]
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * dtype.itemsize
    edges = np.arange(len(documents) + 1) * sequences
    with open(path.with_suffix(".idx"), "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(pieces), len(edges)))
        file.write(
            np.array(lengths, "<i4").tobytes()
            + pointers.astype("<i8").tobytes()
            + edges.astype("<i8").tobytes()
        )


def write_datatrove(path: Path, documents: list[list[int]], kind: str) -> None:
    path.write_bytes(b"".join(np.array(row, kind).tobytes() for row in documents))
    Path(f"{path}.index").write_bytes(
        np.cumsum([len(row) for row in documents]).astype("<u8").tobytes()
    )
    Path(f"{path}.metadata").write_text("tokenizer|2\n1\n1T")


def run(output: Path, inputs: str, **options: object):
    return convert(
        ConvertConfig(
            inputs,
            str(output),
            **{"vocab_size": 60_000, "eos_id": EOS, "num_workers": 1, **options},
        )
    )


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
    pq.write_table(
        pa.table({"id": range(120), "input_ids": ended}), tmp_path / "p.parquet", row_group_size=13
    )
    schema = pa.schema([("tokens", pa.list_(pa.uint32()))])
    for name, compression in (
        ("a", None),
        ("z", "zstd"),
    ):  # fms-fsdp: one document per record batch
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(tmp_path / f"{name}.arrow", schema, options=options) as writer:
            for row in ended:
                writer.write_batch(
                    pa.record_batch([pa.array([row], pa.list_(pa.uint32()))], schema=schema)
                )
    names = ["m2.idx", "m4.idx", "d2.ds", "d4.ds", "p.parquet", "a.arrow", "z.arrow"]
    inputs = ",".join(f"{name.replace('.', '_')}={tmp_path / name}" for name in names)
    stats = run(tmp_path / "out", inputs, shard_tokens=500)
    for name in names:
        assert rows(tmp_path / "out" / name.replace(".", "_")) == documents, name
        assert stats[name.replace(".", "_")].tokens == sum(map(len, documents))
    corpus = open_corpus(DataConfig(data_path=str(tmp_path / "out"), seq_length=32))
    assert (corpus.vocab_size, corpus.sep_token, len(corpus.sources)) == (60_000, EOS, len(names))
    assert {source.num_tokens for source in corpus.sources} == {
        sum(map(len, documents)) + len(documents)
    }


def test_folders_read_only_what_they_know_and_workers_change_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    parts = [random_documents(seed) for seed in range(4)]
    write_datatrove(folder / "a.ds", parts[0], "<u2")
    write_datatrove(folder / "b.ds", parts[1], "<u2")
    write_megatron(folder / "c", parts[2], 8, "<u2")
    pq.write_table(pa.table({"tokens": parts[3]}), folder / "d.parquet")
    (folder / "README.md").write_text("not tokens")
    made = []
    for workers in (1, 2):
        output = tmp_path / f"out{workers}"
        run(output, f"x={folder}", num_workers=workers, split=(3.0, 1.0))
        made.append(
            {str(p.relative_to(output)): p.read_bytes() for p in output.rglob("*") if p.is_file()}
        )
        both = rows(output / "x") + rows(output / "validation/x")
        assert sorted(both) == sorted(row for part in parts for row in part)
        assert rows(output / "validation/x")
    assert made[0] == made[1]


def test_with_a_tokenizer_the_folder_can_grow_by_prepare(tmp_path: Path) -> None:
    from fms_fsdp.tools.prepare.command import PrepareConfig, prepare

    pq.write_table(pa.table({"tokens": [[104, 105, 257], [33]]}), tmp_path / "x.parquet")
    (tmp_path / "y.txt").write_text("hello")
    output = str(tmp_path / "out")
    convert(ConvertConfig(f"x={tmp_path}/x.parquet", output, tokenizer="byte", num_workers=1))
    prepare(PrepareConfig(f"y={tmp_path}/y.txt", output, num_workers=1))
    assert rows(tmp_path / "out/x") == [[104, 105], [33]] and rows(tmp_path / "out/y") == [
        list(b"hello")
    ]
    assert (tmp_path / "out/meta/counts.csv").read_text().splitlines()[1:] == [
        "x/shard-00000.arrow,2,3",
        "y/shard-00000.arrow,1,5",
    ]


def test_advised_data_path_can_be_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_datatrove(tmp_path / "d.ds", [[*row, EOS] for row in random_documents(0)], "<u2")
    flags = [f"--input=d={tmp_path}/d.ds", "--vocab_size=60000", f"--eos_id={EOS}"]
    assert main(["convert", *flags, f"--output={tmp_path / 'my data'}", "--num_workers=1"]) == 0
    told = capsys.readouterr().out
    assert shlex.split(told.partition("train with ")[2])[0] == f"--data_path={tmp_path / 'my data'}"


def test_unfit_files_are_named(tmp_path: Path) -> None:
    documents = random_documents(1)
    write_megatron(tmp_path / "cut", documents, 8, "<u2")
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:-2])
    write_datatrove(tmp_path / "odd.ds", documents, "<u2")
    (tmp_path / "odd.ds").write_bytes((tmp_path / "odd.ds").read_bytes()[:-2])
    (tmp_path / "other.idx").write_bytes(b"TNTIDX\x00\x00" * 9)
    (tmp_path / "other.bin").write_bytes(b"")
    (tmp_path / "alone.ds").write_bytes(b"\x01\x00")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "text.parquet")
    pq.write_table(pa.table({"tokens": ["a"]}), tmp_path / "string.parquet")
    pq.write_table(pa.table({"tokens": [[1, None]]}), tmp_path / "null.parquet")
    pq.write_table(pa.table({"tokens": [[1, 60_000]]}), tmp_path / "big.parquet")
    pq.write_table(pa.table({"tokens": [[1, -1]]}), tmp_path / "negative.parquet")
    (tmp_path / "x.npy").write_bytes(b"")
    for name, words in [
        ("cut.idx", "points beyond the end of"),
        ("odd.ds", "expected 2 or 4 each"),
        ("other.idx", "not a Megatron index"),
        ("alone.ds", "No such file"),
        ("text.parquet", "has no column tokens or input_ids, only text"),
        ("string.parquet", "not lists of integers"),
        ("null.parquet", "contains nulls"),
        ("big.parquet", r"token id \(60000\) must be in \[0, 60000\)"),
        ("negative.parquet", r"token id \(-1\)"),
        ("x.npy", "must be an .idx"),
    ]:
        with pytest.raises(ValueError, match=words) as error:
            run(tmp_path / "out", f"x={tmp_path / name}", overwrite=True)
        assert name in str(error.value) and not (tmp_path / "out/x").exists()


def test_the_document_that_does_not_fit_is_counted(tmp_path: Path) -> None:
    pq.write_table(pa.table({"tokens": [[1], [EOS], [2, 60_000], [3]]}), tmp_path / "x.parquet")
    with pytest.raises(
        ValueError, match=r"x\.parquet: token id \(60000\) must be in .*; document 3$"
    ):
        run(tmp_path / "out", f"x={tmp_path / 'x.parquet'}")


def test_what_the_ids_mean_must_be_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--vocab_size and --eos_id"):
        ConvertConfig("x=y", "out", vocab_size=10)
    with pytest.raises(ValueError, match=r"--eos_id=10 must be below"):
        run(tmp_path, "x=y", vocab_size=10, eos_id=10)


def test_an_arrow_stream_is_read_like_a_file_and_a_cut_one_is_refused(tmp_path: Path) -> None:
    documents = random_documents(3)
    table = pa.table({"input_ids": pa.array(documents, pa.list_(pa.int32()))})
    with (
        pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=5)
    run(tmp_path / "out", f"x={tmp_path / 'x.arrow'}")
    kept = [row[:-1] if row and row[-1] == EOS else row for row in documents]
    assert rows(tmp_path / "out" / "x") == [row for row in kept if row]
    whole = (tmp_path / "x.arrow").read_bytes()
    for kept_bytes in (len(whole) - 8, len(whole) // 2, 3, 0):
        (tmp_path / "x.arrow").write_bytes(whole[:kept_bytes])
        with pytest.raises(
            ValueError,
            match=r"x.arrow: the file is neither an Arrow file nor a complete Arrow stream",
        ):
            run(tmp_path / "out2", f"x={tmp_path / 'x.arrow'}", overwrite=True)


def test_compressed_shards_of_a_record_batch_a_document_are_converted_as_the_reader_advises(
    tmp_path: Path,
) -> None:
    documents = random_documents(4)
    write_scalars(
        tmp_path / "x" / "a.arrow", [np.array(row) for row in documents], compression="zstd"
    )
    run(tmp_path / "out", f"x={tmp_path / 'x'}")
    assert rows(tmp_path / "out" / "x") == documents


def test_ids_without_their_text_have_no_characters_a_token() -> None:
    """It said 0.00."""
    ids, text = Stats(documents=1, tokens=9), Stats(documents=1, tokens=10, chars=25)
    told = describe({"web": ids})
    assert told.count(" –  ") == 4 and "0.00" not in told
    assert "2.50" in describe({"web": text})
