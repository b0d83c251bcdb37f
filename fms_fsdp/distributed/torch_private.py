"""What torch does not publish: no other module uses a private name of torch (a test holds that).

"Public:" in a docstring is the published way, the issue or pull request that asks for one, or that
none was found. A way that torch 2.11 lacks is used once a later torch is the oldest supported one.

Tried with torch 2.11, 2.13 and 2.14 on CPUs, and with 2.11 on one H200 (benchmarks/LOG.md), but for
"Not tried:". Functions import the modules of torch that few launches need.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# A mode that sees every operation while it is active.
# Public: documented under this name, https://docs.pytorch.org/docs/stable/notes/extending.html
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

Tensors = list[torch.Tensor]


# --- meshes and process groups


def flatten(mesh: DeviceMesh, name: str | None = None) -> DeviceMesh:
    """Returns a mesh of one axis with all ranks of a mesh (collective); a name gives one group.

    Public: none, https://github.com/pytorch/pytorch/pull/132632.
    """
    return mesh._flatten(name)


def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Returns a mesh with the axes of several meshes, which are parts of one mesh.

    Public: none, https://github.com/pytorch/pytorch/pull/163358.
    """
    return DeviceMesh._concatenate(meshes)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Returns the timeout of a group's collectives of tensors on a device.

    Public: none was found; `ProcessGroup.set_timeout` sets it.
    """
    return group._get_backend(device).options._timeout


class MeshWithoutProcesses(DeviceMesh):
    """The first rank's mesh of one axis, without processes and without a default process group.

    Its group accepts collectives on every device and does nothing.

    Public: `torch.distributed.Backend.FAKE` for the group, which needs a default process group:
    https://github.com/pytorch/pytorch/pull/172241.
    """

    def __init__(self, axis: str, size: int, group_name: str) -> None:
        from torch._C._distributed_c10d import FakeProcessGroup

        ranks = list(range(size))
        super().__init__("cpu", ranks, mesh_dim_names=(axis,), _init_backend=False, _rank=0)
        backend = FakeProcessGroup._create_internal(0, size)
        self._group = dist.ProcessGroup(dist.HashStore(), 0, size)
        for device in ("cpu", "cuda", "meta"):
            kind = dist.ProcessGroup.BackendType.CUSTOM
            self._group._register_backend(torch.device(device), kind, backend)
        self._group._set_group_name(group_name)  # type: ignore[arg-type]

    # DTensor caches results by mesh: a mesh of real ranks must not find those of this one.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        return self._group

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return 0


def functional_collectives() -> Any:
    """Returns the collectives that return a new tensor, so that torch.compile can trace them.

    Public: none, https://github.com/pytorch/pytorch/issues/113669.
    """
    import torch.distributed._functional_collectives  # noqa: F401 - registers them

    return torch.ops._c10d_functional


def make_dtensor(
    shard: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size
) -> torch.Tensor:
    """Returns a DTensor of a shape that is contiguous, with this local shard on any device.

    Public: `DTensor.from_local`, which moves the shard to the device of the mesh: host copies of a
    checkpoint would be on the GPU.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), shard.dtype)
    spec = DTensorSpec(mesh, placements, meta)
    return DTensor(shard, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def reduce_scatter_streams(modules: Iterable[torch.nn.Module]) -> set[Any]:
    """Returns the streams on which FSDP reduces the gradients of modules; None on a CPU.

    Public: none, https://github.com/pytorch/pytorch/issues/154657.
    """
    from torch.distributed.fsdp import FSDPModule

    streams = set[Any]()
    for module in modules:
        if isinstance(module, FSDPModule):
            streams.add(module._get_fsdp_state()._comm_ctx.reduce_scatter_stream)
    return streams


# --- operations


def norms(tensors: Tensors) -> Tensors:
    """Returns the 2-norm of each tensor, summed in fp32, by one kernel on a GPU.

    Public: `torch.foreach` after 2.14, https://github.com/pytorch/pytorch/pull/193607.
    `torch.nn.utils.get_total_norm` sums in the dtype of the tensors.
    """
    return list(torch._foreach_norm(tensors, dtype=torch.float32))


def multiply_(tensors: Tensors, factor: torch.Tensor) -> None:
    """Multiplies tensors in place, by one kernel on a GPU.

    Public: `torch.foreach` after 2.14, https://github.com/pytorch/pytorch/pull/193607.
    """
    torch._foreach_mul_(tensors, factor)


def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """Returns scale_a · scale_b · (a b) of float8 factors, on a GPU.

    Public: `torch.nn.functional.scaled_mm`, another operation, which flop_counter does not count
    (2.14). It needs a comparison on a GPU first.
    """
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)


