"""Which shard a row of the counts file stands for, wherever it was written."""

from pathlib import Path

import pytest

from fms_fsdp.data.corpus import _read_counts
from fms_fsdp.data.storage import Storage
from tests.data.corpora import write_corpus, write_counts


def read(root: Path, shards: list[str], paths: list[str]) -> dict[str, int]:
    """Returns tokens by shard, from a counts file with these paths; path i has i + 1 tokens."""
    root.mkdir(exist_ok=True)
    write_counts(root, [(path, 1, i + 1) for i, path in enumerate(paths)])
    sizes = {**Storage(str(root)).sizes, **dict.fromkeys(shards, 100)}
    counts = _read_counts(Storage(str(root), sizes), ["meta/counts.csv", *shards])
    return {path: tokens for path, (_, tokens) in counts.items()}


def test_a_source_whose_name_comes_twice_in_the_path_gets_no_phantom_shard(tmp_path: Path) -> None:
    files = write_corpus(tmp_path / "a", {"a": [400] * 4, "b": [900]})
    rows = [
        (
            f"{tmp_path}/a/corpus/{source}/shard-{i:05d}.arrow",
            len(shard),
            sum(map(len, shard)) - len(shard),
        )
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


@pytest.mark.parametrize("root", ["", "/", "/data/", "/data/a/", "/b/old root/a/"])
def test_absolute_paths_match_existing_shards(tmp_path: Path, root: str) -> None:
    shards = ["a/x.arrow", "a/y.arrow", "b/z.arrow"]
    expected = {path: i + 1 for i, path in enumerate(shards)}
    assert read(tmp_path, shards, [root + path for path in shards]) == expected
    elsewhere = [root + path for path in shards] + ["/other/c/x.arrow"]
    assert read(tmp_path, shards, elsewhere) == expected


def test_negative_counts_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"counts\*.csv has a count below 0 for shard a/x.arrow"):
        write_counts(tmp_path, [("a/x.arrow", 3, -5)])
        _read_counts(Storage(str(tmp_path)), ["meta/counts.csv"])


@pytest.mark.parametrize("tokens", [1 << 49, 1 << 62, (1 << 63) - 1])
def test_a_source_too_large_to_be_counted_is_refused(tmp_path: Path, tokens: int) -> None:
    files = write_corpus(tmp_path, {"a": [400] * 4})
    write_counts(tmp_path, [(f"a/shard-{i:05d}.arrow", 1, tokens) for i in range(4)])
    with pytest.raises(
        ValueError,
        match=r"source a has -?\d+ tokens, but must have .* fewer than [\d,]+ tokens; .*split the source",
    ):
        files.corpus(seq_length=16, on_missing="mask")


@pytest.mark.parametrize("path", ["a//s.arrow", "a/./s.arrow", "./a/s.arrow", "/x/a/s.arrow"])
def test_doubled_slashes_and_dots_are_removed(tmp_path: Path, path: str) -> None:
    assert read(tmp_path, ["a/s.arrow"], [path]) == {"a/s.arrow": 1}


def test_names_with_dots_stay_as_they_are(tmp_path: Path) -> None:
    names = ["a./s.arrow", "a/..s.arrow", "a/.b/s.arrow", "a../s.arrow"]
    assert list(read(tmp_path, names, names)) == names


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_single_row_without_a_final_newline_is_read(tmp_path: Path, end: str) -> None:
    (tmp_path / "meta").mkdir()
    for rows in (1, 3):
        text = (
            "dataset/filename,documents,tokens"
            + "".join(f"\na/s{i}.arrow,1,7" for i in range(rows))
            + end
        )
        (tmp_path / "meta" / "counts.csv").write_bytes(text.encode())
        found = _read_counts(Storage(str(tmp_path)), ["meta/counts.csv"])
        assert found == {f"a/s{i}.arrow": (1, 7) for i in range(rows)}
