"""What `estimate --device=NAME` prints, against arithmetic done by hand, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fms_fsdp.__main__ import main
from fms_fsdp.planner.bars import WIDTH

N = 6_738_415_616  # parameters of 7b
H100 = "--device=h100_80gb"
QUICK = f"{H100} --model_variant=1.4b --num_tokens=1B --batch_tokens=1M"


def said(flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["estimate", *flags.split()]) == 0
    return capsys.readouterr().out


def figures(flags: str, capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(said(f"{flags} --json", capsys))


def refusal(flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["estimate", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    return err


def test_every_figure_of_a_plan_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{H100} --num_devices=64 --sharding_strategy=fsdp --num_steps=7000 --batch_size=2"
    plan = figures(f"{flags} --save_s=100 --eval_s=50 --restarts_a_week=0", capsys)
    assert plan["parameters"] == N and plan["axes"]["dp_shard"] == 64 and plan["strategy"] == "fsdp"
    assert (plan["batch_size"], plan["dp_size"], plan["grad_accum_steps"]) == (2, 64, 8)
    assert plan["tokens_per_step"] == 4_194_304 and plan["tokens"] == 7000 * 4_194_304
    assert plan["memory"]["weights"] == plan["memory"]["gradients"] == 4 * N // 64
    assert sum(plan["memory"].values()) == plan["needed"] < plan["available"] == int(79.2 * 2**30)
    assert plan["fits"] is True
    sent = plan["sent"]["dp_shard"]
    assert sent["num_bytes"] == pytest.approx(63 / 64 * 8 * (2 * (N + 32 * 202_383_360) + 4 * N))
    assert sent["leaves_node"] is True
    assert sum(plan["time"].values()) == pytest.approx(plan["step_s"])
    assert plan["tokens_per_s"] == pytest.approx(4_194_304 / plan["step_s"])
    assert plan["tokens_per_s_per_device"] == pytest.approx(plan["tokens_per_s"] / 64)
    flops = 6 * N + 12 * 32 * 4096 * 4096
    assert plan["mfu"] == pytest.approx(plan["tokens_per_s_per_device"] * flops / 989e12)
    days = plan["days"]
    assert days["plain_days"] == pytest.approx(7000 * plan["step_s"] / 86400)
    assert (days["save_days"], days["eval_days"]) == (pytest.approx(700 / 86400), pytest.approx(350 / 86400))
    assert days["worst_days"] == pytest.approx(days["plain_days"] + 1050 / 86400)
    assert plan["kwh"] == pytest.approx(0.7 * 64 * 24 * days["worst_days"])


def test_a_plan_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(f"{QUICK} --num_devices=16", capsys)
    lines = text.splitlines()
    block = 2 * 2048 * (2048 + 512) + 3 * 2048 * 6144 + 2 * 2048
    params = 24 * block + 2 * 32000 * 2048 + 2048
    assert lines[0] == f"1.4b: {params:,} parameters"
    assert lines[1].startswith("16 x h100_80gb in 2 nodes of 8, fsdp: 1 replicas x 16 shards; bf16 compute")
    assert re.fullmatch(
        r"batch: \d+ rows x 16 ranks x \d+ micro-steps = 240 rows = 983,040 tokens a step; "
        r"\d+ rows are the most that fit",
        lines[2],
    )
    assert re.search(r"^in all, fits in 79.2 +\d", text, re.MULTILINE)
    assert re.search(r"^dp_shard +\S+ +between nodes +\d", text, re.MULTILINE)
    assert re.search(r"^in all +\S+ +100.0%$", text, re.MULTILINE)
    assert "tokens/s a device" in text and "\nlimit: " in text and "faster with --" in text
    assert lines[-1].startswith("1,018 steps, 1,000,734,720 tokens: ") and "kWh" in lines[-1]
    assert "in the node" in said(f"{QUICK} --num_devices=8", capsys)
    alone = said(f"{QUICK} --num_devices=1", capsys)
    assert "messages of a step" not in alone and "1 x h100_80gb in one node, none" in alone


def test_a_plan_that_does_not_fit_says_what_makes_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    big = f"{H100} --model_variant=llama3_70b --num_devices=64"
    text = said(f"{big} --batch_size=4", capsys)
    assert "does not fit in 79.2" in text and "limit: memory: a rank needs about" in text
    assert re.search(r"^fits with --\S+", text, re.MULTILINE)
    text = said(f"{H100} --model_variant=llama3_70b --num_devices=8", capsys)
    assert "no single change makes it fit; --search=True looks for several" in text
    assert "the most that fit" not in text


def test_each_batch_of_a_ramp_has_its_own_time(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{H100} --model_variant=1.4b --num_devices=8 --global_batch_size=64 --batch_size=2"
    flags += " --num_steps=6 --restarts_a_week=0"
    whole = figures(flags, capsys)
    half = figures(flags.replace("=64", "=32"), capsys)
    ramped = figures(f"{flags} --rampup_batch_size=32,32,128", capsys)  # 4 steps of 32 rows, 2 of 64
    assert ramped["tokens"] == (4 * 32 + 2 * 64) * 4096
    seconds = 4 * half["step_s"] + 2 * whole["step_s"]
    assert ramped["days"]["plain_days"] * 86400 == pytest.approx(seconds)
    assert "32 rows for 4 steps" in said(f"{flags} --rampup_batch_size=32,32,128", capsys)


def test_several_numbers_of_devices_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    head, *rows, refused = said(f"{QUICK} --num_devices=8,16,12", capsys).splitlines()
    assert head.split()[:2] == ["devices", "layout"] and head.endswith("kWh")
    assert [row.split()[0] for row in rows] == ["8", "16"] and "fsdp: dp_shard 16" in rows[1]
    assert (
        refused
        == "12 devices: --num_devices (12) must be whole nodes of --devices_per_node (8); choose 8 or 16"
    )
    plans = figures(f"{QUICK} --num_devices=8,12 --devices_per_node=4", capsys)
    assert [plan["num_devices"] for plan in plans] == [8, 12]
    assert "refused" in figures(f"{QUICK} --num_devices=8,12", capsys)[1]
    assert "must be whole nodes" in refusal(f"{QUICK} --num_devices=12,20", capsys)


def test_a_search_prints_flags_to_copy(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{H100} --model_variant=llama3_8b --num_devices=16"
    first, head, *rows = said(f"{flags} --search", capsys).splitlines()
    assert first == "llama3_8b on 16 x h100_80gb, 1,024 rows a step: the fastest layouts that fit"
    assert head.split()[-1] == "flags" and len(rows) == 5
    rate, proposal = re.split(" +", rows[0], maxsplit=5)[2], rows[0][head.index("flags") :]
    again = said(f"{flags} {proposal}", capsys)
    assert f"{rate} tokens/s a device" in again
    found = figures(f"{flags} --search", capsys)
    assert [plan["flags"] for plan in found["plans"]] == [row[head.index("flags") :] for row in rows]


def test_a_search_that_finds_nothing_says_how_many_devices_would_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = f"{H100} --model_variant=llama3.1_405b --num_devices=8 --search"
    text = said(flags, capsys)
    assert text.startswith(
        "llama3.1_405b on 8 x h100_80gb, 1,024 rows a step: no layout fits 95% of 79.2 GiB; "
    )
    assert re.search(r"; \d+ devices would do\n$", text)
    assert figures(flags, capsys)["plans"] == []
    assert "--tp_size (3)" in refusal(f"{QUICK} --num_devices=8 --tp_size=3 --search", capsys)


def test_bars_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(f"{QUICK} --num_devices=8,16 --plot", capsys)
    memory, time = text.split("memory of a rank: a character is ")[1].split("time of a step: ")
    bars = [
        line.strip().split(" ", 1)[1] for line in memory.splitlines() if "|" in line[3:] and "█ " not in line
    ]
    bars = [bar for bar in bars if bar.endswith("|")]
    assert len(bars) == 2 and all(bar.index("|") == WIDTH for bar in bars)
    assert "GiB" in memory and "█ weights" in memory and "█ products" in time
    plan = figures(f"{QUICK} --num_devices=16", capsys)
    filled = len(bars[1].rstrip("|").rstrip())
    assert filled == round(plan["needed"] / plan["available"] * WIDTH)


def test_bars_on_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    out = said(f"{QUICK} --num_devices=8,16 --plot --output={page}", capsys)
    content = page.read_text()
    assert out.endswith(f"{page}\n") and "█" not in out
    assert content.count('<svg class="chart"') == 2 and content.count('class="restart"') == 1
    assert "<title>weights " in content and "1.4b on h100_80gb" in content and "$" not in content[:200]
    one = said(f"{QUICK} --num_devices=8 --plot --output={page}", capsys)
    assert one.endswith(f"{page}\n") and re.search(r"weights [\d.]+</li>", page.read_text())


def test_shapes_and_devices_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = tmp_path / "own.toml"
    kinds.write_text(
        "[mine]\nmemory_gib = 24\ntflops = { bf16 = 100 }\nmemory_gb_s = 1000\nnode_gb_s = 32\n"
        'net_gb_s = 12.5\nwatts = 300\nsource = "mine"\n'
    )
    shape = "--num_layers=4 --hidden_size=512 --num_attention_heads=8 --vocab_size=1000 --num_tokens=1B"
    plan = figures(f"--device=mine --hardware={kinds} {shape} --num_devices=4", capsys)
    ffn = 1408  # 11008 / 4096 of the width, in steps of 128
    block = 4 * 512**2 + 3 * 512 * ffn + 2 * 512
    assert plan["parameters"] == 4 * block + 2 * 1000 * 512 + 512
    assert plan["device"] == "mine" and plan["available"] == 24 * 2**30
    assert f"7b ({plan['parameters']:,} parameters), 1,000,000,000 tokens" in said(
        f"--tflops=1 {shape}", capsys
    )
    config = tmp_path / "config.json"
    fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512}
    fields |= {"intermediate_size": ffn, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000}
    config.write_text(json.dumps(fields))
    theirs = figures(f"{H100} --hf_config={config} --num_devices=4", capsys)
    assert theirs["parameters"] == plan["parameters"]


def test_the_length_is_that_of_a_training(capsys: pytest.CaptureFixture[str]) -> None:
    rate = "--tokens_per_sec_per_device=1000 --model_variant=1.4b --global_batch_size=256"
    assert "1,048,576,000 tokens, 8 devices" in said(f"{rate} --num_steps=1000", capsys)
    assert ": 1,000 steps" in said(f"{rate} --num_samples=256000", capsys)
    assert ": 477 steps" in said(f"{rate} --num_tokens=500M", capsys)
    assert "1,000,000,000,000 tokens" in said(rate, capsys)
    none = figures(f"{QUICK} --eval_interval=0 --checkpoint_interval=0", capsys)
    assert none["days"]["eval_days"] == none["days"]["save_days"] == 0
    scheduled = figures(f"{QUICK} --checkpoint_schedule=10@100,100 --save_s=86400 --num_devices=8", capsys)
    steps = scheduled["steps"]
    assert scheduled["days"]["save_days"] == 10 + (steps - 100) // 100


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--device=h10", "--device (h10) must be one of cpu, a100_40gb"),
        (f"{H100} --precision=float8 --device=a100_80gb", "is also given as"),
        ("--device=a100_80gb --precision=float8", "--device (a100_80gb) must have products in float8"),
        (f"{H100} --hardware=none.toml", "--hardware (none.toml) cannot be read"),
        (f"{H100} --tflops=3", "given: --tflops --device"),
        (
            f"{H100} --parameters=7B",
            "--parameters (7000000000) has no shape to predict; give --model_variant",
        ),
        (f"{H100} --search --num_devices=8,16", "--num_devices (8,16) must be one number for --search"),
        (f"{H100} --num_devices=", "--num_devices () must be a number of devices"),
        (f"{H100} --num_devices=0", "--num_devices (0) must be at least 1"),
        ("--tflops=3 --search", "--search (True) needs a prediction; add --device=NAME"),
        ("--tflops=3 --json", "--json (True) needs a prediction; add --device=NAME"),
        ("--device=cpu --plot", "--plot (True) needs a prediction; add --device=NAME"),
        ("--tflops=3 --hardware=x.toml", "--hardware (x.toml) needs a prediction"),
        ("--tflops=3 --num_devices=8,16", "--num_devices (8,16) must be one number without a prediction"),
        (f"{H100} --plot --json", "--plot (True) must not be given beside --json"),
        (f"{H100} --plot --plot_schedule", "--plot (True) must not be given beside --plot_schedule"),
        (f"{H100} --json --plot_schedule", "--json (True) must not be given beside --plot_schedule"),
        (f"{H100} --num_epochs=2", "--num_epochs (2) needs the data; give --num_tokens"),
        (f"{H100} --num_steps=2 --num_tokens=3", "must not be given beside --num"),
        (f"{H100} --async_tp", "--async_tp (True) needs --tp_size"),
        (f"{H100} --num_devices=8 --tp_size=3", "must be a multiple of --tp_size (3)"),
        (f"{H100} --num_attention_heads=7", "--num_attention_heads (7) must divide hidden_size"),
        (f"{H100} --global_batch_size=9", "--global_batch_size (9) must be a multiple of"),
        (f"{H100} --rampup_batch_size=3,4,60", "--rampup_batch_size (3,4,60) must lead from 3 rows"),
    ],
)
def test_what_cannot_be_estimated_is_refused_in_one_line(
    flags: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line in refusal(flags, capsys)
