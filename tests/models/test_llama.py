"""The model against `transformers`, its masks and its precision."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fms_fsdp.config import BF16
from fms_fsdp.models import attention as attention_module
from fms_fsdp.models.attention import KVCache, attention, attention_mask, block_mask
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import RopeScaling, TransformerConfig
from fms_fsdp.models.init import init_weights
from fms_fsdp.models.llama import Llama, rope_table
from fms_fsdp.parallel.precision import apply_precision

BASE = TransformerConfig(2, 64, 176, 4, 4, 97, max_seq_len=48)
SHAPES = {
    "mha": BASE,
    "gqa": replace(BASE, num_kv_heads=2, rope_theta=5e5),
    "mqa tied": replace(BASE, num_kv_heads=1, tie_embeddings=True),
    "tied": replace(BASE, tie_embeddings=True, norm_eps=1e-6),
    "rope scaled": replace(
        BASE, rope_scaling=RopeScaling(32.0, original_max_len=16), rope_theta=500.0
    ),
    "rope scaled gqa tied": replace(
        BASE, num_kv_heads=2, rope_scaling=RopeScaling(8.0), tie_embeddings=True
    ),
}


def build(config: TransformerConfig, seed: int = 3) -> Llama:
    model = build_model(config)
    init_weights(model, seed)
    return model


def reference(config: TransformerConfig) -> Any:
    """transformers' Llama of the same shape."""
    from transformers import LlamaConfig as HFConfig
    from transformers import LlamaForCausalLM

    rope: dict[str, Any] = dict(rope_type="default", rope_theta=config.rope_theta)
    if (scaling := config.rope_scaling) is not None:
        rope = dict(
            rope_type="llama3",
            rope_theta=config.rope_theta,
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_max_len,
        )
    return LlamaForCausalLM(
        HFConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_kv_heads,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            max_position_embeddings=config.max_seq_len,
            rope_parameters=rope,
            use_cache=False,
        )
    )


def reference_name(name: str) -> str:
    """The reference's name of one of our parameters."""
    if name == "head.weight":
        return "lm_head.weight"
    for ours, theirs in {
        "embed.": "embed_tokens.",
        "blocks.": "layers.",
        "head.norm.": "norm.",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention.": "self_attn.",
        "feed_forward.": "mlp.",
    }.items():
        name = name.replace(ours, theirs)
    return f"model.{name}"


def labelled(config: TransformerConfig, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (rows, config.max_seq_len), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    labels[0, 5:9] = -100
    return tokens, labels


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_gradients_equal_transformers(name: str) -> None:
    config = SHAPES[name]
    ours, theirs = build(config), reference(config)
    their_parameters = dict(theirs.named_parameters())
    with torch.no_grad():
        for parameter in ours.parameters():  # weights well away from 0, so that no path is hidden
            parameter.mul_(5.0 if parameter.ndim > 1 else 1.0).add_(
                0.1 * torch.randn_like(parameter) * (parameter.ndim == 1)
            )
        for own_name, parameter in ours.named_parameters():
            their_parameters.pop(reference_name(own_name)).copy_(parameter)
    assert not their_parameters
    tokens, labels = labelled(config)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)

    loss_sum, num_labels = ours(tokens, labels)
    (loss_sum / num_labels).backward()
    logits = theirs(tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    expected.backward()
    assert num_labels.item() == (labels != -100).sum().item()
    torch.testing.assert_close(loss_sum / num_labels, expected, rtol=1e-5, atol=0)
    gradients = dict(theirs.named_parameters())
    for own_name, parameter in ours.named_parameters():
        theirs_gradient = gradients[reference_name(own_name)].grad
        torch.testing.assert_close(
            parameter.grad, theirs_gradient, rtol=1e-5, atol=1e-5, msg=own_name
        )


@pytest.mark.parametrize(
    "config",
    [BASE, replace(BASE, num_kv_heads=2), replace(BASE, pos_emb="learned", norm="layernorm")],
)
def test_masked_documents_equal_separate_documents(config: TransformerConfig) -> None:
    model = build(config)
    lengths = [20, 1, 27]
    tokens, labels = labelled(config, rows=1)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).to(torch.int32)[None]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(torch.int32)[None]
    together = model(tokens, positions_BS=positions, document_ids_BS=ids)
    apart = torch.cat([model(part) for part in tokens.split(lengths, 1)], 1)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    loss_together, _ = model(tokens, labels, positions, ids)
    loss_apart = sum(
        model(*parts)[0]
        for parts in zip(tokens.split(lengths, 1), labels.split(lengths, 1), strict=True)
    )
    torch.testing.assert_close(loss_together, loss_apart, rtol=1e-5, atol=0)
    assert not torch.allclose(together, model(tokens), atol=1e-3)  # the mask does something


