"""Context parallel against one process: attention by itself, what it keeps, and training in many layouts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fms_fsdp.config import BF16, FP32, ParallelConfig
from fms_fsdp.generate import Sampling, generate
from fms_fsdp.models import attention as attention_module
from fms_fsdp.models.attention import attention
from fms_fsdp.models.build import build_model
from fms_fsdp.models.llama import Llama
from fms_fsdp.parallel import context
from fms_fsdp.parallel.layout import resolve_cp_method, sequence_multiple
from fms_fsdp.parallel.parallelize import parallelize
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import CPU, SHAPE, VOCAB, Case, compare, mesh_of, rows_of, train_case

SEQ, HEADS = 64, 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 30 + [2] * 29, [0] * 33 + [1] + [2] * 30])
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": dict(ids=DOCUMENTS),
    "window": dict(attn_window=9),
    "alibi": dict(pos_emb="alibi"),
    "all": dict(ids=DOCUMENTS, attn_window=9, pos_emb="alibi"),
}


def split_model(method: str, size: int, **shape: Any) -> Llama:
    """A model of one layer, whose rows ranks of cp divide."""
    section = ParallelConfig(cp_size=size, cp_method=method)
    model = build_model(replace(SHAPE, num_layers=1, **shape))
    context.apply_cp(model, mesh_of(section), section)
    return model


def inputs(groups: int) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the result."""
    generator = torch.Generator().manual_seed(groups)
    heads = (HEADS, groups, groups, HEADS)
    return [torch.randn(2, number, SEQ, 8, generator=generator) for number in heads]


def whole_attention(groups: int, kind: dict[str, Any]) -> list[torch.Tensor]:
    """The result and its gradients, in fp64 without any split."""
    shape = {name: value for name, value in kind.items() if name != "ids"}
    model = build_model(replace(SHAPE, num_layers=1, max_seq_len=SEQ, **shape))
    window, x = model.config.windows[0], torch.empty(0, dtype=torch.float64)
    mask = model.mask(window, kind.get("ids"), slice(0, SEQ), x)
    *qkv, grad = (x.double() for x in inputs(groups))
    out = attention(*(x.requires_grad_() for x in qkv), mask, backend="math")
    out.backward(grad)
    return [x.detach().float() for x in (out, *(x.grad for x in qkv))]  # type: ignore[union-attr]


