"""AdamW over weights or moments in bf16: rounding by chance, equal bits on any layout, and what it learns."""

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
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fms_fsdp.config import FP32, OptimConfig, ParallelConfig, Precision
from fms_fsdp.distributed.mesh import Mesh, plan_dims
from fms_fsdp.distributed.runtime import World
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.init import init_weights
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.optim.optimizers import build_optimizers, example_state, state_bytes
from fms_fsdp.optim.stochastic_rounding import (
    _hash,
    adamw_update,
    compile_update,
    random_bits,
    round_stochastically,
)
from fms_fsdp.parallel.fsdp import clip_grad_norm, set_gradient_sync
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.parallel.precision import DTYPES, cast_weights
from tests.distributed.launch import run_ranks
from tests.distributed.test_sharded_training import batches, config
from tests.optim.test_sharded_optimizers import Model, everything, step

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
def test_rounding_errs_by_nothing_on_average(base: int) -> None:
    """Of positive and negative numbers, of the least and of large ones; with either half of what is drawn."""
    bits = drawn(5, 1000, 1000)
    for tenth in range(1, 10):
        part = tenth * 0x10000 // 10
        value = torch.tensor((base << 16) + part).to(torch.int32).view(torch.float32)
        for half in (bits, bits >> 16):
            rounded = round_stochastically(value.expand(bits.shape).contiguous(), half).view(
                torch.int32
            )
            ups = (rounded >> 16 & 0xFFFF) - base
            assert ups.unique().tolist() == [0, 1] and not (rounded & 0xFFFF).any()
            assert abs(ups.double().mean().item() - part / 0x10000) <= 2.5e-3


def test_draws_are_independent_of_one_another_and_of_the_cut() -> None:
    bits = drawn(5, 500, 1000)
    more = _hash(bits.clone())
    others = (bits >> 16, more, more >> 16, drawn(6, 500, 1000), bits.roll(1, 0), bits.roll(1, 1))
    for other in others:
        both = torch.stack([bits.flatten() & 0xFFFF, other.flatten() & 0xFFFF]).double()
        assert abs(torch.corrcoef(both)[0, 1]) < 6e-3
    assert torch.equal(random_bits(*place(5, slice(20, 50), slice(7, 47))), bits[20:50, 7:47])


def test_the_carry_ends_below_infinity_and_what_bf16_holds_stays() -> None:
    largest, infinity = torch.finfo(torch.bfloat16).max, math.inf
    most = torch.full((), 0xFFFF, dtype=torch.int32)
    finite = [largest, torch.finfo(torch.float32).max, 1.0, 0.0, 1e-45, 3.0]
    values = torch.tensor([*finite, infinity])
    up = torch.tensor([largest, largest, 1.0, 0.0, 2.0**-133, 3.0, infinity])
    assert torch.equal(round_stochastically(values, most), up) and torch.equal(
        round_stochastically(-values, most), -up
    )
    assert torch.equal(
        round_stochastically(values, most - most),
        torch.tensor([largest, largest, 1, 0, 0, 3, infinity]),
    )
    assert round_stochastically(torch.tensor([math.nan, -math.nan]), most).isnan().all()
    values = torch.randn(100_000)
    for rounded in (
        round_stochastically(values, drawn(1, 100_000)),
        -round_stochastically(-values, drawn(1, 100_000)),
    ):
        assert torch.equal(rounded, rounded.bfloat16().float())
        assert torch.equal(rounded, round_stochastically(values, drawn(1, 100_000)))


def section(name: str = "adamw", rate: float = 3e-3, **flags: Any) -> OptimConfig:
    return OptimConfig(optimizer=name, learning_rate=rate, weight_decay=0.1, **flags)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize(("kind", "name"), [("pure", "adamw"), ("moments", "adam")])
