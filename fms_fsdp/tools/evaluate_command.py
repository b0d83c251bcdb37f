"""`python -m fms_fsdp evaluate`: held-out loss of a checkpoint, multiple-choice questions, or tasks of
lm-evaluation-harness.

Held-out loss also runs under torchrun, with the model sharded over all processes. The others run on
one process. Tasks use lm-eval's own Hugging Face model, on an export of the checkpoint; to spread
them over GPUs, export it and run `accelerate launch -m lm_eval --model hf`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fms_fsdp.checkpoint.folders import Checkpoint, read_checkpoint
from fms_fsdp.checkpoint.io import load_checkpoint
from fms_fsdp.checkpoint.run_results import recorded_tokenizer, require_checkpoint
from fms_fsdp.config import DataConfig, EvalConfig, ParallelConfig, Precision, TrainConfig
from fms_fsdp.config.values import joined
from fms_fsdp.console import table
from fms_fsdp.data.validation import close_held_out, open_held_out, scan_held_out
from fms_fsdp.distributed.dims import plan_dims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import (
    collective_timeout,
    init_distributed,
    pick_device,
    run_on_rank0,
    shut_down,
)
from fms_fsdp.distributed.world import World
from fms_fsdp.errors import RunFailed, UserError, note_once
from fms_fsdp.evaluate import evaluate
from fms_fsdp.files import finite_json
from fms_fsdp.generate import TextModel, check_logits, check_tokens, encode_texts, read_lines
from fms_fsdp.hf.export import main as export
from fms_fsdp.hf.hf_flags import ExportConfig
from fms_fsdp.hf.hf_tokenizer import find_hf_tokenizer
from fms_fsdp.hf.trained import Trained, open_trained, trained
from fms_fsdp.hf.weights import load_weights
from fms_fsdp.logs import set_up_log
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.llama import LanguageModel
from fms_fsdp.packages import is_installed
from fms_fsdp.parallel.layout import FLOAT8_CAPABILITY
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.tools.generate_command import load_with_tokenizer, missing_tokenizer
from fms_fsdp.tools.tool_flags import EvaluateConfig

_HF_SEQ_LENGTH = 4096  # at most, for a Hugging Face checkpoint

Values = dict[str, Any]


@dataclass(frozen=True)
class _Subject:
    """The model to evaluate, and the settings of its run.

    eval_batch    sequences of a batch of --eval_steps
    """

    trained: Trained
    precision: Precision
    config: TrainConfig
    batch_size: int
    eval_batch: int

    @property
    def path(self) -> Path:
        return self.trained.folder

    @property
    def model(self) -> TransformerConfig:
        return self.trained.model

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.trained.checkpoint

    @property
    def title(self) -> str:
        if self.checkpoint is None:
            return str(self.path)
        return f"{self.path}: {self.checkpoint.metadata.tokens_seen:,} tokens trained on"

    @property
    def counters(self) -> Values:
        if self.checkpoint is None:
            return {}
        return {"step": self.checkpoint.step, "tokens_seen": self.checkpoint.metadata.tokens_seen}


def main(config: EvaluateConfig) -> None:
    """Evaluates a checkpoint and prints the values (collective: every rank)."""
    world = World.from_env()
    set_up_log(world.rank, has_time=False)
    if (config.tasks or config.questions) and world.size > 1:
        flag_name = "tasks" if config.tasks else "questions"
        raise UserError(f"--{flag_name} runs on one process; start it without torchrun")
    if config.questions:
        values, text = score_questions(config)
        print(json.dumps(finite_json(values)) if config.json else text)
        return
    subject = _find_subject(config)
    try:
        if config.tasks:
            values, text = run_tasks(config, subject, world)
        else:
            subject, values, text = evaluate_held_out(config, subject, world)
    except RunFailed as error:
        raise UserError(str(error)) from error
    if world.rank != 0:
        return
    if config.json:
        print(json.dumps(subject.counters | finite_json(values)))
    else:
        print(f"{subject.title}\n{text}")


def _find_subject(config: EvaluateConfig) -> _Subject:
    found = open_trained(config.path, config.step, "--path")
    if found.checkpoint is not None:
        return _subject_of(found.checkpoint)
    if not (config.tasks or config.data_path or config.eval_data_path):
        raise UserError(f"--path={config.path} records no data; set --eval_data_path or --tasks")
    cfg = TrainConfig(
        data=DataConfig(
            data_path=config.data_path or config.eval_data_path,
            seq_length=min(found.model.max_seq_len, _HF_SEQ_LENGTH),
        ),
        eval=EvalConfig(eval_interval=1),
    )
    precision = cfg.precision.resolve("bf16" if torch.cuda.is_available() else "fp32")
    return _Subject(found, precision, cfg, batch_size=1, eval_batch=8)


def _subject_of(checkpoint: Checkpoint) -> _Subject:
    run = checkpoint.metadata.run
    return _Subject(
        trained(checkpoint),
        run.precision,
        run.located,
        run.batch.batch_size,
        eval_batch=run.batch.global_batch_size,
    )


def evaluate_held_out(
    config: EvaluateConfig, subject: _Subject, world: World
) -> tuple[_Subject, Values, str]:
    """Returns the evaluated model, the values on held-out data, and a table (collective)."""
    cfg = _eval_settings(config, subject.config)
    shape = _shape_of_evaluation(subject, cfg.data.seq_length)
    used = subject.trained.used_tokenizer(f"--path={subject.path}")
    found = scan_held_out(cfg.eval, cfg.data, None, vocab_size=subject.model.vocab_size, used=used)
    sources = open_held_out(cfg.eval, found, subject.eval_batch)
    parallel = ParallelConfig(
        collective_timeout_s=cfg.parallel.collective_timeout_s,
        dist_backend=cfg.parallel.dist_backend,
        use_torch_compile=False,
    )
    device = pick_device(world)
    dims = plan_dims(parallel, "", world)
    init_distributed(parallel, cfg.training, world, device)
    # A run that trains meanwhile may save between the choices of two ranks: take rank 0's.
    checkpoint = run_on_rank0(lambda: subject.checkpoint)
    if checkpoint is not None:
        subject = _subject_of(checkpoint)
    mesh = Mesh(dims, world.rank, device.type, collective_timeout(parallel))
    model = parallelize(
        shape,
        parallel,
        mesh,
        device=device,
        precision=_precision_of_evaluation(subject.precision, device),
        seed=None,
    )
    subject = _load(config, subject, model, mesh, world)
    values = evaluate(
        model,
        sources,
        batch_size=config.batch_size or subject.batch_size,
        document_mask=cfg.data.document_mask,
        device=device,
        mesh=mesh,
    )
    close_held_out(sources)
    del model, mesh
    shut_down()
    counts = {f"{source.group}/{source.name}": source.num_sequences for source in sources}
    for source in sources:
        counts[source.group] = counts.get(source.group, 0) + source.num_sequences
    rows = []
    for key in values:
        if not key.endswith("/loss"):
            continue
        name = key.removesuffix("/loss")
        loss = f"{values[key]:.4f}"
        perplexity = f"{values[f'{name}/ppl']:.2f}"
        bits = "—"
        if f"{name}/bits_per_byte" in values:
            bits = f"{values[f'{name}/bits_per_byte']:.4f}"
        rows.append((name, str(counts[name]), loss, perplexity, bits))
    head = ("source", "sequences", "loss", "perplexity", "bits/byte")
    return subject, values, table(head, rows)


def _shape_of_evaluation(subject: _Subject, seq_length: int) -> TransformerConfig:
    """Returns the model's shape with positions for these sequences, and attention for any machine.

    Raises:
        UserError: its learned positions are too few.
    """
    shape = subject.model
    if shape.pos_emb == "learned" and shape.max_seq_len < seq_length:
        raise UserError(
            f"--seq_length={seq_length} must be at most the {shape.max_seq_len} learned positions of "
            f"--path={subject.path}; set --seq_length={shape.max_seq_len} or less"
        )
    max_seq_len = max(shape.max_seq_len, seq_length)
    return replace(shape, max_seq_len=max_seq_len, attn_impl="auto")


def _precision_of_evaluation(precision: Precision, device: torch.device) -> Precision:
    """Returns the precision of the run, without float8 on a GPU that has no kernels for it."""
    if not precision.float8 or device.type != "cuda":  # CPUs emulate float8
        return precision
    if torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY[precision.float8]:
        return precision
    note_once(
        f"{torch.cuda.get_device_name(device)} has no kernels for the run's float8 by "
        f"{precision.float8}: it is evaluated in {precision.compute}"
    )
    return replace(precision, float8="")


def _load(
    config: EvaluateConfig, subject: _Subject, model: LanguageModel, mesh: Mesh, world: World
) -> _Subject:
    """Loads the weights, from a newer checkpoint if the run deletes this one (collective)."""
    if subject.checkpoint is None:
        load_weights(subject.path, model, mesh, "--path")
        return subject
    chosen = iter([subject.checkpoint])

    def find() -> Checkpoint:
        first = next(chosen, None)
        return first or run_on_rank0(lambda: require_checkpoint(config.path, config.step, "--path"))

    def load(checkpoint: Checkpoint) -> Checkpoint:
        load_checkpoint(checkpoint.folder, model, None, is_alone=world.size == 1)
        return checkpoint

    return _subject_of(read_checkpoint(find, load))


def _eval_settings(config: EvaluateConfig, cfg: TrainConfig) -> TrainConfig:
    """Returns the flags of the run with evaluation on and the flags of this command."""
    given: Values = {"eval_at_start": True, "eval_test": config.eval_test}
    for name in ("eval_data_path", "eval_datasets", "eval_steps"):
        if getattr(config, name):
            given[name] = getattr(config, name)
    if not config.eval_test:
        given["test_data_path"] = ""
    data: Values = {}
    for name in ("data_path", "seq_length", "sep_token"):
        if getattr(config, name) not in (None, ""):
            data[name] = getattr(config, name)
    if config.data_path:  # otherwise a run on synthetic tokens is evaluated on these
        data["use_dummy_dataset"] = False
    return replace(cfg, eval=replace(cfg.eval, **given), data=replace(cfg.data, **data))


def run_tasks(config: EvaluateConfig, subject: _Subject, world: World) -> tuple[Values, str]:
    """Returns the results of lm-evaluation-harness on an export, and its table."""
    if not is_installed("lm_eval"):
        raise UserError("--tasks requires the package lm-eval; run: pip install 'lm-eval[hf]'")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    paths = config.task_path or None
    # The index of all tasks takes seconds: use it only for tasks that the folder does not define.
    manager = TaskManager(include_path=paths, include_defaults=False)
    if not all(manager.match_tasks([task]) for task in config.tasks):
        manager = TaskManager(include_path=paths)
    for task in config.tasks:
        if not manager.match_tasks([task]):
            raise UserError(f"--tasks={task} is not a task; see `lm_eval ls tasks`, or --task_path")
    if not _has_tokenizer(subject):
        raise missing_tokenizer(config.path)
    device = pick_device(world)
    with _exported(subject, "bf16" if device.type == "cuda" else "fp32") as folder:
        try:
            results = simple_evaluate(
                model="hf",
                model_args={"pretrained": str(folder), "dtype": "auto"},
                tasks=list(config.tasks),
                task_manager=manager,
                num_fewshot=config.num_fewshot,
                limit=config.limit,
                batch_size=config.batch_size or subject.batch_size,
                device=str(device),
                log_samples=False,
            )
        except OSError as error:  # of datasets and huggingface_hub
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"--tasks={joined(config.tasks)} cannot read its data ({reason}); on a machine "
                "without network, set HF_HOME to a cache that has them, and HF_HUB_OFFLINE=1"
            ) from error
    return {"tasks": results["results"]}, make_table(results)


def _has_tokenizer(subject: _Subject) -> bool:
    if subject.checkpoint is not None:
        return recorded_tokenizer(subject.checkpoint) is not None
    try:
        return find_hf_tokenizer(subject.path) is not None
    except UserError:  # lm-eval may read one that this program cannot
        return True


@contextmanager
def _exported(subject: _Subject, dtype: str) -> Iterator[Path]:
    """Returns a Hugging Face checkpoint of the model, a temporary one if it is not one itself."""
    if subject.checkpoint is None:
        yield subject.path
        return
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, "hf")
        with redirect_stdout(sys.stderr):
            export(ExportConfig(str(subject.path), output=str(folder), dtype=dtype))
        yield folder


def score_questions(config: EvaluateConfig) -> tuple[Values, str]:
    """Returns how often the right choice is the most likely one: by the log-probability of its tokens
    (acc), and by that per character (acc_norm), as lm-evaluation-harness defines them."""
    path = Path(config.questions).expanduser()
    loaded = load_with_tokenizer(config.path, config.step)
    right = dict.fromkeys(("acc", "acc_norm"), 0)
    lines = read_lines(path, "--questions")
    for number, line in enumerate(lines, 1):
        try:
            question = json.loads(line)
            prompt = question["prompt"]
            choices = question["choices"]
            lengths = [len(choice.removeprefix(" ")) for choice in choices]
            correct = question["answer"]
            if type(correct) is not int or not 0 <= correct < len(choices):  # bool is an int
                raise ValueError
            if min(lengths) == 0 or len(choices) < 2 or not isinstance(prompt, str):
                raise ValueError
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UserError(
                f"--questions={path}:{number} must have a prompt, two or more choices and the index "
                "of the answer; correct the line"
            ) from None
        scores = choice_scores(loaded, prompt, choices)
        per_character = [score / length for score, length in zip(scores, lengths, strict=True)]
        for name, rates in (("acc", scores), ("acc_norm", per_character)):
            right[name] += rates.index(max(rates)) == correct
    if not lines:
        raise UserError(f"--questions={path} is empty; write one question per line")
    values = {name: count / len(lines) for name, count in right.items()} | {"questions": len(lines)}
    return values, ", ".join(f"{name} {value:.4g}" for name, value in values.items())


@torch.no_grad()
def choice_scores(loaded: TextModel, prompt: str, choices: Sequence[str]) -> list[float]:
    """Returns the log-probability of each choice after the prompt.

    White space at the end of the prompt belongs to the choices, and tokens count from where the
    text parts from the prompt's tokens.

    Raises:
        UserError: a question is too long or has a token that the model lacks, or a logit is not finite.
    """
    model, tokenizer, rules = loaded
    assert tokenizer is not None
    texts = [prompt.rstrip(), *(prompt + choice for choice in choices)]
    before = rules.before or (tokenizer.vocabulary.eos_id,)
    given, *rows = ([*before, *ids] for ids in encode_texts(tokenizer, texts))
    check_tokens(rows, model.config.vocab_size)
    if max(map(len, rows)) > model.config.max_seq_len:
        raise UserError(
            f"a question has {max(map(len, rows))} tokens, the model's maximum length is "
            f"{model.config.max_seq_len}; shorten it"
        )
    device = next(model.parameters()).device
    scores = []
    for row in rows:
        start = len(os.path.commonprefix([given, row]))
        logits: Any = model(torch.tensor([row[:-1]], device=device))
        check_logits(logits)
        logp_SV = logits[0].float().log_softmax(-1)
        labels = torch.tensor(row[1:], device=logp_SV.device)
        scores.append(float(logp_SV.gather(1, labels[:, None])[start - 1 :].sum()))
    return scores
