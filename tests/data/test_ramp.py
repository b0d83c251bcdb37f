"""A batch that grows: its steps as arithmetic, and that it does not change the order of sequences."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.config import BatchPlan, TrainConfig, TrainingConfig, plan_batch
from fms_fsdp.data.batch import fingerprint
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.data.inspection import end_of_epochs
from fms_fsdp.data.stream import TokenStream
from fms_fsdp.run.data_stream import open_stream
from fms_fsdp.run.resume_point import ResumePoint
from fms_fsdp.state import TrainMetadata
from tests.data.corpora import VOCAB, Files, write_corpus


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_corpus(
        tmp_path_factory.mktemp("corpus"), {"a": [6000], "b": [3000, 2000], "c": [1500]}
    )


def test_ramp_of_tr1_13b_has_its_published_steps() -> None:
    """16 sequences and 16 more every 79,365 samples, up to 1024 after 5M samples.

    Its chronicle counts 4960, 2480, 1653, 1240 steps: the quotients; whole steps are one more.
    """
    batch = BatchPlan(1024, 1, 1, (16, 16, 5_000_000))
    phases = batch.phases()
    steps = [after.step - before.step for before, after in pairwise(phases)]
    assert len(steps) == 63 and steps[:6] == [4961, 2480, 1654, 1240, 992, 827]
    assert phases[-1] == (23_456, 5_000_528, 1024)
    assert batch.steps_for(216_320) == 8641 and batch.sequences_in(2000) == 32_000


def test_ramp_equals_counting_step_by_step() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        start, increment, count = draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 12)
        end, samples = start + count * increment, draw.randint(1, 900)
        multiple = draw.choice([number for number in range(1, end + 1) if end % number == 0])
        batch = BatchPlan(end, 1, 1, (start, increment, samples, multiple))
        seen = first = draw.choice([0, draw.randint(0, 1000)])
        phases, ends = batch.phases(first), [0]
        for steps in range(300):
            assert batch.sequences_in(steps, first) == seen - first
            interval = min(count, seen * count // samples)
            seen += max(multiple, (start + interval * increment) // multiple * multiple)
            ends.append(seen - first)
        assert all(before.batch < after.batch for before, after in pairwise(phases))
        for number in range(0, ends[-1], 7):
            expected = next(step for step, end in enumerate(ends) if end >= number)
            assert batch.steps_for(number, first) == expected


@pytest.mark.parametrize("rampup", [(4, 4, 90), (5, 1, 90, 4)], ids=["exact", "rounded"])
def test_ramp_resumes_at_any_step_and_world(files: Files, rampup: tuple[int, ...]) -> None:
    flags: dict[str, Any] = {"datasets": tuple("abc"), "weights": (0.37, 0.41, 0.22)}
    flags |= {"seq_length": 32, "rampup": rampup}
    with files.stream(12, **flags) as stream:
        whole = [stream.next_batch() for _ in range(20)]
    sizes = [len(batch.tokens_BS) for batch in whole]
    assert sizes == sorted(sizes) and {*sizes} == {4, 8, 12}
    state = None
    for step in range(1, 21):
        total, world = 0, 1 + step % 2
        for rank in range(world):
            with files.stream(12, rank, world, **flags) as stream:
                if state is not None:
                    assert stream.load_state_dict(state, step - 1) == []
                batch = stream.next_batch()
                total += fingerprint(batch, rank * len(batch.tokens_BS))
                saved = stream.state_dict()
        state = saved
        assert total % 2**64 == fingerprint(whole[step - 1], 0), step


def test_fresh_data_continue_the_ramp(files: Files) -> None:
    batch = BatchPlan(8, 1, 1, (2, 2, 30))
    cfg = TrainConfig(data=files.section(datasets=("a",), seq_length=32))
    saved = TrainMetadata(10, rows_seen=batch.sequences_in(10))
    resume = ResumePoint(Checkpoint(Path("step_10"), saved), fresh_data=True)
    stream, _ = open_stream(cfg, batch, VOCAB, open_corpus(cfg.data), resume)
    with cast(TokenStream, stream):
        rows = [len(stream.next_batch().tokens_BS) for _ in range(10)]
    assert sum(rows) == batch.sequences_in(20) - batch.sequences_in(10)


def section(**flags: Any) -> TrainingConfig:
    return TrainingConfig(**flags)


def test_rounded_batches_do_not_depend_on_ranks() -> None:
    flags = {"global_batch_size": 24, "rampup_batch_size": (3, 3, 100)}
    rounded = section(**flags, rampup_round=8, batch_size=4)
    for ranks in (1, 2):
        plan = plan_batch(rounded, ranks)
        assert plan.rampup == (3, 3, 100, 8)
        assert [phase.batch for phase in plan.phases()] == [8, 16, 24]


def test_num_epochs_become_a_step(files: Files) -> None:
    flags: dict[str, Any] = {"datasets": ("a", "c"), "weights": (1.0, 3.0), "seq_length": 32}
    total = {name: files.num_tokens(name) // 32 for name in ("a", "c")}
    for rampup in ((), (2, 2, 60)):
        with files.stream(8, rampup=rampup, **flags) as stream:
            taken, ends = {"a": 0, "c": 0}, dict[str, int]()
            for step in range(1, 200):
                for address in stream.order.addresses(step):
                    taken[address.source] += 1
                if taken["c"] >= 2 * total["c"]:
                    ends.setdefault("c", step)
                if sum(taken.values()) >= sum(total.values()):
                    ends.setdefault("", step)
            assert ends["c"] == end_of_epochs(stream, "c", 2.0, 0)
            assert ends[""] == end_of_epochs(stream, "", 1.0, 0)


def test_num_epochs_may_end_with_the_first_step(files: Files) -> None:
    """The error named --step=0, which no flag of a run sets."""
    total = files.num_tokens("c") // 32
    with files.stream(total, datasets=("c",), seq_length=32) as stream:
        for first in (0, 5):  # 5: fresh data for a checkpoint
            stream.begin_after(first)
            for epochs in (1e-6, 0.01, 1.0):
                assert end_of_epochs(stream, "c", epochs, first) == first + 1
            assert end_of_epochs(stream, "c", 1.5, first) == first + 2


def test_num_epochs_are_parsed() -> None:
    assert section(num_epochs="-1", num_steps=3).epochs() is None
    assert section(num_epochs="web/en:1.5").epochs() == ("web/en", 1.5)


def test_rampup_micro_batch_takes_the_largest_divisor() -> None:
    flags = section(
        rampup_batch_size=(2, 2, 100), rampup_micro_batch=True, batch_size=8, global_batch_size=24
    )
    for plan in (plan_batch(flags, 1), plan_batch(flags, 1, BatchPlan(2, 12, 1))):
        assert (plan.batch_size, plan.grad_accum_steps) == (8, 3)
        found = [plan.micro_batch_at(batch) for batch in range(2, 26, 2)]
        assert found == [2, 4, 6, 8, 5, 6, 7, 8, 6, 5, 2, 8]
    flags = replace(flags, batch_size=6)
    two = plan_batch(flags, 2)
    assert [two.micro_batch_at(batch // 2) for batch in (2, 8, 10, 14, 24)] == [1, 4, 5, 1, 6]
    with pytest.raises(ValueError, match="divisible by 4 .*, unlike 2, 6, 10, 14, 18; set "):
        plan_batch(flags, 4)
    fixed = section(rampup_batch_size=(8, 8, 100), batch_size=4, global_batch_size=24)
    assert [plan_batch(fixed, 1).micro_batch_at(batch) for batch in (8, 16, 24)] == [4, 4, 4]
    default = section(rampup_batch_size=(2, 2, 100), rampup_micro_batch=True)
    assert plan_batch(default, 2, BatchPlan(6, 4, 1)).batch_size == 6
