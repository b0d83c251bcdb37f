"""Attention masks and backends, precision, and models that are built in parts."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fms_fsdp.config import BF16
from fms_fsdp.models import attention as attention_module
from fms_fsdp.models.attention import attention_mask, block_mask
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.init import init_weights
from fms_fsdp.models.llama import Llama, rope_table
from fms_fsdp.parallel.dtypes import CastingLinear, apply_precision

BASE = TransformerConfig(2, 64, 176, 4, 4, 97, max_seq_len=48)


def build(config: TransformerConfig, seed: int = 3) -> Llama:
    model = build_model(config)
    init_weights(model, seed)
    return model


def labelled(config: TransformerConfig) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (2, config.max_seq_len), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    return tokens, labels


@pytest.mark.slow
@pytest.mark.parametrize(("pos_emb", "window"), [("rope", 0), ("none", 9)])
def test_document_mask_does_not_recompile(
    pos_emb: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of a GPU, traced on the CPU: one graph for the mask and one for the block, no warning, and
    the outputs and gradients of attention by document."""
    from torch.nn.attention import flex_attention

    # it rejects the backward pass on CPUs
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    how: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": "aot_eager"}
    traced = functools.cache(partial(torch.compile, **how))
    monkeypatch.setattr(attention_module, "compiled", traced)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = replace(BASE, pos_emb=pos_emb, attn_window=window, num_kv_heads=2, max_seq_len=128)
    plain, compiled = (build_model(config).blocks["0"] for _ in range(2))
    compiled.load_state_dict(plain.state_dict())
    compiled.compile(**how)
    x_BSD, rope = torch.randn(2, 128, BASE.hidden_size), rope_table(config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (64, 13, 1):
            ids = (torch.arange(128) // size).to(torch.int32).expand(2, -1).contiguous()
            outputs = []
            for block, mask in (
                (plain, attention_mask(window, ids, slice(0, 128), ids.device)),
                (compiled, block_mask(window, ids, 128, ids.device)),
            ):
                block.zero_grad()
                out = block(x_BSD, rope, mask)
                out.square().sum().backward()
                outputs.append([out, *(parameter.grad for parameter in block.parameters())])
            torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not [w for w in caught if "lru_cache" in str(w.message) or "_compile" in str(w.message)]


def test_fp32_weights_compute_in_bf16_without_autocast() -> None:
    config = replace(BASE, num_kv_heads=2)
    model = build(config)
    tokens, labels = labelled(config)
    exact, _ = model(tokens, labels)
    apply_precision(model, BF16)
    assert model(tokens).dtype == torch.bfloat16
    loss_sum, _ = model(tokens, labels)
    loss_sum.backward()
    assert loss_sum.dtype == torch.float32 and model.rope.dtype == torch.float32
    assert all(
        p.dtype == torch.float32 and p.grad is not None and p.grad.dtype == torch.float32
        for p in model.parameters()
    )
    torch.testing.assert_close(loss_sum, exact, rtol=2e-3, atol=0)


@pytest.mark.parametrize("attn_impl", ["flash", "math"])
def test_attention_backends_agree(attn_impl: str) -> None:
    tokens, _ = labelled(BASE)
    torch.testing.assert_close(
        build(replace(BASE, attn_impl=attn_impl))(tokens), build(BASE)(tokens), rtol=1e-5, atol=1e-5
    )


def test_flash_kernel_gets_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's takes none, and CPU's does."""
    chosen = []

    def choose(backend: SDPBackend) -> Any:
        chosen.append(backend)
        return sdpa_kernel(backend)

    monkeypatch.setattr(attention_module, "sdpa_kernel", choose)
    tokens, _ = labelled(BASE)
    build(replace(BASE, attn_impl="flash", attn_window=8))(tokens)
    assert not chosen
    build(replace(BASE, attn_impl="flash"))(tokens)
    assert set(chosen) == {SDPBackend.FLASH_ATTENTION}


@pytest.mark.parametrize("pos_emb", ["rope", "alibi", "relative"])
def test_efficient_kernel_gets_no_grouped_queries(
    pos_emb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's has none: torch found no kernel for --attn_impl=efficient with fewer key/value heads."""
    chosen = []

    def choose(backend: SDPBackend) -> Any:
        chosen.append(backend)
        return sdpa_kernel(SDPBackend.MATH)  # a CPU has no such kernel

    def checked(*qkv: torch.Tensor, enable_gqa: bool, **how: Any) -> torch.Tensor:
        assert not enable_gqa and len({x.shape[1] for x in qkv}) == 1
        return plain(*qkv, **how)

    config = replace(BASE, num_kv_heads=2, pos_emb=pos_emb)
    tokens, _ = labelled(config)
    expected = build(config)(tokens)
    plain = F.scaled_dot_product_attention
    monkeypatch.setattr(attention_module, "sdpa_kernel", choose)
    monkeypatch.setattr(F, "scaled_dot_product_attention", checked)
    found = build(replace(config, attn_impl="efficient"))(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert set(chosen) == {SDPBackend.EFFICIENT_ATTENTION}


def test_stages_equal_the_whole_model() -> None:
    """Layers have global names, so the stages take over its weights by name."""
    whole = build(BASE)
    tokens, labels = labelled(BASE)
    stages = [Llama(BASE, range(1)), Llama(BASE, range(1, 2))]
    for stage in stages:
        missing, _ = stage.load_state_dict(whole.state_dict(), strict=False)
        assert not missing
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    assert torch.equal(stages[1](stages[0](tokens), labels)[0], whole(tokens, labels)[0])


def test_loaded_model_equals_the_trained_one() -> None:
    """The rotary table is in no checkpoint: building makes it, and `to_empty` too."""
    trained = build(BASE)
    tokens, _ = labelled(BASE)
    with torch.device("meta"):
        on_meta = Llama(BASE)
    for other in (Llama(BASE), on_meta.to_empty(device="cpu")):
        other.load_state_dict(trained.state_dict())
        assert torch.equal(other(tokens), trained(tokens))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_cpus_keep_cast_weights_for_backward(device: str) -> None:
    """They are those that the backward pass would cast; meta tensors stand for a GPU's."""
    layer = CastingLinear(64, 96, bias=False, device=device)
    x = torch.randn(8, 64, device=device).bfloat16().requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    kept = [t for t in saved if t.dtype == torch.bfloat16 and t.shape == layer.weight.shape]
    assert len(kept) == (device == "cpu")
    if kept:
        y.backward(torch.ones_like(y))
        (expected,) = torch.autograd.grad(
            F.linear(x, layer.weight.bfloat16()), x, torch.ones_like(y)
        )
        assert x.grad is not None and torch.equal(x.grad, expected)
