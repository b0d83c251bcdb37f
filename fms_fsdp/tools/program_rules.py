"""What several keys of a program mean together. The tables of other_programs.toml have the single keys.

`combine` first calls the function of the program, then those for all programs, which make flags of
the flags that begin with `_`: these exist only in a translation.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from fms_fsdp.config.batch_plan import BatchPlan
from fms_fsdp.config.values import counted, parse_number
from fms_fsdp.tools.command_reader import count_slots
from fms_fsdp.tools.translation import BASE, SHAPE, Translation, number

_NEOX_EPSILONS = {
    "layernorm": "layernorm_epsilon",
    "rmsnorm": "rms_norm_epsilon",
    "scalenorm": "scalenorm_epsilon",
}
_BATCH = {"batch_size", "grad_accum_steps", "global_batch_size", "num_devices"}
_BATCH |= {"tp_size", "cp_size", "pp_size"}
_PATHS = ("_prefixes", "_tokens", "_dataset")  # of the data: for convert, convert and prepare


def combine(found: Translation) -> None:
    """Makes flags of keys that act together."""
    if any(found.get(name) for name in ("num_steps", "num_samples", "num_tokens")):
        found.flags.pop("num_epochs", None)
    _RULES[found.program.name](found)
    _combine_model(found)
    _combine_batch(found)
    _combine_schedule(found)
    _combine_data(found)
    _combine_recomputation(found)
    if found.num_devices:
        _, (key, *_) = found.flags["_num_devices"]
        place = ", as WORLD_SIZE says" if key.place == "WORLD_SIZE" else ""
        found.commands.append(f"for {counted(found.num_devices, 'device')}{place}")
    if found.get("_load") and found.get("_load") == found.get("ckpt_save_path"):
        found.assign("resume", "auto", "_load")  # a run resumes from the folder of its checkpoints
    elif found.get("_load"):
        found.drop("_load", "changes")
    found.find_missing()
    for name in [name for name in found.flags if name.startswith("_") and name != "_num_devices"]:
        del found.flags[name]


# ---- One function per program


def _upstream(found: Translation) -> None:
    steps = found.get("num_steps", 0)
    if steps:
        warmup = min(2000, steps // 20)
        found.assign("warmup", str(warmup), "num_steps")
        progress = (steps / 2 - warmup) / (steps - warmup)
        ours = 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
        found.notes.append(
            "its cosine starts at step 0, this one after the warmup: halfway 0.550 and "
            f"{ours:.3f} of the peak"
        )
    _set_upstream_start(found)
    if found.get("use_dummy_dataset"):
        for name in ("datasets", "weights", "sep_token"):
            found.flags.pop(name, None)


def _set_upstream_start(found: Translation) -> None:
    """Sets the start from another run, whose steps upstream does not count.

    With both paths equal a run resumes from its own checkpoints, which needs no flag here.
    """
    if not found.get("ckpt_load_path"):
        return
    if found.get("ckpt_load_path").rstrip("/") == found.get("ckpt_save_path", "").rstrip("/"):
        found.drop("ckpt_load_path", "no effect")
        return
    found.assign("load_model_only", True, "ckpt_load_path")
    found.notes.append("from ckpt_load_path it loads the optimizer too, this one the weights alone")
    if found.get("resuming_dataset"):
        found.drop("resuming_dataset", "changes")


def _neox(found: Translation) -> None:
    is_llama = found.given("mlp_type") == "llama"
    activation = found.given("activation") or "gelu"
    if is_llama and activation == "silu":
        found.assign("activation", "swiglu", "mlp_type", "activation")
    elif is_llama:
        found.mark("changes", "mlp_type")
    elif activation == "silu":  # without a gate
        found.mark("changes", "activation")
    _set_neox_width(found, is_llama=is_llama)
    _set_neox_biases(found, is_llama=is_llama)
    _set_neox_epsilon(found)
    if found.get("_l2") and found.get("optimizer") == "adamw":
        found.assign("optimizer", "adam", "_l2", "optimizer")
    names = ("hostfile", "include", "exclude", "num_nodes", "num_gpus")
    slots = count_slots({name: found.given(name) for name in names})
    if found.num_devices:
        found.mark("no effect", *names)
    elif slots.isdigit():
        found.assign("_num_devices", int(slots), *names)
    elif slots:
        found.mark("undecided", "hostfile")

    patterns = set(re.findall("[a-z_]+", found.given("attention_config")))
    is_full_attention = patterns <= {"global", "flash"}
    found.mark("default" if is_full_attention else "changes", "attention_config")
    if found.given("lr_decay_style") == "cosine":
        decay = found.get("lr_decay")
        if decay and number(decay) < found.get("num_steps", 0):
            found.notes.append("its cosine rises again after lr_decay_iters; here the rate stays")
    paths = found.get("_prefixes")
    if "data_path" in found.keys and "_split" not in found.flags:
        found.assign("_split", "969,30,1")
    elif isinstance(paths, list) and not found.get("_data_weights"):
        found.assign("_data_weights", [1] * len(paths), "_prefixes")


def _set_neox_epsilon(found: Translation) -> None:
    """Sets the epsilon of the norm that is used; the keys of the others have no effect."""
    for norm, key in _NEOX_EPSILONS.items():
        if norm == found.get("norm"):
            default = 1e-5 if norm == "layernorm" else 1e-8
            found.assign("norm_eps", found.number_of(key, default), key)
        else:
            found.mark("no effect", key)


def _set_neox_width(found: Translation, *, is_llama: bool) -> None:
    """Sets the width of the feed-forward layer (ParallelMLP, and LLaMAParallelMLP before 2024-09)."""
    hidden = found.get("hidden_size")
    given = found.given("intermediate_size")
    if not hidden and not given:
        return
    multiple = found.number_of("mlp_multiple_of") or 1
    width = found.number_of("intermediate_size", 0) or 4 * hidden
    if is_llama:
        multiple = 256
        width = int(width * 2 / 3)
        if given:
            found.mark("changes", "intermediate_size")
    elif found.get("activation") == "swiglu":
        # Twice the width, whose halves are multiplied, has two thirds of the parameters.
        width = int(width * 2 / 3) // 2
    width = math.ceil(width / multiple) * multiple
    found.assign("ffn_hidden_size", width, "hidden_size", "intermediate_size", "mlp_multiple_of")


def _set_neox_biases(found: Translation, *, is_llama: bool) -> None:
    in_attention = found.given("use_bias_in_attn_linear") != "false"
    in_mlp = not is_llama and found.given("use_bias_in_mlp") != "false"
    names = ("use_bias_in_attn_linear", "use_bias_in_mlp", "mlp_type")
    if in_attention == in_mlp:
        found.assign("bias", in_mlp, *names)
    else:  # biases in one of the two have no flag
        found.assign("bias", in_mlp)
        found.mark("changes", *names)
    if found.given("use_bias_in_norms") == "false" and found.get("norm") != "rmsnorm":
        found.mark("changes", "use_bias_in_norms")


def _megatron(found: Translation) -> None:
    if found.given("group_query_attention") == "true":
        groups = found.number_of("num_query_groups", 1)
        found.assign("num_kv_heads", groups, "num_query_groups", "group_query_attention")
    else:  # without the flag the number has no effect
        found.mark("no effect", "num_query_groups")
    if found.given("pad_vocab_size_to"):
        found.flags.pop("_vocab_multiple", None)
        rows = found.number_of("pad_vocab_size_to")
        found.assign("vocab_multiple_of", rows, "pad_vocab_size_to")
    _set_document_mask(found)
    hidden = found.get("hidden_size")
    if hidden and not found.get("ffn_hidden_size"):
        width = 4 * hidden
        if found.get("activation") == "swiglu":
            width = int(width * 2 / 3) // 64 * 64
        found.assign("ffn_hidden_size", width, "hidden_size")
    if found.given("eval_iters") == "0":
        found.assign("eval_interval", 0, "eval_iters", "eval_interval")
    ramp = found.get("rampup_batch_size")
    if ramp and ramp[0] >= found.get("global_batch_size", 2**62):  # it never rises
        found.drop("rampup_batch_size", "no effect")
    whole = (str(found.get("num_steps")), f"{found.get('num_samples')}samples")
    if found.get("lr_schedule") == "inverse_sqrt" and found.get("lr_decay", whole[0]) not in whole:
        found.drop("lr_decay", "changes")  # its rate falls to the minimum there
    if found.get("num_samples"):
        _keep_full_steps(found)


def _set_document_mask(found: Translation) -> None:
    """Sets `document_mask`, which both masks attention and restarts positions.

    Only learned positions read the position ids; rope and alibi depend on distances alone.
    """
    masks = found.given("reset_attention_mask") == "true"
    restarts = found.given("reset_position_ids") == "true"
    if masks == restarts:
        return
    if found.get("pos_emb") == "learned":
        found.drop("document_mask", "changes")
    elif restarts:
        found.drop("document_mask", "no effect")


def _keep_full_steps(found: Translation) -> None:
    """Rounds the samples down to full steps. Of tokens and samples the run ends with the earlier."""
    samples = found.get("num_samples", 0)
    tokens = found.get("num_tokens", 0)
    if tokens:
        is_later = tokens <= samples * found.get("seq_length", 1)
        found.drop("num_samples" if is_later else "num_tokens", "no effect")
    rows = sequences_per_step(found)
    ramp = tuple(found.get("rampup_batch_size", ()))
    if not rows or not found.get("num_samples") or len(ramp) not in (0, 3):
        return
    batch = BatchPlan(rows, 1, 1, ramp, True)
    steps = batch.steps_for(samples)
    is_in_ramp = bool(ramp) and batch.sequences_in(steps - 1) <= ramp[2]
    if batch.sequences_in(steps) > samples and steps > 1 and not is_in_ramp:
        steps -= 1
    if not found.get("lr_decay"):  # the decay ends with the samples that are given
        found.assign("lr_decay", f"{samples}samples", "num_samples")
    found.assign("num_samples", batch.sequences_in(steps), "num_samples")


def sequences_per_step(found: Translation) -> int:
    """Returns the global batch; 0 if it is not known."""
    doubtful = found.doubtful
    if found.get("global_batch_size") and "global_batch_size" not in doubtful:
        return int(found.get("global_batch_size"))
    ranks, remainder = divmod(found.num_devices, _other_axes(found))
    if remainder or doubtful & _BATCH:
        return 0
    return int(ranks * found.get("batch_size", 0) * found.get("grad_accum_steps", 1))


def _nxd(found: Translation) -> None:
    names = ("trainer.devices", "trainer.num_nodes")
    if found.num_devices:
        found.mark("no effect", *names)
    elif found.given("trainer.devices") and "num_devices" not in found.doubtful:
        devices = found.number_of("trainer.devices") * found.number_of("trainer.num_nodes", 1)
        found.assign("_num_devices", devices, *names)
    _set_nxd_decay(found)
    if found.get("lr_schedule") in ("square", "annealing") and found.get("min_lr"):
        # Its SquareAnnealing is cut off at the minimum; WarmupAnnealing depends on NeMo's version.
        found.drop("lr_schedule", "changes")


def _set_nxd_decay(found: Translation) -> None:
    """Sets the weight decay and its parameters, which differ by the source of the model.

    Models of Hugging Face have groups of parameters with a weight decay of 0.01, and since 1.5
    `do_layer_norm_weight_decay` excludes the norms. Source: get_param_groups_by_weight_decay.
    """
    name = "model.do_layer_norm_weight_decay"
    if found.given("model_source") != "hf":
        is_adamw = found.given("model.optim.name").startswith("adamw")
        if is_adamw and "model.optim.weight_decay" not in found.keys:
            found.assign("weight_decay", 0.01)  # torch's
        return
    if found.number_of("model.optim.weight_decay", 0.01) != 0.01:
        found.notes.append("its Hugging Face models decay by 0.01, whatever weight_decay says")
    if "weight_decay" in found.flags:
        found.flags["weight_decay"] = 0.01, ()
        found.mark("no effect", "model.optim.weight_decay")
    if "decay_norms" not in found.doubtful:
        excludes_norms = found.given(name) == "true"
        found.assign("decay_norms", not excludes_norms, name)
        if excludes_norms:
            found.notes.append(f"{name} excludes the norms since 1.5; before, they decay")


def _torchtitan(found: Translation) -> None:
    older = [name for name in found.program.table["older"].split() if name in found.keys]
    if older:
        found.notes.append(
            f"{older[0]} is a key of torchtitan 0.1, whose Llama 3 has unscaled RoPE"
        )
    elif str(found.get("model_variant", "")).startswith("llama3_"):  # scaled since 0.2
        variant = found.get("model_variant").replace("llama3_", "llama3.1_")
        found.assign("model_variant", variant, "model_variant")
    if older and found.get("model_variant") == "llama3.1_405b":
        found.assign("rope_scaling", "linear:1", "model_variant")
    elif not older and found.given("model.flavor") == "debugmodel":
        found.assign("rope_scaling", "llama3:8", "model.flavor")

    shards = found.number_of("parallelism.data_parallel_shard_degree", -1)
    replicas = found.number_of("parallelism.data_parallel_replicate_degree", 1)
    names = ("parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree")
    if shards == 1:
        found.assign("sharding_strategy", "ddp", *names)
    elif replicas > 1:
        found.assign("sharding_strategy", "hsdp", *names)
        if shards > 1:
            found.assign("hsdp_shard_size", shards, *names)
    else:
        found.assign("sharding_strategy", "fsdp", *names)
    if shards > 0 and not found.num_devices:
        found.assign("_num_devices", replicas * shards * _other_axes(found), *names)

    if found.get("pp_size", 1) > 1:
        size = found.number_of("parallelism.pipeline_parallel_microbatch_size", 1)
        found.assign("pp_micro_batch_size", size, "parallelism.pipeline_parallel_microbatch_size")
    else:
        found.mark("no effect", "parallelism.pipeline_parallel_microbatch_size")

    if found.get("num_steps") and found.get("warmup"):
        _set_titan_schedule(found)

    mode = found.given("activation_checkpoint.mode") or "selective"
    option = found.given("activation_checkpoint.selective_ac_option") or "2"
    names = ("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option")
    if mode == "selective" and option == "op":
        found.assign("recompute", "ops", *names)
    elif mode in ("full", "selective"):
        found.assign("recompute", "blocks", names[0])
        if mode == "selective":
            found.assign("selective_checkpointing", f"every:{option}", names[1])


def _set_titan_schedule(found: Translation) -> None:
    steps = found.get("num_steps", 0)
    warmup = min(number(found.get("warmup")), steps)
    found.assign("warmup", str(warmup), "warmup")
    ratio = found.given("lr_scheduler.decay_ratio")
    shape = found.given("lr_scheduler.decay_type") or "linear"
    if ratio and shape == "linear":
        decay = min(round(steps * found.number_of("lr_scheduler.decay_ratio")), steps - warmup)
        found.assign("lr_schedule", "wsd", "lr_scheduler.decay_ratio", "lr_scheduler.decay_type")
        found.assign("lr_decay", str(decay), "lr_scheduler.decay_ratio")
    elif ratio or shape not in ("linear", "cosine"):
        found.mark("changes", "lr_scheduler.decay_ratio", "lr_scheduler.decay_type")
    else:
        found.assign("lr_schedule", shape, "lr_scheduler.decay_type")


_RULES: dict[str, Callable[[Translation], None]] = {
    "fms": _upstream,
    "neox": _neox,
    "megatron": _megatron,
    "nxd": _nxd,
    "torchtitan": _torchtitan,
}


# ---- For all programs


def _combine_model(found: Translation) -> None:
    get = found.get
    put = found.assign
    if get("_half") and "precision" in found.flags:
        _, keys_of_precision = found.flags["precision"]
        precision = get("precision") if keys_of_precision else get("_half")
        put("precision", precision, "precision", "_half")
    if get("_gelu") and get("activation") == "gelu_tanh":
        put("activation", get("_gelu"), "_gelu")
    if get("_tokenizer") and "vocab_size" in found.flags:
        keys_of_size = found.flags["vocab_size"][1]
        if not keys_of_size:
            del found.flags["vocab_size"]
    if not get("vocab_size") and not get("hf_config"):
        has_variant = get("model_variant", BASE) != BASE
        found.has_vocabulary = has_variant and not get("_tokenizer")
    multiple = get("_vocab_multiple")
    if multiple:
        rows = multiple * found.get("tp_size", 1)
        put("vocab_multiple_of", rows, "_vocab_multiple", "tp_size")
    has_shape = bool(set(SHAPE.split()) & found.flags.keys())
    if has_shape and not get("hf_config") and not get("model_variant"):
        put("model_variant", BASE)


def _combine_batch(found: Translation) -> None:
    """A pipeline here divides the batch of a rank; elsewhere a rank's steps are its micro-batches."""
    get = found.get
    put = found.assign
    if found.get("pp_size", 1) <= 1 or "pp_micro_batch_size" in found.flags:
        return
    put("pp_micro_batch_size", get("batch_size", 1), "batch_size")
    micro = found.flags.pop("batch_size", None)
    if get("global_batch_size"):
        put("grad_accum_steps", 1, "pp_micro_batch_size")
    elif micro is not None:
        rows = micro[0] * found.get("grad_accum_steps", 1)
        put("batch_size", rows, "pp_micro_batch_size", "grad_accum_steps")
        put("grad_accum_steps", 1, "grad_accum_steps")


