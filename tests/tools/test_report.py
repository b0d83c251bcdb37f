"""The report page: what it makes of metrics.jsonl, and that a browser draws it without a network."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from matplotlib.image import imread

from fms_fsdp.__main__ import main
from fms_fsdp.config import BatchPlan, TrainConfig
from fms_fsdp.config.values import short
from fms_fsdp.models.flops import num_params
from fms_fsdp.optim.optimizers import state_bytes
from fms_fsdp.predict.memory import Step, estimate_memory
from fms_fsdp.tools.report import page as page_module
from fms_fsdp.tools.report.facts import cards
from fms_fsdp.tools.report.history import differences, read_run
from fms_fsdp.tools.report.page import read_runs, render_page, write_page
from fms_fsdp.tools.report.panels import build_panels
from fms_fsdp.tools.report.svg import Axis
from tests.specs import resolved

BROWSER = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    "",
)
needs_browser = pytest.mark.skipif(not BROWSER, reason="no chromium or google-chrome on PATH")
CHARTS = (
    "loss_by_step loss_by_tokens lr grad_norm throughput utilization memory time mixture".split()
)
TEMPLATE = Path(page_module.__file__).with_name("page.html").read_text()


def report(attempt: int, step: int, loss: float | None) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "step": step,
        "tokens_seen": 100 * step,
        "time": 1000.0 * attempt + step,
        "loss": loss,
        "loss_mean": loss,
        "lr": 0.1 / step,
        "grad_norm": 1.0,
        "grad_norm_max": 2.0,
        "tokens_per_sec_per_device": 50.0,
        "mfu": 0.5,
        "mfu_matmul": 0.4,
        "hfu": 0.6,
        "step_time_ms": 10.0,
        "data_wait_ms": 1.0,
        "forward_backward_ms": 6.0,
        "optimizer_ms": 2.0,
        "checkpoint_ms": 3.0,
        "logging_ms": 0.1,
        "peak_mem_gib": 2.0,
        "mem_gib": 1.0,
        "tokens/web": 75 * step,
        "tokens/code": 25 * step,
    }


def validation(attempt: int, step: int, loss: float) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "step": step,
        "tokens_seen": 100 * step,
        "eval/web/loss": loss,
        "eval/web/ppl": 9.0,
    }


def make_run(
    folder: Path, lines: list[dict[str, Any]], learning_rates: tuple[float, ...] = (0.1,)
) -> Path:
    """A run folder with those lines, and a configuration of each launch."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    resolved = {
        "world_size": 2,
        "device": "cpu",
        "num_steps": 60,
        "model": {"num_params": 1234567},
        "versions": {"torch": "2.13.0", "commit": "abc"},
    }
    for number, rate in enumerate(learning_rates, 1):
        content = json.dumps(
            {"optim": {"learning_rate": rate, "grad_clip": 1.0}, "resolved": resolved}
        )
        for name in (f"config.{number}.json", "config.json"):
            (folder / name).write_text(content)
    (folder / "status.json").write_text(
        '{"status": "finished", "step": 60, "reason": "finished <60> steps"}'
    )
    return folder


@pytest.fixture
def restarted(tmp_path: Path) -> Path:
    """Launch 1 reports every tenth step up to 50, launch 2 goes back to 25 and changes the learning rate."""
    first = [report(1, step, 5 - step / 100) for step in range(10, 51, 10)]
    second = [report(2, step, 4 - step / 100) for step in range(26, 61)]
    start = {
        "event": "start",
        "attempt": 2,
        "step": 26,
        "time": 2026.0,
        "launch_s": 3.5,
        "load_s": 1.5,
    }
    lines = [
        *first,
        validation(1, 20, 4.9),
        validation(1, 40, 4.7),
        *second,
        start,
        validation(2, 60, 3.5),
    ]
    return make_run(tmp_path / "restarted", lines, (0.1, 0.2))


