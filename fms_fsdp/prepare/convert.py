"""Token ids in the formats of other projects -> token shards: `python -m fms_fsdp convert`.

    .idx + .bin   Megatron-LM: int64 lengths and pointers of sequences, documents as ranges of them
    .ds + .index  datatrove: ids of 2 or 4 bytes, and where each document ends
    .parquet      a column of lists of ids
    .arrow        Arrow files or streams with such a column; also shards of upstream fms-fsdp

One file is one slice. An EOS id at the end of a document is dropped because the loader adds it, so
sources with and without it can be mixed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fms_fsdp.data.kept_tokenizer import parse_description
from fms_fsdp.data.shards import NO_LOSS
from fms_fsdp.errors import UserError, note_once
from fms_fsdp.files import is_file, map_or_read
from fms_fsdp.hf.chat import find_chat_settings
from fms_fsdp.prepare.documents import Part, Problem, open_arrow
from fms_fsdp.prepare.encode import Encoded, ShardSettings, make_shards
from fms_fsdp.prepare.input_files import (
    InputFile,
    Slice,
    find_files,
    parse_input,
    splits_in,
    unique_files,
)
from fms_fsdp.prepare.prepare_flags import ConvertConfig
from fms_fsdp.prepare.writer import (
    PreparedSource,
    ShardInfo,
    Stats,
    check_plans,
    describe,
    lock_output,
    save_tokenizer,
)
from fms_fsdp.tokenizers.load import load_tokenizer
from fms_fsdp.tokenizers.tokenizer import Tokenizer, Tokens

PATTERNS = ("*.idx", "*.ds", "*.parquet", "*.arrow")
_COLUMNS = ("tokens", "input_ids")
# Columns of padded rows and of prompts, and the value from which an id counts.
_LEAST_IN_MASK = {"attention_mask": 1, "loss_mask": 1, "labels": 0}
_HELD_OUT = ("validation", "test")  # folders in an output of `prepare`
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True)
class TokenReader:
    """Reads token ids; drops an EOS id at the end, and keeps, strips or adds a BOS id at the start."""

    column: str
    eos_id: int
    bos: str = "keep"
    bos_id: int = -1

    def read(self, parts: Sequence[Part], copies: Any) -> Iterator[Encoded | Problem]:
        for part in parts:
            number = 0
            try:
                for tokens in read_token_file(part.path, self.column):
                    number += 1
                    if len(tokens) and tokens[-1] == self.eos_id:
                        tokens = tokens[:-1]
                    if len(tokens) and self.bos != "keep":
                        tokens = self._apply_bos(tokens)
                    yield Encoded(tokens) if len(tokens) else Problem("empty document")
            except (OSError, ValueError, IndexError) as error:  # pa.ArrowInvalid is a ValueError
                raise UserError(f"--input={part.path}, document {number + 1}: {error}") from error

    def _apply_bos(self, tokens: Tokens) -> Tokens:
        """Strips the BOS id of a document, or adds it where it is missing."""
        text = tokens
        if int(tokens[0]) & (NO_LOSS - 1) == self.bos_id:
            text = tokens[1:]
        if self.bos == "strip":
            return text
        bos = self.bos_id
        if len(text):
            bos |= int(text[0]) & NO_LOSS  # it is of the prompt if the next token is
        return np.append(np.uint32(bos), text)


def convert(config: ConvertConfig) -> dict[str, Stats]:
    """Writes shards of the ids and returns statistics by source.

    Raises:
        UserError: bad options or inputs, or an output made from others.
    """
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None
    info = _shard_info(config, tokenizer)
    named = parse_input(config.input)
    sources = [_find_source(config, name, paths) for name, paths in named.items()]
    has_masks = any(_has_masks(file.path) for source in sources for file in source.files)
    options = {
        "tokenizer_digest": info.tokenizer_digest,
        "vocab_size": info.vocab_size,
        "eos_id": info.sep_token,
        "column": config.column,
        "split": list(config.split),
        "shard_tokens": config.shard_tokens,
    }
    if config.bos_id is not None:
        options["bos"] = f"{config.bos} {config.bos_id}"
    with lock_output(config.folder):
        plans = [{"inputs": source.inputs_digest, **options} for source in sources]
        chat = find_chat_settings(config.tokenizer)  # its errors come before the plans are written
        check_plans(config.folder, sources, plans, config.overwrite)
        if tokenizer and not _is_kept(config, tokenizer, info.sep_token):
            save_tokenizer(config.folder, tokenizer, chat)
        bos_id = -1 if config.bos_id is None else config.bos_id
        reader = TokenReader(config.column, info.sep_token, config.bos, bos_id)
        info = replace(info, has_masks=has_masks)
        settings = ShardSettings(reader, info, config.split, config.shard_tokens)
        return make_shards(config, sources, settings)


def _shard_info(config: ConvertConfig, tokenizer: Tokenizer | None) -> ShardInfo:
    size = config.vocab_size
    eos_id = config.eos_id
    digest = ""
    if tokenizer is not None:
        vocabulary = tokenizer.vocabulary
        digest = vocabulary.digest
        if size is None:
            size = vocabulary.size
        if eos_id is None:
            eos_id = vocabulary.eos_id
        if eos_id != vocabulary.eos_id and not _is_kept(config, tokenizer, eos_id):
            note_once(
                f"--eos_id={eos_id} is not the EOS token of --tokenizer ({vocabulary.eos_id}), at which "
                "exports and generated text end"
            )
    assert size is not None and eos_id is not None  # one of the flags is set
    bos_id = -1 if config.bos_id is None else config.bos_id
    for name, number in (("eos_id", eos_id), ("bos_id", bos_id)):
        if number >= size:
            raise UserError(f"--{name}={number} must be below --vocab_size={size}; correct one")
    return ShardInfo(size, eos_id, digest, bos_id=bos_id)


def _is_kept(config: ConvertConfig, tokenizer: Tokenizer, eos_id: int) -> bool:
    """Returns whether the output has the tokenizer with this other EOS token, by --eos_token of
    `prepare`. Exports end texts at it, so the output's description must stay."""
    path = config.folder / "meta" / "tokenizer.json"
    if eos_id == tokenizer.vocabulary.eos_id or not path.is_file():
        return False
    known, _ = parse_description(path.read_bytes(), str(path))
    return known.digest == tokenizer.vocabulary.digest and known.eos_id == eos_id


