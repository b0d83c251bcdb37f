"""What a launch chooses by memory: recomputation, rows of a micro-step, and fsdp in place of hsdp."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.config import BF16, ParallelConfig, TrainConfig, resolve_batch
from fms_fsdp.flags import parse_flags, parse_with_origins
from fms_fsdp.mesh import resolve_dims
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.optim.optimizers import state_bytes
from fms_fsdp.planner.auto import MARGIN
from fms_fsdp.record import Saved, read_record
from fms_fsdp.runtime import World
from fms_fsdp.spec.data import Inputs, find_inputs, with_room
from fms_fsdp.spec.difference import differences
from fms_fsdp.spec.machine import Machine, find_machine
from fms_fsdp.spec.origin import Origin
from fms_fsdp.spec.resolve import Spec, resolve
from fms_fsdp.spec.words import describe
from fms_fsdp.tools.estimate import EstimateConfig
from tests.cli import TINY, run, trained
from tests.distributed.launch import run_ranks

BIG = 2**62  # bytes: nothing is too large
SEVEN = ("--model_variant=7b", "--recompute=auto")


def spec_of(
    *flags: str, available: int = BIG, ranks: int = 8, node: int = 8, origin: Origin | None = None
) -> Spec:
    """The launch of a rank of so many GPUs, each with so many bytes; blocks are compiled."""
    given = ["--use_dummy_dataset=True", "--num_steps=9", *flags]
    if not any(flag.startswith("--use_torch_compile") for flag in flags):
        given.append("--use_torch_compile=True")
    cfg = parse_flags(TrainConfig, given)
    world, gpu = World(0, 0, ranks, node), torch.device("cuda", 0)
    dims = resolve_dims(cfg.parallel, cfg.model.name, world)
    machine = Machine(world, gpu, dims, resolve_batch(cfg.training, dims.size("dp")), BF16)
    model = resolve_model(cfg.model, seq_length=cfg.data.seq_length)
    room = {"cuda": available, "cpu": BIG}
    inputs = Inputs(None, model, state_bytes(cfg.optim, model, BF16), (), None, room)
    return resolve(cfg, with_room(cfg, machine, inputs), inputs, origin or Origin())


def expected(spec: Spec, section: ParallelConfig, rows: int = 0) -> int:
    """Bytes that a step of this launch takes with this recomputation and so many rows."""
    plan = spec.batch
    per_rank = plan.batch_size * plan.grad_accum_steps
    rows = rows or plan.batch_size
    plan = replace(plan, batch_size=rows, grad_accum_steps=per_rank // rows)
    return replace(spec, batch=plan, timeline=replace(spec.timeline, batch=plan)).memory(section).expected


def in_order(section: ParallelConfig, *, compiled: bool = True) -> list[ParallelConfig]:
    """The recomputations in the order in which they are tried."""
    names = ["none", "cheap", "ops"] if compiled else ["none", "ops"]
    found = [replace(section, recompute=name, selective_checkpointing="1") for name in names]
    shares = ("1/4", "1/2", "3/4", "1")
    return found + [replace(section, recompute="blocks", selective_checkpointing=share) for share in shares]


def going_on(spec: Spec) -> Origin:
    """The checkpoint of step 4 that the launch wrote."""
    rows, record = 4 * spec.batch.global_batch_size, json.loads(json.dumps(spec.saved_with))
    saved = Saved(4, tokens_seen=rows * spec.seq_length, rows_seen=rows, **record)
    return Origin(Checkpoint(Path("step_4"), saved), True)


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs here are none; what describes a launch would ask them for their kernel of attention."""
    monkeypatch.setattr("fms_fsdp.spec.words.chosen_backend", lambda *args: "flash")


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("ops", [(), ("--recompute_ops=attention",)])
def test_the_first_recomputation_that_fits_is_chosen(ops: tuple[str, ...], compiled: bool) -> None:
    """Without compiled blocks `cheap` is not tried. Where none fits, the last is taken."""
    flags = (*SEVEN, "--batch_size=4", f"--use_torch_compile={compiled}", *ops)
    whole = spec_of(*flags)
    assert whole.config.parallel.recompute == "none"
    order = in_order(whole.config.parallel, compiled=compiled)
    sizes = [expected(whole, section) for section in order]
    for limit in sizes:
        first = next(section for section, size in zip(order, sizes, strict=True) if size <= limit)
        spec = spec_of(*flags, available=limit)
        assert spec.config.parallel == first
        told = spec.chosen["recompute"]
        assert told.startswith("auto chose ") and f"of {limit / 2**30:.1f} GiB a rank" in told
        assert ("(none: " in told) == (first.recompute != "none")
        assert f"recompute: {told}" in describe(spec)
    spec = spec_of(*flags, available=min(sizes) - 1)
    assert spec.config.parallel == order[-1]
    assert spec.chosen["recompute"].startswith("auto found nothing that fits, and takes blocks: about ")


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        (("--global_batch_size=96",), [1, 2, 3, 4, 6, 12]),  # of 12 on each of 8 ranks
        ((), [1, 2]),  # 2 rows x 1 micro-step by default
        (("--grad_accum_steps=3",), [1, 2, 3, 6]),
        (("--global_batch_size=96", "--rampup_batch_size=32,16,500"), [1, 2]),  # 16 rows divide all batches
        (("--global_batch_size=96", "--tp_size=2"), [1, 2, 3, 4, 6, 8, 12, 24]),
        (("--global_batch_size=96", "--pp_size=4", "--pp_micro_batch_size=2"), [8, 16, 24, 48]),
    ],
)
def test_the_most_rows_that_fit_but_for_a_margin_are_chosen(flags: tuple[str, ...], rows: list[int]) -> None:
    """The global batch stays; a pipeline takes rows that its schedule can use."""
    flags = ("--model_variant=7b", "--batch_size=auto", *flags)
    whole = spec_of(*flags)
    section, total = whole.config.parallel, whole.batch.global_batch_size
    assert whole.batch.batch_size == rows[-1]
    sizes = {count: expected(whole, section, count) for count in rows}
    for size in sizes.values():
        for available in (int(size / (1 - MARGIN)) - 2**20, int(size / (1 - MARGIN)) + 2**20):
            spec = spec_of(*flags, available=available)
            fitting = [count for count in rows if sizes[count] <= (1 - MARGIN) * available]
            assert spec.batch.batch_size == max(fitting, default=rows[0])
            assert spec.batch.global_batch_size == total and spec.config.training.batch_size == "auto"
            shape = f"{spec.batch.batch_size} rows x {spec.batch.dp_size} ranks x "
            assert shape in spec.chosen["batch_size"] and "recompute" not in spec.chosen


