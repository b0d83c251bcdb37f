from pathlib import Path

import numpy as np
import pytest
import torch

from fms_fsdp.data.batch import fingerprint, rows_of_rank
from fms_fsdp.data.stream import TokenStream
from tests.data.corpora import Files, write_corpus
from tests.data.oracle import Used, check_epoch, check_step, rows_of

SIZES = {"web": [9000, 1, 4000], "lang=en/dataset=code": [5000], "tiny": [150]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_corpus(tmp_path_factory.mktemp("corpus"), SIZES)


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def random_sizes(rng: np.random.Generator) -> dict[str, list[int]]:
    """Uneven shards, of which some are empty, and sources from one row to some thousand."""
    return {
        f"s{i}": [int(n) for n in rng.lognormal(rng.uniform(4, 8.3), 0.8, size=rng.integers(1, 5))] + [600]
        for i in range(int(rng.integers(1, 4)))
    }


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_each_token_comes_exactly_once_an_epoch_for_three_epochs_with_true_labels(
    tmp_path: Path, seed: int, packing: str
) -> None:
    rng = np.random.default_rng(seed)
    layout, stored = ("lists", "scalars")[seed % 2], bool(seed // 2 % 2)
    files = write_corpus(
        tmp_path, random_sizes(rng), seed=seed, layout=layout, stored=stored, mean=rng.choice([5, 40, 300])
    )
    seq_length = int(rng.choice([16, 31, 64, 200]))
    stream = files.stream(
        4, seed=seed, seq_length=seq_length, packing=packing, logical_shards=int(rng.choice([1, 8, 64]))
    )
    used: Used = {}
    step = 0
    while min(float(c["epoch"]) for c in rows_of(stream).consumption(step).values()) < 3:
        step += 1
        check_step(files, stream, step, used)
    for source in files.documents:
        for epoch in range(3):
            check_epoch(files, used, source, epoch, seq_length)


def test_epochs_differ_in_order_and_in_cuts(files: Files) -> None:
    stream = files.stream(1, seq_length=32, datasets=("web",), weights=(1.0,))
    num_rows = files.num_tokens("web") // 32
    first, second = (
        {tuple(stream.batch_at(epoch * num_rows + i + 1).tokens_BS[0].tolist()) for i in range(num_rows)}
        for epoch in (0, 1)
    )
    assert len(first & second) < num_rows / 20


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_the_global_batch_is_the_same_at_every_world_size(files: Files, packing: str) -> None:
    whole = files.stream(24, seq_length=32, packing=packing)
    for step in (1, 2, 50):
        expected = whole.batch_at(step)
        total = fingerprint(expected, 0)
        for world in (1, 2, 3, 4, 6, 8, 12, 24):
            ranks = [files.stream(24, rank, world, seq_length=32, packing=packing) for rank in range(world)]
            parts = [rank.batch_at(step) for rank in ranks]
            assert same(tuple(torch.cat(columns) for columns in zip(*parts, strict=True)), expected)
            firsts = range(0, 24, 24 // world)
            sums = sum(fingerprint(part, first) for part, first in zip(parts, firsts, strict=True))
            assert sums % 2**64 == total


def test_fingerprint_tells_rows_tokens_and_labels_apart(files: Files) -> None:
    batch = files.stream(4, seq_length=32).batch_at(1)
    value = fingerprint(batch, 0)
    assert fingerprint(batch, 1) != value
    for column in (0, 1):
        changed = type(batch)(*(tensor.clone() for tensor in batch))
        changed[column][2, 5] += 1
        assert fingerprint(changed, 0) != value
    swapped = type(batch)(*(tensor.flip(0) for tensor in batch))
    assert fingerprint(swapped, 0) != value


def run(stream: TokenStream, steps: int) -> list[int]:
    return [fingerprint(stream.next_batch(), 0) for _ in range(steps)]


@pytest.mark.parametrize("prefetch_ahead", [0, 1, 3])
def test_resume_at_every_step_continues_the_run(files: Files, prefetch_ahead: int) -> None:
    with files.stream(4, seq_length=64) as stream:
        whole = run(stream, 30)
    with files.stream(4, seq_length=64) as stream:
        for step in range(30):
            state = stream.state_dict()
            with files.stream(4, seq_length=64) as resumed:
                assert resumed.load_state_dict(state, step) == []
                assert run(resumed, min(2, 30 - step)) == whole[step : step + 2]
                if prefetch_ahead:  # back to an earlier point with batches in the air
                    resumed.load_state_dict(state, step)
                    assert run(resumed, 1) == whole[step : step + 1]
            stream.next_batch()


def test_state_is_the_same_on_every_rank_small_and_json(tmp_path: Path) -> None:
    import json

    sizes = {f"lang=en/dataset=source-{i:02d}": [2000] for i in range(20)}
    files = write_corpus(tmp_path, sizes)
    states = []
    for rank in range(4):
        with files.stream(8, rank, 4, seq_length=32) as stream:
            stream.next_batch()
            states.append(json.dumps(stream.state_dict()))
    assert len(set(states)) == 1
    assert len(states[0]) <= 4096
    assert json.loads(states[0]) == stream.state_dict()


def test_order_of_flags_changes_nothing(files: Files) -> None:
    a = files.stream(
        6, seq_length=32, datasets=("web", "lang=en/dataset=code", "tiny"), weights=(0.5, 0.3, 0.2)
    )
    b = files.stream(
        6, seq_length=32, datasets=("tiny", "web/", "./lang=en/dataset=code"), weights=(2.0, 5.0, 3.0)
    )
    assert a.state_dict() == b.state_dict()
    assert same(a.batch_at(7), b.batch_at(7))


def test_weights_are_shares_of_tokens(files: Files) -> None:
    with files.stream(
        10, seq_length=16, datasets=("web", "lang=en/dataset=code"), weights=(3.0, 1.0)
    ) as stream:
        run(stream, 40)
        tokens = {name: entry["tokens"] for name, entry in stream.consumption().items()}
    assert sum(tokens.values()) == 40 * 10 * 16
    assert abs(tokens["web"] - 300 * 16) <= 2 * 16


def test_default_weights_follow_the_tokens(files: Files) -> None:
    weights = files.stream(1, seq_length=16).state_dict()["history"][0]["weights"]
    total = sum(files.num_tokens(name) for name in SIZES)
    for name in SIZES:
        assert weights[name] == pytest.approx(65536 * files.num_tokens(name) / total, abs=1)


def test_document_mask_hides_the_first_token_of_the_next_document_only(files: Files) -> None:
    plain, masked = (files.stream(8, seq_length=64, document_mask=mask).batch_at(3) for mask in (False, True))
    assert torch.equal(plain.tokens_BS, masked.tokens_BS)
    differ = plain.labels_BS != masked.labels_BS
    assert differ.any()
    assert (masked.labels_BS[differ] == -100).all()
    assert (plain.tokens_BS[differ] == 3).all()


def test_share_of_masked_labels_is_small_at_a_real_block_size(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, {"web": [900_000]}, mean=600)
    stream = files.stream(64, seq_length=512)
    labels = torch.stack([stream.batch_at(step).labels_BS for step in range(1, 28)])
    assert (labels == -100).float().mean() < 1e-3


def test_documents_of_a_window_follow_one_another_as_in_a_random_shuffle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serial test: from which of the window's 16 blocks neighbours come, 16 x 16 cells; chi^2 / dof of a
    random order is 1."""
    monkeypatch.setattr("fms_fsdp.data.order.tapes.BLOCK_TOKENS", 4096)
    files = write_corpus(tmp_path, {"web": [600_000]}, mean=12)
    stream = files.stream(1, seq_length=64, logical_shards=1)
    block_tokens = stream.state_dict()["fit"]["64"]["web"][2]
    assert stream.state_dict()["fit"]["64"]["web"][1] == 16
    starts = np.cumsum([0] + [len(document) for document in files.documents["web"][0]])
    cells = np.zeros((16, 16))
    order = rows_of(stream).order
    spans = [order.spans(order.addresses(step)[0])[0] for step in range(1, 8000, 100)]
    for span in {span.window: span for span in spans if span.tape >= 0}.values():
        pieces = rows_of(stream).packed(span)
        position = starts[pieces.document] + pieces.start
        _, block = np.unique(position // block_tokens, return_inverse=True)
        block %= 16
        np.add.at(cells, (block[:-1], block[1:]), 1)
    expected = np.outer(cells.sum(axis=1), cells.sum(axis=0)) / cells.sum()
    assert cells.sum() > 20000
    assert 0.6 < ((cells - expected) ** 2 / expected).sum() / 225 < 1.4


def test_layouts_and_stored_separators_give_the_same_batches(tmp_path: Path) -> None:
    batches = []
    for layout in ("lists", "scalars"):
        for stored in (False, True):
            files = write_corpus(tmp_path / f"{layout}{stored}", SIZES, layout=layout, stored=stored)
            batches.append(files.stream(8, seq_length=64).batch_at(20))
    assert all(same(batches[0], batch) for batch in batches[1:])


def test_counts_file_changes_nothing(tmp_path: Path) -> None:
    with_counts = write_corpus(tmp_path / "a", SIZES)
    without = write_corpus(tmp_path / "b", SIZES, counts=False)
    assert same(
        with_counts.stream(4, seq_length=64).batch_at(5), without.stream(4, seq_length=64).batch_at(5)
    )


def test_seeds_differ(files: Files) -> None:
    a, b = (files.stream(4, seed=seed, seq_length=64).batch_at(1) for seed in (1, 2))
    assert not torch.equal(a.tokens_BS, b.tokens_BS)


def test_batches_are_int64_and_int32(files: Files) -> None:
    with files.stream(2, seq_length=64) as stream:
        batch = stream.next_batch()
    assert [tensor.dtype for tensor in batch] == [torch.int64, torch.int64, torch.int32, torch.int32]
    assert all(tensor.shape == (2, 64) for tensor in batch)


def test_max_epochs_ends_the_run_at_a_step_known_beforehand(files: Files) -> None:
    with files.stream(
        4, seq_length=64, datasets=("web", "tiny"), weights=(1.0, 1.0), max_epochs=2.0
    ) as stream:
        last = stream.last_step
        assert last is not None and last == 2 * (files.num_tokens("tiny") // 64) * 2 // 4
        run(stream, last)
        with pytest.raises(ValueError, match=f"max_epochs is reached after step {last} by source tiny"):
            stream.next_batch()


def test_data_may_begin_after_any_step(files: Files) -> None:
    """Steps 8, 9, … are then what 1, 2, … would have been, and a resume from one of them keeps that."""
    plain, late = files.stream(4, seq_length=32), files.stream(4, seq_length=32)
    late.begin_after(7)
    assert [same(late.next_batch(), plain.batch_at(step)) for step in range(1, 6)] == [
        True
    ] * 5 and late.step == 12
    again = files.stream(4, seq_length=32)
    again.load_state_dict(late.state_dict(), 12)
    assert [same(again.next_batch(), plain.batch_at(step)) for step in range(6, 9)] == [True] * 3
    assert again.consumption() == {name: used for name, used in plain.rows.consumption(8).items()}


def test_rows_that_do_not_divide_over_the_ranks_are_refused() -> None:
    assert [rows_of_rank(6, rank, 3) for rank in range(3)] == [(0, 2), (2, 4), (4, 6)]
    with pytest.raises(ValueError, match=r"--global_batch_size \(7\) must be a multiple of the number of"):
        rows_of_rank(7, 0, 3)