def _find_source(config: ConvertConfig, name: str, paths: list[str]) -> PreparedSource:
    files = list[InputFile]()
    slices = list[Slice]()
    for path in paths:
        include = () if is_file(os.path.expanduser(path)) else PATTERNS
        files += find_files(path, include, output=config.folder)
    files = list(unique_files(files))
    _note_splits(name, [file.name for file in files])
    if files:
        _note_masks(name, files[0].path)
    read = list[InputFile]()  # the shards depend on the partners, too
    for index, file in enumerate(files):
        read += [file, *_partner(file)]
        ids = _ids_path(file.path)
        num_bytes = os.path.getsize(ids) if is_file(ids) else 0
        slices.append(Slice(index, (Part(file.path, 0, file.size, num_bytes),)))
    return PreparedSource(name, tuple(read), tuple(slices), config.folder)


def _note_splits(source: str, names: Sequence[str]) -> None:
    """Notes that held-out files become training data, too."""
    splits = splits_in(names)
    held_out = [name for name in names if name.split("/")[0] in _HELD_OUT]
    if held_out and len(held_out) < len(names):
        splits.add("train")
    if "train" in splits and len(splits) > 1:
        note_once(
            f"source {source} consists of several splits, {', '.join(sorted(splits))}, and all "
            "become training data; name the files or the folder of one in --input"
        )


