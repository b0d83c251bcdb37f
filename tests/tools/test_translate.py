"""`translate` against figures derived by hand from the configurations of other programs."""

from __future__ import annotations

import builtins
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fms_fsdp.__main__ import main
from fms_fsdp.config import TrainConfig
from fms_fsdp.config.batch_plan import BatchPlan, last_step
from fms_fsdp.config.flag import flag_table, flag_values
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.config.train_config import other_programs
from fms_fsdp.errors import UserError
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.optim.schedules import RunLength, find_milestones
from fms_fsdp.tools import translate_command as translate
from fms_fsdp.tools import translation
from fms_fsdp.tools.other_configs import Key
from fms_fsdp.tools.translate_command import PROGRAMS, Program
from fms_fsdp.tools.translation import CONVERSIONS, Translation
from tests.cli import ROOT, metrics, run

CONFIGS = Path(__file__).parent / "configs"


class Run(NamedTuple):
    """Figures of a configuration; `milestones`: ends of the warmup and of the decay, in steps, or
    in tokens if samples give them."""

    files: str
    program: str
    parameters: int
    batch: int  # sequences per step
    steps: int
    milestones: tuple[int, int]
    layout: dict[str, Any]
    missing: str = ""  # keys without a counterpart, and undecided ones
    num_devices: int | None = None  # that the input does not tell


# h: hidden size. A GPT block with biases has 12 h^2 + 13 h parameters: 4 h^2 + 4 h of attention,
# 8 h^2 + 5 h of the feed-forward layer, 4 h of two LayerNorms. A Llama block has
# 2 h^2 + 2 h kv + 3 h ffn + 2 h, where kv is the width of the keys.
RUNS = [
    # 12 blocks of 12 h^2 + 11 h (RMSNorm), 2 x 50,304 (50,257 to a multiple of 128) x 768, one norm;
    # 4 sequences x 8 devices; the warmup is 0.01 of the 320,000 steps of the decay
    Run(
        "neox_160m.yml neox_local_setup.yml",
        "neox",
        12 * (12 * 768**2 + 11 * 768) + 2 * 50304 * 768 + 768,
        32,
        320_000,
        (3200, 320_000),
        {"sharding_strategy": "ddp", "tp_size": 1, "pp_size": 1, "recompute": "blocks"},
    ),
    # 4 Llama blocks of Llama 2 7B
    Run(
        "nxd_hf.yaml nxd_hf_config.json",
        "nxd",
        4 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 2 * 32000 * 4096 + 4096,
        1024,
        20_000,
        (100, 20_000),
        {"sharding_strategy": "zero1", "tp_size": 8, "sequence_parallel": True},
    ),
    # the vocabulary is that of the data, here 32,000
    Run(
        "nxd_megatron.yaml",
        "nxd",
        32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 2 * 32000 * 4096 + 4096,
        1024,
        20_000,
        (2000, 20_000),
        {"sharding_strategy": "zero1", "tp_size": 8, "recompute": "ops"},
    ),
    # 50,257 tokens to a multiple of 128 x 2 devices are 50,432; the head is tied; 2,048 positions.
    # 23,456 steps of the ramp have 5,000,528 samples; (300M - 5,000,528) / 1,024 = 288,085.4,
    # rounded down.
    # 216,320 and 126,953,125 samples of 2,048 tokens; these are 260B tokens
    Run(
        "megatron_tr1_13b.slurm",
        "megatron",
        40 * (12 * 5120**2 + 13 * 5120) + (50432 + 2048) * 5120 + 2 * 5120,
        1024,
        23_456 + 288_085,
        (443_023_360, 260_000_000_000),
        {"sharding_strategy": "ddp", "tp_size": 2, "pp_size": 4, "recompute": "blocks"},
    ),
    # 2 sequences x 16 nodes x 8 devices; the warmup is the minimum of 2,000 and a 20th
    Run(
        "fms_7b.sh",
        "fms",
        6_738_415_616,
        256,
        1_000_000,
        (2000, 1_000_000),
        {"sharding_strategy": "hsdp", "fsdp_activation_checkpointing": True},
    ),
    # keys of 8 heads x 128; the number of nodes is known only to SLURM; there are 8 devices
    Run(
        "fms_llama3_70b.sh",
        "fms",
        80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192)
        + 2 * 128256 * 8192
        + 8192,
        8,
        250_000,
        (2000, 250_000),
        {"sharding_strategy": "fsdp", "selective_checkpointing": "0.5"},
        "launcher.devices",
        8,
    ),
    # 50,277 tokens of the 20B tokenizer to a multiple of 128; 32 sequences x 32 devices
    Run(
        "neox_pythia_160m.yml",
        "neox",
        12 * (12 * 768**2 + 13 * 768) + 2 * 50304 * 768 + 2 * 768,
        1024,
        143_000,
        (1430, 143_000),
        {"sharding_strategy": "zero1", "recompute": "blocks"},
        "init_method output_layer_init_method fp16.initial_scale_power",
    ),
    # 50,277 to a multiple of 128 x 2; 4 sequences x 32 steps x (96 / 2 / 4) replicas
    Run(
        "neox_20b.yml",
        "neox",
        44 * (12 * 6144**2 + 13 * 6144) + 2 * 50432 * 6144 + 2 * 6144,
        1536,
        150_000,
        (1500, 150_000),
        {"sharding_strategy": "zero1", "tp_size": 2, "pp_size": 4, "pp_micro_batch_size": 4},
        "init_method output_layer_init_method fp16.initial_scale_power",
    ),
    # 50,257 to a multiple of 128 x 8 are 51,200; the warmup is 0.001 of the decay of 430,000 steps
    Run(
        "megatron_gpt3_175b.sh",
        "megatron",
        96 * (12 * 12288**2 + 13 * 12288) + (51200 + 2048) * 12288 + 2 * 12288,
        1536,
        500_000,
        (430, 430_000),
        {"sharding_strategy": "ddp", "tp_size": 8, "pp_size": 16},
        "data_path",
    ),
    # 1,953,125,000 / 128 = 15,258,789.06; samples of 8,192 tokens; 8 of 32 layers are recomputed
    Run(
        "megatron_llama3_8b.sh",
        "megatron",
        8_030_261_248,
        128,
        15_258_789,
        (3_906_252 * 8192, 1_949_218_748 * 8192),
        {"sharding_strategy": "zero1", "cp_size": 2, "selective_checkpointing": "8/32"},
        "decoupled_lr",
    ),
    # 2 x 32,768 rows: the vocabulary, here of 32,000, is a multiple of 128 x 32 devices
    Run(
        "nxd_llama_70b.yaml",
        "nxd",
        80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192) + 65536 * 8192 + 8192,
        512,
        10_000,
        (2000, 10_000),
        {"sharding_strategy": "zero1", "tp_size": 32, "pp_size": 8, "recompute": "blocks"},
    ),
    Run(
        "nxd_llama3_8b.yaml llama3_8b_config.json",
        "nxd",
        32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
        + 2 * 128256 * 4096
        + 4096,
        1024,
        10_000,
        (100, 10_000),
        {"sharding_strategy": "zero1", "tp_size": 32, "decay_norms": False, "weight_decay": 0.01},
    ),
    # one sequence x 8 replicas x 8 shards
    Run(
        "torchtitan_llama3_8b.toml",
        "torchtitan",
        8_030_261_248,
        64,
        1000,
        (200, 1000),
        {"sharding_strategy": "hsdp", "hsdp_shard_size": 8, "recompute": "ops"},
    ),
    # the feed-forward width is 2/3 x 4 x 256 to a multiple of 256
    Run(
        "torchtitan_debug.toml",
        "torchtitan",
        6 * (4 * 256**2 + 3 * 256 * 768 + 2 * 256) + 2 * 32000 * 256 + 256,
        8,
        10,
        (2, 10),
        {"sharding_strategy": "fsdp", "selective_checkpointing": "every:2"},
        num_devices=1,
    ),
]


