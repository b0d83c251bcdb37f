"""Reads and writes the weights of Hugging Face checkpoints, one weight in memory at a time.

    safetensors, memory-mapped ── split ── load_weights: each rank copies its shard    (import, --init_from_hf)
    our checkpoint ── fuse ── save_weights: model-0000N-of-0000M.safetensors + index   (export)

One table of names serves both directions. Transposed matrices (GPT-2) and fused q, k, v (GPT-2,
GPT-NeoX) are the only transformations: our RoPE rotates the same pairs of dimensions as
transformers.

The safetensors format is an 8-byte length, a JSON header and raw bytes. It is read and written
here, so that the base install needs no further package and an export streams single weights
(safetensors' save_file takes all weights of a file at once).
Source: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from fms_fsdp.config.values import format_bytes, shown
from fms_fsdp.distributed.dtensor import local_shard, shard_slices
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import gather_objects
from fms_fsdp.errors import ReadFailed, UserError, checking_input, raise_first
from fms_fsdp.files import free_bytes, read_json_object
from fms_fsdp.hf.families import find_family, read_config
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.init import clean_name
from fms_fsdp.models.llama import LanguageModel

_CODES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_LARGEST_HEADER = 100 << 20  # bytes, the limit of the format
_ROWS = 4096  # of a vocabulary that are converted at a time

# module in transformers -> our modules: before, inside ({} is the layer) and after the blocks
_LLAMA = (
    {"model.embed_tokens": "embed"},
    {
        "model.layers.{}.input_layernorm": "blocks.{}.attention_norm",
        "model.layers.{}.self_attn.q_proj": "blocks.{}.attention.q_proj",
        "model.layers.{}.self_attn.k_proj": "blocks.{}.attention.k_proj",
        "model.layers.{}.self_attn.v_proj": "blocks.{}.attention.v_proj",
        "model.layers.{}.self_attn.o_proj": "blocks.{}.attention.o_proj",
        "model.layers.{}.self_attn.q_norm": "blocks.{}.attention.q_norm",
        "model.layers.{}.self_attn.k_norm": "blocks.{}.attention.k_norm",
        "model.layers.{}.post_attention_layernorm": "blocks.{}.ffn_norm",
        "model.layers.{}.mlp.gate_proj": "blocks.{}.feed_forward.gate_proj",
        "model.layers.{}.mlp.up_proj": "blocks.{}.feed_forward.up_proj",
        "model.layers.{}.mlp.down_proj": "blocks.{}.feed_forward.down_proj",
    },
    {"model.norm": "head.norm", "lm_head": "head"},
)
_QKV = "blocks.{0}.attention.q_proj blocks.{0}.attention.k_proj blocks.{0}.attention.v_proj"
_GPT2 = (
    {"transformer.wte": "embed", "transformer.wpe": "embed.positions"},
    {
        "transformer.h.{}.ln_1": "blocks.{}.attention_norm",
        "transformer.h.{}.attn.c_attn": _QKV,
        "transformer.h.{}.attn.c_proj": "blocks.{}.attention.o_proj",
        "transformer.h.{}.ln_2": "blocks.{}.ffn_norm",
        "transformer.h.{}.mlp.c_fc": "blocks.{}.feed_forward.up_proj",
        "transformer.h.{}.mlp.c_proj": "blocks.{}.feed_forward.down_proj",
    },
    {"transformer.ln_f": "head.norm", "lm_head": "head"},
)
_NEOX = (
    {"gpt_neox.embed_in": "embed"},
    {
        "gpt_neox.layers.{}.input_layernorm": "blocks.{}.attention_norm",
        "gpt_neox.layers.{}.attention.query_key_value": _QKV,
        "gpt_neox.layers.{}.attention.dense": "blocks.{}.attention.o_proj",
        "gpt_neox.layers.{}.post_attention_layernorm": "blocks.{}.ffn_norm",
        "gpt_neox.layers.{}.mlp.dense_h_to_4h": "blocks.{}.feed_forward.up_proj",
        "gpt_neox.layers.{}.mlp.dense_4h_to_h": "blocks.{}.feed_forward.down_proj",
    },
    {"gpt_neox.final_layer_norm": "head.norm", "embed_out": "head"},
)
_NAMES = {"gpt2": _GPT2, "gpt_neox": _NEOX}
_HEADS = ("lm_head.", "embed_out.")
# tables that older versions of transformers saved with the weights
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias", ".attention.bias")


class HFWeight(NamedTuple):
    """A weight of a Hugging Face checkpoint: our weights that it is made of, and its shape."""

    ours: tuple[str, ...]
    shape: torch.Size


@dataclass(frozen=True)
class HFCheckpoint:
    """A model, and a function that returns a weight of its Hugging Face checkpoint by name."""

    config: TransformerConfig
    read: Callable[[str], torch.Tensor]


def weight_map(config: TransformerConfig) -> dict[str, HFWeight]:
    """Returns every weight of the Hugging Face checkpoint of a model, by name and in order.

    Rows that pad the vocabulary are not part of it.

    Raises:
        UserError: no family has the model's options.
    """
    before, inside, after = _NAMES.get(find_family(config).model_type, _LLAMA)
    positions = config.max_seq_len if config.pos_emb == "learned" else 1  # builds no RoPE table
    with torch.device("meta"):
        weights = build_model(replace(config, max_seq_len=positions)).state_dict()
    modules = list(before.items())
    for layer in range(config.num_layers):
        modules += [(theirs.format(layer), ours.format(layer)) for theirs, ours in inside.items()]
    found: dict[str, HFWeight] = {}
    for theirs, ours in (*modules, *after.items()):
        for kind in ("weight", "bias"):
            names = tuple(f"{module}.{kind}" for module in ours.split())
            if ours == "embed.positions" and kind == "weight":
                names = (ours,)  # a parameter, not a module
            if names[0] in weights:
                fused = fuse(config, names, weights.__getitem__)
                found[f"{theirs}.{kind}"] = HFWeight(names, fused.shape)
    return found


def fuse(
    config: TransformerConfig, names: Sequence[str], read: Callable[[str], torch.Tensor]
) -> torch.Tensor:
    """Returns the Hugging Face weight that our weights of these names make."""
    parts = [read(name) for name in names]
    if names[0] in ("embed.weight", "head.weight"):
        return parts[0][: config.vocab_size]
    if config.pos_emb == "learned" and names[0].startswith("blocks."):  # GPT-2 stores (in, out)
        return torch.cat(parts).t()
    if len(parts) == 1:
        return parts[0]
    heads = [part.view(config.num_attention_heads, -1, *part.shape[1:]) for part in parts]
    return torch.stack(heads, dim=1).flatten(0, 2)  # GPT-NeoX: q, k, v of head 0, of head 1, ...


def split(
    config: TransformerConfig, names: Sequence[str], weight: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Returns our weights of these names from a Hugging Face weight: the inverse of `fuse`."""
    if config.pos_emb == "learned" and names[0].startswith("blocks."):
        return weight.t().chunk(len(names))
    if len(names) == 1:
        return [weight]
    heads = weight.view(config.num_attention_heads, len(names), -1, *weight.shape[1:])
    return [part.flatten(0, 1) for part in heads.unbind(1)]


