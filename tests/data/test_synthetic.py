import subprocess
import sys

import pytest
import torch

from fms_fsdp.config import DataConfig
from fms_fsdp.data.batch import fingerprint
from fms_fsdp.data.stream import TokenStream, build_stream


def stream(
    batch: int = 8,
    rank: int = 0,
    world: int = 1,
    seed: int = 1,
    vocab: int = 1000,
    seq_length: int = 100,
) -> TokenStream:
    section = DataConfig(use_dummy_dataset=True, seq_length=seq_length)
    sizes = {"global_batch_size": batch, "dp_rank": rank, "dp_size": world}
    return build_stream(section, None, seed=seed, vocab_size=vocab, **sizes)


def test_world_size_does_not_change_batches() -> None:
    whole = stream().batch_at(5)
    for world in (2, 8):
        parts = [stream(8, rank, world).batch_at(5) for rank in range(world)]
        assert all(
            torch.equal(torch.cat(columns), column)
            for columns, column in zip(zip(*parts, strict=True), whole, strict=True)
        )


def test_steps_sequences_and_seeds_differ() -> None:
    values = [
        fingerprint(stream(seed=seed).batch_at(step), 0) for seed in (1, 2) for step in (1, 2)
    ]
    assert len(set(values)) == 4
    tokens = stream().batch_at(1).tokens_BS
    assert len(torch.unique(tokens, dim=0)) == 8


def test_skip_steps_have_no_effect() -> None:
    section = DataConfig(use_dummy_dataset=True, seq_length=100, skip_steps="1:5")
    sizes = {"global_batch_size": 8, "dp_rank": 0, "dp_size": 1}
    with build_stream(section, None, seed=1, vocab_size=1000, **sizes) as skipping:
        assert torch.equal(skipping.batch_at(1).tokens_BS, stream().batch_at(1).tokens_BS)


def test_labels_mostly_follow_the_rule() -> None:
    batch = stream(seq_length=4096).batch_at(1)
    assert torch.equal(batch.labels_BS[:, :-1], batch.tokens_BS[:, 1:])
    follows = batch.labels_BS == (5 * batch.tokens_BS + 3) % 256
    assert 0.95 < follows.float().mean() < 0.98
    assert len(torch.unique(batch.tokens_BS)) == 256


@pytest.mark.parametrize("vocab", [2, 200, 128_256])
def test_tokens_are_below_vocab_size(vocab: int) -> None:
    tokens = stream(vocab=vocab).batch_at(1).tokens_BS
    assert 0 <= tokens.min() and tokens.max() < vocab


def test_resume_may_change_the_batch_size() -> None:
    with stream() as first:
        expected = [first.next_batch().tokens_BS for _ in range(4)]
        state = first.state_dict()
    with stream() as again:
        assert again.load_state_dict(state, 2) == []
        assert torch.equal(again.next_batch().tokens_BS, expected[2])
    with stream(batch=4) as smaller:
        assert smaller.load_state_dict(state, 2) == ["global batch: 8 -> 4"]
        smaller.next_batch()
        assert smaller.consumption()["synthetic"]["tokens"] == 20 * 100
    with pytest.raises(ValueError, match=r"--seed=2 does not match the checkpoint \(1\)"):
        stream(seed=2).load_state_dict(state, 2)


@pytest.mark.slow
def test_synthetic_tokens_import_no_pyarrow() -> None:
    code = (
        "import sys; from fms_fsdp.config import DataConfig; from fms_fsdp.data.stream import build_stream;s "
        "= build_stream(DataConfig(use_dummy_dataset=True), None, seed=1, vocab_size=9, global_batch_size=1, "
        "dp_rank=0, dp_size=1);s.next_batch(); s.close(); assert not {'pyarrow', 'sentencepiece', "
        "'torch.distributed.tensor'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