def test_both_are_the_cheapest_recomputation_and_then_the_most_rows() -> None:
    flags = (*SEVEN, "--batch_size=auto", "--global_batch_size=64")
    whole = spec_of(*flags)
    order = in_order(whole.config.parallel)
    assert (whole.batch.batch_size, whole.config.parallel.recompute) == (8, "none")
    limit = expected(whole, order[2], rows=1)  # ops at one row
    spec = spec_of(*flags, available=limit)
    assert spec.config.parallel == order[2] and spec.batch.batch_size == 1
    assert list(spec.chosen) == ["recompute", "batch_size"]
    limit = expected(whole, order[0], rows=4)
    spec = spec_of(*flags, available=int(limit / (1 - MARGIN)) + 1)
    assert spec.config.parallel == order[0] and spec.batch.batch_size == 4
    assert " (8 rows: " in spec.chosen["batch_size"]


def test_the_name_of_a_run_does_not_depend_on_what_was_chosen() -> None:
    flags = (*SEVEN, "--batch_size=auto", "--global_batch_size=64")
    names = {spec_of(*flags, available=gib * 2**30).config.run_name for gib in (20, 40, 1000)}
    assert names == {parse_flags(TrainConfig, ["--use_dummy_dataset=True", *flags]).run_name}


def test_recomputation_that_an_axis_refuses_is_not_chosen() -> None:
    """In fp32 and compiled, `blocks` and `ops` are refused beside tp."""
    flags = [*SEVEN, "--use_dummy_dataset=True", "--use_torch_compile=True", "--tp_size=2"]
    cfg, world = parse_flags(TrainConfig, flags), World(0, 0, 2, 2)
    dims = resolve_dims(cfg.parallel, "7b", world)
    precision, model = cfg.precision.resolve("fp32"), resolve_model(cfg.model, seq_length=4096)
    machine = Machine(world, torch.device("cuda", 0), dims, resolve_batch(cfg.training, 1), precision)
    inputs = Inputs(None, model, state_bytes(cfg.optim, model, precision), (), None, {"cuda": 1, "cpu": 1})
    assert resolve(cfg, machine, inputs, Origin()).config.parallel.recompute == "cheap"


