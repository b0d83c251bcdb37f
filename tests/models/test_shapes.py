"""Options that no other program has, against a short reference; and every option with documents, caches,
compilation, activation checkpointing and bf16."""

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
from fms_fsdp.models.flops import matmuls_of_block
from fms_fsdp.models.gpt import ScaleNorm, alibi_slopes
from fms_fsdp.models.gpt import distance_buckets as buckets
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.loss import linear_cross_entropy
from fms_fsdp.parallel.activation_checkpointing import apply_activation_checkpointing
from fms_fsdp.parallel.compile import apply_compile
from fms_fsdp.parallel.dtypes import apply_precision
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
ALL = OWN | {"grouped": BASE, "gpt2": GPT2, "neox": NEOX, "qwen3": QWEN3}
COMPILED = ["scalenorm", "alibi windows", "relative windows", "gpt2", "neox"]


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
        kinds = config.attn_window_pattern
        is_local = config.attn_window and kinds[layer % len(kinds)] == "L"
        window = config.attn_window if is_local else 10**6
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
        angle = place_S[:, None] / 10000 ** (torch.arange(0, 64, 2) / 64)
        x = x + torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
    for layer in range(config.num_layers):
        before = norm(f"blocks.{layer}.attention_norm", x)
        after = x + attend(layer, before)
        x = after + feed(
            layer, norm(f"blocks.{layer}.ffn_norm", x if config.parallel_residual else after)
        )
    return linear("head", norm("head.norm", x))[..., : config.vocab_size]


def test_alibi_slopes_are_the_published_ones() -> None:
    for heads in (*range(1, 34), 40, 56, 71, 112):
        expected = torch.tensor(published_slopes(heads))
        found = alibi_slopes(heads, torch.device("cpu"))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_distance_buckets_are_those_of_t5() -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    assert buckets(torch.tensor([-2, 0, 15, 16, 18, 19, 112, 113, 10**6]), 32, 128).tolist() == [
        *(0, 0, 15, 16, 16, 17, 30, 31, 31)
    ]
    distance = torch.arange(-9, 3000)
    for number, most in ((32, 128), (2, 5), (7, 33), (64, 1000)):
        theirs = t5.T5Attention._relative_position_bucket(-distance, False, number, most)
        assert torch.equal(buckets(distance, number, most), theirs)


@pytest.mark.parametrize("name", ["relative", "relative windows"])
def test_distance_bias_is_contiguous_for_gpu_kernels(name: str) -> None:
    model = build(OWN[name])
    for window in OWN[name].windows:
        assert model.mask(window, None, slice(0, 48), model.rope).stride(-1) == 1


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
    tokens = labelled(ALL[name])[0][:1]
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).to(torch.int32)[None]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(torch.int32)[None]
    together = model(tokens, positions_BS=positions, document_ids_BS=ids)
    separate = torch.cat([model(part) for part in tokens.split(lengths, 1)], 1)
    torch.testing.assert_close(together, separate, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together, model(tokens), atol=1e-3)


@pytest.mark.parametrize("name", ALL)
def test_logits_with_cache_equal_those_without(name: str) -> None:
    model = build(ALL[name])
    tokens, _ = labelled(ALL[name])
    caches = [KVCache(48) for _ in range(model.config.num_layers)]
    with torch.no_grad():
        parts = [model(part, caches=caches) for part in tokens.split([20, 3, *[1] * 25], dim=1)]
        expected = model(tokens)[:, [19, 22, *range(23, 48)]]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)


def test_padded_vocabulary_is_never_drawn() -> None:
    model = build(OWN["alibi windows"])
    columns = generate(model, [[1, 2, 3]], Sampling(), max_new_tokens=40, seed=1)
    assert max(token for (token,) in columns if token is not None) < model.config.vocab_size


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own, of the input of a block
@pytest.mark.parametrize("name", COMPILED)
def test_recomputed_compiled_and_bf16_gradients(name: str) -> None:
    def gradients(**how: bool) -> tuple[torch.Tensor, ...]:
        model = build(ALL[name])
        if how.get("bf16"):
            apply_precision(model, BF16)
        if how.get("recompute"):
            section = ParallelConfig(recompute="blocks")
            apply_activation_checkpointing(model, section, compiled=bool(how.get("compile")))
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


