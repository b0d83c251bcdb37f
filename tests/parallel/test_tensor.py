"""Tensor parallelism: layouts train as one process does; the loss of a split vocabulary is that of a whole
one."""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fms_fsdp.config import BF16, FP32, ParallelConfig, Precision
from fms_fsdp.distributed.collectives import Group
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.generate import Sampling, generate
from fms_fsdp.models import loss as loss_module
from fms_fsdp.models.init import clean_name
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.loss import linear_cross_entropy
from fms_fsdp.parallel.fsdp import evaluating
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.parallel.tensor import vocab_parallel_softmax_
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import CPU, SHAPE, VOCAB, Case, compare, mesh_of, rows_of, train_case

TP2, COPIES = {"tp_size": 2}, {"tp_size": 2, "sequence_parallel": False}
GPT = dict(
    norm="layernorm", activation="gelu_tanh", bias=True, pos_emb="learned", tie_embeddings=True
)
DROPS: dict[str, Any] = {}
CAPPED = dict(z_loss=1e-2)
WAVES = dict(norm="scalenorm", pos_emb="sinusoidal", activation="relu2")
ALIBI = dict(norm="scalenorm", pos_emb="alibi", parallel_residual=True, qk_norm=True)

RELATIVE = dict(pos_emb="relative", relative_buckets=8, relative_max_distance=20, num_kv_heads=1)


def test_two_ranks_train_as_one() -> None:
    compare(
        2,
        {
            "llama": Case(
                TP2, common=dict(recompute="blocks", selective_checkpointing="1/2"), documents=True
            ),
            "copies": Case(
                COPIES, shape=dict(vocab_multiple_of=16, num_kv_heads=1) | WAVES | DROPS
            ),
            "gpt": Case(TP2, shape=GPT | DROPS, accum=2),
            "gpt of copies": Case(COPIES, shape=GPT | dict(qk_norm=True), documents=True),
            "alibi": Case(TP2, shape=ALIBI),
            "relative": Case(TP2, shape=RELATIVE, documents=True, accum=2),
            "ops": Case(
                TP2,
                common=dict(recompute="ops", low_cpu_fsdp=False),
                shape=dict(ffn_hidden_size=97),
            ),
        },
    )


def test_four_ranks_train_as_one() -> None:
    tp4 = {"tp_size": 4}
    compare(
        4,
        {
            "four": Case(tp4, shape=dict(num_kv_heads=2, qk_norm=True)),
            "fsdp": Case(TP2, common=dict(recompute="blocks"), accum=2),
            "hsdp": Case(COPIES | {"sharding_strategy": "hsdp", "hsdp_shard_size": 1}, shape=GPT),
            "zero1": Case(
                TP2 | {"sharding_strategy": "zero1"}, shape=GPT | dict(qk_norm=True), accum=2
            ),
        },
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
    "scalenorm": dict(norm="scalenorm", qk_norm=True, bias=True, init_std=0.2) | CAPPED,
}


def logits_and_losses(flags: dict[str, Any] | None = None) -> dict[str, Any]:
    """Of an evaluation, whose rows are cut, and of generated texts, whose rows are not."""
    found: dict[str, Any] = {}
    for name, shape in {
        "llama": {},
        "gpt": GPT,
        "alibi": ALIBI | CAPPED,
        "relative": RELATIVE,
    }.items():
        model, _ = build(shape, flags=flags)
        batch = rows_of(1, model.config)
        with evaluating(model), torch.no_grad():
            found[f"{name} loss"] = model(batch.tokens_BS, batch.labels_BS)[0]
            found[f"{name} logits"] = model(batch.tokens_BS)
            texts = generate(model, [[1, 2, 3], [7, 8, 9, 10, 11]], Sampling(0), max_new_tokens=6)
            found[f"{name} texts"] = torch.tensor(
                [[-1 if x is None else x for x in row] for row in texts]
            )
    return found


LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": dict(chunked=True),
    "capped": dict(chunked=True, z_loss=1e-2),
    "z-loss": dict(z_loss=1e-2),
    "bf16": dict(dtype=torch.bfloat16, chunked=True),
    "fp16 with its scale": dict(dtype=torch.float16, scale=2.0**12, z_loss=1e-2),
}


