"""The recipe on one process: selection of blocks, compilation, clipping, order.

tests/distributed/test_sharded_training.py has the world sizes.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from fms_fsdp.config import ParallelConfig, parse_selective_checkpointing
from fms_fsdp.mesh import Mesh, ParallelDims
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.parallel.activation import select_blocks
from fms_fsdp.parallel.compile import check_compile
from fms_fsdp.parallel.fsdp import clip_grad_norm
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.parallel.precision import fsdp_policy

CPU = torch.device("cpu")
NO_MESH = Mesh(ParallelDims("none"), 0, "cpu")
CONFIG = LlamaConfig(3, 64, 96, 4, 2, 120, max_seq_len=24)


def build(config: LlamaConfig = CONFIG, mixed_precision: bool = False, **flags: object) -> Llama:
    section = ParallelConfig(**flags)  # type: ignore[arg-type]
    return parallelize(config, section, NO_MESH, device=CPU, mixed_precision=mixed_precision, seed=1)


def step(model: Llama, length: int = 24) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tokens = (torch.arange(2 * length) * 7 % 120).view(2, length)
    loss_sum, _ = model(tokens, tokens.roll(-1, 1))
    loss_sum.backward()
    return loss_sum, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("num_blocks", [1, 5, 6, 32, 80])
@pytest.mark.parametrize("text", ["1", "1/2", "0.33", "2/3", "every:4", "1/7", "0.9"])
def test_checkpointed_blocks_are_evenly_spaced(num_blocks: int, text: str) -> None:
    share = parse_selective_checkpointing(text)
    chosen = select_blocks(num_blocks, share)
    assert sum(chosen) == max(1, int(num_blocks * share))
    places = [i for i, one in enumerate(chosen) if one]
    gaps = {b - a for a, b in zip(places, places[1:], strict=False)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_checkpointing_fractions_mean_what_they_say() -> None:
    assert select_blocks(4, Fraction(1)) == [True] * 4
    assert select_blocks(6, Fraction(1, 2)) == [False, True] * 3
    assert select_blocks(6, Fraction(1, 3)) == [False, False, True] * 2


def test_checkpointing_keeps_loss_and_gradients_to_the_last_bit() -> None:
    loss, gradients = step(build())
    again, recomputed = step(build(fsdp_activation_checkpointing=True))
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, recomputed, strict=True))


def test_checkpointing_keeps_fewer_activations() -> None:
    def saved_bytes(model: Llama) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.zeros(2, 24, dtype=torch.long), torch.zeros(2, 24, dtype=torch.long))
        return sum(sizes.values())

    none = saved_bytes(build())
    half = saved_bytes(build(fsdp_activation_checkpointing=True, selective_checkpointing="2/3"))
    full = saved_bytes(build(fsdp_activation_checkpointing=True))
    assert full < half < none


@pytest.mark.filterwarnings("ignore")  # torch 2.13's own compiler warns of deprecated calls it makes
@pytest.mark.parametrize("mixed_precision", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_share_one_compilation_beside_that_of_the_loss_and_agree_with_eager(
    mixed_precision: bool,
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    loss, gradients = step(build(mixed_precision=mixed_precision))
    model = build(mixed_precision=mixed_precision, use_torch_compile=True)
    for _ in range(3):
        model.zero_grad()
        compiled_loss, compiled = step(model)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    tolerance = dict(rtol=3e-2, atol=3e-1) if mixed_precision else dict(rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(compiled_loss, loss, rtol=2e-3 if mixed_precision else 1e-6, atol=0)
    torch.testing.assert_close(compiled, gradients, **tolerance)


@pytest.mark.parametrize("max_norm", [0.5, 1e9, 0.0])
def test_clipping_equals_torchs(max_norm: float) -> None:
    model, other = build(), build()
    step(model)
    step(other)
    norm = clip_grad_norm(model.parameters(), max_norm, NO_MESH)
    expected = torch.nn.utils.clip_grad_norm_(other.parameters(), max_norm or float("inf"))
    assert norm.dtype == torch.float32 and norm.ndim == 0 and type(norm) is torch.Tensor
    torch.testing.assert_close(norm, expected)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_master_weights_stay_fp32_and_inputs_are_not_cast() -> None:
    policy = fsdp_policy(ParallelConfig(), mixed_precision=True)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert not policy.cast_forward_inputs  # it would round the rotary table
    assert fsdp_policy(ParallelConfig(reduce_dtype="bf16"), True).reduce_dtype == torch.bfloat16
    assert fsdp_policy(ParallelConfig(), mixed_precision=False).param_dtype is None
    model = build(mixed_precision=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_compile_without_a_compiler_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match=r"--use_torch_compile \(True\) needs a C\+\+ compiler"):
        check_compile(CPU)


def test_an_attention_backend_the_device_lacks_is_refused() -> None:
    from dataclasses import replace

    with pytest.raises(ValueError, match=r"--attn_impl \(efficient\) .* auto, flash, math"):
        build(replace(CONFIG, attn_impl="efficient"))
