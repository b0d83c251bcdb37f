"""Text generation: load a model, then sample tokens with a KV cache.

    loaded = load("runs/quickstart")
    for texts in stream_text(loaded, ["Once upon a time"], Sampling(), max_new_tokens=100):
        print(texts[0], end="")

The prompts of a batch are read in one pass up to the shortest of them. Then all sequences
advance by one position per step: a sequence that is still in its prompt takes the prompt's token,
the others sample one. So nothing is padded, and a sequence does not depend on the others.

Shape suffixes: B batch, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from fms_fsdp.checkpoint.folders import Checkpoint, read_checkpoint
from fms_fsdp.checkpoint.io import load_checkpoint
from fms_fsdp.checkpoint.run_results import checkpoint_data, recorded_tokenizer, require_checkpoint
from fms_fsdp.data.kept_tokenizer import shards_bos_id
from fms_fsdp.errors import UserError
from fms_fsdp.hf.hf_tokenizer import find_hf_tokenizer, hf_text_rules
from fms_fsdp.hf.trained import check_no_step
from fms_fsdp.hf.weights import fill, is_hf_checkpoint, open_checkpoint
from fms_fsdp.models.attention import KVCache
from fms_fsdp.models.build import build_model, fill_buffers
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.llama import LanguageModel, Llama
from fms_fsdp.tokenizers.tokenizer import NO_RULES, TextRules, Tokenizer


class TextModel(NamedTuple):
    """A model, its tokenizer if there is one, and the special tokens of its texts."""

    model: Llama
    tokenizer: Tokenizer | None
    rules: TextRules = NO_RULES


def load(
    path: str, step: int | None = None, device: str | torch.device = "cpu", name: str = "path"
) -> TextModel:
    """Loads the model and the tokenizer of a run, a checkpoint or a Hugging Face checkpoint.

    Arguments and errors are those of `fms_fsdp.load_model`; errors call the path `name`.
    """
    folder = Path(path).expanduser()
    if is_hf_checkpoint(folder):
        check_no_step(step)
        weights = open_checkpoint(folder, name)
        tokenizer = find_hf_tokenizer(folder)
        rules = hf_text_rules(folder, tokenizer)
        model = _allocate(weights.config, device)
        fill(model, weights)
        return TextModel(model.eval(), tokenizer, rules)

    def load_weights(checkpoint: Checkpoint) -> tuple[Checkpoint, Llama]:
        model = _allocate(checkpoint.metadata.run.model, device)
        load_checkpoint(checkpoint.folder, model, None, is_alone=True)
        return checkpoint, model

    checkpoint, model = read_checkpoint(lambda: require_checkpoint(path, step, name), load_weights)
    tokenizer = recorded_tokenizer(checkpoint)
    return TextModel(model.eval(), tokenizer, rules_of_checkpoint(checkpoint, tokenizer))


def rules_of_checkpoint(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> TextRules:
    """Returns the special tokens around the texts that a checkpoint was trained on."""
    if tokenizer is None:
        return NO_RULES
    bos_id = shards_bos_id(checkpoint_data(checkpoint), tokenizer)
    if bos_id is None:
        return NO_RULES
    return TextRules(before=(bos_id,))


def _allocate(config: TransformerConfig, device: str | torch.device) -> Llama:
    config = replace(config, attn_impl="auto")  # the flag is of the machine that trained the model
    with torch.device("meta"):
        model = build_model(config)
    model.to_empty(device=device)
    fill_buffers(model, device)
    return model


@dataclass(frozen=True)
class Sampling:
    """Distribution from which a token is drawn. Temperature 0 takes the most likely token; top_k 0
    and top_p 1 are off.

    Source: Fan et al. 2018 (top-k); Holtzman et al. 2020 (top-p).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def check_logits(logits: torch.Tensor) -> None:
    """Raises UserError unless the logits are finite: nan would be the largest of any choices."""
    if not logits.isfinite().all():
        raise UserError(
            "the logits are not finite: the training diverged; use an earlier checkpoint"
        )


