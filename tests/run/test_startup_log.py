"""The log before step 1."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fms_fsdp.config import DataConfig, TrainConfig
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.run.startup_log import _precision
from tests.specs import resolved

TINY = VARIANTS["tiny"]


@pytest.mark.parametrize(
    ("model", "document_mask", "kernel"),
    [
        (TINY, False, "auto"),
        (TINY, True, "flex"),
        (replace(TINY, attn_window=5), False, "flex"),
        (replace(TINY, pos_emb="alibi"), True, "biased"),
    ],
)
def test_attention_of_a_gpu_is_named(model: object, document_mask: bool, kernel: str) -> None:
    config = TrainConfig(data=DataConfig(document_mask=document_mask))
    run = resolved(config, model=model, device="cuda")  # type: ignore[arg-type]
    assert _precision(run).endswith(f", {kernel} attention")
    assert "attention" not in _precision(replace(run, device_type="cpu"))
