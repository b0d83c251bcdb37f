"""What a run logs is what `inspect` computes afterwards, through a change of the world and of the mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fms_fsdp.data.batch import fingerprint
from fms_fsdp.tools.inspect_command import describe_sequence, open_run_data
from tests.cli import metrics, trained
from tests.data.corpora import SEP, Files, write_corpus

SEQ = 32
SIZES = {"a": [30_000, 20_000], "b": [4000]}


def count_tokens(
    files: Files, record: dict[str, Any], used: dict[tuple[str, int], np.ndarray]
) -> None:
    """Counts the tokens of a row as `inspect` lists it, by source and epoch."""
    source = record["source"]
    counts = used.setdefault(
        (source, record["epoch"]), np.zeros(files.num_tokens(source), dtype=np.int64)
    )
    for piece in record["pieces"]:
        file = int(piece["file"].removeprefix(f"{source}/shard-").removesuffix(".arrow"))
        first = files.offset(source, file, piece["document"])
        counts[first + piece["start"] : first + piece["stop"]] += 1


@pytest.mark.slow
def test_ranks_train_on_each_token_exactly_once(tmp_path: Path) -> None:
    """2 ranks, then 4 with another mixture and batch; source b passes a complete epoch."""
    files = write_corpus(tmp_path / "corpus", SIZES, mean=60)
    run = tmp_path / "run"
    base = [
        "--model_variant=tiny",
        "--mixed_precision=False",
        "--report_interval=1",
        f"--output_dir={run}",
    ]
    base += [f"--data_path={files.root}", f"--sep_token={SEP}", "--sharding_strategy=fsdp"]
    base += ["--datasets=a,b", "--logical_shards=8", "--checkpoint_interval=4"]
    base.append(f"--seq_length={SEQ}")
    trained(*base, "--weights=3,1", "--global_batch_size=8", "--num_steps=7", nproc=2)
    more = ["--weights=1,2", "--global_batch_size=12", "--batch_size=3", "--num_steps=24"]
    output = trained(*base, *more, nproc=4)
    assert "from step 8: global batch: 8 -> 12" in output
    logged = metrics(run)
    assert sorted(logged) == list(range(1, 25))
    used: dict[tuple[str, int], np.ndarray] = {}
    with open_run_data(str(run)) as data:
        stream = data.stream
        for step, record in logged.items():
            batch = stream.batch_at(step)
            assert record["data_fingerprint"] == f"{fingerprint(batch, 0):016x}", step
            for row, place in enumerate(stream.order.addresses(step)):
                count_tokens(files, describe_sequence(stream, place, batch, row), used)
        assert [len(stream.order.addresses(step)) for step in (7, 8)] == [8, 12]
    assert max(counts.max() for counts in used.values()) == 1, "a token came twice in an epoch"
    whole = used["b", 0]
    assert ("b", 1) in used and whole.sum() == len(whole) // SEQ * SEQ, (
        "all of the first epoch but the rest"
    )
    assert sum(int(counts.sum()) for counts in used.values()) == (7 * 8 + 17 * 12) * SEQ
    assert (
        sum(int(v) for key, v in logged[24].items() if key.startswith("tokens/"))
        == logged[24]["tokens_seen"]
    )
