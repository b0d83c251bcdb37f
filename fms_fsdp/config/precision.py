"""The dtypes of a run: the flags, and the dtypes that follow from the flags on this hardware."""

from __future__ import annotations

from dataclasses import dataclass

from fms_fsdp.config.flag import announced_flag

PRECISIONS = ("bf16", "fp32", "fp16", "bf16_pure", "bf16_mixed_sr", "float8")
NUM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_DTYPES = {"bfloat16": "bf16", **dict.fromkeys(("float32", "float", "32"), "fp32")}
_ALIASES = {
    **dict.fromkeys(("bfloat16", "mixed", "bf16_mixed", "bf16-mixed", "mixed_precision"), "bf16"),
    **dict.fromkeys(("float32", "float", "32", "32-true", "fp32_full"), "fp32"),
    **dict.fromkeys(("float16", "half", "16-mixed", "fp16_mixed", "fp16-mixed"), "fp16"),
    **dict.fromkeys(("bf16-true", "bf16_sr", "bf16sr", "pure_bf16", "bf16_full"), "bf16_pure"),
    **dict.fromkeys(("mixed_precisionSR", "mixed_precision_sr", "bf16-mixed-sr"), "bf16_mixed_sr"),
    **dict.fromkeys(("fp8", "8bit", "float8_e4m3"), "float8"),
}


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run; every field but the last three is a key of `NUM_BYTES`.

    `compute`: products, activations and gathered weights. `weights`: the weights that the optimizer moves.
    `gradients`: the sums over micro-steps. `reduce`: gradients between ranks. `state`: moments of AdamW.
    `float8`: "" or how the products of blocks are scaled, "row" or "tensor". `rounded_copy`: whether the
    weights of products are rounded by chance.
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
        """Whether the optimizer rounds weights or moments, as only the AdamW of extras/rounded.py can."""
        return "bf16" in (self.weights, self.state)

    @property
    def in_words(self) -> str:
        """The dtypes in words, for the log."""
        if self == Precision(reduce=self.reduce):
            return "fp32"
        moments = f", {self.state} moments" if self.is_rounded else ""
        rounding = "" if self.stochastic_rounding or not self.is_rounded else ", rounded to nearest"
        products = f"float8 products by {self.float8}, " if self.float8 else ""
        master = "fp32 master" if self.weights == "fp32" else self.weights
        copies = " on copies that are rounded by chance" if self.rounded_copy else ""
        return f"{products}{self.compute} compute{copies}, {master} weights{moments}{rounding}"


FP32, BF16 = Precision(), Precision(compute="bf16")


# fmt: off
@dataclass(frozen=True)
class PrecisionConfig:
    """In which numbers the model is kept and computed.

    When to change: `precision=float8` on H100 and later, once bf16 is known to train well. `bf16_pure` where
    memory is short. `fp16` on GPUs without bf16. docs/precision.md has what each costs.
    """

    precision: str | None = announced_flag(None, choices=PRECISIONS, aliases=_ALIASES,
        help="bf16 and fp16 compute in 16 bits and keep fp32 weights, bf16_mixed_sr is bf16 whose copies of "
        "weights are rounded by chance, bf16_pure keeps bf16 weights, float8 "
        "multiplies the matrices of blocks in 8 bits (default: bf16, or fp32 on hardware without bf16)")
    mixed_precision: bool | None = announced_flag(None, "True is --precision=bf16, False is --precision=fp32")
    param_dtype: str | None = announced_flag(None, choices=("fp32", "bf16"), aliases=_DTYPES, advanced=True,
        help="dtype of the weights (default: fp32, for bf16_pure bf16)")
    grad_accum_dtype: str | None = announced_flag(None, choices=("fp32", "bf16"), aliases=_DTYPES,
        advanced=True, help="dtype of the sum of gradients over micro-steps (default: param_dtype)")
    optimizer_state_dtype: str | None = announced_flag(None, choices=("fp32", "bf16"), aliases=_DTYPES,
        advanced=True, help="dtype of the moments of AdamW (default: fp32, for bf16_pure bf16)")
    reduce_dtype: str = announced_flag("fp32", choices=("fp32", "bf16"), aliases=_DTYPES, advanced=True,
        help="dtype in which ranks add up gradients")
    stochastic_rounding: bool = announced_flag(True, advanced=True, part="rounded",
        help="round weights and moments in bf16 up or down by chance, so that small steps count on average")
    float8_scaling: str = announced_flag("row", choices=("row", "tensor"), advanced=True, part="float8",
        help="part of a matrix that shares one scale in float8")
    loss_scale: float = announced_flag(0.0, minimum=0, maximum=2**64, advanced=True, part="loss_scale",
        help="factor of the loss in fp16; 0 finds the factor in training")
    loss_scale_window: int = announced_flag(1000, minimum=1, advanced=True, part="loss_scale",
        help="number of steps without overflow after which the loss scale is doubled")
    loss_scale_hysteresis: int = announced_flag(2, minimum=1, advanced=True, part="loss_scale",
        help="number of overflows after which the loss scale is halved")
    min_loss_scale: float = announced_flag(1.0, above=0, maximum=2**64, advanced=True, part="loss_scale",
        help="an overflow at this loss scale ends the run")
    # fmt: on

    @property
    def alias(self) -> str | None:
        """The `precision` that `mixed_precision` names; None where `mixed_precision` is not given."""
        return {True: "bf16", False: "fp32", None: None}[self.mixed_precision]

    @property
    def named(self) -> str | None:
        """The `precision` that one of three flags names; None where the hardware decides."""
        return self.precision or self.alias or ("bf16" if self.param_dtype == "bf16" else None)

    @property
    def weights(self) -> str:
        """The dtype of the weights that the optimizer moves."""
        return self.param_dtype or ("bf16" if self.named == "bf16_pure" else "fp32")

    def resolve(self, name: str) -> Precision:
        """The dtypes that the flags give where `precision` is `name`."""
        pure = name == "bf16_pure"
        return Precision(
            compute=name if name in NUM_BYTES else "bf16",
            weights=self.weights,
            gradients=self.grad_accum_dtype or self.weights,
            reduce=self.reduce_dtype,
            state=self.optimizer_state_dtype or ("bf16" if pure else "fp32"),
            stochastic_rounding=self.stochastic_rounding,
            float8=self.float8_scaling if name == "float8" else "",
            rounded_copy=name == "bf16_mixed_sr",
        )
