"""Layouts that the axes reject: sizes they cannot divide, schedules that cannot use the batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fms_fsdp.config import BatchPlan, ModelConfig, ParallelConfig, TrainConfig
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.dims import plan_dims
from fms_fsdp.distributed.world import World
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.parallel.layout import check_layout, resolve_cp_method, sequence_multiple
from fms_fsdp.run.startup_log import axes_across_nodes, describe_axes
from tests.cli import ROOT, TINY, last_of_each
from tests.parallel.features import features_table
from tests.warm import launch

SHAPE = TransformerConfig(4, 64, 96, 8, 2, 131, max_seq_len=128)


def check(world: int = 8, batch_size: int = 2, shape: Any = None, **flags: Any) -> None:
    section = ParallelConfig(**flags)
    config = TrainConfig(parallel=section, model=ModelConfig(model_variant="tiny"))
    config = replace(config, data=replace(config.data, seq_length=128))
    dims = plan_dims(section, "tiny", World(0, 0, world, world))
    batch = BatchPlan(batch_size, 1, dims.size("dp"))
    model = replace(SHAPE, **(shape or {}))
    check_layout(config, model, dims, batch, is_compiled=bool(section.use_torch_compile))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            dict(tp_size=8, shape=dict(num_attention_heads=4)),
            r"--tp_size=8 must divide 4 query heads",
        ),
        (
            dict(
                tp_size=6,
                world=6,
                shape=dict(num_attention_heads=24, num_kv_heads=4, hidden_size=96),
            ),
            r"--tp_size=6 must divide 24 query heads and 4 key/value heads .*; valid sizes: 1, 2, 4, 8, 12, 24",
        ),
        (
            dict(tp_size=4, shape=dict(ffn_hidden_size=98)),
            r"--tp_size=4 must divide ffn_hidden_size=98",
        ),
        (
            dict(tp_size=8, shape=dict(vocab_size=9)),
            r"--tp_size=8 leaves ranks without rows of the vocabulary \(9\)",
        ),
        (
            dict(cp_size=8, tp_size=2, world=16, cp_method="ulysses"),
            r"--cp_size=8 must divide 4 heads per tp rank for --cp_method=ulysses; valid sizes: 1, 2, 4",
        ),
        (
            dict(cp_size=3, tp_size=2, world=6, cp_method="gather"),
            r"--seq_length=128 must be divisible by 6 \(because of --cp_size, --tp_size\); closest",
        ),
        (dict(pp_size=8), r"--pp_size=8 makes 8 stages of 4 layers"),
        (
            dict(pp_size=2, pp_micro_batch_size=2, batch_size=3),
            r"--pp_micro_batch_size=2 must divide --batch_size=3",
        ),
        (
            dict(pp_size=4, batch_size=2),
            r"--pp_schedule=1f1b cannot use 2 micro-batches on 4 ranks; set --batch_size=4",
        ),
        (
            dict(pp_size=2, pp_schedule="interleaved", batch_size=5),
            r"--pp_schedule=interleaved cannot use 5 micro-batches",
        ),
        (
            dict(pp_size=2, pp_schedule="zbv", use_torch_compile=True, batch_size=4),
            r"--pp_schedule=zbv splits backward passes, which compiled blocks cannot",
        ),
        (  # heads of different ranks had the same mask
            dict(tp_size=2, sequence_parallel=False, shape=dict(attn_dropout=0.1)),
            "--sequence_parallel=False is not supported with --attn_dropout=0.1",
        ),
        (  # died in the first step
            dict(pp_size=2, pp_schedule="zbv", recompute="ops", batch_size=4),
            "--recompute=.*zbv|zbv.*--recompute=",
        ),
    ],
)
def test_sizes_an_axis_cannot_divide_are_rejected(
    given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")  # of zbv
    with pytest.raises(ValueError, match=message):
        check(**given)


def test_zbv_requires_a_recent_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = dict(pp_size=2, pp_schedule="zbv", batch_size=4)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    with pytest.raises(ValueError, match=r"--pp_schedule=zbv requires torch 2.13 \(this is 2.11.0"):
        check(**given)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    check(**given)


@pytest.mark.parametrize(
    "flags",
    [
        dict(tp_size=8),  # key/value heads are copied
        dict(tp_size=4, cp_size=2),
        dict(tp_size=2, sequence_parallel=False, shape=dict(dropout=0.1)),
        dict(tp_size=2, shape=dict(attn_dropout=0.1, ffn_dropout=0.1)),
        dict(cp_size=8, tp_size=1, cp_method="gather"),
        dict(cp_size=4, sharding_strategy="hsdp", hsdp_shard_size=1),
        dict(pp_size=4, batch_size=4),
        dict(pp_size=2, pp_schedule="gpipe", batch_size=1),
        dict(pp_size=2, pp_schedule="interleaved", batch_size=6),
    ],
)
def test_layouts_that_fit_are_accepted(flags: dict[str, Any]) -> None:
    check(**flags)


def test_cp_method_and_sequence_multiple_follow_heads() -> None:
    assert [resolve_cp_method("auto", 8, 2, cp) for cp in (4, 8)] == ["ulysses", "gather"]
    assert resolve_cp_method("gather", 8, 2, 4) == "gather"
    found = {
        (method, sp): sequence_multiple(method, 2, 4, sp)
        for method in ("ulysses", "gather")
        for sp in (False, True)
    }
    assert found.pop(("ulysses", False)) == 4 and set(found.values()) == {8}
    assert sequence_multiple("gather", 4, 3, True) == 12
    assert sequence_multiple("auto", 2, 1, True) == 2


def test_docs_show_the_table_of_features() -> None:
    page = (ROOT / "docs" / "reference" / "parallelism-tables.md").read_text()
    shown = page.partition("<!-- features -->\n")[2].partition("\n<!-- end -->")[0]
    assert shown == features_table(), "take the table of tests/parallel/features.py"


def test_axes_are_described_with_those_across_nodes() -> None:
    dims = ParallelDims("hsdp", dp_replicate=2, dp_shard=2, pp=2, cp=2, tp=4)
    assert describe_axes(dims) == "2 pipeline x 2 replicas x 2 shards x 2 context x 4 tensor"
    assert describe_axes(ParallelDims("fsdp", dp_shard=2)) == "1 replica x 2 shards"
    assert axes_across_nodes(dims, 16) == ""
    assert axes_across_nodes(dims, 8).startswith(
        "groups of dp_shard leave the node, which has 8 devices: "
    )
    assert axes_across_nodes(dims, 2).startswith("groups of tp, cp, dp_shard leave the node")
    assert axes_across_nodes(ParallelDims("fsdp", dp_shard=64), 8) == ""


REJECTED = {
    "--tp_size=3": "--tp_size=3 must divide the world size (2)",
    "--pp_size=2 --batch_size=1": "cannot use 1 micro-batches on 2 ranks; set --batch_size=2",
}


def test_rejected_layout_is_one_line(tmp_path: Path) -> None:
    for flags, message in REJECTED.items():
        ended = launch(last_of_each([*TINY, *flags.split(), f"--output_dir={tmp_path / 'run'}"]), 2)
        assert ended.statuses == [2, 2], (flags, ended.stderr)
        assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1, ended.stderr
        assert message in ended.stderr and not list(tmp_path.iterdir()), flags


@pytest.mark.slow
def test_pipeline_rejects_the_batch_of_its_checkpoint(tmp_path: Path) -> None:
    """The batch of this launch would do; that of the run, which is kept, would not."""
    flags = [*TINY, "--num_layers=4", "--num_steps=2", f"--output_dir={tmp_path / 'run'}"]
    launch(last_of_each([*flags, "--batch_size=1", "--grad_accum_steps=4", "--exit_step=1"]), 0)
    assert (tmp_path / "run" / "checkpoints" / "step_1").is_dir()
    result = launch(last_of_each([*flags, "--pp_size=2"]), 2)
    assert result.statuses == [2, 2] and result.stderr.count("\n") == 1, result.stderr
    assert "--pp_schedule=1f1b cannot use 1 micro-batches on 2 ranks" in result.stderr
