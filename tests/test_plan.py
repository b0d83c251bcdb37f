"""One plan: launches and `estimate` accept, reject and choose alike; `translate` counts alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fms_fsdp.__main__ import main
from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.plan import candidates, complete, keep, plan
from fms_fsdp.run.machine import Machine
from fms_fsdp.run.resume_point import ResumePoint
from fms_fsdp.state import RunConfig, TrainMetadata
from tests.cases import cases
from tests.cli import TINY, run
from tests.warm import launch

GPU = "--device=h100_80gb --num_devices=1 --model_variant=tiny"


def planned(*flags: str, devices: int = 8, resume: ResumePoint | None = None) -> RunConfig:
    """Returns the plan of a launch of `tiny` on H100s, by default without data."""
    from fms_fsdp.run.setup import Found

    cfg = parse_flags(TrainConfig, ["--model_variant=tiny", *flags])
    return plan(cfg, Machine.named("h100_80gb", devices), Found(resume=resume or ResumePoint()))


def checkpoint_of(run: RunConfig, step: int) -> ResumePoint:
    metadata = TrainMetadata(step, tokens_seen=step * 64, rows_seen=step, **run.saved_with)
    return ResumePoint(Checkpoint(Path("checkpoints", f"step_{step}"), metadata))


@cases("""
flags | error
--precision=float8 --ffn_hidden_size=100 | --precision (float8) needs sizes that are multiples of 16, and ffn_hidden_size is 100
--num_steps=10 --warmup=100 | --warmup
--checkpoint_schedule=5@ | --checkpoint_schedule=5@ must be INTERVAL@LAST_STEP
--export_interval=1000 --pos_emb=alibi | export
--keep_last_n=1 --keep_best=2 --checkpoint_schedule=5@7 --eval_interval=1000 | --keep_best=2 has nothing to rank
""")
def test_estimate_rejects_what_a_launch_rejects(flags: str, error: str, capsys: Any) -> None:
    assert main(["estimate", *GPU.split(), *flags.split()]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    (line,) = printed.err.splitlines()
    with pytest.raises(ValueError) as caught:
        planned(*flags.split(), devices=1)
    assert line == f"error: {caught.value}" and error in line


def test_estimate_chooses_fsdp_as_launches_do(capsys: Any) -> None:
    """Four A100 of 40 GB hold no 13B model under hsdp."""
    flags = "--model_variant=13b --num_devices=64 --devices_per_node=4"
    assert main(["estimate", "--device=a100_40gb", *flags.split()]) == 0
    assert "nodes of 4, fsdp: 1 replica x 64 shards" in capsys.readouterr().out


def test_translate_counts_ramps_as_launches_do(capsys: Any) -> None:
    words = "torchrun --nproc_per_node 8 x.py --train-iters 300 --seq-length 4096 --lr 1".split()
    words += "--global-batch-size 64 --rampup-batch-size 16 16 1000 --lr-warmup-iters 30".split()
    with pytest.raises(SystemExit):
        main(["translate", *words])
    flags = ["--global_batch_size=64", "--rampup_batch_size=16,16,1000", "--batch_size=2"]
    milestones = planned(*flags, "--num_steps=300", "--warmup=30").milestones
    expected = f"{milestones.warmup:,} steps of warmup, decay from"
    assert (
        f"{expected} {milestones.decay_start:,} to {milestones.decay_end:,}"
        in capsys.readouterr().out
    )


def test_resumed_run_keeps_batch_and_schedule() -> None:
    first = planned("--batch_size=2", "--grad_accum_steps=2", "--num_steps=100")
    resume = checkpoint_of(first, step=10)
    assert keep(first.config, resume).batch == first.batch

    other_ranks = planned("--num_steps=200", devices=4, resume=resume)
    assert other_ranks.batch.global_batch_size == first.batch.global_batch_size == 32
    assert other_ranks.milestones == first.milestones
    assert other_ranks.num_steps == 200

    by_flags = planned("--global_batch_size=16", "--warmup=5", "--num_steps=100", resume=resume)
    assert by_flags.batch.global_batch_size == 16
    assert by_flags.milestones.warmup == 5


@pytest.mark.parametrize(("schedule", "decay"), [("linear", 200), ("wsd", 330)])
def test_resumed_ramp_accepts_its_own_warmup(schedule: str, decay: int) -> None:
    """The tokens of past steps are known on average alone: the warmup of 17,920 seemed to take 32,573."""
    flags = ["--seq_length=128", f"--lr_schedule={schedule}", "--num_steps=60", "--warmup=0.5"]
    flags += [f"--lr_decay={decay}samples", "--batch_size=1", "--global_batch_size=16"]
    first = planned(*flags, "--rampup_batch_size=4,4,300", devices=1)
    sequences = first.batch.sequences_in(58)
    metadata = TrainMetadata(58, sequences * 128, sequences, **first.saved_with)
    resume = ResumePoint(Checkpoint(Path("checkpoints", "step_58"), metadata))
    again = planned(*flags, "--rampup_batch_size=4,4,300", devices=1, resume=resume)
    assert again.milestones == first.milestones


def test_new_weights_keep_nothing() -> None:
    first = planned("--batch_size=4", "--num_steps=100")
    weights = replace(checkpoint_of(first, step=10), weights_only=True)
    assert planned("--num_steps=50", resume=weights) == planned("--num_steps=50")


def test_candidates_are_ordered_by_preference() -> None:
    flags = ["--model_variant=7b", "--recompute=auto", "--batch_size=auto"]
    cfg = parse_flags(TrainConfig, [*flags, "--global_batch_size=64", "--num_steps=10"])
    machine = Machine.named("h100_80gb", 16)
    groups = candidates(complete(cfg, machine), machine)
    strategies = [group[0].dims.strategy for group in groups]
    assert strategies == ["hsdp"] * 7 + ["fsdp"] * 7
    kinds = [group[0].config.parallel.recompute for group in groups[:7]]
    assert kinds == ["none", "cheap", "ops", "blocks", "blocks", "blocks", "blocks"]
    for group in groups:
        assert [run.batch.batch_size for run in group] == [4, 2, 1]
        assert {run.batch.global_batch_size for run in group} == {64}


def break_prediction() -> None:
    """Lets the prediction of memory fail, as with a version of torch that it does not know."""
    from fms_fsdp.predict import memory

    def fail(*_: object) -> None:
        raise RuntimeError("no such\noperator")

    memory.units = memory.cost = fail  # type: ignore[assignment]


def test_failing_prediction_ends_no_training(tmp_path: Path) -> None:
    flags = [*TINY, "--trackers=none", "--num_steps=1", f"--output_dir={tmp_path}"]
    line = "memory: unknown (RuntimeError: no such operator)"
    dry = launch([*flags, "--dry_run"], before=break_prediction)
    assert dry.returncode == 0 and dry.stdout.count(line) == 1, dry.stderr
    trained = launch(flags, before=break_prediction)
    assert trained.returncode == 0 and trained.stdout.count(line) == 1, trained.stderr


def test_auto_requires_a_prediction(tmp_path: Path) -> None:
    flags = [*TINY, "--trackers=none", "--num_steps=1", f"--output_dir={tmp_path}"]
    ended = launch([*flags, "--recompute=auto"], before=break_prediction)
    assert ended.returncode == 1 and not (tmp_path / "status.json").exists()
    (line,) = ended.stderr.splitlines()
    assert line.startswith("failed: memory cannot be predicted (RuntimeError: no such operator)")
    assert run(*flags).returncode == 0
