"""What the meter says of a block against real runs: of this CPU, of the compiler, of two processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fms_fsdp.config import BF16, FP32, ParallelConfig, Precision
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.dims import plan_dims
from fms_fsdp.distributed.dtensor import local_shard
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.world import World
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import matmul_flops_per_token, num_params, recomputed_flops_per_token
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.parallel.context import apply_cp
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.parallel.tensor import apply_tp
from fms_fsdp.predict.memory import held_by
from fms_fsdp.predict.meter import ModelSetup, cost, units
from fms_fsdp.predict.speed import rank_cost
from tests.distributed.launch import run_ranks

CPU = torch.device("cpu")
SMALL = TransformerConfig(4, 64, 160, 8, 2, 128, head_dim=12, max_seq_len=512)
SHAPES = {
    "grouped": SMALL,
    "wide": replace(SMALL, num_kv_heads=8, hidden_size=128, ffn_hidden_size=384, head_dim=16),
    "gpt": replace(
        SMALL, activation="gelu", norm="layernorm", bias=True, num_kv_heads=8, pos_emb="learned"
    ),
}
OPTIONS = {
    "tied": dict(tie_embeddings=True),
    "qk norm": dict(qk_norm=True),
    "parallel": dict(parallel_residual=True),
    "relu2": dict(activation="relu2"),
    "scalenorm": dict(norm="scalenorm"),
    "relative": dict(pos_emb="relative"),
    "dropout": dict(dropout=0.1, attn_dropout=0.1, ffn_dropout=0.1),
}
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "blocks": dict(recompute="blocks"),
    "half": dict(recompute="blocks", selective_checkpointing="1/2"),
    "segments": dict(recompute="blocks", recompute_segment=3),
    "ops": dict(recompute="ops"),
    "attention": dict(recompute="ops", recompute_ops=("attention",)),
    "long": dict(recompute="ops", recompute_ops=("attention", "attention_matmuls")),
    "matmuls": dict(recompute="ops", recompute_ops=("attention", "matmuls")),
}


class Results(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Weak references to the memory of all results, with its bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result


def build(config: TransformerConfig, precision: Precision, **flags: Any) -> Llama:
    mesh = Mesh(ParallelDims("none"), 0, "cpu")
    return parallelize(
        config, ParallelConfig(**flags), mesh, device=CPU, precision=precision, seed=1
    )


def through_blocks(model: Llama, x: torch.Tensor, length: int = 0) -> torch.Tensor:
    """`length` is that of the sequence, if `x` has only this rank's part of it."""
    length = length or x.shape[1]
    mask = model.mask(0, None, slice(0, length), x)
    calls = [
        (layer, block, (model.rope[:length], mask, None)) for layer, block in model.blocks.items()
    ]
    return model.run_blocks(x, calls)


def stream(config: TransformerConfig, precision: Precision, rows: int, length: int) -> torch.Tensor:
    dtype = torch.bfloat16 if precision.compute == "bf16" else torch.float32
    return torch.randn(rows, length, config.hidden_size).to(dtype).requires_grad_()


def held_bytes(model: Llama, x: torch.Tensor) -> int:
    """Returns the bytes of results of operations that live after the pass."""
    with Results() as results:
        out = through_blocks(model, x)
    last = out.untyped_storage().nbytes()  # of the blocks' result, which no block keeps
    others = [*model.parameters(), model.rope, x]
    own = {tensor.untyped_storage()._cdata for tensor in others}
    alive = {
        key: size
        for key, (reference, size) in results.found.items()
        if key not in own and not reference.expired()
    }
    return sum(alive.values()) - last + x.untyped_storage().nbytes()


def shape_of(
    config: TransformerConfig, precision: Precision, length: int, dims: ParallelDims, **flags: Any
) -> ModelSetup:
    section = ParallelConfig(**flags)
    return ModelSetup(config, section, precision, dims, length, compiled=False, device_type="cpu")


