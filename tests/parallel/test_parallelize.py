"""The recipe on one process: selection of blocks, compilation, clipping, order.

tests/distributed/test_layouts.py has the world sizes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._functorch.config as functorch_config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import (
    get_default_op_list,
    min_cut_rematerialization_partition,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fms_fsdp.checkpoint.io import collect_tensors
from fms_fsdp.compiler import missing_for_compilation
from fms_fsdp.config import (
    BF16,
    FP32,
    OptimConfig,
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
from fms_fsdp.optim.optimizers import build_optimizers, scale_gradients
from fms_fsdp.parallel.activation_checkpointing import select_blocks
from fms_fsdp.parallel.compile import compiles
from fms_fsdp.parallel.dtypes import fsdp_policy, matmul
from fms_fsdp.parallel.fsdp import clip_factor
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.run.checks import check_machine, machine_notes
from tests.cli import ROOT, TINY, last_of_each
from tests.specs import machine

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


def test_recomputed_blocks_keep_stored_names() -> None:
    plain, recomputed = build(), build(recompute="blocks")
    names = [
        collect_tensors(each, build_optimizers(OptimConfig(), each)) for each in (plain, recomputed)
    ]
    assert list(names[0]) == list(names[1])


@pytest.mark.parametrize("text", ["1", "1/2", "0.33", "2/3", "every:4", "1/7", "0.9"])
def test_checkpointed_blocks_are_evenly_spaced(text: str) -> None:
    share = parse_block_fraction("selective_checkpointing", text)
    for num_blocks in (1, 5, 6, 32, 80):
        chosen = select_blocks(num_blocks, share)
        assert sum(chosen) == max(1, int(num_blocks * share))
        places = [i for i, one in enumerate(chosen) if one]
        gaps = {b - a for a, b in pairwise(places)}
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_checkpointing_fractions_choose_the_last_blocks() -> None:
    assert select_blocks(4, Fraction(1)) == [True] * 4
    assert select_blocks(6, Fraction(1, 2)) == [False, True] * 3
    assert select_blocks(6, Fraction(1, 3)) == [False, False, True] * 2
    assert select_blocks(7, Fraction(1, 2), 2) == [False, False, True, True, False, False, True]


OPS = [
    ("attention", "every_second_matmul"),
    ("attention", "matmuls"),
    ("attention",),
    ("matmuls",),
]
OPS.append(("attention", "attention_matmuls"))


@pytest.mark.parametrize(
    ("precision", "flags"),
    [
        (FP32, dict(recompute="blocks")),
        (BF16, dict(fsdp_activation_checkpointing=True)),
        (BF16, dict(recompute="blocks", recompute_segment=5)),
        (FP32, dict(recompute="blocks", recompute_segment=2, selective_checkpointing="1/2")),
        (FP32, dict(recompute="ops", recompute_ops=("matmuls",))),
        *((BF16, dict(recompute="ops", recompute_ops=kept)) for kept in OPS),
        (replace(BF16, float8="row"), dict(recompute="ops")),
        (replace(BF16, float8="tensor"), dict(recompute="blocks")),
    ],
)
def test_recomputation_changes_no_bit(precision: Precision, flags: dict[str, object]) -> None:
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


def test_recomputed_flops_are_those_predicted() -> None:
    """torch does not count attention on CPUs."""
    plain, blocks = flops(), flops(recompute="blocks")
    rows, layers = 2 * 24, CONFIG.num_layers
    for kept in OPS:
        repeated = flops(recompute="ops", recompute_ops=kept) - plain
        per_token = recomputed_flops_per_token(CONFIG, 24, layers, (*kept, "attention"))
        assert repeated == rows * per_token and plain + repeated <= blocks, kept
    for share, blocks_of_segments in (("1", [2, 1]), ("1/2", [1])):  # all but the last matmul
        segments = dict(recompute="blocks", recompute_segment=2, selective_checkpointing=share)
        repeated = flops(**segments) - plain
        num_blocks, num_segments = sum(blocks_of_segments), len(blocks_of_segments)
        assert repeated == rows * recomputed_flops_per_token(
            CONFIG, 24, num_blocks, ("attention",), num_segments
        )


@pytest.mark.slow
def test_long_sequences_keep_attention_matmuls_only(tmp_path: Path) -> None:
    usual, long = ("attention", "every_second_matmul"), ("attention", "attention_matmuls")
    assert ParallelConfig(recompute="ops").kept_ops(8191) == usual
    assert ParallelConfig(recompute="ops").kept_ops(8192) == long
    assert ParallelConfig(recompute="ops", recompute_ops=usual).kept_ops(8192) == usual
    assert ParallelConfig(recompute="blocks").kept_ops(8192) == ()
    code = """