def test_a_compiled_step_moves_as_the_plain_one(kind: str, name: str) -> None:
    """Also a skipped step. Square roots of MKL err by an ulp of fp32, those of compiled code
    by none, so a draw may fall the other way, seldom."""
    found = []
    for compiled in (False, True):
        torch.compiler.reset()
        model = Model(SHAPES)
        cast_weights(model, KINDS[kind])
        optimizers = build_optimizers(section(name), model, KINDS[kind], seed=3, compiled=compiled)
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
        other = found[1][key]
        if value.dtype == torch.bfloat16:
            assert (value != other).sum() <= 1e-4 * value.numel(), key
        torch.testing.assert_close(
            value, other, rtol=2**-6 if value.dtype == torch.bfloat16 else 3e-6, atol=1e-6
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kept_in", "compiled"),
    [(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)],
)
def test_a_part_gets_the_bits_of_the_whole(kept_in: torch.dtype, compiled: bool) -> None:
    torch.compiler.reset()
    run = compile_update() if compiled else adamw_update
    generator = torch.Generator().manual_seed(0)
    whole = [torch.rand(41, 37, generator=generator).to(kept_in) for _ in range(4)]
    numbers = [
        torch.tensor(number) for number in (0.9, 0.1, 0.9, 0.1, 0.95, 0.05, 0.3, 1e-8, 1e-2, 0.0)
    ]
    cut = [[tensor[rows].clone() for tensor in whole] for rows in (slice(0, 23), slice(23, 41))]
    for first, part in zip((0, 0, 23), (whole, *cut), strict=True):
        rows = slice(first, first + len(part[0]))
        run(part, numbers, place(9, rows, slice(0, 37)), True, True)
    for one, *others in zip(whole[:3], *cut, strict=False):
        assert torch.equal(one, torch.cat(others))


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_counts_no_indices_itself() -> None:
    """Under dynamic sizes torch 2.11 counts them in 64 bits on a GPU, and refuses to take those for fp32."""
    torch.compiler.reset()
    found: list[str] = []

    def keep(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        found.extend(str(node.target) for node in module.graph.nodes)
        return module

    numbers = [torch.tensor(0.5) for _ in range(10)]
    part = [torch.rand(6, 5).bfloat16() for _ in range(4)]
    where = place(9, slice(3, 9), slice(0, 5))
    torch.compile(adamw_update, fullgraph=True, dynamic=True, backend=keep)(
        part, numbers, where, True, True
    )
    assert any("xor" in name for name in found) and not any("arange" in name for name in found)


def ulp(values: torch.Tensor) -> torch.Tensor:
    """Distance of the numbers of bf16 around each value."""
    return torch.exp2(torch.floor(torch.log2(values.abs().clamp(min=2.0**-126))) - 7)


@pytest.mark.parametrize("name", ["adamw", "adam"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_rounds_what_the_formulas_give(kind: str, name: str) -> None:
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


def test_small_steps_count_on_average_and_are_lost_by_rounding_to_nearest() -> None:
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


def test_a_step_that_is_not_finite_changes_nothing_and_seeds_differ() -> None:
    kept = []
    for seed in (1, 1, 2):
        model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        optimizers = build_optimizers(section(), model, PURE, seed)
        for norm in (1.0, math.inf, 2.0):
            before = everything(model, optimizers)
            model.weight.grad = torch.full_like(model.weight, norm)
            optimizers.step(lambda base: base, torch.tensor(norm))
            same = [
                torch.equal(value, before[key])
                for key, value in everything(model, optimizers).items()
            ]
            assert all(same) if norm == math.inf else not any(same)
        kept.append(model.weight)
    assert torch.equal(kept[0], kept[1]) and not torch.equal(kept[0], kept[2])


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


def distribute(model: nn.Module, mesh: Any) -> None:
    """Rows over one axis and columns over the other; vectors over the second."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = [Shard(0), Shard(1)] if parameter.ndim > 1 else [Replicate(), Shard(0)]
            whole = nn.Parameter(distribute_tensor(parameter.data, mesh, placements))
            module.register_parameter(name, whole)


CASES = [("pure", "adamw"), ("weights", "adamw"), ("moments", "adam")]


def on_ranks(folder: Path) -> dict[tuple[str, ...], Whole]:
    import torch.distributed as dist

    found, world = {}, dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for kind, name in CASES:
        own, shard = folder / f"{kind} {name}", functools.partial(fully_shard, mesh=mesh)
        found["fsdp", kind, name] = trained(kind, name, shard, own if world == 4 else None)
        if world == 2:
            found["resumed", kind, name] = trained(kind, name, shard, own, goes_on=True)
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        found["hsdp", "pure", "adamw"] = trained(
            "pure", "adamw", functools.partial(fully_shard, mesh=mesh)
        )
        found["columns", "pure", "adamw"] = trained(
            "pure", "adamw", lambda model: distribute(model, mesh)
        )
    return found


def test_bits_are_equal_on_any_layout_and_after_a_resume_on_another(tmp_path: Path) -> None:
    alone = {case: trained(*case, lambda model: None) for case in CASES}
    layouts = set()
    for world in (4, 2):
        for rank in run_ranks(on_ranks, world, tmp_path):
            for (layout, *case), found in rank.items():
                layouts.add((world, layout))
                expected = alone[tuple(case)]  # type: ignore[index]
                assert found.keys() == expected.keys()
                for key, value in expected.items():
                    assert torch.equal(found[key], value), (world, layout, case, key)
    assert layouts == {(4, "fsdp"), (4, "hsdp"), (4, "columns"), (2, "fsdp"), (2, "resumed")}


def sums(strategy: str, sync: bool, gradients: str) -> tuple[bool, ...]:
    """Of eight micro-steps: whether the sum is that of each alone in fp32, and in bf16; whether bf16 holds
    it; and whether norm and step read it."""
    import torch.distributed as dist

    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    parallel = ParallelConfig(sharding_strategy=strategy, sync_each_micro_step=sync)
    mesh = Mesh(plan_dims(parallel, "tiny", World(0, 0, world, world)), rank, "cpu")
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
    wide = narrow = held = True
    expected = torch.zeros(())
    for index, parameter in enumerate(parameters):
        assert parameter.grad is not None
        found, parts = parameter.grad, [micro[index] for micro in alone]
        wide &= torch.equal(found, functools.reduce(torch.add, [part.float() for part in parts]))
        narrow &= torch.equal(
            found, functools.reduce(torch.add, [part.bfloat16() for part in parts])
        )
        held &= torch.equal(found.bfloat16().float(), found.float())
        whole = found.full_tensor() if hasattr(found, "full_tensor") else found
        expected += whole.float().square().sum()
        part_sum = functools.reduce(torch.add, [part.float() for part in parts])
        torch.testing.assert_close(found.float(), part_sum, rtol=2e-2, atol=2e-2)
    norm = clip_grad_norm(parameters, 1.0, mesh)
    clipped = clip_grad_norm(parameters, 0.0, mesh)
    optimizers, before = (
        build_optimizers(section(), model, precision),
        parameters[0].detach().clone(),
    )
    optimizers.step(lambda base: base, norm)
    right = math.isclose(norm, expected.sqrt(), rel_tol=1e-5) and math.isclose(
        clipped, 1.0, rel_tol=1e-2
    )
    return wide, narrow, held, right and not torch.equal(before, parameters[0])


def sums_of_each() -> dict[tuple[str, bool, str], tuple[bool, ...]]:
    cases = [
        ("fsdp", True, "fp32"),
        ("fsdp", True, "bf16"),
        ("fsdp", False, "fp32"),
        ("ddp", True, "fp32"),
    ]
    return {case: sums(*case) for case in cases}


def test_gradients_of_bf16_weights_add_up_in_fp32() -> None:
    """Where FSDP adds up by itself, in `reduce_dtype`, it rounds the sum once."""
    assert sums("none", True, "fp32") == (True, False, False, True)
    assert sums("none", True, "bf16") == (False, True, True, True)
    for found in run_ranks(sums_of_each, 2):
        assert found == {
            ("fsdp", True, "fp32"): (True, False, False, True),
            ("fsdp", True, "bf16"): (False, True, True, True),
            ("fsdp", False, "fp32"): (False, False, True, True),
            ("ddp", True, "fp32"): (False, False, True, True),
        }


@pytest.mark.parametrize(
    ("flags", "precision", "text"),
    [
        (
            {"name": "muon"},
            PURE,
            "--optimizer=muon must be adamw or adam if .* --param_dtype",
        ),
        (
            {"name": "lamb"},
            MOMENTS,
            "--optimizer=lamb must be adamw or adam .*use one",
        ),
        (
            {"optimizer_kwargs": ("amsgrad=true",)},
            WEIGHTS,
            "--optimizer_kwargs=amsgrad=true is not supported",
        ),
        (
            {"adam_beta2": 0.999},
            NEAREST,
            r"--adam_beta2=0.999 must be at most 0.99 .* lower it",
        ),
    ],
)
def test_what_cannot_be_rounded_is_refused(
    flags: dict[str, Any], precision: Precision, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        build_optimizers(section(**flags), nn.Linear(3, 3), precision)
    with pytest.raises(ValueError, match=text):
        example_state(section(**flags), precision)


def test_the_second_moment_may_be_slow_where_it_does_not_stall() -> None:
    plain = Precision("bf16", weights="bf16", stochastic_rounding=False)
    for precision in (PURE, plain):
        build_optimizers(section(adam_beta2=0.999), nn.Linear(3, 3), precision)


def test_bytes_are_those_of_what_is_kept_and_saved() -> None:
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


def loss_after_500_steps(precision: Precision) -> float:
    """Mean over the last 50."""
    model = build_model(TransformerConfig(2, 64, 128, 4, 4, VOCAB, max_seq_len=32))
    init_weights(model, 1)
    cast_weights(model, precision)
    optimizers, losses = build_optimizers(section(rate=RATE), model, precision, seed=7), []
    for number in range(1, 501):
        rows = sequences(number)
        loss_sum, _ = model(rows[:, :-1], rows[:, 1:])
        (loss_sum / rows[:, 1:].numel()).backward()
        share = min(1, number / 20)
        optimizers.step(lambda base, share=share: base * share, torch.tensor(1.0))  # type: ignore[misc]
        optimizers.zero_grad()
        losses.append(loss_sum.item() / rows[:, 1:].numel())
    return sum(losses[-50:]) / 50


RATE = 3e-4


@pytest.mark.slow
def test_rounding_by_chance_learns_as_fp32_does_and_rounding_to_nearest_does_not() -> None:
    expected = loss_after_500_steps(FP32)
    by_chance, to_nearest = loss_after_500_steps(PURE), loss_after_500_steps(NEAREST)
    print(f"fp32 {expected:.4f}, by chance {by_chance:.4f}, to nearest {to_nearest:.4f}")
    assert abs(by_chance / expected - 1) <= 0.02 and to_nearest / expected - 1 > 0.04