def kept_bytes(shape: ModelSetup, rows: int) -> float:
    """Returns the bytes that the meter says all blocks keep."""
    held = held_by(shape, 0)
    again = cost(shape, "recomputed", rows).kept if held.recomputed else 0
    segments = -(-held.recomputed // shape.section.segment)
    return held.plain * cost(shape, "block", rows).kept + segments * again


@pytest.mark.parametrize(
    ("name", "kind", "precision"),
    [
        *(("grouped", kind, BF16) for kind in KINDS),
        *((name, kind, FP32) for name in SHAPES for kind in ("none", "half", "matmuls")),
    ],
)
def test_eager_blocks_keep_measured_bytes(name: str, kind: str, precision: Precision) -> None:
    config, flags = SHAPES[name], KINDS[kind]
    model = build(config, precision, **flags)
    found = held_bytes(model, stream(config, precision, 2, 300))
    shape = shape_of(config, precision, 300, ParallelDims("none"), **flags)
    assert kept_bytes(shape, 2) == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize(("length", "precision"), [(48, BF16), (300, FP32)], ids=["short", "long"])
@pytest.mark.parametrize("option", OPTIONS)
def test_optional_shapes_keep_measured_bytes(
    option: str, length: int, precision: Precision
) -> None:
    """Short sequences in bf16 take attention by explicit matmuls on a CPU."""
    config: TransformerConfig = replace(SMALL, **OPTIONS[option])  # type: ignore[arg-type]
    found = held_bytes(build(config, precision), stream(config, precision, 2, length))
    shape = shape_of(config, precision, length, ParallelDims("none"))
    assert kept_bytes(shape, 2) == pytest.approx(found, rel=0.03)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_partitioner_of_the_compiler_keeps_measured_bytes() -> None:
    """The backend has the min-cut partitioner and decompositions of inductor, without code."""
    model = build(SMALL, FP32)
    for block in model.blocks.values():
        block.compile(backend="aot_eager_decomp_partition", fullgraph=True, dynamic=False)
    x, sizes, kept = stream(SMALL, FP32, 2, 300), dict[int, int](), list[torch.Tensor]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        through_blocks(model, x)
    own = {each.untyped_storage().data_ptr() for each in [*model.parameters(), model.rope]}
    found = sum(size for place, size in sizes.items() if place not in own)
    shape = replace(shape_of(SMALL, FP32, 300, ParallelDims("none")), compiled=True)
    assert kept_bytes(shape, 2) == pytest.approx(found, rel=0.03)


AXES: dict[str, dict[str, Any]] = {
    "tp": dict(tp_size=2),
    "tp without sequence": dict(tp_size=2, sequence_parallel=False),
    "ulysses": dict(cp_size=2),
    "gather": dict(cp_size=2, cp_method="gather"),
}


def _kept_by_axes() -> dict[str, tuple[int, float]]:
    """Returns the bytes kept by the blocks of this rank, and those measured on the meta device."""
    found, length = {}, 256
    for name, flags in AXES.items():
        section = ParallelConfig(sharding_strategy="fsdp", **flags)
        rank = torch.distributed.get_rank()
        dims = plan_dims(section, "tiny", World(rank, rank, 2, 2))
        mesh, model = Mesh(dims, rank, "cpu"), build_model(SMALL)
        (apply_tp if dims.tp > 1 else apply_cp)(model, mesh, section)
        own = length // dims.cp
        x = torch.randn(2, own // (dims.tp if dims.sequence_parallel else 1), 64)
        with Results() as results:
            out = through_blocks(model, x.requires_grad_(), own)
        others = [x, out, *map(local_shard, model.parameters()), model.rope]
        skipped = {each.untyped_storage()._cdata for each in others}
        kept = x.untyped_storage().nbytes() + sum(
            size
            for key, (reference, size) in results.found.items()
            if key not in skipped and not reference.expired()
        )
        found[name] = (
            kept,
            kept_bytes(ModelSetup(SMALL, section, FP32, dims, length, False, "cpu"), 2),
        )
    return found


@pytest.mark.slow
def test_ranks_of_tp_and_cp_keep_measured_bytes() -> None:
    for found in run_ranks(_kept_by_axes, 2):
        for name, (kept, measured) in found.items():
            assert measured == pytest.approx(kept, rel=0.05), name


@pytest.mark.parametrize("name", ["7b", "llama3_8b", "llama3.2_1b"])
def test_parameters_and_flops_are_those_of_the_formulas(name: str) -> None:
    config, length = VARIANTS[name], 4096
    shape = ModelSetup(config, ParallelConfig(), BF16, ParallelDims("none"), length)
    sizes, total = units(shape), rank_cost(shape, 0, 1)
    params = sizes["embed"] + config.num_layers * sizes["block"] + sizes["head"]
    assert params == num_params(config)
    # The forward pass of attention has 4 of 12 terms, its backward pass with flash 10 of 8.
    attention = 12 * config.num_layers * config.num_attention_heads * config.head_dim * length
    matmuls = matmul_flops_per_token(config, length) - attention
    assert total.flops["bfloat16"] == pytest.approx(length * matmuls, rel=1e-3)
    assert total.flops["attention"] == pytest.approx(length * attention * 14 / 12, rel=1e-3)
    recomputing = replace(shape, section=ParallelConfig(recompute="blocks"))
    more = rank_cost(recomputing, 0, 1).flops.total() - total.flops.total()
    formula = recomputed_flops_per_token(config, length, config.num_layers)
    # The meter repeats the last matmul of a block too.
    last = 2 * config.num_layers * config.hidden_size * config.ffn_hidden_size
    assert more == pytest.approx(length * (formula + last), rel=0.01)
