"""Small folders of Hugging Face, made without transformers: config.json, weights, a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fms_fsdp.hf.families import config_to_hf
from fms_fsdp.hf.weights import fuse, weight_map
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.init import init_weights
from fms_fsdp.models.llama import Llama

LLAMA = TransformerConfig(2, 32, 48, 4, 2, 300, max_seq_len=64, init_std=0.3)
GPT2 = replace(
    LLAMA,
    num_kv_heads=4,
    norm="layernorm",
    activation="gelu_tanh",
    bias=True,
    pos_emb="learned",
    tie_embeddings=True,
)
FAMILIES = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, attn_window=7),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=16),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "gpt2": GPT2,
    "gpt_neox": replace(
        GPT2,
        activation="gelu",
        pos_emb="rope",
        rope_pct=0.25,
        parallel_residual=True,
        tie_embeddings=False,
    ),
}
BEGIN, END = "<|begin|>", "<|end|>"


@cache
def model_of(kind: str) -> Llama:
    model = build_model(FAMILIES[kind])
    init_weights(model, seed=3)
    return model.eval()


def weights_of(kind: str) -> dict[str, torch.Tensor]:
    own = model_of(kind).state_dict()
    config = FAMILIES[kind]
    return {
        name: fuse(config, weight.ours, own.__getitem__).contiguous()
        for name, weight in weight_map(config).items()
    }


def write_folder(
    folder: Path, kind: str = "llama", *, tokenizer: bool = False, **changes: Any
) -> Path:
    """A folder of that family; `changes` of its config.json, `...` takes a field out."""
    folder.mkdir(parents=True, exist_ok=True)
    content = config_to_hf(FAMILIES[kind]) | {"model_type": kind} | changes
    content = {name: value for name, value in content.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(content))
    write_weights(folder, weights_of(kind))
    if tokenizer:
        write_tokenizer_json(folder)
    return folder


def write_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(
        {name: weight.clone() for name, weight in weights.items()}, folder / "model.safetensors"
    )


def change_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    changed = change(content)
    path.write_text(json.dumps(content if changed is None else changed))


def template(begin: int | None = 256, end: int | None = None) -> dict[str, Any]:
    """A post_processor that puts tokens around a text, as Llama 3's does."""
    ids = {name: number for name, number in ((BEGIN, begin), (END, end)) if number is not None}
    known = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in ids.items()}

    def special(name: str) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": name, "type_id": 0}}] if name in ids else []

    single = [*special(BEGIN), {"Sequence": {"id": "A", "type_id": 0}}, *special(END)]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    processor = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": known,
    }
    offsets = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": False,
        "use_regex": True,
    }
    return {"type": "Sequence", "processors": [offsets, processor]}


def write_tokenizer_json(folder: Path, post_processor: Any = None, **model: Any) -> Path:
    """Bytes, and a few merges, as tokenizer.json; 256 begins and 257 ends a text."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    by_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": True,
    }
    vocab = {
        character: number
        for number, character in enumerate(bytes_to_unicode()[byte] for byte in range(256))
    }
    vocab |= {BEGIN: 256, END: 257, "th": 258, "the": 259, "in": 260}
    kind = {"type": "BPE", "vocab": vocab, "merges": [["t", "h"], ["th", "e"], ["i", "n"]], **model}
    flags = {"special": True} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )
    added = [{"id": 256, "content": BEGIN, **flags}, {"id": 257, "content": END, **flags}]
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": by_bytes,
        "decoder": by_bytes,
        "model": kind,
    }
    content["post_processor"] = post_processor
    (folder / "tokenizer.json").write_text(json.dumps(content))
    end = {"__type": "AddedToken", "content": END} | dict.fromkeys(
        ("lstrip", "rstrip", "normalized"), False
    )
    said = {"bos_token": BEGIN, "eos_token": end, "add_bos_token": False}
    said |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder / "tokenizer.json"
