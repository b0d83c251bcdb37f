"""A stream of the user's own: `--dataset_builder=module:function --data_kwargs=key=value,…`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fms_fsdp.config import DataConfig
from fms_fsdp.data.batch import Batch
from fms_fsdp.data.order.order import Consumption
from fms_fsdp.data.stream import Stream
from fms_fsdp.own_code import load_function

REQUIRED = ("next_batch", "state_dict", "load_state_dict", "close")


class CustomStream:
    """A user's stream as a `Stream`: what it does not have beyond `REQUIRED` is answered here."""

    def __init__(self, own: Any) -> None:
        self._own = own

    @property
    def last_step(self) -> int | None:
        return getattr(self._own, "last_step", None)

    @property
    def num_masked_rows(self) -> int:
        return getattr(self._own, "num_masked_rows", 0)

    def next_batch(self) -> Batch:
        batch: Batch = self._own.next_batch()
        return batch

    def batch_at(self, step: int) -> Batch | None:
        return self._own.batch_at(step) if hasattr(self._own, "batch_at") else None

    def documents(self, step: int, limit: int = 8) -> list[str]:
        return self._own.documents(step, limit) if hasattr(self._own, "documents") else []

    def consumption(self) -> Consumption:
        return self._own.consumption() if hasattr(self._own, "consumption") else {}

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._own.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], step: int) -> list[str]:
        return self._own.load_state_dict(state, step) or []

    def begin_after(self, step: int) -> None:
        """Without a method of its own, a new stream begins with its first batch whatever the number of the
        step."""
        if hasattr(self._own, "begin_after"):
            self._own.begin_after(step)

    def close(self) -> None:
        self._own.close()


def load_builder(section: DataConfig) -> Callable[..., Stream]:
    """Returns the function that `--dataset_builder` names, with `--data_kwargs` bound as text.

    It is called as `build(section, seed=…, vocab_size=…, global_batch_size=…, dp_rank=…, dp_size=…,
    pin_memory=…, **data_kwargs)`. What it builds must have the methods in `REQUIRED`, with the meaning that
    `stream.Stream` gives them, and may have the others.

    Raises: ValueError if there is no such module or function, or (when called) if the stream lacks a method.
    """
    name = section.dataset_builder
    build = load_function("--dataset_builder", name)
    kwargs = dict(item.split("=", 1) for item in section.data_kwargs)

    def checked_build(*args: Any, **settings: Any) -> CustomStream:
        own = build(*args, **settings, **kwargs)
        missing = [method for method in REQUIRED if not callable(getattr(own, method, None))]
        if missing:
            raise ValueError(
                f"--dataset_builder ({name}) must return an object with the methods {', '.join(REQUIRED)}; "
                f"add {', '.join(missing)} to its {type(own).__name__}"
            )
        return CustomStream(own)

    return checked_build
