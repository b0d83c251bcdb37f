"""Reads checkpoints of upstream fms-fsdp as the weights of a Hugging Face Llama checkpoint.

    step_N_ckp (DCP) or .pth ── rename ── split fused rows, reorder q and k ── HFCheckpoint

Upstream's RoPE rotates neighbouring dimensions (2i, 2i + 1) of a head, ours and Hugging Face's
rotates (i, i + K/2), so the rows of q and k change places. The optimizer state is not read.

Source: https://github.com/foundation-model-stack/foundation-model-stack (fms/models/llama.py,
fms/modules/positions.py) and https://github.com/foundation-model-stack/fms-fsdp
(fms_fsdp/utils/checkpointing_utils.py): names, order of fused rows, the formula of NTK alpha.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from fms_fsdp.checkpoint.io import CheckpointReader, load_tensor
from fms_fsdp.config import ModelConfig
from fms_fsdp.errors import UserError
from fms_fsdp.hf.weights import HFCheckpoint, check_names
from fms_fsdp.models.init import clean_name
from fms_fsdp.models.variants import VARIANTS, canonical_variant, resolve_model

_PREFIX = "model_state."
_EMBEDDING = "model.embed_tokens.weight"
_OUTSIDE = {
    "shared.emb": "model.embed_tokens",
    "embedding": "model.embed_tokens",
    "dec_norm": "model.norm",
    "shared.head": "lm_head",
    "head": "lm_head",
}
_INSIDE = {  # module upstream -> the Hugging Face modules whose rows it holds
    "ln": ["input_layernorm"],
    "ff_ln": ["post_attention_layernorm"],
    "attn.qkv_fused": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.query": ["self_attn.q_proj"],
    "attn.key": ["self_attn.k_proj"],
    "attn.value": ["self_attn.v_proj"],
    "attn.dense": ["self_attn.o_proj"],
    "ff_sub_layer.wg1_fused": ["mlp.gate_proj", "mlp.up_proj"],
    "ff_sub_layer.wg": ["mlp.gate_proj"],
    "ff_sub_layer.w1": ["mlp.up_proj"],
    "ff_sub_layer.w2": ["mlp.down_proj"],
}


def find_upstream_checkpoint(path: Path) -> Path | None:
    """Returns the .pth file or DCP folder of the path, or the newest step_N_ckp in it; None without one."""
    if path.is_file():
        return path
    is_ours = (path / "files.json").exists()
    if (path / ".metadata").is_file() and not is_ours:
        return path
    steps = dict[int, Path]()
    for folder in (path, path / "checkpoints"):
        if folder.is_dir():
            for found in folder.iterdir():
                match = re.fullmatch(r"step_(\d+)_ckp(\.pth)?", found.name)
                if match:
                    steps[int(match[1])] = found
    return steps[max(steps)] if steps else None


def open_upstream_checkpoint(path: Path, model: ModelConfig, ntk_alpha: int) -> HFCheckpoint:
    """Opens the weights of a model that the flags describe; shapes are checked when a weight is read.

    Raises:
        UserError: the checkpoint cannot be read, or a weight is missing or unknown.
    """
    # Name of a weight -> upstream's name, and the names of all weights whose rows that holds.
    sources = dict[str, tuple[str, list[str]]]()
    try:
        names, read = _open_file(path) if path.is_file() else _open_folder(path)
        for name in names:
            held = _held_weights(name)
            sources |= dict.fromkeys(held, (name, held))
        vocab_size = len(read(sources[_EMBEDDING][0])) if _EMBEDDING in sources else None
        positions = VARIANTS[canonical_variant(model.model_variant)].max_seq_len
        config = resolve_model(model, seq_length=positions, data_vocab_size=vocab_size)
        if ntk_alpha > 1:
            size = config.rotary_dim
            theta = config.rope_theta * ntk_alpha ** (size / (size - 2))
            config = replace(config, rope_theta=theta)
        remedy = "set the flags of the model as for the training of the checkpoint"
        weights = check_names(config, sources, remedy)
        shapes = {name: weight.shape for name, weight in weights.items()}
    except (ValueError, OSError) as error:
        raise UserError(f"--path ({path}) cannot be read: {error}") from None

    def read_weight(name: str) -> torch.Tensor:
        source, held = sources[name]
        fused = read(source)
        rows = [shapes[each][0] for each in held]
        expected = (sum(rows), *shapes[name][1:])
        if fused.shape != expected:
            there = tuple(fused.shape)
            raise UserError(
                f"weight {name} must be of {expected}, not {there}; give the flags of its shape"
            )
        weight: torch.Tensor = torch.split(fused, rows)[held.index(name)]
        if ".q_proj." in name or ".k_proj." in name:
            # Rows 2i and 2i + 1 of a head become i and i + K/2.
            pairs = weight.view(-1, config.head_dim // 2, 2, *weight.shape[1:])
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        return weight

    return HFCheckpoint(config, read_weight)


def _held_weights(name: str) -> list[str]:
    """Returns the Hugging Face names of the weights whose rows one of upstream holds, in order."""
    plain = clean_name(name).removeprefix("base_model.").replace("attn.in_proj.", "attn.")
    module, _, kind = plain.rpartition(".")
    if module.startswith("rot_emb"):  # a table that follows from the config
        return []
    match = re.fullmatch(r"layers\.(\d+)\.(.*)", module)
    if match is None:
        return [f"{_OUTSIDE.get(module, module)}.{kind}"]
    layer, inside = match.groups()
    return [f"model.layers.{layer}.{part}.{kind}" for part in _INSIDE.get(inside, [inside])]


_Source = tuple[list[str], Callable[[str], torch.Tensor]]  # names, and a function that reads one


def _open_file(path: Path) -> _Source:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["model_state"]
        return list(map(str, state)), state.__getitem__
    except Exception as error:  # pickle and zip raise many types
        raise UserError(
            f"{path} is not a checkpoint of upstream fms-fsdp (no `model_state` with only weights: "
            f"{type(error).__name__}); name a step_N_ckp folder or a .pth file"
        ) from None


def _open_folder(path: Path) -> _Source:
    reader = CheckpointReader(path)
    saved = reader.read_metadata().state_dict_metadata
    names = [name.removeprefix(_PREFIX) for name in saved if name.startswith(_PREFIX)]

    @lru_cache(maxsize=1)  # the parts of a fused weight are read one after the other
    def read(name: str) -> torch.Tensor:
        return load_tensor(reader, _PREFIX + name)

    return names, read
