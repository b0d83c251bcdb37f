"""The report page: what it reads of metrics.jsonl, and that it stays one small file."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fms_fsdp.__main__ import main
from fms_fsdp.tools.report_command import MAX_POINTS, load_run, read_metrics, thin


def record(attempt: int, step: int, **values: Any) -> dict[str, Any]:
    own = {"attempt": attempt, "step": step, "tokens_seen": 64 * step, "time": 1e9 + step}
    return own | values


def write(folder: Path, *records: dict[str, Any], torn: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(each) + "\n" for each in records)
    (folder / "metrics.jsonl").write_text(lines + torn)
    return folder


@pytest.fixture
def restarted(tmp_path: Path) -> Path:
    """Steps 10 to 40, then again from 20 on, to 50."""
    first = [record(1, step, loss=5.0) for step in (10, 20, 30, 40)]
    first += [record(1, 40, **{"eval/loss": 4.0})]
    second = [record(2, 20, **{"eval/loss": 4.5})]
    second += [record(2, step, loss=3.0, skipped_steps=1) for step in (30, 40)]
    second += [record(2, 50, loss=None, skipped_steps=1), record(2, 50, event="end", eval_s=2.0)]
    return write(tmp_path / "<b>run", *first, *second, torn='{"step": 60, "lo')


def test_repeated_steps_are_read_once(restarted: Path) -> None:
    reports, validations, events = read_metrics(restarted / "metrics.jsonl")
    found = [(report["step"], report["attempt"]) for report in reports]
    assert found == [(10, 1), (20, 1), (30, 2), (40, 2), (50, 2)]
    assert [v["step"] for v in validations] == [20] and [e["event"] for e in events] == ["end"]
    run = load_run(restarted)
    assert run["restarts"] == [29] and len(run["events"]) == 4
    assert run["series"]["loss"] == ([10, 20, 30, 40, 50], [5.0, 5.0, 3.0, 3.0, None])
    assert run["series"]["eval/loss"] == ([20], [4.5])


def test_tokens_reach_the_last_report(tmp_path: Path) -> None:
    """Also where fewer validations than reports have them."""
    (tmp_path / "samples.txt").write_bytes("text é".encode()[:-1])
    records = [record(1, 0, **{"eval/loss": 6.0}), record(1, 10, loss=5.0)]
    records += [record(1, 10, **{"eval/loss": 5.5}), record(1, 20, loss=4.0)]
    run = load_run(write(tmp_path, *records))
    assert run["series"]["tokens_seen"] == ([0, 10, 20], [0, 640, 1280])
    assert run["series"]["eval/loss"] == ([0, 10], [6.0, 5.5])
    assert run["samples"].startswith("text ")


def test_clock_set_back_loses_no_hours(tmp_path: Path) -> None:
    times = [0, 3600, 1800, 5400]  # set back after the second report
    run = load_run(
        write(
            tmp_path / "run", *(record(1, step, loss=1.0, time=t) for step, t in enumerate(times))
        )
    )
    assert run["series"]["hours"] == ([0, 1, 2, 3], [0.0, 1.0, 1.0, 2.0])


@pytest.mark.parametrize(("resumed", "hours"), [(15, 5.0), (12, 0.0)])
def test_unreported_steps_of_a_launch_have_hours(
    tmp_path: Path, resumed: int, hours: float
) -> None:
    """A step takes an hour. Their tokens counted, so "per day" was too high."""
    records = [record(1, step, loss=1.0, time=3600 * step) for step in (9, 10)]
    records.append(record(1, 15, event="end", time=3600 * 15))
    again = [resumed + 1, resumed + 4]
    records += [record(2, step, loss=1.0, time=3600 * (100 + step)) for step in again]
    run = load_run(write(tmp_path / "run", *records))
    assert run["restarts"] == [resumed]
    assert run["series"]["hours"][1] == [0.0, 1.0, hours + 1, hours + 4]


def test_thinning_keeps_extremes_and_ends() -> None:
    values: list[Any] = [float(i % 7) for i in range(50_000)]
    values[31_234], values[40_000] = 99.0, None
    steps, kept = thin(list(range(50_000)), values)
    assert len(steps) <= MAX_POINTS + 2 and 99.0 in kept and steps[0] == 0 and steps[-1] == 49_999


def test_page_is_one_file_without_network(restarted: Path, tmp_path: Path) -> None:
    other, page = write(tmp_path / "plain", record(1, 10, loss=2.0)), tmp_path / "page.html"
    (restarted / "samples.txt").write_text("</script><b>&")
    assert main(["report", str(restarted), str(other), f"--output={page}"]) == 0
    text = page.read_text()
    assert text.count("</script>") == 2 and "http" not in text.replace("http-equiv", "")
    data = text.partition('type="application/json">')[2].partition("</script>")[0]
    assert [run["name"] for run in json.loads(data)] == ["<b>run", "plain"]
    assert json.loads(data)[0]["samples"] == "</script><b>&"
    if shutil.which("node"):
        script = tmp_path / "page.js"
        script.write_text(re.findall(r"<script>(.*?)</script>", text, re.DOTALL)[0])
        subprocess.run(["node", "--check", str(script)], check=True)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (None, "is not a run directory"),
        ("", "has no report"),
        ("{}\n", "is not a record"),
        ("1\n", "is not a record"),
    ],
)
def test_bad_run_folder_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str | None, message: str
) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text(lines)
    assert main(["report", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_failed_write_keeps_the_older_page(
    restarted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(temporary: Path, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    page = restarted / "report.html"
    page.write_text("older")
    before = set(os.listdir(restarted))
    monkeypatch.setattr("fms_fsdp.files.replace_file", fail)
    assert main(["report", str(restarted)]) == 2
    assert page.read_text() == "older" and set(os.listdir(restarted)) == before


def test_page_replaces_no_link_and_no_pipe(
    restarted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As root, --output=/dev/null made the device a file."""
    published = tmp_path / "published.html"
    published.write_text("older")
    (restarted / "report.html").symlink_to(published)
    assert main(["report", str(restarted)]) == 0
    assert (restarted / "report.html").is_symlink() and "<script>" in published.read_text()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["report", str(restarted), f"--output={pipe}"]) == 2
    assert "pipe must be a file; choose another path" in capsys.readouterr().err
    assert pipe.is_fifo()


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_page_shows_passes_of_a_pipeline_and_own_tokens(tmp_path: Path) -> None:
    """A pipeline has only the sum of its passes, and a run may begin with the tokens of another."""
    passes = {"forward_ms": 0.0, "backward_ms": 0.0, "forward_backward_ms": 9.0}
    usual = {"forward_ms": 3.0, "backward_ms": 6.0, "forward_backward_ms": 9.0}
    runs = []
    for name, values in (("pipeline", passes), ("usual", usual)):
        reports = []
        for step in (1, 2, 3):
            own = {"tokens_seen": 10**9 + 1000 * step, "time": 3600.0 * step}
            reports.append(record(1, step, loss=2.0, **values, **own))
        runs.append(write(tmp_path / name, *reports))
    page = tmp_path / "page.html"
    assert main(["report", *map(str, runs), f"--output={page}"]) == 0
    content, _, script = page.read_text().partition("<script>")
    data = content.partition('type="application/json">')[2].partition("</script>")[0]
    program = script.partition("main();\n</script>")[0]
    stub = f"const document = {{ getElementById: () => ({{ textContent: {json.dumps(data)} }}) }};"
    result = "console.log(JSON.stringify(RUNS.map(run => [timesOf(run), figures(run)])))"
    ended = subprocess.run(
        ["node", "-e", f"{stub}\n{program}\n{result}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    pipeline, plain = json.loads(ended.stdout)
    assert "forward_backward_ms" in pipeline[0]
    assert "forward_backward_ms" not in plain[0] and "forward_ms" in plain[0]
    assert ["tokens", "1B", "24k per day"] in plain[1]  # 2,000 in the two hours between reports


CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")


@pytest.mark.skipif(
    CHROMIUM is None or shutil.which("node") is None, reason="Chromium or node is not installed"
)
def test_browser_draws_the_page(restarted: Path, tmp_path: Path) -> None:
    pages = []
    for name, runs in (("one", [restarted]), ("three", [restarted] * 3)):
        copies = [shutil.copytree(run, tmp_path / f"{name}{i}") for i, run in enumerate(runs)]
        pages.append(tmp_path / f"{name}.html")
        assert main(["report", *map(str, copies), f"--output={pages[-1]}"]) == 0
    driver = Path(__file__).with_name("drive_page.mjs")
    ended = subprocess.run(
        ["node", str(driver), *map(str, pages)],
        env=os.environ | {"CHROMIUM": str(CHROMIUM)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "Cannot find package" in ended.stderr:
        pytest.skip("puppeteer-core is not installed")
    assert ended.returncode == 0, ended.stderr
    assert "errors [] " in ended.stdout


@pytest.mark.slow  # starts Chromium
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_page_shows_log_scales_and_no_empty_tile(tmp_path: Path) -> None:
    run = write(tmp_path / "run", record(1, 10, loss=2.0, loss_mean=3.0, grad_norm_mean=1.0))
    page = tmp_path / "page.html"
    assert main(["report", str(run), f"--output={page}"]) == 0
    click = "<script>document.querySelector('figcaption button').click()</script></body>"
    page.write_text(page.read_text().replace("</body>", click))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    ended = subprocess.run(
        [str(CHROMIUM), *options, page.as_uri()], capture_output=True, text=True, timeout=300
    )
    drawn, _, tables = ended.stdout.partition('<section id="tables">')
    assert tables, ended.stderr
    figures = drawn.split("<figure")[1:]
    pressed = {
        re.findall("<b[^>]*>(.*?)</b>", figure)[0]
        for figure in figures
        if 'aria-pressed="true"' in figure
    }
    assert pressed == {"Loss", "Gradient norm"}  # the first by the click
    opacities = re.findall(r'<i[^>]*style="([^"]*)"[^>]*></i><span[^>]*>(\w+)', figures[0])
    assert {name: "opacity" in style for style, name in opacities} == {
        "loss_mean": False,
        "loss": True,
    }
    tiles = drawn.partition('<section class="charts"')[0].partition('class="cards"')[2]
    assert "mean loss" in tiles and "MFU" not in tiles and "–" not in tiles
