"""Options of shapes that no other program has, against a short reference; and every option with documents,
caches, compilation, recomputation and bf16."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fms_fsdp.config import BF16, ParallelConfig
from fms_fsdp.generate import Sampling, generate
from fms_fsdp.models.attention import KVCache
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.gpt import ScaleNorm, alibi_slopes
from fms_fsdp.models.gpt import distance_buckets as buckets
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.loss import linear_cross_entropy
from fms_fsdp.parallel.activation_checkpointing import apply_activation_checkpointing
from fms_fsdp.parallel.compile import apply_compile
from fms_fsdp.parallel.precision import apply_precision
from tests.models.test_families import GPT2, NEOX, QWEN3, build, labelled

BASE = TransformerConfig(3, 64, 96, 4, 2, 97, max_seq_len=48)
OWN = {
    "scalenorm": replace(BASE, norm="scalenorm", qk_norm=True, pos_emb="none", norm_eps=1e-12),
    "sinusoidal": replace(BASE, pos_emb="sinusoidal", activation="relu2"),
    "alibi": replace(BASE, pos_emb="alibi", bias=True, activation="gelu"),
    "none": replace(BASE, pos_emb="none", parallel_residual=True),
    "windows": replace(BASE, attn_window=5, attn_window_pattern="LLG", pos_emb="none"),
    "alibi windows": replace(
        BASE,
        pos_emb="alibi",
        attn_window=5,
        num_attention_heads=6,
        head_dim=24,
        vocab_multiple_of=64,
    ),
    "relative": replace(BASE, pos_emb="relative", relative_max_distance=40),
    "relative windows": replace(
        BASE,
        pos_emb="relative",
        attn_window=9,
        attn_window_pattern="LG",
        relative_buckets=7,
        num_layers=2,
    ),
}
ALL = OWN | {"gpt2": GPT2, "neox": NEOX, "qwen3": QWEN3}


def published_slopes(heads: int) -> list[float]:
    """By the recursion of Press et al., https://github.com/ofirpress/attention_with_linear_biases."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (head + 1) / heads) for head in range(heads)]
    power = 2 ** int(math.log2(heads))
    return published_slopes(power) + published_slopes(2 * power)[::2][: heads - power]


def bucket_of(distance: int, number: int, most: int) -> int:
    """As Raffel et al. 2020 describe it."""
    exact = number // 2
    if distance < exact:
        return max(0, distance)
    return min(
        number - 1,
        exact + int(math.log(distance / exact) / math.log(most / exact) * (number - exact)),
    )


