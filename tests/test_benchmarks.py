"""Real runs of benchmarks, and the page of results against its raw files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli import ROOT

PAGE = ROOT / "benchmarks/README.md"
LOG = ROOT / "benchmarks/LOG.md"


def test_the_rows_of_the_h200_are_their_raw_files() -> None:
    row = r"\| ([\d,]+) \| ([\d.]+) % \| ([\d.]+) \| \[\w+\]\((results/h200_\w+\.json)\)"
    rows = re.findall(row, PAGE.read_text())
    assert {file for *_, file in rows} == {
        f"results/{path.name}" for path in (ROOT / "benchmarks/results").glob("h200_*.json")
    }
    for rate, mfu, memory, file in rows:
        (result,) = json.loads((PAGE.parent / file).read_text())["results"]
        assert rate == f"{result['tokens_per_sec_per_device']:,.0f}", file
        assert mfu == f"{100 * result['mfu']:.1f}", file
        assert memory == f"{result['peak_mem_gib']:.1f}", file


def test_the_page_is_short_and_its_links_and_scripts_exist() -> None:
    text = PAGE.read_text()
    assert len(text.split()) <= 700
    sections = re.findall(r"^## (.*)", LOG.read_text(), re.MULTILINE)
    anchors = {section.lower().replace(" ", "-") for section in sections}
    for file, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", text):
        assert (PAGE.parent / file).is_file(), file
        assert not anchor or anchor in anchors, anchor
    for script, flags in re.findall(r"python (benchmarks/\w+\.py)([^`\n]*)", text):
        names = re.findall(r"--(\w+)", flags)
        if script != "benchmarks/bench_train.py":  # which takes every flag of a training
            assert all(name in (ROOT / script).read_text() for name in names), script


def test_a_section_of_the_log_without_its_script_is_historical() -> None:
    for section in re.split(r"^## ", LOG.read_text(), flags=re.MULTILINE)[1:]:
        command = re.search(r"^\| command \|.*", section, re.MULTILINE)
        scripts = re.findall(r"\b(\w+\.py)", command[0]) if command else []
        here = [LOG.parent, ROOT]
        gone = [name for name in scripts if not any((folder / name).is_file() for folder in here)]
        assert not gone or "*Historical" in section, gone


def test_a_flag_that_the_sweep_sets_itself_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """--num_steps came twice, and was refused."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from bench_train import OWN, settings_of

    case = {"num_steps": "40", "save_last": "True"}
    settings = settings_of(case, OWN)
    assert settings["num_steps"] == "40" and settings["save_last"] == "True"
    assert settings["report_interval"] == "4" and settings_of({}, OWN)["num_steps"] == "24"
    assert settings_of({"report_interval": "10"}, OWN)["num_steps"] == "60"


@pytest.mark.slow
def test_a_sweep_survives_what_does_not_fit_and_marks_the_best(tmp_path: Path) -> None:
    flags = "--model_variant=tiny --seq_length=64 --batch_size=9000000,2,5000000 --mixed_precision=false"
    script = f"benchmarks/bench_train.py {flags} --rounds=1 --output={tmp_path}/r.json"
    command = f"ulimit -v 12000000; exec {sys.executable} {script}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "r.json").read_text())
    fits, too_large, skipped = record["results"]
    assert (
        fits["case"]["batch_size"] == "2"
        and fits["tokens_per_sec_per_device"] > 0
        and fits["reports"]
    )
    assert "memory" in too_large["problem"] and skipped["problem"].startswith("skipped")
    assert record["versions"]["torch"] and "bench_train.py" in record["command"]
    rows = done.stdout.splitlines()
    assert (
        rows[0].startswith("| batch_size | tokens/s/device")
        and " * |" in rows[2]
        and "memory" in rows[3]
    )


@pytest.mark.slow
def test_optimizers_write_a_result_outside_the_checkout(tmp_path: Path) -> None:
    results = ROOT / "benchmarks" / "results"
    before = {path: path.read_bytes() for path in results.iterdir()}
    script = (
        "benchmarks/bench_optim.py --variant=tiny --rounds=1 --optimizers=adamw,muon,sm3,bf16_pure"
    )
    settings = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *script.split()],
        cwd=ROOT,
        env=settings,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    written = Path(done.stderr.splitlines()[-1].removeprefix("written: "))
    assert written.is_relative_to(tmp_path)
    assert {path: path.read_bytes() for path in results.iterdir()} == before
    record = json.loads(written.read_text())
    found = {name: result["bytes_a_parameter"] for name, result in record["results"].items()}
    assert (
        list(found) == ["torch_adamw", "adamw", "muon", "sm3", "bf16_pure"]
        and not record["left_out"]
    )
    assert (found["adamw"], found["bf16_pure"]) == (8, 4)


