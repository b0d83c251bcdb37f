"""The token that ends every document once: which one it is, and whether the shards hold it or the stream adds it."""

from __future__ import annotations

from fms_fsdp.config import DataConfig
from fms_fsdp.data.shards.shard import CONVERT, Shard, ShardError

_SAMPLED_DOCUMENTS = 16


def delimiter_of(shard: Shard, sep_token: int) -> int:
    """Returns 1 if the stream must end the shard's documents with a separator, 0 if they end with it already.

    The shard's `has_eos` decides; without it, its first documents.

    Raises: ShardError if some of these end with the separator and some do not.
    """
    if "has_eos" in shard.metadata:
        return 0 if shard.metadata["has_eos"] == "true" else 1
    ends = {
        int(document[-1]) == sep_token
        for document in shard.first_documents(_SAMPLED_DOCUMENTS)
        if len(document)
    }
    if len(ends) > 1:
        raise ShardError(
            f"shard ({shard.path}) holds documents with and without a trailing separator ({sep_token}); {CONVERT}"
        )
    return 0 if ends == {True} else 1


def find_sep_token(
    section: DataConfig,
    root: str,
    names: tuple[str, ...],
    listed: dict[str, list[str]],
    opened: dict[str, Shard],
) -> int:
    """Returns the separator: the flag, else the one that all shards name."""
    said = {
        int(shard.metadata["sep_token"]): path
        for path, shard in opened.items()
        if shard.metadata.get("sep_token")
    }
    stored = {
        int(s.metadata["sep_token"]): p
        for p, s in opened.items()
        if s.metadata.get("has_eos") == "true" and s.metadata.get("sep_token")
    }
    if section.sep_token is not None:
        for token, path in stored.items():
            if token != section.sep_token:
                raise ValueError(
                    f"sep_token ({section.sep_token}) is {token} in shard {path}, whose documents end with it; leave the flag out"
                )
        return section.sep_token
    if len(said) > 1:
        (a, path_a), (b, path_b) = list(said.items())[:2]
        raise ValueError(
            f"sep_token is {a} in shard {path_a} but {b} in {path_b}; set --sep_token, or prepare both with one tokenizer"
        )
    if said:
        return next(iter(said))
    for name in names:
        for path in listed[name]:
            if path in opened:
                ends = {
                    int(document[-1])
                    for document in opened[path].first_documents(_SAMPLED_DOCUMENTS)
                    if len(document)
                }
                hint = (
                    f"its first documents all end with {ends.pop()}"
                    if len(ends) == 1
                    else "its documents end with none"
                )
                raise ValueError(
                    f"sep_token is not said by shard {path}; set --sep_token to the id that ends a document ({hint})"
                )
    raise FileNotFoundError(f"--data_path ({root}) holds no readable shard; restore one")
