"""Flags that other flags leave without effect: a typed one is refused, one from a file gets a note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fms_fsdp.config.flag import non_defaults
from fms_fsdp.config.precision import PrecisionConfig
from fms_fsdp.config.values import joined
from fms_fsdp.config.whole import TrainConfig
from fms_fsdp.errors import UserError

_WITHOUT_BETAS = ("sgd", "adafactor", "adagrad", "adadelta", "rmsprop", "rprop", "madgrad", "sm3")
_WITHOUT_EPS = ("sgd", "adafactor", "rprop", "sm3")


class Idle(NamedTuple):
    """A flag without effect, the flags that cause this, and what the flag lacks, in words: "without X"."""

    name: str
    because: tuple[str, ...]
    lacks: str


def without_effect(config: TrainConfig, strategy: str | None) -> Iterator[Idle]:
    """The flags whose value does not matter here. `strategy`: the sharding strategy, if it is known."""
    data, evaluation, load = config.data, config.eval, config.checkpoint
    synthetic, shards = data.use_dummy_dataset, "token shards; leave out --use_dummy_dataset"
    evaluates = evaluation.eval_interval or evaluation.eval_at_start
    tests = evaluation.eval_test or evaluation.test_data_path
    rows = (
        (config.parallel.recomputes != "blocks",
            "selective_checkpointing", "recompute fsdp_activation_checkpointing", "--recompute=blocks"),
        (config.parallel.recomputes != "ops",
            "recompute_ops", "recompute fsdp_activation_checkpointing", "--recompute=ops"),
        (strategy == "none",
            "reduce_dtype fsdp_blocks_per_group", "sharding_strategy",
            "--sharding_strategy=fsdp, hsdp or ddp"),
        (strategy in ("none", "ddp"),
            "reshard_after_forward sync_each_micro_step fsdp_prefetch", "sharding_strategy",
            "--sharding_strategy=fsdp or hsdp"),
        (strategy not in (None, "hsdp"), "hsdp_shard_size", "sharding_strategy", "--sharding_strategy=hsdp"),
        (synthetic,
            "datasets weights skip_steps max_epochs", "use_dummy_dataset", shards),
        (synthetic and not evaluation.eval_data_path,
            "data_path sep_token logical_shards packing on_missing eval_datasets", "use_dummy_dataset",
            shards),
        (not data.dataset_builder, "data_kwargs", "dataset_builder", "--dataset_builder"),
        (not (evaluates or tests),
            "eval_steps", "eval_interval eval_at_start eval_test test_data_path", "--eval_interval"),
        (not tests, "test_steps", "eval_test test_data_path", "--eval_test=True or --test_data_path"),
        (not evaluation.sample_interval, "sample_prompts", "sample_interval", "--sample_interval"),
        (not evaluates,
            "eval_data_path eval_datasets", "eval_interval eval_at_start", "--eval_interval"),
        (not load.ckpt_load_path, "resuming_dataset", "ckpt_load_path", "--ckpt_load_path"),
        (load.load_model_only,
            "resuming_dataset", "load_model_only", "beside --load_model_only; leave out one"),
        (load.checkpoint_schedule,
            "checkpoint_interval", "checkpoint_schedule", "beside --checkpoint_schedule; leave out one"),
        (config.optim.lr_schedule != "polynomial", "lr_power", "lr_schedule", "--lr_schedule=polynomial"),
        (config.optim.lr_schedule not in ("step", "exponential"),
            "lr_gamma lr_step_size", "lr_schedule", "--lr_schedule=step or exponential"),
        (config.optim.lr_schedule == "constant",
            "lr_decay constant_steps min_lr min_lr_ratio", "lr_schedule", "a schedule that falls"),
        (config.optim.optimizer in _WITHOUT_BETAS,
            "adam_beta1 adam_beta2", "optimizer", "an optimizer with betas, such as adamw"),
        (config.optim.optimizer in _WITHOUT_EPS, "adam_eps", "optimizer", "an optimizer with an epsilon"),
        (config.optim.optimizer == "rprop",
            "weight_decay decay_norms decay_embeddings", "optimizer", "an optimizer with weight decay"),
        (not config.model.init_from_hf, "init_new_tokens", "init_from_hf", "--init_from_hf"),
        (config.model.init_from_hf,
            "init_std residual_scaled_init", "init_from_hf", "beside --init_from_hf; leave out one"),
        (config.model.pos_emb not in (None, "rope"),
            "rope_theta rope_scaling rope_pct", "pos_emb", "--pos_emb=rope"),
        (not config.model.attn_window, "attn_window_pattern", "attn_window", "--attn_window"),
        ("tensorboard" not in config.log.trackers,
            "tensorboard_dir tensorboard_queue_size", "trackers", "--trackers=tensorboard"),
        ("wandb" not in config.log.trackers, "tracker_entity", "trackers", "--trackers=wandb"),
        *_rows_of_precision(config.precision),
    )  # fmt: skip
    for is_idle, names, because, needs in rows:
        for name in names.split() if is_idle else ():
            lacks = needs if needs.startswith("beside ") else f"without {needs}"
            yield Idle(name, tuple(because.split()), lacks)


def _rows_of_precision(section: PrecisionConfig) -> Iterator[tuple[bool, str, str, str]]:
    names, moving = "precision mixed_precision", "loss_scale_window loss_scale_hysteresis min_loss_scale"
    rounded = section.resolve(section.named or "bf16").is_rounded
    both = f"{names} param_dtype optimizer_state_dtype"
    yield section.named != "fp16", f"loss_scale {moving}", names, "--precision=fp16"
    yield section.loss_scale > 0, moving, "loss_scale", "--loss_scale=0"
    yield section.named != "float8", "float8_scaling", names, "--precision=float8"
    yield not rounded, "stochastic_rounding", both, "--precision=bf16_pure"


def refuse_idle_flags(config: TrainConfig, origins: Mapping[str, str]) -> None:
    """Raises UserError for a typed flag that other typed flags or defaults leave without effect."""
    changed = non_defaults(config)
    for idle in without_effect(config, config.parallel.sharding_strategy):
        is_typed = all(origins.get(name, "flag") == "flag" for name in (idle.name, *idle.because))
        if idle.name in changed and is_typed:
            raise UserError(f"--{idle.name} ({joined(changed[idle.name])}) has no effect {idle.lacks}")


def notes(config: TrainConfig, origins: Mapping[str, str], strategy: str) -> Iterator[str]:
    """A line for each flag that was given and has no effect."""
    changed = non_defaults(config)
    for idle in without_effect(config, strategy):
        if idle.name in changed or origins.get(idle.name) == "flag":
            value = f" ({joined(changed[idle.name])})" if idle.name in changed else ""
            yield f"note: --{idle.name}{value} has no effect {idle.lacks}"
