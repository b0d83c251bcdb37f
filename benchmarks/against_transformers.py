"""Training throughput against `transformers`' Llama of the same shape, on the same data, in turns.

    for each precision × mode:   warm up both, then rounds of
        matmul rate │ ours × steps │ reference × steps │ matmul rate

It compares eager with eager and compiled with compiled. Both train on dummy tokens with fused AdamW and clip
by the global norm. The reference runs as its users run it: SDPA attention, fp32 weights, bf16 by
`torch.autocast`, `torch.compile` of the whole model. Ours runs the steps of the training loop: `parallelize`,
loss over all labels, `clip_grad_norm`, with the waiting of threads and the allocator that main_training.py
sets. Each has a process of its own, and one stands still while the other runs. `--tuned=both` gives the
reference our waiting and allocator too: what is left is the difference of the models.

The matmul rate is the rate of the model's own products: every projection and the head, forward and for both
gradients, at the rows of a step. A share of it counts only products: no embedding lookup and half of the
causal attention. `share_by_convention` counts (6N + 12LDS), as `mfu` does.

    python benchmarks/against_transformers.py              # fp32 and bf16, eager and compiled; a few minutes
    python benchmarks/against_transformers.py --precision=fp32 --mode=eager --rounds=3
    python benchmarks/against_transformers.py --model_variant=hidden256   # another shape; hidden768 too

The ratio of a round compares neighbours in time; the result is the median over rounds. Run it on a quiet
machine. `--peak_memory_at=32000` also runs some steps of each contestant with that vocabulary, and compares
the most memory that each of them had resident."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from result_file import HELP, write_result

from fms_fsdp.config import ModelConfig, ParallelConfig, Precision
from fms_fsdp.cpu_tuning import keep_freed_memory, let_gpu_memory_grow, set_thread_waiting
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.metrics.hardware import memory_stats
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import flops_per_token, matmul_flops_per_token, num_params
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.parallel.fsdp import clip_grad_norm
from fms_fsdp.parallel.parallelize import parallelize

# shapes beside the variants: overrides of `quickstart`, rows of 512 tokens a step
SHAPES = {
    "hidden256": (
        dict(
            hidden_size=256,
            num_layers=8,
            num_attention_heads=4,
            num_kv_heads=2,
            ffn_hidden_size=704,
        ),
        4,
    ),
    "hidden768": (
        dict(
            hidden_size=768,
            num_layers=12,
            num_attention_heads=12,
            num_kv_heads=12,
            ffn_hidden_size=2048,
        ),
        2,
    ),
}
VOCABULARIES = {"hidden256": 8192, "hidden768": 32_000}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALONE = Mesh(ParallelDims("none"), 0, "cpu")
Step = Callable[[torch.Tensor], torch.Tensor]
Case = tuple[str, bool]  # precision, and whether compiled


def our_step(config: TransformerConfig, precision: str, compiled: bool) -> Step:
    """A function of tokens_BS that takes one optimizer step of our model and returns the loss."""
    model = parallelize(
        config,
        ParallelConfig(use_torch_compile=compiled),
        ALONE,
        device=torch.device("cpu"),
        precision=Precision(compute=precision),
        seed=0,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    parameters = list(model.parameters())

    def step(tokens_BS: torch.Tensor) -> torch.Tensor:
        labels_BS = torch.nn.functional.pad(
            tokens_BS[:, 1:], (0, 1), value=-100
        )  # the shift the reference makes inside
        loss_sum, num_labels = model(tokens_BS, labels_BS)
        loss: torch.Tensor = loss_sum / num_labels
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm(parameters, 1.0, ALONE)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def reference_step(config: TransformerConfig, precision: str, compiled: bool) -> Step:
    """The same for transformers' Llama."""
    import transformers

    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_kv_heads,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        max_position_embeddings=config.max_seq_len,
        rope_parameters=dict(rope_type="default", rope_theta=config.rope_theta),
        use_cache=False,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    model: Any = transformers.LlamaForCausalLM(shape)
    assert sum(p.numel() for p in model.parameters()) == num_params(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    parameters = list(model.parameters())
    forward = torch.compile(model) if compiled else model

    def step(tokens_BS: torch.Tensor) -> torch.Tensor:
        with (
            torch.autocast("cpu", torch.bfloat16)
            if precision == "bf16"
            else contextlib.nullcontext()
        ):
            loss: torch.Tensor = forward(input_ids=tokens_BS, labels=tokens_BS).loss
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def tokens_per_sec(step: Step, batches: list[torch.Tensor]) -> float:
    """Throughput of one step per batch; the loss is read once, at the end."""
    begin = time.perf_counter()
    for tokens_BS in batches:
        loss = step(tokens_BS)
    loss.item()
    return sum(batch.numel() for batch in batches) / (time.perf_counter() - begin)


def matmul_flops(config: TransformerConfig, rows: int, dtype: torch.dtype) -> float:
    """FLOP/s of the linear products of all blocks and of the head.

    The products give outputs, gradients of inputs and gradients of weights.
    """
    hidden, kv = config.hidden_size, config.num_kv_heads * config.head_dim
    rows = min(rows, 4096)  # of logits there are never more at once
    shapes = [
        (hidden, hidden, 2),
        (hidden, kv, 2),
        (hidden, config.ffn_hidden_size, 2),
        (config.ffn_hidden_size, hidden, 1),
    ]
    counted = [(*shape[:2], shape[2] * config.num_layers) for shape in shapes] + [
        (hidden, config.vocab_size, 1)
    ]
    flops = seconds = 0.0
    for num_in, num_out, count in counted:
        x, weight, dy = (
            torch.randn(s, dtype=dtype)
            for s in ((rows, num_in), (num_out, num_in), (rows, num_out))
        )
        products = ((x, weight.T), (dy, weight), (dy.T, x))
        best = float("inf")
        for _ in range(3):
            begin = time.perf_counter()
            for left, right in products:
                torch.mm(left, right)
            best = min(best, time.perf_counter() - begin)
        flops, seconds = flops + count * 6 * rows * num_in * num_out, seconds + count * best
    return flops / seconds


class Contestant:
    """A model that trains in a process of its own, when it is asked to.

    Waiting of threads and memory of GPUs are settings that torch reads when it is imported, so `tuned` needs
    a new process.
    """

    def __init__(self, name: str, tuned: bool, *setting: Any) -> None:
        environment = dict(os.environ)
        let_gpu_memory_grow()  # both
        if tuned:
            set_thread_waiting()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, name, tuned, *setting), daemon=True
        )
        self._process.start()
        theirs.close()
        os.environ.clear()
        os.environ.update(environment)

    def ask(self, request: str) -> Any:
        """What `serve` answers; EOFError where the process has died."""
        self._pipe.send(request)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