def test_fsdp_takes_the_place_of_hsdp_only_by_default_and_only_where_it_helps() -> None:
    variant = "--model_variant=13b"
    need = {name: spec_of(variant, f"--sharding_strategy={name}", ranks=64) for name in ("hsdp", "fsdp")}
    hsdp, fsdp = (need[name].memory(need[name].config.parallel).total for name in ("hsdp", "fsdp"))
    assert fsdp < hsdp
    for available, strategy in ((hsdp, "hsdp"), (hsdp - 1, "fsdp"), (fsdp, "fsdp"), (fsdp - 1, "hsdp")):
        spec = spec_of(variant, ranks=64, available=available)
        assert spec.dims.strategy == strategy and spec.config.parallel.sharding_strategy is None
        assert ("sharding_strategy" in spec.chosen) == (strategy == "fsdp")
    told = describe(spec_of(variant, ranks=64, available=hsdp - 1))
    sizes = f"{hsdp / 2**30:.1f} GiB of {(hsdp - 1) / 2**30:.1f} GiB a rank"
    assert f"sharding_strategy: fsdp, because hsdp over 8 devices would need {sizes}" in told
    for flags in (("--sharding_strategy=hsdp",), ("--hsdp_shard_size=4",)):  # what was asked for stays
        assert spec_of(variant, *flags, ranks=64, available=fsdp).dims.strategy == "hsdp"
    assert spec_of("--model_variant=34b", ranks=64, available=1).dims.strategy == "fsdp"


def test_a_run_that_goes_on_keeps_what_was_chosen_while_it_fits() -> None:
    """Also where there is more memory now, and without the margin; no flag counts as changed."""
    flags = (*SEVEN, "--batch_size=auto", "--global_batch_size=64")
    whole = spec_of(*flags)
    first = spec_of(*flags, available=int(expected(whole, in_order(whole.config.parallel)[1], 1) * 1.02))
    kind, rows = first.config.parallel.recompute, first.batch.batch_size
    assert kind == "cheap"
    origin, needed = going_on(first), expected(first, first.config.parallel)
    for available in (needed, BIG):
        again = spec_of(*flags, available=available, origin=origin)
        assert again.config.parallel == first.config.parallel and again.batch == first.batch
        assert again.chosen["recompute"].startswith(f"auto keeps {kind}: about ")
        assert again.chosen["batch_size"].startswith(f"auto keeps {rows} rows x 8 ranks x ")
        assert list(differences(again, origin)) == []
    less = spec_of(*flags, available=needed - 1, origin=origin)
    assert less.config.parallel.recompute != kind
    assert f"({kind}, as before: {needed / 2**30:.1f} GiB)" in less.chosen["recompute"]
    assert any("--recompute cheap -> ops" in line for line in differences(less, origin))


def test_a_run_that_goes_on_chooses_anew_what_no_launch_has_chosen_before() -> None:
    """And what was chosen before is no hindrance to a flag that names something else."""
    given = spec_of("--model_variant=7b", "--recompute=blocks", "--batch_size=1", "--global_batch_size=64")
    again = spec_of(*SEVEN, "--batch_size=auto", "--global_batch_size=64", origin=going_on(given))
    assert (again.config.parallel.recompute, again.batch.batch_size) == ("none", 8)
    other = spec_of("--model_variant=7b", "--recompute=ops", "--batch_size=2", origin=going_on(again))
    assert (other.config.parallel.recompute, other.batch.batch_size) == ("ops", 2)
    assert other.chosen == {} and other.batch.global_batch_size == 64


