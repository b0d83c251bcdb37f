"""Choices of a launch by memory: recomputation, micro-batch, and fsdp in place of hsdp."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.config import ParallelConfig, TrainConfig
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.config.values import counted, rounded_bytes
from fms_fsdp.distributed.world import World
from fms_fsdp.plan import plan
from fms_fsdp.run.machine import Machine
from fms_fsdp.run.resume import check_resume, list_changes
from fms_fsdp.run.resume_point import ResumePoint
from fms_fsdp.run.setup import Found
from fms_fsdp.run.startup_log import describe
from fms_fsdp.state import RunConfig, TrainMetadata, read_run_config
from tests.cli import TINY, trained
from tests.distributed.launch import run_ranks
from tests.specs import FRESH, budget, machine, planned

BIG = 2**62  # bytes: nothing is too large
MARGIN = Machine(World(0, 0, 1, 1)).margin
SEVEN = ("--model_variant=7b", "--recompute=auto")


def run_of(
    *flags: str, available: int = BIG, ranks: int = 8, node: int = 8, resume: ResumePoint = FRESH
) -> RunConfig:
    """Returns the launch of a rank of so many GPUs, each with so many bytes; blocks are compiled."""
    given = ["--use_dummy_dataset=True", "--num_steps=9", *flags]
    if not any(flag.startswith("--use_torch_compile") for flag in flags):
        given.append("--use_torch_compile=True")
    cfg = parse_flags(TrainConfig, given)
    gpus = machine("cuda", World(0, 0, ranks, node), memory={"cuda": available, "cpu": BIG})
    return plan(cfg, gpus, Found(resume=resume))


def expected(run: RunConfig, section: ParallelConfig, rows: int = 0) -> int:
    """Returns the bytes that a step needs with this recomputation and micro-batch."""
    plan = run.batch
    per_rank = plan.batch_size * plan.grad_accum_steps
    rows = rows or plan.batch_size
    plan = replace(plan, batch_size=rows, grad_accum_steps=per_rank // rows)
    changed = replace(run, batch=plan, config=replace(run.config, parallel=section))
    need = budget().need(changed)
    return need.total - need.saves  # those are in host memory


def in_order(section: ParallelConfig, *, compiled: bool = True) -> list[ParallelConfig]:
    """Returns the recomputations in the order in which they are tried."""
    names = ["none", "cheap", "ops"] if compiled else ["none", "ops"]
    kinds = [(name, "1") for name in names]
    kinds += [("blocks", fraction) for fraction in ("1/4", "1/2", "3/4", "1")]
    return [
        replace(section, recompute=name, selective_checkpointing=fraction)
        for name, fraction in kinds
    ]


def resumed(run: RunConfig) -> ResumePoint:
    """Returns the start at the checkpoint of step 4 that the launch wrote."""
    rows, saved = 4 * run.batch.global_batch_size, json.loads(json.dumps(run.saved_with))
    metadata = TrainMetadata(4, tokens_seen=rows * run.seq_length, rows_seen=rows, **saved)
    return ResumePoint(Checkpoint(Path("step_4"), metadata))


def summary(run: RunConfig) -> str:
    stream: Any = None
    return describe(run, budget(cuda=BIG, cpu=BIG), stream)


@pytest.mark.parametrize(("compiled", "ops"), [(True, ()), (False, ("--recompute_ops=attention",))])
def test_first_recomputation_that_fits_is_chosen(compiled: bool, ops: tuple[str, ...]) -> None:
    """Without compiled blocks `cheap` is not tried. If none fits, the last is taken."""
    flags = (*SEVEN, "--batch_size=4", f"--use_torch_compile={compiled}", *ops)
    whole = run_of(*flags)
    order = in_order(whole.config.parallel, compiled=compiled)
    assert whole.config.parallel == order[0]
    sizes = [expected(whole, section) for section in order]
    for limit in sizes:
        first = next(section for section, size in zip(order, sizes, strict=True) if size <= limit)
        spec = run_of(*flags, available=limit)
        assert spec.config.parallel == first
        told = spec.chosen["recompute"]
        assert told.startswith("auto chose ") and f"of {rounded_bytes(limit)} per rank" in told
        assert f"recompute: {told}" in summary(spec)
    spec = run_of(*flags, available=min(sizes) - 1)
    assert spec.config.parallel == order[-1]
    assert spec.chosen["recompute"].startswith("auto found nothing that fits, and takes blocks: ")


def test_auto_skips_ops_under_zbv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    flags = (*SEVEN, "--batch_size=4", "--use_torch_compile=False")
    flags += ("--pp_size=2", "--pp_schedule=zbv")
    whole = run_of(*flags)
    for section in in_order(whole.config.parallel, compiled=False):
        chosen = run_of(*flags, available=expected(whole, section)).config.parallel
        assert chosen.recompute != "ops"


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ("--global_batch_size=96", [1, 2, 3, 4, 6, 12]),  # of 12 on each of 8 ranks
        ("--grad_accum_steps=3", [1, 2, 3, 6]),
        ("--global_batch_size=96 --rampup_batch_size=32,16,500", [1, 2]),  # divide all batches
        ("--global_batch_size=96 --pp_size=4 --pp_micro_batch_size=2", [8, 16, 24, 48]),
    ],
)
def test_largest_batch_that_fits_is_chosen(flags: str, rows: list[int]) -> None:
    """With a margin. The global batch stays; a pipeline takes a batch for its schedule."""
    argv = ("--model_variant=7b", "--batch_size=auto", *flags.split())
    whole = run_of(*argv)
    section, total = whole.config.parallel, whole.batch.global_batch_size
    assert whole.batch.batch_size == rows[-1]
    sizes = {count: expected(whole, section, count) for count in rows}
    for size in sizes.values():
        for available in (int(size / (1 - MARGIN)) - 2**20, int(size / (1 - MARGIN)) + 2**20):
            spec = run_of(*argv, available=available)
            plan = spec.batch
            fitting = [count for count in rows if sizes[count] <= (1 - MARGIN) * available]
            assert plan.batch_size == max(fitting, default=rows[0])
            assert plan.global_batch_size == total and spec.config.training.batch_size == "auto"
            shape = f"{counted(plan.batch_size, 'sequence')} x {plan.dp_size} ranks x "
            assert shape in spec.chosen["batch_size"] and "recompute" not in spec.chosen


def test_auto_prefers_cheap_recomputation_to_rows() -> None:
    flags = (*SEVEN, "--batch_size=auto", "--global_batch_size=64")
    whole = run_of(*flags)
    none, _, ops, *_ = in_order(whole.config.parallel)
    for available, section, rows in (
        (BIG, none, 8),
        (expected(whole, ops, rows=1), ops, 1),
        (int(expected(whole, none, rows=4) / (1 - MARGIN)) + 1, none, 4),
    ):
        spec = run_of(*flags, available=available)
        assert (spec.config.parallel, spec.batch.batch_size) == (section, rows)
        assert list(spec.chosen) == ["recompute", "batch_size"]


def test_run_name_does_not_depend_on_choices() -> None:
    flags = (*SEVEN, "--batch_size=auto", "--global_batch_size=64")
    names = {run_of(*flags, available=gib * 2**30).config.run_name for gib in (20, 1000)}
    assert names == {parse_flags(TrainConfig, ["--use_dummy_dataset=True", *flags]).run_name}


def test_fsdp_replaces_default_hsdp_that_cannot_fit() -> None:
    variant = "--model_variant=13b"
    hsdp, fsdp = (
        budget().minimum(run_of(variant, f"--sharding_strategy={name}", ranks=64)).total
        for name in ("hsdp", "fsdp")
    )
    assert fsdp < hsdp
    for available, strategy in (
        (hsdp, "hsdp"),
        (hsdp - 1, "fsdp"),
        (fsdp, "fsdp"),
        (fsdp - 1, "hsdp"),
    ):
        spec = run_of(variant, ranks=64, available=available)
        assert spec.dims.strategy == strategy and spec.config.parallel.sharding_strategy is None
        assert ("sharding_strategy" in spec.chosen) == (strategy == "fsdp")
    told = summary(run_of(variant, ranks=64, available=hsdp - 1))
    sizes = f"{rounded_bytes(hsdp)} of {rounded_bytes(hsdp - 1)} per rank"
    assert f"sharding_strategy: fsdp, because hsdp over 8 devices would need {sizes}" in told
    for flag in ("--sharding_strategy=hsdp", "--hsdp_shard_size=4"):  # given flags stay
        assert run_of(variant, flag, ranks=64, available=fsdp).dims.strategy == "hsdp"


def test_resume_keeps_choices_that_fit() -> None:
    """Also with more memory, and without the margin; no flag counts as changed."""
    flags = (*SEVEN, "--batch_size=auto", "--global_batch_size=64")
    whole = run_of(*flags)
    cheap = expected(whole, in_order(whole.config.parallel)[1], 1)
    first = run_of(*flags, available=int(cheap * 1.02))
    assert first.config.parallel.recompute == "cheap"
    resume, needed = resumed(first), expected(first, first.config.parallel)
    for available in (needed, BIG):
        again = run_of(*flags, available=available, resume=resume)
        assert again.config.parallel == first.config.parallel and again.batch == first.batch
        assert again.chosen["recompute"].startswith("auto keeps cheap: about ")
        kept = f"auto keeps {counted(first.batch.batch_size, 'sequence')} x 8 ranks x "
        assert again.chosen["batch_size"].startswith(kept)
        check_resume(again, resume)
        assert not list(list_changes(again, resume))
    less = run_of(*flags, available=needed - 1, resume=resume)
    assert any("--recompute cheap -> ops" in line for line in list_changes(less, resume))


def test_resume_chooses_only_automatic_settings() -> None:
    """A given flag replaces an earlier choice; other ranks keep the global batch."""
    given = run_of(
        "--model_variant=7b", "--recompute=blocks", "--batch_size=1", "--global_batch_size=64"
    )
    auto = (*SEVEN, "--batch_size=auto", "--global_batch_size=64")
    again = run_of(*auto, resume=resumed(given))
    assert (again.config.parallel.recompute, again.batch.batch_size) == ("none", 8)
    other = run_of("--model_variant=7b", "--recompute=ops", "--batch_size=2", resume=resumed(again))
    assert (other.config.parallel.recompute, other.batch.batch_size) == ("ops", 2)
    assert other.chosen == {} and other.batch.global_batch_size == 64
    more = run_of(*auto[:-1], ranks=16, resume=resumed(again))
    assert (more.batch.batch_size, more.batch.global_batch_size) == (4, 64)


def test_run_config_records_choices() -> None:
    """One without them is read too."""
    spec = run_of(*SEVEN, "--batch_size=auto")
    content = json.loads(json.dumps(spec.content))
    record = read_run_config(content, "config.json")
    assert (record.chosen, record.config, record.batch) == (spec.chosen, spec.config, spec.batch)
    del content["resolved"]["chosen"]
    assert read_run_config(content, "config.json").chosen == {}


def _choices_of_this_rank() -> dict[str, Any]:
    """Returns the choices of a rank whose own memory is not that of the other."""
    rank = int(os.environ["RANK"])
    world = World(rank, rank, 2, 2)
    flags = "--model_variant=194m --use_dummy_dataset=True --batch_size=auto --recompute=auto"
    flags += " --num_layers=4 --vocab_size=512 --seq_length=512 --precision=fp32"
    with pytest.MonkeyPatch.context() as patch:
        limit = (2**40, 600 * 2**20)[rank]
        patch.setattr("fms_fsdp.run.machine.available_memory", lambda device, ranks: limit)
        run = planned([*flags.split(), "--global_batch_size=128"], world)
        cpu = torch.device("cpu")
        measured = Machine.here(world, cpu).measured(cpu)
        return {**run.chosen, "available": dict(measured.memory)}


@pytest.mark.slow
def test_ranks_choose_by_the_least_memory() -> None:
    first, second = run_ranks(_choices_of_this_rank, 2)
    assert first == second and first["available"] == {"cpu": 600 * 2**20}
    assert "of 600 MiB per rank" in first["recompute"]
    assert "chose 64 sequences" not in first["batch_size"]


@pytest.mark.slow
def test_run_trains_and_resumes_with_choices(tmp_path: Path) -> None:
    argv = (*TINY, "--trackers=none", "--recompute=auto", "--batch_size=auto")
    argv = (*argv, "--global_batch_size=8", f"--output_dir={tmp_path}")
    first = trained(*argv, "--num_steps=2", nproc=2)
    assert "recompute: auto chose none: about " in first
    assert "batch_size: auto chose 4 sequences x 2 ranks x 1 accumulation step: about " in first
    content = json.loads((tmp_path / "config.json").read_text())
    assert (content["parallel"]["recompute"], content["training"]["batch_size"]) == ("none", "auto")
    assert content["resolved"]["batch"]["batch_size"] == 4
    again = trained(*argv, "--num_steps=3", nproc=2)
    assert "batch_size: auto keeps 4 sequences x 2 ranks x 1 accumulation step: about " in again
    assert "resuming from step 2" in again and "--recompute" not in again.partition("resuming")[2]