@pytest.fixture(autouse=True)
def _no_variables_of_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("SLURM_", "PET_", "WORLD_SIZE")):
            monkeypatch.delenv(name)


LAUNCHERS = "torchrun srun deepspeed accelerate mpirun python python3"


def words_of(script: Path | str, monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[str]:
    """Runs a script with functions instead of launchers; returns the words that the last one gets."""
    with tempfile.TemporaryDirectory() as folder:
        words = Path(folder, "words")
        exported = Path(folder, "exported")
        functions = ""
        for name in LAUNCHERS.split():
            functions += (
                f"{name}() {{ printf '%s\\0' {name} \"$@\" > {words}; env -0 > {exported}; }}\n"
            )
            functions += f"export -f {name}\n"
        environment = {"PATH": os.environ["PATH"], **variables}
        subprocess.run(
            ["bash", "-c", f"{functions} bash {Path(script).resolve()}"],
            cwd=folder,
            env=environment,
            check=False,
            capture_output=True,
        )
        for item in exported.read_text().split("\0"):
            name, _, value = item.partition("=")
            if name.isidentifier():
                monkeypatch.setenv(name, value)
        return words.read_text().split("\0")[:-1]


def command_of(files: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the words for `translate`: those files, or the command of a script."""
    if files.endswith((".sh", ".slurm")):
        return shlex.join(words_of(files, monkeypatch))
    return files


def convert(files: str) -> tuple[str, Translation, list[Key]]:
    """Returns the program, the translation and the keys of configurations, or of a command."""
    flags, words = translate.split_command(shlex.split(files))
    kinds, keys, hf_config = translate.read_input(words, flags)
    name = translate.recognize(kinds, keys)
    found = translate.translate(Program(name), keys, hf_config)
    return name, found, list(found.status)


def convert_text(tmp_path: Path, name: str, text: str) -> Translation:
    """Translates the text of a file; without a name it is a command."""
    if not name:
        return convert(text)[1]
    (tmp_path / name).write_text(text)
    return convert(str(tmp_path / name))[1]


def written_config(files: str, folder: Path, *flags: str) -> TrainConfig:
    """Runs the command, and parses its file as a launch does."""
    output = folder / "run.toml"
    argv = ["translate", "--allow_missing", f"--output={output}", *flags, *shlex.split(files)]
    try:
        main(argv)
    except SystemExit as ended:  # the layout has no counterpart
        assert ended.code == 1
    return parse_flags(TrainConfig, [f"--config={output}"])


@pytest.mark.parametrize("expected", RUNS, ids=lambda expected: expected.files.split(".")[0])
def test_run_has_figures_derived_by_hand(
    expected: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(CONFIGS)
    files = command_of(expected.files, monkeypatch)
    program, found, keys = convert(files)
    assert program == expected.program
    flags = [f"--num_devices={expected.num_devices}"] if expected.num_devices else []
    config = written_config(files, tmp_path, *flags)
    model = resolve_model(config.model, seq_length=config.data.seq_length)
    assert num_params(model) == expected.parameters
    printed = capsys.readouterr().out
    if found.has_vocabulary:
        assert f"parameters: {expected.parameters:,}" in printed
    else:
        match = re.search(r"parameters: ([\d,]+), and ([\d,]+) per token of the data", printed)
        assert match is not None
        others, per_token = (int(number.replace(",", "")) for number in match.groups())
        assert others + per_token * model.padded_vocab_size == expected.parameters
    length, training = config.data.seq_length, config.training
    tokens = f"{expected.batch * length:,} = {expected.batch:,} sequences"
    assert f"tokens per step: {tokens}" in printed
    batch = BatchPlan(expected.batch, 1, 1, training.rampup, True)
    steps = last_step(training, batch, length)
    assert steps == expected.steps
    assert f"steps: {steps:,}" in printed or training.num_epochs
    points = find_milestones(
        config.optim, RunLength(steps, length, lambda step: batch.sequences_in(step) * length)
    )
    assert (points.warmup, points.decay_end) == expected.milestones
    values = flag_values(config)
    assert {name: values[name] for name in expected.layout} == expected.layout
    stopping = {s for s in translation.LISTS if s not in ("no effect", "default")}
    missing = [key.name for key in keys if found.status[key] in stopping]
    assert sorted(missing) == sorted(expected.missing.split())
    check_every_key_is_in_one_list(found, keys)


def check_every_key_is_in_one_list(found: Translation, keys: list[Key]) -> None:
    toml = "\n".join(translate.toml_lines(found))
    lines = list(translate.report(found))
    listed = [name for line in lines for name in line.partition(": ")[2].split(", ")]
    for key in keys:
        in_lists = listed.count(key.name) + sum(f": {key.name}" in line for line in lines[:8])
        status = found.status[key]
        assert status in {"written", *translation.LISTS}, key
        if status == "written":
            is_device = any(key in found.flags.get("_num_devices", ("", ()))[1] for _ in "1")
            assert key.name in toml or key.name.startswith("config.") or is_device, key
            assert key.name not in listed, key
        else:
            assert in_lists >= 1, key
    assert len(found.status) == len(keys)


SEED_RUNS = RUNS[:5]
SMALL = """
--num_layers=2 --hidden_size=64 --ffn_hidden_size=128 --num_attention_heads=4 --num_kv_heads=4
--vocab_size=256 --seq_length=32 --max_seq_len=32 --batch_size=2 --grad_accum_steps=1
--global_batch_size=2 --tp_size=1 --pp_size=1 --use_dummy_dataset=True --eval_interval=0
--ckpt_save_path= --ckpt_load_path= --tensorboard_dir= --report_interval=1
--use_torch_compile=False
"""


@pytest.mark.slow
@pytest.mark.parametrize("expected", SEED_RUNS, ids=lambda expected: expected.files.split(".")[0])
def test_run_trains_three_steps(
    expected: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS)
    config = written_config(command_of(expected.files, monkeypatch), tmp_path)
    flags = [*SMALL.split(), f"--output_dir={tmp_path / 'r'}"]
    if config.training.num_samples:
        flags += (
            "--num_samples=6 --warmup=2samples --lr_decay=6samples --rampup_batch_size=".split()
        )
    else:
        flags += "--num_steps=3 --warmup=1 --lr_decay=3".split()
    if config.model.hf_config:
        monkeypatch.chdir(ROOT)
        flags.append(f"--hf_config={CONFIGS / config.model.hf_config}")
    done = run(f"--config={tmp_path / 'run.toml'}", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = metrics(tmp_path / "r")
    assert sorted(losses) == [1, 2, 3] and all(each["loss"] < 6.5 for each in losses.values())
    config = parse_flags(TrainConfig, [f"--config={tmp_path / 'r' / 'config.json'}"])
    original = parse_flags(TrainConfig, [f"--config={tmp_path / 'run.toml'}"])
    for name in ("optimizer", "weight_decay", "adam_beta2", "lr_schedule", "min_lr"):
        assert getattr(config.optim, name) == getattr(original.optim, name)


NEOX = "train-iters: 1000\npipe-parallel-size: 1\nhidden-size: 4096\n"
MEGATRON = "x.py --train-iters 1000 --tensor-model-parallel-size 1 --hidden-size 4096 --micro-batch-size 2 "
WHOLE = (
    NEOX
    + """num-layers: 2
num-attention-heads: 32
seq-length: 64
train_batch_size: 4
data-path: a
optimizer: {params: {lr: 1.0e-3}}
"""
)
TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
steps = 1000
"""
NXD = "trainer: {max_steps: 1000}\nexp_manager: {name: a}\n"


@pytest.mark.parametrize(
    ("name", "text", "flags"),
    [
        ("a.yml", NEOX + "zero_optimization: {stage: 2}", {"sharding_strategy": "zero2"}),
        ("a.yml", NEOX + "zero_optimization: {stage: 3}", {"sharding_strategy": "fsdp"}),
        ("a.yml", NEOX, {"warmup": "10", "adam_beta2": 0.999, "lr_schedule": "annealing"}),
        ("a.yml", NEOX + "lr-decay-iters: 500", {"warmup": "5", "lr_decay": "500"}),
        ("a.yml", NEOX + "lr-decay-iters: 1000", {"warmup": "10", "lr_decay": None}),
        (
            "",
            "x.py --micro-batch-size 2 --train-samples 5000 --lr-warmup-fraction 0.1 "
            "--tensor-model-parallel-size 2",
            {"warmup": "500samples", "num_samples": "5000"},
        ),
        (
            "",
            MEGATRON + "--pipeline-model-parallel-size 2 --global-batch-size 64",
            {"pp_micro_batch_size": "2", "grad_accum_steps": 1, "batch_size": None},
        ),
        ("a.yml", NEOX + "train_batch_size: auto", {"global_batch_size": None}),
        ("a.yml", NEOX, {"ffn_hidden_size": 16384, "tie_embeddings": True, "precision": "fp32"}),
        ("a.yml", NEOX + "fp16: {enabled: true, type: bfloat16}", {"precision": "bf16"}),
        (
            "a.yml",
            NEOX + "fp16: {enabled: true, hysteresis: 3}",
            {"precision": "fp16", "loss_scale_hysteresis": 3},
        ),
        ("a.yml", NEOX + "fp16: {enabled: false, hysteresis: 3}", {"loss_scale_hysteresis": None}),
        (
            "a.yml",
            NEOX + "mlp_type: llama\nactivation: silu\nuse_bias_in_attn_linear: false",
            {"activation": "swiglu", "ffn_hidden_size": 11008, "bias": False},
        ),
        (
            "a.yml",
            NEOX + "make-vocab-size-divisible-by: 64\nmodel-parallel-size: 4",
            {"vocab_multiple_of": 256, "tp_size": 4},
        ),
        (
            "a.yml",
            NEOX + "pos-emb: rpe\nrotary-pct: 0.5",
            {"pos_emb": "relative", "rope_pct": None},
        ),
        (
            "a.yml",
            NEOX + "checkpoint-activations: true\ncheckpoint-num-layers: 2",
            {"recompute": "blocks", "recompute_segment": 2},
        ),
        # int(4 x 4,096 x 2/3) // 2; its halves are multiplied
        ("a.yml", NEOX + "activation: swiglu", {"activation": "swiglu", "ffn_hidden_size": 5461}),
        ("a.yml", NEOX + "activation: swiglu\nmlp_multiple_of: 256", {"ffn_hidden_size": 5632}),
        ("a.yml", NEOX + "train_data_paths: [a, b]", {"weights": [1, 1]}),
        ("", MEGATRON + "--num-query-groups 8", {"num_kv_heads": None}),
        ("", MEGATRON + "--num-query-groups 8 --group-query-attention", {"num_kv_heads": 8}),
        ("", MEGATRON + "--group-query-attention", {"num_kv_heads": 1}),
        ("", MEGATRON + "--eval-iters 0 --log-interval 0", {"eval_interval": 0}),
        (
            "",
            MEGATRON + "--seq-length 4 --train-tokens 100 --train-samples 30",
            {"num_tokens": "100", "num_samples": None},
        ),
        ("", MEGATRON + "--pad-vocab-size-to 51200", {"vocab_multiple_of": 51200}),
        ("", f"deepspeed --num_gpus 8 --num_nodes 2 {MEGATRON}", {"_num_devices": 16}),
        ("", f"accelerate launch --num_processes 8 {MEGATRON}", {"_num_devices": 8}),
        ("", f"srun -n 8 python {MEGATRON}", {"_num_devices": 8}),
        (
            "",
            f"torchrun --nproc_per_node 8 --nnodes $N {MEGATRON}",
            {"_num_devices": None},
        ),
        (
            "",
            f"torchrun --nproc_per_node 8 --nnodes 1:4 {MEGATRON}",
            {"_num_devices": None},
        ),
        ("a.yaml", NXD + "data: {data_prefix: [a]}", {"dropout": 0.1, "ffn_hidden_size": None}),
        ("a.toml", TITAN, {"model_variant": "llama3.1_8b", "rope_scaling": None}),
        ("a.toml", TITAN + "compile = true", {"model_variant": "llama3_8b"}),
        (
            "a.toml",
            TITAN.replace("8B", "405B") + "compile = true",
            {"model_variant": "llama3.1_405b", "rope_scaling": "linear:1"},
        ),
        ("a.toml", TITAN.replace("8B", "debugmodel"), {"rope_scaling": "llama3:8"}),
        (
            "a.toml",
            TITAN + "[lr_scheduler]\nwarmup_steps = 300\ndecay_ratio = 0.8",
            {"lr_decay": "700"},
        ),
        ("a.toml", TITAN + "[parallelism]\ndata_parallel_shard_degree = 8", {"_num_devices": 8}),
        (
            "a.toml",
            TITAN + "[parallelism]\npipeline_parallel_degree = 4",
            {"pp_micro_batch_size": 1, "batch_size": 2},
        ),
        ("", MEGATRON, {"dropout": 0.1, "weight_decay": 0.01, "warmup": "0", "min_lr": 0.0}),
        ("", MEGATRON + "--swiglu", {"ffn_hidden_size": 10880}),  # 10,922 to 64 below
        ("", MEGATRON + "--no-bias-gelu-fusion", {"activation": "gelu"}),
        (
            "",
            MEGATRON + "--recompute-granularity selective",
            {"recompute": "ops", "recompute_ops": ["matmuls"]},
        ),
        ("", MEGATRON + "--data-path a/b_text_document", {"datasets": ["b"]}),
        ("a.yaml", NXD + "precision: {type: bf16SR}", {"precision": "bf16_pure"}),
        (
            "a.yaml",
            NXD + "distributed_strategy: {zero1: true}\nmodel: {optim: {lr: 1e-3}}",
            {"sharding_strategy": "zero1", "weight_decay": 0.0, "learning_rate": "1e-3"},
        ),
        (
            "",
            "x.py --selective_checkpointing=3 --model_variant=7b",
            {"selective_checkpointing": None},
        ),
        # the mask of NeoX keeps the token and the 512 before it
        ("a.yml", NEOX + "sliding_window_width: 512", {"attn_window": 513}),
        (
            "",
            MEGATRON + "--optimizer sgd",
            {"optimizer": "sgd", "optimizer_kwargs": ["momentum=0.9"]},
        ),
        (
            "",
            MEGATRON + "--position-embedding-type rope --reset-attention-mask",
            {"document_mask": True},
        ),
        ("", MEGATRON + "--reset-position-ids --reset-attention-mask", {"document_mask": True}),
        ("", MEGATRON + "--reset-position-ids", {"document_mask": None}),
        (
            "a.yaml",
            NXD + "distributed_strategy: {zero1: true}\nmodel: {optim: {name: adamw_fp32OptState}}",
            {"weight_decay": 0.01},
        ),
        ("a.yaml", NXD + "data: {micro_batch_size: 1}", {"sharding_strategy": "zero1"}),
        # the schedule ends with the run, whatever sched.max_steps says
        (
            "a.yaml",
            NXD + "model: {optim: {sched: {name: CosineAnnealing, max_steps: 500}}}",
            {"lr_schedule": "cosine", "lr_decay": None},
        ),
        # models of Hugging Face decay by 0.01, and their norms unless the key excludes them
        (
            "a.yaml",
            NXD + "model_source: hf\nmodel: {optim: {weight_decay: 0.1}}",
            {"weight_decay": 0.01, "decay_norms": True},
        ),
        (
            "a.yaml",
            NXD + "model_source: hf\nmodel: {do_layer_norm_weight_decay: true}",
            {"decay_norms": False},
        ),
        (
            "a.yaml",
            NXD + "model_source: megatron\nmodel: {do_layer_norm_weight_decay: true}",
            {"decay_norms": True},
        ),
        # only the tokens of the dummy dataset depend on it
        ("", "x.py --model_variant=llama3_8b --vocab_size=32000", {"vocab_size": None}),
        # a run that begins with another one's weights counts its steps from 0
        (
            "",
            "x.py --model_variant=7b --ckpt_load_path=/old --ckpt_save_path=/new",
            {"ckpt_load_path": "/old", "load_model_only": True},
        ),
        (
            "",
            "x.py --model_variant=7b --ckpt_load_path=/new --ckpt_save_path=/new/",
            {"ckpt_load_path": None, "load_model_only": None},
        ),
    ],
)
def test_value_becomes_flags(tmp_path: Path, name: str, text: str, flags: dict[str, Any]) -> None:
    found = convert_text(tmp_path, name, text)
    expected = {
        flag: None if value is None else translation.checked(flag, value)
        for flag, value in flags.items()
    }
    assert {flag: found.get(flag) for flag in flags} == expected


@pytest.mark.parametrize(
    ("name", "text", "status"),
    [
        ("a.yml", NEOX + "init_method: small_init", {"init_method": "changes"}),
        ("a.yml", NEOX + "sparsity: all", {"sparsity": "changes"}),
        ("a.yml", NEOX + "sparsity: none", {"sparsity": "default"}),
        ("a.yml", NEOX + "activation: silu", {"activation": "changes"}),
        ("a.yml", NEOX + "use_bias_in_mlp: false", {"use_bias_in_mlp": "changes"}),
        (
            "a.yml",
            NEOX + "attention_config: [[[global, local], 6]]",
            {"attention_config": "changes"},
        ),
        ("a.yml", NEOX + "attention_config: [[[flash], 12]]", {"attention_config": "default"}),
        (
            "a.yml",
            NEOX + "no_such_key: null\nother_key: 0",
            {"no_such_key": "unknown", "other_key": "unknown"},
        ),
        (
            "a.yml",
            NEOX + "train_data_paths: [a, b]\ntrain_data_weights: [1]",
            {"train_data_weights": "undecided"},
        ),
        (
            "a.toml",
            TITAN + "[float8]\nenable_float8_linear = true",
            {"float8.enable_float8_linear": "changes"},
        ),
        (
            "a.toml",
            TITAN + "[parallelism]\ntensor_paralel_degree = 2",
            {"parallelism.tensor_paralel_degree": "unknown"},
        ),
        ("a.yml", NEOX + "launcher: slurm", {"launcher": "no effect"}),
        ("a.yml", NEOX + "no-such-key: 1", {"no_such_key": "unknown"}),
        ("a.yml", NEOX + "optimizer: {type: OneBitAdam}", {"optimizer.type": "changes"}),
        ("a.yml", NEOX + "save: a\nload: b", {"load": "changes"}),
        (
            "a.yml",
            NEOX + "gradient_clipping: 1.0\noptimizer: {params: {max_grad_norm: 2.0}}",
            {"gradient_clipping": "default", "optimizer.params.max_grad_norm": "undecided"},
        ),
        ("a.yml", NEOX + "seed: !include x", {"seed": "undecided"}),
        ("", MEGATRON + "--reset-position-ids", {"reset_position_ids": "changes"}),
        (
            "",
            "x.py --model_variant=7b --ckpt_load_path=/old --resuming_dataset=True",
            {"resuming_dataset": "changes"},
        ),
        (
            "",
            MEGATRON + "--lr-decay-style inverse-square-root --lr-decay-iters 500",
            {"lr_decay_iters": "changes"},
        ),
        ("", MEGATRON + "--reset-attention-mask", {"reset_attention_mask": "changes"}),
        ("", MEGATRON + "--sgd-momentum 0.8", {"sgd_momentum": "changes"}),
        (
            "a.yaml",
            NXD + "data: {reset_attention_mask: true}",
            {"data.reset_attention_mask": "changes"},
        ),
        (
            "a.yaml",
            NXD + "model: {optim: {sched: {name: SquareAnnealing, min_lr: 1e-5}}}",
            {"model.optim.sched.name": "changes"},
        ),
        # the token 0, not an option that is off
        ("", "x.py --model_variant=7b --bos_token=0 --bol_token=None", {"bos_token": "changes"}),
        ("a.yaml", NXD + "seed: ${multiply:1,2}", {"seed": "undecided"}),
        ("", MEGATRON + "--seed '$SEED'", {"seed": "undecided"}),
        ("", MEGATRON + "--log-interval-x $X", {"log_interval_x": "no effect"}),
        ("", MEGATRON + "--deepspeed_config ds.json", {"deepspeed_config": "undecided"}),
    ],
)
def test_key_without_counterpart_is_listed(
    tmp_path: Path, name: str, text: str, status: dict[str, str]
) -> None:
    found = convert_text(tmp_path, name, text)
    statuses = {key.name: each for key, each in found.status.items()}
    assert {key: statuses[key] for key in status} == status


def test_odd_values_of_data_are_named(tmp_path: Path) -> None:
    found = convert(f"{PRETRAIN} --data-path 0.5 a 0.5")[1]
    assert found.status[found.keys["data_path"]] == "undecided"
    found = convert_text(
        tmp_path, "a.yml", WHOLE.replace("data-path: a", "train_data_paths: [1, 2]")
    )
    assert found.get("datasets") == ("2",)  # a weight and a path
    found = convert_text(tmp_path, "a.yml", WHOLE + "mlp_multiple_of: 0")
    assert found.get("ffn_hidden_size") == 4 * 4096
    words = PRETRAIN.replace("--train-iters 1000", "--train-samples 99")
    with pytest.raises(UserError, match="rampup_batch_size"):
        list(translate.figures(convert(f"{words} --rampup-batch-size 8 8")[1]))


@pytest.mark.parametrize(
    ("name", "text", "missing"),
    [
        (
            "",
            "x.py --hidden-size 64 --tensor-model-parallel-size 1",
            {"num_steps", "batch_size"},
        ),
        ("", MEGATRON, {"learning_rate", "data_path", "num_devices", "num_layers"}),
        ("a.yaml", NXD, {"ffn_hidden_size", "precision", "lr_schedule"}),
        ("a.yml", WHOLE, set()),
        ("a.toml", TITAN, {"num_devices"}),
    ],
)
def test_no_default_of_ours_decides(
    tmp_path: Path, name: str, text: str, missing: set[str]
) -> None:
    found = convert_text(tmp_path, name, text)
    assert missing <= set(found.missing)
    assert bool(found.missing) == bool(missing)
    assert not missing & found.flags.keys()


def test_steps_that_are_missing_are_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yml").write_text(WHOLE.replace("train-iters: 1000\n", ""))
    with pytest.raises(SystemExit, match="1"):
        main(["translate", str(tmp_path / "a.yml")])
    printed = capsys.readouterr().out
    assert "# missing: num_steps; GPT-NeoX has no default" in printed and "steps:" not in printed


# ---- Commands, as the shell has expanded them

PRETRAIN = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048
    --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048
    --tokenizer-type GPT2BPETokenizer --data-path /d/x_text_document --bf16 --micro-batch-size 4
    --global-batch-size 512 --train-iters 1000 --min-lr 1e-5 --lr 1e-4""".replace("\n", " ")
# 24 blocks of 12 h^2 + 13 h, 50,257 tokens to a multiple of 128 and 2,048 positions, one LayerNorm
PARAMETERS = 24 * (12 * 2048**2 + 13 * 2048) + (50304 + 2048) * 2048 + 2 * 2048
WIDE_PARAMETERS = 24 * (12 * 4096**2 + 13 * 4096) + (50304 + 2048) * 4096 + 2 * 4096


@pytest.mark.parametrize(
    ("script", "flags", "parameters"),
    [
        (f'A="--lr 2e-4"\nA+=" --lr 1e-3 --swiglu"\n{PRETRAIN} $A', {"learning_rate": 1e-3}, 0),
        (
            f"H=1024\nS=big\n[ $S = big ] && H=4096\n{PRETRAIN} --hidden-size $H",
            {"hidden_size": 4096},
            WIDE_PARAMETERS,
        ),
        (
            f"LR=3e-4\ndebug() {{ LR=1e-2\n}}\n{PRETRAIN} --lr $LR",
            {"learning_rate": 3e-4},
            PARAMETERS,
        ),
        (f"LR=3e-4\nsource ./site.sh\n{PRETRAIN} --lr $LR", {"learning_rate": 1e-3}, PARAMETERS),
        (f"{PRETRAIN} \\\n  # tuned \\\n  --lr 1e-3", {"learning_rate": 1e-4}, PARAMETERS),
        (f"{PRETRAIN} \\\n  # --lr 1e-3", {"learning_rate": 1e-4}, PARAMETERS),
        (
            f"M=4\nG=$((M*16*8))\n{PRETRAIN} --global-batch-size $G",
            {"global_batch_size": 512},
            PARAMETERS,
        ),
        (
            f"{PRETRAIN} --pad-vocab-size-to 250880",
            {"vocab_multiple_of": 250_880},
            PARAMETERS + (250_880 - 50_304) * 2048,
        ),
        (f"declare LR=1e-3\nunset X\n{PRETRAIN} $X --lr $LR", {"learning_rate": 1e-3}, PARAMETERS),
        (f"N=1\n((N++))\n{PRETRAIN} --seed $N", {"seed": 2}, PARAMETERS),
        (f"A=(--seed 1)\nA[1]=7\nA+=(--swiglu)\n{PRETRAIN} ${{A[@]}}", {"seed": 7}, 0),
        (f"for i in 3 4; do X=$i; done\n{PRETRAIN} --seed $X", {"seed": 4}, PARAMETERS),
        (f"A=$(cat <<END\n--seed 9\nEND\n)\n{PRETRAIN} $A > >(cat)", {"seed": 9}, PARAMETERS),
        (f"read -r -d '' A <<END\n--seed 9\nEND\n{PRETRAIN} $A | tee log", {"seed": 9}, PARAMETERS),
        (f'eval "X=5"\nprintf -v Y %d 8\n{PRETRAIN} --seed $X$Y', {"seed": 58}, PARAMETERS),
        (
            f"if [ -z $Z ]; then A=--fp16; fi\n({PRETRAIN} ${{A#--fp16}})",
            {"precision": "bf16"},
            PARAMETERS,
        ),
        (f"X=$(bc <<< '2*3' || true)\n{PRETRAIN} &> log.txt", {"num_steps": 1000}, PARAMETERS),
    ],
)
def test_script_gives_the_values_that_bash_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    flags: dict[str, Any],
    parameters: int,
) -> None:
    (tmp_path / "site.sh").write_text("LR=1e-3\n")
    (tmp_path / "run.sh").write_text(f"cd {tmp_path}\n{script}\n")
    config = written_config(command_of(str(tmp_path / "run.sh"), monkeypatch), tmp_path)
    values = flag_values(config)
    assert {name: values[name] for name in flags} == flags
    printed = capsys.readouterr().out
    if parameters:
        assert f"parameters: {parameters:,}\n" in printed
    assert "tokens per step: 1,048,576 = 512 sequences of 2,048" in printed
    assert "steps: 1,000\n" in printed and "--num_devices=8" in printed


def test_function_before_a_script_translates_it(tmp_path: Path) -> None:
    """As the page says; the script itself is not changed."""
    (tmp_path / "run.sh").write_text(f"LAYERS=12\nsrun {PRETRAIN} --num-layers $LAYERS\n")
    function = f'srun() {{ {sys.executable} -m fms_fsdp translate srun "$@"; }}; export -f srun; '
    done = subprocess.run(
        ["bash", "-c", f"{function} bash {tmp_path}/run.sh"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "num_layers = 12  # num_layers: 12" in done.stdout


ARGS = "--train-iters 10 --lr 1e-3"


@pytest.mark.parametrize(
    ("command", "devices"),
    [
        ("torchrun --nproc_per_node 8 --nnodes=4 x.py", 32),
        ("torchrun --nproc-per-node=8 x.py", 8),
        ("torchrun x.py", 1),
        ("torchrun --standalone --nproc_per_node 2 -m a.train", 2),
        ("torchrun --nproc_per_node 2 --nproc_per_node 4 x.py", 4),
        ("srun -N 4 --ntasks-per-node=1 torchrun --nnodes 4 --nproc_per_node 8 x.py", 32),
        ("torchrun --nproc_per_node gpu x.py", "gpu"),
        ("torchrun --nproc_per_node auto x.py", "auto"),
        ("torchrun --nproc_per_node 8 --nnodes 1:4 x.py", "1:4"),
        ("torchrun --nproc_per_node --nnodes 4 x.py", "--nproc_per_node"),
        ("torchrun --nproc_per_node=8 --nnodes= x.py", "--nnodes"),
        ("torchrun --nproc_per_node 8 --new_option 3 x.py", "--new_option"),
        ("python -u -m torch.distributed.run --nproc_per_node 4 x.py", 4),
        ("python3.11 -m torch.distributed.launch --nproc_per_node=4 --use_env x.py", 4),
        ("srun -n 8 python x.py", 8),
        ("srun -n8 --mpi=pmix python -u x.py", 8),
        ("srun --nodes=2 --ntasks-per-node=8 python x.py", 16),
        (f"srun --jobid bash -c 'torchrun --nproc_per_node 4 x.py {ARGS}'", 4),
        ("srun --unheard-of=3 -n 8 python x.py", "--unheard-of=3"),
        ("srun python x.py", None),
        ("mpirun -np 16 --mca btl tcp -x PATH python x.py", 16),
        ("mpirun --ppn 8 python x.py", "--ppn"),
        ("deepspeed --num_gpus 8 --num_nodes 2 x.py", 16),
        ("deepspeed --hostfile hosts x.py", 11),
        ("deepspeed --hostfile hosts --num_nodes 2 x.py", 8),
        ("deepspeed --hostfile hosts --num_gpus 2 x.py", 6),
        ("deepspeed --hostfile hosts --include a@b:0,2 x.py", 6),
        ("deepspeed --hostfile hosts --exclude b@c:0 x.py", 6),
        ("deepspeed --hostfile none x.py", "the hostfile none"),
        ("deepspeed --hostfile none --num_nodes 4 --num_gpus 8 x.py", 32),
        ("deepspeed --include localhost:0,1,5 x.py", 3),
        ("deepspeed x.py", None),
        ("accelerate launch --num_processes 8 --mixed_precision bf16 x.py", 8),
        ("accelerate launch x.py", None),
        ("python x.py", None),
        ("WORLD_SIZE=64 python x.py", 64),
        ("WORLD_SIZE=64 torchrun --nproc_per_node 8 x.py", 8),
    ],
)
def test_launcher_gives_the_number_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, devices: int | str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("# cluster\na slots=4\nb slots=4\n\nc slots=3\n")
    if command.startswith("WORLD_SIZE"):
        command = command.removeprefix("WORLD_SIZE=64 ")
        monkeypatch.setenv("WORLD_SIZE", "64")
    _, found, keys = convert(f"{command} {ARGS}")
    (key,) = [key for key in keys if key.name == "launcher.devices"] or [None]
    if isinstance(devices, str):
        assert key is not None and devices in key.undecided
        assert found.status[key] == "undecided" and "num_devices" in found.doubtful
    else:
        assert found.get("_num_devices") == devices
        assert ("num_devices" in found.missing) == (devices is None)
    assert {"num_steps", "learning_rate"} <= found.flags.keys()
    assert ("WORLD_SIZE" in " ".join(found.commands)) == (devices == 64)


def test_number_of_devices_overrides_all(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "torchrun --nproc_per_node gpu x.py --train-iters 10 --lr 1e-3 --micro-batch-size 2".split()
    )
    with pytest.raises(SystemExit):
        main(["translate", "--num_devices=24", *words, "--seq-length", "64"])
    printed = capsys.readouterr().out
    assert "tokens per step: 3,072 = 48 sequences" in printed and "undecided" not in printed


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({"SLURM_NTASKS": "32"}, 32),
        ({"SLURM_NNODES": "4"}, 4),
        ({"SLURM_NNODES": "4", "SLURM_NTASKS": "8"}, 8),
    ],
)
def test_srun_in_a_job_has_its_tasks(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], devices: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert convert(f"srun python x.py {ARGS}")[1].num_devices == devices


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (
            "cd /x && python y.py --warm 1; python x.py --train-iters 5 --lr 2 2>&1 | tee log",
            {"lr": "2"},
        ),
        ("torchrun x.py --train-iters 5 --seed $SEED --lr $RATE", {"seed": "3", "lr": None}),
        (
            "torchrun x.py --train-iters 5 --seed '$SEED' --split '9,1'",
            {"seed": None, "split": "9,1"},
        ),
        ("$START --lr 4", {"train_iters": "6", "lr": "4"}),
        ("torchrun x.py --train-iters 5 --lr 3\nwait", {"lr": "3"}),
        ("torchrun x.py --train-iters 5 \\\n --lr 3 --seed 4", {"lr": "3", "seed": "4"}),
    ],
)
def test_text_of_bash_is_split_once(
    monkeypatch: pytest.MonkeyPatch, text: str, values: dict[str, Any]
) -> None:
    monkeypatch.setenv("SEED", "3")
    monkeypatch.setenv("START", "torchrun --nproc_per_node 2 x.py --train-iters 6 --a 'b|c'")
    words = ["srun", "--ntasks=2", "bash", "-c", text]
    keys = {key.name: key for key in convert(shlex.join(words))[2]}
    assert {name: keys[name].value for name in values} == values
    assert all(bool(keys[name].undecided) == (value is None) for name, value in values.items())


@pytest.mark.parametrize(
    ("options", "value", "status"),
    [
        ("--lr 1e-4 --min-lr 0 --lr 1e-3", 1e-3, ""),  # the last one counts
        ("--lr=1e-3", 1e-3, ""),
        ("--lr --min-lr 0", None, "undecided"),
        ("--lr '' --min-lr 0", None, "undecided"),
        ("--lr '$X'", None, "undecided"),
        ("--learning-r 3", None, ""),
    ],
)
def test_option_is_read_as_argparse_does(options: str, value: float | None, status: str) -> None:
    _, found, keys = convert(f"x.py --train-iters 5 {options}")
    assert found.get("learning_rate") == value
    if status:
        assert [found.status[key] for key in keys if key.name == "lr"] == [status]
        assert "learning_rate" not in found.missing  # it is named once
    elif value is None:  # Megatron-LM allows no abbreviation
        assert [found.status[key] for key in keys if key.name == "learning_r"] == ["unknown"]


def test_files_among_the_arguments_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(CONFIGS)
    neox = "python ./deepy.py train.py -d . neox_160m neox_local_setup.yml --wandb_team a"
    assert (
        convert(neox)[1].flags.keys()
        == convert("neox_160m.yml neox_local_setup.yml")[1].flags.keys()
    )
    titan = (
        "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file torchtitan_debug.toml "
        "--training.steps 70 --compile.enable --training.no-compile"
    )
    program, found, _ = convert(titan)
    assert (program, found.get("num_steps"), found.num_devices) == ("torchtitan", 70, 8)
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 2}, "train_batch_size": 512}'
    )
    found = convert(f"{PRETRAIN} --deepspeed --deepspeed_config {tmp_path}/ds.json")[1]
    assert found.get("sharding_strategy") == "zero2"
    with pytest.raises(SystemExit):
        main(["translate", *PRETRAIN.split(), "--deepspeed_config", "none.json"])
    assert "deepspeed_config: none.json does not exist" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("torchrun --nproc_per_node 8", "starts no Python program"),
        ("srun ./run.sh", "./run.sh is a script"),
        ("bash run.sh", "run.sh is a script"),
        ("sbatch --nodes=2 a.slurm", "a.slurm is a script"),
        ("python -c 'import a'", "starts no Python program"),
        ("bash -c 'python x.py --a \"'", "has an open quote"),
        ("", "requires a file or a command"),
        # Trainer, nanoGPT and lm-evaluation-harness
        (
            "x.py --model_name_or_path a --learning_rate 1e-4 --weight_decay 0 --bf16 --seed 1",
            "docs/",
        ),
        ("train.py --batch_size=8 --n_layer=4 --n_head=4 --max_iters=2000 --dropout=0.0", "docs/"),
        ("x.py --tasks a --batch_size 8 --seed 1", "docs/migrate/other-frameworks.md"),
    ],
)
def test_bad_command_is_one_line(
    capsys: pytest.CaptureFixture[str], words: str, error: str
) -> None:
    assert main(["translate", *shlex.split(words)]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count("\n") == 1
    assert error in captured.err and len(captured.err) <= 220


def test_our_flags_end_before_the_command() -> None:
    split = translate.split_command
    command = ["torchrun", "x.py", "--output=b", "--lr", "1"]
    flags = ["--allow_missing", "--from", "megatron", "--output=a"]
    expected = ["--allow_missing=true", *flags[1:]]
    assert split([*flags, *command]) == (expected, command)
    assert split([*flags, "--", *command]) == (expected, command)
    assert split(["-h"]) == (["-h"], [])
    assert split(["--allow_missing", "a.yml", "--output=b"]) == (
        ["--allow_missing=true", "a.yml", "--output=b"],
        [],
    )


# ---- What is absent, off, a default, or not known


def test_no_figure_depends_on_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    hidden = {
        "--num-layers": "parameters",
        "--hidden-size": "parameters",
        "--tokenizer-type": "parameters",
        "--global-batch-size": "tokens per step",
        "--seq-length": "tokens per step",
        "--train-iters": "steps",
    }
    main(["translate", *PRETRAIN.split()])
    lines = capsys.readouterr().out.splitlines()
    for option, figure in hidden.items():
        assert any(line.startswith(f"# {figure}: ") for line in lines), figure
        with pytest.raises(SystemExit):
            main(["translate", *PRETRAIN.split(), option, "$X"])
        printed = capsys.readouterr().out
        assert f"# {figure}: " not in printed, option
        assert printed.count(option.strip("-").replace("-", "_")) == 1  # no default of the program
        with pytest.raises(SystemExit):
            main(["translate", *PRETRAIN.replace(option, "--other").split()])
        printed = capsys.readouterr().out
        if option not in ("--tokenizer-type", "--global-batch-size"):  # Megatron-LM has defaults
            assert f"# {figure}: " not in printed, option


@pytest.mark.parametrize(
    ("name", "text", "figure"),
    [
        ("a.toml", TITAN.replace("llama3", "qwen3"), "parameters"),
        ("a.toml", TITAN.replace("8B", "16B"), "parameters"),
        ("", f"{PRETRAIN} --num-experts 8", "parameters"),
        ("", f"{PRETRAIN} --embed-layernorm", "parameters"),
        ("", PRETRAIN.replace("gpt.py", "bert.py"), "parameters"),
        ("", PRETRAIN.replace("gpt.py", "t5.py") + " --encoder-seq-length 9", "tokens"),
        ("a.yml", WHOLE + "use_bias_in_mlp: false", "parameters"),
        ("a.yml", WHOLE + "moe_num_experts: 4", "parameters"),
        ("", f"{PRETRAIN} --lr-decay-style '$S'", "schedule"),
        (
            "",
            PRETRAIN.replace("--train-iters 1000", "--train-tokens 99999") + " --seq-length '$S'",
            "steps",
        ),
    ],
)
def test_figure_without_counterpart_is_not_printed(
    tmp_path: Path, name: str, text: str, figure: str
) -> None:
    found = convert_text(tmp_path, name, text)
    assert found.doubtful and not found.is_complete
    assert not [line for line in translate.figures(found) if line.startswith(figure)]


@pytest.mark.parametrize("expected", RUNS, ids=lambda expected: expected.files.split(".")[0])
def test_hidden_key_changes_no_figure(expected: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure that depends on a key is not printed if nobody knows its value."""
    monkeypatch.chdir(CONFIGS)
    files = command_of(expected.files, monkeypatch)
    program, found, keys = convert(files)
    hf_config = found.get("hf_config", "")
    known = set(translate.figures(found))
    assert len(known) >= 3
    for key in keys:
        if key.name.startswith("config."):  # the model reads them from the file
            continue
        hidden = replace(key, value=None, undecided="only the shell knows")
        changed = [hidden if each is key else each for each in keys]
        found = translate.translate(Program(program), changed, hf_config)
        try:
            lines = [line for line in translate.figures(found) if not line.startswith("memory")]
        except UserError:  # weights without sources
            assert key.name == "datasets"
            continue
        assert set(lines) <= known, key.name
        assert found.status[hidden] in ("undecided", "no effect")


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("", {"norm_eps": 1e-5}),
        ("norm: rmsnorm", {"norm_eps": 1e-8}),
        ("norm: rmsnorm\nlayernorm_epsilon: 1.0e-6", {"norm_eps": 1e-8}),
        ("norm: rmsnorm\nrms_norm_epsilon: 1.0e-6", {"norm_eps": 1e-6}),
        ("norm: scalenorm\nlayernorm_epsilon: 1.0e-6", {"norm_eps": 1e-8}),
        ("norm: layernorm\nrms_norm_epsilon: 1.0e-6", {"norm_eps": 1e-5}),
        ("warmup: 0", {"warmup": "0"}),
        ("num_gpus: 8\nnum_nodes: 2", {"_num_devices": 16}),
        ("num_gpus: 8", {"_num_devices": 8}),
        ("include: 'localhost:0,1'", {"_num_devices": 2}),
    ],
)
def test_value_of_neox_has_its_effect(tmp_path: Path, text: str, flags: dict[str, Any]) -> None:
    found = convert_text(tmp_path, "a.yml", WHOLE + text)
    assert {name: found.get(name) for name in flags} == flags
    assert found.is_complete


