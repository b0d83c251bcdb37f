"""Flags of precision, and the dtypes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from fms_fsdp.config.flag import logged_flag
from fms_fsdp.errors import UserError

PRECISIONS = ("bf16", "fp32", "fp16", "bf16_pure", "bf16_mixed_sr", "float8")
NUM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_DTYPES = {"bfloat16": "bf16", **dict.fromkeys(("float32", "float", "32"), "fp32")}
_ALIASES = {
    alias: name
    for name, aliases in {
        "bf16": "bfloat16 mixed bf16_mixed bf16-mixed mixed_precision",
        "fp32": "float32 float 32 32-true fp32_full",
        "fp16": "float16 half 16-mixed fp16_mixed fp16-mixed",
        "bf16_pure": "bf16-true bf16_sr bf16sr pure_bf16 bf16_full",
        "bf16_mixed_sr": "mixed_precisionsr mixed_precision_sr bf16-mixed-sr",
        "float8": "fp8 8bit float8_e4m3",
    }.items()
    for alias in aliases.split()
}


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run; every field but the last three is a key of `NUM_BYTES`.

    compute              matmuls, activations and gathered weights
    weights              the weights that the optimizer updates
    gradients            sums over gradient-accumulation steps
    reduce               gradients between ranks
    state                the moments of AdamW
    stochastic_rounding  weights and moments in bf16 are rounded stochastically
    float8               "", or the scaling of the matmuls of blocks: "row" or "tensor"
    rounded_copy         matmuls use stochastically rounded copies of the weights
    """

    compute: str = "fp32"
    weights: str = "fp32"
    gradients: str = "fp32"
    reduce: str = "fp32"
    state: str = "fp32"
    stochastic_rounding: bool = True
    float8: str = ""
    rounded_copy: bool = False

    @property
    def is_rounded(self) -> bool:
        """Whether the optimizer rounds weights or moments, which only the AdamW for bf16 can."""
        return "bf16" in (self.weights, self.state)

    @property
    def summary(self) -> str:
        """A summary for the log."""
        if self == Precision(reduce=self.reduce):
            return "fp32"
        compute = f"{self.compute} compute"
        if self.rounded_copy:
            compute += " on stochastically rounded copies"
        weights = "fp32 master weights"
        if self.weights != "fp32":
            weights = f"{self.weights} weights"
        parts = [compute, weights]
        if self.float8:
            parts.insert(0, f"float8 matmuls scaled by {self.float8}")
        if self.is_rounded:
            parts.append(f"{self.state} moments")
            if not self.stochastic_rounding:
                parts.append("rounded to nearest")
        return ", ".join(parts)


