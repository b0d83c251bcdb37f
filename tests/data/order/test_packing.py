import numpy as np
import pytest

from fms_fsdp.data.order.packing import Cuts, pack_concat, shuffled
from fms_fsdp.extras.bestfit import pack_bestfit


def random_lengths(rng: np.random.Generator, num_rows: int, seq_length: int, mean: float) -> np.ndarray:
    total, lengths = num_rows * seq_length, []
    while total:
        length = min(total, int(rng.lognormal(np.log(mean), 1.0)) + 1)
        lengths.append(length)
        total -= length
    return np.array(lengths)


def covers_every_token_once(cuts: Cuts, lengths: np.ndarray) -> bool:
    starts = np.cumsum(lengths) - lengths
    tokens = np.concatenate(
        [np.arange(a, a + n) for a, n in zip(starts[cuts.piece] + cuts.skip, cuts.length, strict=True)]
    )
    return bool((np.sort(tokens) == np.arange(lengths.sum())).all())


@pytest.mark.parametrize("seed", range(20))
def test_both_packings_keep_the_multiset_of_tokens_and_fill_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seq_length, num_rows = int(rng.integers(2, 64)), int(rng.integers(1, 80))
    lengths = random_lengths(rng, num_rows, seq_length, float(rng.uniform(1, 3 * seq_length)))
    for cuts in (pack_concat(lengths, seed), pack_bestfit(lengths, seed, seq_length)):
        assert covers_every_token_once(cuts, lengths)
        assert (cuts.length > 0).all()
    edges = np.cumsum(pack_bestfit(lengths, seed, seq_length).length)
    assert np.isin(np.arange(1, num_rows + 1) * seq_length, edges).all()  # no cut crosses a row's edge


def test_bestfit_splits_few_documents_that_fit_a_row() -> None:
    rng = np.random.default_rng(0)
    lengths = random_lengths(rng, 1024, 4096, 400)
    cuts = pack_bestfit(lengths, 1, 4096)
    short = lengths <= 4096
    parts = np.bincount(cuts.piece, minlength=len(lengths))
    share_split = (parts[short] > 1).mean()
    assert share_split < 0.02, share_split
    concat_edges = np.cumsum(pack_concat(lengths, 1).length)
    assert len(np.setdiff1d(np.arange(1, 1024) * 4096, concat_edges)) > 10 * (parts[short] > 1).sum()


def test_shuffles_differ_by_key() -> None:
    assert (shuffled(1000, 1) != shuffled(1000, 2)).mean() > 0.98
    assert (np.sort(shuffled(1000, 1)) == np.arange(1000)).all()
