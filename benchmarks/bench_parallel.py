"""Measures layouts of the five axes on gloo processes of this machine, and writes one result file.

    python benchmarks/bench_parallel.py --long-row [--ranks=8] [--tokens=131072] [--method=ulysses]

--long-row   forward and backward pass of one long row whose tokens `ranks` processes divide (context
             parallel): one layer, width 64, 8 heads, fp32. Seconds and peak memory of each rank are those of
             one pass; bytes are what a rank sends in both passes, counted at the collectives.

Ranks share the cores of the machine: the seconds are no measure of how the work would divide over machines.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from result_file import HELP, about_machine, write_result
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent.parent))
LAYERS, WIDTH, FFN, HEADS, VOCAB = 1, 64, 128, 8, 512


class _Sent(TorchDispatchMode):
    """Counts the bytes that context parallel sends from this rank, in `total`; those of FSDP pass unseen."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.total, others = 0.0, ranks - 1
        share = {"all_to_all_single": others / ranks, "reduce_scatter_tensor": others / ranks}
        self._share = share | {"all_gather_into_tensor": others}  # of the bytes that an operation is given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            self.total += args[0].nbytes * self._share.get(func.overloadpacket.__name__, 0)
        return func(*args, **(kwargs or {}))


def long_row(rank: int, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The passes of one rank over its part of the row."""
    from fms_fsdp.config import FP32, ParallelConfig
    from fms_fsdp.mesh import Mesh, resolve_dims
    from fms_fsdp.models.variants import LlamaConfig
    from fms_fsdp.parallel.parallelize import parallelize
    from fms_fsdp.runtime import World

    torch.set_num_threads(1)
    store, ranks = dist.FileStore(f"{folder}/store", options.ranks), options.ranks
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    section = ParallelConfig(cp_size=ranks, cp_method=options.method, sharding_strategy="fsdp")
    mesh = Mesh(resolve_dims(section, "tiny", World(rank, rank, ranks, ranks)), rank, "cpu")
    config = LlamaConfig(LAYERS, WIDTH, FFN, HEADS, HEADS, VOCAB, max_seq_len=options.tokens)
    model = parallelize(config, section, mesh, device=torch.device("cpu"), precision=FP32, seed=1)
    tokens = torch.randint(VOCAB, (1, options.tokens), generator=torch.Generator().manual_seed(1))
    before_gib = _peak_gib()
    with _Sent(ranks) as sent:
        start = time.perf_counter()
        loss_sum, num_labels = model(tokens, tokens.roll(-1, 1))
        forward_s = time.perf_counter() - start
        (loss_sum / options.tokens).backward()
        backward_s = time.perf_counter() - start - forward_s
    total = mesh.sum(torch.stack((loss_sum.detach(), num_labels.float())), "row").tolist()
    dist.barrier()
    dist.destroy_process_group()
    return {
        "loss": round(total[0] / total[1], 5),
        "forward_s": round(forward_s, 1),
        "backward_s": round(backward_s, 1),
        "peak_gib": round(_peak_gib(), 2),
        "peak_before_gib": round(before_gib, 2),
        "sent_mib": round(sent.total / 2**20, 2),
    }


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _of_rank(task: tuple[int, argparse.Namespace, str]) -> dict[str, Any]:
    return long_row(*task)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--long-row", action="store_true", required=True)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--method", default="ulysses", choices=("ulysses", "gather"))
    parser.add_argument("--output", type=Path, help=HELP)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    about = about_machine()
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(options.ranks) as pool,
    ):
        tasks = [(rank, options, folder) for rank in range(options.ranks)]
        by_rank = pool.map(_of_rank, tasks, chunksize=1)
    shape = {
        "layers": LAYERS,
        "width": WIDTH,
        "heads": HEADS,
        "tokens": options.tokens,
        "ranks": options.ranks,
    }
    for result in by_rank:
        print(result, flush=True)
    write_result(about | {"long_row": shape | {"method": options.method, "by_rank": by_rank}}, options.output)


if __name__ == "__main__":
    main()
