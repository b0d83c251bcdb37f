"""Where a run starts: which checkpoint, whether it fits, and what the flags of this launch change in it.
Reads files only."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fms_fsdp.checkpoint.folders import Checkpoint, complete_steps, leftovers, named_steps, open_checkpoint
from fms_fsdp.config import OptimConfig, Precision, TrainConfig, flag_table, from_dict
from fms_fsdp.config.flag import flag_values
from fms_fsdp.config.values import joined
from fms_fsdp.errors import UserError
from fms_fsdp.models.variants import LlamaConfig, model_from_dict
from fms_fsdp.optim.optimizers import state_of_stand_in
from fms_fsdp.optim.schedules import Corners, Length, Schedule, find_corners


@dataclass(frozen=True)
class Start:
    """What a run starts from. `continues`: step, optimizer and data continue; else only weights are taken.
    `why`: a sentence for the log.

    `superseded`: the run's own later checkpoints, which `--resume_step` leaves behind. `fresh_data`: the data
    begin after the checkpoint's step. `weights`: the folder of Hugging Face that a new run begins with.
    """

    checkpoint: Checkpoint | None
    continues: bool
    why: str
    superseded: tuple[Path, ...] = ()
    fresh_data: bool = False
    weights: str = ""

    @property
    def state(self) -> dict[str, Any]:
        """What the checkpoint says of the run that goes on; {} for a run that begins."""
        return self.checkpoint.state if self.checkpoint is not None and self.continues else {}


def find_start(cfg: TrainConfig, skip: Collection[Path] = ()) -> Start:
    """The start that the flags name. `skip`: checkpoints found to be damaged.

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
    if own is not None and own.state.get("weights_only"):
        return Start(own, False, f"only weights are taken, from {own.folder}")
    if own is not None:
        return Start(own, True, f"resumed from step {own.step} of {own_root}{_passed_over(own)}")
    if section.ckpt_load_path:
        given = open_checkpoint(Path(section.ckpt_load_path), skip=skip, step=section.resume_step)
        if given is None:
            raise UserError(
                f"--ckpt_load_path ({section.ckpt_load_path}) must be a checkpoint root or a complete "
                "step_<N> folder; found none there"
            )
        only_weights = section.load_model_only or bool(given.state.get("weights_only"))
        taken = "only weights are taken from" if only_weights else "going on from"
        fresh = not section.resuming_dataset and not only_weights
        more = f"{', with fresh data' if fresh else ''}{_passed_over(given)}"
        why = f"{taken} step {given.step} of {given.folder}{more}"
        return Start(given, not only_weights, why, fresh_data=fresh)
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
    return Start(None, False, f"{how}: no checkpoint in {own_root}", weights=weights)


def _go_back(root: Path, step: int, skip: Collection[Path]) -> Start:
    """Applies `--resume_step`. A run that already went back to that step continues from its newest
    checkpoint."""
    newest = open_checkpoint(root, skip=skip)
    if newest is not None and newest.step > step:
        if newest.state["config"]["checkpoint"].get("resume_step") == step:
            why = f"resumed from step {newest.step} of {root}, made since --resume_step={step}"
            return Start(newest, True, why)
    chosen = open_checkpoint(root, skip=skip, step=step)
    if chosen is None:
        there = ", ".join(map(str, complete_steps(root)))
        raise UserError(
            f"--resume_step ({step}) must be the step of a checkpoint in {root}; there are: {there}"
        )
    later = tuple(root / f"step_{found}" for found in named_steps(root) if found > step)
    why = f"resumed from step {step} of {root}; {len(later)} later checkpoints are set aside"
    return Start(chosen, True, why, later)


def _passed_over(checkpoint: Checkpoint) -> str:
    return "".join(f"; passed over {folder.name}: {why}" for folder, why in checkpoint.passed_over.items())


def check_model(model: LlamaConfig, checkpoint: Checkpoint) -> None:
    """Raises UserError naming the first field in which the checkpoint's model is another."""
    table, saved = flag_table(TrainConfig), asdict(model_from_dict(checkpoint.state["resolved"]["model"]))
    for name, value in asdict(model).items():
        is_kept = table[name].resume == "refused"
        if name == "max_seq_len":
            is_kept = model.pos_emb == "learned"  # a row of weights for every position
        if is_kept and saved[name] != value:
            raise UserError(
                f"--{name} ({value}) must be that of the checkpoint {checkpoint.folder} ({saved[name]}); "
                f"set it so, or choose another --run_name"
            )