@pytest.mark.parametrize(
    ("params", "status", "optimizer"),
    [
        ("adam_w_mode: false", "default", "adam"),
        ("adam_w_mode: true", "default", "adamw"),
        ("bias_correction: false", "changes", "adamw"),
        ("bias_correction: true", "default", "adamw"),
        ("adam_mode: false", "unknown", "adamw"),
    ],
)
def test_false_is_not_absent(tmp_path: Path, params: str, status: str, optimizer: str) -> None:
    text = WHOLE.replace("{lr: 1.0e-3}}", f"{{lr: 1.0e-3, {params}}}, type: Adam}}")
    found = convert_text(tmp_path, "a.yml", text)
    name = f"optimizer.params.{params.partition(':')[0]}"
    assert found.status[found.keys[name]] in (status, "written" if optimizer == "adam" else status)
    assert found.get("optimizer") == optimizer


@pytest.mark.parametrize(
    ("name", "text", "status"),
    [
        ("a.yml", WHOLE + "weight_deca: 0.0", {"weight_deca": "unknown"}),
        ("a.toml", TITAN + "max_nrm = 0.0", {"training.max_nrm": "unknown"}),
        ("", f"{PRETRAIN} --hidden-drop 0.0", {"hidden_drop": "unknown"}),
        ("", f"{PRETRAIN} --main-params-dtype fp16", {"main_params_dtype": "changes"}),
        ("", f"{PRETRAIN} --main-grads-dtype bf16", {"main_grads_dtype": "changes"}),
        ("", f"{PRETRAIN} --main-grads-dtype fp32", {"main_grads_dtype": "default"}),
        ("a.yml", WHOLE + "hostfile: /none", {"hostfile": "undecided"}),
    ],
)
def test_key_that_matters_is_not_off(
    tmp_path: Path, name: str, text: str, status: dict[str, str]
) -> None:
    test_key_without_counterpart_is_listed(tmp_path, name, text, status)