def is_hf_checkpoint(folder: Path) -> bool:
    """Returns whether a folder has a config.json of Hugging Face; run directories have another."""
    try:
        return "model_type" in read_json_object(folder / "config.json")
    except UserError:
        return False


def open_checkpoint(folder: Path, flag: str = "path") -> HFCheckpoint:
    """Maps the weights of a Hugging Face checkpoint and checks names, shapes and dtypes.

    Raises:
        UserError: a file is missing or corrupt, the model is not supported, or a weight is missing, unknown
            or of another shape; the message names `flag`.
    """
    try:
        config = read_config(folder / "config.json")
        weights = _with_prefix(config, _open_weights(folder))
        _reject_quantized(weights)
        expected = check_names(config, weights)
        for name, (_, shape) in expected.items():
            found = weights[name]
            if found.shape != shape:
                raise UserError(f"{name} has shape {tuple(found.shape)}, expected {tuple(shape)}")
        if config.tie_embeddings:
            _check_tied_heads(weights, embedding=weights[next(iter(expected))])
    except UserError as error:
        raise UserError(f"{flag} ({folder}) cannot be loaded: {error}") from None
    return HFCheckpoint(config, weights.__getitem__)


def _reject_quantized(weights: Mapping[str, torch.Tensor]) -> None:
    """Raises UserError for weights of integers or of 8 bits, before their names are compared."""
    for name, weight in weights.items():
        is_full = weight.is_floating_point() and weight.itemsize > 1
        if is_full or name.endswith(_BUFFERS):  # the mask of GPT-2 is no weight
            continue
        dtype = str(weight.dtype).removeprefix("torch.")
        raise UserError(
            f"quantized weights ({shown(name[:999])} is {dtype}) are not supported; use a checkpoint "
            "of this model with fp32, bf16 or fp16 weights"
        )


