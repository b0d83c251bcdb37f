"""Which shard a row of the counts file stands for, wherever it was written."""

import gc
from pathlib import Path

import pytest

from fms_fsdp.data.shards.counts import read_counts
from fms_fsdp.data.shards.files import LocalFiles
from tests.data.corpora import write_corpus, write_counts


def read(root: Path, shards: list[str], rows: list[str]) -> dict[str, int]:
    """Tokens by shard, from a counts file with these paths in it; row i has i + 1 tokens."""
    root.mkdir(exist_ok=True)
    write_counts(root, [(path, 1, i + 1) for i, path in enumerate(rows)])
    counts = read_counts(LocalFiles(str(root)), ["meta/counts.csv", *shards])
    return {path: tokens for path, (_, tokens) in counts.items()}


def test_a_source_whose_name_comes_twice_in_the_path_gets_no_phantom_shard(tmp_path: Path) -> None:
    files = write_corpus(tmp_path / "a", {"a": [400] * 4, "b": [900]})
    rows = [
        (f"{tmp_path}/a/corpus/{source}/shard-{i:05d}.arrow", len(shard), sum(map(len, shard)) - len(shard))
        for source, shards in files.documents.items()
        for i, shard in enumerate(shards)
    ]
    write_counts(tmp_path / "a", rows)
    corpus = files.corpus(seq_length=16, on_missing="mask")
    assert [len(source.paths) for source in corpus.sources] == [4, 1]
    with files.stream(6, seq_length=16, on_missing="mask") as stream:
        for _ in range(30):
            stream.next_batch()
        assert stream.num_masked_rows == 0


@pytest.mark.parametrize(
    "root", ["", "/", "/data/", "/data/a/", "data/a/corpus/", "/a/a/a/", "/b/old root/a/"]
)
def test_rows_of_any_root_stand_for_the_shards_that_are_there(tmp_path: Path, root: str) -> None:
    shards = ["a/x.arrow", "a/y.arrow", "a/a/x.arrow", "b/a/x.arrow", "b/z.arrow"]
    expected = {path: i + 1 for i, path in enumerate(shards)}
    assert read(tmp_path, shards, [root + path for path in shards]) == expected
    lost = [path for path in shards if path not in ("a/y.arrow", "b/z.arrow")]
    assert (
        read(tmp_path, lost, [root + path for path in shards]) == expected
    )  # they are missing, under their own names


def test_a_row_of_a_source_that_is_not_here_is_no_shard_of_one_that_is(tmp_path: Path) -> None:
    shards = ["data/x.arrow", "web/y.arrow"]
    rows = ["/data/data/x.arrow", "/data/web/y.arrow", "/data/web/lost.arrow", "/elsewhere/data/z.arrow"]
    assert read(tmp_path, shards, rows) == {"data/x.arrow": 1, "web/y.arrow": 2, "web/lost.arrow": 3}


def test_a_shard_with_a_row_of_its_own_keeps_it(tmp_path: Path) -> None:
    rows = ["/old/a/x.arrow", "a/x.arrow", "/older/a/x.arrow"]
    assert read(tmp_path, ["a/x.arrow"], rows) == {"a/x.arrow": 2}


def test_counts_below_zero_are_refused(tmp_path: Path) -> None:
    write_counts(tmp_path, [("a/x.arrow", 3, -5)])
    with pytest.raises(
        ValueError, match=r"counts\*.csv gives shard a/x.arrow a count below 0 \(-5\); correct the count"
    ):
        read_counts(LocalFiles(str(tmp_path)), ["meta/counts.csv", "a/x.arrow"])


@pytest.mark.parametrize("tokens", [1 << 49, 1 << 62, (1 << 63) - 1])
def test_a_source_too_large_to_be_counted_is_refused(tmp_path: Path, tokens: int) -> None:
    files = write_corpus(tmp_path, {"a": [400] * 4})
    write_counts(tmp_path, [(f"a/shard-{i:05d}.arrow", 1, tokens) for i in range(4)])
    with pytest.raises(
        ValueError, match=r"source \(a\) must have at most [\d,]+ tokens; divide the source into several"
    ):
        files.corpus(seq_length=16, on_missing="mask")


@pytest.mark.parametrize(
    "row", ["a//s.arrow", "a/./s.arrow", "./a/s.arrow", ".//a/././/s.arrow", "/x//a/s.arrow"]
)
def test_a_row_with_a_doubled_slash_or_a_dot_is_the_shard_itself(tmp_path: Path, row: str) -> None:
    assert read(tmp_path, ["a/s.arrow"], [row]) == {"a/s.arrow": 1}


def test_names_with_dots_stay_as_they_are(tmp_path: Path) -> None:
    names = ["a./s.arrow", "a/..s.arrow", "a/.b/s.arrow", "a../s.arrow"]
    assert list(read(tmp_path, names, names)) == names


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_single_row_without_a_final_newline_is_read(tmp_path: Path, end: str) -> None:
    (tmp_path / "meta").mkdir()
    for rows in (1, 3):
        text = "dataset/filename,documents,tokens" + "".join(f"\na/s{i}.arrow,1,7" for i in range(rows)) + end
        (tmp_path / "meta" / "counts.csv").write_bytes(text.encode())
        found = read_counts(LocalFiles(str(tmp_path)), ["meta/counts.csv"])
        assert found == {f"a/s{i}.arrow": (1, 7) for i in range(rows)}


def test_a_huge_counts_file_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    with open(tmp_path / "meta" / "counts.csv", "wb") as sink:
        sink.truncate(64 << 30)
    with pytest.raises(
        ValueError, match=r"counts file \(meta/counts.csv\) .* the file has 68,719,476,736 bytes, .*"
    ):
        read_counts(LocalFiles(str(tmp_path)), ["meta/counts.csv"])


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_left_as_it_was(tmp_path: Path, collects: bool) -> None:
    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        assert read(tmp_path / "a", ["web/a.arrow"], ["web/a.arrow"]) == {"web/a.arrow": 1}
        assert gc.isenabled() is collects
    finally:
        (gc.enable if was else gc.disable)()
