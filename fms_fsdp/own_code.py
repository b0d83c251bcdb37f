"""Functions of the user's own, named as module:function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fms_fsdp.errors import UserError


def load_function(flag: str, name: str) -> Callable[..., Any]:
    """The function that the flag names.

    Raises:
        ValueError: there is no such module or function.
    """
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{flag} ({name}) must be importable as module:function: {error}") from None
    return found
