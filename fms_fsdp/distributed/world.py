"""The ranks of a launch, as torchrun names them. Loads no torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from fms_fsdp.config.values import shown
from fms_fsdp.errors import UserError


@dataclass(frozen=True)
class World:
    """Rank and number of all processes, from torchrun's environment, or of one process alone."""

    rank: int
    local_rank: int
    size: int
    local_size: int

    @staticmethod
    def from_env() -> World:
        """Reads the ranks that torchrun sets, or those of a process without torchrun.

        Raises:
            UserError: a variable is missing or wrong.
        """
        size = _env("WORLD_SIZE", 1, range(1, 10**6))
        if os.environ.get("RANK", "0") != "0" and "WORLD_SIZE" not in os.environ:
            raise _incomplete("RANK", "WORLD_SIZE")
        if size > 1:
            for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
                if name not in os.environ:
                    raise _incomplete("WORLD_SIZE", name)
            _env("MASTER_PORT", 0, range(2**16))
        local_size = _env("LOCAL_WORLD_SIZE", size, range(1, size + 1))
        local_rank = _env("LOCAL_RANK", 0, range(local_size))
        return World(_env("RANK", 0, range(size)), local_rank, size, local_size)


def _env(name: str, default: int, valid: range) -> int:
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) not in valid:
        raise UserError(
            f"{name}={shown(text)} must be an integer from {valid.start} to {valid.stop - 1}, as "
            "torchrun sets it; unset the variable, or start with torchrun"
        )
    return int(text)


def _incomplete(name: str, missing: str) -> UserError:
    value = shown(os.environ[name])
    return UserError(f"{name}={value} requires {missing}; start with torchrun, or unset {name}")
