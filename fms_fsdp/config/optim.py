"""The flags of the optimizer and of the schedule of its learning rate. One row a flag: see flag.py."""

from __future__ import annotations

from dataclasses import dataclass

from fms_fsdp.config.flag import announced_flag, refused_flag
from fms_fsdp.config.spans import parse_span

OPTIMIZERS = (
    *("adamw", "adam", "sgd", "muon", "adafactor", "lamb", "adamw8bit", "adagrad", "adadelta", "adamax"),
    *("rmsprop", "rprop", "novograd", "madgrad", "sm3"),
)

SCHEDULES = (
    *("cosine", "linear", "constant", "wsd", "inverse_sqrt", "square", "polynomial", "step", "exponential"),
    *("noam", "annealing"),
)


# fmt: off
@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and the schedule of its learning rate.

    When to change: `optimizer` seldom; docs/optimization.md tells what each is for. `learning_rate` for every
    new size of model or batch; larger models take smaller rates. `warmup` where the loss jumps at the start.
    `lr_schedule=wsd` where the length is not known yet.
    `adam_beta2` nearer to 1 for small batches. `grad_clip` seldom: look at `grad_norm` first.
    """

    optimizer: str = refused_flag("adamw", choices=OPTIMIZERS, form="module:function",
        help="how gradients move the weights; muon moves the matrices of the blocks, adamw the rest")
    optimizer_kwargs: tuple[str, ...] = announced_flag((), advanced=True,
        help="more arguments of the optimizer, as key=value,...; a tuple is written 0.5:1.2")
    learning_rate: float = announced_flag(3e-4, "peak learning rate, at the end of the warm-up", minimum=0)
    lr_schedule: str = announced_flag("cosine", choices=SCHEDULES,
        help="how the learning rate falls after the warm-up; docs/optimization.md has the formulas")
    warmup: str | None = announced_flag(None, parse=parse_span,
        help="length of the linear warm-up: steps, a share of the run (0.05), 216320samples or 10Btokens "
        "(default: 5 % of the run, at most 2000 steps)")
    warmup_steps: int | None = announced_flag(None, "another name of --warmup, in steps", minimum=0)
    lr_decay: str | None = announced_flag(None, in_name=False, parse=parse_span,
        help="end of the decay, or for wsd the length of the last phase, written like --warmup (default: "
        "the end of the run as first planned; for wsd a tenth of the run)")
    constant_steps: int = announced_flag(0, minimum=0, advanced=True,
        help="number of steps at the least learning rate, at the end of the run")
    min_lr_ratio: float = announced_flag(0.1, "least rate, as a share of the peak rate", minimum=0, maximum=1)
    min_lr: float | None = announced_flag(None, "least learning rate, in place of min_lr_ratio", minimum=0)
    lr_power: float = announced_flag(1.0, above=0, maximum=100, advanced=True,
        help="exponent of --lr_schedule=polynomial")
    lr_gamma: float = announced_flag(0.1, above=0, maximum=1, advanced=True,
        help="factor after every lr_step_size under --lr_schedule=step and exponential")
    lr_step_size: str | None = announced_flag(None, advanced=True, parse=parse_span,
        help="distance between two factors of --lr_gamma, written like --warmup")
    adam_beta1: float = announced_flag(0.9, minimum=0, below=1, help="decay of the first moment")
    adam_beta2: float = announced_flag(0.95, minimum=0, below=1, help="decay of the second moment")
    adam_eps: float = announced_flag(1e-8, minimum=0, maximum=1, advanced=True,
        help="number that is added to the root of the second moment")
    weight_decay: float = announced_flag(0.1, minimum=0,
        help="weight decay; decoupled, except in the optimizers that docs/optimization.md marks")
    decay_norms: bool = announced_flag(False, "let the weight decay apply to norms and biases")
    decay_embeddings: bool = announced_flag(True, "let the weight decay apply to the embedding")
    grad_clip: float = announced_flag(1.0, "largest global norm of the gradient; 0 does not clip", minimum=0)
    # fmt: on

    def spans(self) -> dict[str, str]:
        """The flags that hold a span of the run, and are given."""
        steps = None if self.warmup_steps is None else str(self.warmup_steps)
        found = {"warmup": self.warmup or steps, "lr_decay": self.lr_decay, "lr_step_size": self.lr_step_size}
        return {name: text for name, text in found.items() if text is not None}

    @property
    def least_share(self) -> float:
        """The least learning rate as a share of the peak."""
        if self.min_lr is None:
            return self.min_lr_ratio
        return self.min_lr / self.learning_rate if self.learning_rate else 0.0
