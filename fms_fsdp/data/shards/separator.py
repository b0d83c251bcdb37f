"""The separator, a token that ends every document once: its number, and whether the shards hold the separator
or the stream adds it."""

from __future__ import annotations

from collections.abc import Mapping

from fms_fsdp.config import DataConfig
from fms_fsdp.data.shards.ipc import CONVERT, ShardError
from fms_fsdp.data.shards.shard import Shard
from fms_fsdp.errors import MissingInput, UserError
from fms_fsdp.parts import load_part

SAMPLED_DOCUMENTS = 16


def delimiter_of(shard: Shard, sep_token: int, *, trusted: bool = False) -> int:
    """Returns 1 if the stream must end the shard's documents with a separator, 0 if they end with it already.

    The shard's `has_eos` decides, if its first documents do not contradict it; without it, these decide.
    Of a `trusted` shard that says `has_eos` no document is read.

    Raises: ShardError if one of these lacks the separator that `has_eos` promises, or all end with one that
    it denies; without it, if some end with the separator and some do not.
    """
    said = shard.metadata.get("has_eos")
    if trusted and said is not None:
        return 0 if said == "true" else 1
    ends = {token == sep_token for token in shard.edge_tokens(SAMPLED_DOCUMENTS, is_last=True)}
    if said is None and len(ends) > 1:
        raise ShardError(
            f"shard ({shard.path}) holds documents with and without a trailing separator ({sep_token}); "
            f"{CONVERT}"
        )
    if (said == "true" and False in ends) or (said == "false" and ends == {True}):
        without = "without" if said == "true" else "with"
        raise ShardError(
            f"shard ({shard.path}) says has_eos {said}, but holds documents {without} a trailing separator "
            f"({sep_token}); {CONVERT}"
        )
    return 0 if said == "true" or (said is None and ends == {True}) else 1


def find_sep_token(section: DataConfig, root: str, opened: Mapping[str, Shard]) -> int:
    """Returns the separator: the flag, else the one that all shards opened (by path) name. Raises:
    UserError."""
    paths = dict[int, str]()  # of a shard by the separator that it names
    for path, shard in opened.items():
        if said := shard.metadata.get("sep_token"):
            paths[int(said)] = path
            if section.sep_token not in (None, int(said)) and shard.metadata.get("has_eos") == "true":
                raise UserError(
                    f"sep_token ({section.sep_token}) is {said} in shard {path}, whose documents end with "
                    "that token; leave the flag out"
                )
    if section.sep_token is not None:
        return section.sep_token
    if len(paths) > 1:
        (a, path_a), (b, path_b) = list(paths.items())[:2]
        raise UserError(
            f"sep_token is {a} in shard {path_a} but {b} in {path_b}; "
            "set --sep_token, or prepare both with one tokenizer"
        )
    if not opened:
        raise MissingInput(f"--data_path ({root}) holds no readable shard; restore a shard")
    if not paths:
        raise load_part("fms_layout").no_separator(opened)
    return next(iter(paths))
