"""The one loader of code by name: optional parts of this package, and functions that users wrote.

    load_part("float8")                             the module fms_fsdp/extras/float8.py
    load_part("samples:Sampler")                    what that module calls so
    load_part("my_module:build", flag="--stream")   a function of the user's own, which a flag names

What no run has chosen is never imported. Standard library only.
"""

from __future__ import annotations

import importlib
from typing import Any

from fms_fsdp.config.values import shown
from fms_fsdp.errors import UserError


def load_part(name: str, *, folder: str = "extras", flag: str = "") -> Any:
    """The module or, as module:name, the object of that name in a folder of this package; with `flag`, the
    name of a flag, the function module:function of any package.

    Raises:
        UserError: the flag names no module or function that there is. What the module itself raises passes.
    """
    if flag:
        return _load_function(name, flag)
    module, _, inner = name.partition(":")
    imported = importlib.import_module(f".{folder}.{module}", __package__)
    return getattr(imported, inner) if inner else imported


def _load_function(name: str, flag: str) -> Any:
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
    return found
