"""What the axes refuse: sizes that they cannot divide, and features that they do not take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fms_fsdp.config import BatchPlan, ModelConfig, ParallelConfig, TrainConfig
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import plan_dims
from fms_fsdp.distributed.runtime import World
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.parallel.layout import check_layout, resolve_cp_method, sequence_multiple
from fms_fsdp.run.startup_log import axes_across_nodes, describe_axes
from tests.cli import ROOT, TINY, last_of_each
from tests.parallel.features import FEATURES, MODEL_AXES, features_table
from tests.warm import launch

SHAPE = TransformerConfig(4, 64, 96, 8, 2, 131, max_seq_len=128)


def check(world: int = 8, batch_size: int = 2, shape: Any = None, **flags: Any) -> None:
    section = ParallelConfig(**flags)
    config = TrainConfig(parallel=section, model=ModelConfig(model_variant="tiny"))
    config = replace(config, data=replace(config.data, seq_length=128))
    dims = plan_dims(section, "tiny", World(0, 0, world, world))
    batch = BatchPlan(batch_size, 1, dims.size("dp"))
    model, cpu = replace(SHAPE, **(shape or {})), torch.device("cpu")
    check_layout(config, model, dims, batch, cpu)


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
            r"--tp_size=8 is too large for 9 tokens",
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
            dict(pp_size=4, pp_schedule="interleaved", batch_size=4),
            r"--pp_size=4 makes 8 stages of 4 layers",
        ),
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
            r"--pp_schedule=interleaved cannot use 5 micro-batches on 2 ranks",
        ),
        (
            dict(pp_size=2, pp_schedule="zbv", use_torch_compile=True, batch_size=4),
            r"--pp_schedule=zbv splits backward passes, which compiled blocks cannot",
        ),
        (
            dict(pp_size=2, shape=dict(tie_embeddings=True)),
            r"--tie_embeddings is not supported with --pp_size=2; remove one of them",
        ),
        (
            dict(tp_size=2, shape=dict(model_builder="a:b")),
            r"--model_builder is not supported with --tp_size=2",
        ),
    ],
)
def test_what_an_axis_cannot_divide_is_refused_with_what_it_can(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(**given)


def test_zbv_needs_the_torch_that_can_split_its_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = dict(pp_size=2, pp_schedule="zbv", batch_size=4)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    with pytest.raises(ValueError, match=r"--pp_schedule=zbv requires torch 2.13 \(this is 2.11.0"):
        check(**given)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    check(**given)


def test_layouts_that_fit_are_not_refused() -> None:
    for flags in (
        dict(tp_size=8),  # key/value heads are copied
        dict(tp_size=4, cp_size=2),
        dict(cp_size=8, tp_size=1, cp_method="gather"),
        dict(cp_size=4, sharding_strategy="hsdp", hsdp_shard_size=1),
        dict(pp_size=4, batch_size=4),
        dict(pp_size=2, pp_schedule="gpipe", batch_size=1),
        dict(pp_size=2, pp_schedule="interleaved", batch_size=6),
    ):
        check(**flags)  # type: ignore[arg-type]


def test_the_method_of_context_parallelism_follows_the_heads() -> None:
    assert [resolve_cp_method("auto", 8, 2, cp) for cp in (4, 8)] == ["ulysses", "gather"]
    assert resolve_cp_method("gather", 8, 2, 4) == "gather"
    units = [sequence_multiple(method, 4, 3, True) for method in ("ulysses", "gather")]
    assert [
        *units,
        sequence_multiple("gather", 2, 3, False),
        sequence_multiple("auto", 2, 1, True),
    ] == [
        12,
        12,
        6,
        2,
    ]


def test_every_refusal_of_the_table_names_a_flag_and_an_axis() -> None:
    table = features_table()
    for feature in FEATURES:
        assert feature.refused.keys() <= set(MODEL_AXES) and f"| {feature.name} |" in table


def test_the_page_shows_the_table_of_features_and_axes() -> None:
    page = (ROOT / "docs" / "reference" / "parallelism-tables.md").read_text()
    shown = page.partition("<!-- features -->\n")[2].partition("\n<!-- end -->")[0]
    assert shown == features_table(), "take the table of tests/parallel/features.py"


def test_axes_are_told_from_the_outermost_and_those_that_leave_the_node() -> None:
    dims = ParallelDims("hsdp", dp_replicate=2, dp_shard=2, pp=2, cp=2, tp=4)
    assert describe_axes(dims) == "2 pipeline x 2 replicas x 2 shards x 2 context x 4 tensor"
    assert describe_axes(ParallelDims("fsdp", dp_shard=2)) == "1 replicas x 2 shards"
    assert axes_across_nodes(dims, 16) == ""
    assert axes_across_nodes(dims, 8).startswith(
        "groups of dp_shard leave the node, which has 8 devices: "
    )
    assert axes_across_nodes(dims, 2).startswith("groups of tp, cp, dp_shard leave the node")
    assert axes_across_nodes(ParallelDims("fsdp", dp_shard=64), 8) == ""


REFUSED = {
    "--tp_size=3": "--tp_size=3 must divide the world size (2); use --tp_size=1 or 2",
    "--tp_size=2 --num_attention_heads=1 --num_kv_heads=1": "must divide 1 query heads and 1 key/value heads",
    "--cp_size=2 --cp_method=gather --seq_length=62": "--seq_length=62 must be divisible by 4",
    "--pp_size=2 --num_layers=1": "makes 2 stages of 1 layers; use fewer",
    "--pp_size=2 --batch_size=1": "cannot use 1 micro-batches on 2 ranks; set --batch_size=2",
}


def test_ranks_refuse_alike_in_one_line_before_any_work(tmp_path: Path) -> None:
    for flags, words in REFUSED.items():
        ended = launch(last_of_each([*TINY, *flags.split(), f"--output_dir={tmp_path / 'run'}"]), 2)
        assert ended.statuses == [2, 2], (flags, ended.stderr)
        assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1, ended.stderr
        assert words in ended.stderr and not list(tmp_path.iterdir()), flags


def test_a_pipeline_that_cannot_use_the_batch_of_its_checkpoint_is_refused(tmp_path: Path) -> None:
    """The batch of this launch would do; that of the run, which is kept, would not."""
    flags = [*TINY, "--num_layers=4", "--num_steps=2", f"--output_dir={tmp_path / 'run'}"]
    launch(last_of_each([*flags, "--batch_size=1", "--grad_accum_steps=4", "--exit_step=1"]), 0)
    assert (tmp_path / "run" / "checkpoints" / "step_1").is_dir()
    result = launch(last_of_each([*flags, "--pp_size=2"]), 2)
    assert result.statuses == [2, 2] and result.stderr.count("\n") == 1, result.stderr
    assert "--pp_schedule=1f1b cannot use 1 micro-batches on 2 ranks" in result.stderr


def test_zbv_with_recomputed_ops_is_rejected() -> None:
    """It died in the first step: "Trying to backward through the graph a second time"."""
    with pytest.raises(ValueError, match="zbv") as caught:
        check(pp_size=2, pp_schedule="zbv", recompute="ops", batch_size=4)
    assert "--recompute" in str(caught.value)