def check_same_optimizer(section: OptimConfig, checkpoint: Checkpoint) -> None:
    """Raises UserError where the checkpoint holds the state of another optimizer, or of other settings."""
    before, now = asdict(_saved_section(checkpoint.state)), asdict(section)
    for name in ("optimizer", "optimizer_kwargs"):
        old, new = joined(before[name]), joined(now[name])
        if old != new and (name == "optimizer" or _state_names(before) != _state_names(now)):
            raise UserError(
                f"--{name} ({new}) must keep the state of the checkpoint {checkpoint.folder} ({old}); set it "
                "so, take only the weights (--load_model_only), or choose another --run_name"
            )


def _state_names(flags: dict[str, Any]) -> list[str]:
    return sorted(state_of_stand_in(OptimConfig(**flags)))


def differences(cfg: TrainConfig, resolved: dict[str, Any], start: Start) -> list[str]:
    """What differs from the launch that wrote the checkpoint, a line each: flags, world, versions, learning
    rate."""
    saved = start.state["resolved"]
    before, now = flag_values(from_dict(start.state["config"])), flag_values(cfg)
    changed: dict[str, list[str]] = {"announced": [], "free": [], "refused": []}
    for name, row in flag_table(TrainConfig).items():
        if before[name] != now[name]:
            takes_effect = row.orders_data and (start.fresh_data or cfg.data.dataset_builder)
            change = f"--{name} {_shown(before[name])} -> {_shown(now[name])}"
            changed["announced" if takes_effect else row.resume].append(change)
    lines = []
    if changed["announced"]:
        lines.append(f"from step {start.state['step'] + 1} on: {', '.join(changed['announced'])}")
    # refused ones got past the checks: they come to the same thing
    if quiet := changed["free"] + changed["refused"]:
        lines.append(f"changed, without effect on what is trained: {', '.join(quiet)}")
    precisions = [Precision(**each["precision"]).in_words for each in (saved, resolved)]
    if precisions[0] != precisions[1]:
        lines.append(f"precision: {precisions[0]} -> {precisions[1]}")
    for name in ("world_size", "device"):
        if saved.get(name) != resolved[name]:
            lines.append(f"{name}: {saved.get(name)} -> {resolved[name]}")
    versions = saved.get("versions", {})
    for name in sorted({*versions, *resolved["versions"]}):
        if versions.get(name) != resolved["versions"].get(name):
            lines.append(f"version of {name}: {versions.get(name)} -> {resolved['versions'].get(name)}")
    return lines


def kept_corners(section: OptimConfig, run: Length, start: Start) -> Corners:
    """Those of the checkpoint, unless a flag of the schedule has changed: another length of the run moves
    nothing but a last phase of wsd that has not begun.

    Raises:
        UserError: the decay ends before it begins.
    """
    if not (state := start.state):
        return find_corners(section, run)
    before, old = _saved_schedule(state)
    if _shape(before) != _shape(section):
        return find_corners(section, run)
    place = state["tokens_seen"] if old.in_tokens else state["step"]
    if section.lr_schedule == "wsd" and place < old.decay_start:
        return replace(find_corners(section, run), warmup=old.warmup)
    return old


def schedule_jump(now: Schedule, start: Start) -> str:
    """A sentence on how the learning rate jumps at the resume; empty if the schedule is the same."""
    state, step = start.state, start.state["step"] + 1
    before, corners = _saved_schedule(state)
    rows, seq_length = state["resolved"]["batch"]["global_batch_size"], state["config"]["data"]["seq_length"]
    tokens = state["tokens_seen"] + rows * seq_length
    rates = ((Schedule(before, corners), before.learning_rate), (now, now.section.learning_rate))
    old, new = (f"{schedule(step, tokens, base):.3e}" for schedule, base in rates)
    return "" if old == new else f"learning rate of step {step}: {old} -> {new}"


def _saved_schedule(state: dict[str, Any]) -> tuple[OptimConfig, Corners]:
    """The flags and the corners of the launch that wrote the checkpoint."""
    return _saved_section(state), Corners(**state["resolved"]["schedule"])


def _saved_section(state: dict[str, Any]) -> OptimConfig:
    return from_dict(state["config"]).optim


def _shape(section: OptimConfig) -> tuple[object, ...]:
    return section.lr_schedule, section.spans(), section.constant_steps


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
