"""Layouts that the axes accept; tests/bad_input.txt has those that they reject."""

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


def test_zbv_requires_a_recent_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = dict(pp_size=2, pp_schedule="zbv", batch_size=4)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    with pytest.raises(ValueError, match=r"--pp_schedule=zbv requires torch 2.13 \(this is 2.11.0"):
        check(**given)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    check(**given)
    with pytest.raises(ValueError, match=r"--pp_schedule=zbv splits .*, which compiled blocks can"):
        check(**given, use_torch_compile=True)
    with pytest.raises(ValueError, match=r"--recompute=.*zbv|zbv.*--recompute="):
        check(**given, recompute="ops")  # died in the first step


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


@pytest.mark.slow
def test_pipeline_rejects_the_batch_of_its_checkpoint(tmp_path: Path) -> None:
    """The batch of this launch would do; that of the run, which is kept, would not."""
    flags = [*TINY, "--num_layers=4", "--num_steps=2", f"--output_dir={tmp_path / 'run'}"]
    launch(last_of_each([*flags, "--batch_size=1", "--grad_accum_steps=4", "--exit_step=1"]), 0)
    assert (tmp_path / "run" / "checkpoints" / "step_1").is_dir()
    result = launch(last_of_each([*flags, "--pp_size=2"]), 2)
    assert result.statuses == [2, 2] and result.stderr.count("\n") == 1, result.stderr
    assert "--pp_schedule=1f1b cannot use 1 micro-batches on 2 ranks" in result.stderr
