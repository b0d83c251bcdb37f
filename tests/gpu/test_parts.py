"""Single parts on the GPU, each in a process of its own."""

from __future__ import annotations

import pytest

from tests.gpu.launch import call

PARTS = (
    "attention_by_document",
    "loss_of_any_vocabulary",
    "copies_in_pinned_memory",
    "verdicts_under_offload",
    "segments_that_grow",
    "float8_products",
    "loss_scale_within_the_step",
    "steps_that_wait_for_nothing",
    "gradients_outlive_the_optimizer",
    "compiled_rounding",
)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_part(part: str) -> None:
    call("checks", part)