@pytest.mark.parametrize(
    ("options", "steps", "decay_end"),
    [
        ("--train-samples 1000000 --global-batch-size 128", 7812, 1_000_000),
        ("--train-samples 999936 --global-batch-size 128", 7812, 1953),  # in steps
        ("--train-samples 1000000 --micro-batch-size 16", 7812, 1_000_000),
        # 125 steps of 8 have more than 999 samples, 63 of 16 more than 2,000 (Megatron-LM's ramp
        # takes its last batch at 2,000 samples); of the rest 32 each: 188 + (10,000 - 2,008) // 32
        (
            "--train-samples 10000 --global-batch-size 32 --rampup-batch-size 8 8 2000",
            None,
            10_000,
        ),
    ],
)
def test_samples_are_full_steps(
    capsys: pytest.CaptureFixture[str], options: str, steps: int | None, decay_end: int
) -> None:
    if steps is None:
        steps = _steps_of_megatron(10_000, 32, 8, 8, 2000)
    words = f"torchrun --nproc_per_node 8 x.py --seq-length 4 --lr 1 --swiglu {options}".split()
    with pytest.raises(SystemExit):
        main(["translate", *words])
    printed = capsys.readouterr().out
    assert f"# steps: {steps:,}\n" in printed
    assert f"to {4 * decay_end:,}\n" in printed