@pytest.mark.usefixtures("traced_alone")
@pytest.mark.parametrize("compiled", [False, True])
def test_z_loss_equals_autograd(compiled: bool) -> None:
    torch.manual_seed(0)
    h, weight = torch.randn(2, 200, 16, requires_grad=True), torch.randn(61, 16, requires_grad=True)
    labels = torch.randint(0, 61, (2, 200))
    labels[0, :50] = -100
    loss, count, of_z = linear_cross_entropy(h, weight, labels, compiled=compiled, z_loss=1e-2)
    logits = h @ weight.T
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected_z = 1e-2 * (logits.logsumexp(-1).square() * (labels != -100)).sum()
    torch.testing.assert_close([loss, of_z], [expected, expected_z], rtol=1e-5, atol=0)
    assert count == 350
    wanted = torch.autograd.grad(expected + expected_z, (h, weight))
    torch.testing.assert_close(torch.autograd.grad(loss, (h, weight)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("traced_alone")
def test_z_loss_is_separate_and_only_in_training() -> None:
    plain, other = build(BASE), build(replace(BASE, z_loss=1e-2))
    batch, x_BSD = labelled(BASE), torch.randn(2, 48, 64)
    loss, count, of_z = other(*batch)
    assert of_z > 0.01 * count
    torch.testing.assert_close(loss, plain(*batch)[0], rtol=1e-6, atol=0)
    apply_compile(other, recompute=False)
    expected = plain.head(x_BSD, batch[1], None)
    for training, num_values in ((True, 3), (False, 2)):
        found = other.train(training).head(x_BSD, batch[1], None)
        assert len(found) == num_values
        torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scalenorm_rounds_once(dtype: torch.dtype) -> None:
    """A quarter of the values were off by one unit in the last place."""
    torch.manual_seed(0)
    norm, x = ScaleNorm(64, 1e-5), (3 * torch.randn(50, 64)).to(dtype)
    with torch.no_grad():
        weight = norm.weight.fill_(1.37).to(dtype).double()
        exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
        assert torch.equal(norm(x), exact.to(dtype))


@pytest.mark.parametrize("tied", [False, True])
def test_padded_vocabulary_changes_nothing(tied: bool) -> None:
    """It has no gradient either."""
    config = replace(BASE, tie_embeddings=tied)
    padded, plain = Llama(replace(config, vocab_multiple_of=64)), Llama(config)
    state = dict(padded.state_dict())
    assert state["embed.weight"].shape == (128, 64)
    for name in {"embed.weight", "head.weight"} & state.keys():
        state[name] = state[name][:97]
    plain.load_state_dict(state)
    losses = [model(*labelled(config))[0] for model in (padded, plain)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    weights = [model.embed.weight if tied else model.head.weight for model in (padded, plain)]
    assert torch.equal(weights[0].grad[:97], weights[1].grad) and not weights[0].grad[97:].any()


@pytest.mark.parametrize("config", [*OWN.values(), GPT2, NEOX, QWEN3])
def test_matmuls_have_their_names(config: TransformerConfig) -> None:
    """Activation checkpointing finds the results to keep by this order."""
    model = build(config)
    called: list[str] = []
    for name, module in model.blocks["0"].named_modules():
        if isinstance(module, torch.nn.Linear):
            label = name.rpartition(".")[2].removesuffix("_proj")
            module.register_forward_hook(lambda *_, label=label: called.append(label))
    model(*labelled(config))
    assert tuple(called) == matmuls_of_block(config)
