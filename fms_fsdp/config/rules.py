"""The rules that the flags alone decide: contradictions, and flags that others leave without effect.

They are judged when a `TrainConfig` is made, before torch is imported. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fms_fsdp.config.flag import flag_values, non_defaults
from fms_fsdp.config.rule import Rule
from fms_fsdp.config.values import joined
from fms_fsdp.errors import UserError

if TYPE_CHECKING:
    from fms_fsdp.config.train_config import TrainConfig

ConfigRule = Rule["TrainConfig"]
Holds = Callable[["TrainConfig"], Any]

_WITHOUT_BETAS = ("sgd", "adafactor", "adagrad", "adadelta", "rmsprop", "rprop", "madgrad", "sm3")
_WITHOUT_EPS = ("sgd", "adafactor", "rprop", "sm3")
_DOTTED_NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"
_SHAPE_GIVEN = ", which names the shape"


def _alone(section: str, names: str, remedy: str, text: str = "") -> Iterator[ConfigRule]:
    """Rules that of some flags of a section, in their order, only one is given."""
    flags = names.split()
    for index, name in enumerate(flags):
        for other in flags[:index]:

            def holds(config: TrainConfig, name: str = name, other: str = other) -> bool:
                values = getattr(config, section)
                return not (_is_given(values, name) and _is_given(values, other))

            yield Rule(name, holds, f"must not be given beside --{other}{text}", remedy, other)


def _is_given(section: Any, name: str) -> bool:
    if name == "num_epochs":
        return section.epochs() is not None
    value = getattr(section, name)
    return bool(value) and (name != "model_variant" or value != type(section).model_variant)


def _repeated(config: TrainConfig) -> list[str]:
    names = config.data.datasets
    return sorted({name for name in names if names.count(name) > 1})


def _weights(config: TrainConfig) -> Mapping[str, Any]:
    data = config.data
    names = joined(data.datasets) or "none named"
    return {"num_weights": len(data.weights), "num_datasets": len(data.datasets), "names": names}


def _nearest_power(config: TrainConfig) -> Mapping[str, Any]:
    number = config.data.logical_shards
    below = 1 << (number.bit_length() - 1)
    return {"nearest": below if number - below <= 2 * below - number else 2 * below}


def _implied(name: str) -> ConfigRule:
    """The rule that a flag says what the sharding strategy or a pipeline decides."""

    def holds(config: TrainConfig) -> bool:
        value = config.parallel.implied().get(name)
        return value is None or getattr(config.parallel, name) in (None, value)

    def facts(config: TrainConfig) -> Mapping[str, Any]:
        section = config.parallel
        by = f"--sharding_strategy ({section.sharding_strategy})"
        return {
            "by": f"--pp_size ({section.pp_size})" if section.pp_size > 1 else by,
            "implied": section.implied().get(name),
        }

    text = "must not contradict {by}, for which the value is {implied}"
    return Rule(name, holds, text, "leave one flag out", "sharding_strategy pp_size", facts)


def _alone_on_one_process(axis: str) -> ConfigRule:
    """The rule that an axis of several ranks has a strategy for several processes."""

    def holds(config: TrainConfig) -> bool:
        section = config.parallel
        return (section.sharding_strategy or "").lower() != "none" or getattr(section, axis) <= 1

    text = "needs several processes, and --sharding_strategy=none is for one"
    return Rule(axis, holds, text, "use fsdp, hsdp or ddp", "sharding_strategy")


def _is_min_lr_right(config: TrainConfig) -> bool:
    optim = config.optim
    return optim.min_lr is None or (optim.min_lr_ratio == 0.1 and optim.min_lr <= optim.learning_rate)


def _is_export_due(config: TrainConfig) -> bool:
    section = config.checkpoint
    if section.checkpoint_schedule or not section.checkpoint_interval:
        return not section.export_interval
    return section.export_interval % section.checkpoint_interval == 0


def _no_shards(name: str, holds: Holds, other: str) -> ConfigRule:
    text = f"cannot be followed with --{other}, whose data are not token shards"
    return Rule(name, holds, text, "leave one flag out", other)


def _deletes(name: str) -> ConfigRule:
    """The rule that a flag which keeps checkpoints needs others to be deleted."""

    def holds(config: TrainConfig) -> object:
        return config.checkpoint.keep_last_n or not getattr(config.checkpoint, name)

    text = "has no effect where --keep_last_n (0) keeps every checkpoint"
    return Rule(name, holds, text, "set that", "keep_last_n")


_ROUNDED = "must not contradict --precision=bf16_pure"

CONTRADICTIONS: tuple[ConfigRule, ...] = (
    *_alone("model", "init_from_hf hf_config model_variant", "leave one flag out", _SHAPE_GIVEN),
    Rule("datasets", lambda c: not _repeated(c), "must name a source once; repeated: {repeated}",
        facts=lambda c: {"repeated": ", ".join(_repeated(c))}),
    Rule("weights", lambda c: not c.data.weights or len(c.data.weights) == len(c.data.datasets),
        "must give one number per dataset: {num_weights} weights for {num_datasets} datasets ({names})",
        "name both in the same order", "datasets", _weights),
    Rule("weights", lambda c: all(weight > 0 for weight in c.data.weights),
        "must be positive", "leave a dataset out to give it no tokens", "datasets"),
    Rule("logical_shards", lambda c: not c.data.logical_shards & (c.data.logical_shards - 1),
        "must be a power of two; nearest: {nearest}", facts=_nearest_power),
    Rule("dataset_builder",
        lambda c: not c.data.dataset_builder or re.fullmatch(_DOTTED_NAME, c.data.dataset_builder),
        "must be importable as module:function"),
    Rule("data_kwargs", lambda c: all("=" in item for item in c.data.data_kwargs),
        "must be written key=value", "several are joined by commas",
        facts=lambda c: {"data_kwargs": next((item for item in c.data.data_kwargs if "=" not in item), "")}),
    Rule("recompute",
        lambda c: c.parallel.fsdp_activation_checkpointing is None or c.parallel.recompute
        in (None, "blocks" if c.parallel.fsdp_activation_checkpointing else "none"),
        "must not contradict --fsdp_activation_checkpointing ({fsdp_activation_checkpointing}), which is "
        "--recompute={other}", "leave that out", "fsdp_activation_checkpointing",
        lambda c: {"other": "blocks" if c.parallel.fsdp_activation_checkpointing else "none"}),
    Rule("fsdp_blocks_per_group", lambda c: c.parallel.blocks_per_group % c.parallel.segment == 0,
        "must be a multiple of --recompute_segment ({recompute_segment})", "leave one flag out",
        "recompute_segment"),
    Rule("recompute_segment", lambda c: c.parallel.recompute_segment == 1 or not c.model.model_builder,
        "is unknown to a model of your own", "leave one flag out", "model_builder"),
    _implied("reshard_after_forward"),
    _implied("sync_each_micro_step"),
    *map(_alone_on_one_process, ("tp_size", "cp_size", "pp_size")),
    Rule("sequence_parallel",
        lambda c: c.parallel.sequence_parallel is not True or c.parallel.tp_size > 1,
        "needs --tp_size, whose ranks hold the parts of the sequence", "add --tp_size=2", "tp_size"),
    Rule("async_tp", lambda c: not c.parallel.async_tp or c.parallel.tp_size > 1,
        "needs --tp_size, whose messages are overlapped", "add --tp_size=2", "tp_size"),
    *_alone("training", "num_steps num_tokens num_samples num_epochs", "choose one flag"),
    Rule("batch_size",
        lambda c: c.training.batch_size != "auto"
        or None in (c.training.grad_accum_steps, c.training.global_batch_size),
        "has nothing to choose beside --grad_accum_steps ({grad_accum_steps}) and --global_batch_size "
        "({global_batch_size})", "leave one flag out", "grad_accum_steps global_batch_size"),
    Rule("precision",
        lambda c: c.precision.alias is None or c.precision.precision in (None, c.precision.alias),
        "must not contradict --mixed_precision ({mixed_precision}), which is --precision={alias}",
        "leave that out", "mixed_precision", lambda c: {"alias": c.precision.alias}),
    Rule("param_dtype", lambda c: (c.precision.named, c.precision.param_dtype) != ("bf16_pure", "fp32"),
        _ROUNDED, "leave the flag out, or use --precision=bf16", "precision"),
    Rule("optimizer_state_dtype",
        lambda c: (c.precision.named, c.precision.optimizer_state_dtype) != ("bf16_pure", "fp32"),
        _ROUNDED, "leave the flag out, or use --precision=bf16", "precision"),
    Rule("param_dtype",
        lambda c: c.precision.param_dtype != "bf16"
        or c.precision.named not in ("fp32", "fp16", "bf16_mixed_sr"),
        "must not be given with --precision={named}", "use --precision=bf16", "precision",
        lambda c: {"named": c.precision.named}),
    Rule("grad_accum_dtype",
        lambda c: c.precision.grad_accum_dtype != "bf16" or c.precision.weights == "bf16",
        "needs weights in bf16", "add --param_dtype=bf16", "param_dtype"),
    Rule("warmup", lambda c: c.optim.warmup is None or c.optim.warmup_steps is None,
        "must not be given beside --warmup_steps ({warmup_steps})", "leave one out", "warmup_steps"),
    Rule("min_lr", _is_min_lr_right,
        "must not exceed --learning_rate ({learning_rate}), nor be given beside --min_lr_ratio",
        "lower the rate, or leave one flag out", "learning_rate min_lr_ratio"),
    Rule("lr_schedule",
        lambda c: c.optim.lr_schedule not in ("step", "exponential") or c.optim.lr_step_size,
        "needs --lr_step_size", "add the flag, such as --lr_step_size=0.3", "lr_step_size"),
    *map(_deletes, ("keep_every", "keep_best", "keep_steps", "keep_ranges")),
    Rule("resume_step", lambda c: c.checkpoint.resume_step is None or c.checkpoint.resume != "never",
        "needs a checkpoint", "leave out --resume=never", "resume"),
    Rule("warmup_steps",
        lambda c: c.training.num_steps is None or (c.optim.warmup_steps or 0) <= c.training.num_steps,
        "must not exceed --num_steps ({num_steps})", "raise that", "num_steps"),
    _no_shards("num_epochs",
        lambda c: not (c.training.epochs() and c.data.dataset_builder), "dataset_builder"),
    _no_shards("rampup_batch_size",
        lambda c: not (c.training.rampup_batch_size and c.data.dataset_builder), "dataset_builder"),
    _no_shards("num_epochs",
        lambda c: not (c.training.epochs() and c.data.use_dummy_dataset), "use_dummy_dataset"),
    Rule("keep_best",
        lambda c: not c.checkpoint.keep_best or not c.checkpoint.ranks_evaluations
        or c.eval.eval_interval or c.eval.eval_epochs,
        "compares validation losses", "set --eval_interval", "eval_interval keep_best_metric"),
    _no_shards("eval_epochs",
        lambda c: not (c.eval.eval_epochs and c.data.dataset_builder), "dataset_builder"),
    _no_shards("eval_epochs",
        lambda c: not (c.eval.eval_epochs and c.data.use_dummy_dataset), "use_dummy_dataset"),
    Rule("init_from_hf", lambda c: not (c.checkpoint.ckpt_load_path and c.model.init_from_hf),
        "must not be given beside --ckpt_load_path", "leave one flag out", "ckpt_load_path"),
    Rule("export_interval", _is_export_due,
        "must be a multiple of --checkpoint_interval ({checkpoint_interval}{scheduled})",
        "change one flag",
        "checkpoint_interval checkpoint_schedule",
        lambda c: {"scheduled": ", with a --checkpoint_schedule" * bool(c.checkpoint.checkpoint_schedule)}),
    Rule("trackers", lambda c: "none" not in c.log.trackers or len(c.log.trackers) == 1,
        "must not name others beside none", "leave one out"),
    Rule("load_model_only", lambda c: not c.checkpoint.load_model_only or c.checkpoint.ckpt_load_path,
        "needs the weights' place", "add --ckpt_load_path=FOLDER", "ckpt_load_path"),
)  # fmt: skip


def _idle(names: str, beside: str, matters: Holds, lacks: str, remedy: str = "") -> Iterator[ConfigRule]:
    """For each of some flags the rule that the flag matters; other flags decide whether."""
    text = f"has no effect {'' if lacks.startswith('beside ') else 'without '}{lacks}"
    for name in names.split():
        yield Rule(name, matters, text, remedy, beside, is_note=True)


def _evaluates(config: TrainConfig) -> object:
    return config.eval.is_on


def _tests(config: TrainConfig) -> object:
    return config.eval.eval_test or config.eval.test_data_path


def _rounds(config: TrainConfig) -> bool:
    return config.precision.resolve(config.precision.named or "bf16").is_rounded


_NAMES, _SCALE = "precision mixed_precision", "loss_scale_window loss_scale_hysteresis min_loss_scale"
_ONE_OUT, _NO_DUMMY = "leave out one", "leave out --use_dummy_dataset"

# A sharding strategy that is not given is None here, until the machine is known.
IDLE: tuple[ConfigRule, ...] = (
    *_idle("selective_checkpointing recompute_segment", "recompute fsdp_activation_checkpointing",
        lambda c: c.parallel.recomputes == "blocks", "--recompute=blocks"),
    *_idle("recompute_ops", "recompute fsdp_activation_checkpointing",
        lambda c: c.parallel.recomputes in ("ops", "auto"), "--recompute=ops"),
    *_idle("reduce_dtype fsdp_blocks_per_group", "sharding_strategy",
        lambda c: c.parallel.sharding_strategy != "none", "--sharding_strategy=fsdp, hsdp or ddp"),
    *_idle("reshard_after_forward sync_each_micro_step fsdp_prefetch", "sharding_strategy",
        lambda c: c.parallel.sharding_strategy not in ("none", "ddp"), "--sharding_strategy=fsdp or hsdp"),
    *_idle("sequence_parallel", "tp_size", lambda c: c.parallel.tp_size > 1, "--tp_size"),
    *_idle("cp_method", "cp_size", lambda c: c.parallel.cp_size > 1, "--cp_size"),
    *_idle("pp_schedule pp_virtual_stages pp_micro_batch_size", "pp_size",
        lambda c: c.parallel.pp_size > 1, "--pp_size"),
    *_idle("pp_virtual_stages", "pp_schedule",
        lambda c: c.parallel.pp_schedule == "interleaved", "--pp_schedule=interleaved"),
    *_idle("hsdp_shard_size", "sharding_strategy",
        lambda c: c.parallel.sharding_strategy in (None, "hsdp"), "--sharding_strategy=hsdp"),
    *_idle("datasets weights skip_steps max_epochs", "use_dummy_dataset",
        lambda c: not c.data.use_dummy_dataset, "token shards", _NO_DUMMY),
    *_idle("data_path sep_token logical_shards packing loss_on on_missing eval_datasets", "use_dummy_dataset",
        lambda c: not c.data.use_dummy_dataset or c.eval.eval_data_path, "token shards", _NO_DUMMY),
    *_idle("data_kwargs", "dataset_builder", lambda c: c.data.dataset_builder, "--dataset_builder"),
    *_idle("eval_steps", "eval_interval eval_epochs eval_at_start eval_test test_data_path",
        lambda c: _evaluates(c) or _tests(c), "--eval_interval"),
    *_idle("test_steps", "eval_test test_data_path", _tests, "--eval_test=True or --test_data_path"),
    *_idle("sample_prompts", "sample_interval", lambda c: c.eval.sample_interval, "--sample_interval"),
    *_idle("eval_data_path eval_datasets", "eval_interval eval_epochs eval_at_start",
        _evaluates, "--eval_interval"),
    *_idle("resuming_dataset", "ckpt_load_path", lambda c: c.checkpoint.ckpt_load_path, "--ckpt_load_path"),
    *_idle("resuming_dataset", "load_model_only", lambda c: not c.checkpoint.load_model_only,
        "beside --load_model_only", _ONE_OUT),
    *_idle("checkpoint_interval", "checkpoint_schedule", lambda c: not c.checkpoint.checkpoint_schedule,
        "beside --checkpoint_schedule", _ONE_OUT),
    *_idle("keep_best_metric keep_best_mode", "keep_best",
        lambda c: c.checkpoint.keep_best, "--keep_best"),
    *_idle("lr_power", "lr_schedule",
        lambda c: c.optim.lr_schedule == "polynomial", "--lr_schedule=polynomial"),
    *_idle("lr_gamma lr_step_size", "lr_schedule",
        lambda c: c.optim.lr_schedule in ("step", "exponential"), "--lr_schedule=step or exponential"),
    *_idle("lr_decay constant_steps min_lr min_lr_ratio", "lr_schedule",
        lambda c: c.optim.lr_schedule != "constant", "a schedule that falls"),
    *_idle("adam_beta1 adam_beta2", "optimizer",
        lambda c: c.optim.optimizer not in _WITHOUT_BETAS, "an optimizer with betas, such as adamw"),
    *_idle("adam_eps", "optimizer",
        lambda c: c.optim.optimizer not in _WITHOUT_EPS, "an optimizer with an epsilon"),
    *_idle("weight_decay decay_norms decay_embeddings", "optimizer",
        lambda c: c.optim.optimizer != "rprop", "an optimizer with weight decay"),
    *_idle("rampup_round rampup_micro_batch", "rampup_batch_size",
        lambda c: c.training.rampup_batch_size, "--rampup_batch_size"),
    *_idle("init_new_tokens", "init_from_hf", lambda c: c.model.init_from_hf, "--init_from_hf"),
    *_idle("init_std residual_scaled_init", "init_from_hf",
        lambda c: not c.model.init_from_hf, "beside --init_from_hf", _ONE_OUT),
    *_idle("teacher_weight teacher_temperature", "teacher_path",
        lambda c: c.training.teacher_path, "--teacher_path"),
    *_idle("rope_theta rope_scaling rope_pct", "pos_emb",
        lambda c: c.model.pos_emb in (None, "rope"), "--pos_emb=rope"),
    *_idle("attn_window_pattern", "attn_window", lambda c: c.model.attn_window, "--attn_window"),
    *_idle("tensorboard_dir tensorboard_queue_size", "trackers",
        lambda c: "tensorboard" in c.log.trackers, "--trackers=tensorboard"),
    *_idle("tracker_entity", "trackers", lambda c: "wandb" in c.log.trackers, "--trackers=wandb"),
    *_idle(f"loss_scale {_SCALE}", _NAMES, lambda c: c.precision.named == "fp16", "--precision=fp16"),
    *_idle(_SCALE, "loss_scale", lambda c: c.precision.loss_scale <= 0, "--loss_scale=0"),
    *_idle("float8_scaling", _NAMES, lambda c: c.precision.named == "float8", "--precision=float8"),
    *_idle("stochastic_rounding", f"{_NAMES} param_dtype optimizer_state_dtype", _rounds,
        "--precision=bf16_pure"),
)  # fmt: skip


def refuse_idle_flags(config: TrainConfig, origins: Mapping[str, str]) -> None:
    """Raises UserError for a typed flag that other typed flags or defaults leave without effect."""
    changed = non_defaults(config)
    for rule in IDLE:
        names = (rule.flag, *rule.beside.split())
        is_typed = all(origins.get(name, "flag") == "flag" for name in names)
        if rule.flag in changed and is_typed and not rule.holds(config):
            raise UserError(rule.broken_by(config, flag_values(config)))


def notes(config: TrainConfig, origins: Mapping[str, str], strategy: str) -> Iterator[str]:
    """A line for each flag that was given and has no effect; `strategy`: the one that the machine decides."""
    changed = non_defaults(config)
    told = replace(config, parallel=replace(config.parallel, sharding_strategy=strategy))
    for rule in IDLE:
        if (rule.flag in changed or origins.get(rule.flag) == "flag") and not rule.holds(told):
            value = f" ({joined(changed[rule.flag])})" if rule.flag in changed else ""
            yield f"note: --{rule.flag}{value} {rule.template}"
