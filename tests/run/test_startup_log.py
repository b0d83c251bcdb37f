"""The log before step 1."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fms_fsdp.config import (
    BF16,
    BatchPlan,
    DataConfig,
    EvalConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    TrainingConfig,
)
from fms_fsdp.console import LINE_WIDTH, TIME_WIDTH
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.evaluate import summary_lines
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.run.memory_budget import MemoryBudget
from fms_fsdp.run.startup_log import (
    _precision,
    advise,
    describe,
    describe_devices,
    describe_prediction,
    describe_sources,
)
from fms_fsdp.samples import first_lines
from fms_fsdp.state import TrainMetadata
from tests.data.corpora import write_corpus
from tests.specs import budget, machine, resolved

TINY = VARIANTS["tiny"]


@pytest.mark.parametrize(
    ("model", "document_mask", "kernel"),
    [
        (TINY, False, "auto"),
        (TINY, True, "flex"),
        (replace(TINY, attn_window=5), False, "flex"),
        (replace(TINY, pos_emb="alibi"), True, "biased"),
    ],
)
def test_attention_of_a_gpu_is_named(model: object, document_mask: bool, kernel: str) -> None:
    config = TrainConfig(data=DataConfig(document_mask=document_mask))
    run = resolved(config, model=model, device="cuda")  # type: ignore[arg-type]
    gpu = machine("cuda")
    assert _precision(run, gpu).endswith(f", {kernel} attention")
    assert "attention" not in _precision(replace(run, device_type="cpu"), gpu)


LONG = "/".join(f"language={number}" for number in range(16))
SCRATCH = TrainMetadata(0)


def test_facts_of_a_large_run_fit_a_line(tmp_path: Path) -> None:
    """Source names of 180 characters, and the largest model on 1,024 GPUs."""
    files = write_corpus(tmp_path, {LONG: [900_000], "code": [90]})
    stream = files.stream(1024, seq_length=32, datasets=(LONG, "code"), weights=(1, 0.01))
    cfg = TrainConfig(
        data=DataConfig(seq_length=4096),
        training=TrainingConfig(num_steps=1_000_000),
        eval=EvalConfig(eval_interval=1000),
    )
    run = resolved(
        cfg,
        model=VARIANTS["70b"],
        dims=ParallelDims("hsdp", 16, 64),
        batch=BatchPlan(4, 8, 1024),
        world_size=1024,
        precision=BF16,
        device="cuda",
    )
    held_out: Any = [
        SimpleNamespace(group="eval", name=f"{LONG}/{number}", num_sequences=1_234_567)
        for number in range(9)
    ]
    memory = budget(cuda=139 * 2**30, cpu=2**41)
    facts = describe(run, memory, stream, held_out).splitlines()
    assert [line for line in facts if len(line) > LINE_WIDTH - TIME_WIDTH] == []
    text = " ".join(facts)
    for words in ("1,024 GPUs, hsdp: 16 replicas x 64 shards", " of 139 GiB per rank (weights"):
        assert words in text
    values = {"eval/loss": 2.0, "eval/ppl": 7.4, "eval/bits_per_byte": 0.9}
    values |= {f"eval/{each.name}/loss": 2.0 for each in held_out}
    values |= {"test/loss": 3.0, "test/ppl": 20.1, "test/code/loss": 3.0}
    lines = summary_lines(values, 1_000_000, 12_345.6)
    assert max(map(len, "\n".join(lines).split("\n"))) <= LINE_WIDTH - TIME_WIDTH
    assert "  …  (12345.6 s)" in lines[0] and lines[0].count("\n") == 1
    assert lines[1] == "test @1000000  loss 3.0000  ppl 20.10  code 3.0000  (12345.6 s)"


def test_sources_are_a_table(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, {"web": [30_000, 20_000], "code": [1_500_000]})
    stream = files.stream(4, seq_length=32, datasets=("web", "code"), weights=(3, 1))
    assert describe_sources(stream, 1000).splitlines() == [
        "source  tokens  weight  read to step 1,000  epochs",
        "code     1.52M    0.25                 32k   0.021",
        "web      50.8k    0.75                 96k     1.9",
    ]


def test_devices_are_named_without_private_words() -> None:
    run = resolved(TrainConfig())
    assert describe_devices(run) == "devices: 1 CPU rank, not sharded"
    gpus = replace(run, world_size=8, device_type="cuda", dims=ParallelDims("fsdp", 1, 8))
    expected = "devices: 8 GPUs (NVIDIA H200), fsdp: 1 replica x 8 shards"
    assert describe_devices(gpus, "NVIDIA H200") == expected


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({}, "speed: about "),
        ({"parallel": ParallelConfig(cpu_offload=True)}, "speed: unknown with --cpu_offload"),
        ({"training": TrainingConfig(teacher_path="a")}, "speed: unknown with --teacher_path"),
    ],
)
def test_speed_is_unknown_where_it_is_not_predicted(flags: dict[str, Any], line: str) -> None:
    """Copies to the host and the teacher's forward pass were not in the printed speed."""
    gpu = machine("cuda", memory={"cuda": 2**37, "cpu": 2**40}, device_name="NVIDIA H200")
    run = resolved(TrainConfig(**flags), dims=ParallelDims("fsdp"), precision=BF16, device="cuda")
    (found,) = describe_prediction(run, MemoryBudget(gpu))
    assert found.startswith(line)


def test_speed_in_bf16_is_unknown_for_a_gpu_without_it() -> None:
    gpu = machine("cuda", memory={"cuda": 2**34, "cpu": 2**40}, device_name="Tesla V100-SXM2-32GB")
    run = resolved(TrainConfig(), dims=ParallelDims("fsdp"), precision=BF16, device="cuda")
    expected = ["speed: unknown in bf16 for v100_16gb"]
    assert list(describe_prediction(run, MemoryBudget(gpu))) == expected


def test_advice_is_given_where_a_run_was_hardly_meant(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, {"web": [30_000], "code": [1_500_000]})
    stream = files.stream(4, seq_length=32, datasets=("web", "code"), weights=(3, 1))
    cfg = TrainConfig(optim=OptimConfig(warmup="5001"), training=TrainingConfig(num_steps=10_000))
    warmup, epochs = advise(resolved(cfg), stream, SCRATCH)
    assert warmup.startswith("the warmup takes 5,001 of 10,000 steps, more than half of the run;")
    assert epochs.startswith("source web is read 32 times; more than 10 epochs rarely help")
    usual = TrainConfig(training=TrainingConfig(num_steps=2000))
    assert [*advise(resolved(usual), stream, SCRATCH)] == []


def test_sample_keeps_its_lines_and_forges_none() -> None:
    text = "def f(x):\n\treturn x\n\n13:00:00 step 1/9\x1b[0m\nlast\n" + "x" * 300
    shown = first_lines(text)
    assert shown == "  def f(x):\n      return x\n  13:00:00 step 1/9\\x1b[0m\n  …"
    assert len(first_lines("x" * 300)) == LINE_WIDTH - TIME_WIDTH and first_lines("") == ""
