"""Races a training step against other programs' models: same shape and tokens, interleaved rounds.

    python benchmarks/race.py                                     # every shape, precision and mode
    python benchmarks/race.py --shapes=hidden256 --precision=fp32 --mode=eager --rounds=9
    python benchmarks/race.py --python=litgpt:/envs/litgpt/bin/python,torchtitan:/envs/titan/bin/python
    python benchmarks/race.py --contestants=ours --shapes=194m    # ours alone, as a share of the matmul rate
    python benchmarks/race.py --device=cuda                       # one GPU: three Llamas in bf16, compiled

    ours          the model and the step of this repository
    plain         a Llama in 50 lines of torch
    transformers  LlamaForCausalLM with SDPA attention
    litgpt        GPT with its chunked cross-entropy
    torchtitan    Transformer of version 0.1, whose attention runs on a CPU

Each contestant trains fp32 weights (bf16 by autocast; ours casts as its loop does) with fused AdamW and clips
by the global norm. Each has a process of its own, under the Python that `--python` names or else this one, and
waits while another runs. On a GPU, whose memory has no space for two, a process trains one round and ends
(`--processes=fresh`). All have the thread waiting and the allocator that main_training.py sets; `--tuned=ours`
gives them to ours alone, so that the others run as their users run them. Ours recomputes activations cheaply on
a GPU, as its best settings do.

A round measures every contestant for `--steps` steps, and the next one in reverse order. Ratios are ours to
theirs, the median over rounds, by wall-clock time and by CPU time; where the rounds cover 1.0 the two are equal
within the noise. A contestant that is not installed, does not fit or dies ends its own row with the reason, not the
race. Run it on a quiet machine; the load before the race stands in the result.

A GPU machine without a network needs the peers as wheels, unpacked as WHEELS of scripts/gpu_session.sh says:
litgpt 0.5.13 with lightning, lightning_utilities and torchmetrics; torchtitan 0.1.0 with torchdata, tiktoken and
datasets, whose own are dill, multiprocess, pandas and xxhash; transformers with tokenizers and huggingface_hub.
The row of a contestant names a package that is still missing.
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
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fms_fsdp.process import keep_freed_memory, let_gpu_memory_grow, set_thread_waiting

# hidden_size, num_layers, num_attention_heads, num_kv_heads, ffn_hidden_size, vocab_size, tied, batch, length
SHAPES = {
    "tiny": (128, 2, 4, 2, 352, 512, True, 2, 64),
    "quickstart": (256, 6, 4, 4, 704, 8192, True, 16, 128),
    "hidden256": (256, 8, 4, 2, 704, 8192, True, 4, 512),
    "hidden768": (768, 12, 12, 12, 2048, 32_000, True, 2, 512),
    "194m": (1024, 10, 8, 8, 2816, 32_000, False, 16, 512),
    "llama3.2_1b": (2048, 16, 32, 8, 8192, 128_256, True, 4, 4096),
    "llama3.2_3b": (3072, 28, 24, 8, 8192, 128_256, True, 2, 4096),
    "llama3_8b": (4096, 32, 32, 8, 14_336, 128_256, False, 3, 4096),
}
FIELDS = "hidden layers heads kv_heads ffn vocab tied batch length".split()
Shape = dict[str, Any]
Loss = Callable[[Tensor, Tensor], Tensor]  # of tokens and labels, -100 where there is none
Update = Callable[[], None]  # clips the gradients, updates the weights, frees the gradients
LEARNING_RATE = 3e-4
LOSS_AFTER = 10  # steps, on a GPU


def ours(
    shape: Shape, precision: str, compiled: bool, device: torch.device
) -> tuple[nn.Module, Loss, Update]:
    from fms_fsdp.config import OptimConfig, ParallelConfig, Precision
    from fms_fsdp.distributed.axes import ParallelDims
    from fms_fsdp.distributed.mesh import Mesh
    from fms_fsdp.optim.optimizers import build_optimizers
    from fms_fsdp.parallel.fsdp import clip_factor
    from fms_fsdp.parallel.parallelize import parallelize

    alone = Mesh(ParallelDims("none"), 0, device.type)
    recompute = "cheap" if compiled and device.type == "cuda" else None
    numbers = Precision(compute=precision)
    model = parallelize(
        our_config(shape),
        ParallelConfig(use_torch_compile=compiled, recompute=recompute),
        alone,
        device=device,
        precision=numbers,
        seed=0,
    )
    section = OptimConfig(learning_rate=LEARNING_RATE, weight_decay=0.1)
    optimizers = build_optimizers(section, model, numbers)
    parameters = list(model.parameters())

    def loss(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        loss_sum, num_labels = model(tokens_BS, labels_BS)
        return loss_sum / num_labels  # type: ignore[no-any-return]

    def update() -> None:
        norm, factor = clip_factor(parameters, 1.0, alone)
        optimizers.step(lambda base: base, norm, factor)
        optimizers.zero_grad()

    return model, loss, update


def our_config(shape: Shape) -> Any:
    """Returns the shape as a `TransformerConfig`."""
    from fms_fsdp.models.config import TransformerConfig

    return TransformerConfig(
        num_layers=shape["layers"],
        hidden_size=shape["hidden"],
        ffn_hidden_size=shape["ffn"],
        num_attention_heads=shape["heads"],
        num_kv_heads=shape["kv_heads"],
        vocab_size=shape["vocab"],
        max_seq_len=shape["length"],
        tie_embeddings=shape["tied"],
    )


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
    name: str, shape: Shape, precision: str, compiled: bool, device: torch.device
) -> tuple[int, Callable[[Tensor], Tensor]]:
    """Returns the number of parameters, and a function of tokens that takes a step."""
    torch.manual_seed(0)
    if name == "ours":
        model, loss_of, update = ours(shape, precision, compiled, device)
        autocast = False
    else:
        with device:  # initial weights are drawn where they stay
            model, loss_of = PEERS[name](shape)
        model.to(device)
        autocast = precision == "bf16"
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(
            parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        if compiled:
            model.compile()

        def update() -> None:
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def step(tokens_BS: Tensor) -> Tensor:
        labels_BS = F.pad(tokens_BS[:, 1:], (0, 1), value=-100)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = loss_of(tokens_BS, labels_BS)
        loss.backward()  # type: ignore[no-untyped-call]
        update()
        return loss.detach()

    return sum(parameter.numel() for parameter in model.parameters()), step


def serve(name: str, setting: dict[str, Any]) -> None:
    """Answers each line of stdin by a line of JSON, in a process of its own.

    The answers are the parameters and losses of the warm-up, then [tokens/s, tokens per CPU second, peak GiB]
    of each round; {"error": reason} is the last one of a contestant that fails.
    """
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no answer
    try:
        for answer in answers_of(name, setting):
            print(json.dumps(answer), file=answers, flush=True)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": reason_of(error)}), file=answers, flush=True)
        sys.exit(1)


def reason_of(error: Exception) -> str:
    """Returns in one line why a contestant ends."""
    first_line = str(error).partition("\n")[0][:200]
    if isinstance(error, torch.OutOfMemoryError):
        return f"does not fit: {first_line}"
    if isinstance(error, ModuleNotFoundError):
        return f"lacks the package {error.name}"
    return f"{type(error).__name__}: {first_line}"


def answers_of(name: str, setting: dict[str, Any]) -> Iterator[Any]:
    """Yields the answer to each line of stdin."""
    if setting["tuned"]:
        keep_freed_memory()
    device = torch.device(setting["device"])
    shape = setting["shape"]
    generator = torch.Generator().manual_seed(0)
    size = (setting["steps"], shape["batch"], shape["length"])
    batches = torch.randint(0, shape["vocab"], size, generator=generator).to(device)
    num_params, step = build_step(name, shape, setting["precision"], setting["compiled"], device)
    for line in sys.stdin:
        if line.strip() == "warm up":
            losses = [round(step(batches[0]).item(), 4) for _ in range(setting["warmup"])]
            yield [num_params, losses]
            continue
        begin = time.perf_counter()
        cpu = time.process_time()
        for tokens_BS in batches:
            loss = step(tokens_BS)
        loss.item()  # waits for the device
        seconds = time.perf_counter() - begin
        cpu_s = time.process_time() - cpu
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        yield [batches.numel() / seconds, batches.numel() / cpu_s, round(peak, 3)]


class ContestantDied(Exception):
    """Why a contestant cannot go on."""


class Contestant:
    """A model that trains in a process of its own, when it is asked to."""

    def __init__(self, name: str, python: str, setting: dict[str, Any]) -> None:
        environment = dict(os.environ)
        if setting["tuned"]:  # torch reads both when it is imported
            set_thread_waiting()
            let_gpu_memory_grow()
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
            ContestantDied: the process has failed; its traceback stands above.
        """
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            print(request, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise ContestantDied(f"died with exit status {self.process.wait()}")
        answer = json.loads(line)
        if isinstance(answer, dict):
            raise ContestantDied(answer["error"])
        return answer

    def close(self) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has died
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


class Heat:
    """The contestants of one shape, precision and mode, their rounds, and why some have ended."""

    def __init__(self, pythons: dict[str, str], setting: dict[str, Any], args: Any) -> None:
        self.ended = dict[str, str]()  # contestant → reason
        self.warm = dict[str, Any]()  # contestant → parameters and losses
        self.rounds = list[dict[str, Any]]()
        self.num_params: int | None = None
        self._pythons = pythons
        self._setting = setting
        self._tuned = args.tuned
        self._is_fresh = args.processes == "fresh"
        self._kept = dict[str, Contestant]()

    def run(self, num_rounds: int) -> None:
        """Warms up every contestant and measures the rounds."""
        try:
            if not self._is_fresh:
                for name in self._pythons:
                    self._ask_or_end(name, "warm up")
            for index in range(num_rounds):
                self.rounds.append(self._run_round(is_reversed=index % 2 == 1))
        finally:
            for contestant in self._kept.values():
                contestant.close()

    def _run_round(self, *, is_reversed: bool) -> dict[str, Any]:
        found = dict[str, Any]()
        if self._setting["device"] == "cpu":
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[self._setting["precision"]]
            found["matmul_gflops"] = matmul_flops(self._setting["shape"], dtype) / 1e9
        names = list(self._pythons)
        if is_reversed:
            names.reverse()
        for name in names:
            if self._is_fresh:
                self._ask_or_end(name, "warm up")
            answer = self._ask_or_end(name, "round")
            if answer is not None:
                found[name] = answer
            if self._is_fresh and name in self._kept:
                self._kept.pop(name).close()
        return found

    def _ask_or_end(self, name: str, request: str) -> Any:
        """Returns the answer of a contestant; None if it has ended."""
        if name in self.ended:
            return None
        if name not in self._kept:
            tuned = name == "ours" or self._tuned == "all"
            setting = self._setting | {"tuned": tuned}
            self._kept[name] = Contestant(name, self._pythons[name], setting)
        try:
            answer = self._kept[name].ask(request)
            if request == "warm up":
                self._check_size(answer[0])
                self.warm[name] = answer
        except ContestantDied as error:
            self.ended[name] = str(error)
            self._kept.pop(name).close()
            print(f"{name} ends: {error}", file=sys.stderr)
            return None
        return answer

    def _check_size(self, num_params: int) -> None:
        if self.num_params is None:
            self.num_params = num_params
        if num_params != self.num_params:
            raise ContestantDied(f"has {num_params:,} parameters, not {self.num_params:,}")


def race(
    shape: Shape, precision: str, compiled: bool, pythons: dict[str, str], args: Any
) -> dict[str, Any]:
    """Returns the raw rounds of one shape, precision and mode, and their medians."""
    setting = dict(shape=shape, precision=precision, compiled=compiled, device=args.device)
    setting |= dict(steps=args.steps, warmup=args.warmup)
    heat = Heat(pythons, setting, args)
    heat.run(args.rounds)
    result: dict[str, Any] = {"precision": precision, "mode": "compiled" if compiled else "eager"}
    result |= {"losses": {name: losses for name, (_, losses) in heat.warm.items()}}
    result |= {"ended": heat.ended, "rounds": heat.rounds}
    if heat.num_params is not None:
        result["parameters"] = heat.num_params
    for name in pythons:
        measured = [one[name] for one in heat.rounds if name in one]
        if measured:
            result.setdefault("tokens_per_sec", {})[name] = round(median_at(measured, 0))
            result.setdefault("peak_gib", {})[name] = max(peak for _, _, peak in measured)
    for kind, place in (("wall", 0), ("cpu", 1)):
        ratios = ratios_of(heat.rounds, place)
        result[f"ratio_{kind}"] = {
            name: round(statistics.median(each), 3) for name, each in ratios.items()
        }
        if kind == "wall":
            result["equal_within_noise"] = [
                name for name, each in ratios.items() if covers_one(each)
            ]
    if "ours" in heat.warm and args.device == "cpu":
        result["share_of_matmul_rate"] = share_of_matmul_rate(shape, heat)
    if args.device == "cuda":
        result["mfu"] = mfu_of(shape, result.get("tokens_per_sec", {}))
    return result


def median_at(measured: list[list[float]], place: int) -> float:
    """Returns the median over rounds of one of the values of a round."""
    return statistics.median(one[place] for one in measured)


def ratios_of(rounds: list[dict[str, Any]], place: int) -> dict[str, list[float]]:
    """Returns ours to each other contestant, in the rounds that both ended."""
    found = dict[str, list[float]]()
    for one in rounds:
        for name in PEERS:
            if name in one and "ours" in one:
                found.setdefault(name, []).append(one["ours"][place] / one[name][place])
    return found


def covers_one(ratios: list[float]) -> bool:
    """Returns whether rounds say neither faster nor slower; one round cannot say so."""
    return len(ratios) > 1 and min(ratios) <= 1.0 <= max(ratios)


def share_of_matmul_rate(shape: Shape, heat: Heat) -> float | None:
    """Returns the rate of our step over that of its matmuls alone, the median over rounds."""
    flops = 6 * (heat.warm["ours"][0] - (not shape["tied"]) * shape["vocab"] * shape["hidden"])
    flops += 6 * shape["layers"] * shape["hidden"] * shape["length"]  # causal attention
    shares = [
        one["ours"][0] * flops / 1e9 / one["matmul_gflops"] for one in heat.rounds if "ours" in one
    ]
    return round(statistics.median(shares), 3) if shares else None


def mfu_of(shape: Shape, tokens_per_sec: dict[str, float]) -> dict[str, float]:
    """Returns the MFU of each contestant on this GPU; {} if its peak is not known."""
    from fms_fsdp.models.flops import flops_per_token
    from fms_fsdp.predict.devices import known_device

    total_memory = torch.cuda.get_device_properties(0).total_memory
    device = known_device(torch.cuda.get_device_name(), total_memory)
    if device is None:
        return {}
    flops = flops_per_token(our_config(shape), shape["length"])
    peak = device.peak("bf16")
    return {name: round(rate * flops / peak, 3) for name, rate in tokens_per_sec.items()}


def is_installed(name: str, python: str) -> bool:
    if name in ("ours", "plain"):
        return True
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", code], cwd="/").returncode == 0


ON_CPU: dict[str, Any] = dict(
    shapes="quickstart,hidden256,hidden768",
    precision="fp32,bf16",
    mode="eager,compiled",
    processes="kept",
    rounds=5,
    warmup=3,
    steps=4,
)
ON_GPU: dict[str, Any] = dict(
    shapes="llama3.2_1b,llama3.2_3b,llama3_8b",
    precision="bf16",
    mode="compiled",
    processes="fresh",
    rounds=3,
    warmup=LOSS_AFTER,
    steps=8,
)


def main() -> None:
    from result_file import about_machine, parser_of, write_result

    open_settings = {name: type(value)() for name, value in ON_CPU.items()}
    contestants = ",".join(["ours", *PEERS])
    args = parser_of(
        __doc__, device="cpu", contestants=contestants, python="", tuned="all", **open_settings
    ).parse_args()
    if args.device not in ("cpu", "cuda"):
        raise SystemExit(f"error: --device={args.device} must be cpu or cuda")
    for name, value in (ON_GPU if args.device == "cuda" else ON_CPU).items():
        if not getattr(args, name):
            setattr(args, name, value)
    if not {"ours"} <= set(args.contestants.split(",")) <= {"ours", *PEERS}:
        raise SystemExit(f"error: --contestants must be ours and some of {', '.join(PEERS)}")
    own = dict(pair.split(":", 1) for pair in args.python.split(",") if pair)
    pythons = {name: own.get(name, sys.executable) for name in args.contestants.split(",")}
    names = list(pythons)
    absent = dict[str, str]()
    for name in names:
        if not is_installed(name, pythons[name]):
            print(f"{name} is not installed: skipped", file=sys.stderr)
            absent[name] = "is not installed"
            del pythons[name]
    cases: list[dict[str, Any]] = []
    result = about_machine() | {"tuned": args.tuned, "peers": {}, "cases": cases}
    for name in set(pythons) & {"transformers", "litgpt", "torchtitan"}:
        code = f"from importlib.metadata import version; print(version({name!r}))"
        told = subprocess.run([pythons[name], "-c", code], capture_output=True, text=True, cwd="/")
        result["peers"][name] = told.stdout.strip()
    print(
        "| shape | precision | mode | contestant | tokens/s | ours to it (by CPU time) | MFU | ",
        end="",
    )
    print("share of matmul rate | peak GiB | loss |")
    print("|" + "---|" * 10)
    for variant, mode, precision in itertools.product(
        args.shapes.split(","), args.mode.split(","), args.precision.split(",")
    ):
        shape = dict(zip(FIELDS, SHAPES[variant], strict=True))
        case = race(shape, precision, mode == "compiled", pythons, args)
        case["ended"] |= absent
        cases.append({"shape": variant} | case)
        for name in names:
            row = [variant, precision, mode, name, *cells_of(name, case)]
            print("| " + " | ".join(row) + " |", flush=True)
        write_result(result, args.output)  # a later shape may take the machine down


def cells_of(name: str, case: dict[str, Any]) -> list[str]:
    """Returns the cells of a contestant: its values, or why it has none."""
    if name not in case.get("tokens_per_sec", {}):
        return [case["ended"].get(name, "no round"), "–", "–", "–", "–", "–"]
    ratio = "–"
    if name in case["ratio_wall"]:
        ratio = f"{case['ratio_wall'][name]} ({case['ratio_cpu'][name]})"
    if name in case["equal_within_noise"]:
        ratio = f"equal within the noise, {ratio}"
    if name in case["ended"]:
        ratio = f"{ratio}; then {case['ended'][name]}"
    share = case.get("share_of_matmul_rate") if name == "ours" else None
    return [
        f"{case['tokens_per_sec'][name]:,}",
        ratio,
        str(case.get("mfu", {}).get(name, "–")),
        "–" if share is None else str(share),
        f"{case['peak_gib'][name]:.1f}",
        f"{case['losses'][name][-1]:.4f}",
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()
