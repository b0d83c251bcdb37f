"""The order in which the documents of a window fill its rows.

A window holds exactly R rows of S tokens. Both packings return the same thing, a list of cuts (piece, tokens
skipped at its front, length) whose lengths add up to R * S; row j is the cuts from token j * S to (j + 1) *
S. No padding, no lost token.

    concat    pieces in a shuffled order, one after the other; rows cut documents where they fall
    bestfit   documents whole where they fit (extras/bestfit.py)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fms_fsdp.data.order.permute import I64, U64, mix64


class Cuts(NamedTuple):
    """Arrays of one length: which piece, how many of its tokens to skip, how many to take."""

    piece: I64
    skip: I64
    length: I64


def shuffled(count: int, key: int) -> I64:
    """Returns [0, count) sorted by mix64(i ^ key), stable."""
    order: U64 = mix64(np.arange(count, dtype=np.uint64) ^ np.uint64(key))
    return np.argsort(order, kind="stable")


def pack_concat(lengths: I64, key: int) -> Cuts:
    """Returns the pieces in a shuffled order, whole."""
    order = shuffled(len(lengths), key)
    return Cuts(order, np.zeros_like(order), lengths[order])
