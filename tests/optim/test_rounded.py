"""AdamW over weights or moments in bf16: stochastic rounding, the same bits on any layout, and learning."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fms_fsdp.config import FP32, OptimConfig, ParallelConfig, Precision
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.init import init_weights
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.optim.optimizers import build_optimizers, state_bytes
from fms_fsdp.optim.stochastic_rounding import (
    _hash,
    adamw_update,
    random_bits,
    round_stochastically,
)
from fms_fsdp.parallel.dtypes import DTYPES, cast_weights
from fms_fsdp.parallel.fsdp import clip_factor, set_gradient_sync
from fms_fsdp.parallel.parallelize import parallelize
from tests.distributed.launch import run_ranks
from tests.distributed.test_sharded_training import batches, config
from tests.optim.test_sharded_optimizers import Model, everything, step
from tests.parallel.layouts import mesh_of

PURE = Precision("bf16", weights="bf16", gradients="bf16", state="bf16")
NEAREST = Precision(
    "bf16", weights="bf16", gradients="bf16", state="bf16", stochastic_rounding=False
)
WEIGHTS = Precision("bf16", weights="bf16", gradients="bf16")
MOMENTS = Precision("bf16", state="bf16")
KINDS = {"pure": PURE, "nearest": NEAREST, "weights": WEIGHTS, "moments": MOMENTS}
SHAPES = {**Model.shapes, "large": (301, 1000)}  # more than is in fp32 at a time
STEPS, SAVED_AT = 4, 2
Whole = dict[str, torch.Tensor]


def place(key: int, *parts: slice) -> list[torch.Tensor]:
    indices = [torch.arange(part.start, part.stop, dtype=torch.int32) for part in parts]
    return [torch.tensor(key, dtype=torch.int32), *indices]


def drawn(key: int, *shape: int) -> torch.Tensor:
    return random_bits(*place(key, *(slice(0, size) for size in shape)))


@pytest.mark.parametrize("base", [0x3F80, 0xBF80, 0x0001, 0x7F7E], ids=hex)
def test_stochastic_rounding_is_unbiased(base: int) -> None:
    """Of positive and negative values, of the smallest and of large ones, with either half of the bits."""
    bits = drawn(5, 1000, 1000)
    for tenth in (1, 5, 9):
        part = tenth * 0x10000 // 10
        value = torch.tensor((base << 16) + part).to(torch.int32).view(torch.float32)
        for half in (bits, bits >> 16):
            rounded = round_stochastically(value.expand(bits.shape).contiguous(), half)
            rounded = rounded.view(torch.int32)
            ups = (rounded >> 16 & 0xFFFF) - base
            assert ups.unique().tolist() == [0, 1] and not (rounded & 0xFFFF).any()
            assert abs(ups.double().mean().item() - part / 0x10000) <= 2.5e-3


def test_random_bits_are_independent() -> None:
    bits = drawn(5, 500, 1000)
    more = _hash(bits.clone())
    others = (bits >> 16, more, more >> 16, drawn(6, 500, 1000), bits.roll(1, 0), bits.roll(1, 1))
    for other in others:
        both = torch.stack([bits.flatten() & 0xFFFF, other.flatten() & 0xFFFF]).double()
        assert abs(torch.corrcoef(both)[0, 1]) < 6e-3
    assert torch.equal(random_bits(*place(5, slice(20, 50), slice(7, 47))), bits[20:50, 7:47])


def test_rounding_stays_finite_and_keeps_bf16_values() -> None:
    largest, infinity = torch.finfo(torch.bfloat16).max, math.inf
    most = torch.full((), 0xFFFF, dtype=torch.int32)
    values = torch.tensor([largest, torch.finfo(torch.float32).max, 1, 0, 1e-45, 3, infinity])
    up = torch.tensor([largest, largest, 1, 0, 2.0**-133, 3, infinity])
    down = torch.tensor([largest, largest, 1, 0, 0, 3, infinity])
    assert torch.equal(round_stochastically(values, most), up)
    assert torch.equal(round_stochastically(-values, most), -up)
    assert torch.equal(round_stochastically(values, most - most), down)
    assert round_stochastically(torch.tensor([math.nan, -math.nan]), most).isnan().all()
    values, bits = torch.randn(100_000), drawn(1, 100_000)
    rounded = round_stochastically(values, bits)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert torch.equal(rounded, -round_stochastically(-values, bits))


def section(name: str = "adamw", rate: float = 3e-3, **flags: Any) -> OptimConfig:
    return OptimConfig(optimizer=name, learning_rate=rate, weight_decay=0.1, **flags)


@pytest.mark.slow
@pytest.mark.usefixtures("each_backend")
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_compiled_step_equals_eager() -> None:
    """Also a skipped step. Square roots of MKL err by an ulp of fp32, those of compiled code do not, so
    a rounding may seldom fall the other way."""
    found = []
    for compiled in (False, True):
        torch.compiler.reset()
        model = Model(SHAPES)
        cast_weights(model, PURE)
        optimizers = build_optimizers(section(), model, PURE, seed=3, compiled=compiled)
        (part,) = optimizers.optimizers
        for number in range(1, 5):
            for key, parameter in model.named_parameters():
                generator = torch.Generator().manual_seed(number * 100 + len(key))
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
                if number == 2:
                    parameter.grad[0] = math.nan
            part.found_inf = torch.tensor(float(number == 2))
            before = everything(model, optimizers)
            part.step()
            after = everything(model, optimizers)
            assert all(torch.equal(before[key], after[key]) for key in before) == (number == 2)
        found.append(after)
    for key, value in found[0].items():
        other, is_bf16 = found[1][key], value.dtype == torch.bfloat16
        assert not is_bf16 or (value != other).sum() <= 1e-4 * value.numel(), key
        torch.testing.assert_close(value, other, rtol=2**-6 if is_bf16 else 3e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_compiled_update_creates_no_indices() -> None:
    """Under dynamic sizes torch 2.11 counts them in 64 bits on a GPU, and refuses to take those for fp32."""
    torch.compiler.reset()
    found: list[str] = []

    def keep(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        found.extend(str(node.target) for node in module.graph.nodes)
        return module

    numbers = [torch.tensor(0.5) for _ in range(11)]
    part = [torch.rand(6, 5).bfloat16() for _ in range(4)]
    where = place(9, slice(3, 9), slice(0, 5))
    torch.compile(adamw_update, fullgraph=True, dynamic=True, backend=keep)(
        part, numbers, where, True, True
    )
    assert any("xor" in name for name in found) and not any("arange" in name for name in found)


def ulp(values: torch.Tensor) -> torch.Tensor:
    """Distance of the numbers of bf16 around each value."""
    return torch.exp2(torch.floor(torch.log2(values.abs().clamp(min=2.0**-126))) - 7)


@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "adamw") for kind in KINDS), ("pure", "adam"), ("moments", "adam")]
)
def test_steps_round_the_exact_result(kind: str, name: str) -> None:
    """In fp64, from what is kept: to a neighbour in bf16, or to the nearest one."""
    precision = KINDS[kind]
    model = Model()
    cast_weights(model, precision)
    optimizers = build_optimizers(section(name, adam_eps=1e-6), model, precision, seed=3)
    for number in range(1, 8):
        before = {key: value.double() for key, value in everything(model, optimizers).items()}
        gradients = step(model, optimizers, number)
        after = everything(model, optimizers)
        for key, gradient in gradients.items():
            weight, rate, g = before[key], 3e-3 / number**0.5, gradient.double()
            decay = 0.1 if weight.ndim > 1 else 0.0
            g = g + decay * weight if name == "adam" else g
            weight = weight * (1 - rate * decay) if name == "adamw" else weight
            mean = 0.9 * before[f"{key}.exp_avg"] + 0.1 * g
            square = 0.95 * before[f"{key}.exp_avg_sq"] + 0.05 * g**2
            root = (square / (1 - 0.95**number)).sqrt() + 1e-6
            weight = weight - rate * mean / (1 - 0.9**number) / root
            found = {"": weight, ".exp_avg": mean, ".exp_avg_sq": square}
            for end, expected in found.items():
                kept, name_of = after[key + end], precision.state if end else precision.weights
                assert kept.dtype == DTYPES[name_of]
                if kept.dtype == torch.float32:
                    torch.testing.assert_close(kept.double(), expected, rtol=3e-6, atol=3e-6)
                    continue
                most = ulp(expected) * (1 if precision.stochastic_rounding else 0.5)
                assert ((kept.double() - expected).abs() <= most + 1e-6).all(), key + end


def test_small_steps_accumulate_only_by_stochastic_rounding() -> None:
    for precision, moved in ((PURE, 4e-3), (NEAREST, 0.0)):
        model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        optimizers = build_optimizers(
            OptimConfig(learning_rate=1e-4, weight_decay=0), model, precision
        )
        for _ in range(40):
            model.weight.grad = torch.ones_like(model.weight)
            optimizers.step(lambda base: base, torch.tensor(1.0))
        assert 1 - model.weight.double().mean().item() == pytest.approx(moved, abs=3e-4)


def test_gradients_are_divided_within_the_step() -> None:
    """By a power of two the result is equal to the bit; a step that is skipped has a scale of NaN."""
    found = []
    for scale in (None, 4.0):
        torch.manual_seed(0)
        model = Model()
        cast_weights(model, PURE)
        optimizers = build_optimizers(section(), model, PURE, seed=3)
        inner: Any = optimizers.optimizers[0]
        for norm in (1.0, math.nan, 1.0):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter) * norm * (scale or 1)
            inner.grad_scale = None if scale is None else torch.tensor(scale * norm)
            optimizers.step(lambda base: base, torch.tensor(norm))
        found.append(everything(model, optimizers))
    plain, divided = found
    assert all(torch.equal(plain[key], divided[key]) for key in plain)


def test_seed_decides_the_bits() -> None:
    weights = []
    for seed in (1, 1, 2):
        model = Model()
        cast_weights(model, PURE)
        step(model, build_optimizers(section(), model, PURE, seed), 1)
        weights.append(model.embed.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def trained(
    kind: str, name: str, place: Any, folder: Path | None = None, goes_on: bool = False
) -> Whole:
    """Weights and state after all steps, on the model that `place` has sharded; a checkpoint is between."""
    model = Model(SHAPES)
    cast_weights(model, KINDS[kind])
    place(model)
    optimizers = build_optimizers(section(name), model, KINDS[kind], seed=3)
    if goes_on:
        weights, state = dict(model.named_parameters()), optimizers.state_dict()
        dcp.load(weights | state, checkpoint_id=folder)
        optimizers.load_state_dict(state)
    for number in range(SAVED_AT + 1 if goes_on else 1, STEPS + 1):
        step(model, optimizers, number)
        if folder and not goes_on and number == SAVED_AT:
            dcp.save(dict(model.named_parameters()) | optimizers.state_dict(), checkpoint_id=folder)
    return everything(model, optimizers)


CASES = [("pure", "adamw"), ("weights", "adamw"), ("moments", "adam")]


def on_ranks(folder: Path) -> dict[tuple[str, ...], Whole]:
    import torch.distributed as dist

    found = {}
    if dist.get_world_size() == 2:
        shard = functools.partial(fully_shard, mesh=init_device_mesh("cpu", (2,)))
        for kind, name in CASES:
            own = folder / f"{kind} {name}"
            found["resumed", kind, name] = trained(kind, name, shard, own, goes_on=True)
        return found
    shard = functools.partial(fully_shard, mesh=init_device_mesh("cpu", (4,)))
    for kind, name in CASES:
        found["fsdp", kind, name] = trained(kind, name, shard, folder / f"{kind} {name}")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    shard = functools.partial(fully_shard, mesh=mesh)
    found["hsdp", "pure", "adamw"] = trained("pure", "adamw", shard)
    return found


@pytest.mark.slow
def test_layouts_and_resumes_give_equal_bits(tmp_path: Path) -> None:
    alone = {case: trained(*case, lambda model: None) for case in CASES}
    layouts = set()
    for world in (4, 2):
        for rank in run_ranks(on_ranks, world, tmp_path):
            for (layout, *case), found in rank.items():
                layouts.add(layout)
                expected = alone[tuple(case)]  # type: ignore[index]
                assert found.keys() == expected.keys()
                for key, value in expected.items():
                    assert torch.equal(found[key], value), (layout, case, key)
    assert layouts == {"fsdp", "hsdp", "resumed"}


def sums(strategy: str, sync: bool, gradients: str) -> str:
    """Returns how eight micro-steps accumulate: to the exact sum in fp32, to the sum in bf16, or to the sum
    that is rounded to bf16 once (collective)."""
    parallel = ParallelConfig(sharding_strategy=strategy, sync_each_micro_step=sync)
    mesh = mesh_of(parallel)
    world, rank = mesh.size("dp"), mesh.axis_rank("dp")
    precision = Precision("bf16", weights="bf16", gradients=gradients, state="bf16")
    cpu = torch.device("cpu")
    model = parallelize(config(False), parallel, mesh, device=cpu, precision=precision, seed=5)
    parameters = list(model.parameters())
    alone: list[list[torch.Tensor]] = []
    for together in (False, True):
        for number, (tokens, labels) in enumerate(batches()[:8]):
            set_gradient_sync(model, not together or number == 7, mesh)
            (model(tokens[rank::world], labels[rank::world])[0] / 100).backward()
            if not together:
                alone.append([p.grad for p in parameters if p.grad is not None])
                model.zero_grad()
    kinds = {"fp32", "bf16", "rounded once"}
    expected = torch.zeros(())
    for parameter, *parts in zip(parameters, *alone, strict=True):
        found = parameter.grad
        assert found is not None
        exact = functools.reduce(torch.add, [part.float() for part in parts])
        in_bf16 = functools.reduce(torch.add, [part.bfloat16() for part in parts])
        kinds -= {
            *(() if torch.equal(found, exact) else ("fp32",)),
            *(() if torch.equal(found, in_bf16) else ("bf16",)),
            *(() if torch.equal(found.bfloat16().float(), found.float()) else ("rounded once",)),
        }
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        expected += whole.float().square().sum()
        torch.testing.assert_close(found.float(), exact, rtol=2e-2, atol=2e-2)
    norm, _ = clip_factor(parameters, 1.0, mesh)
    assert math.isclose(norm, expected.sqrt(), rel_tol=1e-5)
    return min(kinds, key=["fp32", "bf16", "rounded once"].index)


def sums_of_each() -> list[str]:
    return [sums(*case) for case in SUMS]


SUMS: dict[tuple[str, bool, str], str] = {
    ("fsdp", True, "fp32"): "fp32",
    ("fsdp", True, "bf16"): "bf16",
    ("fsdp", False, "fp32"): "rounded once",
    ("ddp", True, "fp32"): "rounded once",
}


@pytest.mark.slow
def test_gradients_of_bf16_weights_accumulate_in_fp32() -> None:
    """Where FSDP accumulates by itself, in `reduce_dtype`, it rounds the sum once."""
    assert sums("none", True, "fp32") == "fp32" and sums("none", True, "bf16") == "bf16"
    assert run_ranks(sums_of_each, 2) == [list(SUMS.values())] * 2


def test_slow_second_moment_is_accepted() -> None:
    plain = Precision("bf16", weights="bf16", stochastic_rounding=False)
    for precision in (PURE, plain):
        build_optimizers(section(adam_beta2=0.999), nn.Linear(3, 3), precision)


def test_state_bytes_follow_precision() -> None:
    model, bytes_of = VARIANTS["7b"], {"pure": 4, "nearest": 4, "moments": 4, "weights": 8}
    for kind, expected in bytes_of.items():
        found = state_bytes(OptimConfig(), model, KINDS[kind])
        assert found == expected * num_params(model), kind


VOCAB = 64


def sequences(number: int) -> torch.Tensor:
    """Rows in which every token is one of four that may follow the one before."""
    generator = torch.Generator().manual_seed(number)
    follows = torch.randint(0, VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(0))
    rows = torch.randint(0, VOCAB, (8, 33), generator=generator)
    for place in range(1, rows.shape[1]):
        chosen = torch.randint(0, 4, (len(rows),), generator=generator)
        rows[:, place] = follows[rows[:, place - 1], chosen]
    return rows


def loss_after_300_steps(precision: Precision) -> float:
    """Mean over the last 30."""
    model = build_model(TransformerConfig(1, 64, 128, 4, 4, VOCAB, max_seq_len=32))
    init_weights(model, 1)
    cast_weights(model, precision)
    optimizers, losses = build_optimizers(section(rate=RATE), model, precision, seed=7), []
    for number in range(1, 301):
        rows = sequences(number)
        loss_sum, _ = model(rows[:, :-1], rows[:, 1:])
        (loss_sum / rows[:, 1:].numel()).backward()
        share = min(1, number / 20)
        optimizers.step(lambda base, share=share: base * share, torch.tensor(1.0))  # type: ignore[misc]
        optimizers.zero_grad()
        losses.append(loss_sum.item() / rows[:, 1:].numel())
    return sum(losses[-30:]) / 30


RATE = 3e-4


@pytest.mark.slow
def test_only_stochastic_rounding_learns_like_fp32() -> None:
    expected = loss_after_300_steps(FP32)
    by_chance, to_nearest = loss_after_300_steps(PURE), loss_after_300_steps(NEAREST)
    print(f"fp32 {expected:.4f}, by chance {by_chance:.4f}, to nearest {to_nearest:.4f}")
    assert abs(by_chance / expected - 1) <= 0.01 and to_nearest / expected - 1 > 0.04