import main_training, sys
import fms_fsdp.parallel.parallelize as module
module.parallelize = lambda _, section, *a, **b: sys.exit(f"kept {section.recompute_ops}")
main_training.main(sys.argv[1:])
"""
    argv = last_of_each([*TINY, "--recompute=ops", "--seq_length=8192", f"--output_dir={tmp_path}"])
    command = [sys.executable, "-c", code, *argv]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert f"kept {long}" in done.stdout + done.stderr


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_cheap_recomputation_repeats_no_matmul() -> None:
    def matmuls(some: list[torch.fx.Graph]) -> int:
        names = [
            str(node.target) for graph in some for node in graph.nodes if node.op == "call_function"
        ]
        return sum("mm" in name or "dot_product" in name for name in names)

    usual, cheap = graphs(False), graphs(True)
    assert matmuls(usual) == matmuls(cheap) == 3 * (7 + 2)
    kept = [len(some[0].output_node().args[0]) for some in (usual, cheap)]
    assert kept[1] < kept[0]


@pytest.mark.usefixtures("traced_alone")
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_use_cheap_recomputation() -> None:
    torch._dynamo.reset()
    usual = saved_bytes(build(use_torch_compile=True))
    torch._dynamo.reset()
    model = build(use_torch_compile=True, recompute="cheap")
    loss, gradients = step(model)
    assert saved_bytes(model) < usual
    plain_loss, plain = step(build())
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients, plain, rtol=1e-5, atol=1e-4)


def test_torch_itself_recomputes_attention() -> None:
    """Once this fails, torch keeps attention itself, and compile.py needs no pass for it."""
    kept = get_default_op_list().compute_intensive_ops
    aten = torch.ops.aten
    assert aten._scaled_dot_product_flash_attention in kept
    assert aten._scaled_dot_product_cudnn_attention not in kept
    assert aten._scaled_dot_product_flash_attention_for_cpu not in kept
    assert torch.ops.higher_order.flex_attention not in kept


@pytest.mark.slow  # the pass that keeps attention is one of the real compiler
@pytest.mark.filterwarnings("ignore")
def test_cheap_recomputation_repeats_no_fused_attention() -> None:
    torch._dynamo.reset()
    model = build(use_torch_compile=True, recompute="cheap")
    step(model)
    with torch.profiler.profile() as profile:
        step(model)
    counts = {event.key: event.count for event in profile.key_averages()}
    forward = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert counts[forward] == counts[f"{forward}_backward"] == len(model.blocks)


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


@pytest.mark.slow
@pytest.mark.usefixtures("traced_alone")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", [BF16, replace(BF16, float8="row")])
def test_compiled_recomputed_block_keeps_only_its_input(precision: Precision) -> None:
    """Compiled by torch 2.11, a block kept the results of all its matmuls."""
    torch._dynamo.reset()
    eager = build(precision=precision, recompute="blocks")
    model = build(precision=precision, recompute="blocks", use_torch_compile=True)
    step(model)
    assert saved_bytes(model) == saved_bytes(eager)


@pytest.mark.usefixtures("each_backend")
@pytest.mark.filterwarnings("ignore")  # torch 2.13's own compiler calls what is deprecated
def test_compiled_blocks_share_one_graph() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    loss, gradients = step(build())
    model = build(use_torch_compile=True)
    for _ in range(3):
        model.zero_grad()
        compiled_loss, compiled = step(model)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]  # block, loss
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(compiled, gradients, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("max_norm", [0.5, 1e9, 0.0])
def test_clipping_equals_torchs(max_norm: float) -> None:
    model, other = build(), build()
    step(model)
    step(other)
    norm, factor = clip_factor(model.parameters(), max_norm, NO_MESH)
    if factor is not None:
        scale_gradients(list(model.parameters()), factor)
    expected = torch.nn.utils.clip_grad_norm_(other.parameters(), max_norm or float("inf"))
    assert norm.dtype == torch.float32 and norm.ndim == 0 and type(norm) is torch.Tensor
    torch.testing.assert_close(norm, expected)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_master_weights_stay_fp32() -> None:
    policy = fsdp_policy(BF16)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert not policy.cast_forward_inputs  # it would round the rotary table
    assert fsdp_policy(replace(BF16, reduce="bf16")).reduce_dtype == torch.bfloat16
    assert fsdp_policy(FP32).param_dtype is None
    model = build(precision=BF16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


COMPILED, IN_FP32 = ParallelConfig(use_torch_compile=True), PrecisionConfig(precision="fp32")


@pytest.mark.parametrize(
    ("device", "config", "message"),
    [
        ("cpu", TrainConfig(parallel=COMPILED), r"--use_torch_compile=True .*g\+\+ is not on"),
        ("cuda", TrainConfig(parallel=COMPILED, precision=IN_FP32), "gcc is not on the PATH"),
    ],
)
def test_compilation_without_a_compiler_is_rejected(
    device: str, config: TrainConfig, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    here = machine(device, missing_for_compilation=missing_for_compilation(device))
    with pytest.raises(UserError, match=message):
        check_machine(config, here, ParallelDims("none"))


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure", "float8"])
def test_gpu_without_bf16_is_rejected(precision: str) -> None:
    section = ParallelConfig(use_torch_compile=False)

    def check(precision: str, device_type: str) -> None:
        config = TrainConfig(parallel=section, precision=PrecisionConfig(precision=precision))
        old = machine(device_type, has_bf16=False, device_name="Tesla V100")
        check_machine(config, old, ParallelDims("none"))

    with pytest.raises(UserError, match=f"--precision={precision} .*Tesla V100.*fp32, with --run_"):
        check(precision, "cuda")
    check("fp16", "cuda")
    check(precision, "cpu")


def test_compilation_defaults_to_gpus_with_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cheap = torch.device("cuda"), ParallelConfig(recompute="cheap")
    assert compiles(ParallelConfig(), gpu) and not compiles(ParallelConfig(), CPU)
    assert not compiles(ParallelConfig(use_torch_compile=False), gpu)
    config = TrainConfig(parallel=cheap, precision=IN_FP32)
    check_machine(config, machine("cuda"), ParallelDims("none"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert not compiles(ParallelConfig(), gpu)


def no_headers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda *names: str(folder))


def noexec_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))


def unwritable_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/dev/null/cache")


@pytest.mark.parametrize(
    ("break_machine", "problem"),
    [
        (no_headers, "Python.h is missing in "),
        (noexec_cache, "/cache is mounted noexec; set TORCHINDUCTOR_CACHE_DIR to "),
        (unwritable_cache, "/dev/null/cache cannot be written; set TORCHINDUCTOR_CACHE_DIR to "),
    ],
)
def test_machine_that_cannot_compile_is_reported(
    break_machine: Callable[[pytest.MonkeyPatch, Path], None],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    break_machine(monkeypatch, tmp_path)
    gpu, cpu = (
        machine(device, missing_for_compilation=missing_for_compilation(device))
        for device in ("cuda", "cpu")
    )
    default = TrainConfig(precision=IN_FP32)
    assert not compiles(default.parallel, torch.device("cuda"))
    assert not gpu.compiles(default.parallel)
    check_machine(default, gpu, ParallelDims("none"))
    (note,) = machine_notes(default, gpu, ParallelDims("none"))
    assert note.startswith("blocks are not compiled: ")
    assert problem in note
    asked = TrainConfig(parallel=COMPILED, precision=IN_FP32)
    for device in (gpu, cpu):
        with pytest.raises(UserError, match="--use_torch_compile=True cannot compile") as caught:
            check_machine(asked, device, ParallelDims("none"))
        assert problem in str(caught.value)


def test_headers_may_come_from_cpath(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "Python.h").touch()
    no_headers(monkeypatch, tmp_path)
    monkeypatch.setenv("CPATH", f"/elsewhere:{tmp_path / 'own'}")
    assert not missing_for_compilation("cpu")


@pytest.mark.parametrize(("device", "casts"), [("cuda", 0), ("cpu", 1)])
def test_gpu_weight_gradient_is_fp32_from_matmul(
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
def test_debug_sync_waits_in_both_passes(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[int]()
    monkeypatch.setattr(torch.cpu, "synchronize", lambda *_: waits.append(1))
    model = build(debug_sync_blocks=True, recompute=recompute)
    tokens = torch.arange(8).view(1, 8)
    loss, _ = model(tokens, tokens)
    assert len(waits) == 3
    loss.backward()
    assert len(waits) == 6 and all(parameter.grad is not None for parameter in model.parameters())
