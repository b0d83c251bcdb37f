"""The estimate against arithmetic done by hand."""

from __future__ import annotations

from typing import Any

import pytest

from fms_fsdp.__main__ import main
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.config.values import rounded_bytes
from fms_fsdp.tools.estimate_command import days_by_rate
from fms_fsdp.tools.tool_flags import EstimateConfig


def given(**flags: Any) -> EstimateConfig:
    """The configuration of these flags."""
    return parse_flags(EstimateConfig, [f"--{name}={value}" for name, value in flags.items()])


def test_days_equal_those_of_a_published_run() -> None:
    """300B tokens on 256 GPUs at 45 TFLOP/s, all recomputed: 8·N·T / rate = 31.35 days."""
    run = {"parameters": 13_000_000_000, "num_tokens": 300_000_000_000, "num_devices": 256}
    found = days_by_rate(given(**run, tflops=45.0))
    assert found.computing == pytest.approx(31.35, abs=0.005)
    assert found.shortest == pytest.approx(6 * 13e9 * 300e9 / (256 * 45e12) / 86400)
    assert found.total > found.computing


def test_saves_validations_and_restarts_are_counted() -> None:
    rate = {"num_devices": 1, "tokens_per_sec_per_device": 1.0}
    saves = {"checkpoint_interval": 100, "save_s": 8640.0, "eval_interval": 500, "eval_s": 4320.0}
    restarts = {"restarts_a_week": 0.7, "restart_s": 43200.0}
    config = given(num_tokens=864_000, batch_tokens=864, **rate, **saves, **restarts)
    found = days_by_rate(config)
    assert config.num_steps == 1000
    assert (found.shortest, found.computing) == (pytest.approx(10), pytest.approx(10))
    assert found.saves == pytest.approx(1.0) and found.validations == pytest.approx(0.1)
    uneven = given(
        num_tokens=865_000, batch_tokens=864, **rate, **saves | {"checkpoint_interval": 0}
    )
    found_uneven = days_by_rate(uneven)  # the last of 1,002 steps is saved and validated too
    assert found_uneven.saves == pytest.approx(0.1)
    assert found_uneven.validations == pytest.approx(0.15)
    # one in ten days: half a day down, half an interval computed again
    assert found.restarts == pytest.approx(0.5 + 0.5)


def test_ramp_leaves_devices_idle(capsys: pytest.CaptureFixture[str]) -> None:
    """4 sequences of 10 tokens for 5 steps, 8 for 3 steps, then 16, on 8 devices at 1 token/s each."""
    flags = {"seq_length": 10, "batch_tokens": 160, "num_devices": 8, "num_tokens": 600}
    ramped = given(**flags, tokens_per_sec_per_device=1.0, rampup_batch_size="4,4,60")
    plain = given(**flags, tokens_per_sec_per_device=1.0)
    assert (ramped.num_steps, plain.num_steps) == (5 + 3 + 2, 4)
    lost = days_by_rate(ramped).shortest - days_by_rate(plain).shortest
    assert lost * 86400 == pytest.approx(5 * 4 * 10 / 8), "half of the devices wait for five steps"
    argv = "estimate --num_tokens=300B --seq_length=2048 --batch_tokens=2097152 --tflops=60"
    assert main([*argv.split(), "--rampup_batch_size=16,16,5_000_000"]) == 0
    printed = capsys.readouterr().out
    assert "161,624 steps" in printed
    assert "1,008 sequences for 79 steps, to step 23,456 and 5,000,528 sequences" in printed
    with pytest.raises(ValueError, match="--rampup_batch_size=3,4,60 must reach"):
        given(**flags, tflops=1.0, rampup_batch_size="3,4,60")


N = 6_738_415_616  # parameters of 7b
HSDP = "--num_devices=64 --grad_accum_steps=4"


@pytest.mark.parametrize(
    ("flags", "held", "sent"),  # weights, gathered, gradients, optimizer; by axis
    [
        (
            HSDP,
            (4 * N / 8, 4 * 202_383_360, 4 * N / 8, N),
            {
                "dp_shard": 7 / 8 * 4 * (2 * (N + 32 * 202_383_360) + 4 * N),
                "dp_replicate": 7 / 8 * N,
            },
        ),
        ("--num_devices=1 --mixed_precision=False", (4 * N, 0, 4 * N, 8 * N), {}),
    ],
)
def test_memory_and_traffic_per_rank(
    flags: str, held: tuple[float, ...], sent: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "--tflops=400", *flags.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ("weights", "gathered", "gradients", "optimizer")
    parts = zip(names, held, strict=True)
    own = ", ".join(f"{name} {rounded_bytes(size)}" for name, size in parts if size)
    assert (
        lines[1].startswith("memory estimate: ") and f" per rank ({own}, activations " in lines[1]
    )
    over = ", ".join(f"{axis} {rounded_bytes(size)}" for axis, size in sent.items())
    assert (lines[2] == f"sent per rank and step: {over}") is bool(sent)
