"""Stochastic rounding of weights and moments to bf16.

In bf16 a weight that should change by less than 1/512 of its value does not change if it is rounded
to nearest. Rounded stochastically, up with a probability equal to its distance from the lower
neighbor, it changes correctly on average.

    (seed, step, name) -> key -> row -> column -> 16 bits for a weight -> 16 bits for each of its moments

The random bits are a hash of the position of an element in the full tensor, not the output of a
generator, so they are the same on any number of ranks and after a resume.

Source: Zamirai et al., "Revisiting BFloat16 Training", https://arxiv.org/abs/2010.06192;
https://github.com/skeeto/hash-prospector (the hash).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fms_fsdp.config import OptimConfig, Precision
from fms_fsdp.config.values import joined
from fms_fsdp.data.permute import derive_key, hash64
from fms_fsdp.distributed.dtensor import Tensors, local_shard, local_shards, shard_slices
from fms_fsdp.errors import UserError
from fms_fsdp.models.init import clean_name
from fms_fsdp.optim.sharded_optimizers import Group, Pair, ShardedOptimizer, State

_MAX_BITS = 0x7F7FFFFF  # the bits of the largest finite fp32 number
# Without these options torch's compiler writes fp32 copies of all results to memory and reads them
# again.
_ONE_KERNEL: dict[str, Any] = {"realize_reads_threshold": 64, "realize_opcount_threshold": 1000}
Chunk = tuple[list[torch.Tensor], list[torch.Tensor]]  # tensors; key and indices for `random_bits`


def random_bits(key: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
    """Returns 32 random bits (int32) for each element of a chunk of a tensor.

    Args:
        key: from 0 to 2^31, int32 like the indices: code that torch 2.11 compiles for a GPU counts in 64
            bits whatever the dtype.
        indices: for each dim the positions of the chunk in the full tensor.
    """
    bits = key
    for index in indices:
        bits = _hash(bits.unsqueeze(-1) ^ index)
    return bits


def _hash(x: torch.Tensor) -> torch.Tensor:
    """Hashes in place; multiplications wrap around at 32 bits."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x21F0AAAD)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x735A2D97)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))