def _steps_of_megatron(samples: int, end: int, start: int, increment: int, ramp: int) -> int:
    """The loop of update_train_iters, as Megatron-LM had it with --rampup-batch-size."""
    steps = 0
    consumed = 0
    per_increment = ramp / ((end - start) // increment)
    while consumed <= ramp and consumed <= samples:
        consumed += start + int(consumed / per_increment) * increment
        steps += 1
    return steps + (samples - consumed) // end


def test_samples_are_kept_where_the_batch_is_not_known() -> None:
    words = f"{PRETRAIN.replace('--train-iters 1000', '--train-samples 1000')}"
    found = convert(f"{words} --global-batch-size '$G'")[1]
    assert found.get("num_samples") == 1000 and found.get("lr_decay") is None


@pytest.mark.parametrize(
    ("program", "option"),
    [
        ("main_training.py --model_variant 7b", "num_steps"),
        ("x.py --model.flavor 8B", "training.steps"),
    ],
)
def test_nothing_follows_from_unknown_steps(program: str, option: str) -> None:
    found = convert(f"torchrun --nproc_per_node 8 {program} --{option} '$X'")[1]
    assert not {"num_steps", "warmup", "lr_decay"} & {*found.flags, *found.missing}
    assert not [line for line in translate.figures(found) if line.startswith("s")]


@pytest.mark.parametrize(("steps", "ours"), [(1000, "0.587"), (1_000_000, "0.551")])
def test_note_compares_the_cosine_at_mid_run(steps: int, ours: str) -> None:
    found = convert(f"main_training.py --model_variant=7b --num_steps={steps}")[1]
    assert any(f"halfway 0.550 and {ours} of the peak" in note for note in found.notes)


@pytest.mark.parametrize("value", ["1/3", "0.5", "1", "3"])
def test_upstream_fraction_of_blocks_is_kept(value: str) -> None:
    text = (
        f"main_training.py --fsdp_activation_checkpointing=True --selective_checkpointing={value}"
    )
    expected = {"3": "every:3"}.get(value, value)
    assert convert(text)[1].get("selective_checkpointing") in (
        expected,
        None if value == "1" else expected,
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "olmo.yml",
            "run_name: a\nseed: 1\nmax_duration: 9\nprecision: amp_bf16\nmax_grad_norm: 1.0",
        ),
        (
            "ds.json",
            '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}',
        ),
        ("action.yml", "name: ci\ndescription: a\ninputs: {a: {default: 1}}"),
    ],
)
def test_other_programs_are_not_recognized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["translate", str(tmp_path / name)]) == 2
    assert "docs/migrate/other-frameworks.md" in capsys.readouterr().err