def serve(
    pipe: Connection,
    name: str,
    tuned: bool,
    config: TransformerConfig,
    args: argparse.Namespace,
    case: Case,
) -> None:
    """Answers until the pipe is closed: losses of the warm-up, tokens/s of a round, or peak GiB."""
    if tuned:
        keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    batches = [
        torch.randint(0, config.vocab_size, (args.batch_size, args.seq_length), generator=generator)
        for _ in range(args.steps)
    ]
    step = {"ours": our_step, "reference": reference_step}[name](config, *case)
    with contextlib.suppress(EOFError):
        while True:
            request = pipe.recv()
            if request == "warm up":
                pipe.send([step(batches[0]).item() for _ in range(args.warmup)])
            elif request == "round":
                pipe.send(tokens_per_sec(step, batches))
            else:
                pipe.send(round(memory_stats(torch.device("cpu"))["peak_mem_gib"], 3))


def bench_case(config: TransformerConfig, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Raw rounds of one precision and mode, and their medians."""
    precision, compiled = case
    with contextlib.ExitStack() as stack:
        contestants: dict[str, Contestant] = {}
        for name in args.contestants.split(","):
            tuned = name == "ours" or args.tuned == "both"
            contestants[name] = Contestant(name, tuned, config, args, case)
            stack.callback(contestants[name].close)
        result: dict[str, Any] = {
            "precision": precision,
            "mode": "compiled" if compiled else "eager",
        }
        begin = time.perf_counter()
        result["warmup_losses"] = {name: one.ask("warm up") for name, one in contestants.items()}
        result["warmup_s"] = round(time.perf_counter() - begin, 1)
        rounds = []
        for index in range(args.rounds):
            order = list(contestants.items())[:: 1 if index % 2 == 0 else -1]
            before = matmul_flops(config, args.batch_size * args.seq_length, DTYPES[precision])
            measured = {f"{name}_tokens_per_sec": one.ask("round") for name, one in order}
            after = matmul_flops(config, args.batch_size * args.seq_length, DTYPES[precision])
            rounds.append({"matmul_gflops": (before + after) / 2e9, **measured})
        result |= {f"{name}_peak_mem_gib": one.ask("memory") for name, one in contestants.items()}
    return result | (summary(config, rounds, args) if rounds else {})


def summary(
    config: TransformerConfig, rounds: list[dict[str, float]], args: argparse.Namespace
) -> dict[str, Any]:
    """Medians of the rounds, shares of the matmul rate, and the ratio of the two."""
    case: dict[str, Any] = {}
    attention = 12 * config.num_layers * config.hidden_size * args.seq_length
    multiplied = (matmul_flops_per_token(config, args.seq_length) - attention / 2) / 1e9
    per_token = flops_per_token(config, args.seq_length) / 1e9
    medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    case |= {key: round(value, 1) for key, value in medians.items()}
    names = args.contestants.split(",")
    for name in names:
        shares = [one[f"{name}_tokens_per_sec"] / one["matmul_gflops"] for one in rounds]
        case[f"{name}_share_of_matmul"] = round(multiplied * statistics.median(shares), 3)
        case[f"{name}_share_by_convention"] = round(per_token * statistics.median(shares), 3)
    if len(names) == 2:
        ratios = [one["ours_tokens_per_sec"] / one["reference_tokens_per_sec"] for one in rounds]
        case["ratio"] = round(statistics.median(ratios), 3)
    return case | {"rounds": rounds}


def peak_memory(args: argparse.Namespace, config: TransformerConfig) -> list[dict[str, Any]]:
    """Peak resident GiB of each contestant, by precision and mode; `ratio`: ours to theirs."""
    config = dataclasses.replace(config, vocab_size=args.peak_memory_at)
    args = argparse.Namespace(**{**vars(args), "rounds": 0, "warmup": 10})
    rows = []
    for case in cases_of(args):
        row = bench_case(config, case, args)
        if args.contestants == "ours,reference":
            row["ratio"] = round(row["ours_peak_mem_gib"] / row["reference_peak_mem_gib"], 3)
        print(f"peak memory: {row}", flush=True)
        rows.append(row)
    return rows


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Precision, and whether compiled, of each case."""
    modes, precisions = args.mode.split(","), args.precision.split(",")
    return [
        (precision, mode == "compiled") for mode, precision in itertools.product(modes, precisions)
    ]


def hardware() -> dict[str, Any]:
    """What the numbers depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    names = [
        line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")
    ]
    flags = sorted(
        {flag for flag in text.split() if flag.startswith(("avx512_bf16", "amx_", "avx2"))}
    )
    return {
        "cpu": names[0] if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "features": flags,
    }


def versions() -> dict[str, str]:
    """Python and the packages that matter."""
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model_variant", default="quickstart", help=f"a variant, or one of {', '.join(SHAPES)}"
    )
    parser.add_argument("--vocab_size", type=int, default=None)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--seq_length", type=int, default=128)
    parser.add_argument("--precision", default="fp32,bf16")
    parser.add_argument("--mode", default="eager,compiled")
    parser.add_argument("--rounds", type=int, default=5, help="0: nothing but the warm-up")
    parser.add_argument(
        "--warmup", type=int, default=3, help="optimizer steps of each contestant before the rounds"
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="optimizer steps of each contestant in a round"
    )
    parser.add_argument("--contestants", default="ours,reference", help="or one alone")
    parser.add_argument(
        "--tuned",
        default="ours",
        choices=("ours", "both"),
        help="who has our waiting and allocator",
    )
    parser.add_argument(
        "--peak_memory_at", type=int, default=0, help="vocabulary; 0 leaves memory out"
    )
    parser.add_argument("--output", type=Path, help=HELP)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    variant: str = args.model_variant
    overrides: dict[str, Any] = {}
    if variant in SHAPES:
        (overrides, args.batch_size), args.seq_length, variant = SHAPES[variant], 512, "quickstart"
        args.vocab_size = args.vocab_size or VOCABULARIES[args.model_variant]
    model = ModelConfig(model_variant=variant, vocab_size=args.vocab_size, **overrides)
    config = resolve_model(model, seq_length=args.seq_length)
    now = datetime.datetime.now(datetime.UTC)
    result = {
        "benchmark": "train: ours against transformers' Llama "
        "(fp32 weights, autocast for bf16, sdpa attention)",
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "hardware": hardware(),
        "versions": versions(),
        "model": {"variant": args.model_variant, "parameters": num_params(config)},
        "tokens_per_step": args.batch_size * args.seq_length,
        "flops_per_token": flops_per_token(config, args.seq_length),
        "cases": (cases := []),
    }
    print(
        f"{args.model_variant}: {num_params(config):,} parameters, "
        f"{args.batch_size} x {args.seq_length} tokens a step"
    )
    for precision, compiled in cases_of(args):
        case = bench_case(config, (precision, compiled), args)
        cases.append(case)
        if not args.rounds:
            continue
        shown = [f"ratio {case['ratio']:.2f}"] if "ratio" in case else []
        for name in args.contestants.split(","):
            rate, share = case[f"{name}_tokens_per_sec"], case[f"{name}_share_of_matmul"]
            shown.append(
                f"{name} {rate:8.0f} tok/s = {share:.0%} of {case['matmul_gflops']:.0f} GFLOP/s"
            )
        print(f"{precision} {case['mode']:8s}: {', '.join(shown)}", flush=True)
    if args.peak_memory_at:
        result["peak_memory"] = peak_memory(args, config)
    write_result(result, args.output)


if __name__ == "__main__":
    main()
