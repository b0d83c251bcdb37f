"""Flags of the training loop: length, batch size, seed, limits of a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fms_fsdp.config.flag import fixed_flag, flag, logged_flag, only_one
from fms_fsdp.config.formats import parse_epochs
from fms_fsdp.errors import UserError


@dataclass(frozen=True)
class TrainingConfig:
    """The length of the run and of a launch, the batch size, the seed, a teacher.

    When to change: `batch_size` is as large as the memory allows; `global_batch_size` decides how
    the model learns and stays the same on any number of devices. Set one length: steps, tokens,
    samples or epochs. Set the limits of a launch on a machine that you have for some hours.
    """

    seed: int = fixed_flag(2023, min=0, max=2**63 - 1, orders_data=True)
    """Seed of the weights and of the order of the data."""
    num_steps: int | None = logged_flag(None, min=1, in_name=False)
    """Length of the run in optimizer steps, including those before a resume (default: 1000)."""
    num_tokens: int | None = logged_flag(None, min=1, in_name=False)
    """Length of the run in tokens, e.g. 300B, instead of num_steps."""
    num_samples: int | None = logged_flag(None, min=1, in_name=False)
    """Length of the run in sequences of seq_length tokens, instead of num_steps."""
    num_epochs: str = logged_flag("", in_name=False, parse=parse_epochs)
    """Length of the run in epochs of all data (1.5) or of one source (wiki:2), instead of
    num_steps."""
    batch_size: int | Literal["auto"] | None = logged_flag(None, min=1, words="auto")
    """Sequences per micro-batch and data-parallel rank; auto is the largest that fits the memory
    and keeps the global batch (default: 2, or from the other two)."""
    grad_accum_steps: int | None = logged_flag(None, min=1)
    """Gradient-accumulation steps per optimizer step (default: 1, or from the other two)."""
    global_batch_size: int | None = logged_flag(None, min=1)
    """Sequences per optimizer step: batch_size x data-parallel size x grad_accum_steps."""
    rampup_batch_size: tuple[int, ...] = logged_flag((), min=1)
    """Batch size ramp, start,increment,samples: the global batch grows from start by increment
    sequences at a time, and reaches global_batch_size after this many samples."""
    rampup_round: int = logged_flag(1, min=1, advanced=True, needs="rampup_batch_size")
    """Round each batch of the ramp down to a multiple of this number, so that ranks and
    gradient-accumulation steps can share it."""
    rampup_micro_batch: bool = flag(False, needs="rampup_batch_size")
    """Let the micro-batches of a ramp shrink to the largest size up to batch_size that divides the
    batch (torch.compile: one compilation per size)."""
    deterministic: bool = logged_flag(False, advanced=True)
    """Use only deterministic kernels, which are slower (CPU runs always repeat bit for bit)."""
    teacher_path: str = logged_flag("", form="path")
    """Teacher of distillation: run, checkpoint or Hugging Face checkpoint of a frozen model whose
    predictions are learned too."""
    teacher_weight: float = logged_flag(0.5, above=0, max=1, needs="teacher_path")
    """Weight w of distillation: the loss is (1 - w) x cross-entropy + w x KL divergence from the
    teacher."""
    teacher_temperature: float = logged_flag(1.0, above=0, max=1000, needs="teacher_path")
    """Temperature T of distillation: the KL divergence of logits / T, times T squared."""
    max_bad_steps: int = flag(10, min=0)
    """Consecutive steps with a non-finite gradient, which change no weight, after which the run
    fails; 0 never fails."""
    spike_threshold: float = flag(6.0, min=0, advanced=True)
    """Standard deviations above the recent mean from which the log reports a loss spike; 0 is
    off."""
    exit_interval: int | None = flag(None, min=1)
    """End this launch after this many of its steps; the same command resumes the run."""
    exit_tokens: int | None = flag(None, min=1)
    """End this launch after this many of its tokens."""
    exit_samples: int | None = flag(None, min=1)
    """End this launch after this many of its sequences."""
    exit_step: int | None = flag(None, min=1)
    """End the launch that reaches this step of the run."""
    exit_duration_in_mins: float | None = flag(None, above=0)
    """End this launch within this many minutes of its start, including the last checkpoint."""
    gc_interval: int = flag(50, min=0, advanced=True)
    """Steps between Python garbage collections on all ranks; 0 lets Python choose."""
    exit_margin_s: float | None = flag(None, min=0, advanced=True)
    """Seconds before the time limit at which the launch begins to end (default: as measured)."""

    def __post_init__(self) -> None:
        lengths = ["num_steps", "num_tokens", "num_samples"]
        only_one(self, *lengths, *["num_epochs"] * (self.epochs() is not None))
        if self.batch_size == "auto" and self.grad_accum_steps and self.global_batch_size:
            raise UserError(
                f"--batch_size=auto cannot be used with both --grad_accum_steps="
                f"{self.grad_accum_steps} and --global_batch_size={self.global_batch_size}; remove "
                "--grad_accum_steps"
            )

        if len(self.rampup_batch_size) not in (0, 3):
            raise UserError(
                f"--rampup_batch_size={','.join(map(str, self.rampup_batch_size))} must be "
                "start,increment,samples; for example 16,16,5_000_000"
            )

    @property
    def micro_batch_size(self) -> int | None:
        """`batch_size` if it is a number."""
        return self.batch_size if isinstance(self.batch_size, int) else None

    @property
    def rampup(self) -> tuple[int, ...]:
        """Start, increment and samples of the ramp; () without one.

        A fourth number is the multiple of its batches, if that is not 1.
        """
        if self.rampup_batch_size and self.rampup_round > 1:
            return (*self.rampup_batch_size, self.rampup_round)
        return self.rampup_batch_size

    def epochs(self) -> tuple[str, float] | None:
        """Returns the source of `num_epochs` ("" for all) and the number, or None if not set."""
        return parse_epochs("num_epochs", self.num_epochs)
