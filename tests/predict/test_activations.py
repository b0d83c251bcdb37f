"""What autograd keeps for the backward pass, against the prediction, and laws of the prediction."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fms_fsdp.config import BF16, FP32, BatchPlan, ParallelConfig, Precision
from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.extras.dropout import row_keys
from fms_fsdp.mesh import Mesh
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.variants import VARIANTS, LlamaConfig
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.predict.activations import BlockActivations, activation_bytes
from fms_fsdp.predict.memory import estimate_memory

CPU = torch.device("cpu")
SMALL = LlamaConfig(4, 64, 160, 8, 2, 128, head_dim=12, max_seq_len=512)
SHAPES = {
    "grouped": SMALL,
    "wide": replace(SMALL, num_kv_heads=8, hidden_size=128, ffn_hidden_size=384, head_dim=16),
    "gpt": replace(SMALL, activation="gelu", norm="layernorm", bias=True, num_kv_heads=8, pos_emb="learned"),
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
    "long": dict(recompute="ops", recompute_ops=("attention", "attention_products")),
    "products": dict(recompute="ops", recompute_ops=("attention", "products")),
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


def build(config: LlamaConfig, precision: Precision, **flags: Any) -> Llama:
    mesh = Mesh(ParallelDims("none"), 0, "cpu")
    return parallelize(config, ParallelConfig(**flags), mesh, device=CPU, precision=precision, seed=1)


def through_blocks(model: Llama, x: torch.Tensor) -> torch.Tensor:
    config, (rows, length, _) = model.config, x.shape
    rope = model.rope[:length] if config.pos_emb == "rope" else None
    mask = model.mask(config, 0, None, slice(0, length), CPU)
    keys = row_keys(1, 1, 0, rows) if config.has_dropout else None
    calls = [(layer, block, (rope, mask, None, keys)) for layer, block in model.blocks.items()]
    return model.pass_blocks(x, calls)


def stream(config: LlamaConfig, precision: Precision, rows: int, length: int) -> torch.Tensor:
    dtype = torch.bfloat16 if precision.compute == "bf16" else torch.float32
    return torch.randn(rows, length, config.hidden_size).to(dtype).requires_grad_()


def saved_bytes(model: Llama, x: torch.Tensor) -> int:
    """Memory of all that autograd keeps of the blocks, their input among it, without weights and tables."""
    sizes: dict[int, int] = {}
    kept: list[torch.Tensor] = []  # so that no place is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        through_blocks(model, x)
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    return sum(size for place, size in sizes.items() if place not in own)


def held_bytes(model: Llama, x: torch.Tensor) -> int:
    """The same, counted as results of operations that live after the pass: what a policy of recomputation
    keeps, no hook sees."""
    with Results() as results:
        out = through_blocks(model, x)
    last = out.untyped_storage().nbytes()  # of the blocks' result, which no block keeps
    own = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers(), x]}
    alive = {
        key: size
        for key, (reference, size) in results.found.items()
        if key not in own and not reference.expired()
    }
    return sum(alive.values()) - last + x.untyped_storage().nbytes()


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_eager_blocks_keep_is_predicted(shape: str, kind: str, precision: Precision) -> None:
    config, rows, length = SHAPES[shape], 2, 300
    model = build(config, precision, **KINDS[kind])
    x = stream(config, precision, rows, length)
    found = (held_bytes if KINDS[kind].get("recompute") == "ops" else saved_bytes)(model, x)
    section = ParallelConfig(**KINDS[kind])
    expected = activation_bytes(
        config, rows * length, length, precision, section, compiled=False, device_type="cpu"
    )
    assert expected == pytest.approx(found, rel=0.03)


def most_held(**flags: Any) -> int:
    """The most bytes of results that live at once, in a forward and a backward pass of eight blocks."""
    model = build(replace(SMALL, num_layers=8), FP32, **flags)
    x = stream(SMALL, FP32, 4, 300)

    class Most(Results):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            self.found = {key: found for key, found in self.found.items() if not found[0].expired()}
            self.most = max(self.most, sum(size for _, size in self.found.values()))
            return result

    with Most() as results:
        through_blocks(model, x).sum().backward()
    return results.most


def test_a_longer_segment_holds_more_blocks_in_the_backward_pass() -> None:
    sections = [ParallelConfig(recompute="blocks", recompute_segment=size) for size in (1, 2, 4)]
    block, tokens = BlockActivations(SMALL, 300, 4, False, "cpu"), 4 * 300
    kept = partial(activation_bytes, replace(SMALL, num_layers=8), tokens, 300, FP32, compiled=False)
    expected = [kept(each, device_type="cpu") + tokens * block.again(each) for each in sections]
    found = [most_held(recompute="blocks", recompute_segment=size) for size in (1, 2, 4)]
    for i in (0, 1):
        assert found[i + 1] - found[i] == pytest.approx(expected[i + 1] - expected[i], rel=0.2)


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("length", [48, 300])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_shape_keep_what_is_predicted(option: str, length: int, precision: Precision) -> None:
    """Short rows in bf16 take attention by explicit products on a CPU."""
    config: LlamaConfig = replace(SMALL, **OPTIONS[option])  # type: ignore[arg-type]
    found = saved_bytes(build(config, precision), stream(config, precision, 2, length))
    section = ParallelConfig()
    expected = activation_bytes(
        config, 2 * length, length, precision, section, compiled=False, device_type="cpu"
    )
    assert expected == pytest.approx(found, rel=0.03)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_alone")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["none", "cheap", "ops", "blocks"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_compiled_blocks_keep_is_predicted(shape: str, kind: str, precision: Precision) -> None:
    torch._dynamo.reset()
    config, rows, length = SHAPES[shape], 8, 300  # a state of generators, 5,056 bytes a block, is left out
    model = build(config, precision, recompute=kind, use_torch_compile=True)
    found = saved_bytes(model, stream(config, precision, rows, length))
    section = ParallelConfig(recompute=kind)
    expected = activation_bytes(config, rows * length, length, precision, section, device_type="cpu")
    assert expected == pytest.approx(found, rel=0.03)


def drawn(random_: random.Random) -> tuple[LlamaConfig, BatchPlan, int, Precision, dict[str, Any]]:
    config = VARIANTS[random_.choice(["7b", "llama3_8b", "llama3_194m", "llama3.2_1b", "70b"])]
    batch = BatchPlan(random_.choice([1, 2, 8]), random_.choice([1, 4]), 1)
    how = dict(compiled=random_.random() < 0.5, device_type=random_.choice(["cpu", "cuda"]))
    return config, batch, random_.choice([128, 1024, 4096]), random_.choice([FP32, BF16]), how


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero2"])
def test_more_devices_never_need_more_of_one(strategy: str) -> None:
    random_, kept = random.Random(5), strategy != "fsdp"
    for _ in range(100):
        config, batch, length, precision, how = drawn(random_)
        needs = [
            estimate_memory(
                config,
                ParallelDims(
                    strategy,
                    1,
                    2**n,
                    reshard_after_forward=not kept,
                    sync_each_micro_step=strategy != "zero1",
                ),
                ParallelConfig(),
                precision=precision,
                batch=batch,
                seq_length=length,
                **how,
            )
            for n in range(1, 10)
        ]
        for name in ("total", "expected"):
            sizes = [getattr(need, name) for need in needs]
            assert sizes == sorted(sizes, reverse=True), (name, config, batch, length, precision, how)


def test_more_recomputation_never_keeps_more_and_a_longer_row_never_less() -> None:
    random_ = random.Random(6)
    blocks = [dict(recompute="blocks", selective_checkpointing=share) for share in ("1/4", "1/2", "1")]
    orders = [
        [{}, *blocks],
        [{}, dict(recompute="cheap"), *blocks[2:]],
        [{}, dict(recompute="ops"), *blocks[2:]],
    ]
    for _ in range(100):
        config, batch, length, precision, how = drawn(random_)
        tokens = batch.batch_size * length
        for order in orders:
            sections = [ParallelConfig(**flags) for flags in order]  # type: ignore[arg-type]
            sizes = [
                activation_bytes(config, tokens, length, precision, section, **how) for section in sections
            ]
            assert sizes == sorted(sizes, reverse=True), (order, config, length, precision, how)
        for strategy in ("none", "fsdp"):
            dims, lengths = ParallelDims(strategy, 1, 1 if strategy == "none" else 8), (length, 2 * length)
            short, long = (
                estimate_memory(
                    config, dims, ParallelConfig(), precision=precision, batch=batch, seq_length=each, **how
                )
                for each in lengths
            )
            parts = ("total", "expected", "activations", "loss", "working", "rows")
            for name in parts:
                assert getattr(short, name) <= getattr(long, name), (name, config, batch, length, how)


def test_a_share_takes_whole_blocks() -> None:
    assert ParallelConfig(recompute="blocks", selective_checkpointing="1/2").recomputed_share == Fraction(
        1, 2
    )
    section = ParallelConfig(recompute="blocks", selective_checkpointing="1/2")
    three = activation_bytes(replace(SMALL, num_layers=3), 100, 100, FP32, section)
    one, none = (
        activation_bytes(replace(SMALL, num_layers=1), 100, 100, FP32, each)
        for each in (ParallelConfig(recompute="blocks"), ParallelConfig())
    )
    assert three == one + 2 * none
