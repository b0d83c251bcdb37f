"""Which shard a row of the counts file stands for, wherever it was written."""

from pathlib import Path

import pytest

from fms_fsdp.data.corpus import _read_counts
from fms_fsdp.data.storage import Listing, Storage
from tests.data.corpora import write_corpus, write_counts


def read(root: Path, shards: list[str], paths: list[str]) -> dict[str, int]:
    """Returns tokens by shard, from a counts file with these paths; path i has i + 1 tokens."""
    root.mkdir(exist_ok=True)
    write_counts(root, [(path, 1, i + 1) for i, path in enumerate(paths)])
    listing = Listing({**Storage(str(root)).sizes, **dict.fromkeys(shards, 100)})
    counts = _read_counts(Storage(str(root), listing), ["meta/counts.csv", *shards])
    return {path: tokens for path, (_, tokens) in counts.items()}


@pytest.mark.slow
def test_repeated_source_name_makes_no_phantom_shard(tmp_path: Path) -> None:
    files = write_corpus(tmp_path / "a", {"a": [400] * 4, "b": [900]})
    rows = [
        (f"{tmp_path}/a/corpus/{source}/shard-{i:05d}.arrow", len(shard), tokens - len(shard))
        for source, shards in files.documents.items()
        for i, shard in enumerate(shards)
        for tokens in [sum(map(len, shard))]
    ]
    write_counts(tmp_path / "a", rows)
    corpus = files.corpus(seq_length=16, on_missing="mask")
    assert [len(source.paths) for source in corpus.sources] == [4, 1]


@pytest.mark.parametrize("root", ["", "/", "/data/a/", "/b/old root/a/"])
def test_absolute_paths_match_existing_shards(tmp_path: Path, root: str) -> None:
    shards = ["a/x.arrow", "a/y.arrow", "b/z.arrow"]
    expected = {path: i + 1 for i, path in enumerate(shards)}
    paths = [root + path for path in shards]
    assert read(tmp_path, shards, [*paths, "/other/c/x.arrow"]) == expected


def test_negative_counts_are_rejected(tmp_path: Path) -> None:
    write_counts(tmp_path, [("a/x.arrow", 3, -5)])
    with pytest.raises(ValueError, match=r"counts\*.csv has a count below 0 for shard a/x.arrow"):
        _read_counts(Storage(str(tmp_path)), ["meta/counts.csv"])


@pytest.mark.parametrize("count", [1 << 63, 1 << 70])
def test_counts_above_64_bits_are_rejected(tmp_path: Path, count: int) -> None:
    files = write_corpus(tmp_path, {"a": [400]})
    for row in (("a/shard-00000.arrow", 1, count), ("a/shard-00000.arrow", count, 1)):
        write_counts(tmp_path, [row])
        with pytest.raises(ValueError, match=rf"has a count of {count} for shard a/shard-00000"):
            files.corpus(seq_length=16)


@pytest.mark.parametrize("tokens", [1 << 49, (1 << 63) - 1])
def test_source_with_too_many_tokens_is_rejected(tmp_path: Path, tokens: int) -> None:
    files = write_corpus(tmp_path, {"a": [400] * 4})
    write_counts(tmp_path, [(f"a/shard-{i:05d}.arrow", 1, tokens) for i in range(4)])
    with pytest.raises(ValueError, match=r"source a has -?\d+ tokens, .* split the source"):
        files.corpus(seq_length=16, on_missing="mask")


def test_slashes_and_dots_are_normalized(tmp_path: Path) -> None:
    for path in ("a//s.arrow", "a/./s.arrow", "./a/s.arrow", "/x/a/s.arrow"):
        assert read(tmp_path, ["a/s.arrow"], [path]) == {"a/s.arrow": 1}
    names = ["a./s.arrow", "a/..s.arrow", "a/.b/s.arrow", "a../s.arrow"]
    assert list(read(tmp_path, names, names)) == names


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_last_row_needs_no_line_end(tmp_path: Path, end: str) -> None:
    (tmp_path / "meta").mkdir()
    text = "dataset/filename,documents,tokens\na/s.arrow,1,7" + end
    (tmp_path / "meta" / "counts.csv").write_bytes(text.encode())
    counts = _read_counts(Storage(str(tmp_path)), ["meta/counts.csv"])
    assert counts == {"a/s.arrow": (1, 7)}
