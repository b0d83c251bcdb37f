"""Takes steps on a CUDA device that only counts, as rank 0 of a world whose other ranks are not there, and
prints as JSON, for each case, what the last step did.

    python steps.py '[{"flags": {…}, "precision": {…}, "world": 2, …}, …]'

The communicators are real to torch; their messages go nowhere.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

if (
    "variant" in sys.argv[1]
):  # the program's own setting; the device has no room for segments of many groups
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.testing._internal.distributed.fake_pg  # noqa: E402, F401 - registers the backend "fake"

from fms_fsdp.config import OptimConfig, ParallelConfig, PrecisionConfig  # noqa: E402
from fms_fsdp.data.batch import Batch  # noqa: E402
from fms_fsdp.distributed.dims import plan_dims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.world import World
from fms_fsdp.metrics.timer import PhaseTimer  # noqa: E402
from fms_fsdp.models.variants import VARIANTS, TransformerConfig  # noqa: E402
from fms_fsdp.optim.loss_scale import LossScale  # noqa: E402
from fms_fsdp.optim.optimizers import build_optimizers  # noqa: E402
from fms_fsdp.parallel.compile import compiles_optimizer  # noqa: E402
from fms_fsdp.parallel.parallelize import parallelize  # noqa: E402
from fms_fsdp.state import TrainState  # noqa: E402
from fms_fsdp.train import StepSettings, train_step  # noqa: E402

DEVICE = torch.device("cuda", 0)
SMALL = TransformerConfig(2, 256, 512, 4, 2, 512, max_seq_len=128)
COUNTS = ctypes.CDLL(None)


def counted() -> dict[str, tuple[int, float]]:
    """How often each thing happened since the last reset, and its bytes or FLOPs."""
    with tempfile.NamedTemporaryFile() as file:
        COUNTS.nullcuda_dump(file.name.encode())
        lines = Path(file.name).read_text().splitlines()
    rows = (line.split("\t") for line in lines)
    return {name: (int(number), float(size)) for number, size, name in rows}


def summary(counts: dict[str, tuple[int, float]]) -> dict[str, Any]:
    """What tests ask for."""

    def number(*words: str) -> int:
        return sum(count for name, (count, _) in counts.items() if name.startswith(words))

    messages = {
        name: row for name, row in counts.items() if name.startswith("NCCL") and "tiny" not in name
    }
    return {
        "launches": number("K ", "T ", "GEMM "),
        "products": sum(size for name, (_, size) in counts.items() if name.startswith("GEMM ")),
        "waits": {
            name: count
            for name, (count, _) in counts.items()
            if name.startswith(("SYNC", "MEMCPY B"))
        },
        "messages": messages,
        "unimplemented": number("UNIMPLEMENTED"),
    }


def steps(case: dict[str, Any]) -> dict[str, Any]:
    """Three steps; what the last one did, and what the forward pass of one left for the backward pass."""
    torch.compiler.reset()
    section = ParallelConfig(**case["flags"])
    precision = PrecisionConfig(**case["precision"])
    numbers = precision.resolve(precision.named or "bf16")
    config, rows = VARIANTS.get(case.get("variant", ""), SMALL), case.get("rows", 2)
    length = case.get("seq_length", config.max_seq_len)
    size = case["world"]
    dims = plan_dims(section, "", World(0, 0, size, min(size, 8)))
    if dims.strategy != "none":
        dist.init_process_group(
            "cpu:fake,cuda:nccl", store=dist.HashStore(), rank=0, world_size=size
        )
    with patch.object(dist.ProcessGroup, "set_timeout"):  # the fake group has no timeout
        mesh = Mesh(dims, 0, "cuda")
    model = parallelize(config, section, mesh, device=DEVICE, precision=numbers, seed=1)
    compiled = compiles_optimizer(section, model, DEVICE)
    optim = OptimConfig(**case.get("optim", {}))
    optimizers = build_optimizers(optim, model, numbers, 1, compiled=compiled)
    masks_documents = case.get("document_mask", False)
    settings = StepSettings(
        mesh,
        DEVICE,
        lambda step, tokens, base: 1e-3,
        case.get("micro_batch", rows),
        case.get("grad_clip", 1.0),
        document_mask=masks_documents,
    )
    scale = LossScale(PrecisionConfig(), DEVICE) if numbers.compute == "fp16" else None
    nothing: Any = None
    state = TrainState(model, optimizers, nothing, 9, loss_scale=scale)
    tokens = torch.randint(config.vocab_size, (rows, length + 1))
    # two documents in each sequence
    documents = (torch.arange(length) >= length // 2).expand(rows, length).int().contiguous()
    positions = (torch.arange(length) % (length // 2)).expand(rows, length).int().contiguous()
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, documents)
    clock, kept = PhaseTimer(DEVICE), list[int]()
    # blocks lie between, and are compiled as a whole; a stage of a pipeline lacks one of the two
    if model.embed is not None and model.head is not None:
        note: Any = lambda *_: kept.append(torch.cuda.memory_allocated())  # noqa: E731
        model.embed.register_forward_hook(note)
        model.head.register_forward_pre_hook(note, prepend=True)
    for step in range(3):
        kept.clear()
        torch.cuda.reset_peak_memory_stats()
        COUNTS.nullcuda_reset()
        must_not_wait = step == 2 and not case.get("may_wait", False)
        torch.cuda.set_sync_debug_mode("error" if must_not_wait else "default")
        clock.mark("data")
        train_step(settings, state, batch, clock)
        torch.cuda.set_sync_debug_mode("default")
    result = summary(counted()) | {
        "peak": torch.cuda.max_memory_reserved(),
        "kept": kept[1] - kept[0] if kept else 0,
    }
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


if __name__ == "__main__":
    torch.cuda.set_device(DEVICE)
    torch.backends.cuda.enable_cudnn_sdp(False)  # the stand-in has no part of it
    for case in json.loads(sys.argv[1]):
        print(json.dumps(case | steps(case)), flush=True)