def probabilities(logits_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Returns the distribution of the next token, (B V): temperature, then top-k, then top-p."""
    logits_BV = logits_BV.float()
    if sampling.temperature < 1e-6:
        return torch.zeros_like(logits_BV).scatter_(1, logits_BV.argmax(-1, keepdim=True), 1.0)
    # With a maximum of 0, no temperature makes a logit infinite.
    logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[1]:
        lowest_B1 = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < lowest_B1, -torch.inf)
    p_BV = logits_BV.softmax(-1)
    if sampling.top_p < 1:
        sorted_BV, order_BV = p_BV.sort(descending=True)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        sorted_BV[:, 1:].masked_fill_(before_BV[:, 1:] >= sampling.top_p, 0)
        p_BV = torch.zeros_like(p_BV).scatter_(1, order_BV, sorted_BV)
    return p_BV / p_BV.sum(-1, keepdim=True)


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    end_tokens: Collection[int] = (),
    seed: int = 0,
) -> Iterator[list[int | None]]:
    """Yields one token per sequence and step: None inside the prompt and after the end.

    `prompts` are token ids, of any lengths. A sequence ends before one of `end_tokens`, after
    `max_new_tokens`, or at the model's maximum length. Sequence i samples with the seed `seed + i`.

    Example:
        prompts = [ids.tolist() for ids in tokenizer.encode(["Once upon a time"])]
        steps = generate(model, prompts, Sampling(temperature=0.8), max_new_tokens=20)
        print(tokenizer.decode([new for [new] in steps if new is not None]))

    Raises:
        UserError: a prompt does not fit the model, or the logits are not finite.
    """
    check_prompts(prompts, model.config)
    lengths = [len(prompt) for prompt in prompts]
    max_len = model.config.max_seq_len
    ends = [min(max_len, length + max_new_tokens) for length in lengths]
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    caches = [KVCache(max(ends)) for _ in range(model.config.num_layers)]
    device = next(model.parameters()).device
    position = min(lengths)
    tokens_BS = torch.tensor([list(prompt[:position]) for prompt in prompts])
    while True:
        logits_BV = model(tokens_BS.to(device), caches=caches)[:, -1].cpu()
        check_logits(logits_BV)
        p_BV = probabilities(logits_BV, sampling)
        new: list[int | None] = [None] * len(prompts)
        for i, generator in enumerate(generators):
            if lengths[i] <= position < ends[i]:
                token = int(torch.multinomial(p_BV[i], 1, generator=generator))
                if token in end_tokens:
                    ends[i] = position
                else:
                    new[i] = token
        yield new
        if position + 1 >= max(ends):
            return

        # The model reads one more token of each text: of its prompt, or the new one.
        read = list[int]()
        for prompt, new_token in zip(prompts, new, strict=True):
            if position < len(prompt):
                read.append(prompt[position])
            elif new_token is not None:
                read.append(new_token)
            else:
                read.append(0)  # the text has ended; nobody looks at its logits
        tokens_BS = torch.tensor(read).unsqueeze(1)
        position += 1


def check_prompts(prompts: Sequence[Sequence[int]], config: TransformerConfig) -> None:
    """Raises UserError if a prompt is empty, too long, or has a token that the model lacks."""
    lengths = [len(prompt) for prompt in prompts]
    max_len = config.max_seq_len
    if min(lengths) == 0 or max(lengths) >= max_len:
        raise UserError(
            f"prompts of {min(lengths)} to {max(lengths)} tokens must have 1 to {max_len - 1} "
            "tokens (the model's maximum length); shorten them"
        )
    check_tokens(prompts, config.vocab_size)


def check_tokens(texts: Iterable[Sequence[int]], vocab_size: int) -> None:
    """Raises UserError if a text has a token that a model with this vocabulary lacks."""
    largest = max((max(text) for text in texts if text), default=0)
    if largest >= vocab_size:
        raise UserError(
            f"token {largest} is not in the model's vocabulary of {vocab_size}: the tokenizer "
            "does not belong to the model; use the tokenizer of its training data"
        )


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encodes texts, without special tokens.

    Raises:
        UserError: a text has half of a character (a lone surrogate).
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"a text has U+{ord(text[error.start]):04X}, which is half of a character; remove it"
            ) from None
    return [ids.tolist() for ids in tokenizer.encode(texts)]


def encode_prompts(
    tokenizer: Tokenizer, rules: TextRules, texts: Sequence[str], config: TransformerConfig
) -> list[list[int]]:
    """Encodes prompts with the special tokens around them; an empty text starts a new document.

    Raises:
        UserError: a prompt does not fit the model.
    """
    prompts = []
    for ids in encode_texts(tokenizer, texts):
        prompt = [*rules.before, *ids, *rules.after]
        prompts.append(prompt or [tokenizer.vocabulary.eos_id])
    check_prompts(prompts, config)
    return prompts


def read_lines(path: Path, flag: str) -> list[str]:
    """Returns the lines of a text file.

    Only a line feed, with or without a carriage return before it, ends a line.

    Raises:
        UserError: the file is not UTF-8, or a folder.
        OSError: it cannot be read.
    """
    if path.is_dir():
        raise UserError(f"{flag}={path} is a folder; name a text file")
    try:
        lines = path.read_bytes().decode().split("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{flag}={path} must be UTF-8: {error.reason} at byte {error.start}; convert the file"
        ) from None
    if not lines[-1]:  # after the last line feed
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def text_after(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Returns the text that new tokens add to a prompt.

    Both are decoded together for the sake of spaces. Tokens beyond the tokenizer's vocabulary have
    no text.
    """
    known = [token for token in new if token < tokenizer.vocabulary.size]
    text = tokenizer.decode([*prompt, *known])
    return text[len(tokenizer.decode(prompt)) :]


def stream_text(
    loaded: TextModel,
    texts: Sequence[str],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    seed: int = 0,
) -> Iterator[list[str]]:
    """Yields the text that each step adds to each prompt, up to the end of a document.

    `loaded` must have a tokenizer. A step that ends inside a character adds "" until it is
    complete.

    Raises:
        UserError: a prompt does not fit the model, or the logits are not finite.
    """
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    prompts = encode_prompts(tokenizer, loaded.rules, texts, loaded.model.config)
    ends = (tokenizer.vocabulary.eos_id, *loaded.rules.ends)
    new: list[list[int]] = [[] for _ in prompts]
    shown = [0] * len(prompts)

    def pieces(*, is_end: bool = False) -> list[str]:
        found = []
        for i, prompt in enumerate(prompts):
            text = text_after(tokenizer, prompt, new[i])
            stop = len(text)
            if not is_end:
                # U+FFFD is the beginning of a character whose other bytes may follow.
                stop = max(shown[i], len(text.rstrip("\ufffd")))
            found.append(text[shown[i] : stop])
            shown[i] = stop
        return found

    steps = generate(
        loaded.model, prompts, sampling, max_new_tokens=max_new_tokens, end_tokens=ends, seed=seed
    )
    for tokens in steps:
        for i, token in enumerate(tokens):
            if token is not None:
                new[i].append(token)
        yield pieces()
    yield pieces(is_end=True)