def test_steps_behind_a_restart_are_told_by_the_later_launch_alone(restarted: Path) -> None:
    run = read_run(restarted)
    assert list(run.reports) == [10, 20, *range(26, 61)] and list(run.validations) == [20, 60]
    assert run.reports[30]["attempt"] == 2 and run.restarts == [25]
    assert run.series("lr", "tokens_seen")[0][:3].tolist() == [1000, 2000, 2600]
    assert run.seconds == (1050 - 1010) + (2060 - 2026) + 3.5 + 1.5


def test_a_report_and_a_validation_of_one_step_stand_side_by_side(tmp_path: Path) -> None:
    lines = [report(1, 10, 3.0), validation(1, 10, 3.1), report(1, 20, 2.0), validation(1, 20, 2.1)]
    run = read_run(make_run(tmp_path / "run", lines))
    assert list(run.reports) == [10, 20] == list(run.validations)


def test_a_loss_that_is_not_finite_leaves_a_gap(tmp_path: Path) -> None:
    lines = [report(1, step, None if step in (3, 4) else 3.0 + step / 10) for step in range(1, 7)]
    run = read_run(make_run(tmp_path / "run", lines))
    assert np.isnan(run.series("loss")[1]).tolist() == [False, False, True, True, False, False]
    assert run.numbers("loss") == pytest.approx([3.1, 3.2, 3.5, 3.6])
    assert main(["report", str(tmp_path / "run")]) == 0
    path, values = drawn(tmp_path / "run" / "report.html", "loss_by_step", "loss = loss_mean")
    assert (
        path.count("M") == 2 and path.count("L") == 2 and values == {1: 3.1, 2: 3.2, 5: 3.5, 6: 3.6}
    )


def drawn(page: Path, chart: str, label: str) -> tuple[str, dict[float, float]]:
    """The path of a curve, and its values by place."""
    svg = page.read_text().split(f'<svg class="chart" id="{chart}"')[1].split("</svg>")[0]
    found = re.search(rf'data-label="{re.escape(label)}" data-values="([^"]*)" d="([^"]*)"', svg)
    assert found is not None, svg[:2000]
    numbers = list(map(float, found[1].split()))
    return found[2], dict(zip(numbers[::2], numbers[1::2], strict=True))


def test_a_line_still_being_written_is_left_out_and_a_broken_one_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [report(1, 1, 3.0)])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    assert list(read_run(folder).reports) == [1]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("\n")
    with pytest.raises(
        ValueError, match=r"metrics.jsonl:2 must be a record with a step, .*; remove the line"
    ):
        read_run(folder)


@pytest.mark.parametrize(
    "line",
    ['{"step": 2, "loss": 1.0}', '{"step": 1e999, "loss": 1}', "[2]", "null", '{"step": "x"}'],
)
def test_a_record_without_its_fields_is_named(tmp_path: Path, line: str) -> None:
    folder = make_run(tmp_path / "run", [report(1, 1, 3.0)])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 must be a record with a step"):
        read_run(folder)