def loss_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    h_BSD = torch.randn(3, 67, 24, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(VOCAB, 24, generator=generator).requires_grad_()
    labels_BS = torch.randint(0, VOCAB, (3, 67), generator=generator)
    labels_BS[torch.rand(3, 67, generator=generator) < 0.3] = -100
    return h_BSD, weight_VD, labels_BS


def loss_and_gradients(
    *,
    dtype: torch.dtype = torch.float32,
    chunked: bool = False,
    scale: float | None = None,
    split: bool,
    **how: Any,
) -> list[torch.Tensor]:
    """Losses, and gradients of h and of the weight; of this rank's part of the vocabulary if `split`."""
    h, weight, labels = loss_inputs(dtype)
    usual = dict(loss_module.CHUNK_BYTES)
    if chunked:
        loss_module.CHUNK_BYTES["cpu"] = 1
    own = slice(None)
    if split:
        first, largest = (
            dist.get_rank() * -(-VOCAB // dist.get_world_size()),
            -(-VOCAB // dist.get_world_size()),
        )
        own = slice(first, first + largest)
        group = Group(dist.distributed_c10d._get_default_group().group_name, dist.get_world_size())
        how |= dict(
            softmax=partial(vocab_parallel_softmax_, group=group),
            first_token=first,
            largest_shard=largest,
        )
    factor = None if scale is None else torch.tensor(scale)
    loss_sum, count, *z_sum = linear_cross_entropy(h, weight[own], labels, scale=factor, **how)
    (loss_sum * (1.0 if scale is None else scale)).backward()
    loss_module.CHUNK_BYTES.update(usual)
    assert h.grad is not None and weight.grad is not None
    grads = [h.grad.float(), weight.grad]
    if split:
        for grad in grads:  # rows of other ranks are zero
            dist.all_reduce(grad)
    return [loss_sum.detach(), count, *z_sum, *grads]


def on_two_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {
        name: loss_and_gradients(split=True, **how) for name, how in LOSSES.items()
    }
    for name, shape in SHAPES.items():
        for flags in (TP2, COPIES):
            found[f"{name} {flags}"] = gradients(shape, flags)
    for flags in (TP2, COPIES):
        found[f"texts {flags}"] = logits_and_losses(flags)
    found["float8"] = [train_case(case) for case in FLOAT8.values()]
    return found


FLOAT8 = {
    scaling: Case(TP2, precision=replace(BF16, float8=scaling), common=dict(recompute="blocks"))
    for scaling in ("row", "tensor")
}


@pytest.fixture(scope="module")
def of_two_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2)


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_split_vocabulary_is_that_of_a_whole_one(
    name: str, of_two_ranks: list[dict[str, Any]]
) -> None:
    wanted = loss_and_gradients(split=False, **LOSSES[name])
    dtype = LOSSES[name].get("dtype", torch.float32)
    exact = dtype == torch.float32
    for found in of_two_ranks:
        *losses, dh, dweight = found[name]
        for one, other in zip(losses, wanted[:-2], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6 if exact else 1e-5, atol=0)
        for one, other in zip((dh, dweight), wanted[-2:], strict=True):
            difference = (one - other).norm() / other.norm()
            assert difference < (1e-6 if exact else torch.finfo(dtype).eps), difference


@pytest.mark.parametrize("flags", [TP2, COPIES])
@pytest.mark.parametrize("name", SHAPES)
def test_the_gradient_of_every_parameter_is_that_of_one_process(
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


@pytest.mark.parametrize("flags", [TP2, COPIES])
def test_evaluations_and_texts_are_those_of_one_process(
    flags: dict[str, Any], of_two_ranks: list[dict[str, Any]]
) -> None:
    wanted = logits_and_losses()
    for found in (some[f"texts {flags}"] for some in of_two_ranks):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


def test_float8_multiplies_local_parts(of_two_ranks: list[dict[str, Any]]) -> None:
    for i, case in enumerate(FLOAT8.values()):
        alone, in_bf16 = (
            train_case(one, alone=True) for one in (case, replace(case, precision=BF16))
        )
        for found in (some["float8"][i] for some in of_two_ranks):
            assert found.weights == alone.weights and found.losses != in_bf16.losses
            assert found.losses == pytest.approx(alone.losses, rel=1e-3)
            assert found.norms == pytest.approx(alone.norms, rel=2e-2)


def one_step(flags: dict[str, Any], backend: str = "eager") -> list[tuple[float, torch.Tensor]]:
    """Returns loss and gradient of the embedding: fp32, fp32 and bf16 with recomputed blocks."""
    torch.compile = functools.partial(torch.compile, backend=backend)
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


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_blocks_compute_as_plain_ones_and_the_embedding_learns(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", torch.compile)  # is changed
    wanted = one_step({})
    for found in run_ranks(one_step, 2, TP2 | {"use_torch_compile": True}, backend):
        for (loss, grad), (other_loss, other), rel in zip(
            found, wanted, (1e-6, 1e-6, 1e-3), strict=True
        ):
            assert loss == pytest.approx(other_loss, rel=rel)
            assert other.norm() > 1 and (grad - other).norm() < 10 * rel * other.norm()


def flag_of_inductor() -> bool:
    from torch._inductor import config

    build({}, flags=dict(TP2, async_tp=True, use_torch_compile=False))
    assert not config._micro_pipeline_tp
    build({}, flags=dict(TP2, async_tp=True, use_torch_compile=True))
    return config._micro_pipeline_tp


def test_messages_overlap_with_products_where_blocks_are_compiled() -> None:
    assert run_ranks(flag_of_inductor, 2) == [True, True]
