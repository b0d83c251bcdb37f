"""`python -m fms_fsdp score`: how often a checkpoint finds the right answer the likeliest of several.

    a line of the file:  {"prompt": "The sky is", "choices": [" blue", " loud"], "answer": 0}

A choice counts by the sum of the logarithms of its tokens' probabilities behind the prompt; beside it stands
the same for each character of the choice (one space at its beginning is none), which does not favour short
ones. Those are `acc` and `acc_norm` of
https://github.com/EleutherAI/lm-evaluation-harness, which takes an exported folder for its own tasks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from fms_fsdp.config import flag
from fms_fsdp.config.values import shown
from fms_fsdp.data.batch import IGNORED_LABEL
from fms_fsdp.data.tokenizer import Tokenizer
from fms_fsdp.errors import UserError
from fms_fsdp.generate import check_tokens, encode_texts, read_lines
from fms_fsdp.models.llama import Llama
from fms_fsdp.tools.generate import load_with_tokenizer
from fms_fsdp.tools.table import show_progress


@dataclass(frozen=True)
class ScoreConfig:
    """Which checkpoint answers which questions."""

    path: str = flag(
        "",
        "a run folder, checkpoints (of several, the newest) or a folder of Hugging Face",
        form="path",
    )
    step: int | None = flag(None, "the checkpoint of this step", min=1)
    questions: str = flag(
        "",
        "a file of JSON lines: prompt, choices, answer (a place in choices, from 0)",
        form="path",
    )
    json: bool = flag(False, "print one JSON object")

    def __post_init__(self) -> None:
        if not self.questions:
            raise UserError("--questions is missing; name a file of JSON lines")


@dataclass(frozen=True)
class Question:
    """A prompt, what may follow it, and which of that is right."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


def main(config: ScoreConfig) -> None:
    """Prints the shares of right answers.

    Raises:
        UserError: no checkpoint or no tokenizer is there, a line is no question, or one does not fit the
            context.
        OSError: the questions cannot be read.
    """
    path = Path(config.questions).expanduser()
    lines = read_lines(path, "--questions")
    questions = [read_question(line, f"{path}:{n}") for n, line in enumerate(lines, 1)]
    if not questions:
        raise UserError(f"--questions ({path}) must have a question in each line, and is empty")
    model, tokenizer, rules = load_with_tokenizer(config.path, config.step)
    assert tokenizer is not None
    right, right_by_length = 0, 0
    for number, question in enumerate(questions, 1):
        try:
            scores = score(model, tokenizer, question, rules.before)
        except UserError as error:
            raise UserError(f"--questions ({path}:{number}) {error}") from None
        right += int(scores.argmax()) == question.answer
        right_by_length += int(by_length(scores, question.choices).argmax()) == question.answer
        show_progress(f"{number} of {len(questions)} questions")
    show_progress("")
    count = len(questions)
    chance = sum(1 / len(question.choices) for question in questions) / count
    found = {
        "questions": count,
        "acc": right / count,
        "acc_norm": right_by_length / count,
        "chance": chance,
    }
    for name in ("acc", "acc_norm"):  # of a share of `count` independent answers
        found[f"{name}_stderr"] = math.sqrt(found[name] * (1 - found[name]) / count)
    if config.json:
        print(json.dumps(found))
    else:
        words = f"{count:,} question{'s' * (count > 1)}"
        for name in ("acc", "acc_norm"):
            words += f" · {name} {found[name]:.3f} ± {found[f'{name}_stderr']:.3f}"
        print(f"{words} · by chance {chance:.3f}")


def by_length(scores: torch.Tensor, choices: Sequence[str]) -> torch.Tensor:
    """The scores for each character of the choices, of which one space at the beginning is none."""
    return scores / torch.tensor([len(choice.removeprefix(" ")) for choice in choices])


def read_question(line: str, place: str) -> Question:
    """The question of a line.

    Raises:
        UserError: it is none; with its place.
    """
    try:
        content = json.loads(line)
        prompt, choices, answer = content["prompt"], content["choices"], content["answer"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(
            f"--questions ({place}) must have prompt, choices and answer: {error}"
        ) from None
    texts = [prompt, *choices] if isinstance(choices, list) else [None]
    if not all(isinstance(text, str) for text in texts) or "" in choices:
        raise UserError(
            f"--questions ({place}) must have texts as prompt and choices, none of these empty"
        )
    if len(choices) < 2 or type(answer) is not int or not 0 <= answer < len(choices):
        rule = f"must have two choices at least and an answer in 0 to {max(1, len(choices) - 1)}"
        raise UserError(f"--questions ({place}) {rule}, not {shown(str(answer))}")
    return Question(prompt, tuple(choices), answer)


@torch.no_grad()
def score(
    model: Llama, tokenizer: Tokenizer, question: Question, before: Sequence[int] = ()
) -> torch.Tensor:
    """The logarithm of each choice's probability behind the prompt, fp32, one a choice. `before`: ids that
    stand before every text.

    White space at the end of the prompt belongs to the choices. Tokens count from where the texts part from
    the prompt's: its last token may reach into a choice. Where that is the first one, the end of another
    document stands before it.

    Raises:
        UserError: a choice does not fit the context of the model, or is no text that it can read.
    """
    full = [question.prompt.rstrip(), *(question.prompt + choice for choice in question.choices)]
    prompt, *texts = [[*before, *row] for row in encode_texts(tokenizer, full)]
    check_tokens(texts, model.config.vocab_size)
    first = min(len(os.path.commonprefix([prompt, text])) for text in texts)
    if first == 0:
        first, texts = 1, [[tokenizer.vocabulary.eos_id, *text] for text in texts]
    context, longest = model.config.max_seq_len, max(map(len, texts))
    if longest > context:
        raise UserError(
            f"has {longest} tokens; the context of the model is {context}: shorten the question"
        )
    tokens_BS = torch.zeros(len(texts), longest, dtype=torch.int64)
    labels_BS = torch.full_like(tokens_BS, IGNORED_LABEL)
    for row, text in enumerate(texts):
        tokens_BS[row, : len(text)] = torch.tensor(text)
        labels_BS[row, first - 1 : len(text) - 1] = torch.tensor(text[first:])
    logits_BSV = model(tokens_BS.to(model.rope.device))
    assert isinstance(logits_BSV, torch.Tensor)
    if not bool(logits_BSV.isfinite().all()):
        raise UserError("gives logits that are not finite: the weights of the model are damaged")
    losses_BS = F.cross_entropy(
        logits_BSV.float().cpu().transpose(1, 2),
        labels_BS,
        ignore_index=IGNORED_LABEL,
        reduction="none",
    )
    return -losses_BS.sum(1)