def test_a_page_is_made_of_any_name_and_of_sparse_records(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sparse: list[dict[str, Any]] = [
        {"step": 1, "loss": 1.0, "tokens_seen": 5},
        {
            "step": 2,
            "loss": "x",
            "tokens_seen": 9,
            "forward_backward_ms": 1.0,
            "mfu": [1],
            r"tokens/$\frac{$": 3,
            "time": "x",
        },
        {"step": 3, r"eval/$\frac{$/loss": 2.0},
    ]
    folder = make_run(tmp_path / r"$\frac{$", sparse)
    (folder / "status.json").write_text('{"status": "running", "step": null}')
    (folder / "config.old.json").write_text("{}")
    (folder / "config.json").write_text("[1]")
    assert main(["report", str(folder)]) == 0, capfd.readouterr().err
    assert r"$\frac{$" in (folder / "report.html").read_text()


def test_a_page_of_very_many_reports_stays_small_and_keeps_the_extremes(tmp_path: Path) -> None:
    steps = range(1, 60_001)
    lines = [
        {
            "step": step,
            "tokens_seen": 8 * step,
            "loss": 3 + math.sin(step),
            "loss_mean": 3 - step / 1e5,
        }
        for step in steps
    ]
    lines[1234]["loss"], lines[45_678]["loss"], lines[45_700]["loss"] = 9.5, 0.25, None
    assert main(["report", str(make_run(tmp_path / "run", lines))]) == 0
    page = tmp_path / "run" / "report.html"
    path, values = drawn(page, "loss_by_step", "loss")
    assert values[1235] == 9.5 == max(values.values()) and values[45_679] == 0.25 == min(
        values.values()
    )
    assert path.count("M") == 2 and len(values) < 2100 and page.stat().st_size < 1_000_000
    _, means = drawn(page, "loss_by_step", "loss_mean")
    edge = sorted(means)[1]
    first = np.array([line["loss_mean"] for line in lines[int(min(means)) : int(edge)]])
    assert means[edge] == pytest.approx(first.mean(), rel=1e-4) and len(means) <= 400


def test_the_shares_of_the_sources_add_up_to_one(restarted: Path) -> None:
    mixture = {panel.name: panel for panel in build_panels([read_run(restarted)])}["mixture"]
    assert [series.label for series in mixture.series] == ["web", "code"]
    shares = np.array([series.y for series in mixture.series])
    assert shares[:, -1] == pytest.approx([0.75, 0.25]) and shares.sum(axis=0) == pytest.approx(1)


@pytest.mark.parametrize(
    "value, words",
    [
        (0, "0"),
        (0.0005, "5e-4"),
        (-0.25, "-0.25"),
        (0.3 - 1e-17, "0.3"),
        (12_500, "12.5k"),
        (7e12, "7T"),
    ],
)
def test_numbers_on_axes_are_short(value: float, words: str) -> None:
    assert short(value) == words


@pytest.mark.parametrize(
    "low, high, is_log, ticks",
    [
        (0, 10, False, "0 2 4 6 8 10"),
        (3.2, 7.3, False, "4 5 6 7"),
        (-1e-4, 3e-4, False, "-1e-4 0 1e-4 2e-4 3e-4"),
        (900, 1e6, True, "1k 3k 10k 30k 100k 300k 1M"),
        (3, 7, True, "3 4 5 6 7"),
        (1e-9, 1e9, True, "1e-9 1e-6 0.001 1 1k 1M 1B"),
    ],
)
def test_an_axis_has_a_few_round_ticks(low: float, high: float, is_log: bool, ticks: str) -> None:
    found = Axis(low, high, 0, 100, is_log).ticks()
    assert " ".join(words for _, words in found) == ticks
    assert all(-1e-6 <= place <= 100 + 1e-6 for place, _ in found)


def test_the_times_of_a_step_are_layers_and_those_without_time_are_left_out(tmp_path: Path) -> None:
    passes = {"forward_ms": 2.0, "backward_ms": 4.0, "clip_ms": 0.5}
    for name, more in {"apart": passes, "pipeline": {}}.items():
        folder = make_run(tmp_path / name, [report(1, step, 3.0) | more for step in (1, 2)], (0.3,))
        assert main(["report", str(folder)]) == 0
        page = (folder / "report.html").read_text()
        assert [f">{key}" in page for key in (*passes, "forward_backward_ms", "optimizer_ms")] == [
            *([bool(more)] * 3),
            not more,
            True,
        ]


def test_a_curve_that_hides_another_is_named_beside_it(restarted: Path) -> None:
    lines = [{**report(1, step, 3.0), "hfu": 0.5} for step in (1, 2)]
    run = read_run(make_run(restarted.parent / "same", lines))
    utilization = {panel.name: panel for panel in build_panels([run])}["utilization"]
    assert [series.label for series in utilization.series] == ["mfu = hfu", "mfu_matmul"]


def test_differences_are_the_flags_that_are_not_the_same_in_all() -> None:
    configs = {
        "a": {
            "optim": {"learning_rate": 0.1, "grad_clip": 1.0},
            "log": {"output_dir": "x"},
            "resolved": {"n": 1},
        },
        "b": {
            "optim": {"learning_rate": 0.2, "grad_clip": 1.0},
            "log": {"output_dir": "y"},
            "data": {"new": True},
        },
    }
    assert differences(configs) == [("learning_rate", "0.1", "0.2"), ("new", "–", "true")]


def test_the_page_of_one_run_has_its_charts_tables_and_nothing_from_elsewhere(
    restarted: Path,
) -> None:
    (restarted / "samples.txt").write_text("Once <upon> a time")
    assert main(["report", str(restarted)]) == 0
    page = (restarted / "report.html").read_text()
    assert re.findall(r'<svg class="chart" id="([^"]+)"', page) == CHARTS
    cards = dict(re.findall(r'<div class="card">([^<]*)<b>([^<]*)</b>', page))
    assert cards == {
        "validation loss": "3.5000",
        "mean loss": "3.4000",
        "tokens": "6k",
        "tokens/s": "100",
        "MFU": "50.0%",
        "memory": "2 GiB",
        "time": "0:01:19",
    }
    for text in (
        "finished &lt;60&gt; steps",
        "num_params 1234567",
        "2 x CPU",
        "torch 2.13.0",
        "<tr><th>flag</th><th>config.1.json</th><th>config.2.json</th></tr>",
        "<tr><td>learning_rate</td><td>0.1</td><td>0.2</td></tr>",
        "<pre>Once &lt;upon&gt; a time</pre>",
        "<span>--learning_rate=0.2</span>",
        "<td>launch_s 3.5, load_s 1.5</td>",
        "<tr><td>web</td><td>–</td><td>4.5k</td><td>–</td><td>3.5</td><td>9</td><td>–</td></tr>",
    ):
        assert text in page, text
    assert "<60>" not in page and ">restart</li>" in page
    began = [
        row
        for row in re.findall(r"<tr><td>(.*?)</td></tr>", page)
        if "0:00:3" in row or "0:00:4" in row
    ]
    assert [row.split("</td><td>")[0] for row in began] == ["1", "2"] and "1970-01-01" in began[1]
    assert began[1].endswith("<td>26</td><td>60")
    links = set(re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?((?!#)[^"\')\s>]+)', page))
    assert not [link for link in links if not link.startswith(("#", "data:"))], links


def test_names_of_runs_and_sources_may_hold_any_sign(tmp_path: Path) -> None:
    name = "<b>&\"x'$title $content"
    line = {**report(1, 1, 3.0), f"tokens/{name}": 3}
    folder = make_run(
        tmp_path / name.replace("/", ""), [line, {"step": 1, f"eval/{name}/loss": 3.0}]
    )
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "<b>&" not in page and page.count("&lt;b&gt;&amp;&quot;x&#x27;$title $content") > 5


def test_name_outside_utf8_is_drawn(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = make_run(tmp_path / "run", [{**report(1, 1, 3.0), "tokens/\udce9": 3}])
    odd = folder.rename(tmp_path / os.fsdecode(b"caf\xe9"))
    write_page(odd / "report.html", render_page(read_runs([str(odd)])))
    assert "caf\\udce9" in (odd / "report.html").read_text(encoding="utf-8")


def test_older_page_outlives_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "report.html"
    page.write_text("older")
    with pytest.raises(UnicodeEncodeError):
        write_page(page, "\ud800")
    assert page.read_text() == "older"

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_page(page, "newer")
    assert page.read_text() == "older" and [path.name for path in tmp_path.iterdir()] == [page.name]


def test_several_runs_open_with_what_differs_and_share_their_charts(
    tmp_path: Path, restarted: Path
) -> None:
    other = make_run(tmp_path / "other", [report(1, step, 3.0) for step in (1, 2)], (0.3,))
    output = tmp_path / "new" / "page.html"
    assert main(["report", str(restarted), str(other), f"--output={output}"]) == 0
    page = output.read_text()
    places = [
        page.index(text)
        for text in (
            "<h2>Flags that differ</h2>",
            "<tr><td>learning_rate</td><td>0.2</td><td>0.3</td></tr>",
            "<h2>Results</h2>",
            "<tr><td>restarted</td><td>3.5000</td><td>3.4000</td>",
            "<tr><td>other</td><td>–</td><td>3.0000</td>",
            '<svg class="chart" id="loss_by_step"',
            'id="time_restarted"',
            'id="mixture_other"',
            "<h1>other</h1>",
        )
    ]
    assert places == sorted(places)
    labels = re.findall(
        r'<path class="line c(\d)"[^>]* data-label="([^"]+)"', page.split('id="lr"')[0]
    )
    assert labels[:3] == [
        ("0", "restarted loss_mean"),
        ("0", "restarted eval/web"),
        ("1", "other loss_mean"),
    ]


def test_text_has_contrast_in_both_schemes() -> None:
    light, dark = (
        dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", block))
        for block in re.findall(r":root \{(.*?)\}", TEMPLATE, re.S)
    )
    assert (
        set(light)
        == set(dark)
        == {"paper", "card", "ink", "muted", "line", *(f"s{i}" for i in range(8))}
    )
    for scheme in (light, dark):
        for ground in (scheme["paper"], scheme["card"]):
            assert min(contrast(scheme["ink"], ground), contrast(scheme["muted"], ground)) >= 4.5
            assert min(contrast(scheme[f"s{i}"], ground) for i in range(8)) >= 3
    colors = set(re.findall(r"[{;\s]color: ([^;]+);", TEMPLATE))
    assert all(re.fullmatch(r"var\(--(ink|muted|s\d)\)", color) for color in colors), colors


def contrast(first: str, second: str) -> float:
    """The ratio of the WCAG, from 1 to 21."""
    lights = []
    for color in (first, second):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        lights.append(0.05 + float(np.dot(linear, (0.2126, 0.7152, 0.0722))))
    return max(lights) / min(lights)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda folder: [], r"runs () must name at least one run folder"),
        (lambda folder: [str(folder / "none")], "must be a run folder, and has no metrics.jsonl"),
        (
            lambda folder: [str(make_run(folder / "new", []))],
            "metrics.jsonl holds no report yet; wait for its first",
        ),
        (lambda folder: ["--port=70000", "x"], "--port=70000 must be at most 65,535"),
        (lambda folder: ["x", "--serve", "--output=y"], "--serve (True) writes no file; leave"),
    ],
)
def test_what_cannot_be_drawn_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, message: str
) -> None:
    assert main(["report", *make(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_page_needs_no_matplotlib(
    restarted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["report", str(restarted)]) == 0
    assert capsys.readouterr() == (f"{restarted / 'report.html'}\n", "")


def test_what_is_no_run_beside_runs_is_left_out_with_a_note(
    tmp_path: Path, restarted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    (tmp_path / "no_run").mkdir()
    assert main(["report", str(tmp_path / "no_run"), str(restarted), f"--output={page}"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == str(page) and restarted.name in page.read_text()
    assert err.startswith(f"note: left out: run ({tmp_path / 'no_run'}) must be a run folder")


def test_a_served_page_follows_the_run_until_ctrl_c(restarted: Path) -> None:
    command = [sys.executable, "-m", "fms_fsdp", "report", str(restarted), "--serve", "--port=0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            address = server.stdout.readline().split()[0]
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
            before = urlopen(address, timeout=30).read().decode()
            assert "step 60 of 60" in before and '<body data-refresh="5">' in before
            assert urlopen(address, timeout=30).read().decode() == before
            with open(restarted / "metrics.jsonl", "a") as file:
                file.write(json.dumps(report(2, 61, 2.5)) + "\n")
            assert "step 61 of 60" in urlopen(address, timeout=30).read().decode()
            taken = [*command[:-1], f"--port={address.rstrip('/').rpartition(':')[2]}"]
            second = subprocess.run(taken, capture_output=True, text=True, timeout=60)
            assert second.returncode == 2 and "must be free on --host (127.0.0.1)" in second.stderr
            server.send_signal(signal.SIGINT)
            out, err = server.communicate(timeout=30)
        finally:
            server.kill()
    assert (server.returncode, err) == (
        0,
        "",
    ) and out == "report: the server has ended; the run goes on\n"
    assert not (restarted / "report.html").exists()


@pytest.mark.slow
def test_the_page_of_a_long_run_takes_a_few_seconds(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [report(1, step, 3.0) for step in range(1, 20_001)])
    begin = time.process_time()
    assert main(["report", str(folder)]) == 0
    assert time.process_time() - begin < 5


def browse(page: Path, width: int, scheme: str, script: str, *more: str) -> str:
    """Shows the page in a window of that width; returns what the script gives, if the DOM is asked for."""
    shown, frame = page.with_name("shown.html"), page.with_name("frame.html")
    answer = f"<script>addEventListener('load', () => parent.postMessage(String({script}), '*'))</script>"
    shown.write_text(page.read_text().replace("</body>", f"{answer}</body>"))
    frame.write_text(
        "<!DOCTYPE html><title>none</title><script>onmessage = e => document.title = e.data</script>"
        '<body style="margin: 0"><iframe src="shown.html"'
        f' style="border: 0; width: {width}px; height: 2500px">'
    )  # a frame, because windows are at least 500 pixels wide
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=3000",
    ]
    command += [f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"]
    command += [
        f"--user-data-dir={page.parent / 'browser'}",
        f"--window-size={max(width, 500)},2500",
    ]
    result = subprocess.run(
        [*command, *more, frame.as_uri()], capture_output=True, text=True, timeout=90
    )
    title = re.search(r"<title>([^<]*)</title>", result.stdout)
    return title[1] if title else result.stderr


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_the_page_from_disk(restarted: Path, width: int, scheme: str) -> None:
    (restarted / "samples.txt").write_text("word" * 500)
    assert main(["report", str(restarted)]) == 0
    picture = restarted / "picture.png"
    browse(restarted / "report.html", width, scheme, "0", f"--screenshot={picture}")
    pixels = (imread(picture)[:, :width, :3] * 255).round()
    variables = re.findall(r":root \{(.*?)\}", TEMPLATE, re.S)[scheme == "dark"]
    for name, at_least in (("paper", 10_000), ("card", 50_000), ("s0", 150), ("s1", 80)):
        value = re.search(rf"--{name}: #(\w+);", variables)
        assert value is not None
        color = [int(value[1][i : i + 2], 16) for i in (0, 2, 4)]
        assert (np.abs(pixels - color).max(axis=2) < 12).sum() > at_least, name


@pytest.mark.slow
@needs_browser
def test_a_phone_shows_all_charts_and_nothing_sideways(restarted: Path) -> None:
    (restarted / "samples.txt").write_text("word" * 500)
    assert main(["report", str(restarted)]) == 0
    script = (
        f"[document.documentElement.scrollWidth, innerWidth, {CHARTS}.filter(name =>"
        " (box => box.width > 300 && box.left >= 0 && box.right <= 400 && box.height > 100)"
        "(document.getElementById(name).getBoundingClientRect())).length]"
    )
    assert (
        browse(restarted / "report.html", 400, "light", script, "--dump-dom")
        == f"400,400,{len(CHARTS)}"
    )


@pytest.mark.slow
@needs_browser
def test_a_pointer_over_a_chart_shows_the_values_there(restarted: Path) -> None:
    assert main(["report", str(restarted)]) == 0
    script = (
        "(chart => { const box = chart.getBoundingClientRect();"
        " const place = {bubbles: true, clientX: box.right - 12, clientY: box.top + 40};"
        " chart.dispatchEvent(new PointerEvent('pointermove', place));"
        " return document.querySelector('.tip').innerText.replace(/\\s+/g, ' ') })"
        "(document.getElementById('loss_by_step'))"
    )
    shown = browse(restarted / "report.html", 1280, "light", script, "--dump-dom")
    assert shown == "step 60 loss = loss_mean 3.4 eval/web 3.5"


def test_the_card_of_memory_says_what_was_expected(tmp_path: Path) -> None:
    """By the functions that check memory before a run."""
    spec = resolved(TrainConfig(), batch=BatchPlan(2, 1, 1))
    run = read_run(make_run(tmp_path / "run", [report(1, 1, 3.0)]))
    run.configs["config.json"] = spec.content
    size = state_bytes(spec.config.optim, spec.model, spec.precision)
    need = estimate_memory(Step.of(spec), size / num_params(spec.model)).total
    notes = {label: note for label, _, note in cards(run)}
    assert notes["memory"] == f"peak of rank 0, of the run alone {need / 2**30:.3g} expected"
