"""Checkpoints of fms-fsdp, read as the weights of a Llama folder of Hugging Face.

    step_N_ckp (DCP) or .pth ── their names ── what is fused is split, q and k put in order ── HF's names

Their rotary embedding turns neighbours of a head (dims 2i and 2i + 1), ours and Hugging Face's turns dims i
and i + K/2: so rows of q and k change places. The optimizer's state stays behind.

Source: https://github.com/foundation-model-stack/foundation-model-stack (fms/models/llama.py,
fms/modules/positions.py) and https://github.com/foundation-model-stack/fms-fsdp
(fms_fsdp/utils/checkpointing_utils.py): names, order of fused rows, the formula of NTK alpha.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch

from fms_fsdp.checkpoint.io import CheckpointReader, load_tensor
from fms_fsdp.config import ModelConfig
from fms_fsdp.errors import UserError
from fms_fsdp.extras.hf import HFWeight
from fms_fsdp.extras.hf_folder import HFFolder, check_names
from fms_fsdp.extras.weight_files import Weights
from fms_fsdp.models.init import clean_name
from fms_fsdp.models.variants import VARIANTS, canonical_variant, resolve_model

_PREFIX, _EMBEDDING = "model_state.", "model.embed_tokens.weight"
_OUTSIDE = {
    "shared.emb": "model.embed_tokens",
    "embedding": "model.embed_tokens",
    "dec_norm": "model.norm",
    "shared.head": "lm_head",
    "head": "lm_head",
}
_INSIDE = {  # theirs → the weights of Hugging Face whose rows it holds
    "ln": ("input_layernorm",),
    "ff_ln": ("post_attention_layernorm",),
    "attn.qkv_fused": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.query": ("self_attn.q_proj",),
    "attn.key": ("self_attn.k_proj",),
    "attn.value": ("self_attn.v_proj",),
    "attn.dense": ("self_attn.o_proj",),
    "ff_sub_layer.wg1_fused": ("mlp.gate_proj", "mlp.up_proj"),
    "ff_sub_layer.wg": ("mlp.gate_proj",),
    "ff_sub_layer.w1": ("mlp.up_proj",),
    "ff_sub_layer.w2": ("mlp.down_proj",),
}


def find_checkpoint(path: Path) -> Path | None:
    """The file, the DCP folder, or the newest step_N_ckp in a folder; None where there is none."""
    if path.is_file() or ((path / ".metadata").is_file() and not (path / "files.json").exists()):
        return path
    steps = {
        int(match[1]): found
        for root in (path, path / "checkpoints")
        for found in (root.iterdir() if root.is_dir() else ())
        if (match := re.fullmatch(r"step_(\d+)_ckp(\.pth)?", found.name))
    }
    return steps[max(steps)] if steps else None


def open_checkpoint(path: Path, section: ModelConfig, ntk_alpha: int) -> HFFolder:
    """The weights, which must be those of the shape that the flags say; sizes are compared as they are read.

    Raises:
        UserError: the checkpoint cannot be read, or a weight is missing, unknown or of another shape.
    """
    try:
        found = _renamed(_read_file(path) if path.is_file() else _read_folder(path))
        tokens = len(found[_EMBEDDING].read()) if _EMBEDDING in found else None
        positions = VARIANTS[canonical_variant(section.model_variant)].max_seq_len
        shape = resolve_model(section, seq_length=positions, data_vocab_size=tokens)
        if ntk_alpha > 1:
            size = shape.rotary_dim
            shape = replace(shape, rope_theta=shape.rope_theta * ntk_alpha ** (size / (size - 2)))
        needed = check_names(shape, found)
    except (ValueError, OSError) as error:
        raise UserError(f"--path ({path}) cannot be read: {error}") from None
    weights: dict[str, Callable[[], torch.Tensor]] = {}
    for name in needed:
        weights[name] = partial(_read, found[name], name, needed, shape.head_dim)
    return HFFolder(shape, weights)


class _Fused(NamedTuple):
    """What reads a weight of theirs, and the names of those whose rows it holds."""

    read: Callable[[], torch.Tensor]
    names: list[str]


def _read(fused: _Fused, name: str, needed: Mapping[str, HFWeight], head_dim: int) -> torch.Tensor:
    whole, rows = fused.read(), [needed[each].shape[0] for each in fused.names]
    size = (sum(rows), *needed[name].shape[1:])
    if whole.shape != size:
        there = tuple(whole.shape)
        raise UserError(
            f"weight {name} must be of {size}, not {there}; give the flags of its shape"
        )
    part: torch.Tensor = torch.split(whole, rows)[fused.names.index(name)]
    if ".q_proj." in name or ".k_proj." in name:
        part = part.view(-1, head_dim // 2, 2, *part.shape[1:]).transpose(1, 2).reshape(part.shape)
    return part


def _read_file(path: Path) -> Weights:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["model_state"]
        return {str(name): partial(state.__getitem__, name) for name in state.keys()}
    except Exception as error:  # pickle's and zip's errors are of many kinds
        raise UserError(
            f"there is no model_state of weights alone ({type(error).__name__})"
        ) from None


def _read_folder(path: Path) -> Weights:
    reader = CheckpointReader(path)
    read = lru_cache(maxsize=1)(
        partial(load_tensor, reader)
    )  # the parts of a fused weight are asked for in turn
    names = [
        name for name in reader.read_metadata().state_dict_metadata if name.startswith(_PREFIX)
    ]
    return {name.removeprefix(_PREFIX): partial(read, name) for name in names}


def _renamed(raw: Weights) -> dict[str, _Fused]:
    """By the names of Hugging Face; what has none there keeps its own."""
    found: dict[str, _Fused] = {}
    for name, read in raw.items():
        plain = clean_name(name).removeprefix("base_model.").replace("attn.in_proj.", "attn.")
        module, _, kind = plain.rpartition(".")
        match = re.fullmatch(r"layers\.(\d+)\.(.*)", module)
        names = [_OUTSIDE.get(module, module)]
        if match is not None:
            names = [
                f"model.layers.{match[1]}.{part}" for part in _INSIDE.get(match[2], (match[2],))
            ]
        if not module.startswith("rot_emb"):  # a table, which follows from the shape
            fused = _Fused(read, [f"{each}.{kind}" for each in names])
            found |= dict.fromkeys(fused.names, fused)
    return found
