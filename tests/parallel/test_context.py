"""Flex attention of gathered keys, which context parallelism uses on GPUs, against full sequences.

test_layouts.py trains with both methods.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fms_fsdp.models import attention as attention_module
from fms_fsdp.models.attention import attention
from fms_fsdp.models.build import build_model
from fms_fsdp.parallel import context
from tests.parallel.layouts import CPU, SHAPE

SEQ = 64
IDS = torch.tensor([[0] * 5 + [1] * 30 + [2] * 29, [0] * 33 + [1] + [2] * 30])


@pytest.mark.filterwarnings("ignore")  # that it is not compiled
@pytest.mark.parametrize(("ids", "window"), [(None, 0), (IDS, 0), (None, 9), (IDS, 9)])
def test_flex_attention_of_gathered_keys_is_exact(
    ids: torch.Tensor | None, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU compiles it; here it runs as plain operations."""
    for module in (context, attention_module):
        monkeypatch.setattr(module, "compiled", lambda function: function)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, heads, SEQ, 8, generator=generator) for heads in (8, 4, 4))
    model = build_model(replace(SHAPE, num_layers=1, max_seq_len=SEQ, attn_window=window))
    in_fp64 = [x.double() for x in (q, k, v)]
    mask = model.mask(model.config.windows[0], ids, slice(0, SEQ), in_fp64[0])
    wanted = attention(*in_fp64, mask, backend="math").float()
    for rank in (0, 1):
        split: Any = context._Gather.__new__(context._Gather)
        split.rank, split.size = rank, 2
        block_mask = split.block_mask(window, ids, SEQ // 2, CPU)
        out = attention(split.own_tokens(q, 2), k, v, block_mask)
        assert float((out - split.own_tokens(wanted, 2)).abs().max()) < 1e-5
