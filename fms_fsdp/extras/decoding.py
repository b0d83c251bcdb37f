"""A model that reads token by token: its caches, and products of few rows.

    prompt ── the model, or its twin ── then its twin: the same weights, other products, compiled if wanted

On a CPU the twin has a second copy of the weights, laid out for oneDNN, where there is room for it.

A model in shards, whose weights are gathered by its own modules, has no twin.

B batch, S positions, V vocabulary, G key/value heads, K head dim. Speeds: benchmarks/bench_generate.py.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from fms_fsdp.distributed.dtensor import num_axes
from fms_fsdp.models.llama import Llama

Module = TypeVar("Module", bound=nn.Module)
_FEW = 64  # rows
_USUAL_ROWS = 16  # that a layout is made for; 1 and 512 rows read it as fast as one of their own


class KeyValueCache:
    """The keys and values of the positions seen so far, of one layer: (B G max_len K) each, as the first ones
    in dtype and device.

    With a `place`, a tensor of one number, each position goes there and all max_len come back: shapes that
    compiled code likes. The mask then hides what is not there yet, and who calls counts `length`.
    """

    _keys: torch.Tensor
    _values: torch.Tensor

    def __init__(self, max_len: int) -> None:
        self.max_len, self.length = max_len, 0
        self.place: torch.Tensor | None = None

    def append(
        self, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes in new positions; returns the keys and values of all."""
        if self.place is not None:
            self._keys.index_copy_(2, self.place, k_BGSK)
            self._values.index_copy_(2, self.place, v_BGSK)
            return self._keys, self._values
        start, self.length = self.length, self.length + k_BGSK.shape[2]
        if start == 0:
            shape = (*k_BGSK.shape[:2], self.max_len, k_BGSK.shape[3])
            self._keys, self._values = k_BGSK.new_zeros(shape), v_BGSK.new_zeros(shape)
        self._keys[:, :, start : self.length] = k_BGSK
        self._values[:, :, start : self.length] = v_BGSK
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]


class CachedReader:
    """A model behind the tokens that it has read: the next ones (B S) → logits (B V) of the last of them.

    `room`: the bytes that a second copy of the weights may take; it takes the time of about eight steps.
    Compiled code reads a token a row, from a cache that has one of few lengths and is read as a whole.
    """

    def __init__(self, model: Llama, max_len: int, compiled: bool, room: int = 0) -> None:
        if compiled:
            max_len = min(model.config.max_seq_len, max(64, 1 << (max_len - 1).bit_length()))
        self._compiled = compiled
        is_sharded = any(map(num_axes, model.parameters()))
        packs = not compiled and not is_sharded and _can_pack(model, room)
        self._twin = model if is_sharded else _twin(model, packs)
        self._first = self._twin if packs else model  # reads the prompt
        if not is_sharded:
            self._twin.head.product = _Product(packs)  # type: ignore[union-attr]
        if compiled:
            for module in (*self._twin.blocks.values(), self._twin.head):
                module.compile(dynamic=False)  # type: ignore[union-attr]  # after 8 shapes: no more code
        self._caches = [KeyValueCache(max_len) for _ in range(model.config.num_layers)]
        self._place = torch.zeros(1, dtype=torch.int64, device=model.rope.device)

    def __call__(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        tokens_BS, start = tokens_BS.to(self._place.device), self._caches[0].length
        if self._compiled and start:
            logits_BSV = self._compiled_step(tokens_BS, start)
        else:
            logits_BSV = (self._twin if start else self._first)(tokens_BS, caches=self._caches)
        return logits_BSV[:, -1].cpu()

    def _compiled_step(self, tokens_B1: torch.Tensor, start: int) -> torch.Tensor:
        self._place.fill_(start)
        for cache in self._caches:
            cache.place = self._place
        logits_B1V: torch.Tensor = self._twin(
            tokens_B1, positions_BS=self._place, caches=self._caches
        )
        for cache in self._caches:
            cache.length += 1
        return logits_B1V


def _twin(module: Module, packs: bool) -> Module:
    """Other modules with the same parameters, whose linear layers are those for few rows."""
    made = copy.copy(module)
    made._modules = {name: child and _twin(child, packs) for name, child in module._modules.items()}
    if type(made) is nn.Linear:
        made.__class__, made.product = _LinearOfFew, _Product(packs)  # type: ignore[assignment]
    return made


def _can_pack(model: Llama, room: int) -> bool:
    """Whether oneDNN is there for the weights, and room for their copy."""
    weights = list(model.parameters())
    kinds, onednn = {(weight.device.type, weight.dtype) for weight in weights}, torch.ops.mkldnn
    if not hasattr(onednn, "_linear_pointwise"):
        return False
    if kinds == {("cpu", torch.bfloat16)} and not onednn._is_mkldnn_bf16_supported():
        return False
    if kinds not in ({("cpu", torch.float32)}, {("cpu", torch.bfloat16)}):
        return False
    return sum(weight.nbytes for weight in weights) <= room


class _Product:
    """The products of one matrix: on `packs`, in oneDNN's own layout, made at the first one."""

    def __init__(self, packs: bool) -> None:
        self._packs, self._packed = packs, torch.empty(0)

    def __call__(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not self._packs:
            return product_of_few(input, weight, bias)
        if not self._packed.numel():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _USUAL_ROWS)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            input, self._packed, bias, "none", [], ""
        )
        return product


class _LinearOfFew(nn.Linear):
    product: _Product

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.product(input, self.weight, self.bias)


def product_of_few(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + b as F.linear has it, for few rows on a CPU.

    BLAS reads W at a third of the memory's speed. Compiled, a sum of products reads it about twice as fast,
    and in fp32 W x^T is faster than x W^T (benchmarks/bench_generate.py).
    """
    rows = input.numel() // input.shape[-1]
    if input.device.type != "cpu" or rows > _FEW:
        return F.linear(input, weight, bias)
    if rows == 1 and torch.compiler.is_compiling():
        wide = torch.promote_types(input.dtype, torch.float32)
        product = (weight.to(wide) * input.to(wide)).sum(-1).to(input.dtype)
    elif rows > 1 and input.dtype == torch.float32:
        product = (weight @ input.flatten(0, -2).T).T
    else:
        return F.linear(input, weight, bias)
    product = product.view(*input.shape[:-1], -1)
    return product if bias is None else product + bias
