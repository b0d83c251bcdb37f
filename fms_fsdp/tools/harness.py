"""A checkpoint under the tasks of lm-evaluation-harness, on one process or sharded over all of a launch.

    harness: texts ─▶ token ids ─▶ this rank's rows of a group ─▶ logits ─▶ scores ─▶ all ranks ─▶ harness

Every rank runs the whole harness and asks for the same things in the same order; the model scores a part of
each group of rows on each rank. Texts are generated on all ranks alike, because the number of passes is that
of the longest text.

Source: https://github.com/EleutherAI/lm-evaluation-harness (extra `eval`). Scores are those of its class HFLM
on the exported folder.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.nn.functional as F

from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.data.tokenizer import TextRules, Tokenizer
from fms_fsdp.errors import UserError
from fms_fsdp.evaluate import Forward
from fms_fsdp.generate import (
    Sampling,
    check_tokens,
    encode_texts,
    generate,
    rules_of_checkpoint,
    text_after,
)
from fms_fsdp.models.llama import Llama
from fms_fsdp.parallel.fsdp import evaluating
from fms_fsdp.run.trained_run import recorded_tokenizer
from fms_fsdp.tools.evaluate import EvaluateConfig, Measure

if find_spec("lm_eval") is None:
    raise UserError(
        "--tasks needs the package lm-eval, which is not installed; pip install lm-eval"
    )

from lm_eval import simple_evaluate, utils
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

MAX_NEW_TOKENS = 256  # of a task that says no number, as in the harness
Scored = tuple[float, bool]  # log-likelihood in nats, and whether every token was the likeliest


def find_tasks(tasks: Sequence[str], folder: str) -> TaskManager:
    """The tasks of the harness, and those that YAML files of `folder` describe.

    Raises:
        UserError: one of `tasks` is none of them.
    """
    paths = [folder] if folder else None
    manager = TaskManager(
        include_path=paths, include_defaults=False
    )  # all that there are take seconds
    if not all(manager.match_tasks([task]) for task in tasks):
        manager = TaskManager(include_path=paths)
    for task in tasks:
        if not manager.match_tasks([task]):
            rule = "must name tasks of lm-evaluation-harness, or of YAML files in --task_path"
            raise UserError(f"--tasks ({task}) {rule}; `lm_eval ls tasks` lists the tasks")
    return manager


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model and its tokenizer as the harness wants them."""

    def __init__(self, forward: Forward, tokenizer: Tokenizer, rules: TextRules) -> None:
        super().__init__()
        self._forward, self._tokenizer, self._rules = forward, tokenizer, rules
        self._model = cast(Llama, forward.model)
        self.max_length = self._model.config.max_seq_len

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.vocabulary.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        return self._rules.before[0] if self._rules.before else self.eot_token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        ids = encode_texts(self._tokenizer, [string])[0]
        return ids if add_special_tokens is False else [*self._rules.before, *ids]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of whole texts, in windows of the context that do not overlap."""
        windows, owners = list[Any](), list[int]()
        for number, (text,) in enumerate(request.args for request in requests):
            cuts = utils.get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, 1
            )
            for window in map(utils.make_disjoint_window, cuts):
                windows.append((None, *window))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += score
        return totals

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[Scored]:
        """Of each request (texts, ids of the context, ids of what follows) what follows (collective: every
        rank)."""
        mesh, size = self._forward.mesh, self._forward.batch_size
        order = sorted(
            range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2])
        )
        found = dict[int, Scored]()
        for first in range(0, len(order), size * mesh.size("world")):
            begin = first + size * mesh.place("world")
            places = order[begin : begin + size]
            scores = self._score([requests[place][1:] for place in places])
            for numbers, scored in mesh.gather((places, scores)):
                found.update(zip(numbers, scored, strict=True))
        return [found[place] for place in range(len(requests))]

    @torch.no_grad()
    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        """The scores of rows on this rank; without a row the model makes its pass, which other ranks need."""
        texts = [[*context, *following][-(self.max_length + 1) :] for context, following in pairs]
        check_tokens(texts, self._model.config.vocab_size)
        tokens_BS = torch.zeros(
            max(1, len(texts)), max((len(text) - 1 for text in texts), default=1)
        ).long()
        for row, text in enumerate(texts):
            tokens_BS[row, : len(text) - 1] = torch.tensor(text[:-1])
        logits_BSV = cast(torch.Tensor, self._model(tokens_BS.to(self._forward.device)))
        scores = list[Scored]()
        for row, (_, following) in enumerate(pairs):
            if len(following) > self.max_length:
                rule = f"has {len(following)} tokens, and the context of the model is {self.max_length}"
                raise UserError(f"--tasks: what follows a text {rule}; leave the task out")
            stop, ids_T = len(texts[row]) - 1, torch.tensor(following, device=self._forward.device)
            logits_TV = logits_BSV[row, stop - len(following) : stop].float()
            found_T = F.log_softmax(logits_TV, -1).gather(1, ids_T.unsqueeze(1))
            scores.append((found_T.sum().item(), bool((logits_TV.argmax(-1) == ids_T).all())))
        return scores

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text behind each context, up to one of the texts that end it."""
        by_rules = dict[str, list[int]]()
        for place, request in enumerate(requests):
            by_rules.setdefault(repr(sorted(request.args[1].items())), []).append(place)
        found, size = [""] * len(requests), self._forward.batch_size
        for places in by_rules.values():
            places.sort(key=lambda place: -len(requests[place].args[0]))
            for first in range(0, len(places), size):
                batch = places[first : first + size]
                contexts = [requests[place].args[0] for place in batch]
                texts = self._continue(contexts, requests[batch[0]].args[1])
                for place, text in zip(batch, texts, strict=True):
                    found[place] = text
        return found

    def _continue(self, contexts: Sequence[str], rules: dict[str, Any]) -> list[str]:
        """The texts that follow (collective: every rank)."""
        until = rules.get("until") or []
        until = [text for text in ([until] if isinstance(until, str) else until) if text]
        most = int(rules.get("max_gen_toks", MAX_NEW_TOKENS))
        if (room := self.max_length - most) < 1:
            rule = f"asks for {most} tokens behind a text, and the context of the model is {self.max_length}"
            raise UserError(f"--tasks: a task {rule}; leave the task out")
        prompts = [
            self.tok_encode(context)[-room:] or [self.prefix_token_id] for context in contexts
        ]
        draws = bool(rules.get("do_sample")) and float(rules.get("temperature", 1.0)) > 0
        sampling = Sampling(
            float(rules.get("temperature", 1.0)) if draws else 0.0,
            top_k=int(rules.get("top_k", 0)),
            top_p=float(rules.get("top_p", 1.0)),
        )
        ends = (self.eot_token_id, *self._rules.ends)
        drawn, texts = [list[int]() for _ in prompts], [""] * len(prompts)
        for tokens in generate(
            self._model, prompts, sampling, max_new_tokens=most, end_tokens=ends
        ):
            for row, token in enumerate(tokens):
                if token is not None and not _has_end(texts[row], until):
                    drawn[row].append(token)
                    texts[row] = text_after(self._tokenizer, prompts[row], drawn[row])
            if self._forward.mesh.gather(all(_has_end(text, until) for text in texts))[0]:
                break
        return [_up_to(text, until) for text in texts]