def _note_masks(source: str, path: str) -> None:
    """Notes that the first rows of a file have padding, or ids without a label: all are read alike."""
    found = list[str]()
    if is_file(f"{path}.loss"):
        found.append(f"{os.path.basename(path)}.loss")  # of datatrove
    with suppress(OSError, pa.ArrowInvalid):  # a corrupt file is reported when it is read
        for name, column in _first_masks(path):
            least = pc.min(pc.list_flatten(column)).as_py()
            if least is not None and least < _LEAST_IN_MASK[name]:
                found.append(name)
    if found:
        note_once(
            f"source {source} has padding or ids without a label ({', '.join(found)}), and all ids "
            "become training data; write it without padding, or use prepare --prompt_key"
        )


def _first_masks(path: str) -> Iterator[tuple[str, pa.Array]]:
    """Yields the names and first rows of the columns that mask ids of a Parquet or Arrow file."""
    match os.path.splitext(path)[1]:
        case ".parquet":
            with open(path, "rb") as stream:
                file = pq.ParquetFile(stream)
                names = [name for name in _LEAST_IN_MASK if name in file.schema_arrow.names]
                batch = next(file.iter_batches(batch_size=1024, columns=names), None)
        case ".arrow":
            with open_arrow(path) as (schema, batches):
                names = [name for name in _LEAST_IN_MASK if name in schema.names]
                batch = next(iter(batches), None) if names else None
        case _:
            return
    for name in names:
        if batch is not None and _has_integers(batch.schema.field(name).type):
            yield name, batch.column(name)