def round_stochastically(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Returns fp32 values that bf16 can represent, by the lower 16 of the random bits (int32).

    16 bits are added below the last bit that is kept, and the carry decides. The carry never
    reaches infinity; infinities and (quiet) NaN do not change.
    """
    as_bits = values.view(torch.int32)
    headroom = _MAX_BITS - (as_bits & 0x7FFFFFFF)  # negative if the value is not finite
    noise = torch.minimum(bits & 0xFFFF, headroom).clamp_(min=0)
    return noise.add_(as_bits).bitwise_and_(-0x10000).view(torch.float32)


def _chunks(param: torch.Tensor, key: int, tensors: Tensors, size: int = 0) -> Iterator[Chunk]:
    """Splits local tensors of the shape of the parameter's shard into chunks of about `size` elements."""
    local = local_shard(param)
    if not size:
        size = 1 << 18 if local.device.type == "cpu" else 1 << 25
    kind: dict[str, Any] = {"dtype": torch.int32, "device": local.device}
    rows, *others = [torch.arange(part.start, part.stop, **kind) for part in shard_slices(param)]
    key_tensor = torch.full((), key >> 33, **kind)
    rows_per_chunk = max(1, size // max(1, math.prod(local.shape[1:])))
    split = [torch.split(each, rows_per_chunk) for each in (*tensors, rows)]
    for *parts, indices in zip(*split, strict=True):
        if parts[0].numel():
            yield parts, [key_tensor, indices, *others]


def check_rounding(precision: Precision, config: OptimConfig) -> None:
    """Raises UserError if the optimizer cannot update weights or moments in bf16."""
    reason = "if weights or moments are bf16 (--precision, --param_dtype, --optimizer_state_dtype)"
    if config.optimizer not in ("adamw", "adam"):
        raise UserError(
            f"--optimizer={config.optimizer} must be adamw or adam {reason}; use one, or fp32"
        )
    if config.optimizer_kwargs:
        kwargs = joined(config.optimizer_kwargs)
        raise UserError(
            f"--optimizer_kwargs={kwargs} is not supported {reason}; remove it, or use fp32"
        )
    if precision.state == "bf16" and not precision.stochastic_rounding and config.adam_beta2 > 0.99:
        raise UserError(
            f"--adam_beta2={config.adam_beta2:g} must be at most 0.99 if bf16 moments are rounded to nearest: "
            "the second moment would stop growing; lower it, or remove --stochastic_rounding=False"
        )


class RoundedAdamW(ShardedOptimizer):
    """AdamW computed in fp32 on weights and moments stored as fp32 or bf16; Adam if not `decoupled`.

        w = (1 − lr · decay) w      Adam: g = g + decay · w
        m = β1 m + (1 − β1) g      v = β2 v + (1 − β2) g²
        w = w − lr / (1 − β1ᵗ) · m / (√v / √(1 − β2ᵗ) + ε)

    Every operation rounds once, so results do not depend on the sharding. `names` maps names to
    parameters. With `compiled` the update of a parameter is one kernel. Like torch's fused
    optimizers it divides gradients by `grad_scale`, on the device.
    Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    divides_gradients = True  # by `grad_scale`
    grad_scale: torch.Tensor | None = None

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: Pair,
        eps: float,
        weight_decay: float,
        *,
        names: Mapping[str, torch.Tensor],
        precision: Precision,
        seed: int,
        decoupled: bool = True,
        compiled: bool = False,
    ) -> None:
        self._seed = seed
        self._mode = (decoupled, precision.stochastic_rounding)
        self._compiled = compiled
        self._update = compile_update() if compiled else adamw_update
        self._dtype = torch.bfloat16 if precision.state == "bf16" else torch.float32
        self._hashes = {param: hash64(name) for name, param in names.items()}
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def init_state(self, param: torch.Tensor, group: Group) -> State:
        return {name: torch.zeros_like(param, dtype=self._dtype) for name in self.state_names}

    def update(self, group: Group, step: int, params: Tensors, states: list[State]) -> None:
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        decay = group["weight_decay"]
        root = math.sqrt(1 - beta2**step)
        step_size = lr / (1 - beta1**step)
        eps = group["eps"]
        scalars = [
            [1 - lr * decay, decay, beta1, 1 - beta1, beta2, 1 - beta2, root, eps, step_size, 0.0],
            [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, root, eps, 0.0, 1.0],  # of a skipped step
        ]
        device = local_shard(params[0]).device
        moves, skips = torch.tensor(scalars, dtype=torch.float32).to(device, non_blocking=True)
        if self._is_skipped is not None:
            moves = torch.where(self._is_skipped, skips, moves)
        numbers = [number.clone() for number in moves]
        if self.grad_scale is not None:
            numbers.append(self.grad_scale)
        for param, state in zip(params, states, strict=True):
            kept = local_shards((param, state["exp_avg"], state["exp_avg_sq"], param.grad))
            key = derive_key(self._seed, step, self._hashes[param])
            # Chunks bound the temporary fp32 copies, which compiled code does not need.
            size = kept[0].numel() if self._compiled else 0
            for chunk, position in _chunks(param, key, kept, size):
                self._update(chunk, numbers, position, *self._mode)


def adamw_update(
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[torch.Tensor],
    position: Sequence[torch.Tensor],
    decoupled: bool,
    stochastic: bool,
) -> None:
    """Updates a chunk of a weight and its moments in place; the gradient is overwritten.

    `numbers` are scalars: with one tensor of ten, compiled code would recompile for a chunk of ten
    rows. An eleventh divides the gradient. A skipped step changes nothing to the last bit: rounding
    keeps bf16 values.
    """
    shrink, decay, beta1, rest1, beta2, rest2, root, eps, size, is_skipped, *scale = numbers
    wide = [tensor.float() for tensor in tensors]  # fp32 ones change in place
    weight, mean, square, grad = wide
    for divisor in scale:
        grad.div_(divisor)
    grad.masked_fill_(is_skipped > 0, 0.0)  # it is not finite
    if decoupled:
        weight.mul_(shrink)
    else:
        grad.add_(weight * decay)
    mean.mul_(beta1).add_(grad * rest1)
    square.mul_(beta2).add_(grad.square_().mul_(rest2))
    denominator = torch.sqrt(square, out=grad).div_(root).add_(eps)
    weight.sub_(torch.div(mean, denominator, out=grad).mul_(size))
    bits: tuple[torch.Tensor | None, ...] = (None, None, None)
    if stochastic:
        of_weight = random_bits(*position)
        of_moments = _hash(of_weight.clone())  # each moment takes one half
        bits = (of_weight, of_moments, of_moments >> 16)
    for stored, exact, drawn in zip(tensors[:3], wide[:3], bits, strict=True):
        if stored.dtype == torch.bfloat16:
            stored.copy_(exact if drawn is None else round_stochastically(exact, drawn))


def compile_update() -> Callable[..., None]:
    """Compiles `adamw_update` to one kernel for parameters of all shapes."""
    return torch.compile(adamw_update, fullgraph=True, dynamic=True, options=_ONE_KERNEL)


class RoundedWeights:
    """fp32 weights that are replaced by stochastically rounded ones during a step (bf16_mixed_sr).

    All micro-batches of a step, and every all-gather and cast in it, use the same rounded weights.
    The optimizer, checkpoints, evaluations and exports use the fp32 weights. Takes 2 bytes per
    local element.

    Source: `mixed_precisionSR` of AWS NeuronX Distributed,
    https://awsdocs-neuron.readthedocs-hosted.com/en/latest/libraries/nxd-training/.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        params = {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        self._weights = list[tuple[int, nn.Parameter, torch.Tensor]]()  # hash, weight, lower bits
        for name, param in params.items():
            lower = torch.empty_like(local_shard(param), dtype=torch.int16, requires_grad=False)
            self._weights.append((hash64(f"copy of {name}"), param, lower))

    @contextmanager
    def rounded(self, step: int) -> Iterator[None]:
        """Rounds the weights for the duration of the context."""
        with torch.no_grad():
            for weight, lower, bits in self._chunks(step):
                lower.copy_(weight.view(torch.int32))  # keeps the lower 16 bits
                weight.copy_(round_stochastically(weight, bits))
        try:
            yield
        finally:
            # The same random bits show if there was a carry, so fp32 weights return exactly unless
            # they are not finite or exceed the largest bf16 number.
            with torch.no_grad():
                for weight, lower, bits in self._chunks(step):
                    low = lower.int().bitwise_and_(0xFFFF)
                    carry = bits.bitwise_and_(0xFFFF).add_(low).bitwise_and_(0x10000)
                    weight.view(torch.int32).sub_(carry).add_(low)

    def _chunks(self, step: int) -> Iterator[tuple[torch.Tensor, ...]]:
        for name_hash, param, lower in self._weights:
            key = derive_key(self._seed, step, name_hash)
            for tensors, position in _chunks(param, key, [local_shard(param), lower]):
                yield *tensors, random_bits(*position)