FP32 = Precision()
BF16 = Precision(compute="bf16")


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtypes in which the model is stored and computed.

    When to change: `precision=float8` on H100 and later, once bf16 is known to train well.
    `bf16_pure` if memory is short. `fp16` on GPUs without bf16. docs/guides/precision.md explains
    the costs.
    """

    precision: str | None = logged_flag(None, choices=PRECISIONS, aliases=_ALIASES)
    """Precision of training: bf16 and fp16 compute in 16 bits with fp32 weights, bf16_mixed_sr is
    bf16 with stochastically rounded copies of the weights, bf16_pure has bf16 weights, float8
    computes the matmuls of blocks in 8 bits (default: bf16, or fp32 on hardware without bf16)."""
    mixed_precision: bool | None = logged_flag(None)
    """Another name for --precision: True is bf16, False is fp32."""
    param_dtype: str | None = logged_flag(None, choices="fp32 bf16", aliases=_DTYPES, advanced=True)
    """Dtype of the weights (default: fp32; bf16 for bf16_pure)."""
    grad_accum_dtype: str | None = logged_flag(
        None, choices="fp32 bf16", aliases=_DTYPES, advanced=True
    )
    """Dtype of the gradients summed over gradient-accumulation steps (default: param_dtype)."""
    optimizer_state_dtype: str | None = logged_flag(
        None, choices="fp32 bf16", aliases=_DTYPES, advanced=True
    )
    """Dtype of the moments of AdamW (default: fp32; bf16 for bf16_pure)."""
    reduce_dtype: str = logged_flag("fp32", choices="fp32 bf16", aliases=_DTYPES, advanced=True)
    """Dtype in which ranks reduce gradients; no effect with --sharding_strategy=none."""
    stochastic_rounding: bool = logged_flag(True, advanced=True)
    """Round bf16 weights and moments stochastically, so that small updates count on average; no
    effect on fp32."""
    float8_scaling: str = logged_flag(
        "row", choices="row tensor", advanced=True, needs="precision=float8"
    )
    """Part of a matrix that shares one scale in float8."""
    loss_scale: float = logged_flag(0.0, min=0, max=2**64, advanced=True, needs="precision=fp16")
    """Loss scale of fp16; 0 is dynamic."""
    loss_scale_window: int = logged_flag(1000, min=1, advanced=True, needs="precision=fp16")
    """Number of steps without overflow after which a dynamic loss scale is doubled."""
    loss_scale_hysteresis: int = logged_flag(2, min=1, advanced=True, needs="precision=fp16")
    """Number of overflows after which a dynamic loss scale is halved."""
    min_loss_scale: float = logged_flag(
        1.0, above=0, max=2**64, advanced=True, needs="precision=fp16"
    )
    """Minimum of a dynamic loss scale; an overflow that would halve it further ends the run."""

    def __post_init__(self) -> None:
        named = self.named
        if self.alias is not None and self.precision not in (None, self.alias):
            raise UserError(
                f"--precision={named} and --mixed_precision={self.mixed_precision} "
                f"(--precision={self.alias}) cannot be used together; remove --mixed_precision"
            )
        for name in ("param_dtype", "optimizer_state_dtype"):
            if named == "bf16_pure" and getattr(self, name) == "fp32":
                raise UserError(
                    f"--{name}=fp32 is not supported with --precision=bf16_pure; remove --{name} "
                    "or use --precision=bf16"
                )
        if self.param_dtype == "bf16" and named in ("fp32", "fp16", "bf16_mixed_sr"):
            raise UserError(
                f"--param_dtype=bf16 is not supported with --precision={named}; use "
                "--precision=bf16"
            )
        if self.grad_accum_dtype == "bf16" and self.weights != "bf16":
            raise UserError(
                f"--grad_accum_dtype=bf16 requires bf16 weights, but they are {self.weights}; set "
                "--param_dtype=bf16"
            )

    @property
    def alias(self) -> str | None:
        """The `precision` that `mixed_precision` names, or None if it is not set."""
        return {True: "bf16", False: "fp32", None: None}[self.mixed_precision]

    @property
    def named(self) -> str | None:
        """The `precision` that one of three flags names; None if the hardware decides."""
        if self.precision:
            return self.precision
        if self.alias is not None:
            return self.alias
        if self.param_dtype == "bf16":
            return "bf16"
        return None

    @property
    def weights(self) -> str:
        """The dtype of the weights that the optimizer updates."""
        if self.param_dtype:
            return self.param_dtype
        return "bf16" if self.named == "bf16_pure" else "fp32"

    def resolve(self, name: str) -> Precision:
        """Returns the dtypes that the flags give if `precision` is `name`."""
        state = self.optimizer_state_dtype
        if not state:
            state = "bf16" if name == "bf16_pure" else "fp32"
        return Precision(
            compute=name if name in NUM_BYTES else "bf16",
            weights=self.weights,
            gradients=self.grad_accum_dtype or self.weights,
            reduce=self.reduce_dtype,
            state=state,
            stochastic_rounding=self.stochastic_rounding,
            float8=self.float8_scaling if name == "float8" else "",
            rounded_copy=name == "bf16_mixed_sr",
        )
