"""A stream of the user's own: `--dataset_builder=module:function --data_kwargs=key=value,…`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fms_fsdp.config import DataConfig


def load_builder(section: DataConfig) -> Callable[..., Any]:
    """The function that `--dataset_builder` names, with `--data_kwargs` bound as text.

    It is called as `build(section, seed=…, vocab_size=…, global_batch_size=…, dp_rank=…, dp_size=…, **data_kwargs)` and returns an object with the
    methods of `data.stream.TokenStream`.

    Raises:
        ValueError: there is no such module or function.
    """
    name = section.dataset_builder
    module, _, function = name.partition(":")
    try:
        build = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--dataset_builder ({name}) must be importable as module:function: {error}"
        ) from None
    kwargs = dict(item.split("=", 1) for item in section.data_kwargs)
    return lambda *args, **settings: build(*args, **settings, **kwargs)
