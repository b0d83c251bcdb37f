"""What `estimate --device=NAME` prints, against arithmetic done by hand, and what it rejects."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from fms_fsdp.__main__ import main
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.errors import UserError
from fms_fsdp.run.machine import ESTIMATE_MARGIN
from fms_fsdp.tools.estimate_command import estimate, search
from fms_fsdp.tools.tool_flags import EstimateConfig

N = 6_738_415_616  # parameters of 7b
H100 = "--device=h100_80gb"
QUICK = f"{H100} --model_variant=1.4b --num_tokens=1B --batch_tokens=1M"


def printed(flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["estimate", *flags.split()]) == 0
    return capsys.readouterr().out


def values(flags: str, capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(printed(f"{flags} --json", capsys))


def config(flags: str) -> EstimateConfig:
    return parse_flags(EstimateConfig, flags.split())


def test_every_value_of_a_plan_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{H100} --num_devices=64 --sharding_strategy=fsdp --num_steps=7000 --batch_size=2"
    plan = values(f"{flags} --save_s=100 --eval_s=50 --restarts_a_week=0", capsys)
    assert plan["parameters"] == N and plan["layout"]["dp_shard"] == 64
    assert (plan["batch_size"], plan["dp_size"], plan["grad_accum_steps"]) == (2, 64, 8)
    assert plan["tokens_per_step"] == 4_194_304 and plan["steps"] == 7000
    assert plan["memory"]["weights"] == plan["memory"]["gradients"] == 4 * N // 64
    assert sum(plan["memory"].values()) == plan["needed"] < plan["available"] == int(79.2 * 2**30)
    assert plan["fits"] is True
    sent = 63 / 64 * 8 * (2 * (N + 32 * 202_383_360) + 4 * N)
    assert plan["sent"] == {"dp_shard": pytest.approx(sent)}
    assert sum(plan["time"].values()) == pytest.approx(plan["step_s"])
    rate = plan["tokens_per_s_per_device"]
    assert rate == pytest.approx(4_194_304 / plan["step_s"] / 64)
    assert plan["mfu"] == pytest.approx(rate * (6 * N + 12 * 32 * 4096 * 4096) / 989e12)
    days = plan["days"]
    assert days["computing"] == pytest.approx(7000 * plan["step_s"] / 86400)
    assert days["saves"] == pytest.approx(700 / 86400)
    assert days["validations"] == pytest.approx(350 / 86400)
    assert days["total"] == pytest.approx(days["computing"] + 1050 / 86400)
    assert plan["kwh"] == pytest.approx(0.7 * 64 * 24 * days["total"])


def test_plan_is_printed_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(f"{QUICK} --num_devices=16", capsys)
    lines = text.splitlines()
    assert lines[0].startswith("1.4b: ") and lines[0].endswith(" parameters")
    assert lines[1].startswith("16 x h100_80gb in nodes of 8, fsdp: 1 replica x 16 shards; bf16")
    assert "this micro-batch is the largest that fits" in lines[2]
    assert re.search(r"^total, fits in 79.2 +\d", text, re.MULTILINE)
    assert "sent per rank and step: dp_shard " in text and "kWh" in lines[-1]
    big = printed(f"{H100} --model_variant=llama3_70b --num_devices=8", capsys)
    assert "does not fit in 79.2" in big and "largest that fits" not in big
    assert "sent per rank" not in printed(f"{QUICK} --num_devices=1", capsys)


def test_offloaded_time_is_said_to_be_too_short(capsys: pytest.CaptureFixture[str]) -> None:
    """It was printed as the time of a run without copies to the host."""
    for more in ("", " --json"):
        assert main(["estimate", *f"{QUICK} --num_devices=8 --cpu_offload=True{more}".split()]) == 0
        captured = capsys.readouterr()
        assert captured.err.startswith("note: the time with --cpu_offload is too short")
    assert "note" not in captured.out


def test_each_batch_of_a_ramp_has_its_own_time(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{H100} --model_variant=1.4b --num_devices=8 --global_batch_size=64 --batch_size=2"
    flags += " --num_steps=6 --restarts_a_week=0"
    whole, half = values(flags, capsys), values(flags.replace("=64", "=32"), capsys)
    ramped = values(f"{flags} --rampup_batch_size=32,32,128", capsys)  # 4 steps of 32, 2 of 64
    seconds = 4 * half["step_s"] + 2 * whole["step_s"]
    assert ramped["days"]["computing"] * 86400 == pytest.approx(seconds)
    assert "32 sequences for 4 steps" in printed(f"{flags} --rampup_batch_size=32,32,128", capsys)


@pytest.mark.parametrize(
    ("flags", "batch"),  # sequences, ranks, accumulation steps
    [
        ("--global_batch_size=64 --batch_size=2", (2, 8, 4)),
        ("--batch_size=2 --grad_accum_steps=3", (2, 8, 3)),
        ("--batch_size=3", (3, 8, 42)),  # 1,024 sequences, rounded down to a multiple of 24
        ("--grad_accum_steps=5", (25, 8, 5)),
        ("--tp_size=8 --batch_size=4", (4, 1, 256)),
        ("--sharding_strategy=fsdp --pp_size=2", (256, 4, 1)),  # a pipeline is filled once a step
    ],
)
def test_batch_is_that_of_the_flags(flags: str, batch: tuple[int, int, int]) -> None:
    plan = estimate(config(f"{H100} --model_variant=194m {flags}"))
    found = plan.run.batch
    assert (found.batch_size, found.dp_size, found.grad_accum_steps) == batch
    assert not plan.is_fitted


def test_largest_micro_batch_that_fits_is_chosen() -> None:
    flags = f"{H100} --model_variant=llama3_8b"
    plan = estimate(config(flags))
    rows = plan.run.batch.batch_size
    assert plan.is_fitted and plan.run.batch.global_batch_size == 1024
    more = estimate(config(f"{flags} --global_batch_size=1024 --batch_size={2 * rows}"))
    limit = (1 - ESTIMATE_MARGIN) * plan.device.memory_bytes
    assert plan.memory.total <= limit < more.memory.total
    auto = estimate(config(f"{H100} --model_variant=13b --recompute=auto --batch_size=4"))
    assert auto.fits and auto.run.config.parallel.recompute != "auto"


def check_search(seed: int) -> int:
    """Checks that the layouts of a random request fit, are sorted, and can be typed."""
    draw = random.Random(seed)
    flags = [
        f"--model_variant={draw.choice(('194m', '1.4b', '7b', 'llama3_8b'))}",
        f"--seq_length={draw.choice((512, 4096, 6000))}",
        f"--device={draw.choice(('a100_40gb', 'h100_80gb', 'l40s'))}",
        f"--num_devices={draw.choice((1, 2, 8, 24, 64))}",
        f"--batch_tokens={draw.choice((500_000, 4_194_304))}",
        *draw.choice(([], ["--tp_size=2"], ["--sharding_strategy=hsdp"], ["--recompute=ops"])),
    ]
    try:
        found = search(config(" ".join(flags)))
    except UserError:
        return 0
    rates = [plan.tokens_per_s for plan in found]
    assert rates == sorted(rates, reverse=True)
    for plan in found:
        names = {word.split("=")[0] for word in plan.flags.split()}
        kept = [word for word in flags if word.split("=")[0] not in names]
        typed = estimate(config(" ".join([*kept, plan.flags])))
        assert (
            typed.memory.total
            == plan.memory.total
            <= (1 - ESTIMATE_MARGIN) * plan.device.memory_bytes
        )
        assert typed.tokens_per_s == plan.tokens_per_s, plan.flags
    return len(found)


@pytest.mark.slow
def test_layouts_of_a_search_can_be_typed() -> None:
    assert sum(map(check_search, range(1, 5))) > 7


SMALL = "--num_layers=4 --hidden_size=512 --num_attention_heads=8 --vocab_size=1000"


def own_device(folder: Path, memory_gib: float) -> str:
    """Returns the flags of a device of this memory."""
    path = folder / f"own_{memory_gib}.toml"
    path.write_text(
        f"[mine]\nmemory_gib = {memory_gib}\ntflops = {{ bf16 = 100 }}\nmemory_gb_s = 1000\n"
        'node_gb_s = 32\nnet_gb_s = 12.5\nwatts = 300\nsource = "mine"\n'
    )
    return f"--device=mine --hardware={path}"


def check_printed_search(
    flags: str, no_layout: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks the table of a search, and the advice of one on half the devices that it needs."""
    kept = "--tp_size=2 --recompute=ops"
    first, head, *rows = printed(f"{flags} {kept} --search", capsys).splitlines()
    assert first.startswith(line)
    assert head.endswith("flags") and 1 <= len(rows) <= 5
    assert all("--tp_size=2" in row and "--recompute=ops" in row for row in rows)
    advice = printed(f"{no_layout} --search", capsys)
    half = int(re.findall(r"--num_devices=(\d+)", no_layout)[0])
    assert f"no layout fits 95% of the memory; try --num_devices={2 * half}" in advice


@pytest.mark.slow
def test_search_keeps_flags_and_prints_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"{SMALL} --seq_length=512 --batch_tokens=32768"
    flags = f"{own_device(tmp_path, 24)} {model} --num_devices=4"
    no_layout = f"{own_device(tmp_path, 0.05)} {model} --num_devices=2"
    line = "7b on 4 x mine, 64 sequences per step: the fastest"
    check_printed_search(flags, no_layout, line, capsys)


@pytest.mark.slow
def test_search_of_large_models_prints_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{H100} --model_variant=llama3_8b --num_devices=8"
    no_layout = f"{H100} --model_variant=llama3_70b --num_devices=4"
    line = "llama3_8b on 8 x h100_80gb, 1,024 sequences per step: the fastest"
    check_printed_search(flags, no_layout, line, capsys)


def test_own_device_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = values(f"{own_device(tmp_path, 24)} {SMALL} --num_devices=4", capsys)
    assert plan["parameters"] == 4 * (4 * 512**2 + 3 * 512 * 1408 + 2 * 512) + 2 * 1000 * 512 + 512
    assert plan["device"] == "mine" and plan["available"] == 24 * 2**30
