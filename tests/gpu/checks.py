"""What a process with a GPU asserts; test_parts.py calls each function in a process of its own."""

from __future__ import annotations

import torch

GPU = "cuda"


def attention_by_document() -> None:
    """flex_attention against attention with a dense mask, outputs and gradients."""
    from fms_fsdp.models.attention import attention, attention_mask

    torch.manual_seed(0)
    shapes = ((2, 8, 512, 64), (2, 2, 512, 64), (2, 2, 512, 64))
    q, k, v = (
        torch.randn(shape, device=GPU, dtype=torch.bfloat16, requires_grad=True) for shape in shapes
    )
    for size in (512, 130, 7):
        ids = (torch.arange(512, device=GPU) // size).to(torch.int32).expand(2, -1).contiguous()
        found = []
        masks = [attention_mask(0, ids, slice(0, 512), q.device, dense=d) for d in (False, True)]
        assert not isinstance(masks[0], torch.Tensor)
        for mask in masks:
            out = attention(q, k, v, mask)
            gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
            found.append((out, *gradients))
        assert (found[0][0] - found[1][0]).abs().max() <= 2e-2
        for one, other in zip(*found, strict=True):
            assert (one - other).norm() <= 2e-2 * other.norm()


def loss_of_any_vocabulary() -> None:
    """The chunked loss in bf16 against the plain one in fp32, with an odd number of columns."""
    from fms_fsdp.models.loss import linear_cross_entropy

    torch.manual_seed(0)
    h = torch.randn(1, 600, 256, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(50_257, 256, device=GPU) / 16).requires_grad_()
    labels = torch.randint(50_257, (1, 600), device=GPU)
    loss, _ = linear_cross_entropy(h, weight, labels)
    ours = (loss, *torch.autograd.grad(loss / 773, (h, weight)))
    logits = h.float() @ weight.to(torch.bfloat16).float().T
    plain = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
    theirs = (plain, *torch.autograd.grad(plain / 773, (h, weight)))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.float() - other.float()).norm() <= 1e-2 * other.float().norm()


def copies_in_pinned_memory() -> None:
    """Host copies are pinned, of their own size, and take what is copied to them."""
    from fms_fsdp.run.checkpoints import host_copies

    tensors = {str(size): torch.randn(size, device=GPU) for size in (1, 1000, 3_000_000)}
    copies = host_copies(tensors, 2**30)
    for name, tensor in tensors.items():
        assert copies[name].is_pinned() and copies[name].untyped_storage().nbytes() == tensor.nbytes
        copies[name].copy_(tensor, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert all(torch.equal(copies[name], tensor.cpu()) for name, tensor in tensors.items())


def verdicts_under_offload() -> None:
    """Weights on the CPU, the norm on the GPU: bad steps change nothing, good ones always do."""
    from fms_fsdp.config import OptimConfig
    from fms_fsdp.optim.optimizers import build_optimizers

    model = torch.nn.Linear(4, 4, bias=False)
    optimizers = build_optimizers(OptimConfig(learning_rate=0.1, weight_decay=0.0), model)
    busy = torch.randn(4096, 4096, device=GPU)
    for step in range(20):
        before = model.weight.detach().clone()
        model.weight.grad = torch.ones(4, 4)
        norm = (busy @ busy @ busy).sum() * 0 + (torch.nan if step % 2 else 1.0)  # known late
        optimizers.step(lambda base: base, norm)
        assert torch.equal(before, model.weight) == bool(step % 2), step


def segments_that_grow() -> None:
    """The setting of the allocator is in force in a process that has it."""
    keep = torch.empty(2**20, device=GPU)
    assert torch.cuda.memory_snapshot()[0]["is_expandable"] and keep.is_cuda


def float8_products() -> None:
    """The product and both gradients in float8 against the CPU's, of the same float8 numbers."""
    from fms_fsdp.parallel.float8 import differentiable_float8_linear

    torch.manual_seed(0)
    x, weight, grad = (torch.randn(shape) for shape in ((3, 41, 256), (512, 256), (3, 41, 512)))
    capability = torch.cuda.get_device_capability()
    for scaling, needed in (("row", (9, 0)), ("tensor", (8, 9))):
        found = []
        for device in ("cpu", GPU) if capability >= needed else ():
            given = [tensor.to(device, torch.bfloat16).requires_grad_() for tensor in (x, weight)]
            y = differentiable_float8_linear(*given, scaling)
            gradients = torch.autograd.grad(y, given, grad.to(y))
            found.append([tensor.detach().cpu() for tensor in (y, *gradients)])
        for one, other in zip(*found, strict=True):
            assert (one - other).norm() <= 1e-2 * other.norm()


def loss_scale_within_the_step() -> None:
    """The kernel removes the loss scale, clips, and skips a step that overflows."""
    from fms_fsdp.config import OptimConfig, PrecisionConfig
    from fms_fsdp.distributed.axes import ParallelDims
    from fms_fsdp.distributed.mesh import Mesh
    from fms_fsdp.optim.loss_scale import LossScale
    from fms_fsdp.optim.optimizers import build_optimizers
    from fms_fsdp.parallel.fsdp import clip_factor

    device, alone, weights = torch.device(GPU), Mesh(ParallelDims("none"), 0, GPU), []
    for initial in (1.0, 0.0):
        section = PrecisionConfig(loss_scale=initial, loss_scale_window=9, loss_scale_hysteresis=1)
        scale = LossScale(section, device)
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4, bias=False, device=GPU)
        optimizers = build_optimizers(OptimConfig(adam_eps=1.0), model)
        for size in (3.0, float("inf"), 0.1):
            model.weight.grad = torch.full((4, 4), size, device=GPU) * scale.scale
            norm, factor = clip_factor(model.parameters(), 1.0, alone, scale.scale)
            optimizers.step(lambda base: 0.1, norm, factor)
            scale.update(norm)
        assert scale.scale == (initial or 2.0**15)
        weights.append(model.weight.detach())
    assert weights[0].isfinite().all()
    torch.testing.assert_close(*weights)


