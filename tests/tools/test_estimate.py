"""The estimate against arithmetic done by hand."""

from __future__ import annotations

import pytest

from fms_fsdp.__main__ import main
from fms_fsdp.tools.estimate import EstimateConfig, estimate


def test_a_published_run_of_thirteen_billion_parameters() -> None:
    """300B tokens on 256 GPUs at 45 TFLOP/s, all recomputed: 8·N·T / rate = 31.35 days."""
    found = estimate(
        EstimateConfig(parameters=13_000_000_000, num_tokens=300_000_000_000, num_devices=256, tflops=45.0)
    )
    assert found.recomputing_days == pytest.approx(31.35, abs=0.005)
    assert found.plain_days == pytest.approx(6 * 13e9 * 300e9 / (256 * 45e12) / 86400)
    assert found.worst_days > found.recomputing_days


def test_what_interrupts_a_run_is_counted() -> None:
    found = estimate(
        EstimateConfig(
            num_tokens=864_000,
            num_devices=1,
            tokens_per_sec_per_device=1.0,  # ten days
            batch_tokens=864,
            checkpoint_interval=100,
            save_s=8640.0,
            eval_interval=500,
            eval_s=4320.0,
            restarts_a_week=0.7,
            restart_s=43200.0,
        )
    )
    assert (found.steps, found.plain_days, found.recomputing_days) == (
        1000,
        pytest.approx(10),
        pytest.approx(10),
    )
    assert found.save_days == pytest.approx(1.0) and found.eval_days == pytest.approx(0.1)
    assert found.restart_days == pytest.approx(
        0.5 + 0.5
    )  # one in ten days: half a day down, half an interval made again


def test_the_command_prints_a_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["estimate", "--model_variant=7b", "--num_tokens=1T", "--num_devices=64", "--tflops=400"]) == 0
    )
    assert "between 2" in capsys.readouterr().out


def test_a_rate_is_needed_and_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate"]) == 2
    assert "neither is" in capsys.readouterr().err
    assert main(["estimate", "--tflops=1", "--tokens_per_sec_per_device=1"]) == 2
    assert main(["estimate", "--tflops=1", "--model_variant=17b"]) == 2
    assert "17b" in capsys.readouterr().err
