"""Batches and ramps, of new and of resumed runs, stay as recorded."""

from __future__ import annotations

import json
import lzma
from typing import Any

from tests.config.batches import RECORD, Case, answer, cases


def may_differ(case: Case, expected: list[Any] | None, found: list[Any] | None) -> bool:
    """Returns whether a default micro-batch of 1 is found where the default of 2 was rejected."""
    return (
        expected is None and found is not None and found[0] == 1 and "batch_size" not in case.flags
    )


def test_batches_keep_their_values() -> None:
    recorded = json.loads(lzma.decompress(RECORD.read_bytes()))
    differing = [
        (case, expected, found)
        for case, expected in zip(cases(), recorded, strict=True)
        if (found := answer(case)) != expected
    ]
    wrong = [each for each in differing if not may_differ(*each)]
    assert not wrong, "\n".join(map(str, wrong[:20]))
    assert len(differing) < 20
