"""Initial weights on one process; tests/distributed compares world sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.init import clean_name, init_weights
from fms_fsdp.models.llama import Llama

CONFIG = TransformerConfig(2, 128, 352, 4, 2, 1000, init_std=0.03, max_seq_len=16)


def test_threads_and_meta_device_change_no_weight() -> None:
    eager = Llama(CONFIG)
    init_weights(eager, 11)
    with torch.device("meta"):
        meta = Llama(CONFIG)
    meta.to_empty(device="cpu")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        init_weights(meta, 11)
    finally:
        torch.set_num_threads(threads)
    other = meta.state_dict()
    assert all(torch.equal(weight, other[name]) for name, weight in eager.state_dict().items())
    assert torch.equal(eager.rope, meta.rope)


def test_scales_follow_the_depth() -> None:
    model = Llama(CONFIG)
    init_weights(model, 11)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        residual = "o_proj" in name or "down_proj" in name
        expected = 0.03 / math.sqrt(4) if residual else 0.03
        assert abs(parameter.std().item() / expected - 1) < 0.02, name
        assert abs(parameter.mean().item()) < 4 * expected / math.sqrt(parameter.numel()), name


def test_seed_name_and_rows_change_the_weights() -> None:
    models = [Llama(CONFIG) for _ in range(2)]
    for seed, model in enumerate(models):
        init_weights(model, seed)
    embed = models[0].embed.weight
    first, second = (models[0].blocks[layer].attention.q_proj.weight for layer in "01")
    assert not torch.equal(embed, models[1].embed.weight)
    assert not torch.equal(first, second)
    assert not torch.equal(embed[:256], embed[256:512])


def test_other_layers_and_positions_change_no_weight() -> None:
    model, short = Llama(CONFIG), Llama(replace(CONFIG, num_layers=1, max_seq_len=8))
    init_weights(model, 1)
    init_weights(short, 1)
    first, other = (each.blocks["0"].attention.q_proj.weight for each in (model, short))
    assert torch.equal(first, other) and torch.equal(model.head.weight, short.head.weight)


def test_wrapper_prefixes_do_not_change_a_name() -> None:
    name = "blocks.1._recomputed.attention.q_proj.weight"
    assert clean_name(name) == "blocks.1.attention.q_proj.weight"