def _has_end(text: str, until: Collection[str]) -> bool:
    return any(word in text for word in until)


def _up_to(text: str, until: Collection[str]) -> str:
    for word in until:
        text = text.partition(word)[0]
    return text


def find_measure(config: EvaluateConfig, checkpoint: Checkpoint) -> Measure:
    """What runs the tasks that the flags name, which are looked up here (collective: every rank).

    Raises:
        UserError: there is no such task, or no tokenizer beside the data of the training.
    """
    manager, tasks = find_tasks(config.tasks, config.task_path), list(config.tasks)
    tokenizer = recorded_tokenizer(checkpoint)
    if tokenizer is None:
        rule = "has no tokenizer beside the data of its training"
        raise UserError(f"--path ({config.path}) {rule}; put the tokenizer back")
    rules = rules_of_checkpoint(checkpoint, tokenizer)

    def measure(forward: Forward) -> tuple[dict[str, Any], str]:
        model = HarnessModel(forward, tokenizer, rules)
        how: dict[str, Any] = {
            "num_fewshot": config.num_fewshot,
            "limit": config.limit,
            "log_samples": False,
        }
        with evaluating(forward.model), torch.compiler.set_stance("force_eager"):
            found = simple_evaluate(model=model, tasks=tasks, task_manager=manager, **how)
        # the harness gives nothing on ranks but the first of a node
        return ({}, "") if found is None else ({"tasks": found["results"]}, utils.make_table(found))

    return measure
