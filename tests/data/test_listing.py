"""Ranks open the corpus from the scan of one rank, without looking at a file before a sequence."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fms_fsdp.config import DataConfig, EvalConfig
from fms_fsdp.data.corpus import Corpus, open_corpus
from fms_fsdp.data.storage import Listing, list_files
from fms_fsdp.data.stream import TokenStream, build_stream
from fms_fsdp.data.validation import open_held_out, scan_held_out
from tests.data.corpora import VOCAB, write_corpus

SIZES = {"web": [3000, 2000], "code/py": [1500]}


def stream_of(section: DataConfig, corpus: Corpus) -> TokenStream:
    sizes = {"vocab_size": VOCAB, "global_batch_size": 4, "dp_rank": 1, "dp_size": 2}
    return build_stream(section, corpus, seed=1, **sizes)


@pytest.mark.parametrize(("uri", "counts"), [(False, False), (False, True), (True, True)])
def test_pickled_corpus_opens_no_file(tmp_path: Path, uri: bool, counts: bool) -> None:
    root, away = tmp_path / "here", tmp_path / "away"
    section = write_corpus(root, SIZES, counts=counts).section(seq_length=32, sep_token=None)
    section = replace(section, data_path=f"file://{root}") if uri else section
    with stream_of(section, open_corpus(section)) as stream:
        expected, state = [stream.next_batch() for _ in range(5)], stream.state_dict()
    corpus = pickle.loads(pickle.dumps(open_corpus(section)))
    root.rename(away)
    with stream_of(section, corpus) as stream:
        assert stream.state_dict() == state and len(state["sources"]["web"][4]) == 8
        assert stream.load_state_dict(state, 2) == []
        away.rename(root)
        for batch in expected[2:]:
            for column, other in zip(batch, stream.next_batch(), strict=True):
                assert torch.equal(column, other)


def test_held_out_data_share_one_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = write_corpus(tmp_path, SIZES).section(seq_length=32)
    for split in ("validation", "test"):
        write_corpus(tmp_path / split, SIZES, seed=5 + len(split))
    listed: list[str] = []

    def counted_listing(root: str) -> Listing:
        listed.append(root)
        return list_files(root)

    monkeypatch.setattr("fms_fsdp.data.storage.list_files", counted_listing)
    flags = EvalConfig(eval_interval=1, eval_test=True, eval_steps=3)
    found = scan_held_out(flags, section, open_corpus(section), vocab_size=VOCAB)
    assert [each.group for each in found] == ["eval", "test"] and listed == [str(tmp_path)]
    # `evaluate` has no corpus of the training: it lists the held-out folders alone.
    alone = scan_held_out(flags, section, None, vocab_size=VOCAB)
    assert listed[1:] == [str(tmp_path / "validation"), str(tmp_path / "test")]
    for one, other in zip(found, alone, strict=True):
        assert one.corpus is not None and other.corpus is not None
        digests = [(source.digest, source.fingerprint) for source in one.corpus.sources]
        assert digests == [(source.digest, source.fingerprint) for source in other.corpus.sources]


def test_held_out_rows_ignore_logical_shards(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, {"web": [9 * 4500]})
    flags = EvalConfig(eval_interval=1, eval_steps=3, eval_data_path=str(tmp_path))
    rows = []
    for number in (1, 2, 1024):
        section = files.section(seq_length=8, logical_shards=number)
        (source,) = open_held_out(flags, scan_held_out(flags, section, None, vocab_size=VOCAB), 1)
        rows.append(source.sequences(0, 3).tokens_BS)
        source.stream.close()
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("uri", [False, True])
def test_pickled_held_out_data_opens_no_file(tmp_path: Path, uri: bool) -> None:
    root, away = tmp_path / "here", tmp_path / "away"
    section = write_corpus(root, SIZES).section(seq_length=32)
    for split in ("validation", "test"):
        write_corpus(root / split, SIZES, seed=5 + len(split))
    section = replace(section, data_path=f"file://{root}") if uri else section
    flags = EvalConfig(eval_interval=1, eval_test=True, eval_steps=3)
    found = scan_held_out(flags, section, open_corpus(section), vocab_size=VOCAB)
    expected, scanned = open_held_out(flags, found, 1), pickle.loads(pickle.dumps(found))
    root.rename(away)
    opened = open_held_out(flags, scanned, 1)
    away.rename(root)
    assert len(opened) == 4
    for one, other in zip(expected, opened, strict=True):
        assert (one.group, one.name, one.num_sequences) == (
            other.group,
            other.name,
            other.num_sequences,
        )
        assert torch.equal(one.sequences(0, 3).tokens_BS, other.sequences(0, 3).tokens_BS)
        one.stream.close()
        other.stream.close()
