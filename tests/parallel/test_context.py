"""Context parallel against one process: attention by itself, what it keeps, and training in many layouts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fms_fsdp.config import BF16, ParallelConfig
from fms_fsdp.config.axes import cp_method, row_multiple
from fms_fsdp.extras.dropout import row_keys
from fms_fsdp.extras.gpt import added_mask
from fms_fsdp.models.attention import explicit_attention
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.parallel import context
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import CPU, SHAPE, VOCAB, Case, compare, mesh_of, rows_of

SEQ, HEADS = 64, 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 30 + [2] * 29, [0] * 33 + [1] + [2] * 30])
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": dict(ids=DOCUMENTS),
    "window": dict(attn_window=9),
    "alibi": dict(pos_emb="alibi"),
    "all": dict(ids=DOCUMENTS, attn_window=9, pos_emb="alibi"),
    "dropout": dict(ids=DOCUMENTS, pos_emb="alibi", attn_dropout=0.3),
}


def split_model(method: str, size: int, **shape: Any) -> Llama:
    """A model of one layer, whose rows ranks of cp divide."""
    section = ParallelConfig(cp_size=size, cp_method=method)
    model = Llama(replace(SHAPE, num_layers=1, **shape))
    context.apply_cp(model, mesh_of(section), section)
    return model


def inputs(groups: int) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the result."""
    generator = torch.Generator().manual_seed(groups)
    heads = (HEADS, groups, groups, HEADS)
    return [torch.randn(2, number, SEQ, 8, generator=generator) for number in heads]


def whole_attention(groups: int, kind: dict[str, Any], keys_B: torch.Tensor | None) -> list[torch.Tensor]:
    """The result and its gradients, by explicit products in fp64 without any split."""
    shape = {name: value for name, value in kind.items() if name != "ids"}
    config = replace(SHAPE, max_seq_len=SEQ, **shape)
    bias = added_mask(config, config.attn_window, kind.get("ids"), slice(0, SEQ), CPU, 0)
    dropout = Llama(replace(config, num_layers=1)).blocks["0"].attention.dropout  # type: ignore[union-attr]
    drop = {} if keys_B is None else {"drop": partial(dropout, keys_B=keys_B)}
    *qkv, grad = (x.double() for x in inputs(groups))
    out = explicit_attention(*(x.requires_grad_() for x in qkv), bias, **drop)
    out.backward(grad)
    return [x.detach().float() for x in (out, *(x.grad for x in qkv))]  # type: ignore[union-attr]


def errors_of_attention(method: str) -> dict[str, float]:
    """The largest error of the result and its gradients on this rank, by case."""
    size, found = dist.get_world_size(), {}
    for name, kind in KINDS.items():
        for groups in (1, 2, 8) if name == "plain" else (4,):
            shape = {key: value for key, value in kind.items() if key != "ids"}
            model = split_model(method, size, max_seq_len=SEQ, **shape)
            attention: Any = model.blocks["0"].attention
            split: Any = model.mask.func.__self__  # type: ignore[attr-defined]
            parts = split.places(SEQ // size)
            own = partial(
                lambda x, parts: torch.cat([x[:, :, r.start : r.stop] for r in parts], 2), parts=parts
            )
            window = model.config.windows[0]
            mask = model.mask(
                model.config, window, kind.get("ids"), slice(0, SEQ // size), CPU, cached=False, num_keys=0
            )
            keys_B = row_keys(3, 1, 0, 2) if "attn_dropout" in kind else None
            drop = None if keys_B is None else partial(attention.dropout, keys_B=keys_B)
            *qkv, grad = map(own, inputs(groups))
            out = attention.attend(*(x.requires_grad_() for x in qkv), mask=mask, drop=drop)
            out.backward(grad)
            wanted = map(own, whole_attention(groups, kind, keys_B))
            made = (out, *(x.grad for x in qkv))
            found[f"{name} {groups}"] = max(
                float((a - b).abs().max()) for a, b in zip(made, wanted, strict=True)
            )
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_attention_is_that_of_whole_rows(size: int) -> None:
    for method in ("ulysses", "gather"):
        for found in run_ranks(errors_of_attention, size, method):
            assert max(found.values()) < 1e-5, (method, found)
