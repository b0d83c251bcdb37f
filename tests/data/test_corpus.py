"""Bad input: each refused at start-up where it can be seen there, with one line that says what, why and what
to do."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from fms_fsdp.config import DataConfig, TrainConfig
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.errors import UserError
from tests.data.corpora import SEP, Files, write_corpus, write_counts, write_lists, write_scalars

SIZES = {"web": [3000, 2000], "code": [1500]}
DOCUMENTS = [np.arange(10, 40), np.arange(50, 90)]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return write_corpus(tmp_path, SIZES)


def refused(files: Files, match: str, batch: int | None = None, **changes: Any) -> None:
    settings = {"seq_length": 64, **changes}
    with pytest.raises((ValueError, FileNotFoundError), match=match) as caught:
        corpus = files.corpus(**settings)
        if batch is not None:
            files.stream(batch, **settings).batch_at(1)
        assert corpus is not None
    assert "\n" not in str(caught.value)


def test_names_that_do_not_exist(files: Files, tmp_path: Path) -> None:
    refused(
        files,
        "--datasets=wbe is not a folder with files in .*; did you mean web",
        datasets=("wbe",),
    )
    refused(
        Files(tmp_path / "nowhere"),
        r"--data_path=.*nowhere is not a folder; make one with `python -m fms_fsdp prepare",
    )
    refused(files, "--data_path= is not a folder", data_path="")


def test_a_wrong_name_is_answered_with_the_sources_and_nothing_else(tmp_path: Path) -> None:
    """The folders of `prepare` stood there, and left no room for the last source."""
    names = [*"abcd", "deep/g", "e", "f", "z"]
    files = write_corpus(tmp_path, {name: [200] for name in names})
    for inner in ("meta/prepare/arr", "meta/prepare/text", "meta/tokenizer", "notes"):
        (tmp_path / inner).mkdir(parents=True)
        (tmp_path / inner / "file.json").write_text("{}")
    refused(
        files,
        rf"--datasets=nope is not a folder with files in .*; found: {', '.join(names)}$",
        datasets=("nope",),
    )


def test_names_given_twice_or_inside_one_another(files: Files) -> None:
    refused(files, "--datasets=web must be named once", datasets=("web", "./web"))
    write_lists(files.root / "web" / "deep" / "a.arrow", DOCUMENTS)
    refused(files, "--datasets=web/deep is inside web", datasets=("web", "web/deep"))
    refused(files, "--datasets=web/deep is inside web")


def test_folders_without_shards(files: Files, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes").touch()
    refused(
        files, "--datasets=empty must contain .arrow shards; make some with", datasets=("empty",)
    )
    (tmp_path / "text").mkdir()
    pyarrow.parquet.write_table(pa.table({"text": ["a"]}), tmp_path / "text" / "part.parquet")
    remedy = (
        "--datasets=text must contain .arrow shards; .*part.parquet is text: make shards of it with "
        "`python -m fms_fsdp prepare --input=FILES --output=FOLDER`"
    )
    refused(files, remedy, datasets=("text",))
    refused(
        Files(tmp_path / "text"),
        "--data_path=.*text must contain .arrow shards; part.parquet is text",
    )


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def test_shards_that_are_empty_truncated_missing_or_other_than_counted(files: Files) -> None:
    path = files.root / "web" / "shard-00001.arrow"
    whole = path.read_bytes()
    damage(path, lambda data: b"")
    refused(files, "shard web/shard-00001.arrow is not a complete Arrow IPC file")
    damage(path, lambda data: whole[: len(whole) // 2])
    refused(
        files,
        "shard web/shard-00001.arrow is not a complete Arrow IPC file; restore the shard",
    )
    write_lists(path, DOCUMENTS)
    refused(
        files,
        r"shard web/shard-00001.arrow has 2 documents and 70 tokens, but the counts file says \d+ and "
        r"\d+",
    )
    path.unlink()
    refused(
        files,
        r"shard web/shard-00001.arrow is listed in meta/\*counts\*.csv but does not exist in .*; restore "
        r"the shard",
    )


def test_a_corpus_too_small(files: Files) -> None:
    refused(
        files,
        r"source code has \d+ tokens, but must have at least one sequence \(--seq_length=4096\)",
        seq_length=4096,
    )
    refused(files, r"--global_batch_size=4000 must be at most \d+, the sequences", batch=4000)


def test_batches_that_cannot_be_shared_out(files: Files) -> None:
    with pytest.raises(
        ValueError,
        match=r"--global_batch_size=12 must be divisible by 5 .*; use 10 or 15",
    ):
        files.stream(12, 0, 5, seq_length=64)


def test_weights(files: Files) -> None:
    refused(
        files,
        "--weights=.* must be at least 1/65536",
        batch=2,
        datasets=("web", "code"),
        weights=(1.0, 1e-9),
    )
    for weights in ((1.0,), (1.0, -1.0)):
        with pytest.raises(UserError, match="^--weights"):
            TrainConfig(data=DataConfig(datasets=("web", "code"), weights=weights))


def test_vocabularies_and_tokenizers(files: Files, tmp_path: Path) -> None:
    assert files.corpus(seq_length=64).vocab_size == 5000
    write_lists(
        tmp_path / "big" / "a.arrow", [np.arange(6000)], max_token_id="5999", tokenizer_digest="x"
    )
    refused(
        files,
        "shard big/a.arrow has token 5999, which must be below --vocab_size=5000",
        batch=2,
        datasets=("big",),
    )
    write_lists(tmp_path / "other" / "a.arrow", DOCUMENTS * 10, tokenizer_digest="y")
    refused(
        files,
        "tokenizer_digest is x in shard big/a.arrow but y in other/a.arrow",
        datasets=("big", "other"),
    )


def test_a_token_beyond_the_vocabulary_is_found_by_reading(files: Files, tmp_path: Path) -> None:
    documents = [np.arange(100, 200), np.full(100, 5000)]
    write_scalars(tmp_path / "big" / "a.arrow", documents)
    refused(
        files,
        r"shard big/a.arrow has token 5000 in document 1, which must be below --vocab_size=5000; .* "
        r"\[big sequence \d, step 1\]",
        batch=3,
        datasets=("big",),
    )
    refused(
        files, "has token 5000 in document 1", batch=3, datasets=("big",), on_missing="mask"
    )  # never masked


@pytest.mark.parametrize(
    ("dtype", "token"), [("int64", -100), ("int64", -1), ("uint64", 2**64 - 100)]
)
@pytest.mark.parametrize("document_mask", [True, False])
def test_a_token_below_zero_or_beyond_64_bits_is_refused(
    tmp_path: Path, dtype: str, token: int, document_mask: bool
) -> None:
    for place in (0, 5, 29):
        whole = np.array([*range(10, 40)], dtype=dtype)
        whole[place] = token
        write_lists(tmp_path / "big" / "a.arrow", [whole] * 50, dtype=dtype)
        for size in (32, 1):
            refused(
                Files(tmp_path),
                r"shard big/a.arrow has token 9223372036854775807 in document \d+, which must be below",
                batch=1500 // size,
                seq_length=size,
                document_mask=document_mask,
                on_missing="mask",
            )


class TestSeparator:
    def test_is_taken_from_the_shards(self, files: Files) -> None:
        assert files.corpus(sep_token=None, seq_length=64).sep_token == SEP

    def test_must_be_given_for_shards_that_do_not_say(self, tmp_path: Path) -> None:
        files = write_corpus(tmp_path, {"web": [3000]}, layout="scalars", stored=True)
        refused(
            files,
            r"shard web/.* does not name its separator; set --sep_token .* \(its first documents all end with "
            rf"{SEP}\)",
            sep_token=None,
        )

    def test_of_two_kinds_is_refused(self, files: Files, tmp_path: Path) -> None:
        write_lists(tmp_path / "web" / "z.arrow", DOCUMENTS, sep_token="7")
        refused(files, r"sep_token is 3 in shard .* but 7 in web/z.arrow", sep_token=None)
        write_lists(tmp_path / "web" / "z.arrow", DOCUMENTS, sep_token="7", has_eos="true")
        refused(
            files,
            "--sep_token=3 does not match shard web/z.arrow, whose documents end with 7;",
        )

    def test_stored_by_some_documents_only_is_refused(self, tmp_path: Path) -> None:
        mixed = [
            np.append(document, SEP) if i % 2 else document
            for i, document in enumerate(DOCUMENTS * 20)
        ]
        write_scalars(tmp_path / "web" / "a.arrow", mixed)
        refused(
            Files(tmp_path),
            rf"shard web/a.arrow has documents with and without a trailing separator \({SEP}\)",
        )

    def test_stored_by_some_shards_only_is_refused(self, tmp_path: Path) -> None:
        write_scalars(tmp_path / "web" / "a.arrow", DOCUMENTS)
        write_scalars(
            tmp_path / "web" / "b.arrow", [np.append(document, SEP) for document in DOCUMENTS]
        )
        refused(
            Files(tmp_path),
            r"shard web/b.arrow differs from other shards of source web: .* separator \(3\)",
        )

    @pytest.mark.parametrize(
        ("said", "stored", "word"), [("true", False, "without"), ("false", True, "with")]
    )
    def test_stored_other_than_the_shard_says_is_refused(
        self, tmp_path: Path, said: str, stored: bool, word: str
    ) -> None:
        on_disk = [np.append(document, SEP) if stored else document for document in DOCUMENTS * 20]
        match = rf"shard web/a.arrow has documents .*{word} a trailing .* \(3\), but says has_eos={said}; "
        write_lists(tmp_path / "web" / "a.arrow", on_disk, has_eos=said)
        refused(Files(tmp_path), match)
        on_disk[3] = np.append(on_disk[3], SEP) if said == "false" else on_disk[3]
        write_lists(tmp_path / "web" / "a.arrow", on_disk, has_eos=said)
        refused(Files(tmp_path), match)

    def test_that_ends_a_text_by_chance_is_no_contradiction(self, tmp_path: Path) -> None:
        mixed = [
            np.append(document, SEP) if i % 2 else document
            for i, document in enumerate(DOCUMENTS * 20)
        ]
        write_lists(tmp_path / "web" / "a.arrow", mixed, has_eos="false")
        assert Files(tmp_path).corpus(seq_length=64).sources[0].delimiter == 1

    def test_beyond_the_vocabulary_is_refused(self, files: Files) -> None:
        with pytest.raises(ValueError, match="--sep_token=5000 must be below --vocab_size=5000"):
            files.stream(2, seq_length=64, sep_token=5000)


def test_malformed_counts_are_refused_with_their_line(files: Files) -> None:
    write_counts(files.root, [("web/shard-00000.arrow", "many", 3)])  # type: ignore[list-item]
    refused(
        files,
        "counts file meta/counts.csv must have rows of .*'many'; correct or remove the file",
    )


def test_counts_written_under_another_root_are_understood(tmp_path: Path) -> None:
    files = write_corpus(
        tmp_path, {"lang=en/dataset=web": [2000], "code": [500]}, counts=False, layout="scalars"
    )
    for source in files.documents:
        (shard,) = files.documents[source]
        (tmp_path / "meta").mkdir(exist_ok=True)
        with open(tmp_path / "meta" / "my_counts_v1.csv", "a") as sink:
            if source != "code":
                sink.write("dataset/filename,documents,tokens\n")
            row = (
                "/gpfs/old "
                f"root/{source}/shard-00000.arrow,{len(shard)},{sum(map(len, shard)) - len(shard)}\n"
            )
            sink.write(row)
    corpus = files.corpus(seq_length=64)
    assert [source.name for source in corpus.sources] == ["code", "lang=en/dataset=web"]
    damage(tmp_path / "meta" / "my_counts_v1.csv", lambda data: data.replace(b",", b",1", 4))
    refused(files, "but the counts file says")


def test_corpora_beyond_a_few_shards_open_only_the_first_of_each_source(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fms_fsdp.data.corpus.OPENED_AT_START", 0)
    damage(files.root / "web" / "shard-00001.arrow", lambda data: data[:100])
    stream = files.stream(2, seq_length=64)  # start-up cannot see it
    with pytest.raises(
        ValueError,
        match=r"shard web/shard-00001.arrow is not a complete .* \[web sequence \d+, step \d+\]",
    ):
        for _ in range(60):
            stream.next_batch()
    assert stream.step < 60
    stream.close()


def test_a_shard_cut_off_while_it_is_read_is_named_with_document_and_step(files: Files) -> None:
    path = files.root / "one" / "a.arrow"
    write_lists(path, [np.arange(10, 200)] * 30, chunk=1000)
    stream = files.stream(4, seq_length=64, datasets=("one",))
    stream.batch_at(1)
    os.truncate(path, path.stat().st_size * 6 // 10)
    error = r"shard one/a.arrow is truncated at byte \d+; .* \[one sequence \d+, step \d+\]"
    with pytest.raises(ValueError, match=error):
        for step in range(2, 20):
            stream.batch_at(step)
    stream.close()


class TestMasked:
    """--on_missing=mask: rows that need an unreadable shard are emitted without labels, at every world size
    alike."""

    def test_rows_of_a_missing_shard_are_masked_and_the_others_unchanged(
        self, tmp_path: Path
    ) -> None:
        files = write_corpus(tmp_path, {"web": [400] * 12})
        whole = [files.stream(4, seq_length=64).batch_at(step) for step in range(1, 16)]
        (tmp_path / "web" / "shard-00003.arrow").unlink()
        masked = 0
        with files.stream(4, seq_length=64, on_missing="mask") as stream:
            for step in range(1, 16):
                batch = stream.next_batch()
                halves = [
                    files.stream(4, rank, 2, seq_length=64, on_missing="mask").batch_at(step)
                    for rank in range(2)
                ]
                assert (
                    np.concatenate([half.labels_BS for half in halves]) == batch.labels_BS.numpy()
                ).all()
                for row in range(4):
                    if (batch.labels_BS[row] == -100).all():
                        masked += 1
                    else:
                        assert (batch.tokens_BS[row] == whole[step - 1].tokens_BS[row]).all()
            assert 0 < masked < 40
            assert stream.num_masked_rows == masked

    def test_without_the_flag_the_run_stops(self, tmp_path: Path) -> None:
        files = write_corpus(tmp_path, {"web": [400] * 12})
        stream = files.stream(4, seq_length=64)
        for shard in (tmp_path / "web").iterdir():
            shard.unlink()
        with pytest.raises(
            ValueError, match=r"shard web/.* cannot be read: .* \[web sequence \d+, step 1\]"
        ):
            stream.next_batch()
        stream.close()


def test_symbolic_links_are_followed(files: Files, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(tmp_path / "web")
    corpus = files.corpus(seq_length=64, datasets=("linked",))
    assert corpus.sources[0].num_tokens == files.num_tokens("web")


def test_digests_follow_names_order_and_counts_only(files: Files, tmp_path: Path) -> None:
    before = {source.name: source.digest for source in files.corpus(seq_length=64).sources}
    assert len(set(before.values())) == 2 and all(len(digest) == 16 for digest in before.values())
    (tmp_path / "web" / "shard-00001.arrow").rename(tmp_path / "web" / "x.arrow")
    after = {
        source.name: source.digest
        for source in open_corpus(files.section(seq_length=64, on_missing="mask")).sources
    }
    assert after["code"] == before["code"] and after["web"] != before["web"]


def test_discovery_leaves_out_a_validation_root(files: Files, tmp_path: Path) -> None:
    """`prepare --split` puts held-out sources into validation/, a data root of its own: never trained on
    unless named."""
    write_corpus(tmp_path / "validation", SIZES)
    write_counts(tmp_path / "validation", [])
    assert [source.name for source in files.corpus(seq_length=64).sources] == ["code", "web"]
    named = files.corpus(seq_length=64, datasets=("validation/web",))
    assert [source.name for source in named.sources] == ["validation/web"]
