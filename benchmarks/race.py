"""Races a training step against other programs' models: same shape and tokens, interleaved rounds.

    python benchmarks/race.py                                     # every shape, precision and mode
    python benchmarks/race.py --shapes=hidden256 --precision=fp32 --mode=eager --rounds=9
    python benchmarks/race.py --python=litgpt:/envs/litgpt/bin/python,torchtitan:/envs/titan/bin/python
    python benchmarks/race.py --contestants=ours --shapes=194m    # ours alone, as a share of the matmul rate

    ours          the model and the step of this repository
    plain         a Llama in 50 lines of torch
    transformers  LlamaForCausalLM with SDPA attention
    litgpt        GPT with its chunked cross-entropy
    torchtitan    Transformer of version 0.1, whose attention runs on a CPU

Each contestant trains fp32 weights (bf16 by autocast; ours casts as its loop does) with fused AdamW and clips
by the global norm. Each has a process of its own, under the Python that `--python` names or else this one, and
waits while another runs. A contestant that is not installed is skipped and named. All have the thread waiting
and the allocator that main_training.py sets; `--tuned=ours` gives them to ours alone, so that the others run as
their users run them. A round measures every contestant for `--steps` steps, and the next one in reverse order.
Ratios are ours to theirs, the median over rounds, by wall-clock time and by CPU time. Run it on a quiet
machine; the load before the race stands in the result.
"""

# ruff: noqa: E402 - a contestant under another Python finds fms_fsdp by this path
from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fms_fsdp.cpu_tuning import keep_freed_memory, set_thread_waiting

# hidden_size, num_layers, num_attention_heads, num_kv_heads, ffn_hidden_size, vocab_size, tied, batch, length
SHAPES = {
    "tiny": (128, 2, 4, 2, 352, 512, True, 2, 64),
    "quickstart": (256, 6, 4, 4, 704, 8192, True, 16, 128),
    "hidden256": (256, 8, 4, 2, 704, 8192, True, 4, 512),
    "hidden768": (768, 12, 12, 12, 2048, 32_000, True, 2, 512),
    "194m": (1024, 10, 8, 8, 2816, 32_000, False, 16, 512),
}
FIELDS = "hidden layers heads kv_heads ffn vocab tied batch length".split()
Shape = dict[str, Any]
Loss = Callable[[Tensor, Tensor], Tensor]  # of tokens and labels, -100 where there is none
Model = tuple[nn.Module, Loss, Callable[[], Any]]  # the third clips the gradients


def ours(shape: Shape, precision: str, compiled: bool) -> Model:
    from fms_fsdp.config import ParallelConfig, Precision
    from fms_fsdp.distributed.axes import ParallelDims
    from fms_fsdp.distributed.mesh import Mesh
    from fms_fsdp.models.config import TransformerConfig
    from fms_fsdp.optim.optimizers import scale_gradients
    from fms_fsdp.parallel.fsdp import clip_factor
    from fms_fsdp.parallel.parallelize import parallelize

    alone = Mesh(ParallelDims("none"), 0, "cpu")
    config = TransformerConfig(
        num_layers=shape["layers"],
        hidden_size=shape["hidden"],
        ffn_hidden_size=shape["ffn"],
        num_attention_heads=shape["heads"],
        num_kv_heads=shape["kv_heads"],
        vocab_size=shape["vocab"],
        max_seq_len=shape["length"],
        tie_embeddings=shape["tied"],
    )
    model = parallelize(
        config,
        ParallelConfig(use_torch_compile=compiled),
        alone,
        device=torch.device("cpu"),
        precision=Precision(compute=precision),
        seed=0,
    )
    parameters = list(model.parameters())

    def loss(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        loss_sum, num_labels = model(tokens_BS, labels_BS)
        return loss_sum / num_labels  # type: ignore[no-any-return]

    def clip() -> None:
        _, factor = clip_factor(parameters, 1.0, alone)
        assert factor is not None
        scale_gradients(parameters, factor)

    return model, loss, clip


class PlainBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, ffn, head = shape["hidden"], shape["ffn"], shape["hidden"] // shape["heads"]
        self.head, self.groups = head, shape["heads"] // shape["kv_heads"]
        self.norm1, self.norm2 = (nn.RMSNorm(hidden, eps=1e-5) for _ in range(2))
        self.q, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden, head * shape["kv_heads"], bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = (
            each * cos + torch.cat([-each.chunk(2, -1)[1], each.chunk(2, -1)[0]], -1) * sin
            for each in (q, k)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups > 1)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PlainLlama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape["vocab"], shape["hidden"])
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape["layers"]))
        self.norm = nn.RMSNorm(shape["hidden"], eps=1e-5)
        self.output = nn.Linear(shape["hidden"], shape["vocab"], bias=False)
        if shape["tied"]:
            self.output.weight = self.embedding.weight
        head = shape["hidden"] // shape["heads"]
        angles = torch.arange(shape["length"])[:, None] / 1e4 ** (torch.arange(0, head, 2) / head)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def plain(shape: Shape) -> tuple[nn.Module, Loss]:
    model = PlainLlama(shape)
    return model, lambda tokens, labels: F.cross_entropy(
        model(tokens).flatten(0, 1), labels.flatten()
    )


