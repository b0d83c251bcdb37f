"""`python -m fms_fsdp estimate`: how long a training will take, as a range, before the machine is asked for.

    compute = FLOPs per token × tokens / (devices × achieved FLOP/s)
    FLOPs per token: 6·N + 12·L·D·S, up to 4/3 of it where blocks are recomputed

The forward pass multiplies and adds each of N parameters once a token (2·N), the backward pass twice that
(4·N), recomputation the forward pass again (2·N): 6 to 8 FLOPs a parameter and token. Source: Narayanan et
al. 2021, https://arxiv.org/abs/2104.04473, equations 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from fms_fsdp.config import ModelConfig, flag
from fms_fsdp.tools.table import table

_DAY_S = 86400.0


@dataclass(frozen=True)
class EstimateConfig:
    """What to train, on what, and what interrupts it: of the two rates give one."""

    model_variant: str = flag("7b", "the model whose FLOPs count")
    seq_length: int = flag(4096, "tokens a row, for the FLOPs of attention", minimum=1)
    parameters: int | None = flag(None, "parameters, in place of a variant; attention is left out", minimum=1)
    num_tokens: int = flag(1_000_000_000_000, "tokens to train on", minimum=1)
    num_devices: int = flag(8, "devices in all", minimum=1)
    tflops: float | None = flag(None, "achieved TFLOP/s of a device, recomputation counted", minimum=1e-9)
    tokens_per_sec_per_device: float | None = flag(None, "measured tokens/s of a device", minimum=1e-9)
    batch_tokens: int = flag(4_194_304, "tokens a step", minimum=1)
    checkpoint_interval: int = flag(1000, "steps between saves", minimum=1)
    save_s: float = flag(10.0, "seconds the loop stands still for a save", minimum=0)
    eval_interval: int = flag(1000, "steps between validations", minimum=1)
    eval_s: float = flag(60.0, "seconds of a validation", minimum=0)
    restarts_a_week: float = flag(2.0, "launches that end early; each loses half a save interval", minimum=0)
    restart_s: float = flag(600.0, "seconds from such an end to the next step", minimum=0)

    def __post_init__(self) -> None:
        if (self.tflops is None) == (self.tokens_per_sec_per_device is None):
            given = "neither is" if self.tflops is None else "both are"
            raise ValueError(f"--tflops or --tokens_per_sec_per_device must be given, one of them; {given}")


@dataclass(frozen=True)
class Estimate:
    """Days of a training: computing, without and with recomputation, and what interruptions add."""

    steps: int
    plain_days: float
    recomputing_days: float
    save_days: float
    eval_days: float
    restart_days: float

    @property
    def worst_days(self) -> float:
        return self.recomputing_days + self.save_days + self.eval_days + self.restart_days


def estimate(config: EstimateConfig) -> Estimate:
    """The days of each part. A measured rate holds its recomputation: it gives both ends of the range."""
    steps = -(-config.num_tokens // config.batch_tokens)
    if config.tokens_per_sec_per_device is not None:
        rate, most = config.tokens_per_sec_per_device, 1.0
    else:
        assert config.tflops is not None
        rate, most = config.tflops * 1e12 / _flops_per_token(config), 4 / 3
    plain = config.num_tokens / (config.num_devices * rate) / _DAY_S
    longest = most * plain
    lost_s = config.restart_s + config.checkpoint_interval / 2 * longest * _DAY_S / steps
    return Estimate(
        steps=steps,
        plain_days=plain,
        recomputing_days=longest,
        save_days=steps // config.checkpoint_interval * config.save_s / _DAY_S,
        eval_days=steps // config.eval_interval * config.eval_s / _DAY_S,
        restart_days=config.restarts_a_week * longest / 7 * lost_s / _DAY_S,
    )


def _flops_per_token(config: EstimateConfig) -> int:
    from fms_fsdp.models.flops import flops_per_token
    from fms_fsdp.models.variants import resolve_model

    if config.parameters is not None:
        return 6 * config.parameters
    model = resolve_model(ModelConfig(model_variant=config.model_variant), seq_length=config.seq_length)
    return flops_per_token(model, config.seq_length)


def main(config: EstimateConfig) -> None:
    """The command `estimate`."""
    found = estimate(config)
    model = f"{config.parameters:,} parameters" if config.parameters is not None else config.model_variant
    if config.tflops is not None:
        rate = f"{config.tflops:g} TFLOP/s"
        compute = {"nothing recomputed": found.plain_days, "every block recomputed": found.recomputing_days}
    else:
        rate, compute = f"{config.tokens_per_sec_per_device:,g} tokens/s", {"as measured": found.plain_days}
    rows = {f"compute, {what}": days for what, days in compute.items()}
    rows |= {"saves": found.save_days, "validations": found.eval_days}
    rows[f"{config.restarts_a_week:g} restarts a week"] = found.restart_days
    training = f"{model}, {config.num_tokens:,} tokens, {config.num_devices} devices at {rate} each"
    print(f"{training}: {found.steps:,} steps")
    print(table(("", "days"), [(name, f"{days:.2f}") for name, days in rows.items()]))
    print(f"between {found.plain_days:.2f} days, if nothing ever stops it, and {found.worst_days:.2f} days")
