"""Measures the parts of a model: memory, FLOPs, traffic and communication of the real modules.

    embed, block, recomputed block, head ─ forward and backward under `Meter` ─▶ Cost

The modules and the parallel recipe run on the meta device, which allocates, computes and sends
nothing. Kernels that the meta device does not choose are replaced by kernels of a GPU: flash
attention, and RMSNorm as one kernel. For a CPU the tensors are fake ones, for which torch chooses
the kernels itself. Ranks of tp and cp get a mesh without processes.

A compiled block is not compiled here. A rule on the eager operations gives the memory that it
keeps: the results of element-wise operations live in registers, and the backward pass recomputes
them from the inputs and results of matmuls, attention, norms and collectives.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from fms_fsdp.config import ParallelConfig, Precision
from fms_fsdp.distributed import torch_private
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.dtensor import is_partial, local_shard
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.torch_private import TorchDispatchMode
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.llama import Llama
from fms_fsdp.parallel.activation_checkpointing import apply_activation_checkpointing
from fms_fsdp.parallel.dtypes import DTYPES, apply_precision, cast_weights, compute_with_casts

torch_private.import_compiler()  # now, not at the first dispatch mode or optimizer
_ATEN = torch.ops.aten
_ATTENTION = ("_scaled_dot_product", "flex_attention")  # prefixes of names of operations
_NOT_FUSED = {_ATEN.native_layer_norm, _ATEN.native_layer_norm_backward, _ATEN.embedding}
# Bytes that each of n ranks sends per byte of the result, if the collective runs as a ring.
_SENT: dict[str, Callable[[int], float]] = {
    "all_gather_into_tensor": lambda n: 1 - 1 / n,
    "reduce_scatter_tensor": lambda n: n - 1.0,
    "all_reduce": lambda n: 2 - 2 / n,
    "allreduce_": lambda n: 2 - 2 / n,
    "all_to_all_single": lambda n: 1 - 1 / n,
}
_SENT["matmul_reduce"] = _SENT["all_reduce"]  # `_count_sent` knows which reduction it is
# The reduction of `matmul_reduce`, by whether the sequence is sharded.
_REDUCTIONS = {True: "reduce_scatter_tensor", False: "all_reduce"}
_CHUNKED_LOGITS = (
    256 << 20
)  # bytes of fp32 logits from which a CPU computes the loss in many chunks
_GROUP = "predict "  # prefix of the names of groups without processes


@dataclass(frozen=True)
class ModelSetup:
    """Everything that the cost of a part depends on."""

    config: TransformerConfig
    section: ParallelConfig
    precision: Precision
    dims: ParallelDims
    seq_length: int
    compiled: bool = True
    device_type: str = "cuda"

    def bare(self, part: str) -> ModelSetup:
        """Returns the setup of one block without the settings that do not change this part.

        Layouts that differ elsewhere then share one measurement, because `_measured` is cached.
        """
        dims = self.dims
        section = self.section.for_seq_length(self.seq_length)
        own: dict[str, Any] = {"tp_size": dims.tp, "cp_size": dims.cp}
        if dims.tp * dims.cp > 1:
            own["cp_method"] = section.cp_method
            own["sequence_parallel"] = section.sequence_parallel
        if part == "recomputed":
            own["recompute"] = section.recomputes
            own["recompute_ops"] = section.recompute_ops
        axes = ParallelDims(
            "none" if dims.strategy == "none" else "fsdp",
            cp=dims.cp,
            tp=dims.tp,
            sequence_parallel=dims.sequence_parallel,
        )
        config = replace(self.config, num_layers=1)
        if config.pos_emb == "rope":
            config = replace(config, max_seq_len=1)  # `_measure` hands over a table of its length
        if part in ("block", "recomputed"):
            config = replace(config, vocab_size=128)  # a block has no weights of the vocabulary
        return replace(self, config=config, dims=axes, section=ParallelConfig(**own))


@dataclass(frozen=True)
class Cost:
    """The cost of a forward and a backward pass. Costs can be added and multiplied.

    kept      bytes that stay for the backward pass, the input among them
    peak      maximum of bytes in either pass, with `kept` and the gradients of the weights
    flops     by "attention", and for matmuls by the dtype of the factors
    moved     bytes that operations read and write, by "matmul" or "other"
    sent      bytes that a rank sends, by axis
    summands  elements of gradients that the ranks of tp still have to add up
    """

    kept: float = 0
    peak: float = 0
    flops: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    summands: float = 0

    def plus(self, other: Cost, factor: float = 1) -> Cost:
        """Returns this cost and `factor` times the other."""

        def counters(a: Counter[str], b: Counter[str]) -> Counter[str]:
            return Counter({key: a[key] + factor * b[key] for key in a | b})

        return Cost(
            kept=self.kept + factor * other.kept,
            peak=self.peak + factor * other.peak,
            flops=counters(self.flops, other.flops),
            moved=counters(self.moved, other.moved),
            sent=counters(self.sent, other.sent),
            summands=self.summands + factor * other.summands,
        )


def _attention_flops(tensors: list[torch.Tensor], *, is_backward: bool) -> int:
    """Returns the FLOPs over all pairs of positions.

    torch 2.11 does not count grouped-query attention
    (https://github.com/pytorch/pytorch/pull/177188). Forward, each pair multiplies a query with a
    key, and a score with a value. Backward, it computes the score again, and one gradient each for
    the score, the query, the key and the value.
    """
    if is_backward:
        tensors = tensors[1:]  # the first one is the gradient of the result
    query, key, value = tensors[:3]
    batch, heads, length, key_dim = query.shape
    value_dim = value.shape[-1]
    flops_per_pair = 2 * (key_dim + value_dim)
    if is_backward:
        flops_per_pair = 2 * (3 * key_dim + 2 * value_dim)
    num_pairs = batch * heads * length * key.shape[-2]
    return num_pairs * flops_per_pair


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory, FLOPs and traffic of operations while it is active.

    `known`: tensors that exist before. With `fused` a tensor counts once a matmul, attention, a
    norm or a collective has read or written it, because a compiled kernel holds it in registers.
    The hooks of autograd for saved tensors would miss tensors that activation checkpointing keeps.
    """

    def __init__(self, known: list[torch.Tensor], fused: bool, sizes: dict[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fused = fused
        self.axis_sizes = sizes
        self.now = 0
        self.peak = 0
        self.flops = Counter[str]()
        self.moved = Counter[str]()
        self.sent = Counter[str]()
        # Storages are numbered, because their addresses are used again.
        self.numbers = dict[int, int]()  # numbers of living storages by address
        self.sizes = list[int]()  # bytes, by number
        self.parents = list[set[int]]()  # the storages from which each was computed, by number
        self.written = set[int]()  # results of matmuls and collectives
        self.read = set[int]()  # arguments of any operation
        self.held = set[int]()  # storages that a compiled program must have in memory
        self.counted = set[int]()  # storages whose bytes were added to `now`
        for tensor in known:
            self.number(tensor)
        self.num_known = len(self.sizes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        made = _tensors(result)
        name = func.overloadpacket.__name__
        is_collective = name in _SENT
        is_matmul = func.overloadpacket in flop_registry

        size = sum(map(_num_bytes, given)) + sum(map(_num_bytes, made))
        if is_collective:
            self._count_sent(name, args, made)
        if is_matmul:
            self._count_flops(func, args, kwargs, given, result)
            self.moved["matmul"] += size
        elif not is_collective:
            self.moved["other"] += size

        sources = set(map(self.number, given))
        results = set(map(self.number, made))
        self.read |= sources
        for number in results:
            self.parents[number] |= sources - {number}
        if is_matmul or is_collective:
            self.written |= results
        if is_matmul or is_collective or func.overloadpacket in _NOT_FUSED:
            self.held |= sources | results
        for tensor in made:
            if tensor.dtype == torch.bool:  # masks of dropout are stored
                self.held.add(self.number(tensor))

        in_memory = results
        if self.fused:
            in_memory = (sources | results) & self.held
        for number in in_memory - self.counted:
            if number >= self.num_known:
                self.counted.add(number)
                self.now += self.sizes[number]
        self.peak = max(self.peak, self.now)
        return result

    def _count_flops(
        self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], result: Any
    ) -> None:
        packet = func.overloadpacket
        name = packet.__name__
        kind = "attention"
        if not name.startswith(_ATTENTION):
            kind = str(given[0].dtype).removeprefix("torch.")
        if name.startswith("_scaled_dot_product"):
            is_backward = name.endswith("_backward")
            self.flops[kind] += _attention_flops(given, is_backward=is_backward)
        else:
            self.flops[kind] += flop_registry[packet](*args, **kwargs, out_val=result)

    def _count_sent(self, name: str, args: Any, made: list[torch.Tensor]) -> None:
        if name == "allreduce_":  # torch.distributed, in place: (tensors, group, …)
            group = dist.ProcessGroup.unbox(args[1]).group_name
            tensors = args[0]
        elif name == "matmul_reduce":  # parallel/tensor.py: a matmul and the sum over ranks
            name = _REDUCTIONS[args[2]]
            group = args[3]
            tensors = made
        else:
            group = args[-1]
            tensors = made[:1]
        axis = group.removeprefix(_GROUP)
        factor = _SENT[name](self.axis_sizes[axis])
        self.sent[axis] += int(factor * sum(map(_num_bytes, tensors)))

    def number(self, tensor: torch.Tensor) -> int:
        """Returns the number of the tensor's storage."""
        storage = local_shard(tensor).untyped_storage()  # that of a DTensor has the global size
        address = torch_private.storage_address(storage)
        if address not in self.numbers:
            self.numbers[address] = len(self.sizes)
            self.sizes.append(storage.nbytes())
            self.parents.append(set())
            weakref.finalize(storage, self._free, address)
        return self.numbers[address]

    def alive(self) -> set[int]:
        """Returns the numbers of the storages that are alive."""
        return set(self.numbers.values())

    def _free(self, address: int) -> None:
        number = self.numbers.pop(address)
        if number in self.counted:
            self.now -= self.sizes[number]

    def kept(self, stay: set[int], held: set[int], recompute: str) -> int:
        """Returns the bytes of the storages that `stay` for the backward pass.

        Instead of the result of an element-wise operation, a compiled program keeps the tensors
        from which it is computed, of those that the backward pass reads; with `cheap` only results
        of matmuls and attention, and the input. The partitioner of torch comes to the same bytes
        within 1 % (tests/predict/test_meter.py).
        """
        if not self.fused:
            return sum(self.sizes[number] for number in stay if number >= self.num_known)
        can_keep = self.written if recompute == "cheap" else held
        kept = 0
        seen = set[int]()
        todo = list(stay & self.read)
        while todo:
            number = todo.pop()
            if number in seen or number < self.num_known:
                continue
            seen.add(number)
            is_input = number == self.num_known  # the first storage that the measured call made
            if number in can_keep or is_input:
                kept += self.sizes[number]
            else:
                todo += self.parents[number]
        return kept


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors in the arguments, or the result, of an operation."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    tensors = []
    for each in tree:
        tensors += _tensors(each)
    return tensors


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _FirstRank(Mesh):
    """The mesh of the first rank of tp and cp."""

    def __init__(self, dims: ParallelDims) -> None:
        self.dims = dims
        self._rank = 0

    def axis(self, name: str) -> DeviceMesh:
        return _axis(name, self.size(name))


@cache
def _axis(name: str, size: int) -> DeviceMesh:
    """Returns the first rank's mesh of an axis: a launch measures before or after it has processes."""
    return torch_private.MeshWithoutProcesses(name, size, _GROUP + name)


class _FusedNorm(TorchFunctionMode):  # type: ignore[no-untyped-call]
    """Replaces RMSNorm with a fused version, as a GPU and the compiler compute it: its input is kept,
    and fp32 values per row. On the meta device RMSNorm consists of single operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.rms_norm:
            return _fused_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fused_norm(
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    return F.layer_norm(input, normalized_shape, weight, None, eps or 0.0)


def _use_fused_norms(model: Llama) -> None:
    """Computes each norm in the mode: one around the step would not be active while the backward
    pass recomputes, which runs in another thread."""
    for module in model.modules():
        if hasattr(module, "eps"):
            module.forward = partial(_compute_fused, module.forward)


def _compute_fused(forward: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with _FusedNorm():  # type: ignore[no-untyped-call]
        return forward(x)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, *, dropout: float = 0.0
) -> torch.Tensor:
    """Computes attention as flash, cuDNN and flex_attention keep it: q, k, v, the result, and fp32
    values per row. On the meta device torch would choose explicit matmuls."""
    return torch_private.flash_attention(q, k, v, dropout)


def _use_flash(model: Llama) -> None:
    """Replaces the function that every attention module calls, before tp and cp wrap it."""
    if model.config.pos_emb in ("alibi", "relative"):  # a mask per head, which flash does not have
        return
    for block in model.blocks.values():
        module: Any = block.attention
        module.attend = _flash


def _build(setup: ModelSetup) -> Llama:
    """Builds a model of one block as `parallelize` does, up to FSDP."""
    model = build_model(setup.config)
    precision = setup.precision
    mesh = _FirstRank(setup.dims)
    if setup.device_type != "cpu":
        _use_flash(model)
    if setup.dims.strategy == "none":
        cast_weights(model, precision)
        apply_precision(model, precision)
        compute_with_casts(model, precision)
    else:  # as FSDP gathers them; `to(dtype)` fails for fake parameters
        cast_weights(model, replace(precision, weights=precision.compute))
    if precision.float8:
        from fms_fsdp.parallel.float8 import apply_float8

        apply_float8(model, precision.float8)
    if setup.dims.tp > 1:
        from fms_fsdp.parallel.tensor import apply_tp

        apply_tp(model, mesh, setup.section)
    if setup.dims.cp > 1:
        from fms_fsdp.parallel.context import apply_cp

        apply_cp(model, mesh, setup.section)
    if setup.device_type != "cpu":
        _use_fused_norms(model)
    return model


def units(setup: ModelSetup) -> dict[str, int]:
    """Returns the parameters of a rank of tp, by part; a tied head has only its norm."""
    return _units(setup.bare("units"))


@cache
def _units(setup: ModelSetup) -> dict[str, int]:
    with torch.device("meta"):
        model = _build(setup)
    parts = {"embed": model.embed, "block": model.blocks["0"], "head": model.head}
    num_params = dict[str, int]()
    for name, module in parts.items():
        if module is not None:
            num_params[name] = sum(local_shard(each).numel() for each in module.parameters())
    bias: Any = getattr(model, "distance_bias", None)
    if bias is not None:  # FSDP's root holds it, as a tied embedding
        num_params["embed"] += local_shard(bias.weight).numel()
    return num_params


@cache
def cost(setup: ModelSetup, part: str, num_sequences: int) -> Cost:
    """Returns the cost of "embed", "block", "recomputed" or "head" for `num_sequences` sequences of a rank.

    Blocks are linear in the number of sequences, so larger numbers follow from one and two. The
    head computes the loss in chunks, so it is linear only if a sequence has many of them, as on a
    CPU.
    """
    setup = setup.bare(part)
    is_linear = part in ("block", "recomputed")
    if part == "head" and setup.device_type == "cpu":
        logits = 4 * setup.seq_length * setup.config.vocab_size  # bytes of a sequence's, in fp32
        is_linear = logits > _CHUNKED_LOGITS
    if num_sequences <= 2 or not is_linear:
        return _measured(setup, part, num_sequences)
    one = _measured(setup, part, 1)
    per_sequence = _measured(setup, part, 2).plus(one, -1)
    return one.plus(per_sequence, num_sequences - 1)


@cache
def _measured(setup: ModelSetup, part: str, num_sequences: int) -> Cost:
    for name in ("tp", "cp"):  # before the mode is active, in which a mesh cannot read its ranks
        _axis(name, setup.dims.size(name))
    if setup.device_type == "cpu":
        with torch_private.fake_tensors(), torch.device("cpu"):
            return _measure(setup, part, num_sequences)
    # FakeTensorMode with a device "cuda" aborts the process if torch is built without CUDA.
    with torch.device("meta"):
        return _measure(setup, part, num_sequences)


def _measure(setup: ModelSetup, part: str, num_sequences: int) -> Cost:
    model: Any = _build(setup)
    config = setup.config
    dims = setup.dims
    if part == "recomputed" and setup.section.recomputes in ("ops", "blocks"):
        apply_activation_checkpointing(model, setup.section, compiled=False)

    length = setup.seq_length // dims.cp
    own_length = length  # of the hidden states, which sequence parallelism shards
    if dims.sequence_parallel:
        own_length = length // dims.tp
    shape = (num_sequences, own_length, config.hidden_size)
    x = torch.empty(shape, dtype=DTYPES[setup.precision.compute], requires_grad=True)
    labels = torch.empty(num_sequences, length, dtype=torch.int64)
    rope = torch.empty((length, *model.rope.shape[1:]))
    mask: Any = None  # on a GPU it is part of the kernel
    if setup.device_type == "cpu" or config.pos_emb in ("alibi", "relative"):
        with torch.no_grad():  # all blocks share it
            mask = model.mask(config.windows[0], None, slice(0, length), x)
        if config.pos_emb == "relative":
            mask.requires_grad_()

    def compute(x: torch.Tensor) -> Any:
        if part == "embed":
            return model.embed(labels, slice(0, length))
        if part == "head":
            tied = model.embed.weight if config.tie_embeddings else None
            return model.head(x, labels, tied)
        return model.blocks["0"](x, rope, mask, None)

    known = [x, labels, model.rope, *model.parameters(), *_tensors((rope, mask))]
    meter = Meter(known, setup.compiled, {"tp": dims.tp, "cp": dims.cp})
    with meter:
        given = [x.clone()]  # only the call holds it, like the result of the block before
        meter.moved.clear()
        result = compute(given.pop())
        out = result if isinstance(result, torch.Tensor) else result[0]
        stay = meter.alive() - {meter.number(out)}  # the next part keeps its result
        held = meter.held.copy()
        meter.read.clear()
        out.backward(torch.empty_like(out))  # type: ignore[no-untyped-call]

    summands = 0
    for parameter in model.parameters():
        if parameter.grad is not None and is_partial(parameter.grad):
            summands += local_shard(parameter.grad).numel()
    kept = meter.kept(stay, held, setup.section.recomputes)
    return Cost(kept, meter.peak, meter.flops, meter.moved, meter.sent, summands)
