"""Compares training throughput with `transformers`' Llama of the same shape, on the same data, interleaved.

    for each precision × mode:   warm up both, then rounds of
        matmul rate │ ours × steps │ reference × steps │ matmul rate

It compares eager with eager and compiled with compiled. Both train on dummy tokens with fused AdamW and clip
by the global norm. The reference runs as its users run it: SDPA attention, fp32 weights, bf16 by
`torch.autocast`, `torch.compile` of the whole model. Ours runs the steps of the training loop with the thread
waiting and the allocator that main_training.py sets. Each has a process of its own and waits while the other
runs. `--tuned=both` gives the reference our waiting and allocator too: the remaining difference is that of the
models. `--contestants=ours` measures ours alone.

The matmul rate is the rate of the model's own matmuls: every projection and the head, forward and for both
gradients, at the sequences of a step. The fraction of it excludes the embedding lookup and half of the causal
attention.

    python benchmarks/against_transformers.py              # fp32 and bf16, eager and compiled; a few minutes
    python benchmarks/against_transformers.py --precision=fp32 --mode=eager --rounds=3
    python benchmarks/against_transformers.py --model_variant=hidden256   # another shape; hidden768 too

The ratio of a round compares neighbors in time; the result is the median over rounds. `memory_ratio` compares
the peak resident memory of the processes. Run it on a quiet machine."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

import torch
from result_file import about_machine, parser_of, write_result

from fms_fsdp.config import ModelConfig, ParallelConfig, Precision
from fms_fsdp.cpu_tuning import keep_freed_memory, let_gpu_memory_grow, set_thread_waiting
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.metrics.hardware import memory_stats
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import matmul_flops_per_token, num_params
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.parallel.fsdp import clip_grad_norm
from fms_fsdp.parallel.parallelize import parallelize

# more shapes: overrides of `quickstart`, sequences of 512 tokens per step, vocabulary
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
        8192,
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
        32_000,
    ),
}
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
    if len(contestants) == 2:
        ratio = result["ours_peak_mem_gib"] / result["reference_peak_mem_gib"]
        result["memory_ratio"] = round(ratio, 3)
    return result | summary(config, rounds, args)


def summary(
    config: TransformerConfig, rounds: list[dict[str, float]], args: argparse.Namespace
) -> dict[str, Any]:
    """Returns medians of the rounds, fractions of the matmul rate, and the ratio of the two."""
    attention = 12 * config.num_layers * config.hidden_size * args.seq_length
    multiplied = (matmul_flops_per_token(config, args.seq_length) - attention / 2) / 1e9
    medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    case: dict[str, Any] = {key: round(value, 1) for key, value in medians.items()}
    names = args.contestants.split(",")
    for name in names:
        shares = [one[f"{name}_tokens_per_sec"] / one["matmul_gflops"] for one in rounds]
        case[f"{name}_share_of_matmul"] = round(multiplied * statistics.median(shares), 3)
    if len(names) == 2:
        ratios = [one["ours_tokens_per_sec"] / one["reference_tokens_per_sec"] for one in rounds]
        case["ratio"] = round(statistics.median(ratios), 3)
    return case | {"rounds": rounds}


def main() -> None:
    settings = dict(model_variant="quickstart", vocab_size=0, batch_size=16, seq_length=128)
    settings |= dict(precision="fp32,bf16", mode="eager,compiled", rounds=5, warmup=3, steps=4)
    args = parser_of(__doc__, **settings, contestants="ours,reference", tuned="ours").parse_args()
    variant: str = args.model_variant
    overrides: dict[str, Any] = {}
    if variant in SHAPES:
        overrides, args.batch_size, vocab_size = SHAPES[variant]
        args.vocab_size, args.seq_length = args.vocab_size or vocab_size, 512
        variant = "quickstart"
    model = ModelConfig(model_variant=variant, vocab_size=args.vocab_size or None, **overrides)
    config = resolve_model(model, seq_length=args.seq_length)
    cases: list[dict[str, Any]] = []
    result = about_machine() | {
        "transformers": version("transformers"),
        "model": {"variant": args.model_variant, "parameters": num_params(config)},
        "tokens_per_step": args.batch_size * args.seq_length,
        "cases": cases,
    }
    for mode, precision in itertools.product(args.mode.split(","), args.precision.split(",")):
        cases.append(bench_case(config, (precision, mode == "compiled"), args))
        shown = {name: value for name, value in cases[-1].items() if name != "rounds"}
        print(shown, flush=True)
    write_result(result, args.output)


if __name__ == "__main__":
    main()