def reference(config: TransformerConfig, model: Llama, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Logits by the formulas, with nothing of the model but its weights; without rotary positions."""
    state, size, heads = dict(model.named_parameters()), config.head_dim, config.num_attention_heads
    place_S = torch.arange(tokens_BS.shape[1])
    far_SS = place_S[:, None] - place_S[None]
    number, most = config.relative_buckets, config.relative_max_distance
    bucket_SS = torch.tensor([[bucket_of(int(far), number, most) for far in row] for row in far_SS])

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        weight = state[f"{name}.weight"]
        if config.norm == "scalenorm":
            return weight * x.shape[-1] ** 0.5 * x / x.norm(dim=-1, keepdim=True)
        return weight * x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()

    def attend(layer: int, x: torch.Tensor) -> torch.Tensor:
        name = f"blocks.{layer}.attention"
        q, k, v = (
            linear(f"{name}.{part}_proj", x).unflatten(-1, (-1, size)).transpose(1, 2)
            for part in "qkv"
        )
        if config.qk_norm:
            q, k = norm(f"{name}.q_norm", q), norm(f"{name}.k_norm", k)
        k, v = (part.repeat_interleave(heads // part.shape[1], 1) for part in (k, v))
        slopes = torch.tensor(published_slopes(heads))[:, None, None]
        scores = q @ k.mT / size**0.5 - (slopes * far_SS if config.pos_emb == "alibi" else 0)
        if config.pos_emb == "relative":
            scores = scores + state["distance_bias.weight"][bucket_SS].permute(2, 0, 1)
        pattern = config.attn_window_pattern
        window = (
            config.attn_window
            if config.attn_window and pattern[layer % len(pattern)] == "L"
            else 10**6
        )
        scores = scores.masked_fill((far_SS < 0) | (far_SS >= window), -torch.inf)
        return linear(f"{name}.o_proj", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def feed(layer: int, x: torch.Tensor) -> torch.Tensor:
        name = f"blocks.{layer}.feed_forward"
        inner = linear(f"{name}.up_proj", x)
        if config.activation == "swiglu":
            inner = inner * F.silu(linear(f"{name}.gate_proj", x))
        else:
            inner = F.gelu(inner) if config.activation == "gelu" else F.relu(inner) ** 2
        return linear(f"{name}.down_proj", inner)

    x = state["embed.weight"][tokens_BS]
    if config.pos_emb == "sinusoidal":
        waves = [
            [
                (torch.sin, torch.cos)[d % 2](torch.tensor(p / 10000 ** ((d - d % 2) / 64)))
                for d in range(64)
            ]
            for p in range(tokens_BS.shape[1])
        ]
        x = x + torch.tensor(waves)
    for layer in range(config.num_layers):
        before = norm(f"blocks.{layer}.attention_norm", x)
        after = x + attend(layer, before)
        x = after + feed(
            layer, norm(f"blocks.{layer}.ffn_norm", x if config.parallel_residual else after)
        )
    logits = linear("head", norm("head.norm", x))[..., : config.vocab_size]
    return logits


@pytest.mark.parametrize("heads", [*range(1, 34), 40, 56, 71, 112])
def test_the_slopes_of_alibi_are_the_published_ones_for_any_number_of_heads(heads: int) -> None:
    """Those of Press, BLOOM and MPT; 2^(-8 k / H) for any H was not."""
    found = alibi_slopes(heads, torch.device("cpu"))
    torch.testing.assert_close(found, torch.tensor(published_slopes(heads)), rtol=1e-6, atol=0)


BUCKETS = [
    *range(16),
    *[16] * 3,
    *[17] * 2,
    *[18] * 3,
    *[19] * 3,
    *[20] * 4,
    *[21] * 4,
    *[22] * 5,
]  # 0 to 39


def test_the_buckets_of_distances_are_those_of_t5() -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    assert buckets(torch.arange(-2, len(BUCKETS)), 32, 128).tolist() == [0, 0, *BUCKETS]
    assert buckets(torch.tensor([112, 113, 128, 10**6]), 32, 128).tolist() == [30, 31, 31, 31]
    for number, most in ((32, 128), (2, 5), (7, 33), (64, 1000)):
        distance = torch.arange(-9, 3000)
        theirs = t5.T5Attention._relative_position_bucket(-distance, False, number, most)
        assert torch.equal(buckets(distance, number, most), theirs)


@pytest.mark.parametrize("attn_impl", ["auto", "math"])
@pytest.mark.parametrize("name", ["relative", "relative windows"])
def test_biases_of_distances_have_the_gradients_of_the_reference_in_fp64(
    name: str, attn_impl: str
) -> None:
    config = replace(OWN[name], attn_impl=attn_impl)
    model = build(config).double()
    tokens, _ = labelled(config)
    weights = [model.distance_bias.weight, *(weight for key, weight in model.named_parameters())]
    found = [
        torch.autograd.grad(logits.square().sum(), weights)
        for logits in (model(tokens), reference(config, model, tokens))
    ]
    masks = [model.mask(window, None, slice(0, 48), model.rope) for window in config.windows]
    assert all(mask.stride(-1) == 1 for mask in masks), "the kernels of a GPU refuse others"
    sizes = (config.relative_buckets, config.relative_max_distance)
    used = {bucket_of(distance, *sizes) for distance in range(48)}
    assert set(found[0][0].abs().sum(1).nonzero().flatten().tolist()) == used
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", OWN)
def test_logits_equal_the_reference(name: str) -> None:
    model = build(OWN[name])
    tokens, _ = labelled(OWN[name])
    torch.testing.assert_close(
        model(tokens), reference(OWN[name], model, tokens), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ALL)
def test_masked_documents_equal_separate_documents(name: str) -> None:
    model, lengths = build(ALL[name]), [20, 1, 27]
    tokens, labels = labelled(ALL[name])
    tokens, labels = tokens[:1], labels[:1]
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).to(torch.int32)[None]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(torch.int32)[None]
    together = model(tokens, positions_BS=positions, document_ids_BS=ids)
    apart = torch.cat([model(part) for part in tokens.split(lengths, 1)], 1)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together, model(tokens), atol=1e-3)


@pytest.mark.parametrize("name", ALL)
def test_text_with_a_cache_is_that_without_one(name: str) -> None:
    model = build(ALL[name])
    tokens, _ = labelled(ALL[name])
    whole, parts = model(tokens), []
    caches = [KVCache(48) for _ in range(model.config.num_layers)]
    with torch.no_grad():
        for part in tokens.split([20, 3, *[1] * 25], dim=1):
            parts.append(model(part, caches=caches))
    last = [19, 22, *range(23, 48)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole[:, last], rtol=1e-4, atol=1e-4)
    (drawn,) = zip(
        *generate(model, [[1, 2, 3]], Sampling(), max_new_tokens=40, seed=1), strict=True
    )
    assert max(token for token in drawn if token is not None) < model.config.vocab_size


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own, of the input of a block
@pytest.mark.parametrize("name", ALL)
def test_recomputing_compiled_blocks_give_the_same_gradients_and_bf16_close_ones(name: str) -> None:
    def gradients(**how: bool) -> tuple[torch.Tensor, ...]:
        model = build(ALL[name])
        if how.get("bf16"):
            apply_precision(model, BF16)
        if how.get("recompute"):
            apply_activation_checkpointing(
                model, ParallelConfig(recompute="blocks"), compiled=bool(how.get("compile"))
            )
        if how.get("compile"):
            for block in model.blocks.values():
                block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        loss_sum, _ = model(*labelled(ALL[name]))
        loss_sum.backward()
        return loss_sum.detach(), *(parameter.grad for parameter in model.parameters())

    torch._dynamo.reset()
    plain = gradients()
    torch.testing.assert_close(gradients(recompute=True), plain, rtol=0, atol=0)
    torch.testing.assert_close(gradients(recompute=True, compile=True), plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients(bf16=True)[0], plain[0], rtol=3e-2, atol=0)


@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns of deprecated calls it makes
@pytest.mark.parametrize("compiled", [False, True])
def test_loss_with_z_loss_equals_autograd(compiled: bool) -> None:
    z_loss = 1e-2
    torch.manual_seed(0)
    h, weight = torch.randn(2, 200, 16, requires_grad=True), torch.randn(61, 16, requires_grad=True)
    labels = torch.randint(0, 61, (2, 200))
    labels[0, :50] = -100
    loss, count, *of_z = linear_cross_entropy(h, weight, labels, compiled=compiled, z_loss=z_loss)
    logits = h @ weight.T
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected_z = z_loss * (logits.logsumexp(-1).square() * (labels != -100)).sum()
    torch.testing.assert_close(
        [loss, *of_z], [expected, expected_z][: 1 + len(of_z)], rtol=1e-5, atol=0
    )
    assert count == 350 and len(of_z) == (z_loss > 0)
    wanted = torch.autograd.grad(expected + expected_z, (h, weight))
    torch.testing.assert_close(torch.autograd.grad(loss, (h, weight)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns of deprecated calls it makes
def test_the_z_loss_is_a_figure_of_its_own_for_training_only_and_compiled_heads_have_it() -> None:
    plain, other = build(BASE), build(replace(BASE, z_loss=1e-2))
    batch = labelled(BASE)
    loss, count, of_z = other(*batch)
    assert of_z > 0.01 * count
    torch.testing.assert_close(loss, plain(*batch)[0], rtol=1e-6, atol=0)
    apply_compile(other, recompute=False)
    x_BSD = torch.randn(2, 48, 64)
    found = [model.head(x_BSD, batch[1], None) for model in (plain, other)]
    found.append(other.eval().head(x_BSD, batch[1], None))
    assert [len(each) for each in found] == [2, 3, 2]
    torch.testing.assert_close(
        [each[0] for each in found[1:]], [found[0][0]] * 2, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scalenorm_rounds_once(dtype: torch.dtype) -> None:
    """A quarter of the values were the neighbour of what they should have been."""
    torch.manual_seed(0)
    norm, x = ScaleNorm(64, 1e-5), (3 * torch.randn(50, 64)).to(dtype)
    with torch.no_grad():
        weight = norm.weight.fill_(1.37).to(dtype).double()
        exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
        assert torch.equal(norm(x), exact.to(dtype))


def test_rows_beyond_the_vocabulary_change_nothing() -> None:
    """Neither logits nor gradients; and they have no gradient."""
    for tied in (False, True):
        config = replace(BASE, tie_embeddings=tied)
        padded, plain = Llama(replace(config, vocab_multiple_of=64)), Llama(config)
        state = dict(padded.state_dict())
        assert state["embed.weight"].shape == (128, 64)
        for name in state:
            if name in ("embed.weight", "head.weight"):
                state[name] = state[name][:97]
        plain.load_state_dict(state)
        losses = [model(*labelled(config))[0] for model in (padded, plain)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        weights = [model.embed.weight if tied else model.head.weight for model in (padded, plain)]
        assert torch.equal(weights[0].grad[:97], weights[1].grad) and not weights[0].grad[97:].any()
