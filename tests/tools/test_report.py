"""The report page: what it makes of metrics.jsonl, and that a browser draws it without a network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from fms_fsdp.__main__ import main
from fms_fsdp.tools.report.charts import _draw_mixture, smoothed
from fms_fsdp.tools.report.history import differences, read_run

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)


CHARTS = "loss_by_step loss_by_tokens lr grad_norm throughput utilization memory time mixture".split()


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


def make_run(folder: Path, lines: list[dict[str, Any]], learning_rates: tuple[float, ...] = (0.1,)) -> Path:
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
        content = json.dumps({"optim": {"learning_rate": rate, "grad_clip": 1.0}, "resolved": resolved})
        for name in (f"config.{number}.json", "config.json"):
            (folder / name).write_text(content)
    (folder / "status.json").write_text('{"status": "finished", "step": 60, "reason": "finished <60> steps"}')
    return folder


@pytest.fixture
def restarted(tmp_path: Path) -> Path:
    """Launch 1 reports every tenth step up to 50, launch 2 goes back to 25 and changes the learning rate."""
    first = [report(1, step, 5 - step / 100) for step in range(10, 51, 10)]
    second = [report(2, step, 4 - step / 100) for step in range(26, 61)]
    start = {"event": "start", "attempt": 2, "step": 26, "time": 2026.0, "launch_s": 3.5, "load_s": 1.5}
    lines = [*first, validation(1, 20, 4.9), validation(1, 40, 4.7), *second, start, validation(2, 60, 3.5)]
    return make_run(tmp_path / "restarted", lines, (0.1, 0.2))


def test_steps_behind_a_restart_are_told_by_the_later_launch_alone(restarted: Path) -> None:
    run = read_run(restarted)
    assert list(run.reports) == [10, 20, *range(26, 61)] and list(run.validations) == [20, 60]
    assert run.reports[30]["attempt"] == 2 and run.restarts == [25]
    assert run.series("lr", "tokens_seen")[0][:3] == [1000, 2000, 2600]
    assert run.seconds == (1050 - 1010) + (2060 - 2026) + 3.5 + 1.5


def test_a_report_and_a_validation_of_one_step_stand_side_by_side(tmp_path: Path) -> None:
    lines = [report(1, 10, 3.0), validation(1, 10, 3.1), report(1, 20, 2.0), validation(1, 20, 2.1)]
    run = read_run(make_run(tmp_path / "run", lines))
    assert list(run.reports) == [10, 20] == list(run.validations)


def test_a_loss_that_is_not_finite_leaves_a_gap(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", [report(1, 1, 3.0), report(1, 2, None)]))
    assert run.series("loss") == ([1], [3.0])


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
    "line", ['{"step": 2, "loss": 1.0}', '{"step": 1e999, "loss": 1}', "[2]", "null", '{"step": "x"}']
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


def test_smoothing_is_the_weighted_mean_of_what_went_before() -> None:
    values, weight = [3.0, 1.0, 4.0, 1.0, 5.0], 0.6
    for i, found in enumerate(smoothed(values, weight)):
        weights = [weight ** (i - j) for j in range(i + 1)]
        assert found == pytest.approx(
            sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        )


def test_the_shares_of_the_sources_add_up_to_one(restarted: Path) -> None:
    axes = Figure().subplots()
    _draw_mixture(read_run(restarted), axes)
    outline = np.concatenate([path.vertices for path in axes.collections[-1].get_paths()])
    assert len(axes.collections) == 2 and outline[:, 1].max() == pytest.approx(1.0)


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
    assert differences(configs) == [("learning_rate", ["0.1", "0.2"]), ("new", ["–", "true"])]


def test_the_page_of_one_run_has_its_charts_tables_and_nothing_from_elsewhere(restarted: Path) -> None:
    assert main(["report", str(restarted), "--png=True"]) == 0
    page = (restarted / "report.html").read_text()
    assert [name for name in re.findall(r'<g id="([^"]+)">', page) if name in CHARTS] == CHARTS
    assert page.count("</svg>") == 1 and [path.name for path in restarted.glob("*.png")] == ["report.png"]
    for text in (
        "restart of restarted",
        "restarted eval/web",
        "3.5000, 3.5000",
        "1,234,567",
        "2 x cpu",
        "torch 2.13.0",
    ):
        assert text in page, text
    assert "finished: finished &lt;60&gt; steps" in page and "<60>" not in page
    assert "<tr><td>learning_rate</td><td>0.1</td><td>0.2</td></tr>" in page
    links = set(re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?((?!#)[^"\')\s>]+)', page))
    assert not [link for link in links if not link.startswith(("#", "data:"))], links


def test_several_runs_share_their_charts(tmp_path: Path, restarted: Path) -> None:
    other = make_run(tmp_path / "other", [report(1, step, 3.0) for step in (1, 2)], (0.3,))
    output = tmp_path / "new" / "page.html"
    assert main(["report", str(restarted), str(other), f"--output={output}"]) == 0
    page = output.read_text()
    assert "<tr><td>learning_rate</td><td>0.2</td><td>0.3</td></tr>" in page
    for name in ("time_restarted", "time_other", "mixture_other", "loss_by_step"):
        assert f'<g id="{name}">' in page


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda folder: [], r"runs () must name at least one run folder"),
        (lambda folder: [str(folder / "none")], "must be a run folder, and there is no metrics.jsonl in it"),
        (
            lambda folder: [str(make_run(folder / "new", []))],
            "metrics.jsonl holds no report yet; wait for its first",
        ),
        (lambda folder: ["--smoothing=2", "x"], "--smoothing (2) must be at most 0.999"),
    ],
)
def test_what_cannot_be_drawn_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, message: str
) -> None:
    assert main(["report", *make(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_report_without_matplotlib_names_the_remedy(
    restarted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(restarted)]) == 2
    error = "report: error: report needs matplotlib, which is not installed; pip install matplotlib\n"
    assert capsys.readouterr() == ("", error)


def test_what_is_no_run_beside_runs_is_left_out_with_a_note(
    tmp_path: Path, restarted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    (tmp_path / "no_run").mkdir()
    assert main(["report", str(tmp_path / "no_run"), str(restarted), f"--output={page}"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == str(page) and restarted.name in page.read_text()
    assert err.startswith(f"note: left out: run ({tmp_path / 'no_run'}) must be a run folder")


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="no chromium or google-chrome on PATH")
def test_a_browser_draws_the_page_from_disk(restarted: Path) -> None:
    assert main(["report", str(restarted)]) == 0
    page = restarted / "report.html"
    page.write_text(
        page.read_text().replace(
            "</body>",
            f"<script>document.title = {CHARTS}.map(name => document.getElementById(name))"
            ".map(g => g.getBoundingClientRect().width > 100 && g.querySelectorAll('path').length > 5).join()"
            "</script></body>",
        )
    )
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        f"--user-data-dir={restarted}/b",
    ]
    result = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=90)
    title = re.search(r"<title>([^<]*)</title>", result.stdout)
    assert title is not None and title[1] == ",".join(["true"] * 9), result.stderr[-2000:]
