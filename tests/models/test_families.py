"""Models against the classes of `transformers`: logits and gradients, by the names and fields of an export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fms_fsdp.hf.families import config_to_hf, find_family
from fms_fsdp.hf.weights import fuse, weight_map
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import RopeScaling, TransformerConfig
from fms_fsdp.models.init import init_weights
from fms_fsdp.models.llama import Llama

BASE = TransformerConfig(2, 64, 176, 4, 4, 97, max_seq_len=48, vocab_multiple_of=32)
GPT2 = replace(BASE, norm="layernorm", activation="gelu_tanh", bias=True, pos_emb="learned")
NEOX = replace(GPT2, activation="gelu", pos_emb="rope", rope_pct=0.25, parallel_residual=True)
QWEN3 = replace(BASE, num_kv_heads=2, head_dim=32, qk_norm=True, rope_theta=1e6)
QWEN2 = replace(BASE, num_kv_heads=2, qkv_bias=True, rope_theta=1e6, norm_eps=1e-6)
LLAMA3 = replace(BASE, num_kv_heads=1, tie_embeddings=True, rope_theta=500.0)
SHAPES = {
    "Llama": (BASE, "Llama"),
    "Llama, biases, wide heads": (replace(BASE, bias=True, head_dim=24, num_kv_heads=2), "Llama"),
    "Llama, linear rope": (replace(BASE, rope_scaling=RopeScaling(4.0, kind="linear")), "Llama"),
    "Llama 3": (replace(LLAMA3, rope_scaling=RopeScaling(8.0, original_max_len=16)), "Llama"),
    "GPT-2": (replace(GPT2, tie_embeddings=True), "GPT2"),
    "GPT-2, untied, relu2": (replace(GPT2, activation="relu2"), "GPT2"),
    "NeoX": (NEOX, "GPTNeoX"),
    "NeoX, one after the other": (replace(NEOX, parallel_residual=False, rope_pct=0.5), "GPTNeoX"),
    "Qwen3": (QWEN3, "Qwen3"),
    "Qwen2, tied, wide heads": (replace(QWEN2, tie_embeddings=True, head_dim=24), "Qwen2"),
    "Mistral": (replace(BASE, num_kv_heads=2, attn_window=7), "Mistral"),
}


def build(config: TransformerConfig) -> Llama:
    """Returns a model whose weights are all well away from 0 and 1, so that no path is hidden."""
    model, generator = build_model(config), torch.Generator().manual_seed(1)
    init_weights(model, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.mul_(5.0 if parameter.ndim > 1 else 1.0).add_(noise, alpha=0.1)
    return model


def labelled(config: TransformerConfig) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (2, 48), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = labels[0, 5:9] = -100
    return tokens, labels


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    config, family = SHAPES[name]
    ours, weights, content = build(config), weight_map(config), config_to_hf(config)
    assert content["architectures"][0].startswith(family)
    own = ours.state_dict()
    made = {
        key: fuse(config, weight.ours, own.__getitem__).contiguous()
        for key, weight in weights.items()
    }
    save_file(made, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(content))
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert type(theirs).__name__ == content["architectures"][0]
    assert not any(info.values()), info

    tokens, labels = labelled(config)
    logits = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), logits, rtol=1e-5, atol=1e-5)
    loss_sum, num_labels = ours(tokens, labels)
    loss = loss_sum / num_labels
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    their_parameters = dict(theirs.named_parameters())
    gradients = {key: parameter.grad for key, parameter in ours.named_parameters()}
    for key, weight in weights.items():
        gradient = fuse(config, weight.ours, gradients.__getitem__)
        if key not in their_parameters:  # transformers 5 reads that name, and has another
            key = key.replace("embed_out", "lm_head")
        theirs_gradient = their_parameters[key].grad
        torch.testing.assert_close(gradient, theirs_gradient, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            replace(BASE, norm="scalenorm"),
            r"--norm=scalenorm \(not rmsnorm\) is not supported by Llama",
        ),
        (replace(BASE, pos_emb="alibi"), r"--pos_emb=alibi \(not rope\)"),
        (replace(GPT2, pos_emb="sinusoidal"), r"--pos_emb=sinusoidal \(not learned\) .* GPT2"),
        (replace(NEOX, num_kv_heads=2), r"--num_kv_heads=2 \(not 4\) .* GPTNeoX"),
        (replace(QWEN3, attn_window=4), r"not supported by (Mistral|Qwen3)"),
        (
            replace(BASE, attn_window=4, attn_window_pattern="LG"),
            r"--attn_window_pattern=LG \(not L\)",
        ),
    ],
)
def test_model_without_family_is_rejected(config: TransformerConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        find_family(config)
    assert "\n" not in str(error.value)