def test_other_ranks_keep_the_global_batch_and_choose_rows_that_divide_it() -> None:
    flags = ("--model_variant=7b", "--batch_size=auto")
    first = spec_of(*flags, "--global_batch_size=64")
    again = spec_of(*flags, ranks=16, origin=going_on(first))
    assert (first.batch.batch_size, again.batch.batch_size) == (8, 4)
    assert again.batch.global_batch_size == 64


def test_the_record_says_what_was_chosen_and_reads_records_that_do_not() -> None:
    spec = spec_of(*SEVEN, "--batch_size=auto")
    content = json.loads(json.dumps(spec.content))
    record = read_record(content, "config.json")
    assert record.chosen == spec.chosen and record.config == spec.config and record.batch == spec.batch
    del content["resolved"]["chosen"]
    assert read_record(content, "config.json").chosen == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch_size=autox"],
            "--batch_size (autox) must be an integer such as 4096, 5_000_000, 2M or 4Ki, or "
            "auto"),
        (["--num_steps=auto"], "--num_steps (auto) must be an integer"),
        (["--recompute=autox"], "did you mean auto?"),
        (["--batch_size=auto", "--grad_accum_steps=2", "--global_batch_size=8"],
            "--batch_size (auto) has nothing to choose beside --grad_accum_steps (2) and "
            "--global_batch_size (8); leave one flag out"),
        (["--recompute=auto", "--selective_checkpointing=1/2"], "has no effect without --recompute=blocks"),
        (["--recompute=auto", "--fsdp_activation_checkpointing=True"], "must not contradict"),
    ],
)  # fmt: skip
def test_a_flag_that_leaves_no_choice_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_flags(TrainConfig, flags)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_estimate_by_a_rate_has_no_memory_to_choose_by() -> None:
    with pytest.raises(ValueError, match="auto is chosen by the memory of a device; add --device=NAME"):
        parse_flags(EstimateConfig, ["--tflops=400", "--recompute=auto"])


def _choices_of_this_rank() -> dict[str, Any]:
    """What a rank chooses whose own memory is not that of the others."""
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        limit = (2**40, 600 * 2**20)[rank]
        patch.setattr("fms_fsdp.spec.data.available_memory", lambda device, ranks: limit)
        flags = ["--model_variant=194m", "--use_dummy_dataset=True", "--batch_size=auto", "--recompute=auto"]
        sizes = ["--num_layers=4", "--vocab_size=512", "--seq_length=512", "--precision=fp32"]
        parsed = parse_with_origins(TrainConfig, [*flags, *sizes, "--global_batch_size=128"])
        machine = find_machine(parsed, World(rank, rank, 2, 2))
        inputs = find_inputs(parsed.config, machine)
        spec = resolve(parsed.config, machine, inputs, Origin())
        return {**spec.chosen, "available": dict(inputs.available)}


def test_ranks_with_unlike_memory_choose_alike() -> None:
    first, second = run_ranks(_choices_of_this_rank, 2)
    assert first == second and first["available"] == {"cpu": 600 * 2**20}
    assert "of 0.6 GiB a rank" in first["recompute"] and "chose 64 rows" not in first["batch_size"]


def test_a_run_trains_with_what_was_chosen_and_goes_on_with_it(tmp_path: Path) -> None:
    argv = (*TINY, "--trackers=none", "--recompute=auto", "--batch_size=auto", "--global_batch_size=8")
    first = trained(*argv, f"--output_dir={tmp_path}", "--num_steps=2", nproc=2)
    assert "recompute: auto chose none: about " in first
    assert "batch_size: auto chose 4 rows x 2 ranks x 1 micro-steps: about " in first
    content = json.loads((tmp_path / "config.json").read_text())
    assert (content["parallel"]["recompute"], content["training"]["batch_size"]) == ("none", "auto")
    assert content["resolved"]["batch"]["batch_size"] == 4
    again = trained(*argv, f"--output_dir={tmp_path}", "--num_steps=3", nproc=2)
    assert "batch_size: auto keeps 4 rows x 2 ranks x 1 micro-steps: about " in again
    assert "resumed from step 2" in again and "--recompute" not in again.partition("resumed")[2]
    refused = run(*argv, f"--output_dir={tmp_path}", "--batch_size=autox", nproc=2)
    assert refused.returncode == 2 and refused.stderr.count("error: ") == 1
