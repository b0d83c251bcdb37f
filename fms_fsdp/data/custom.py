"""A stream of the user's own: `--dataset_builder=module:function --data_kwargs=key=value,…`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fms_fsdp.config import DataConfig
from fms_fsdp.data.stream import Stream
from fms_fsdp.errors import UserError
from fms_fsdp.packages import import_function

REQUIRED = ("next_batch", "state_dict", "load_state_dict", "close")


# What is answered for a stream that does not have it.
ANSWERED: dict[str, Any] = {
    "last_step": None,
    "num_masked_rows": 0,
    "batch_at": lambda step: None,
    "documents": lambda step, limit=8: [],
    "consumption": dict,
}


class CustomStream:
    """A user's stream as a `Stream`, with all that is in `ANSWERED`."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        # An AttributeError within a property of the user's class is a bug, not a missing property.
        if name in ANSWERED and not hasattr(type(self._own), name):
            return getattr(self._own, name, ANSWERED[name])
        return getattr(self._own, name)

    def begin_after(self, step: int, sequences_seen: int = 0) -> None:
        """Without a method of the user, the stream begins with its first batch, whatever the step.

        `sequences_seen` is for a batch ramp, which such a stream does not have.
        """
        if hasattr(self._own, "begin_after"):
            self._own.begin_after(step)

    def load_state_dict(self, state: dict[str, Any], step: int) -> list[str]:
        return self._own.load_state_dict(state, step) or []


def load_builder(section: DataConfig) -> Callable[..., Stream]:
    """Returns the function that `--dataset_builder` names, with `--data_kwargs` bound as text.

    It is called as `build(section, seed=…, vocab_size=…, global_batch_size=…, dp_rank=…, dp_size=…,
    pin_memory=…, **data_kwargs)`. The stream that it builds must have the methods in `REQUIRED`,
    with the meaning that `stream.Stream` gives them, and may have the others.

    Raises: UserError if there is no such module or function, or (when called) if the stream lacks a
    method.
    """
    name = section.dataset_builder
    build = import_function(name, "--dataset_builder")
    kwargs = dict(item.split("=", 1) for item in section.data_kwargs)

    def checked_build(*args: Any, **settings: Any) -> CustomStream:
        for key in sorted(settings.keys() & kwargs.keys()):
            raise UserError(
                f"--data_kwargs={key}={kwargs[key]} must not name an argument that the program passes; rename it"
            )
        own = build(*args, **settings, **kwargs)
        missing = [method for method in REQUIRED if not callable(getattr(own, method, None))]
        if missing:
            raise UserError(
                f"--dataset_builder ({name}) must return an object with the methods {', '.join(REQUIRED)}; "
                f"add {', '.join(missing)} to {type(own).__name__}"
            )
        return CustomStream(own)

    return checked_build
