"""Flags of parallelism: sharding over devices, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from fms_fsdp.config.flag import WithoutEffect, flag
from fms_fsdp.config.formats import parse_block_fraction
from fms_fsdp.errors import UserError

# Tokens from which the feed-forward layer is recomputed entirely. A batch cannot be smaller than one
# sequence, so a long one needs its memory from elsewhere; and its attention, which is kept, is a
# larger part of the FLOPs, so recomputed matmuls cost relatively less. The number is not measured.
_LONG_SEQUENCE = 8192


@dataclass(frozen=True)
class ParallelConfig:
    """Sharding of the model over devices, and activation checkpointing.

    When to change: start with the defaults. If memory is short, lower `batch_size`, then set
    `recompute` (`cheap` with compile, `ops`, `blocks`), then `hsdp_shard_size` or
    `sharding_strategy=fsdp`, last `cpu_offload`. On a CPU, set `use_torch_compile` for long runs.
    docs/guides/performance-tuning.md has the order for tuning.
    """

    sharding_strategy: str | None = flag(None, choices="fsdp hsdp ddp none zero1 zero2")
    """Sharding of the model: fsdp over all devices, hsdp within groups of devices, ddp replicates;
    zero2 is fsdp that gathers weights once per step, zero1 also reduces gradients once per step;
    none is for one process (default: none on one device, hsdp for 7b and 13b if it fits, otherwise
    fsdp)."""
    hsdp_shard_size: int | None = flag(None, min=1)
    """Number of devices that share one copy of the model with hsdp (default: the devices of a
    node)."""
    tp_size: int = flag(1, min=0)
    """Tensor parallel size: devices that split the matrices of each block and the vocabulary."""
    cp_size: int = flag(1, min=0)
    """Context parallel size: devices that split the tokens of each sequence."""
    pp_size: int = flag(1, min=0)
    """Pipeline parallel size: devices that split the layers."""
    sequence_parallel: bool | None = flag(None, advanced=True, needs="tp_size")
    """Split the sequence over tensor-parallel devices between matmuls, instead of replicating it
    (default: with tp)."""
    cp_method: str = flag("auto", choices="auto ulysses gather", advanced=True, needs="cp_size")
    """Attention over a split sequence: ulysses exchanges tokens for heads (all-to-all), gather
    all-gathers the keys; auto is ulysses if there are enough heads."""
    pp_schedule: str = flag("1f1b", choices="1f1b gpipe interleaved zbv", needs="pp_size")
    """Order of the forward and backward passes of micro-batches in the pipeline."""
    pp_virtual_stages: int | None = flag(None, min=1, advanced=True, needs="pp_size")
    """Stages per device with --pp_schedule=interleaved (default: 2)."""
    pp_micro_batch_size: int = flag(1, min=1, needs="pp_size")
    """Sequences per pipeline micro-batch; divides batch_size."""
    debug_sync_blocks: bool = flag(False, advanced=True)
    """Synchronize with the device after each block, to locate a failing block; slow."""
    async_tp: bool = flag(False, advanced=True, needs="tp_size")
    """Overlap the collectives of tensor parallel with matmuls; requires compiled blocks on GPUs."""
    recompute: str | None = flag(None, choices="none cheap ops blocks auto")
    """Activation checkpointing, which the backward pass recomputes: cheap is everything except
    matmuls and attention (requires compile), ops everything except --recompute_ops, blocks entire
    blocks, auto the first of these that fits the memory, then more and more blocks (default:
    none)."""
    fsdp_activation_checkpointing: bool | None = flag(None)
    """Another name for --recompute: True is blocks, False is none."""
    selective_checkpointing: str = flag(
        "1",
        parse=parse_block_fraction,
        advanced=True,
    )
    """Fraction of the blocks that --recompute=blocks recomputes, evenly spaced: 1, 1/2, 0.33 or
    every:k."""
    recompute_segment: int = flag(1, min=1, advanced=True)
    """Number of consecutive blocks that --recompute=blocks recomputes together from one saved
    input."""
    recompute_ops: tuple[str, ...] = flag(
        (),
        advanced=True,
        choices="attention every_second_matmul matmuls",
        aliases={"every_second_product": "every_second_matmul", "products": "matmuls"},
    )
    """Results that --recompute=ops keeps: of attention, of every matmul (matmuls) or of every second
    one (default: attention,every_second_matmul; from 8,192 tokens per sequence without matmuls of
    the feed-forward layer). Attention with --attn_dropout is not kept."""
    low_cpu_fsdp: bool = flag(True)
    """Build the model shard by shard, so that no rank holds the full model."""
    use_torch_compile: bool | None = flag(None)
    """Compile blocks with torch.compile (default: on GPUs)."""
    reshard_after_forward: bool | None = flag(None, advanced=True)
    """Free gathered weights after the forward pass instead of after the step (default: False for
    zero1 and zero2; no effect without sharding)."""
    sync_each_micro_step: bool | None = flag(None, advanced=True)
    """Reduce gradients in each gradient-accumulation step instead of once per step (default: False
    for zero1; no effect without sharding)."""
    fsdp_blocks_per_group: int | None = flag(None, min=1, advanced=True)
    """Number of consecutive blocks that are gathered and reduced together (default:
    recompute_segment; no effect with --sharding_strategy=none)."""
    fsdp_prefetch: int = flag(0, min=0, advanced=True)
    """Groups of blocks to gather ahead of use, in addition to FSDP's own prefetching; no effect
    without sharding."""
    cpu_offload: bool = flag(False, advanced=True)
    """Keep weights, gradients and optimizer state on the CPU."""
    dist_backend: str = flag("auto", choices="auto nccl gloo", advanced=True)
    """Backend of the process group; auto is nccl on GPUs and gloo on CPUs."""
    collective_timeout_s: int = flag(600, min=1, max=10**8, advanced=True)
    """Seconds without a finished step or progress of a save after which the launch fails."""
    matmul_precision: str = flag("high", choices="highest high medium", advanced=True)
    """Precision of fp32 matmuls on GPUs: highest is fp32, high is TF32."""

    def without_effect(self) -> Iterator[WithoutEffect]:
        """Yields the flags that these settings make useless."""
        if self.sharding_strategy not in ("hsdp", None):
            condition = "without --sharding_strategy=hsdp"
            fix = "set --sharding_strategy=hsdp"
            yield WithoutEffect(("hsdp_shard_size",), condition, fix, ("sharding_strategy",))
        if self.recompute != "blocks" and not self.fsdp_activation_checkpointing:
            names = ("selective_checkpointing", "recompute_segment")
            condition = "without --recompute=blocks or --fsdp_activation_checkpointing"
            others = ("recompute", "fsdp_activation_checkpointing")
            yield WithoutEffect(names, condition, "set --recompute=blocks", others)
        if self.recompute not in ("ops", "auto"):
            condition = "without --recompute=ops or --recompute=auto"
            yield WithoutEffect(
                ("recompute_ops",), condition, "set --recompute=ops", ("recompute",)
            )

    def __post_init__(self) -> None:
        alias = "blocks" if self.fsdp_activation_checkpointing else "none"
        if self.fsdp_activation_checkpointing is not None and self.recompute not in (None, alias):
            raise UserError(
                f"--recompute={self.recompute} and --fsdp_activation_checkpointing="
                f"{self.fsdp_activation_checkpointing} (--recompute={alias}) cannot be used "
                "together; remove --fsdp_activation_checkpointing"
            )
        if self.blocks_per_group % self.segment:
            raise UserError(
                f"--fsdp_blocks_per_group={self.fsdp_blocks_per_group} must be divisible by "
                f"--recompute_segment={self.recompute_segment}; remove --fsdp_blocks_per_group"
            )
        for name, implied in self.implied().items():
            if getattr(self, name) not in (None, implied):
                cause = f"--sharding_strategy={self.sharding_strategy}"
                if self.pp_size > 1:
                    cause = f"--pp_size={self.pp_size}"
                raise UserError(
                    f"--{name}={not implied} is not supported with {cause}, which implies "
                    f"{implied}; remove --{name}"
                )

    def implied(self) -> dict[str, bool]:
        """Returns the flags that the pipeline or the sharding strategy decides.

        The micro-batches of a pipeline use weights that are gathered once per step, and leave
        unsharded gradients.
        """
        if self.pp_size > 1:
            return {"reshard_after_forward": False, "sync_each_micro_step": False}
        if self.sharding_strategy not in ("zero1", "zero2"):
            return {}
        is_zero2 = self.sharding_strategy == "zero2"
        return {"reshard_after_forward": False, "sync_each_micro_step": is_zero2}

    def resolved(self, name: str) -> bool:
        """Returns `reshard_after_forward` or `sync_each_micro_step`, implied or by its flag."""
        return self.implied().get(name, getattr(self, name) is not False)

    @property
    def recomputes(self) -> str:
        """The value of `recompute`, which has a second name; `auto` until memory is known."""
        if self.recompute:
            return self.recompute
        return "blocks" if self.fsdp_activation_checkpointing else "none"

    def kept_ops(self, seq_length: int = 0) -> tuple[str, ...]:
        """Returns the results that blocks keep with --recompute=ops at this sequence length.

        "attention_matmuls", every second matmul of attention only, is not a value of the flag.
        """
        if self.recomputes != "ops":
            return ()
        if self.recompute_ops:
            return self.recompute_ops
        if seq_length >= _LONG_SEQUENCE:
            return ("attention", "attention_matmuls")
        return ("attention", "every_second_matmul")

    def for_seq_length(self, seq_length: int) -> ParallelConfig:
        """Returns the section with which to build a model for this sequence length."""
        return replace(self, recompute_ops=self.kept_ops(seq_length))

    @property
    def segment(self) -> int:
        """Blocks that are recomputed together."""
        return self.recompute_segment if self.recomputes == "blocks" else 1

    @property
    def blocks_per_group(self) -> int:
        """Blocks that FSDP gathers together, a multiple of `segment`."""
        return self.fsdp_blocks_per_group or self.segment

    @property
    def recomputed_share(self) -> Fraction:
        """The fraction of the blocks that is recomputed, entirely or in part."""
        if self.recomputes == "blocks":
            return parse_block_fraction("selective_checkpointing", self.selective_checkpointing)
        return Fraction(int(self.recomputes == "ops"))
