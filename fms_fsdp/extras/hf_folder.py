"""A folder of Hugging Face read in place: its shape, its weights into a model of any sharding, its tokenizer.

    config.json ── shape ─┐
    weight files, mapped ─┴─ open_folder: names and shapes fit ── fill: a rank copies the rows of its shards

Nothing is converted on disk. Where theirs packs several of ours (GPT-2, GPT-NeoX), that one weight is in
memory as a whole for a moment.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from fms_fsdp.atomic import read_json
from fms_fsdp.config.values import format_bytes
from fms_fsdp.cpu_tuning import positive_number
from fms_fsdp.data.kept_tokenizer import UsedTokenizer
from fms_fsdp.data.tokenizer import Tokenizer, load_tokenizer
from fms_fsdp.distributed.dtensor import local_shard, shard_slices
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.errors import UserError, note_once
from fms_fsdp.extras.from_hf import read_shape
from fms_fsdp.extras.hf import HFWeight, find_family, hf_weights
from fms_fsdp.extras.typed_json import quoted
from fms_fsdp.extras.weight_files import Weights, check_finite, open_weights
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.init import clean_name
from fms_fsdp.models.llama import Llama
from fms_fsdp.predict.devices import available_memory

_IGNORED = (
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".masked_bias",
)
_HEADS = ("lm_head.", "embed_out.")
_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True)
class HFFolder:
    """The shape that config.json describes, and the weights of a model of that shape."""

    shape: TransformerConfig
    weights: Weights


def is_hf_folder(path: Path) -> bool:
    """Whether its config.json is one of Hugging Face; a run folder has another."""
    return "model_type" in read_json(path / "config.json")


def open_folder(path: Path, name: str = "path") -> HFFolder:
    """Reads the shape and the headers of the weight files.

    Raises:
        UserError: the folder is not whole, is of a class or has a field that our models do not have, or a
            weight is missing, unknown, of another shape or no number; with `name` as the name of the path.
    """
    try:
        shape = read_shape(path / "config.json")
        _check_table(shape)
        weights = _with_prefix(shape, open_weights(path))
        for weight, made in check_names(shape, weights).items():
            there = weights[weight]()
            if there.shape != made.shape:
                raise UserError(
                    f"weight {weight} must be of {tuple(made.shape)}, not {tuple(there.shape)}"
                )
            if not there.dtype.is_floating_point or there.is_quantized:
                raise UserError(f"weight {weight} must be of floating point, not {there.dtype}")
        if shape.tie_embeddings:
            _check_tied(shape, weights)
    except UserError as error:
        raise UserError(f"{name} ({path}) cannot be read: {error}") from None
    return HFFolder(shape, weights)


def _with_prefix(shape: TransformerConfig, weights: Weights) -> Weights:
    """The weights by their names within the class with a head: a save of a base model, such as the published
    GPT-2, has no prefix. Transformers 5 have another name for the head of a GPT-NeoX, too."""
    family = find_family(shape)
    prefix = family.layer.partition(".")[0] + "."
    if not any(name.startswith(prefix) for name in weights):
        weights = {
            name if name.startswith(_HEADS) else prefix + name: weights[name] for name in weights
        }
    if family.name == "GPTNeoX" and "embed_out.weight" not in weights:
        weights = {name.replace("lm_head.", "embed_out."): read for name, read in weights.items()}
    return weights


def check_names(shape: TransformerConfig, weights: Collection[str]) -> dict[str, HFWeight]:
    """The weights of a model of that shape; raises UserError unless `weights` names all of them, and no
    other."""
    if shape.num_layers > len(weights):  # each has several
        rule = f"must not exceed the number of weights ({len(weights)})"
        raise UserError(f"the number of layers ({shape.num_layers}) {rule}; fetch the folder again")
    theirs = hf_weights(shape)
    extra = [name for name in weights if name not in theirs and not name.endswith(_IGNORED)]
    if shape.tie_embeddings:
        extra = [name for name in extra if not name.startswith(_HEADS)]
    absent = [name for name in theirs if name not in weights]
    if absent and absent[0].startswith(_HEADS):
        raise UserError(
            f"weight {absent[0]} is missing: a model without its head; use a folder with the head"
        )
    if absent or extra:
        what = (
            f"weight {absent[0]} is missing"
            if absent
            else f"weight {quoted(extra[0])} is not of such a model"
        )
        raise UserError(f"{what}; fetch the folder again")
    return theirs


def _check_tied(shape: TransformerConfig, weights: Weights) -> None:
    """Raises UserError where a head that is to be the embedding is stored, too, and is another."""
    embedding = next(their for their, ours in find_family(shape).outside.items() if ours == "embed")
    for name in (name for name in weights if name.startswith(_HEADS)):
        whole, head = weights[f"{embedding}.weight"](), weights[name]()
        is_same = whole.shape == head.shape
        for first in range(0, len(whole) if is_same else 0, _ROWS_AT_A_TIME):
            rows = slice(first, first + _ROWS_AT_A_TIME)
            is_same = is_same and torch.equal(whole[rows].double(), head[rows].double())
        if not is_same:
            remedy = "config.json must say tie_word_embeddings false, or the weights be the same"
            raise UserError(
                f"weight {name} is not {embedding}.weight, which is to be the head, too; {remedy}"
            )


def _check_table(shape: TransformerConfig) -> None:
    """Raises UserError where the memory does not hold the rotary table of all positions."""
    needed = (
        4 * shape.max_seq_len * 2 * shape.rotary_dim * 4
    )  # in fp32; four of it while it is made
    if needed > (
        free := available_memory(torch.device("cpu"), positive_number("LOCAL_WORLD_SIZE", 1))
    ):
        rule = f"needs {format_bytes(needed)} for its RoPE table, and {format_bytes(free)} are free"
        raise UserError(f"max_position_embeddings ({shape.max_seq_len}) {rule}")


def load_weights(path: Path, model: Llama, mesh: Mesh, name: str = "--init_from_hf") -> None:
    """Fills the model with the weights of a folder, each rank its part (collective: every rank).

    Raises:
        UserError: some rank cannot read the folder; alike on every rank.
    """
    problem = ""
    try:
        fill(model, open_folder(path, name))
    except ValueError as error:
        problem = str(error)
    if problems := list(filter(None, mesh.gather(problem))):
        raise UserError(problems[0])


@torch.no_grad()
def fill(model: Llama, folder: HFFolder) -> None:
    """Fills this rank's part of a model of that shape, whose vocabulary may be larger: the new rows of
    embedding and head are then the mean row. Rows that fill up the vocabulary are 0. Not collective.

    Raises:
        UserError: a weight is not finite.
    """
    ours = {clean_name(name): weight for name, weight in model.named_parameters()}
    packing = find_family(folder.shape).packing
    for name, made in hf_weights(folder.shape).items():
        if made.ours[0] not in ours:  # of another stage of a pipeline
            continue
        targets, whole = list(map(ours.__getitem__, made.ours)), folder.weights[name]()
        is_inside = made.ours[0].startswith("blocks.")
        rows = list(map(len, targets))
        parts: Sequence[torch.Tensor] = (
            packing.split(folder.shape, whole, rows) if is_inside else [whole]
        )
        for target, part in zip(targets, parts, strict=True):
            _fill_rows(target, part, model.config.vocab_size, name)


def _fill_rows(target: torch.Tensor, part: torch.Tensor, vocab_size: int, name: str) -> None:
    local, (rows, *columns) = local_shard(target), shard_slices(target)
    first, known = rows.start, min(len(part), rows.stop)
    local[: max(0, known - first)] = part[(slice(first, known), *columns)]
    check_finite(name, local[: max(0, known - first)])
    if rows.stop > len(part):
        begin = max(0, len(part) - first)
        local[begin:] = 0
        local[begin : max(begin, vocab_size - first)] = _mean_row(part)[tuple(columns)]


def _mean_row(part: torch.Tensor) -> torch.Tensor:
    """In fp64, a few rows in memory at a time."""
    total = torch.zeros(part.shape[1:], dtype=torch.float64)
    for first in range(0, len(part), _ROWS_AT_A_TIME):
        total += part[first : first + _ROWS_AT_A_TIME].double().sum(0)
    return total / len(part)


def hf_tokenizer(path: Path, name: str) -> UsedTokenizer:
    """The tokenizer that the weights of the folder were trained with, as far as it can be read here."""
    with suppress(UserError):
        if (found := find_hf_tokenizer(path)) is not None:
            return UsedTokenizer(name, found.vocabulary.digest, lambda: found)
    note_once(
        f"no tokenizer in {path} can be read here: whether the data have the same is not checked"
    )
    return UsedTokenizer(name, "", lambda: None)


def find_hf_tokenizer(path: Path) -> Tokenizer | None:
    """Returns the tokenizer of the folder, None without one: tokenizer.model, which needs no other package,
    if that file can be read, else tokenizer.json.

    Raises:
        UserError: it cannot be read, or names no end token.
    """
    model = path / "tokenizer.model"
    try:
        if model.is_file():
            return load_tokenizer(str(model))
    except UserError as error:
        if not (path / "tokenizer.json").is_file():
            raise
        note_once(f"{error}; tokenizer.json is read")
    try:
        return load_tokenizer(str(path))
    except FileNotFoundError:
        return None