def _combine_schedule(found: Translation) -> None:
    end = ""
    if found.get("num_steps"):
        end = str(found.get("num_steps", 0))
    elif found.get("num_samples"):
        end = f"{found.get('num_samples', 0)}samples"
    fraction = found.get("_warmup_fraction")
    if fraction is not None:  # of the decay
        length = str(found.get("lr_decay") or end)
        unit = "samples" if length.endswith("samples") else ""
        steps = length.removesuffix("samples")
        if steps:
            warmup = f"{round(fraction * number(steps))}{unit}"
        else:
            warmup = str(fraction)
        found.assign("warmup", warmup, "_warmup_fraction")
    is_whole_run = bool(end) and str(found.get("lr_decay")) == end
    if is_whole_run and found.get("lr_schedule") != "wsd":
        found.assign("lr_decay", None, "lr_decay")


def _combine_recomputation(found: Translation) -> None:
    layers = found.get("_recompute_layers")
    if layers and found.get("recompute") == "blocks":
        if found.get("_recompute_method") == "block":
            total = found.get("num_layers", layers)
            share = f"{min(layers * found.get('pp_size', 1), total)}/{total}"
            found.assign("selective_checkpointing", share, "_recompute_layers", "_recompute_method")
        else:
            found.assign("recompute_segment", layers, "_recompute_layers", "_recompute_method")


