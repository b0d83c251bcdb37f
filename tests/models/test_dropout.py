"""Dropout: off in evaluation, repeated by the seed of a step and by recomputation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fms_fsdp.config import FP32, ParallelConfig, TrainConfig
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.llama import Llama
from fms_fsdp.parallel import activation_checkpointing
from fms_fsdp.parallel.activation_checkpointing import apply_activation_checkpointing
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.train import StepSettings, seed_dropout
from tests.models.test_families import build, labelled
from tests.specs import resolved

BASE = TransformerConfig(2, 64, 96, 4, 2, 97, max_seq_len=48)
RATES = [{"dropout": 0.1}, {"attn_dropout": 0.2}, {"ffn_dropout": 0.3}]
TOGETHER = {"dropout": 0.1, "attn_dropout": 0.2, "ffn_dropout": 0.3}


@pytest.mark.parametrize(
    ("rates", "segment"), [*((rates, 1) for rates in RATES), (TOGETHER, 0), (TOGETHER, 2)], ids=str
)
def test_seed_and_recomputation_repeat_the_masks(rates: dict[str, float], segment: int) -> None:
    mesh = Mesh(ParallelDims("none"), 0, "cpu")

    def gradients(step: int, segment: int) -> list[torch.Tensor]:
        model = build(replace(BASE, **rates))
        if segment:
            section = ParallelConfig(recompute="blocks", recompute_segment=segment)
            apply_activation_checkpointing(model, section, compiled=False)
        seed_dropout(1, step, mesh)
        loss, _ = model(*labelled(BASE))
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    one = gradients(1, 0)
    torch.testing.assert_close(gradients(1, segment), one, rtol=0, atol=0)
    assert not torch.equal(gradients(2, 0)[0], one[0])


def with_own_dropout(config: TransformerConfig) -> Llama:
    """Builds a model of the user, whose dropout no flag sets."""
    model = Llama(config)
    for block in model.blocks.values():
        block.feed_forward = nn.Sequential(block.feed_forward, nn.Dropout(0.2))
    return model


@pytest.mark.parametrize("recompute", ["blocks", "ops"])
def test_dropout_of_own_model_is_repeated(recompute: str) -> None:
    """The recomputation drew other masks, so gradients were wrong, and all ranks drew the same."""
    cpu, mesh = torch.device("cpu"), Mesh(ParallelDims("none"), 0, "cpu")
    config = replace(BASE, model_builder=f"{__name__}:with_own_dropout")
    settings = StepSettings.of(resolved(TrainConfig(), model=config), mesh, cpu)

    def gradients(recompute: str) -> list[torch.Tensor]:
        section = ParallelConfig(recompute=recompute)
        model = parallelize(config, section, mesh, device=cpu, precision=FP32, seed=1)
        seed_dropout(1, 1, mesh)
        model(*labelled(BASE))[0].backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    torch.testing.assert_close(gradients(recompute), gradients("none"), rtol=0, atol=0)
    assert settings.dropout_seed is not None


@torch.library.custom_op("fms_fsdp_tests::attention_with_dropout", mutates_args=())
def attention_with_dropout(v: torch.Tensor) -> list[torch.Tensor]:
    """Draws from the generator in one operation, as the flash kernel of a GPU does."""
    mask = torch.rand_like(v) > 0.2
    return [v * mask, mask.to(v.dtype)]


attention_with_dropout.register_autograd(
    lambda ctx, grads: grads[0] * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


def test_kept_operations_repeat_later_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = torch.ops.fms_fsdp_tests.attention_with_dropout.default
    monkeypatch.setattr(activation_checkpointing, "ATTENTION", {operation})

    def gradients(recompute: str) -> list[torch.Tensor]:
        model = build(replace(BASE, num_kv_heads=4, **TOGETHER))
        for block in model.blocks.values():
            block.attention.attend = lambda q, k, v, mask, dropout: operation(v)[0]
        section = ParallelConfig(recompute=recompute)
        apply_activation_checkpointing(model, section, compiled=False)
        seed_dropout(1, 1, Mesh(ParallelDims("none"), 0, "cpu"))
        loss, _ = model(*labelled(BASE))
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    torch.testing.assert_close(gradients("ops"), gradients("blocks"), rtol=0, atol=0)


def test_evaluation_has_no_dropout() -> None:
    plain, dropped = build(BASE).eval(), build(replace(BASE, **TOGETHER)).eval()
    dropped.load_state_dict(plain.state_dict())
    tokens, _ = labelled(BASE)
    torch.testing.assert_close(dropped(tokens), plain(tokens), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tp_ranks_share_seed_without_sequence_parallelism(sequence_parallel: bool) -> None:
    dims = ParallelDims("fsdp", dp_shard=2, tp=2, sequence_parallel=sequence_parallel)
    seeds = []
    for rank in range(4):
        mesh = Mesh.__new__(Mesh)  # without process groups
        mesh.dims, mesh._rank = dims, rank
        seed_dropout(1, 1, mesh)
        seeds.append(torch.initial_seed())
    assert len(set(seeds)) == (4 if sequence_parallel else 2)
    assert (seeds[0] == seeds[1]) == (seeds[2] == seeds[3]) == (not sequence_parallel)
