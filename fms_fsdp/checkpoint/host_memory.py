"""Copies of tensors in host memory, in a few large pieces.

The allocator of pinned memory rounds each request up to a power of two, which wasted up to half of a tensor.
So the tensors lie in slabs of such a size, packed one behind the other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fms_fsdp.sharded import local_parts, sharded_like

_LEAST_BYTES = 256 << 20  # of a slab that more tensors would fit
_ALIGNMENT = 64


def pack_slabs(sizes: Mapping[str, int]) -> tuple[dict[str, tuple[int, int]], list[int]]:
    """{name: (slab, first byte in it)} for tensors of these sizes in bytes, and the bytes of each slab.

    The largest come first, each into the first slab with room.
    """
    slab_bytes = max(_LEAST_BYTES, 1 << (max(sizes.values(), default=1) - 1).bit_length())
    places: dict[str, tuple[int, int]] = {}
    slabs: list[int] = []
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        size = -(-sizes[name] // _ALIGNMENT) * _ALIGNMENT
        slab = next((i for i, used in enumerate(slabs) if used + size <= slab_bytes), len(slabs))
        if slab == len(slabs):
            slabs.append(0)
        places[name] = slab, slabs[slab]
        slabs[slab] += size
    return places, slabs


def host_copies(tensors: Mapping[str, torch.Tensor], limit_bytes: int) -> dict[str, torch.Tensor]:
    """Zeros of the same shapes and sharding in host memory, pinned where a tensor is on a GPU.

    Raises:
        MemoryError: they need more than `limit_bytes`.
        RuntimeError: the system cannot pin so much.
    """
    locals_ = dict(zip(tensors, local_parts(tensors.values()), strict=True))
    places, sizes = pack_slabs({name: tensor.nbytes for name, tensor in locals_.items()})
    if sum(sizes) > limit_bytes:
        raise MemoryError(f"{sum(sizes) / 2**30:.1f} GiB are needed, {limit_bytes / 2**30:.1f} are free")
    pin = any(tensor.device.type == "cuda" for tensor in locals_.values())
    # filled: zeros alone touch no memory
    slabs = [torch.zeros(size, dtype=torch.uint8, pin_memory=pin).fill_(0).numpy() for size in sizes]
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in locals_.items():
        slab, first = places[name]
        # not a view of the slab: DCP copies a tensor of a larger storage before it writes it
        memory = torch.from_numpy(slabs[slab][first : first + tensor.nbytes])
        copies[name] = sharded_like(memory.view(tensor.dtype).view(tensor.shape), tensors[name])
    return copies