def _other_axes(found: Translation) -> int:
    """Returns the number of devices that read the same sequences."""
    return math.prod(max(1, found.get(f"{axis}_size", 1)) for axis in ("tp", "cp", "pp"))


def _combine_data(found: Translation) -> None:
    """Names the sources of the data, and adds the command that makes their shards."""
    kind = next((each for each in _PATHS if found.get(each)), "")
    if not kind:
        return
    paths = found.get(kind)
    if not isinstance(paths, list):
        paths = str(paths).split(",")
    paths = list(map(str, paths))
    weights = found.get("_data_weights")
    if len(paths) > 1 and parse_number(paths[0]) is not None:  # 0.3 a 0.7 b
        weights = paths[::2]
        paths = paths[1::2]
    names = [re.sub("(_text)?(_document)?$", "", Path(path).name) or "data" for path in paths]
    for i, name in enumerate(list(names)):
        if names.count(name) > 1:
            names[i] = f"{name}_{i}"
    sources = ("_data_weights", kind, "_split")
    found.assign("data_path", "data", *sources)
    found.assign("datasets", names, *sources)
    if weights and len(weights) != len(names):
        found.drop("_data_weights" if "_data_weights" in found.flags else kind, "undecided")
    elif len(names) > 1 and weights:
        found.assign("weights", weights, *sources)

    command = "prepare" if kind == "_dataset" else "convert"
    pattern = {"_dataset": "{}=FOLDER_OF_{}", "_prefixes": "{}={}.idx"}.get(kind, "{}={}")
    inputs = ",".join(map(pattern.format, names, paths))
    options = f"--input={shlex.quote(inputs)} --output=data"
    split = re.sub(r"[\[\] ]", "", str(found.get("_split") or ""))
    if split:
        options += f" --split={split}"
    found.commands.append(f"python -m fms_fsdp {command} {options} --tokenizer=TOKENIZER")
