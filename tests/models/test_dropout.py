"""Dropout: its masks are a function of what they belong to, however the work is done."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fms_fsdp.config import ParallelConfig
from fms_fsdp.extras.dropout import Dropout, layer_keys, row_keys
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.parallel.activation import apply_recomputation
from tests.models.test_families import build, labelled

CONFIG = LlamaConfig(
    2, 64, 96, 4, 2, 97, max_seq_len=48, dropout=0.1, attn_dropout=0.2, ffn_dropout=0.3
)


def masks(rate: float, keys_B: torch.Tensor, *shape: int, place: int = 1) -> torch.Tensor:
    return Dropout(rate, place)(torch.ones(len(keys_B), *shape), keys_B)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(64, 512), (4, 48, 48)])
def test_the_rate_is_within_five_sigma_overall_and_along_every_dim(
    rate: float, shape: tuple[int, ...]
) -> None:
    kept = masks(rate, row_keys(1, 2, 0, 16), *shape) > 0
    for dim in (None, *range(kept.ndim)):
        shares = (
            kept.double().mean()
            if dim is None
            else kept.double().movedim(dim, 0).flatten(1).mean(1)
        )
        n = kept.numel() // (1 if dim is None else kept.shape[dim])
        sigma = (rate * (1 - rate) / n) ** 0.5
        assert ((shares - (1 - rate)).abs() < 5 * sigma).all(), dim
    values = masks(rate, row_keys(1, 2, 0, 16), *shape).unique().tolist()
    assert values == pytest.approx([0, 1 / (1 - rate)])


def test_seed_step_row_layer_place_and_position_each_change_the_mask() -> None:
    """Two masks agree in a half of their values, as independent ones of rate 1/2 do: within 5 sigma."""
    keys = row_keys(5, 6, 7, 1)
    found = {
        "base": masks(0.5, keys, 64, 256),
        "seed": masks(0.5, row_keys(6, 6, 7, 1), 64, 256),
        "step": masks(0.5, row_keys(5, 7, 7, 1), 64, 256),
        "row": masks(0.5, row_keys(5, 6, 8, 1), 64, 256),
        "layer": masks(0.5, layer_keys(keys, 0), 64, 256),
        "next layer": masks(0.5, layer_keys(keys, 1), 64, 256),
        "place": masks(0.5, keys, 64, 256, place=2),
    }
    found["position"], found["channel"] = found["base"].roll(1, 1), found["base"].roll(1, 2)
    for one in found:
        for other in found:
            if one < other:
                same = (found[one] == found[other]).double().mean()
                assert abs(same - 0.5) < 5 * 0.5 / (64 * 256) ** 0.5, (one, other)


def test_a_row_has_its_mask_whoever_holds_it() -> None:
    whole = row_keys(3, 9, 0, 12)
    for size in (1, 2, 3, 4):
        rows = 12 // size
        assert torch.equal(
            torch.cat([row_keys(3, 9, rank * rows, rows) for rank in range(size)]), whole
        )
    parts = torch.cat([masks(0.3, keys, 5, 7) for keys in whole.split(5)])
    assert torch.equal(parts, masks(0.3, whole, 5, 7))


def gradients(
    config: LlamaConfig, how: str = "", rows: slice = slice(None)
) -> tuple[torch.Tensor, ...]:
    model = build(config)
    if "recompute" in how:
        apply_recomputation(model, ParallelConfig(recompute="blocks"), compiled="compile" in how)
    if "compile" in how:
        for block in model.blocks.values():
            block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    tokens, labels = labelled(config)
    for step in range(2 if "compile" in how else 1):
        model.zero_grad()
        keys_B = row_keys(
            1, 4 - step, 0, 2
        )  # step 4, then 3: other keys are no reason to compile anew
        loss_sum, _ = model(tokens[rows], labels[rows], keys_B=keys_B[rows])
        loss_sum.backward()
    return loss_sum.detach(), *(parameter.grad for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own, of the input of a block
@pytest.mark.parametrize("how", ["recompute", "compile", "recompute compile"])
def test_recomputed_and_compiled_blocks_have_the_same_masks(how: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = gradients(CONFIG, how)
    if "compile" in how:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
        step_3 = build(CONFIG)
        tokens, labels = labelled(CONFIG)
        loss_sum, _ = step_3(tokens, labels, keys_B=row_keys(1, 3, 0, 2))
        torch.testing.assert_close(compiled[0], loss_sum.detach(), rtol=1e-5, atol=0)
    else:
        torch.testing.assert_close(compiled, gradients(CONFIG), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns of deprecated calls it makes
def test_the_code_that_inductor_makes_draws_the_same_masks() -> None:
    keys_B, x = row_keys(1, 2, 3, 5), torch.randn(5, 33, 70)
    dropped = torch.compile(Dropout(0.3, 2), fullgraph=True, dynamic=False)(x, keys_B)
    assert torch.equal(dropped == 0, Dropout(0.3, 2)(x, keys_B) == 0)
    torch.testing.assert_close(dropped, Dropout(0.3, 2)(x, keys_B), rtol=1e-6, atol=0)


def test_rows_apart_have_the_masks_of_rows_together() -> None:
    together = gradients(CONFIG)
    apart = [gradients(CONFIG, rows=slice(row, row + 1)) for row in range(2)]
    for whole, one, other in zip(together, *apart, strict=True):
        torch.testing.assert_close(one + other, whole, rtol=1e-4, atol=1e-4)


def test_each_rate_works_alone_and_without_keys_there_is_none() -> None:
    tokens, labels = labelled(CONFIG)
    none = replace(CONFIG, dropout=0.0, attn_dropout=0.0, ffn_dropout=0.0)
    plain = build(none)(tokens, labels)[0]
    torch.testing.assert_close(build(CONFIG)(tokens, labels)[0], plain, rtol=1e-6, atol=0)
    losses = set()
    for name in ("dropout", "attn_dropout", "ffn_dropout"):
        model: Llama = build(replace(none, **{name: 0.2}))  # type: ignore[arg-type]
        losses.add(model(tokens, labels, keys_B=row_keys(1, 1, 0, 2))[0].item())
    assert len({*losses, plain.item()}) == 4


def test_documents_stay_apart_under_dropout_of_attention() -> None:
    config = replace(CONFIG, dropout=0.0, ffn_dropout=0.0)
    model, (tokens, _) = build(config), labelled(config)
    ids = (torch.arange(48) // 20).to(torch.int32).expand(2, -1)
    keys_B = row_keys(1, 1, 0, 2)
    before = model(tokens, document_ids_BS=ids, keys_B=keys_B)
    changed = tokens.clone()
    changed[:, :20] = (changed[:, :20] + 1) % 97
    after = model(changed, document_ids_BS=ids, keys_B=keys_B)
    assert torch.equal(before[:, 20:], after[:, 20:]) and not torch.equal(
        before[:, :20], after[:, :20]
    )