def test_vocabulary_of_torchtitan_is_the_datas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.toml").write_text(TITAN)
    main(["translate", "--num_devices=8", str(tmp_path / "a.toml")])
    printed = capsys.readouterr().out
    assert "vocab_size" not in printed
    assert "parameters: 6,979,588,096, and 8,192 per token of the data's vocabulary" in printed


def test_translate_needs_no_torch() -> None:
    code = (
        "import sys; from fms_fsdp.__main__ import main;"
        f"main(['translate', *{PRETRAIN.split()!r}]);"
        "assert not {'torch', 'numpy', 'pyarrow'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"parameters: {PARAMETERS:,}" in done.stdout


def test_estimate_command_plans_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "run.toml"
    assert main(["translate", f"--output={output}", *PRETRAIN.split()]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("memory: ")]
    words = shlex.split(line.removeprefix("memory: python -m fms_fsdp "))
    assert words == ["estimate", f"--config={output}", "--device=h100_80gb", "--num_devices=8"]
    assert main(words) == 0
    assert "GiB" in capsys.readouterr().out


def test_endless_file_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yml").symlink_to("/dev/zero")
    assert main(["translate", str(tmp_path / "a.yml")]) == 2
    assert "at most 1 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.yml", None, "does not exist"),
        ("a.yml", b"", "has no keys"),
        ("a.toml", b"\n", "has no keys"),
        ("a.yml", b"\x00\xff\x80", "is not text"),
        ("a.yml", b"--a\x00b", "at most 1 MiB"),
        ("a.sh", b"", "is a script; run it with `fms-fsdp translate` before its command"),
        ("a.slurm", b"#!/bin/bash", "is a script; run it"),
        ("run", b"#!/bin/bash", "is a script; run it"),
        ("a.txt", b"--num-layers 3", "starts no Python program"),
        ("a.yml", b"a: [1", "is not valid yaml"),
        ("a.yml", b"a: 1\na: 2", "a is set twice"),
        ("a.yml", b"- 1", "must hold keys"),
        ("a.yml", b"a: 1\n---\nb: 2", "is not valid yaml"),
        ("a.yml", b"a: &a [*a]\nb: {c: &c {d: *c}}", "is not valid yaml"),
        ("a.toml", b"a = ", "is not valid toml"),
        ("a.json", b"{", "is not valid json"),
        ("a.json", b"[1]", "must hold keys"),
        ("a.json", b'{"a": 1, "a": 2}', "a is set twice"),
        ("a.json", b'{"a":' * 3000, "is not valid json"),
        ("a.py", b"n_layer = 12", "are of no known program"),
        ("a.json", b'{"per_device_train_batch_size": 4}', "the main keys of Trainer, litgpt"),
        ("a.yml", b"colour: red", "are of no known program; set --from"),
        (  # of OLMo: GPT-NeoX knows two of six
            "a.yml",
            b"run_name: a\nseed: 1\nmax_duration: 2\ntime_limit: 3\ncanceled_check_interval: 4\noptimizer: {}",
            "are of no known program; set --from",
        ),
        ("a.yml", NEOX.encode() + b"lr-decay-iters: [1]", "lr_decay_iters"),
        ("a.yml", NEOX.encode() + b"hidden-dropout: two", "hidden_dropout = two cannot be used"),
        ("a.yml", NEOX.encode() + b"optimizer: {params: {betas: []}}", "must be a list of two"),
        (
            "a.toml",
            TITAN.encode() + b"[lr_scheduler]\ndecay_ratio = 'x'",
            "decay_ratio = x cannot be",
        ),
        ("a.yml", NEOX.encode() + b"warmup: -1", ":4: warmup = -1 cannot be used"),
        ("a.yml", NEOX.encode() + b"warmup: many", "must be a number"),
        (
            "a.yml",
            NEOX.encode() + b"seq-length: 1.0e15",
            "seq_length = 1.0e15 cannot be used",
        ),
        ("a.yml", NEOX.encode() + b"seq-length: 100000000000", "must be at most 4,194,304"),
        (
            "a.yml",
            NEOX.encode() + b"train_data_paths: [a, b]\ntrain_data_weights: [1, x]",
            "train_data_weights = [1, 'x'] cannot be used: --weights=x must be a number",
        ),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes | None,
    message: str,
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["translate", str(tmp_path / name), f"--output={tmp_path / 'o'}"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and message in captured.err
    assert "error: " in captured.err and not (tmp_path / "o").exists()


def test_unknown_key_fails_unless_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yml"
    path.write_text(WHOLE + "odd: 1\n")
    assert convert(str(path))[1].missing == []
    with pytest.raises(SystemExit, match="1"):
        main(["translate", str(path)])
    printed = capsys.readouterr().out
    assert f"#   {path}:10: odd = 1" in printed
    (tmp_path / "run.toml").write_text(printed)  # what is printed is a config file
    assert parse_flags(TrainConfig, [f"--config={tmp_path / 'run.toml'}"]).model.num_layers == 2
    assert main(["translate", str(path), "--allow_missing", "--from=neox"]) == 0
    assert main(["translate", str(path), "--from=noex"]) == 2
    assert main(["translate", str(path), "--from=litgpt"]) == 2
    assert "--from=litgpt was removed; docs/migrate/" in capsys.readouterr().err
    assert main(["translate", str(path), f"--output={path}"]) == 2
    assert "must not exist" in capsys.readouterr().err


def test_key_in_two_files_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.yml", "b.yml"):
        (tmp_path / name).write_text(NEOX)
    assert main(["translate", str(tmp_path / "a.yml"), str(tmp_path / "b.yml")]) == 2
    assert "train_iters is also set at" in capsys.readouterr().err


def test_missing_pyyaml_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yml").write_text(NEOX)
    real = builtins.__import__

    def without_yaml(name: str, *rest: Any) -> Any:
        if name == "yaml":
            raise ImportError
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_yaml)
    assert main(["translate", str(tmp_path / "a.yml")]) == 2
    assert capsys.readouterr().err.endswith("run: pip install pyyaml\n")