def fused_attention() -> set[Any]:
    """Returns the fused operations to which `scaled_dot_product_attention` dispatches.

    Public: none was found.
    """
    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
) -> torch.Tensor:
    """Returns causal attention by the flash operation, on the meta device too.

    Public: `torch.nn.attention.sdpa_kernel`, which has no effect on the meta device.
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    out: torch.Tensor = attention(q, k, v, dropout, True)[0]
    return out


# --- torch.compile and activation checkpointing


def import_compiler() -> None:
    """Imports Dynamo, as the first optimizer and the first dispatch mode do.

    Public: none was found that does nothing else.
    """
    import torch._dynamo  # noqa: F401


def recompute_all_but_matmuls(enabled: bool) -> None:
    """Sets whether the compiler recomputes everything but matmuls and attention.

    Public: none was found.
    """
    import torch._functorch.config as functorch_config

    functorch_config.aggressive_recomputation = enabled


def set_graph_pass(edit: Callable[[torch.fx.Graph], None], key: str) -> None:
    """Lets the compiler call `edit` with each graph of a forward and backward pass.

    `key` identifies what it does, for the compiler's cache.

    Public: none, https://github.com/pytorch/pytorch/issues/153532.
    """
    import torch._inductor.config as inductor_config  # takes 1.4 s
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class GraphPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            edit(graph)

        def uuid(self) -> str:
            return key

    inductor_config.joint_custom_pre_pass = GraphPass()


def remove_graph_pass() -> None:
    """Ends the effect of `set_graph_pass`.

    Public: none, as for `set_graph_pass`.
    """
    import torch._inductor.config as inductor_config

    inductor_config.joint_custom_pre_pass = None


def overlap_matmuls_with_collectives() -> None:
    """Lets the compiler overlap collectives with the matmuls next to them.

    Public: none was found. Not tried: on several GPUs.
    """
    from torch._inductor import config as inductor_config

    inductor_config._micro_pipeline_tp = True


def silence_in_place_warning() -> None:
    """Silences the compiler's warning that recomputed blocks must not have operations in place.

    Public: none was found.
    """
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


# --- tensors without memory


def fake_tensors() -> Any:
    """Returns the mode in which new tensors have a device and no memory.

    Public: documented under this name, https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def storage_address(storage: torch.UntypedStorage) -> int:
    """Returns a number that no other living storage has, also without memory.

    Public: none was found; `data_ptr` is 0 on the meta device.
    """
    return storage._cdata


# --- optimizers, memory snapshots and checkpoints


def unscales_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer reads `found_inf` and `grad_scale` on the device.

    torch.amp.GradScaler sets these two attributes.

    Public: none was found.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def record_memory(max_entries: int | None) -> None:
    """Starts to record the last allocations on the GPU; None ends it.

    Public: documented under this name, https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
    """
    if max_entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=max_entries)


def write_memory_snapshot(path: str) -> None:
    """Writes the allocator's state and the recorded allocations.

    Public: documented under this name, https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
    """
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]


def storage_info(file: str, position: int, length: int) -> Any:
    """Returns where a checkpoint stores a shard, as DCP's `.metadata` records it.

    Public: none was found.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, position, length)


def memory_formats() -> Any:
    """Returns the enumeration by which DCP's `.metadata` names memory formats.

    Public: none was found.
    """
    from torch.distributed.checkpoint import metadata

    return metadata._MEM_FORMAT_ENCODING
