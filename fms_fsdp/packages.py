"""Packages that are installed, and functions of the user that a flag names. Standard library only."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from fms_fsdp.errors import UserError

_PACKAGES = ("torch", "fire", "numpy", "pyarrow")  # without one of them no command works


def is_installed(name: str) -> bool:
    """Returns whether a package can be imported.

    A folder of its name is not the package: wandb writes its files into a folder wandb.
    """
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # a folder without __init__.py has none


def check_installed() -> None:
    """Ends the process with one line, where a package is missing: mostly the environment is not active."""
    for name in _PACKAGES:
        if not is_installed(name):
            remedy = (
                "source .venv/bin/activate (bash scripts/train.sh makes it), or pip install -e ."
            )
            print(f"error: {sys.executable} has no package {name}; {remedy}", file=sys.stderr)
            sys.exit(2)


def import_function(name: str, flag: str) -> Any:
    """Returns the user's function module:function, which a flag names.

    Raises:
        UserError: there is no such module or function. Errors of the module itself are not caught.
    """
    module, _, function = name.partition(":")
    rule = f"{flag}={name[:200]} must be importable as module:function"
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise UserError(f"{rule}; name a module on PYTHONPATH and a function in it")
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{rule}; {error}") from error
    if not callable(found := getattr(imported, function, None)):
        raise UserError(f"{rule}; module {module} has no function {function}")
    return found
