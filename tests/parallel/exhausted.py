"""A stream of a user's own whose run is out of memory in every attention of the model.

`--dataset_builder=tests.parallel.exhausted:build`
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from tests.data import custom_stream

_REAL = F.scaled_dot_product_attention


def _attend(*args: Any, **settings: Any) -> torch.Tensor:
    if isinstance(args[0], FakeTensor):  # the estimate before the run
        return _REAL(*args, **settings)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def build(*args: Any, **settings: Any) -> custom_stream.Counting:
    F.scaled_dot_product_attention = _attend
    return custom_stream.build(*args, **settings)