def _has_integers(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and pa.types.is_integer(kind.value_type)


def _partner(file: InputFile) -> list[InputFile]:
    """Returns the .bin of an .idx or the .index of a .ds; [] if it is missing, or of another
    format."""
    suffix = os.path.splitext(file.path)[1]
    if suffix not in (".idx", ".ds"):
        return []
    path = _ids_path(file.path) if suffix == ".idx" else f"{file.path}.index"
    if not is_file(path):
        return []
    stat = os.stat(path)
    return [InputFile(path, f"{file.name} partner", stat.st_size, stat.st_mtime_ns)]


def _has_masks(path: str) -> bool:
    """Returns whether a file is a shard with masked prompts; a corrupt file is reported when it is read."""
    try:
        with open_arrow(path) as (schema, _):
            return (schema.metadata or {}).get(b"has_masks") == b"true"
    except (OSError, pa.ArrowInvalid):
        return False


def _ids_path(path: str) -> str:
    return path.removesuffix(".idx") + ".bin" if path.endswith(".idx") else path


def read_token_file(path: str, column: str) -> Iterator[Tokens]:
    """Yields the documents of a file; `column` may be "" for tokens or input_ids.

    Raises:
        UserError, OSError: the file has another format, or is corrupt.
    """
    match os.path.splitext(path)[1]:
        case ".idx":
            yield from _read_megatron(path)
        case ".ds":
            yield from _read_datatrove(path)
        case ".parquet":
            with open(path, "rb") as stream:
                file = pq.ParquetFile(stream)
                name = _ids_column(file.schema_arrow, column, has_lists=True)
                for batch in file.iter_batches(batch_size=1024, columns=[name]):
                    yield from _split_lists(batch.column(0))
        case ".arrow":
            with open_arrow(path) as (schema, batches):
                name = _ids_column(schema, column)
                for batch in batches:
                    yield from _split_lists(batch.column(name))
        case _:
            raise UserError("must be an .idx (of a Megatron pair), .ds, .parquet or .arrow file")


def _read_megatron(path: str) -> Iterator[Tokens]:
    """Yields the documents of a Megatron pair. Source: Megatron-LM, core/datasets/indexed_dataset.py."""
    with open(path, "rb") as file:
        if file.read(9) != _MEGATRON_MAGIC:
            raise UserError(
                "not a Megatron index (wrong first bytes); name the .idx files in --input"
            )
        version = int.from_bytes(file.read(8), "little")
        code = file.read(1)[0]
        if version != 1 or code not in _MEGATRON_TYPES:
            raise UserError(
                f"Megatron index of version {version}, type {code}; it must be of version 1 and of integers"
            )
        num_sequences = int.from_bytes(file.read(8), "little")
        num_edges = int.from_bytes(file.read(8), "little")
        lengths = np.fromfile(file, "<i4", num_sequences)
        pointers = np.fromfile(file, "<i8", num_sequences)
        edges = np.fromfile(file, "<i8", num_edges)
    is_complete = len(edges) == num_edges and (not num_edges or edges[-1] <= num_sequences)
    is_ordered = bool((np.diff(edges) >= 0).all())  # otherwise sequences would be read twice
    is_positive = bool((lengths >= 0).all() and (pointers >= 0).all())
    if not is_complete or not is_ordered or not is_positive:
        raise UserError("the index is truncated or corrupt; copy the file again")
    if num_sequences and (num_edges == 0 or edges[0] != 0 or edges[-1] != num_sequences):
        raise UserError(
            f"its documents do not have all of its {num_sequences} sequences; end the last document "
            "before the index is written"
        )
    ids = _map_ids(_ids_path(path), np.dtype(_MEGATRON_TYPES[code]))
    starts = pointers // ids.dtype.itemsize
    if len(starts) and int((starts + lengths).max()) > len(ids):
        raise UserError(f"points beyond the end of {_ids_path(path)}; copy both files again")
    for first, last in pairwise(edges):
        sequences = [ids[starts[i] : starts[i] + lengths[i]] for i in range(first, last)]
        yield np.concatenate([ids[:0], *sequences])


def _read_datatrove(path: str) -> Iterator[Tokens]:
    """Yields the documents of a .ds file, whose size gives the width of an id.

    Source: datatrove, pipeline/tokens/tokenizer.py.
    """
    ends = np.fromfile(path + ".index", "<u8").astype(np.int64)
    if (np.diff(ends, prepend=0) < 0).any():  # tokens would be read twice
        raise UserError("its index is corrupt, a document ends before it begins; copy it again")
    total = int(ends[-1]) if len(ends) else 0
    size = os.path.getsize(path)
    if size not in (2 * total, 4 * total):  # also if the index is empty
        raise UserError(f"has {size} bytes for {total} tokens of its index; expected 2 or 4 each")
    bytes_per_id = size // total if total else 2
    ids = _map_ids(path, np.dtype(f"<u{bytes_per_id}"))
    for start, end in pairwise([0, *ends]):
        yield ids[start:end]


def _map_ids(path: str, dtype: np.dtype[Any]) -> Tokens:
    return np.frombuffer(map_or_read(path), dtype)


def _ids_column(schema: pa.Schema, wanted: str, *, has_lists: bool = False) -> str:
    """Returns the column of ids: lists of integers or, unless `has_lists`, integers (one document a batch).

    Raises:
        UserError: there is no such column.
    """
    names = [wanted] if wanted else list(_COLUMNS)
    present = [name for name in names if name in schema.names]
    if not present:
        missing = " or ".join(names)
        raise UserError(f"has no column {missing}, only {', '.join(schema.names)}; set --column")
    name = present[0]
    if schema.names.count(name) > 1:
        raise UserError(f"has {schema.names.count(name)} columns {name}; write it with one")
    kind = schema.field(name).type
    is_document = pa.types.is_integer(kind) and not has_lists
    if not _has_integers(kind) and not is_document:
        raise UserError(
            f"column {name} contains {kind}, not lists of integers; for text use "
            "`python -m fms_fsdp prepare`"
        )
    return name


def _split_lists(array: pa.Array) -> Sequence[Tokens]:
    is_document = pa.types.is_integer(array.type)
    num_nulls = array.null_count
    if not is_document:
        num_nulls += array.flatten().null_count
    if num_nulls:
        raise UserError("the ids contain nulls; write the file without them")
    if is_document:
        return [array.to_numpy()]
    offsets = array.offsets.to_numpy()
    values = array.values.to_numpy()
    return [values[start:stop] for start, stop in pairwise(offsets)]


def main(config: ConvertConfig) -> None:
    """Runs the command and prints the statistics."""
    print(describe(convert(config)))
    advice = shlex.quote(f"--data_path={config.output}")
    print(f"shards and counts are in {config.output}; train with {advice}")
