"""Text from a model, token by token; the keys and values of earlier positions are kept.

    prompts ── the shortest one's length at once ── then a position a step, all rows together
                                                    └ a longer prompt gives its own token, the others draw

Invariant: a row is what it would be alone. Rows stand at the same position, so nothing is padded, and each
draws with a generator of its own.

B batch, T positions, V vocabulary.

Source: Fan et al. 2018 (top-k); Holtzman et al. 2020 (top-p); Nguyen et al. 2024 (min-p); Keskar et al. 2019
(repetition penalty).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fms_fsdp.data.tokenizer import Tokenizer
from fms_fsdp.models.attention import KeyValueCache
from fms_fsdp.models.llama import Llama


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. Temperature 0 takes the likeliest; top_k 0, top_p 1, min_p 0 and penalty 1 are
    off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def probabilities(logits_BV: torch.Tensor, seen_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution (B V, fp64) from which the next tokens are drawn; `seen_BV` marks the tokens of each
    row so far.

    In this order: penalty, temperature, top-k, top-p, min-p.
    """
    logits_BV = logits_BV.double()
    if (penalty := sampling.repetition_penalty) != 1:
        lower_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        logits_BV = torch.where(seen_BV, lower_BV, logits_BV)
    if sampling.temperature == 0:
        likeliest_B = logits_BV.argmax(-1)
        return torch.nn.functional.one_hot(likeliest_B, logits_BV.shape[1]).double()
    logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[1]:
        least_B1 = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    found_BV = logits_BV.softmax(-1)
    if sampling.top_p < 1:
        sorted_BV, order_BV = found_BV.sort(descending=True)
        is_beyond_BV = sorted_BV.cumsum(-1) - sorted_BV >= sampling.top_p  # never the first
        found_BV = found_BV.masked_fill(is_beyond_BV.gather(1, order_BV.argsort(-1)), 0)
    least_B1 = sampling.min_p * found_BV.max(-1, keepdim=True).values
    found_BV = found_BV.masked_fill(found_BV < least_B1, 0)
    return found_BV / found_BV.sum(-1, keepdim=True)


@torch.no_grad()
def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    end_token: int | None = None,
    seed: int = 0,
) -> Iterator[list[int | None]]:
    """Yields a token for each row, step by step; None while a row still reads its prompt, and after its end.

    A row ends before `end_token`, after `max_new_tokens`, or where the context of the model ends. Row i draws
    with the seed `seed` + i.

    Raises:
        ValueError: a prompt is empty, or longer than the context.
    """
    lengths, context = [len(prompt) for prompt in prompts], model.config.max_seq_len
    if min(lengths) == 0 or max(lengths) >= context:
        raise ValueError(
            f"prompts ({min(lengths)} to {max(lengths)} tokens) must have 1 to {context - 1}, for the "
            f"context of the model is {context}; shorten them"
        )
    device, batch = model.rope.device, len(prompts)
    total = min(context, max(lengths) + max_new_tokens)
    tokens_BT = torch.zeros(batch, total, dtype=torch.int64)
    seen_BV = torch.zeros(batch, model.config.vocab_size, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = torch.tensor(prompt)
        seen_BV[row, tokens_BT[row, : len(prompt)]] = True
    caches = [KeyValueCache(total) for _ in range(model.config.num_layers)]
    generators = [torch.Generator().manual_seed(seed + row) for row in range(batch)]
    ends = [min(total, length + max_new_tokens) for length in lengths]
    start, stop = 0, min(lengths)
    while any(end > stop for end in ends):
        logits_BV = model(tokens_BT[:, start:stop].to(device), caches=caches)[:, -1].cpu()
        totals_BV = probabilities(logits_BV, seen_BV, sampling).cumsum(-1)
        drawn: list[int | None] = [None] * batch
        for row in range(batch):
            if not lengths[row] <= stop < ends[row]:
                continue
            at = torch.rand((), dtype=torch.float64, generator=generators[row]) * totals_BV[row, -1]
            token = int(torch.searchsorted(totals_BV[row], at, right=True))
            if token == end_token:
                ends[row] = stop
                continue
            drawn[row] = token
            tokens_BT[row, stop], seen_BV[row, token] = token, True
        yield drawn
        start, stop = stop, stop + 1


def text_after(tokenizer: Tokenizer, prompt: Sequence[int], drawn: Sequence[int]) -> str:
    """What the drawn tokens add to the text of the prompt; decoded together, for the sake of spaces. Tokens
    that only the model has stand for nothing."""
    known = [token for token in drawn if token < tokenizer.vocabulary.size]
    return tokenizer.decode([*prompt, *known])[len(tokenizer.decode(prompt)) :]
