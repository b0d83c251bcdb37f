"""What a checkpoint's data state must have in common with a run that goes on from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fms_fsdp.errors import UserError


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
