"""Whether the values of a checkpoint's data state are such as a run writes.

The checkpoint's own look (`checkpoint/folders`) sees types alone. A number that no run writes would end in an
error far from its cause or, worse, in other tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from fms_fsdp.config.ramp import MAX_INCREMENTS
from fms_fsdp.data.order.history import rampup_of
from fms_fsdp.data.order.mixture import NUM_SLOTS
from fms_fsdp.data.order.tapes import MAX_ROWS, MAX_TOKENS, fit_geometry
from fms_fsdp.errors import UserError
from fms_fsdp.safe_names import shown_name

MAX_SIZE = 1 << 31  # of a global batch, and of a row
MAX_TAPES = 1 << 20  # as many as --logical_shards may ask for
_DIGEST, _MARKS = re.compile("[0-9a-f]{16}"), re.compile("([0-9a-f]{2}|--)*")


def check_same(state: Mapping[str, Any], mine: Mapping[str, Any], names: Iterable[str], remedy: str) -> None:
    """Raises UserError where a checkpoint's data state has another value than this run's under one of the
    `names`, those of flags with "--" before them."""
    for name in names:
        now, before = mine[name.removeprefix("--")], state.get(name.removeprefix("--"))
        if now != before:
            raise UserError(
                f"{name} ({now}) is {before} in the checkpoint's data state; resume with {remedy}, or take "
                "its weights alone with --load_model_only"
            )


def check_state(state: Mapping[str, Any], step: int) -> None:
    """Checks manifest, cuts, history and skipped ranges of the data state of a run that stands after `step`.

    Raises: UserError naming the first value that no run writes.
    """
    try:
        checks = _checks(state, step)
        wrong, value = next(((name, value) for holds, name, value in checks if not holds), ("", None))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        wrong, value = "form", error
    if wrong:
        raise UserError(
            f"{shown_name(wrong)[1:-1]} ({shown_name(value)}) of the checkpoint's data state must be such as "
            "a run writes; the checkpoint is damaged or of another release: resume from another one"
        )


def _checks(state: Mapping[str, Any], step: int) -> Iterator[tuple[object, str, object]]:
    """Yields whether a value is right, its name and itself; one of another type may raise an error
    instead."""
    manifest, fit, history, skipped = (state[name] for name in ("manifest", "fit", "history", "skipped"))
    for name, known in manifest.items():
        digest, num_shards, num_tokens, marks = known
        texts = _DIGEST.fullmatch(digest) and _MARKS.fullmatch(marks)
        yield texts and _within(1, MAX_TOKENS, num_shards, num_tokens), f"manifest of {name}", known
    for size, fits in fit.items():
        for name, cut in fits.items():
            yield _is_cut(cut, size, manifest[name][2]), f"fit of {name} to rows of {size}", cut
    steps = [segment["step"] for segment in history]
    ascending = all(a < b for a, b in pairwise(steps))
    yield steps and ascending and _within(0, step + 1, *steps), f"history's steps, up to {step},", steps
    for after, segment in zip(steps, history, strict=True):
        sizes, weights = (segment["batch"], segment["seq_length"]), segment["weights"]
        yield _within(1, MAX_SIZE + 1, *sizes), f"batch and seq_length after step {after}", sizes
        quotas = weights.values()
        if rampup := rampup_of(state, after):
            yield _is_ramp(rampup, segment["batch"]), f"batch ramp after step {after}", rampup
        right = _within(1, NUM_SLOTS + 1, *quotas) and sum(quotas) == NUM_SLOTS
        yield right, f"weights after step {after}", weights
        right = weights.keys() <= manifest.keys() & fit[str(sizes[1])].keys()
        yield right, f"sources after step {after}, without manifest or fit,", list(weights)
    for entry in skipped:
        start, stop, a, b = entry
        yield _within(0, 1 << 63, *entry) and start < stop and 1 <= a < b, "skipped range", entry
    spans = zip(history, pairwise([*steps, step]), strict=True)
    num_rows = sum((b - a) * segment["batch"] for segment, (a, b) in spans)
    for start, stop, *_ in sorted(skipped):
        num_rows += stop - start if start <= num_rows else 0
    yield num_rows <= MAX_ROWS, f"number of rows by step {step}", num_rows


def _within(least: int, end: int, *values: object) -> bool:
    """Says whether all values are whole numbers from `least` on and below `end`."""
    return all(type(value) is int and least <= value < end for value in values)


def _is_ramp(rampup: tuple[int, ...], end: int) -> bool:
    """Says whether such a ramp leads to a batch of `end` rows."""
    start, increment, samples = rampup
    if not _within(1, end, start, increment) or not _within(1, MAX_ROWS, samples):
        return False
    return (end - start) % increment == 0 and (end - start) // increment <= MAX_INCREMENTS


def _is_cut(cut: list[int], size: str, num_tokens: int) -> bool:
    """Says whether `fit_geometry` makes this cut: asked for its number of tapes, it makes the same again."""
    num_rows = num_tokens // int(size)
    if size != str(int(size)) or not _within(1, MAX_ROWS, num_rows) or not _within(1, MAX_TAPES + 1, cut[0]):
        return False
    made = fit_geometry(num_rows, int(size), 1.0, cut[0])
    whole = [made.num_tapes, made.blocks_per_window, made.block_tokens]
    return cut == whole and _within(1, 1 << 63, *cut)
