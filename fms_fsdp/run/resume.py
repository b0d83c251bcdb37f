"""Where a launch starts: finds and verifies the checkpoint, and compares it with this launch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fms_fsdp.checkpoint.folders import (
    CheckpointDeleted,
    corrupt_files,
)
from fms_fsdp.config import TrainConfig, flag_table
from fms_fsdp.config.flag import flag_values
from fms_fsdp.data.corpus import Corpus
from fms_fsdp.distributed.runtime import gather_objects, run_long_on_every_rank, run_on_rank0
from fms_fsdp.distributed.world import World
from fms_fsdp.errors import UserError, read_failed
from fms_fsdp.files import exists
from fms_fsdp.logs import log
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.optim.optimizers import example_state
from fms_fsdp.run.resume_point import ResumePoint, choose_checkpoint
from fms_fsdp.state import RunConfig

if TYPE_CHECKING:
    from fms_fsdp.tokenizers.tokenizer import UsedTokenizer

# Network file systems may take some seconds to show a deletion on every node.
_MAX_MISSES = 30  # tries, a second apart


def find_resume_point(
    cfg: TrainConfig, world: World, corpus: Corpus | None = None, *, verify: bool = True
) -> ResumePoint:
    """Chooses the newest valid checkpoint that the flags allow (collective: every rank).

    Rank 0 chooses by names and sizes. All ranks share the checksums, and if one is wrong, rank 0
    chooses an older checkpoint. So nothing after this call meets a corrupt file.

    Raises:
        UserError: there is none although there must be one, or the other way round; or its
            tokenizer differs from the data's; or not every rank sees its folder.
        RunFailed: a file cannot be read.
    """
    corrupt: dict[Path, str] = {}
    misses = dict[Path, int]()  # how often a rank did not find a checkpoint; the same on every rank
    while True:
        resume = run_on_rank0(lambda: _choose_for_data(cfg, corpus, corrupt))
        if resume.checkpoint is None or not verify:
            return resume
        folder = resume.checkpoint.folder
        try:
            wrong = _verify(folder, world)
        except CheckpointDeleted:
            # The run that owns it deleted it, and rank 0 chooses another one. A checkpoint that rank 0
            # chooses again and again is on a disk that another node does not have.
            misses[folder] = misses.get(folder, 0) + 1
            if misses[folder] == 1:
                log.warning("%s was deleted, or not every rank sees it: looking again", folder)
                continue
            if misses[folder] == _MAX_MISSES:
                raise UserError(
                    f"{folder} must be visible on all nodes, but not every rank sees it; set "
                    "--output_dir and --ckpt_load_path to folders of a shared file system"
                ) from None
            time.sleep(1.0)
            continue
        if not wrong:
            return resume
        corrupt[folder] = "; ".join(wrong)
        log.error("skipped %s, which is corrupt: %s", folder, corrupt[folder])


def _verify(folder: Path, world: World) -> list[str]:
    """Compares the files of a checkpoint with their checksums, and returns the corrupt ones.

    Collective: each rank reads some of the files.
    """
    wrong = list[str]()
    failure: UserError | OSError | None = None
    is_deleted = False
    try:
        # One rank may have written all files, so that one reads them while the others wait.
        wrong = run_long_on_every_rank(partial(corrupt_files, folder, world.rank, world.size))
    except (UserError, OSError) as error:
        failure = error
        with suppress(OSError):  # the first error is the reason
            is_deleted = not exists(folder)
    # What the ranks have seen decides, not a second look: their caches of a file system may differ.
    found = gather_objects((wrong, failure, is_deleted))
    if any(has_seen for _, _, has_seen in found):
        raise CheckpointDeleted(folder)
    for _, reason, _ in found:
        if reason is None:
            continue
        if isinstance(reason, UserError):
            raise reason
        raise read_failed(reason.filename or folder, reason.strerror or reason)
    return [each for names, _, _ in found for each in names]


def _choose_for_data(
    cfg: TrainConfig, corpus: Corpus | None, corrupt: dict[Path, str]
) -> ResumePoint:
    resume = choose_checkpoint(cfg, corrupt)
    used: UsedTokenizer | None = None
    if resume.checkpoint is not None:
        from fms_fsdp.checkpoint.run_results import checkpoint_tokenizer

        used = checkpoint_tokenizer(resume.checkpoint)
    if resume.hf_weights:
        from fms_fsdp.hf.hf_tokenizer import hf_used_tokenizer
        from fms_fsdp.hf.weights import open_checkpoint

        folder = Path(resume.hf_weights)
        open_checkpoint(folder, "--init_from_hf")
        used = hf_used_tokenizer(folder, f"--init_from_hf={folder}")
    fix = "prepare the data with the tokenizer of the weights, or choose other weights"
    check_tokenizer(cfg, corpus, used, fix)
    return resume


def check_tokenizer(
    cfg: TrainConfig, corpus: Corpus | None, used: UsedTokenizer | None, fix: str
) -> None:
    """Raises UserError if weights `used` another tokenizer than the data, as far as both are known."""
    if corpus is None or used is None:
        return
    from fms_fsdp.data.kept_tokenizer import folder_tokenizer
    from fms_fsdp.tokenizers.tokenizer import check_same_tokenizer

    path = cfg.data.data_path
    own = folder_tokenizer(f"--data_path={path}", corpus.tokenizer, path)
    check_same_tokenizer(own, used, fix)


def check_resume(run: RunConfig, resume: ResumePoint) -> None:
    """Compares this launch with the launch that wrote the checkpoint.

    The model is compared by its shape, the data by the stream's own state.

    Raises:
        UserError: another model or optimizer, or the run ends before the checkpoint.
    """
    if resume.checkpoint is None:
        return
    old = resume.checkpoint.metadata.run
    folder = resume.checkpoint.folder
    _check_shape(run.model, old.model, folder)
    if not resume.is_resume:
        return
    for name in ("optimizer", "optimizer_kwargs"):
        now = getattr(run.config.optim, name)
        before = getattr(old.config.optim, name)
        if now != before and (
            name == "optimizer"
            or sorted(example_state(run.config.optim)) != sorted(example_state(old.config.optim))
        ):
            raise UserError(
                f"--{name}={_shown(now)} does not match the state of the checkpoint {folder} "
                f"({_shown(before)}); set it so, load only the weights (--load_model_only), or "
                "choose another --run_name"
            )
    if run.num_steps < resume.start.step:
        raise UserError(
            f"--num_steps={run.num_steps} is below the newest checkpoint (step {resume.start.step} "
            f"in {folder.parent}); raise it, or choose another --run_name"
        )


def _check_shape(now: TransformerConfig, before: TransformerConfig, folder: Path) -> None:
    """Raises UserError unless the weights have the same meaning."""
    table = flag_table(TrainConfig)
    for name in [each.name for each in fields(TransformerConfig)]:
        is_compared = table[name].resume == "fixed"
        if name == "max_seq_len":
            is_compared = now.pos_emb == "learned"  # positions that have weights
        if is_compared and getattr(now, name) != getattr(before, name):
            value = _flag_value(getattr(now, name))
            saved = _flag_value(getattr(before, name))
            raise UserError(
                f"--{name}={value} does not match the checkpoint {folder} ({saved}); "
                f"set --{name}={saved}, or choose another --run_name"
            )


def list_changes(run: RunConfig, resume: ResumePoint) -> Iterator[str]:
    """Yields log lines on flags, batch, precision, world, device and versions that differ from the
    launch that wrote the checkpoint of a resumed run.

    The row of each flag says how another value is treated ("free" or "logged").
    """
    old = resume.saved
    if old is None:
        return
    changed: dict[str, list[str]] = {"logged": [], "free": [], "fixed": []}
    before = flag_values(old.config)
    now = flag_values(run.config)
    batch = run.batch
    was = old.batch
    # The run keeps its global batch, and --batch_size is only the most that a rank computes at once.
    micro = run.config.training.micro_batch_size
    is_unused = micro is not None and micro != batch.batch_size
    for name, row in flag_table(TrainConfig).items():
        if name == "batch_size" and is_unused:
            continue
        if before[name] != now[name]:
            is_new_data = row.orders_data and (resume.fresh_data or run.config.data.dataset_builder)
            effect = "logged" if is_new_data else row.resume
            changed[effect].append(f"--{name} {_shown(before[name])} -> {_shown(now[name])}")
    if changed["logged"]:
        yield f"from step {resume.start.step + 1}: {', '.join(changed['logged'])}"
    # A changed "fixed" flag passed the checks, so it results in the same model or data.
    quiet = changed["free"] + changed["fixed"]
    if quiet:
        yield f"changed, no effect on training: {', '.join(quiet)}"
    if is_unused and before["batch_size"] != now["batch_size"]:
        yield (
            f"--batch_size={micro} is not reached: the run keeps its global batch of "
            f"{batch.global_batch_size} sequences ({batch.factors}); set --global_batch_size to change it"
        )
    if batch != was and batch.global_batch_size == was.global_batch_size:
        yield (
            f"batch: {old.batch.factors}, now {run.batch.factors}: the global batch remains "
            f"{batch.global_batch_size} sequences"
        )
    facts = {
        "precision": (old.precision.summary, run.precision.summary),
        "world_size": (old.world_size, run.world_size),
        "device": (old.device_type, run.device_type),
    }
    for name in sorted({*old.versions, *run.versions}):
        facts[f"version of {name}"] = old.versions.get(name), run.versions.get(name)
    yield from (f"{name}: {a} -> {b}" for name, (a, b) in facts.items() if a != b)


def learning_rate_jump(run: RunConfig, resume: ResumePoint) -> str:
    """Returns a warning if flags change the learning rate of the next step."""
    old = resume.saved
    step = resume.start.step + 1
    if old is None:
        return ""
    tokens = resume.start.tokens_seen + old.batch.global_batch_size * old.seq_length
    before = f"{old.schedule(step, tokens, old.config.optim.learning_rate):.3e}"
    now = f"{run.schedule(step, tokens, run.config.optim.learning_rate):.3e}"
    if before == now:
        return ""
    return f"learning rate of step {step}: {before} -> {now}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def _flag_value(value: Any) -> str:
    """Returns the text with which a flag takes this value of the model's shape."""
    return "none" if value is None else str(value)
