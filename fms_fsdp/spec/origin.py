"""Where a run starts: which checkpoint, or whose weights. Reads files only."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from fms_fsdp.checkpoint.folders import Checkpoint, complete_steps, leftovers, named_steps, open_checkpoint
from fms_fsdp.config import TrainConfig
from fms_fsdp.data.kept_tokenizer import UsedTokenizer, check_same_tokenizer, folder_tokenizer
from fms_fsdp.data.shards.manifest import Corpus
from fms_fsdp.errors import UserError
from fms_fsdp.parts import load_part
from fms_fsdp.record import Saved


@dataclass(frozen=True)
class Origin:
    """What a run starts from. `continues`: step, optimizer and data continue; else only weights are taken.
    `why`: a sentence for the log.

    `superseded`: the run's own later checkpoints, which `--resume_step` leaves behind. `fresh_data`: the data
    begin after the checkpoint's step. `weights`: the folder of Hugging Face that a new run begins with.
    """

    checkpoint: Checkpoint | None = None
    continues: bool = False
    why: str = ""
    superseded: tuple[Path, ...] = ()
    fresh_data: bool = False
    weights: str = ""

    @property
    def saved(self) -> Saved:
        """What the checkpoint says of the run that goes on; step 0 of a run that begins."""
        return self.checkpoint.saved if self.checkpoint is not None and self.continues else Saved(0)

    @property
    def root(self) -> Path | None:
        """The folder of the checkpoint."""
        return self.checkpoint.folder.parent if self.checkpoint is not None else None


def find_origin(cfg: TrainConfig, corpus: Corpus | None) -> Origin:
    """The origin that the flags name; its weights were made with the tokenizer of the data.

    Raises:
        UserError: there is none where one must be, or one where none may be, or it has another tokenizer.
    """
    origin = choose_origin(cfg)
    used = trained_with(origin.checkpoint) if origin.checkpoint is not None else None
    if origin.weights:
        folder, part = Path(origin.weights), load_part("hf_folder")
        part.open_folder(folder, "--init_from_hf")
        used = part.hf_tokenizer(folder, f"--init_from_hf ({folder})")
    remedy = "prepare the data with the tokenizer of the weights, or choose other weights"
    check_tokenizer(cfg, corpus, used, remedy)
    return origin


def check_tokenizer(cfg: TrainConfig, corpus: Corpus | None, used: UsedTokenizer | None, remedy: str) -> None:
    """Raises UserError where some weights `used` another tokenizer than that of the data, if both are
    known."""
    if corpus is not None and used is not None:
        path = cfg.data.data_path
        check_same_tokenizer(folder_tokenizer(f"--data_path ({path})", corpus.tokenizer, path), used, remedy)


def data_of(checkpoint: Checkpoint) -> str:
    """Where the data lie that the checkpoint was trained on; "" for synthetic ones."""
    return checkpoint.saved.record.located.data.data_path


def trained_with(checkpoint: Checkpoint) -> UsedTokenizer:
    """The tokenizer of the data that the checkpoint was trained on."""
    digest = checkpoint.saved.record.tokenizer
    return folder_tokenizer(f"the checkpoint {checkpoint.folder}", digest, data_of(checkpoint))


def choose_origin(cfg: TrainConfig, skip: Collection[Path] = ()) -> Origin:
    """The origin that the flags name. `skip`: checkpoints found to be damaged.

    Raises:
        UserError: there is none where one must be, or one where none may be.
    """
    section, own_root = cfg.checkpoint, Path(cfg.ckpt_save_path)
    if section.resume == "never" and named_steps(own_root):
        raise UserError(
            f"--resume (never) must find no checkpoints in {own_root}; choose another --run_name, or remove "
            f"them (python -m fms_fsdp ckpt prune --path={own_root} --after=0 --yes)"
        )
    if section.resume_step is not None and named_steps(own_root):
        return _go_back(own_root, section.resume_step, skip)
    own = open_checkpoint(own_root, skip=skip)
    if own is not None and own.saved.weights_only:
        return Origin(own, False, f"only weights are taken, from {own.folder}")
    if own is not None:
        return Origin(own, True, f"resumed from step {own.step} of {own_root}{_passed_over(own)}")
    if section.ckpt_load_path:
        given = open_checkpoint(Path(section.ckpt_load_path), skip=skip, step=section.resume_step)
        if given is None:
            raise UserError(
                f"--ckpt_load_path ({section.ckpt_load_path}) must be a checkpoint root or a complete "
                "step_<N> folder; found none there"
            )
        only_weights = section.load_model_only or given.saved.weights_only
        taken = "only weights are taken from" if only_weights else "going on from"
        fresh = not section.resuming_dataset and not only_weights
        more = f"{', with fresh data' if fresh else ''}{_passed_over(given)}"
        why = f"{taken} step {given.step} of {given.folder}{more}"
        return Origin(given, not only_weights, why, fresh_data=fresh)
    if section.resume == "must" or section.resume_step is not None:
        flag = f"--resume_step ({section.resume_step})" if section.resume_step else "--resume (must)"
        raise UserError(
            f"{flag} must find a checkpoint in {own_root}; none is there: check --run_name or "
            "--ckpt_load_path"
        )
    if damaged := [folder.name for folder, word in leftovers(own_root) if word == "damaged"]:
        raise UserError(
            f"checkpoints in {own_root} ({', '.join(damaged)}) are damaged and no sound one is there; choose "
            "another --run_name to start afresh, or remove them (python -m fms_fsdp ckpt prune "
            f"--path={own_root} --leftovers --yes)"
        )
    weights = cfg.model.init_from_hf
    how = f"only weights are taken, from {weights}" if weights else "starting fresh"
    return Origin(None, False, f"{how}: no checkpoint in {own_root}", weights=weights)


def _go_back(root: Path, step: int, skip: Collection[Path]) -> Origin:
    """Applies `--resume_step`. A run that already went back to that step continues from its newest
    checkpoint."""
    newest = open_checkpoint(root, skip=skip)
    if newest is not None and newest.step > step:
        if newest.saved.record.config.checkpoint.resume_step == step:
            why = f"resumed from step {newest.step} of {root}, made since --resume_step={step}"
            return Origin(newest, True, why)
    chosen = open_checkpoint(root, skip=skip, step=step)
    if chosen is None:
        there = ", ".join(map(str, complete_steps(root)))
        raise UserError(
            f"--resume_step ({step}) must be the step of a checkpoint in {root}; there are: {there}"
        )
    later = tuple(root / f"step_{found}" for found in named_steps(root) if found > step)
    why = f"resumed from step {step} of {root}; {len(later)} later checkpoints are set aside"
    return Origin(chosen, True, why, later)


def _passed_over(checkpoint: Checkpoint) -> str:
    return "".join(f"; passed over {folder.name}: {why}" for folder, why in checkpoint.passed_over.items())