def steps_that_wait_for_nothing() -> None:
    """Between reports the host reads nothing of a step: torch raises where it would wait for the device."""
    from fms_fsdp.config import OptimConfig, ParallelConfig, Precision, PrecisionConfig
    from fms_fsdp.data.batch import Batch
    from fms_fsdp.distributed.axes import ParallelDims
    from fms_fsdp.distributed.mesh import Mesh
    from fms_fsdp.metrics.interval import IntervalMetrics
    from fms_fsdp.metrics.timer import PhaseTimer
    from fms_fsdp.models.config import TransformerConfig
    from fms_fsdp.optim.loss_scale import LossScale
    from fms_fsdp.optim.optimizers import build_optimizers
    from fms_fsdp.parallel.parallelize import parallelize
    from fms_fsdp.state import TrainState
    from fms_fsdp.train import StepSettings, train_step

    device, alone = torch.device(GPU), Mesh(ParallelDims("none"), 0, GPU)
    pure = Precision("bf16", weights="bf16", gradients="bf16", state="bf16")
    shape, nothing = TransformerConfig(2, 256, 512, 4, 2, 512, max_seq_len=128), None
    for precision in (Precision("bf16"), pure, Precision("fp16")):
        parallel = ParallelConfig(use_torch_compile=False)
        model = parallelize(shape, parallel, alone, device=device, precision=precision, seed=1)
        optimizers = build_optimizers(OptimConfig(), model, precision)
        settings = StepSettings(
            alone, device, lambda step, tokens, base: 1e-3, 2, 1.0, document_mask=False
        )
        scale = LossScale(PrecisionConfig(), device) if precision.compute == "fp16" else None
        state = TrainState(model, optimizers, nothing, 9, loss_scale=scale)  # type: ignore[arg-type]
        rows = torch.randint(512, (4, 129))
        batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), None, None)
        interval = IntervalMetrics(alone, device)
        clock = PhaseTimer(device)
        for step in range(4):
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            clock.mark("data")
            interval.add(train_step(settings, state, batch, clock))
        torch.cuda.set_sync_debug_mode("default")


def gradients_outlive_the_optimizer() -> None:
    """Another stream needs the memory of sharded gradients that are freed while a kernel still reads them."""
    import torch.distributed as dist

    from fms_fsdp.config import ParallelConfig, Precision
    from fms_fsdp.distributed.dims import plan_dims
    from fms_fsdp.distributed.mesh import Mesh
    from fms_fsdp.distributed.world import World
    from fms_fsdp.models.config import TransformerConfig
    from fms_fsdp.parallel.fsdp import await_optimizer
    from fms_fsdp.parallel.parallelize import parallelize

    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel = ParallelConfig(sharding_strategy="fsdp", use_torch_compile=False)
    mesh = Mesh(plan_dims(parallel, "", World(0, 0, 1, 1)), 0, GPU)
    shape = TransformerConfig(4, 2048, 8192, 16, 16, 32_000, max_seq_len=128)
    precision, device = Precision("bf16"), torch.device(GPU, 0)
    model = parallelize(shape, parallel, mesh, device=device, precision=precision, seed=1)
    rows = torch.randint(32_000, (1, 129), device=GPU)
    model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())[0].backward()
    busy, product = (torch.randn(8192, 8192, device=GPU) for _ in range(2))
    size = sum(parameter.nbytes for parameter in model.parameters())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # to take back memory of this stream torch would wait for it
    for _ in range(50):
        torch.mm(busy, busy, out=product)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad += 1  # after the products
    await_optimizer(model)
    for parameter in model.parameters():
        parameter.grad = None
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 1.1 * size) / total)
    other = torch.zeros(size, device=GPU, dtype=torch.uint8)
    torch.cuda.synchronize()
    assert not other.any()
    dist.destroy_process_group()


def compiled_rounding() -> None:
    """The compiled step of weights in bf16 against the plain one, with a bad step between, which changes
    nothing: means agree, and no number is further away than rounding takes it."""
    from fms_fsdp.config import OptimConfig, Precision
    from fms_fsdp.optim.optimizers import build_optimizers

    precision = Precision("bf16", weights="bf16", gradients="bf16", state="bf16")
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(3000, 1000, device=GPU, dtype=torch.bfloat16)
        optimizers = build_optimizers(
            OptimConfig(learning_rate=1e-3), model, precision, 3, compiled=compiled
        )
        for norm in (1.0, torch.nan, 1.0, 1.0):
            before = model.weight.detach().clone()
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter) * norm
            factor = torch.tensor(0.5 * norm, device=GPU)
            optimizers.step(lambda base: base, torch.tensor(norm, device=GPU), factor)
            assert torch.equal(before, model.weight) == (norm != norm)
        assert {state["step"].item() for state in optimizers.optimizers[0].state.values()} <= {3, 4}
        kept = optimizers.state_dict()
        assert kept["weight.step"].item() == 3
        found.append((model.weight.float(), kept["weight.exp_avg"].float()))
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 2**-6 * one.abs().max() and (
            one - other
        ).mean().abs() <= 1e-6