@pytest.mark.slow
def test_generation_is_measured_beside_transformers(tmp_path: Path) -> None:
    script = "benchmarks/bench_generate.py --variants=tiny --tokens=16 --prefill=8 --rounds=1"
    command = [sys.executable, *script.split(), f"--output={tmp_path}/r.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for result in json.loads((tmp_path / "r.json").read_text())["results"]:
        rates = result["tokens_per_sec"]
        assert list(rates) == ["ours", "transformers", "static"]
        assert min(rates["ours"].values()) > 0
        assert result["ratio"]["decode_16"]["static"] > 0


@pytest.mark.slow
@pytest.mark.slow
def test_shakespeare_is_trained_by_its_preset(tmp_path: Path) -> None:
    """Here on this project's documentation, for a few steps."""
    text = "".join(path.read_text() for path in sorted((ROOT / "docs/guides").glob("*.md")))
    (tmp_path / "input.txt").write_bytes(text.encode("ascii", errors="ignore"))
    flags = f"--text={tmp_path}/input.txt --rounds=1 --num_steps=101 --output={tmp_path}/it.json"
    ended = subprocess.run(
        [sys.executable, "benchmarks/shakespeare.py", *flags.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    (one,) = json.loads((tmp_path / "it.json").read_text())["rounds"]
    assert one["ours"]["parameters"] == 836_992
    assert 2.0 < one["ours"]["val_loss"] < 3.6  # ln(65) is 4.2


@pytest.mark.slow
def test_layouts_are_measured_beside_one_process_and_the_prediction(tmp_path: Path) -> None:
    script = "benchmarks/bench_parallel.py --world=2 --steps=2"
    command = [sys.executable, *script.split(), f"--output={tmp_path}/r.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "r.json").read_text())
    assert list(record["layouts"]) == ["one process", "tp2", "cp2", "pp2", "fsdp2"]
    for name, found in record["layouts"].items():
        assert found["loss_difference"] < 1e-5 and found["norm_difference"] < 1e-4, name
        assert all(abs(ratio - 1) < 0.02 for ratio in found["worst_ratio"].values()), name
        assert found["peak_mib"] > 0 and found["predicted_mib"] > 0


@pytest.mark.slow
def test_scale_measures_each_part_at_each_size(tmp_path: Path) -> None:
    script = "benchmarks/bench_scale.py --sizes=1,2 --variant=tiny --layers=1"
    command = [sys.executable, *script.split(), f"--output={tmp_path}/r.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / "r.json").read_text())["parts"]
    assert list(parts) == ["ranks", "shards", "files", "slices", "documents", "sources"]
    for part, found in parts.items():
        assert found["1"].keys() == found["2"].keys() and f"\n{part} " in f"\n{done.stdout}", part
        assert all(value > 0 for value in found["2"].values()), part
    assert parts["documents"]["2"]["bytes per document"] < 60


@pytest.mark.skipif(shutil.which("strace") is None, reason="requires strace")
@pytest.mark.slow
def test_scale_counts_calls_of_the_file_system(tmp_path: Path) -> None:
    script = "benchmarks/bench_scale.py --sizes=1,3 --parts=latency"
    command = [sys.executable, *script.split(), f"--output={tmp_path}/r.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if "strace cannot trace" in done.stderr:
        pytest.skip("this machine forbids to trace a process")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "r.json").read_text())["parts"]["latency"]
    for name, calls in found["3"].items():
        if name.endswith(", calls"):
            assert calls > 0, name
            seconds = found["3"][name.replace(", calls", ", s")]
            assert seconds >= 0.005, name  # of one call
    assert found["1"]["a save, calls"] == found["3"]["a save, calls"]


@pytest.mark.slow
def test_the_page_shows_the_recipes_of_today_and_they_are_not_refused() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from parallel_recipes import RECIPES, figures, table

    recipes = [figures(*recipe) for recipe in RECIPES]
    page = (ROOT / "docs" / "reference" / "parallelism-tables.md").read_text()
    shown = page.partition("<!-- recipes -->\n")[2].partition("\n<!-- end -->")[0]
    assert shown == table(recipes), "take what `python benchmarks/parallel_recipes.py` prints"


def page_of_settings() -> str:
    page = (ROOT / "docs" / "reference" / "parallelism-tables.md").read_text()
    return page.partition("<!-- settings -->\n")[2].partition("\n<!-- end -->")[0]


@pytest.mark.slow
def test_the_page_shows_settings_that_a_launch_chooses_today() -> None:
    """Of the smallest model: of one device, of one node, of many nodes."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from settings_by_devices import setting

    shown = page_of_settings().splitlines()
    for devices in (1, 8, 64):
        assert setting("7b", devices).row in shown, devices


@pytest.mark.slow
def test_the_page_shows_all_settings_of_today() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from settings_by_devices import DEVICES, MODELS, setting, table

    settings = [setting(model, devices) for devices in DEVICES for model in MODELS]
    advice = "take what `python benchmarks/settings_by_devices.py` prints"
    assert page_of_settings() == table(settings), advice


def test_every_script_of_results_takes_output() -> None:
    for path in (ROOT / "benchmarks").glob("*.py"):
        other = {"bench_train", "compare_programs"}  # their own --output
        other |= {"gpu_compare", "gpu_copy", "judge_plan", "published"}  # no result file
        other |= {"parallel_recipes", "settings_by_devices", "result_file"}
        other |= {"pictures", "record_terminal"}
        assert "parser_of" in path.read_text() or path.stem in other, path
        assert (
            '/ "results"' not in path.read_text() and "benchmarks/results" not in path.read_text()
        ), path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_programs_are_compared_by_packages_and_mistyped_flag(
    tmp_path: Path,
) -> None:
    env, site = tmp_path / "env", tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    for name in ("litgpt", "torch", "filelock", "brought"):
        _write(site / f"{name}-1.5.dist-info" / "METADATA", f"Name: {name}\nVersion: 1.5\n")
        _write(site / f"{name}-1.5.dist-info" / "RECORD", f"{name}.bin,,\n")
        _write(site / f"{name}.bin", "x" * 2_000_000)
    _write(env / "bin" / "litgpt", '#!/bin/sh\necho usage\necho "error: what is $3" >&2\nexit 2\n')
    (env / "bin" / "litgpt").chmod(0o755)
    command = ["benchmarks/compare_programs.py", f"--litgpt={env}", f"--output={tmp_path}/r.json"]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "r.json").read_text())
    assert record.keys() == {"date", "python", "litgpt"}
    found = record["litgpt"]
    assert found["installed"] == {
        "versions": {"torch": "1.5"},
        "version": "1.5",
        "packages": 1,
        "mb": 2.0,
    }
    assert found["mistyped_flag"]["answer"] == "error: what is --learning_rat=1"
    assert (
        found["mistyped_flag"]["exit_status"] == 2
        and len(found["mistyped_flag"]["cpu_s_rounds"]) == 3
    )


@pytest.mark.slow
def test_race_goes_on_without_absent_and_dead_peers(tmp_path: Path) -> None:
    """litgpt is not installed, and transformers has a Python that finds it and dies; on a GPU each round
    has a process of its own, as here."""
    dying = tmp_path / "python"
    _write(dying, '#!/bin/sh\n[ "$1" = -c ] && exit 0\nexit 3\n')
    dying.chmod(0o755)
    flags = "--shapes=tiny --precision=fp32 --mode=eager --rounds=1 --warmup=2 --steps=1"
    peers = "--contestants=ours,transformers,plain,litgpt"
    script = [sys.executable, "benchmarks/race.py", *flags.split(), peers, "--processes=fresh"]
    done = subprocess.run(
        [*script, f"--python=transformers:{dying}", f"--output={tmp_path}/r.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "litgpt is not installed: skipped" in done.stderr
    (case,) = json.loads((tmp_path / "r.json").read_text())["cases"]
    died = "died with exit status 3"
    assert case["ended"] == {"litgpt": "is not installed", "transformers": died}
    assert f"| transformers | {died} |" in done.stdout
    assert case["ratio_wall"].keys() == {"plain"} and case["equal_within_noise"] == []
    assert case["losses"].keys() == case["peak_gib"].keys() == {"ours", "plain"}
    for losses in case["losses"].values():
        assert 6 < losses[0] < 7 and losses[1] < losses[0]  # a uniform guess: ln 512 = 6.24


def test_race_is_equal_where_its_rounds_cover_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from race import covers_one, ratios_of

    rounds = [
        {"ours": [10.0], "plain": [11.0], "litgpt": [8.0]},
        {"ours": [12.0], "plain": [11.5], "litgpt": [8.0]},
        {"ours": [12.0], "plain": [11.0]},  # litgpt has ended
    ]
    ratios = ratios_of(rounds, 0)
    assert ratios["litgpt"] == [1.25, 1.5] and len(ratios["plain"]) == 3
    assert covers_one(ratios["plain"]) and not covers_one(ratios["litgpt"])
    assert not covers_one([1.0])  # one round has no spread


def test_a_terminal_is_recorded_as_lines_that_appear(tmp_path: Path) -> None:
    picture = tmp_path / "seen.svg"
    shown = r"printf 'first <1>\nhalf'; sleep 1; printf '\r\033[K\033[1mdone\033[0m\n'; seq 30"
    command = [sys.executable, "benchmarks/record_terminal.py", f"--output={picture}", "--", "bash"]
    subprocess.run([*command, "-c", shown], cwd=ROOT, check=True, capture_output=True)
    lines: dict[str, list[tuple[str, str]]] = {}
    for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text"):
        shown_text = (text.text or "").replace("\N{NO-BREAK SPACE}", " ")
        lines.setdefault(text.get("y", ""), []).append((shown_text, text.get("visibility", "")))
    found = [lines[str(18 * number)] for number in range(1, 33)]
    assert found[0] == [("first <1>", "visible")]
    assert found[1] == [("half", "hidden"), ("done", "visible")]
    assert found[2:32] == [[(str(number), "visible")] for number in range(1, 31)]
    failed = subprocess.run([*command, "-c", "exit 3"], cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 1 and "bash ended with status 3" in failed.stderr
