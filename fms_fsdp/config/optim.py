"""Flags of the optimizer and of its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fms_fsdp.config.flag import WithoutEffect, fixed_flag, logged_flag, only_one
from fms_fsdp.config.formats import parse_duration
from fms_fsdp.errors import UserError

OPTIMIZERS = tuple(
    "adamw adam sgd muon adafactor lamb adagrad adadelta adamax rmsprop rprop novograd "
    "madgrad sm3".split()
)
SCHEDULES = tuple(
    "cosine linear constant wsd inverse_sqrt square polynomial step exponential noam "
    "annealing".split()
)


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule.

    When to change: `learning_rate` for each new size of model or batch; larger models take smaller
    rates. `warmup` if the loss jumps at the start. `lr_schedule=wsd` if the length is not known
    yet. `adam_beta2` closer to 1 for small batches. Look at `grad_norm` before changing
    `grad_clip`. docs/guides/optimizers-and-schedules.md describes the optimizers.
    """

    optimizer: str = fixed_flag("adamw", choices=OPTIMIZERS, form="module:function")
    """Optimizer, or module:function of your own; muon updates the matrices of the blocks, and adamw
    all other weights."""
    optimizer_kwargs: tuple[str, ...] = logged_flag((), advanced=True)
    """More arguments of the optimizer: key=value,…; a tuple is written 0.5:1.2."""
    learning_rate: float = logged_flag(3e-4, min=0)
    """Peak learning rate, at the end of the warmup."""
    lr_schedule: str = logged_flag("cosine", choices=SCHEDULES)
    """Decay of the learning rate after the warmup (docs/guides/optimizers-and-schedules.md has the formulas)."""
    warmup: str | None = logged_flag(None, parse=parse_duration)
    """Length of the linear warmup: steps, a fraction of the run (0.05), 216320samples or 10Btokens
    (default: 5 % of the run, at most 2000 steps)."""
    warmup_steps: int | None = logged_flag(None, min=0)
    """Another name for --warmup, in steps."""
    lr_decay: str | None = logged_flag(None, in_name=False, parse=parse_duration)
    """End of the decay, or for wsd the length of the last phase, in the format of --warmup
    (default: the end of the run as first planned; for wsd a tenth of the run)."""
    constant_steps: int = logged_flag(0, min=0, advanced=True)
    """Number of steps at the minimum learning rate, at the end of the run."""
    min_lr_ratio: float = logged_flag(0.1, min=0, max=1)
    """Minimum learning rate as a fraction of the peak; no effect with --lr_schedule=constant."""
    min_lr: float | None = logged_flag(None, min=0)
    """Minimum learning rate, instead of min_lr_ratio."""
    lr_power: float = logged_flag(
        1.0, above=0, max=100, advanced=True, needs="lr_schedule=polynomial"
    )
    """Exponent of --lr_schedule=polynomial."""
    lr_gamma: float = logged_flag(0.1, above=0, max=1, advanced=True)
    """Factor of the learning rate after each lr_step_size (no effect without --lr_schedule=step or
    exponential)."""
    lr_step_size: str | None = logged_flag(None, advanced=True, parse=parse_duration)
    """Duration between two factors of lr_gamma, in the format of --warmup (no effect without
    --lr_schedule=step or exponential)."""
    adam_beta1: float = logged_flag(0.9, min=0, below=1)
    """Decay of the first moment, for optimizers with betas, such as adamw."""
    adam_beta2: float = logged_flag(0.95, min=0, below=1)
    """Decay of the second moment, for optimizers with betas, such as adamw."""
    adam_eps: float = logged_flag(1e-8, min=0, max=1, advanced=True)
    """Epsilon added to the root of the second moment, for optimizers with an epsilon."""
    weight_decay: float = logged_flag(0.1, min=0)
    """Weight decay; decoupled, except in the optimizers that docs/guides/optimizers-and-schedules.md marks (rprop has
    none)."""
    decay_norms: bool = logged_flag(False)
    """Apply weight decay to norms and biases."""
    decay_embeddings: bool = logged_flag(True)
    """Apply weight decay to the embedding."""
    grad_clip: float = logged_flag(1.0, min=0)
    """Maximum global norm of the gradient; 0 does not clip."""

    def __post_init__(self) -> None:
        only_one(self, "warmup", "warmup_steps")
        only_one(self, "min_lr", "min_lr_ratio")
        if self.min_lr is not None and self.min_lr > self.learning_rate:
            raise UserError(
                f"--min_lr={self.min_lr:g} must be at most --learning_rate={self.learning_rate:g}; "
                "lower --min_lr"
            )
        if self.lr_schedule in ("step", "exponential") and not self.lr_step_size:
            raise UserError(
                f"--lr_schedule={self.lr_schedule} requires --lr_step_size; set it, e.g. to 0.3"
            )

    def without_effect(self) -> Iterator[WithoutEffect]:
        """Yields the flags that these settings make useless."""
        if self.lr_schedule not in ("step", "exponential"):
            names = ("lr_gamma", "lr_step_size")
            condition = "without --lr_schedule=step or --lr_schedule=exponential"
            yield WithoutEffect(names, condition, "set --lr_schedule=step", ("lr_schedule",))

    def durations(self) -> dict[str, str]:
        """Returns the flags that hold a duration and are set."""
        durations = dict[str, str]()
        if self.warmup:
            durations["warmup"] = self.warmup
        elif self.warmup_steps is not None:
            durations["warmup"] = str(self.warmup_steps)
        if self.lr_decay is not None:
            durations["lr_decay"] = self.lr_decay
        if self.lr_step_size is not None:
            durations["lr_step_size"] = self.lr_step_size
        return durations

    @property
    def min_ratio(self) -> float:
        """The minimum learning rate as a fraction of the peak."""
        if self.min_lr is None:
            return self.min_lr_ratio
        if not self.learning_rate:
            return 0.0
        return self.min_lr / self.learning_rate