def errors_of_attention(method: str) -> dict[str, float]:
    """The largest error of the result and its gradients on this rank, by case."""
    size, found = dist.get_world_size(), {}
    for name, kind in KINDS.items():
        for groups in (1, 2, 8) if name == "plain" else (4,):
            shape = {key: value for key, value in kind.items() if key != "ids"}
            model = split_model(method, size, max_seq_len=SEQ, **shape)
            own_attention: Any = model.blocks["0"].attention
            split: Any = model.mask.func.__self__  # type: ignore[attr-defined]
            own = partial(split.own_tokens, dim=2)
            window = model.config.windows[0]
            mask = model.mask(window, kind.get("ids"), slice(0, SEQ // size), torch.empty(0))
            *qkv, grad = map(own, inputs(groups))
            out = own_attention.attend(*(x.requires_grad_() for x in qkv), mask)
            out.backward(grad)
            wanted = map(own, whole_attention(groups, kind))
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


@pytest.mark.parametrize("name", ["plain", "documents", "window"])
def test_flex_attention_of_gathered_keys_is_that_of_whole_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU compiles, here as plain operations."""
    for module in (context, attention_module):
        monkeypatch.setattr(module, "compiled", lambda function: function)
    kind, size = KINDS[name], 2
    wanted = whole_attention(4, kind)
    *qkv, _ = inputs(4)
    for rank in range(size):
        split: Any = context._Gather.__new__(context._Gather)
        split.rank, split.size = rank, size
        own = SEQ // size
        mask = split.block_mask(kind.get("attn_window", 0), kind.get("ids"), own, CPU)
        cut = [split.own_tokens(x, 2) for x in
               (qkv[0], wanted[0])]  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not compiled
            out = attention(cut[0], *qkv[1:], mask)
        assert float((out - cut[1]).abs().max()) < 1e-5


LONG = 16_384


def kept_bytes(method: str, groups: int) -> int:
    """What autograd keeps of a forward pass over one long row, without weights and their gradients."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    shape: dict[str, Any] = dict(max_seq_len=LONG, num_attention_heads=4, num_kv_heads=groups)
    whole = build_model(replace(SHAPE, num_layers=1, **shape))
    model = split_model(method, size, **shape) if size > 1 else whole
    tokens, kept = torch.zeros(1, LONG, dtype=torch.long), {}
    known = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.shape != (VOCAB, 64):
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens)
    return sum(kept.values())


@pytest.mark.parametrize("size", [2, 4])
def test_what_autograd_keeps_falls_with_the_ranks(size: int) -> None:
    """Ulysses: all of it, gathered keys: all but keys and values. 5 % are for rotations, which one process
    takes from the table, and for what ulysses receives after attention."""
    groups = 4
    alone = kept_bytes("", groups)
    keys_and_values = 2 * LONG * groups * SHAPE.head_dim * 4
    of_ulysses = run_ranks(kept_bytes, size, "ulysses", groups)
    of_gather = run_ranks(kept_bytes, size, "gather", groups)
    assert max(of_ulysses) <= 1.05 * alone / size
    mask = 4 * LONG * LONG // size  # on a CPU; one for all layers
    assert max(of_gather) - keys_and_values - mask <= 1.05 * (alone - keys_and_values) / size


def both(**case: Any) -> dict[str, Case]:
    """The case by both methods."""
    flags = {"cp_size": 2} | case.pop("flags", {})
    return {method: Case(flags | {"cp_method": method}, **case) for method in ("ulysses", "gather")}


FEATURES: dict[str, dict[str, Any]] = {
    "documents, recomputed": dict(documents=True, common=dict(recompute="blocks")),
    "learned positions, one key head, operations recomputed": dict(
        common=dict(recompute="ops"),
        accum=2,
        shape=dict(pos_emb="learned", num_kv_heads=1, qk_norm=True),
    ),
    "alibi, documents, dropout": dict(documents=True, shape=dict(pos_emb="alibi")),
    "windows, waves, z-loss": dict(
        shape=dict(pos_emb="sinusoidal", attn_window=5, attn_window_pattern="LG", z_loss=1e-3)
    ),
    "bf16, tied": dict(
        precision=BF16, shape=dict(tie_embeddings=True), loss_abs=5e-3, norm_rel=1e-2
    ),
}


def test_two_ranks_train_as_one_process() -> None:
    compare(
        2,
        {
            f"{name}: {method}": case
            for name, what in FEATURES.items()
            for method, case in both(**what).items()
        },
    )


def test_four_ranks_train_as_one_process() -> None:
    layouts = {
        "cp 4": dict(cp_size=4),
        "cp 2 x fsdp 2": dict(sharding_strategy="fsdp"),
        "cp 2 x ddp 2": dict(sharding_strategy="ddp"),
    }
    compare(
        4,
        {
            f"{name}: {method}": case
            for name, flags in layouts.items()
            for method, case in both(flags=flags, documents=True).items()
        },
    )


def train_compiled(cases: Mapping[str, Case], backend: str) -> dict[str, Any]:
    """The cases, compiled by this backend."""
    compile_ = torch.compile
    torch.compile = partial(compile_, backend=backend)  # type: ignore[assignment]
    try:
        return {name: train_case(case) for name, case in cases.items()}
    finally:
        torch.compile = compile_


def check_compiled(backend: str) -> None:
    what = both(documents=True, common=dict(recompute="blocks"))
    cases = {
        name: replace(case, flags={**case.flags, "use_torch_compile": True})
        for name, case in what.items()
    }
    for found in run_ranks(train_compiled, 2, cases, backend):
        for name, case in cases.items():
            wanted = train_case(case, alone=True)
            assert found[name].losses == pytest.approx(wanted.losses, abs=1e-5, rel=0)
            assert found[name].norms == pytest.approx(wanted.norms, rel=1e-4)


def test_compiled_blocks_train_as_one_process() -> None:
    check_compiled("aot_eager")


@pytest.mark.slow
def test_blocks_as_generated_code_train_as_one_process() -> None:
    check_compiled("inductor")


def read(method: str) -> tuple[float, list[list[int | None]]]:
    """The loss of a batch, summed over the ranks of its rows, and the tokens that follow two prompts."""
    flags: Any = dict(cp_size=2, cp_method=method) if method else {}
    section = ParallelConfig(**flags)
    config, mesh = replace(SHAPE, attn_window=5, attn_window_pattern="LG"), mesh_of(section)
    model = parallelize(config, section, mesh, device=CPU, precision=FP32, seed=5)
    with torch.no_grad():
        loss_sum, _ = model(*rows_of(0, config))
    tokens = generate(
        model, [[1, 2, 3], [4, 5, 6, 7, 8]], Sampling(temperature=0), max_new_tokens=6
    )
    return float(mesh.sum(loss_sum, "row")), list(tokens)


def test_evaluation_and_generation_are_those_of_one_process() -> None:
    loss, tokens = read("")
    for method in ("ulysses", "gather"):
        for found, written in run_ranks(read, 2, method):
            assert found == pytest.approx(loss, rel=1e-6)
            assert written == tokens


def test_the_method_follows_from_the_heads() -> None:
    assert resolve_cp_method("auto", 8, 2, 4) == "ulysses"
    assert resolve_cp_method("auto", 8, 4, 4) == resolve_cp_method("gather", 8, 1, 2) == "gather"
    assert [sequence_multiple(method, 2, 4, sp) for method in ("ulysses", "gather") for sp in (False, True)] == [
        4, 8, 8, 8,
    ]  # fmt: skip
