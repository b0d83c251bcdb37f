"""Flags that other flags leave without effect: a typed one is refused, one from a file gets a note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fms_fsdp.config.flag import non_defaults
from fms_fsdp.config.values import joined
from fms_fsdp.config.whole import TrainConfig


class Idle(NamedTuple):
    """A flag without effect: which flags cause it, and what the flag needs."""

    name: str
    because: tuple[str, ...]
    needs: str


def without_effect(config: TrainConfig, strategy: str | None) -> Iterator[Idle]:
    """The flags whose value does not matter here. `strategy`: the sharding strategy, if it is known."""
    data, evaluation, load = config.data, config.eval, config.checkpoint
    synthetic, evaluates = data.use_dummy_dataset, evaluation.eval_interval or evaluation.eval_at_start
    own_eval = bool(evaluation.eval_data_path)
    shards = "token shards; leave out --use_dummy_dataset"
    rows = (
        (not config.parallel.fsdp_activation_checkpointing,
            "selective_checkpointing", "fsdp_activation_checkpointing",
            "--fsdp_activation_checkpointing=True"),
        (strategy == "none",
            "reduce_dtype", "sharding_strategy", "--sharding_strategy=fsdp, hsdp or ddp"),
        (strategy in ("none", "ddp"),
            "reshard_after_forward fsdp_prefetch", "sharding_strategy", "--sharding_strategy=fsdp or hsdp"),
        (strategy not in (None, "hsdp"),
            "hsdp_shard_size", "sharding_strategy", "--sharding_strategy=hsdp"),
        (synthetic,
            "datasets weights skip_steps max_epochs", "use_dummy_dataset", shards),
        (synthetic and not own_eval,
            "data_path sep_token logical_shards packing on_missing eval_datasets", "use_dummy_dataset",
            shards),
        (not data.dataset_builder,
            "data_kwargs", "dataset_builder", "--dataset_builder"),
        (not (evaluates or evaluation.eval_test),
            "eval_steps", "eval_interval eval_at_start eval_test", "--eval_interval"),
        (not evaluates,
            "eval_data_path eval_datasets", "eval_interval eval_at_start", "--eval_interval"),
        (not load.ckpt_load_path,
            "resuming_dataset", "ckpt_load_path", "--ckpt_load_path"),
        (load.load_model_only,
            "resuming_dataset", "load_model_only", "the optimizer and the step; leave out --load_model_only"),
        (load.checkpoint_schedule,
            "checkpoint_interval", "checkpoint_schedule", "its own steps; leave out --checkpoint_schedule"),
        (config.model.pos_emb == "learned",
            "rope_theta", "pos_emb", "--pos_emb=rope"),
        ("tensorboard" not in config.log.trackers,
            "tensorboard_dir", "trackers", "--trackers=tensorboard"),
        ("wandb" not in config.log.trackers,
            "tracker_entity", "trackers", "--trackers=wandb"),
    )  # fmt: skip
    for is_idle, names, because, needs in rows:
        for name in names.split() if is_idle else ():
            yield Idle(name, tuple(because.split()), needs)


def refuse_idle_flags(config: TrainConfig, origins: Mapping[str, str]) -> None:
    """Raises ValueError for a typed flag that other typed flags or defaults leave without effect."""
    changed = non_defaults(config)
    for idle in without_effect(config, config.parallel.sharding_strategy):
        is_typed = all(origins.get(name, "flag") == "flag" for name in (idle.name, *idle.because))
        if idle.name in changed and is_typed:
            raise ValueError(
                f"--{idle.name} ({joined(changed[idle.name])}) has no effect without {idle.needs}"
            )


def notes(config: TrainConfig, origins: Mapping[str, str], strategy: str) -> Iterator[str]:
    """A line for each flag that was given and has no effect."""
    changed = non_defaults(config)
    for idle in without_effect(config, strategy):
        if idle.name in changed or origins.get(idle.name) == "flag":
            value = f" ({joined(changed[idle.name])})" if idle.name in changed else ""
            yield f"note: --{idle.name}{value} has no effect without {idle.needs}"
