"""Functions of the user's own, named as module:function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

from fms_fsdp.config.values import shown
from fms_fsdp.errors import UserError


def load_function(flag: str, name: str) -> Callable[..., Any]:
    """The function that the flag names.

    Raises:
        UserError: there is no such module or function. What the module itself raises passes.
    """
    module, _, function = name.partition(":")
    rule = f"{flag} ({shown(name)}) must be importable as module:function"
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise UserError(f"{rule}; name a module of PYTHONPATH and a function in it")
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{rule}: {error}") from error
    if not callable(found := getattr(imported, function, None)):
        raise UserError(f"{rule}: module {module} has no function {function}")
    return cast(Callable[..., Any], found)
