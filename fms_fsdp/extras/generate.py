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

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from fms_fsdp.cpu_tuning import positive_number
from fms_fsdp.data.tokenizer import Tokenizer
from fms_fsdp.errors import UserError
from fms_fsdp.extras.decoding import CachedReader
from fms_fsdp.extras.prompts import check_tokens
from fms_fsdp.models.llama import Llama
from fms_fsdp.predict.devices import available_memory

_LARGEST = 1e300  # a logit that is penalised
_MANY = 16  # steps, for which another layout of the weights pays


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. Temperature 0 takes the likeliest; top_k 0, top_p 1, min_p 0 and penalty 1 are
    off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def probabilities(
    logits_BV: torch.Tensor, seen_BV: torch.Tensor, sampling: Sampling
) -> torch.Tensor:
    """The distribution (B V, fp64) from which the next tokens are drawn; `seen_BV` marks the tokens of each
    row so far.

    In this order: penalty, temperature, top-k, top-p, min-p.
    """
    logits_BV = logits_BV.double()
    if (penalty := sampling.repetition_penalty) != 1:
        lower_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        logits_BV = torch.where(seen_BV, lower_BV.clamp(-_LARGEST, _LARGEST), logits_BV)
    if sampling.temperature == 0:
        likeliest_B = logits_BV.argmax(-1)
        return torch.nn.functional.one_hot(likeliest_B, logits_BV.shape[1]).double()
    # the likeliest is 0, which no temperature makes infinite
    below_BV = logits_BV - logits_BV.max(-1, keepdim=True).values
    logits_BV = below_BV / sampling.temperature
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


def _room() -> int:
    """Bytes that a second copy of the weights may take: half of what a process of this machine may have."""
    return available_memory(torch.device("cpu"), positive_number("LOCAL_WORLD_SIZE", 1)) // 2


@torch.no_grad()
def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    end_tokens: Collection[int] = (),
    seed: int = 0,
    compiled: bool = False,
) -> Iterator[list[int | None]]:
    """Yields a token for each row, step by step; None while a row still reads its prompt, and after its end.

    A row ends before one of `end_tokens`, after `max_new_tokens`, or where the context of the model ends.
    Row i draws with the seed `seed` + i. `compiled`: steps behind the shortest prompt run as compiled code.

    Raises:
        UserError: a prompt is empty, longer than the context, or has a token that the model has not; or the
            model's logits are not finite.
    """
    lengths, context = list(map(len, prompts)), model.config.max_seq_len
    if min(lengths) == 0 or max(lengths) >= context:
        raise UserError(
            f"prompts ({min(lengths)} to {max(lengths)} tokens) must have 1 to {context - 1}, for the "
            f"context of the model is {context}; shorten them"
        )
    check_tokens(prompts, model.config.vocab_size)
    batch, total = len(prompts), min(context, max(lengths) + max_new_tokens)
    seen_BV = torch.zeros(batch, model.config.vocab_size, dtype=torch.bool)
    for seen_V, prompt in zip(seen_BV, prompts, strict=True):
        seen_V[list(prompt)] = True
    draws = [_draws(seed + row) for row in range(batch)]
    ends = [min(total, length + max_new_tokens) for length in lengths]
    stop = min(lengths)
    tokens_BS = torch.tensor([list(prompt[:stop]) for prompt in prompts])
    read = CachedReader(model, total, compiled, _room() if total - stop >= _MANY else 0)
    while True:
        logits_BV = read(tokens_BS)
        is_drawn = [length <= stop < end for length, end in zip(lengths, ends, strict=True)]
        places = [next(row) if drawn else 0.0 for row, drawn in zip(draws, is_drawn, strict=True)]
        tokens = _tokens_at(places, logits_BV, seen_BV, sampling)
        for row, token in enumerate(tokens):
            if is_drawn[row] and token in end_tokens:
                ends[row], is_drawn[row] = stop, False
        yield [token if drawn else None for token, drawn in zip(tokens, is_drawn, strict=True)]
        if stop + 1 >= max(ends):
            return
        tokens_BS = torch.tensor(
            [
                [prompt[stop] if stop < len(prompt) else token]
                for prompt, token in zip(prompts, tokens, strict=True)
            ]
        )
        seen_BV.scatter_(1, tokens_BS, True)
        stop += 1


def _draws(seed: int) -> Iterator[float]:
    """Numbers in [0, 1), the same ones however many are taken."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.rand(64, dtype=torch.float64, generator=generator).tolist()


def _tokens_at(
    places: Sequence[float], logits_BV: torch.Tensor, seen_BV: torch.Tensor, sampling: Sampling
) -> list[int]:
    """The token of each row at its place within the distribution."""
    if not bool(logits_BV.isfinite().all()):
        raise UserError(
            "the model's logits are not finite: its weights are damaged, or the training diverged"
        )
    if sampling.temperature == 0 and sampling.repetition_penalty == 1:
        return logits_BV.argmax(-1).tolist()
    totals_BV = probabilities(logits_BV, seen_BV, sampling).cumsum(-1)
    places_B1 = torch.tensor(places, dtype=torch.float64).unsqueeze(1) * totals_BV[:, -1:]
    return torch.searchsorted(totals_BV, places_B1, right=True).squeeze(1).tolist()


def text_after(tokenizer: Tokenizer, prompt: Sequence[int], drawn: Sequence[int]) -> str:
    """Returns the text that the drawn tokens add to the prompt; both are decoded together, for the sake of
    spaces. Tokens that only the model has stand for nothing."""
    known = [token for token in drawn if token < tokenizer.vocabulary.size]
    return tokenizer.decode([*prompt, *known])[len(tokenizer.decode(prompt)) :]
