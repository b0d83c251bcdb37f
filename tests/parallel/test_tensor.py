"""Tensor parallelism: the gradient of each parameter and compiled blocks against one process.

test_pairs.py and test_features.py train with it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fms_fsdp.config import BF16, FP32, ParallelConfig, Precision
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.models import loss as loss_module
from fms_fsdp.models.init import clean_name
from fms_fsdp.models.llama import Llama
from fms_fsdp.parallel.parallelize import parallelize
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import CPU, SHAPE, mesh_of, rows_of

TP2, COPIES = {"tp_size": 2}, {"tp_size": 2, "sequence_parallel": False}
GPT = dict(
    norm="layernorm", activation="gelu_tanh", bias=True, pos_emb="learned", tie_embeddings=True
)


def build(
    shape: dict[str, Any], precision: Precision = FP32, flags: dict[str, Any] | None = None
) -> tuple[Llama, Mesh]:
    section = ParallelConfig(**(flags or {}))
    mesh = mesh_of(section)
    config = replace(SHAPE, **shape)
    return parallelize(config, section, mesh, device=CPU, precision=precision, seed=5), mesh


def gradients(
    shape: dict[str, Any], flags: dict[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """The whole gradient of each parameter. Norm weights differ from one, biases from zero."""
    model, _ = build(shape, flags=flags)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.25)
    batch = rows_of(0, model.config)
    loss_sum, *_ = model(batch.tokens_BS, batch.labels_BS)
    loss_sum.backward()
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None
        found[clean_name(name)] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


SHAPES = {
    "layernorm": GPT | dict(qk_norm=True, num_kv_heads=1, init_std=0.2),
    "scalenorm": dict(norm="scalenorm", qk_norm=True, bias=True, init_std=0.2, z_loss=1e-2),
}


def on_two_ranks() -> dict[str, Any]:
    loss_module.CHUNK_BYTES["cpu"] = 1  # the loss of one process is not chunked
    found: dict[str, Any] = {
        f"{name} {flags}": gradients(shape, flags)
        for flags in (TP2, COPIES)
        for name, shape in SHAPES.items()
    }
    found["overlaps"] = [overlaps(False), overlaps(True)]
    return found


def overlaps(compiled: bool) -> bool:
    from torch._inductor import config

    build({}, flags=dict(TP2, async_tp=True, use_torch_compile=compiled))
    return config._micro_pipeline_tp


@pytest.fixture(scope="module")
def of_two_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2)


@pytest.mark.parametrize("flags", [TP2, COPIES])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_equal_one_process(
    name: str, flags: dict[str, Any], of_two_ranks: list[dict[str, Any]]
) -> None:
    wanted = gradients(SHAPES[name])
    total = torch.stack([grad.norm() for grad in wanted.values()]).norm()
    for found in (some[f"{name} {flags}"] for some in of_two_ranks):
        assert found.keys() == wanted.keys()
        for parameter, grad in wanted.items():
            difference, size = (found[parameter] - grad).norm(), grad.norm()
            assert difference < 1e-5 * size + 1e-7 * total, (parameter, difference, size)
            # of a bias of all keys alike, which a softmax does not see, the gradient is rounding alone
            assert size > 1e-4 * total or parameter.endswith(("k_norm.bias", "k_proj.bias")), (
                parameter
            )


def one_step(flags: dict[str, Any]) -> list[tuple[float, torch.Tensor]]:
    """Returns loss and gradient of the embedding: fp32, fp32 and bf16 with recomputed blocks."""
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    found = []
    blocks = dict(recompute="blocks")
    for precision, more in ((FP32, {}), (FP32, blocks), (BF16, blocks)):
        model, _ = build(dict(qk_norm=True), precision, flags | more)
        batch = rows_of(0, model.config)
        loss_sum, _ = model(batch.tokens_BS, batch.labels_BS)
        loss_sum.backward()
        grad: Any = model.get_parameter("embed.weight").grad
        found.append((loss_sum.item(), grad.full_tensor() if isinstance(grad, DTensor) else grad))
    return found


@pytest.mark.slow  # test_features.py compares a compiled run over tp in the quick tests
def test_compiled_blocks_equal_eager_and_embedding_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", torch.compile)  # is changed
    wanted = one_step({})
    for found in run_ranks(one_step, 2, TP2 | {"use_torch_compile": True}):
        for (loss, grad), (other_loss, other), rel in zip(
            found, wanted, (1e-6, 1e-6, 1e-3), strict=True
        ):
            assert loss == pytest.approx(other_loss, rel=rel)
            assert other.norm() > 1 and (grad - other).norm() < 10 * rel * other.norm()


def test_async_tp_overlaps_in_compiled_blocks_only(of_two_ranks: list[dict[str, Any]]) -> None:
    assert [found["overlaps"] for found in of_two_ranks] == [[False, True]] * 2