def test_run_that_cannot_start_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The warmup is longer than the run."""
    with pytest.raises(SystemExit, match="1"):
        words = f"{MEGATRON} --global-batch-size 8 --lr-warmup-iters 2000".split()
        main(["translate", "--allow_missing", *words])
    assert "does not run as it is: --warmup=2000" in capsys.readouterr().out


def test_data_line_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS)
    commands = convert(command_of("megatron_llama3_8b.sh", monkeypatch))[1].commands
    files = "web=/data/web_text_document.idx,code=/data/code_text_document.idx"
    assert f"python -m fms_fsdp convert --input={files} --output=data" in commands[0]
    assert (
        "prepare --input=c4_test=FOLDER_OF_c4_test"
        in convert("torchtitan_debug.toml")[1].commands[0]
    )


def test_tables_name_flags_and_conversions() -> None:
    flags = flag_table(TrainConfig)
    files = ("program_rules.py", "translation.py")
    known = "".join((ROOT / "fms_fsdp/tools" / name).read_text() for name in files)

    def check(name: str) -> None:
        is_marker = name in ("_vocab_file", "_tracker")
        assert name in flags or is_marker or f'"{name}"' in known, name

    for table in other_programs()["programs"].values():
        for name in [*table.get("absent", {}), *table.get("same", "").split()]:
            check(name.rpartition(".")[2])
        for name, keys in table.get("flags", {}).items():
            check(name)
            for key in [keys] if isinstance(keys, str) else keys:
                assert key.partition(" ")[2] in CONVERSIONS, key
        for values in table.get("values", {}).values():
            for chosen in values.values():
                for name in chosen:
                    check(name)


def test_programs_are_documented() -> None:
    page = (ROOT / "docs" / "migrate" / "translate.md").read_text()
    assert {run.program for run in RUNS} == set(PROGRAMS)
    for name in PROGRAMS:
        assert f"`{name}`" in page, name
