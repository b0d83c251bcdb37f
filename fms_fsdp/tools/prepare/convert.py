"""Token ids in the formats of other projects → token shards: `python -m fms_fsdp convert`.

An end-of-document id at the end of a document is dropped, as the loader adds it: so sources with and without
it may be mixed. One file is one slice; the rest is the pipeline of `prepare`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from fms_fsdp.config import flag
from fms_fsdp.data.tokenizer import Tokenizer, load_tokenizer
from fms_fsdp.errors import UserError
from fms_fsdp.tools.prepare.documents import Part, Slice
from fms_fsdp.tools.prepare.encode import TokenReader
from fms_fsdp.tools.prepare.input_files import find_files, parse_input, unique_files
from fms_fsdp.tools.prepare.output_folder import PreparedSource, check_plans, lock_output, save_tokenizer
from fms_fsdp.tools.prepare.pipeline import ShardsConfig, make_shards
from fms_fsdp.tools.prepare.shard_writer import ShardInfo
from fms_fsdp.tools.prepare.stats import Stats, describe
from fms_fsdp.tools.prepare.token_files import PATTERNS, has_marks, ids_file


@dataclass(frozen=True)
class ConvertConfig(ShardsConfig):
    """Which files to convert (.idx with .bin, .ds, .parquet, .arrow), and what the ids in the files mean."""

    tokenizer: str = flag("", "the tokenizer that made the ids; says --vocab_size and --eos_id")
    vocab_size: int | None = flag(None, "count of ids (default: the tokenizer's)", minimum=2, maximum=1 << 32)
    eos_id: int | None = flag(None, "the id that ends a document (default: the tokenizer's)", minimum=0)
    bos: str = flag(
        "keep", "what becomes of a begin token that ids may have", choices=("keep", "strip", "add")
    )
    bos_id: int | None = flag(None, "the id of the begin token, for --bos=strip and add", minimum=0)
    column: str = flag("", "column of the ids in Parquet and Arrow files (default: tokens or input_ids)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tokenizer and (self.vocab_size is None or self.eos_id is None):
            raise UserError("--tokenizer is missing; give this flag, or both --vocab_size and --eos_id")
        if self.bos != "keep" and self.bos_id is None:
            raise UserError(f"--bos ({self.bos}) needs --bos_id; name the id of the begin token")


def convert(config: ConvertConfig) -> dict[str, Stats]:
    """Turns files of token ids into shards and returns what was read and written, by source.

    Raises:
        UserError: bad options or inputs, or an output made from others.
    """
    output = config.folder
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None
    info = _meaning_of_ids(config, tokenizer)
    sources = [_find_source(config, name, paths) for name, paths in parse_input(config.input).items()]
    info = replace(info, has_masks=any(has_marks(file.path) for source in sources for file in source.files))
    options = {
        "tokenizer_digest": info.tokenizer_digest,
        "vocab_size": info.vocab_size,
        "eos_id": info.sep_token,
        "column": config.column,
        "split": list(config.split),
        "shard_tokens": config.shard_tokens,
        **({"bos": f"{config.bos} {config.bos_id}"} if config.bos_id is not None else {}),
    }
    with lock_output(output):
        keys = [{"inputs": source.inputs_digest, **options} for source in sources]
        check_plans(output, sources, keys, info.tokenizer_digest, config.overwrite)
        if tokenizer:
            save_tokenizer(output, tokenizer)
        bos_id = -1 if config.bos_id is None else config.bos_id
        reader = TokenReader(config.column, info.sep_token, config.bos, bos_id)
        return make_shards(config, sources, reader, info)


def _meaning_of_ids(config: ConvertConfig, tokenizer: Tokenizer | None) -> ShardInfo:
    """What the ids mean: from the flags, else from the tokenizer."""
    known = tokenizer.vocabulary if tokenizer else None
    size = config.vocab_size or (known.size if known else 0)
    eos_id = config.eos_id if config.eos_id is not None else (known.eos_id if known else 0)
    if eos_id >= size:
        raise UserError(f"--eos_id ({eos_id}) must lie below --vocab_size ({size})")
    bos_id = -1 if config.bos_id is None else config.bos_id
    if bos_id >= size:
        raise UserError(f"--bos_id ({bos_id}) must lie below --vocab_size ({size})")
    return ShardInfo(size, eos_id, known.digest if known else "", bos_id=bos_id)


def _find_source(config: ConvertConfig, name: str, paths: list[str]) -> PreparedSource:
    found = []
    for path in paths:
        is_file = os.path.isfile(os.path.expanduser(path))
        found += find_files(path, () if is_file else PATTERNS, output=config.folder)
    files = unique_files(found)
    slices = []
    for index, file in enumerate(files):
        ids = ids_file(file.path)
        num_bytes = os.path.getsize(ids) if os.path.isfile(ids) else 0
        slices.append(Slice(index, (Part(file.path, 0, file.size, num_bytes),)))
    return PreparedSource(name, files, tuple(slices), config.folder)


def main(config: ConvertConfig) -> None:
    """The command: converts, then says what was made."""
    print(describe(convert(config)))
    print(f"shards and counts are in {config.output}; train on these shards with --data_path={config.output}")
