"""The recipe on one process: selection of blocks, compilation, clipping, order.

tests/distributed/test_sharded_training.py has the world sizes.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch._functorch.config as functorch_config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fms_fsdp.config import (
    BF16,
    FP32,
    NUM_BYTES,
    ModelConfig,
    ParallelConfig,
    Precision,
    PrecisionConfig,
    TrainConfig,
)
from fms_fsdp.config.formats import parse_block_fraction
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.errors import UserError
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import recomputed_flops_per_token
from fms_fsdp.models.llama import Llama
from fms_fsdp.parallel.activation_checkpointing import select_blocks
from fms_fsdp.parallel.compile import compiles
from fms_fsdp.parallel.fsdp import clip_grad_norm
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.parallel.precision import fsdp_policy, matmul
from fms_fsdp.predict.meter import Shape, cost
from fms_fsdp.run.checks import check_machine
from tests.cli import ROOT, TINY, last_of_each

CPU = torch.device("cpu")
NO_MESH = Mesh(ParallelDims("none"), 0, "cpu")
CONFIG = TransformerConfig(3, 64, 96, 4, 2, 120, max_seq_len=24)


def build(
    config: TransformerConfig = CONFIG, precision: Precision = FP32, **flags: object
) -> Llama:
    section = ParallelConfig(**flags)  # type: ignore[arg-type]
    return parallelize(config, section, NO_MESH, device=CPU, precision=precision, seed=1)


def step(model: Llama, length: int = 24) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tokens = (torch.arange(2 * length) * 7 % 120).view(2, length)
    loss_sum, _ = model(tokens, tokens.roll(-1, 1))
    loss_sum.backward()
    return loss_sum, [
        parameter.grad for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("num_blocks", [1, 5, 6, 32, 80])
@pytest.mark.parametrize("text", ["1", "1/2", "0.33", "2/3", "every:4", "1/7", "0.9"])
def test_checkpointed_blocks_are_evenly_spaced(num_blocks: int, text: str) -> None:
    share = parse_block_fraction("selective_checkpointing", text)
    chosen = select_blocks(num_blocks, share)
    assert sum(chosen) == max(1, int(num_blocks * share))
    places = [i for i, one in enumerate(chosen) if one]
    gaps = {b - a for a, b in zip(places, places[1:], strict=False)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_checkpointing_fractions_mean_what_they_say() -> None:
    assert select_blocks(4, Fraction(1)) == [True] * 4
    assert select_blocks(6, Fraction(1, 2)) == [False, True] * 3
    assert select_blocks(6, Fraction(1, 3)) == [False, False, True] * 2


OPS = [
    ("attention", "every_second_product"),
    ("attention", "products"),
    ("attention",),
    ("products",),
]
OPS += [("attention", "attention_products")]


@pytest.mark.parametrize("precision", [FP32, BF16])
@pytest.mark.parametrize(
    "flags",
    [dict(recompute="blocks"), dict(fsdp_activation_checkpointing=True)]
    + [dict(recompute="blocks", recompute_segment=size) for size in (2, 5)]
    + [dict(recompute="blocks", recompute_segment=2, selective_checkpointing="1/2")]
    + [dict(recompute="ops", recompute_ops=kept) for kept in OPS],
)
def test_recomputation_keeps_loss_and_gradients_to_the_last_bit(
    flags: dict[str, object], precision: Precision
) -> None:
    loss, gradients = step(build(precision=precision))
    again, recomputed = step(build(precision=precision, **flags))
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, recomputed, strict=True))


def flops(**flags: object) -> int:
    """Of the products and the attention of a step."""
    model = build(**flags)
    with FlopCounterMode(display=False) as counter:
        step(model)
    return counter.get_total_flops()


@pytest.mark.parametrize("kept", OPS)
def test_what_is_kept_is_not_computed_again(kept: tuple[str, ...]) -> None:
    """And what is not kept, is: as many FLOPs as hfu counts. torch does not count attention on CPUs."""
    repeated = flops(recompute="ops", recompute_ops=kept) - flops()
    rows, layers = 2 * 24, CONFIG.num_layers
    expected = rows * recomputed_flops_per_token(CONFIG, 24, layers, (*kept, "attention"))
    assert repeated == expected
    assert flops() + repeated <= flops(recompute="blocks")


def test_long_rows_keep_no_product_of_the_feed_forward_by_default(tmp_path: Path) -> None:
    usual = ("attention", "every_second_product")
    assert ParallelConfig(recompute="ops").kept_ops(8191) == usual
    assert ParallelConfig(recompute="ops").kept_ops(8192) == ("attention", "attention_products")
    assert ParallelConfig(recompute="ops", recompute_ops=usual).kept_ops(8192) == usual
    assert ParallelConfig(recompute="blocks").kept_ops(8192) == ()
    build_one = (
        "import main_training, sys; import fms_fsdp.parallel.parallelize as module; "
        "module.parallelize = lambda _, section, *a, **b: "
    )
    build_one += "sys.exit(f'kept {section.recompute_ops}'); main_training.main(sys.argv[1:])"
    for length, kept in ((64, usual), (8192, ("attention", "attention_products"))):
        argv = last_of_each(
            [*TINY, "--recompute=ops", f"--seq_length={length}", f"--output_dir={tmp_path}"]
        )
        done = subprocess.run(
            [sys.executable, "-c", build_one, *argv], capture_output=True, text=True, cwd=ROOT
        )
        assert f"kept {kept}" in done.stdout + done.stderr


def test_a_segment_repeats_all_but_its_last_product() -> None:
    section = dict(recompute="blocks", recompute_segment=2)
    of_step, segments = 2 * 24, [2, 1]
    for share, chosen in (("1", segments), ("1/2", segments[1:])):
        repeated = flops(**section, selective_checkpointing=share) - flops()
        expected = recomputed_flops_per_token(CONFIG, 24, sum(chosen), ("attention",), len(chosen))
        assert repeated == of_step * expected
    assert select_blocks(7, Fraction(1, 2), 2) == [False, False, True, True, False, False, True]


def graphs(cheap: bool) -> list[torch.fx.Graph]:
    """The graphs of a block's forward and backward pass, as torch's compiler divides them."""
    found: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        found.append(module.graph)
        return module

    torch._dynamo.reset()
    divide = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=divide)
    model = build(precision=BF16)
    with functorch_config.patch(aggressive_recomputation=cheap):
        for block in model.blocks.values():
            block.compile(fullgraph=True, dynamic=False, backend=backend)
        step(model)
    return found


@pytest.mark.filterwarnings("ignore")
def test_cheap_recomputation_keeps_less_and_repeats_no_product() -> None:
    def products(some: list[torch.fx.Graph]) -> int:
        names = [
            str(node.target) for graph in some for node in graph.nodes if node.op == "call_function"
        ]
        return sum("mm" in name or "dot_product" in name for name in names)

    usual, cheap = graphs(False), graphs(True)
    assert products(usual) == products(cheap) == 3 * (7 + 2)
    kept = [len(some[0].output_node().args[0]) for some in (usual, cheap)]
    assert kept[1] < kept[0]


@pytest.mark.usefixtures("traced_alone")
@pytest.mark.filterwarnings("ignore")
def test_the_compiler_is_told_to_recompute() -> None:
    torch._dynamo.reset()
    usual = saved_bytes(build(use_torch_compile=True))
    torch._dynamo.reset()
    model = build(use_torch_compile=True, recompute="cheap")
    loss, gradients = step(model)
    assert saved_bytes(model) < usual
    plain_loss, plain = step(build())
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients, plain, rtol=1e-5, atol=1e-4)


def saved_bytes(model: Llama) -> int:
    """What a forward pass keeps for the backward pass, beside weights and the rotary table."""
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(2, 24, dtype=torch.long), torch.zeros(2, 24, dtype=torch.long))
    own = {
        tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]
    }
    return sum(size for place, size in sizes.items() if place not in own)


def test_checkpointing_keeps_fewer_activations() -> None:
    none = saved_bytes(build())
    half = saved_bytes(build(fsdp_activation_checkpointing=True, selective_checkpointing="2/3"))
    full = saved_bytes(build(fsdp_activation_checkpointing=True))
    assert full < half < none


@pytest.mark.slow
@pytest.mark.usefixtures("traced_alone")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", [BF16, replace(BF16, float8="row")])
def test_a_compiled_block_that_recomputes_keeps_its_input_alone(precision: Precision) -> None:
    """Compiled by torch 2.11, one kept what all its products gave."""
    torch._dynamo.reset()
    eager = build(precision=precision, recompute="blocks")
    model = build(precision=precision, recompute="blocks", use_torch_compile=True)
    step(model)
    assert saved_bytes(model) == saved_bytes(eager)


@pytest.mark.filterwarnings(
    "ignore"
)  # torch 2.13's own compiler warns of deprecated calls it makes
@pytest.mark.parametrize("precision", [FP32, pytest.param(BF16, marks=pytest.mark.slow)])
def test_blocks_share_one_compilation_beside_that_of_the_loss_and_agree_with_eager(
    precision: Precision,
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    loss, gradients = step(build(precision=precision))
    model = build(precision=precision, use_torch_compile=True)
    for _ in range(3):
        model.zero_grad()
        compiled_loss, compiled = step(model)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    tolerance = dict(rtol=3e-2, atol=3e-1) if precision == BF16 else dict(rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        compiled_loss, loss, rtol=2e-3 if precision == BF16 else 1e-6, atol=0
    )
    torch.testing.assert_close(compiled, gradients, **tolerance)
    assert model.head is not None
    gradient = model.head.weight.numel() * 4  # of the loss, made in the forward pass
    shape = Shape(CONFIG, ParallelConfig(), precision, ParallelDims("none"), 24, device_type="cpu")
    expected = CONFIG.num_layers * cost(shape, "block", 2).kept
    number, hidden = NUM_BYTES[precision.compute], CONFIG.hidden_size
    final_norm = 8 * hidden + 4 + number * hidden  # of a token, with what the loss keeps for it
    assert saved_bytes(model) - gradient == pytest.approx(expected + 48 * final_norm, rel=0.05)


@pytest.mark.parametrize("max_norm", [0.5, 1e9, 0.0])
def test_clipping_equals_torchs(max_norm: float) -> None:
    model, other = build(), build()
    step(model)
    step(other)
    norm = clip_grad_norm(model.parameters(), max_norm, NO_MESH)
    expected = torch.nn.utils.clip_grad_norm_(other.parameters(), max_norm or float("inf"))
    assert norm.dtype == torch.float32 and norm.ndim == 0 and type(norm) is torch.Tensor
    torch.testing.assert_close(norm, expected)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_master_weights_stay_fp32_and_inputs_are_not_cast() -> None:
    policy = fsdp_policy(BF16)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert not policy.cast_forward_inputs  # it would round the rotary table
    assert fsdp_policy(replace(BF16, reduce="bf16")).reduce_dtype == torch.bfloat16
    assert fsdp_policy(FP32).param_dtype is None
    model = build(precision=BF16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def judge_machine(section: ParallelConfig, device: torch.device, precision: str = "fp32") -> None:
    config = TrainConfig(parallel=section, precision=PrecisionConfig(precision=precision))
    check_machine(config, device, ParallelDims("none"))


def test_compile_without_a_compiler_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    asked = ParallelConfig(use_torch_compile=True)
    with pytest.raises(
        ValueError, match=r"--use_torch_compile=True requires a compiler: g\+\+ is not on"
    ):
        judge_machine(asked, CPU)
    gpu = torch.device("cuda")
    with pytest.raises(ValueError, match="gcc is not on the PATH"):
        judge_machine(asked, gpu)
    assert not compiles(ParallelConfig(), gpu)  # by default only where it can


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure", "float8"])
def test_a_gpu_without_bf16_is_refused_with_what_it_can_compute(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    section, gpu = ParallelConfig(use_torch_compile=False), torch.device("cuda")
    rule = f"^--precision={precision} requires bf16, which Tesla V100 does not support; use .*fp32"
    with pytest.raises(UserError, match=f"{rule}, with --run_name="):
        judge_machine(section, gpu, precision)
    judge_machine(section, gpu, "fp16")
    judge_machine(section, CPU, precision)


def test_blocks_are_compiled_by_default_on_gpus_only() -> None:
    assert compiles(ParallelConfig(), torch.device("cuda")) and not compiles(ParallelConfig(), CPU)
    assert not compiles(ParallelConfig(use_torch_compile=False), torch.device("cuda"))


def test_what_the_compiler_recomputes_needs_the_compiler() -> None:
    with pytest.raises(
        ValueError, match="--recompute=cheap requires compiled blocks; set --use_torch_compile=True"
    ):
        judge_machine(ParallelConfig(recompute="cheap"), CPU)
    judge_machine(ParallelConfig(recompute="cheap"), torch.device("cuda"))


def test_an_attention_backend_the_device_lacks_is_refused() -> None:
    config = TrainConfig(model=ModelConfig(attn_impl="efficient"))
    with pytest.raises(UserError, match="--attn_impl=efficient requires a GPU"):
        check_machine(config, CPU, ParallelDims("none"))


@pytest.mark.parametrize(("device", "casts"), [("cuda", 0), ("cpu", 1)])
def test_the_gradient_of_a_weight_comes_in_fp32_from_a_gpu_s_product(
    device: str, casts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was rounded to bf16 and cast, 224 times in a step of 8B. The device is one of shapes alone."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    seen = list[str]()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.overloadpacket.__name__ != "device":
                seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Seen():
        left, right = (torch.empty(8, 8, device=device, dtype=torch.bfloat16) for _ in range(2))
        seen.clear()
        assert matmul(left, right, torch.float32).dtype == torch.float32
        assert seen == ["mm"] + casts * ["_to_copy"]
        seen.clear()
        assert matmul(left, right, torch.bfloat16).dtype == torch.bfloat16 and seen == ["mm"]


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_each_block_waits_for_the_device_in_both_passes(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[int]()
    monkeypatch.setattr(torch.cpu, "synchronize", lambda *_: waits.append(1))
    model = build(debug_sync_blocks=True, recompute=recompute)
    tokens = torch.arange(8).view(1, 8)
    loss, _ = model(tokens, tokens)
    assert len(waits) == 3
    loss.backward()
    assert len(waits) == 6 and all(parameter.grad is not None for parameter in model.parameters())


def test_compiled_blocks_cannot_wait() -> None:
    parallel = ParallelConfig(debug_sync_blocks=True, use_torch_compile=True)
    config = TrainConfig(parallel=parallel)
    with pytest.raises(UserError, match="--debug_sync_blocks waits between blocks"):
        check_machine(config, torch.device("cpu"), ParallelDims("none"))