def _check_tied_heads(weights: Mapping[str, torch.Tensor], embedding: torch.Tensor) -> None:
    """Raises UserError for an output projection that is stored, and differs from the embedding."""
    for name, weight in weights.items():
        is_tied = weight.dtype == embedding.dtype and torch.equal(weight, embedding)
        if name.startswith(_HEADS) and not is_tied:
            raise UserError(
                f"{name} differs from the embedding; set tie_word_embeddings to false in config.json"
            )


def _open_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all weights as views of memory-mapped files."""
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if single.is_file():
        return read_safetensors(single)
    if not index.is_file():
        problem = f"there is no {single.name} and no {index.name}"
        pickled = [path.name for path in folder.glob("*.bin")]
        if pickled:
            load = f"AutoModelForCausalLM.from_pretrained('{folder}')"
            raise UserError(
                f"{problem}; convert {pickled[0]} with transformers: {load}.save_pretrained('{folder}')"
            )
        raise UserError(f"{problem}; name a folder with weights")
    file_names = read_json_object(index).get("weight_map")
    if not isinstance(file_names, dict):
        raise UserError(f"{index.name} has no weight_map; download the checkpoint again")
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name in file_names.values():
        if not isinstance(name, str) or not name.isprintable() or Path(name).name != name:
            raise UserError(
                f"{index.name} names the file {shown(str(name)[:99])}, outside of the folder; download the checkpoint again"
            )
        if name not in files:
            if not (folder / name).is_file():
                raise UserError(f"{name} is missing; download the checkpoint again")
            files[name] = read_safetensors(folder / name)
    for weight, name in file_names.items():
        if weight not in files[name]:
            raise UserError(f"{shown(weight)} is not in {name}; download the checkpoint again")
    weights = dict[str, torch.Tensor]()
    for tensors in files.values():
        weights |= tensors  # transformers reads weights that the index does not list too
    weights |= {weight: files[name][weight] for weight, name in file_names.items()}
    return weights


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file as views of the memory-mapped file. Raises: UserError if corrupt."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            raise UserError(
                f"{path.name} is not a complete safetensors file; download the checkpoint again"
            )
        text = file.read(length)
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[8 + length :]
    tensors: dict[str, torch.Tensor] = {}
    spans = list[tuple[int, int, str]]()
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            dtype = _CODES[entry["dtype"]]
            shape = entry["shape"]
            begin, end = entry["data_offsets"]
            if any(type(n) is not int or not 0 <= n < 1 << 60 for n in (*shape, begin, end)):
                raise ValueError("a size is not a non-negative integer")
            if not begin <= end <= len(data) or end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError("the file ends before its weights do")
            spans.append((begin, end, name))
            part = data[begin:end]
            if part.storage_offset() % dtype.itemsize:  # torch views aligned memory only
                part = part.clone()
            tensors[name] = part.view(dtype).view(shape)
        _check_coverage(spans, len(data))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
        reason = shown(f"{type(error).__name__}: {error}"[:999])
        raise UserError(
            f"{path.name} is not a complete safetensors file ({reason}); download the checkpoint again"
        ) from None
    return tensors


def _check_coverage(spans: list[tuple[int, int, str]], num_bytes: int) -> None:
    """Checks that the tensors, as (begin, end, name), follow one another and cover every byte.

    The format requires it: with a damaged offset a tensor would consist of the bytes of another.

    Raises:
        ValueError: bytes belong to several tensors, or to none.
    """
    expected = 0
    for begin, end, name in sorted(spans):
        if begin != expected:
            raise ValueError(f"invalid offset of tensor {name}: {begin}, expected {expected}")
        expected = end
    if expected != num_bytes:
        raise ValueError(f"not fully covered by its tensors: {expected} of {num_bytes} bytes")


def _with_prefix(
    config: TransformerConfig, weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the weights by the names of the class with a head.

    Models saved without it, such as the published GPT-2, have no prefix. Transformers 5 calls the
    head of GPT-NeoX lm_head.
    """
    first_name = next(iter(weight_map(replace(config, num_layers=1))))
    prefix = first_name.partition(".")[0] + "."
    if not any(name.startswith(prefix) for name in weights):
        without_prefix = weights
        weights = {}
        for name, weight in without_prefix.items():
            weights[name if name.startswith(_HEADS) else prefix + name] = weight
    if prefix == "gpt_neox." and "embed_out.weight" not in weights:
        weights = {name.replace("lm_head.", "embed_out."): each for name, each in weights.items()}
    return weights


