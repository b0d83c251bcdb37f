"""The peak memory of training on this machine's CPU, against the prediction: one process a rank.

Each rank is a fork: it trains a tiny model, which loads all libraries, then the model of the case, and returns
the growth of its peak memory in bytes with the prediction.
"""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fms_fsdp.config import OptimConfig, ParallelConfig, PrecisionConfig
from fms_fsdp.data.batch import Batch
from fms_fsdp.metrics.timer import PhaseTimer
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.predict.memory import Step, estimate_memory
from fms_fsdp.predict.meter import ModelSetup
from fms_fsdp.process import keep_freed_memory
from fms_fsdp.state import TrainState
from fms_fsdp.train import StepSettings, train_step
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import mesh_of

_M_MMAP_THRESHOLD = -3  # of malloc.h

WIDE: dict[str, Any] = dict(
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=2816,
    num_attention_heads=16,
    num_kv_heads=4,
    vocab_size=8000,
    max_seq_len=1024,
)
SLIM: dict[str, Any] = dict(
    num_layers=12,
    hidden_size=128,
    ffn_hidden_size=384,
    num_attention_heads=4,
    num_kv_heads=2,
    vocab_size=2000,
    max_seq_len=1024,
)
GPT: dict[str, Any] = SLIM | dict(
    num_kv_heads=4,
    ffn_hidden_size=512,
    num_layers=10,
    activation="gelu",
    norm="layernorm",
    bias=True,
    pos_emb="learned",
    tie_embeddings=True,
)
FSDP, ZERO1, HALF = (
    dict(sharding_strategy="fsdp"),
    dict(sharding_strategy="zero1"),
    dict(recompute="blocks", selective_checkpointing="1/2"),
)
CASES: dict[str, dict[str, Any]] = {
    "activations in bf16": dict(
        config=SLIM | dict(num_layers=6), rows=20, length=300, precision="bf16"
    ),
    "gpt": dict(config=GPT, rows=12, length=512),
    "half of the blocks": dict(config=SLIM | dict(num_layers=16), rows=8, length=512, flags=HALF),
    "operations": dict(
        config=SLIM | dict(num_layers=16),
        rows=10,
        length=512,
        flags=dict(recompute="ops"),
        precision="fp32",
    ),
    "micro-steps": dict(config=WIDE | dict(num_layers=4), rows=1, length=64, accum=2),
    "fsdp": dict(
        config=WIDE | dict(num_layers=6, vocab_size=32000),
        rows=1,
        length=32,
        world=2,
        flags=FSDP,
    ),
    "zero1 in bf16": dict(
        config=WIDE | dict(num_layers=4),
        rows=1,
        length=8,
        accum=2,
        precision="bf16",
        world=2,
        flags=ZERO1,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_peak_memory_is_predicted(name: str) -> None:
    case = CASES[name]
    grown, expected = run_ranks(train, case.get("world", 1), case)[0]
    print(f"{name}: predicted {expected / 2**20:.0f} MiB, measured {grown / 2**20:.0f}")
    assert grown > 2**28  # below that the libraries' own memory is more than a few percent
    # The allocator's growth varies, and on a busy machine the kernel may reclaim pages.
    assert 0.8 * grown <= expected <= 1.25 * grown


def train(case: dict[str, Any]) -> tuple[int, int]:
    """Returns the bytes by which the peak memory of this process grows, and the bytes predicted."""
    cpu = torch.device("cpu")
    if dist.get_world_size() == 1:
        keep_freed_memory()
    else:
        # Several ranks take glibc as it is. It keeps freed memory from a size on that changes while it
        # runs: up to twice as much, of which the prediction knows nothing. A fixed size keeps none.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    section = ParallelConfig(use_torch_compile=False, **case.get("flags", {}))
    precision = PrecisionConfig(precision=case.get("precision", "fp32")).resolve(
        case.get("precision", "fp32")
    )
    mesh = mesh_of(section)
    nothing: Any = None

    def steps(config: TransformerConfig, rows: int, length: int, accum: int) -> None:
        model = parallelize(config, section, mesh, device=cpu, precision=precision, seed=1)
        state = TrainState(model, build_optimizers(OptimConfig(), model, precision), nothing, 3)
        rate: Any = lambda step, tokens, base: 1e-4  # noqa: E731
        settings = StepSettings(mesh, cpu, rate, rows, 1.0, False)
        for _ in range(2):
            tokens = torch.randint(config.vocab_size, (rows * accum, length))
            positions = torch.arange(length, dtype=torch.int32).expand(rows * accum, length)
            batch = Batch(tokens, tokens.roll(-1, 1), positions, torch.zeros_like(positions))
            train_step(settings, state, batch, PhaseTimer(cpu))
            state.count(1, 1)

    config, rows, length = TransformerConfig(**case["config"]), case["rows"], case["length"]
    accum = case.get("accum", 1)
    tiny = dict(num_layers=2, hidden_size=64, ffn_hidden_size=64, vocab_size=128, head_dim=16)
    steps(replace(config, max_seq_len=64, **tiny), 1, 64, 1)  # type: ignore[arg-type]
    gc.collect()
    before = resident_bytes("VmRSS")
    steps(config, rows, length, accum)
    shape = ModelSetup(
        config, section, precision, mesh.dims, length, compiled=False, device_type="cpu"
    )
    need = estimate_memory(Step(shape, rows, accum))
    return resident_bytes("VmHWM") - before, need.total


def resident_bytes(field: str) -> int:
    """A field of this process's memory: VmRSS now, VmHWM at most."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0]) * 1024