def transformers(shape: Shape) -> tuple[nn.Module, Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape["hidden"],
        intermediate_size=shape["ffn"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        vocab_size=shape["vocab"],
        tie_word_embeddings=shape["tied"],
        max_position_embeddings=shape["length"],
        use_cache=False,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    model: Any = LlamaForCausalLM(config)
    # its labels are shifted inside, as ours are outside
    return model, lambda tokens, labels: model(input_ids=tokens, labels=tokens).loss


def litgpt(shape: Shape) -> tuple[nn.Module, Loss]:
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    config = Config(
        n_embd=shape["hidden"],
        intermediate_size=shape["ffn"],
        n_layer=shape["layers"],
        n_head=shape["heads"],
        n_query_groups=shape["kv_heads"],
        vocab_size=shape["vocab"],
        padded_vocab_size=shape["vocab"],
        block_size=shape["length"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )
    model: Any = GPT(config)
    if shape["tied"]:
        model.lm_head.weight = model.transformer.wte.weight
    return model, lambda tokens, labels: chunked_cross_entropy(model(tokens), labels)


def torchtitan(shape: Shape) -> tuple[nn.Module, Loss]:
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    args = TransformerModelArgs(
        dim=shape["hidden"],
        n_layers=shape["layers"],
        n_heads=shape["heads"],
        n_kv_heads=shape["kv_heads"],
        vocab_size=shape["vocab"],
        multiple_of=shape["ffn"],  # it rounds 8/3 of the width up to this multiple
        max_seq_len=shape["length"],
    )
    model: Any = Transformer(args)
    model.init_weights()
    if shape["tied"]:
        model.output.weight = model.tok_embeddings.weight
    return model, lambda tokens, labels: F.cross_entropy(
        model(tokens).flatten(0, 1).float(), labels.flatten()
    )


PEERS = {each.__name__: each for each in (plain, transformers, litgpt, torchtitan)}


def build_step(
    name: str, shape: Shape, precision: str, compiled: bool
) -> tuple[int, Callable[[Tensor], Tensor]]:
    """Returns the number of parameters, and a function of tokens that takes a step."""
    torch.manual_seed(0)
    clip: Callable[[], Any]
    if name == "ours":
        model, loss_of, clip = ours(shape, precision, compiled)
        autocast = False
    else:
        model, loss_of = PEERS[name](shape)
        autocast = precision == "bf16"
        peer_parameters = list(model.parameters())
        clip = lambda: nn.utils.clip_grad_norm_(peer_parameters, 1.0)  # noqa: E731
        if compiled:
            model.compile()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step(tokens_BS: Tensor) -> Tensor:
        labels_BS = F.pad(tokens_BS[:, 1:], (0, 1), value=-100)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(tokens_BS, labels_BS)
        loss.backward()  # type: ignore[no-untyped-call]
        clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return sum(parameter.numel() for parameter in model.parameters()), step


def serve(name: str, setting: dict[str, Any]) -> None:
    """Answers each line of stdin by a line of JSON, in a process of its own.

    The answers are the parameters and losses of the warm-up, then [tokens/s, tokens per CPU second, peak GiB]
    of each round.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    if setting["tuned"]:
        keep_freed_memory()
    shape = setting["shape"]
    generator = torch.Generator().manual_seed(0)
    size = (setting["steps"], shape["batch"], shape["length"])
    batches = torch.randint(0, shape["vocab"], size, generator=generator)
    num_params, step = build_step(name, shape, setting["precision"], setting["compiled"])
    for line in sys.stdin:
        if line.strip() == "warm up":
            losses = [round(step(batches[0]).item(), 4) for _ in range(setting["warmup"])]
            answer: Any = [num_params, losses]
        else:
            begin, cpu = time.perf_counter(), time.process_time()
            for tokens_BS in batches:
                loss = step(tokens_BS)
            loss.item()
            seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            answer = [batches.numel() / seconds, batches.numel() / cpu_s, round(peak, 3)]
        print(json.dumps(answer), file=answers, flush=True)


class Contestant:
    """A model that trains in a process of its own, when it is asked to."""

    def __init__(self, name: str, python: str, setting: dict[str, Any]) -> None:
        self.name, environment = name, dict(os.environ)
        if setting["tuned"]:
            set_thread_waiting()  # torch reads it when it is imported
        self.process = subprocess.Popen(
            [python, __file__, "--serve", name, json.dumps(setting)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        os.environ.clear()
        os.environ.update(environment)

    def ask(self, request: str) -> Any:
        """Returns what `serve` answers.

        Raises:
            SystemExit: the process has died; its traceback stands above.
        """
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            print(request, file=self.process.stdin, flush=True)
        if not (answer := self.process.stdout.readline()):
            raise SystemExit(f"error: {self.name} died")
        return json.loads(answer)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def matmul_flops(shape: Shape, dtype: torch.dtype) -> float:
    """Returns the FLOP/s of the model's own matmuls: outputs, gradients of inputs and of weights."""
    hidden, kv = shape["hidden"], shape["hidden"] // shape["heads"] * shape["kv_heads"]
    rows = min(shape["batch"] * shape["length"], 4096)
    counted = [(hidden, hidden, 2), (hidden, kv, 2), (hidden, shape["ffn"], 3)]
    sizes = [(*size, count * shape["layers"]) for *size, count in counted]
    flops = seconds = 0.0
    for num_in, num_out, count in [*sizes, (hidden, shape["vocab"], 1)]:
        x, weight, dy = (
            torch.randn(size, dtype=dtype)
            for size in ((rows, num_in), (num_out, num_in), (rows, num_out))
        )
        best = float("inf")
        for _ in range(3):
            begin = time.perf_counter()
            for left, right in ((x, weight.T), (dy, weight), (dy.T, x)):
                torch.mm(left, right)
            best = min(best, time.perf_counter() - begin)
        flops, seconds = flops + count * 6 * rows * num_in * num_out, seconds + count * best
    return flops / seconds


def race(
    shape: Shape, precision: str, compiled: bool, pythons: dict[str, str], args: Any
) -> dict[str, Any]:
    """Returns the raw rounds of one shape, precision and mode, and their medians."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    base = dict(shape=shape, precision=precision, compiled=compiled)
    base |= dict(steps=args.steps, warmup=args.warmup)
    rounds: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        contestants = {}
        for name, python in pythons.items():
            tuned = name == "ours" or args.tuned == "all"
            contestants[name] = Contestant(name, python, base | {"tuned": tuned})
            stack.callback(contestants[name].close)
        warm = {name: one.ask("warm up") for name, one in contestants.items()}
        assert len({num_params for num_params, _ in warm.values()}) == 1, warm
        for index in range(args.rounds):
            order = list(contestants)[:: 1 if index % 2 == 0 else -1]
            rate = matmul_flops(shape, dtype)
            measured = {name: contestants[name].ask("round") for name in order}
            rounds.append({"matmul_gflops": rate / 1e9, **measured})
    num_params = warm["ours"][0]
    flops = 6 * (num_params - (not shape["tied"]) * shape["vocab"] * shape["hidden"])
    flops += 6 * shape["layers"] * shape["hidden"] * shape["length"]  # causal attention
    result: dict[str, Any] = {"precision": precision, "mode": "compiled" if compiled else "eager"}
    result |= {"parameters": num_params, "losses": {name: each[1] for name, each in warm.items()}}
    shares = [one["ours"][0] * flops / 1e9 / one["matmul_gflops"] for one in rounds]
    result |= {"share_of_matmul_rate": round(statistics.median(shares), 3), "rounds": rounds}
    for kind, place in (("wall", 0), ("cpu", 1)):
        result[f"ratio_{kind}"] = {
            name: round(statistics.median(o["ours"][place] / o[name][place] for o in rounds), 3)
            for name in pythons
            if name != "ours"
        }
    result["tokens_per_sec"] = {
        name: round(statistics.median(one[name][0] for one in rounds)) for name in pythons
    }
    return result


def is_installed(name: str, python: str) -> bool:
    if name in ("ours", "plain"):
        return True
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", code], cwd="/").returncode == 0


def main() -> None:
    from result_file import about_machine, parser_of, write_result

    settings: dict[str, Any] = dict(shapes="quickstart,hidden256,hidden768", precision="fp32,bf16")
    settings |= dict(mode="eager,compiled", contestants=",".join(["ours", *PEERS]), python="")
    settings |= dict(tuned="all", rounds=5, warmup=3, steps=4)
    args = parser_of(__doc__, **settings).parse_args()
    if not {"ours"} <= set(args.contestants.split(",")) <= {"ours", *PEERS}:
        raise SystemExit(f"error: --contestants must be ours and some of {', '.join(PEERS)}")
    own = dict(pair.split(":", 1) for pair in args.python.split(",") if pair)
    pythons = {name: own.get(name, sys.executable) for name in args.contestants.split(",")}
    for name in [name for name, python in pythons.items() if not is_installed(name, python)]:
        print(f"{name} is not installed: skipped", file=sys.stderr)
        del pythons[name]
    cases: list[dict[str, Any]] = []
    result = about_machine() | {"tuned": args.tuned, "peers": {}, "cases": cases}
    for name in set(pythons) & {"transformers", "litgpt", "torchtitan"}:
        code = f"from importlib.metadata import version; print(version({name!r}))"
        told = subprocess.run([pythons[name], "-c", code], capture_output=True, text=True, cwd="/")
        result["peers"][name] = told.stdout.strip()
    names = [name for name in pythons if name != "ours"]
    print("| shape | precision | mode | share of matmul rate |", *(f"{n} |" for n in names))
    print("|" + "---|" * (4 + len(names)))
    for variant, mode, precision in itertools.product(
        args.shapes.split(","), args.mode.split(","), args.precision.split(",")
    ):
        shape = dict(zip(FIELDS, SHAPES[variant], strict=True))
        case = race(shape, precision, mode == "compiled", pythons, args)
        cases.append({"shape": variant} | case)
        cells = [f"{case['ratio_wall'][n]} ({case['ratio_cpu'][n]})" for n in names]
        row = [variant, precision, mode, str(case["share_of_matmul_rate"]), *cells]
        print("| " + " | ".join(row) + " |", flush=True)
    write_result(result, args.output)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()