def check_names(
    config: TransformerConfig,
    names: Collection[str],
    remedy: str = "download the checkpoint again",
) -> dict[str, HFWeight]:
    """Returns the weights of the model. Raises: UserError unless `names` are these."""
    if config.num_layers > len(names):
        raise UserError(
            f"the checkpoint has only {len(names)} weights for {config.num_layers} layers, so it is "
            f"incomplete; {remedy}"
        )
    expected = weight_map(config)
    for name in expected:
        if name in names:
            continue
        if name.startswith(_HEADS):  # the only one that a complete checkpoint may lack
            remedy = f'set "tie_word_embeddings": true in config.json if it is the embedding, or {remedy}'
        raise UserError(f"weight {name} is missing; {remedy}")
    for name in names:
        if name in expected or name.endswith(_BUFFERS):
            continue
        if config.tie_embeddings and name.startswith(_HEADS):  # a copy of the embedding
            continue
        raise UserError(f"weight {shown(name[:999])} is not part of this model; {remedy}")
    return expected


def load_weights(
    folder: Path, model: LanguageModel, mesh: Mesh, flag: str = "--init_from_hf"
) -> None:
    """Fills the model from a Hugging Face checkpoint, each rank its shards (collective).

    Raises:
        UserError: a rank cannot use the checkpoint; the same error on every rank.
        ReadFailed: a rank cannot read a file; the same error on every rank.
    """
    problem = ""
    failure: ReadFailed | None = None
    try:
        with checking_input():
            fill(model, open_checkpoint(folder, flag))
    except ReadFailed as error:
        failure = error
    except ValueError as error:
        problem = str(error)
    found = gather_objects((problem, failure))
    raise_first([each for _, each in found])
    problems = [each for each, _ in found if each]
    if problems:
        raise UserError(problems[0])


