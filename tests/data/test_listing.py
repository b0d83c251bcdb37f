"""One rank looks at the corpus, the others open it from what that rank sends: they look at no file before
their first row."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fms_fsdp.config import DataConfig, EvalConfig
from fms_fsdp.data.corpus import Corpus, open_corpus
from fms_fsdp.data.stream import TokenStream, build_stream
from fms_fsdp.data.validation import open_held_out, scan_held_out
from tests.data.corpora import VOCAB, Files, write_corpus

SIZES = {"web": [3000, 2000], "code/py": [1500]}


def stream_of(section: DataConfig, corpus: Corpus) -> TokenStream:
    return build_stream(
        section, corpus, seed=1, vocab_size=VOCAB, global_batch_size=4, dp_rank=1, dp_size=2
    )


@pytest.mark.parametrize("uri", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_a_rank_with_a_listing_looks_at_no_file_of_the_corpus_and_has_the_same_rows_and_state(
    tmp_path: Path, uri: bool, counts: bool
) -> None:
    files = write_corpus(tmp_path / "here", SIZES, counts=counts)
    section = files.section(seq_length=32, sep_token=None)
    section = replace(section, data_path=f"file://{files.root}") if uri else section
    with stream_of(section, open_corpus(section)) as stream:
        expected, state = [stream.next_batch() for _ in range(5)], stream.state_dict()
    corpus = pickle.loads(pickle.dumps(open_corpus(section)))
    (tmp_path / "here").rename(tmp_path / "away")  # whatever is looked at now is missed
    with stream_of(section, corpus) as stream:
        assert stream.state_dict() == state and len(state["sources"]["web"][4]) == 8
        assert stream.load_state_dict(state, 2) == []
        (tmp_path / "away").rename(tmp_path / "here")
        for batch in expected[2:]:
            for column, other in zip(batch, stream.next_batch(), strict=True):
                assert torch.equal(column, other)


@pytest.mark.parametrize("uri", [False, True])
def test_a_rank_with_a_listing_looks_at_no_file_of_the_held_out_data(
    tmp_path: Path, uri: bool
) -> None:
    files: Files = write_corpus(tmp_path / "here", SIZES)
    for split in ("validation", "test"):
        write_corpus(files.root / split, SIZES, seed=5 + len(split))
    section = files.section(seq_length=32)
    section = replace(section, data_path=f"file://{files.root}") if uri else section
    flags = EvalConfig(eval_interval=1, eval_test=True, eval_steps=3)
    corpus = open_corpus(section)
    found = scan_held_out(flags, section, corpus, vocab_size=VOCAB)
    expected, scanned = open_held_out(flags, found, 1), pickle.loads(pickle.dumps(found))
    (tmp_path / "here").rename(tmp_path / "away")
    opened = open_held_out(flags, scanned, 1)
    (tmp_path / "away").rename(tmp_path / "here")
    assert len(opened) == 4
    for one, other in zip(expected, opened, strict=True):
        assert (one.group, one.name, one.num_rows) == (other.group, other.name, other.num_rows)
        assert torch.equal(one.rows(0, 3).tokens_BS, other.rows(0, 3).tokens_BS)
        one.stream.close()
        other.stream.close()
