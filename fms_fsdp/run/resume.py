"""Where a run starts: which checkpoint, whether it fits, and what the flags of this launch change in it.
Reads files only."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fms_fsdp.checkpoint.folders import Checkpoint, complete_steps, leftovers, named_steps, open_checkpoint
from fms_fsdp.config import OptimConfig, TrainConfig, as_dict, flag_table
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.optim.schedules import build_schedule


@dataclass(frozen=True)
class Start:
    """What a run starts from. `continues`: step, optimizer and data continue; else only weights are taken.
    `why`: a sentence for the log.

    `superseded`: the run's own later checkpoints, which `--resume_step` leaves behind. `fresh_data`: the data
    begin after the checkpoint's step.
    """

    checkpoint: Checkpoint | None
    continues: bool
    why: str
    superseded: tuple[Path, ...] = field(default=())
    fresh_data: bool = False


def find_start(cfg: TrainConfig, skip: Collection[Path] = ()) -> Start:
    """The start that the flags name. `skip`: checkpoints found to be damaged.

    Raises:
        ValueError: there is none where one must be, or one where none may be.
    """
    section, own_root = cfg.checkpoint, Path(cfg.ckpt_save_path)
    if section.resume == "never" and named_steps(own_root):
        raise ValueError(
            f"--resume (never) must find no checkpoints in {own_root}; choose another --run_name, or remove "
            f"them (python -m fms_fsdp ckpt prune --path={own_root} --after=0 --yes)"
        )
    if section.resume_step is not None and named_steps(own_root):
        return _go_back(own_root, section.resume_step, skip)
    own = open_checkpoint(own_root, skip=skip)
    if own is not None:
        return Start(own, True, f"resumed from step {own.step} of {own_root}{_passed_over(own)}")
    if section.ckpt_load_path:
        given = open_checkpoint(Path(section.ckpt_load_path), skip=skip, step=section.resume_step)
        if given is None:
            raise ValueError(
                f"--ckpt_load_path ({section.ckpt_load_path}) must be a checkpoint root or a complete "
                "step_<N> folder; found none there"
            )
        taken = "only weights are taken from" if section.load_model_only else "going on from"
        fresh = not section.resuming_dataset and not section.load_model_only
        more = f"{', with fresh data' if fresh else ''}{_passed_over(given)}"
        why = f"{taken} step {given.step} of {given.folder}{more}"
        return Start(given, not section.load_model_only, why, fresh_data=fresh)
    if section.resume == "must" or section.resume_step is not None:
        flag = f"--resume_step ({section.resume_step})" if section.resume_step else "--resume (must)"
        raise ValueError(
            f"{flag} must find a checkpoint in {own_root}; none is there: check --run_name or "
            "--ckpt_load_path"
        )
    if damaged := [folder.name for folder, word in leftovers(own_root) if word == "damaged"]:
        raise ValueError(
            f"checkpoints in {own_root} ({', '.join(damaged)}) are damaged and no sound one is there; choose "
            "another --run_name to start afresh, or remove them (python -m fms_fsdp ckpt prune "
            f"--path={own_root} --leftovers --yes)"
        )
    return Start(None, False, f"starting fresh: no checkpoint in {own_root}")


def _go_back(root: Path, step: int, skip: Collection[Path]) -> Start:
    """Applies `--resume_step`. A run that already went back to that step continues from its newest
    checkpoint."""
    newest = open_checkpoint(root, skip=skip)
    if (
        newest is not None
        and newest.step > step
        and newest.state["config"]["checkpoint"].get("resume_step") == step
    ):
        return Start(
            newest, True, f"resumed from step {newest.step} of {root}, made since --resume_step={step}"
        )
    chosen = open_checkpoint(root, skip=skip, step=step)
    if chosen is None:
        there = ", ".join(map(str, complete_steps(root)))
        raise ValueError(
            f"--resume_step ({step}) must be the step of a checkpoint in {root}; there are: {there}"
        )
    later = tuple(root / f"step_{found}" for found in named_steps(root) if found > step)
    return Start(
        chosen,
        True,
        f"resumed from step {step} of {root}; {len(later)} later checkpoints are set aside",
        later,
    )


def _passed_over(checkpoint: Checkpoint) -> str:
    return "".join(f"; passed over {folder.name}: {why}" for folder, why in checkpoint.passed_over.items())


def check_model(model: LlamaConfig, checkpoint: Checkpoint) -> None:
    """Raises ValueError naming the first field in which the checkpoint's model is another."""
    saved, table = checkpoint.state["resolved"]["model"], flag_table(TrainConfig)
    for name, value in asdict(model).items():
        if name == "max_seq_len" and model.pos_emb == "learned":
            name, saved = "seq_length", {"seq_length": saved.get(name)}  # a row of weights for every position
        is_free = name == "max_seq_len" or (name in table and table[name].resume == "free")
        if not is_free and saved.get(name) != value:
            raise ValueError(
                f"--{name} ({value}) must be that of the checkpoint {checkpoint.folder} ({saved.get(name)}); "
                f"set it so, or choose another --run_name"
            )


def differences(cfg: TrainConfig, resolved: dict[str, Any], start: Start) -> list[str]:
    """What differs from the launch that wrote the checkpoint, a line each: flags, world, versions, learning
    rate."""
    assert start.checkpoint is not None
    before, now = start.checkpoint.state["config"], as_dict(cfg)
    changed: dict[str, list[str]] = {"announced": [], "free": [], "refused": []}
    for name, row in flag_table(TrainConfig).items():
        old, new = before.get(row.section, {}).get(name, row.default), now[row.section][name]
        if _plain(old) != _plain(new):
            takes_effect = row.orders_data and (start.fresh_data or cfg.data.dataset_builder)
            changed["announced" if takes_effect else row.resume].append(
                f"--{name} {_shown(old)} -> {_shown(new)}"
            )
    lines = []
    if changed["announced"]:
        lines.append(f"from step {start.checkpoint.step + 1} on: {', '.join(changed['announced'])}")
    if (
        quiet := changed["free"] + changed["refused"]
    ):  # refused ones got past the checks: they come to the same thing
        lines.append(f"changed, without effect on what is trained: {', '.join(quiet)}")
    saved = start.checkpoint.state["resolved"]
    for name in ("world_size", "device", "mixed_precision"):
        if saved.get(name) != resolved[name]:
            lines.append(f"{name}: {saved.get(name)} -> {resolved[name]}")
    versions = saved.get("versions", {})
    for name in sorted({*versions, *resolved["versions"]}):
        if versions.get(name) != resolved["versions"].get(name):
            lines.append(f"version of {name}: {versions.get(name)} -> {resolved['versions'].get(name)}")
    return lines


def schedule_jump(cfg: TrainConfig, num_steps: int, start: Start) -> str:
    """A sentence on how the learning rate jumps at the resume; empty if the schedule is the same."""
    assert start.checkpoint is not None
    state, step = start.checkpoint.state, start.checkpoint.step + 1
    known = {
        name: value
        for name, value in state["config"]["optim"].items()
        if name in OptimConfig.__dataclass_fields__
    }
    before = build_schedule(OptimConfig(**known), state["resolved"]["num_steps"])
    base, peak = known.get("learning_rate", cfg.optim.learning_rate), cfg.optim.learning_rate
    rates = ((before, base), (build_schedule(cfg.optim, num_steps), peak))
    old, new = (f"{schedule(step, base):.3e}" for schedule, base in rates)
    if old == new:
        return ""
    steps = f"num_steps {state['resolved']['num_steps']} -> {num_steps}"
    return f"learning rate of step {step}: {old} -> {new} ({steps})"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