@torch.no_grad()
def fill(model: LanguageModel, checkpoint: HFCheckpoint) -> None:
    """Fills this rank's shards of a model; not collective.

    The model may have a larger vocabulary: new rows of embedding and head become the mean row, rows
    that pad the vocabulary 0.

    Raises:
        UserError: a weight is not finite.
    """
    ours = {clean_name(name): weight for name, weight in model.named_parameters()}
    unfilled = set(ours)
    for name, (names, _) in weight_map(checkpoint.config).items():
        if names[0] in ours:  # else of another pipeline stage
            parts = split(checkpoint.config, names, checkpoint.read(name))
            for our_name, part in zip(names, parts, strict=True):
                target = ours[our_name]
                is_vocabulary = our_name in ("embed.weight", "head.weight")  # which may be larger
                assert is_vocabulary or part.shape == target.shape, (our_name, part.shape)
                _fill_shard(target, part, model.config.vocab_size, name)
            unfilled -= set(names)
    # A weight that no file has would be arbitrary, unless a model of the user initialized it.
    assert not unfilled or model.config.model_builder, unfilled


def _fill_shard(target: torch.Tensor, full: torch.Tensor, vocab_size: int, name: str) -> None:
    """Copies the rows and columns of `full` that this rank's shard of `target` has."""
    shard = local_shard(target)
    rows, *columns = shard_slices(target)
    num_known = max(0, min(len(full), rows.stop) - rows.start)
    known_rows = slice(rows.start, rows.start + num_known)
    shard[:num_known] = full[(known_rows, *columns)]
    check_finite(name, shard[:num_known], "download the checkpoint again")
    if rows.stop <= len(full):
        return
    mean = torch.zeros(full.shape[1:], dtype=torch.float64)
    for first in range(0, len(full), _ROWS):  # bounds the memory of the conversion
        mean += full[first : first + _ROWS].double().sum(0) / len(full)
    shard[num_known:] = 0
    end_of_vocabulary = max(num_known, vocab_size - rows.start)
    shard[num_known:end_of_vocabulary] = mean[tuple(columns)]


def check_finite(name: str, weight: torch.Tensor, remedy: str) -> None:
    """Raises UserError if a weight holds inf or nan."""
    if not weight.numel():
        return
    minimum, maximum = weight.aminmax()  # nan if any element is
    if not math.isfinite(minimum) or not math.isfinite(maximum):
        raise UserError(f"weight {name} holds values that are not finite; {remedy}")


def save_weights(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    max_shard_bytes: int,
    read: Callable[[str], torch.Tensor],
) -> None:
    """Writes safetensors files of at most `max_shard_bytes` or one weight, and an index for several files.

    Raises:
        UserError: the disk is too small, or a weight is not finite or overflows in `dtype`.
    """
    sizes = {name: shape.numel() * dtype.itemsize for name, shape in shapes.items()}
    total_size = sum(sizes.values())
    space = free_bytes(folder)
    if space is not None and space < total_size:
        needed = format_bytes(total_size)
        raise UserError(
            f"--output requires {needed}, and {format_bytes(space)} is free; free disk space, "
            "or choose another folder"
        )
    files = list[list[str]]()  # the names of the weights in each
    free = 0
    for name, size in sizes.items():
        if not files or size > free:
            files.append([])
            free = max_shard_bytes
        files[-1].append(name)
        free -= size
    file_of = dict[str, str]()  # by weight
    for number, names in enumerate(files, 1):
        file_name = "model.safetensors"
        if len(files) > 1:
            file_name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file_of |= dict.fromkeys(names, file_name)
        _write_safetensors(folder / file_name, {name: shapes[name] for name in names}, dtype, read)
    if len(files) > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": file_of}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _write_safetensors(
    path: Path,
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    read: Callable[[str], torch.Tensor],
) -> None:
    """Writes one file: the length of the header, the header, and the weights one after the other."""
    code = next(code for code, known in _CODES.items() if known == dtype)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + shape.numel() * dtype.itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the weights
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            weight = read(name)
            check_finite(name, weight, "export another checkpoint")
            weight = weight.to(dtype).contiguous()
            check_finite(name, weight, f"it overflows in {dtype}; use another --dtype")
            file.write(weight.view(-1).view(torch.uint8).numpy().data)