@pytest.mark.parametrize("compiled", [False, True])
def test_attention_document_by_document_is_attention_under_the_mask(compiled: bool) -> None:
    """Outputs and gradients, of rows cut at different places, with grouped heads."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, 64, 16, requires_grad=True) for heads in (4, 2, 2))
    ids = torch.stack([torch.arange(64) // size for size in (64, 13, 1)]).to(torch.int32)
    same = (ids[:, :, None] == ids[:, None, :]).tril()[:, None]
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=same, enable_gqa=True)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    attend = torch.compile(attention, backend="eager") if compiled else attention
    out = attend(q, k, v, attention_mask(0, ids, slice(0, 64), ids.device))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), (q, k, v)), wanted, rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("pos_emb", ["rope", "none"])
def test_a_compiled_block_takes_the_blocks_of_other_documents_without_new_code(
    pos_emb: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU runs under a document mask, traced on the CPU: one graph for the mask and one for the block,
    no warning of ours, and the outputs and gradients of attention by document."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(
        flex_attention, "_validate_device", lambda *_: None
    )  # no backward pass on CPUs
    traced = partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")
    monkeypatch.setattr(attention_module, "compiled", functools.cache(traced))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = replace(BASE, pos_emb=pos_emb, attn_window=window, num_kv_heads=2)
    plain, compiled = (build_model(config).blocks["0"] for _ in range(2))
    compiled.load_state_dict(plain.state_dict())
    compiled.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    x_BSD = torch.randn(2, 128, BASE.hidden_size)
    rope = rope_table(replace(config, max_seq_len=128))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for size in (64, 13, 1):
            ids = (torch.arange(128) // size).to(torch.int32).expand(2, -1).contiguous()
            outputs = []
            eager = attention_mask(window, ids, slice(0, 128), ids.device)
            for block, mask in (
                (plain, eager),
                (compiled, block_mask(window, ids, 128, ids.device)),
            ):
                block.zero_grad()
                out = block(x_BSD, rope, mask)
                out.square().sum().backward()
                outputs.append([out, *(parameter.grad for parameter in block.parameters())])
            torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not any(
        "lru_cache" in str(line.message) or "_compile" in str(line.message) for line in told
    )


def test_default_positions_and_one_document_change_nothing() -> None:
    model = build(BASE)
    tokens, _ = labelled(BASE)
    positions = torch.arange(BASE.max_seq_len, dtype=torch.int32).expand_as(tokens)
    plain = model(tokens)
    assert torch.equal(model(tokens, positions_BS=positions), plain)
    masked = model(
        tokens, positions_BS=positions, document_ids_BS=torch.zeros_like(tokens, dtype=torch.int32)
    )
    torch.testing.assert_close(masked, plain, rtol=1e-5, atol=1e-6)


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model = build(BASE)
    tokens, _ = labelled(BASE)
    changed = tokens.clone()
    changed[:, 30:] = (changed[:, 30:] + 1) % BASE.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :30], after[:, :30], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 30:], after[:, 30:], atol=1e-3)


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


def test_rotary_table_depends_on_relative_position_only() -> None:
    model = build(BASE)
    tokens, _ = labelled(BASE)
    shifted = torch.arange(8, 8 + 40, dtype=torch.int32).expand(2, 40)
    torch.testing.assert_close(
        model(tokens[:, :40], positions_BS=shifted), model(tokens[:, :40]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("shape", ["mha", "gqa"])
def test_tokens_that_come_in_parts_see_what_the_cache_holds(shape: str) -> None:
    """A prompt at once, then three tokens, then one by one: the logits of each part's last position are those
    of the whole row."""
    config = SHAPES[shape]
    model = build(config)
    tokens, _ = labelled(config)
    whole, parts = model(tokens), []
    caches = [KVCache(config.max_seq_len) for _ in range(config.num_layers)]
    with torch.no_grad():
        for part in tokens.split([20, 3, *[1] * (tokens.shape[1] - 23)], dim=1):
            parts.append(model(part, caches=caches))
    last = [19, 22, *range(23, tokens.shape[1])]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole[:, last], rtol=1e-4, atol=1e-5)


def test_stages_of_a_model_are_the_model() -> None:
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


def test_a_model_that_is_built_and_loaded_alone_computes_the_same() -> None:
    """The rotary table is in no checkpoint: it is there when the model is, and after `to_empty`."""
    trained = build(BASE)
    tokens, _ = labelled(BASE)
    with torch.device("meta"):
        on_meta = Llama(BASE)
    for other in (Llama(BASE), on_meta.to_empty(device="cpu")):
        other.load_state_dict(trained.state_dict())
        assert torch.equal(other(tokens), trained(tokens))


def test_bf16_keeps_no_copy_of_the_weights_for_the_backward_pass() -> None:
    model = build(BASE)
    apply_precision(model, BF16)
    tokens, labels = labelled(BASE)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda kept: kept
    ):
        model(tokens, labels)
    copies = [
        t
        for t in kept
        if t.dtype == torch.bfloat16 and tuple(t.shape) in {(64, 64), (176, 64), (64, 176)}
    ]
    assert copies == [] and any(
        tensor.dtype == torch.float32 and tensor.ndim == 2 for tensor in kept
    )
