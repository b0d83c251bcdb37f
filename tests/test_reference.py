"""Reference pages against what a run writes and what the code defines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.flag import flag_table
from fms_fsdp.data.object_store import NUM_TRIES
from fms_fsdp.metrics.hardware import diagnostics
from fms_fsdp.metrics.timer import _TIMED_STEPS
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.prepare.writer import ShardInfo, ShardWriter
from fms_fsdp.run.logger import MAX_SOURCES
from tests.cli import ROOT, TINY, made_once, trained

METRICS = (ROOT / "docs/reference/metrics.md").read_text()
RUNS = (ROOT / "docs/reference/runs.md").read_text()
# the end of a name -> its unit in the page
UNITS = {"_ms": "ms", "_gib": "GiB", "_w": "W", "_kwh": "kWh", "_c": "°C", "_mhz": "MHz", "_s": "s"}


def rows(text: str, heading: str) -> list[list[str]]:
    """Returns the cells of the first table after a heading or sentence."""
    table = text.partition(heading)[2].partition("\n|---")[2].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all optional metrics of a CPU, and a run that distills it in fp16."""

    def make(folder: Path) -> None:
        common = (*TINY, "--use_dummy_dataset=True", "--report_interval=1")
        optional = "z_loss=1e-4 log_param_norm=True log_num_zeros=True diagnostics=True"
        flags = [f"--{flag}" for flag in optional.split()]
        flags += ["--peak_tflops=1", "--eval_interval=1", "--eval_test=True", "--num_steps=1"]
        trained(*common, *flags, f"--output_dir={folder / 'teacher'}")
        student = ("--trackers=none", "--precision=fp16", f"--teacher_path={folder / 'teacher'}")
        trained(*common, "--num_steps=1", *student, f"--output_dir={folder / 'student'}")

    return made_once(tmp_path_factory, "metrics-of-the-page", make)


def records(run_folder: Path) -> Iterator[dict[str, object]]:
    for path in run_folder.glob("*/metrics.jsonl"):
        for line in path.read_text().splitlines():
            yield json.loads(line)


def test_the_page_of_metrics_has_all_that_runs_write(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = set[str]()
    for record in records(run_folder):
        if "event" not in record:
            written |= record.keys()
    # The reports of a GPU have more: memory of the allocator, power.
    on_gpu = json.loads((ROOT / "benchmarks/results/h200_3b.json").read_text())
    for report in on_gpu["results"][0]["reports"]:
        written |= report.keys()
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 40)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1980)
    written |= diagnostics(torch.device("cuda")).keys()
    written = {re.sub(r"\bsynthetic\b", "<source>", name) for name in written}

    described = {name for cells in rows(METRICS, "name | unit") for name in names(cells[0])}
    described |= {name for cells in rows(METRICS, "## Evaluations") for name in names(cells[0])}
    described -= {"test/…", "eval/bits_per_byte", "eval/<source>/bits_per_byte"}  # of text only
    counters = {"step", "attempt", "time"}
    of_tests = {name for name in written if name.startswith("test/")}
    assert {name.replace("test/", "eval/") for name in of_tests} <= described
    assert written - of_tests - counters == described
    assert all(f"`{name}`" in METRICS for name in counters)


def test_the_page_of_metrics_gives_their_units() -> None:
    for cells in rows(METRICS, "name | unit"):
        for name in names(cells[0]):
            for end, unit in UNITS.items():
                if name.endswith(end):
                    assert re.search(rf"(?<!\w){unit}\b", cells[1]), name
            if name.startswith("tokens_per_sec"):
                assert cells[1] == "tokens/s", name


def test_the_page_of_metrics_has_all_events(run_folder: Path) -> None:
    in_code = set[str]()
    for path in (ROOT / "fms_fsdp").rglob("*.py"):
        in_code |= set(re.findall(r"\.event\(\s*\"(\w+)\"", path.read_text()))
    described = {name: cells[1] for cells in rows(METRICS, "## Events") for name in names(cells[0])}
    assert described.keys() == in_code
    for record in records(run_folder):
        if "event" in record:
            fields = record.keys() - {"event", "attempt", "step", "time"}
            text = described[str(record["event"])]
            assert all(f"`{field}`" in text for field in fields), (record["event"], fields)


def test_the_page_of_runs_has_all_files_of_a_run(run_folder: Path) -> None:
    described = {
        name.split("/")[0] for cells in rows(RUNS, "| file | content |") for name in names(cells[0])
    }
    for folder in run_folder.iterdir():
        if (folder / "config.json").is_file():
            found = {re.sub(r"\.\d+\.", ".<attempt>.", path.name) for path in folder.iterdir()}
            assert found <= described, found - described
    sources = [*(ROOT / "fms_fsdp").rglob("*.py"), *(ROOT / "scripts").iterdir()]
    sources.append(ROOT / "main_training.py")
    code = "\n".join(path.read_text() for path in sources if path.is_file())
    for name in described - {"config.<attempt>.json"}:
        assert re.search(rf"[\"'/]{re.escape(name)}\b", code), f"nothing writes {name}"


def test_the_page_of_runs_has_all_fields_of_a_status(run_folder: Path) -> None:
    (row,) = [cells for cells in rows(RUNS, "| file | content |") if cells[0] == "`status.json`"]
    fields = json.loads((run_folder / "teacher/status.json").read_text())
    assert all(f"`{field}`" in row[1] or f'"{field}"' in row[1] for field in fields), fields


def test_the_page_of_models_has_all_variants() -> None:
    text = (ROOT / "docs/reference/models.md").read_text()
    cells = [row[0] for row in rows(text, "## Variants")]
    listed = [name for cell in cells for name in names(cell)]
    order = list(VARIANTS)
    for first, last in re.findall(r"`(\S+)` to `(\S+)`", "\n".join(cells)):
        listed += order[order.index(first) + 1 : order.index(last)]
    assert sorted(listed) == sorted(VARIANTS)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DEFAULT = re.compile(r"`--(\w+)(?:=[^`]*)?`[^`\n]{0,120}?(?:\(default:?|by default) (\d[\d,.]*)")
DERIVED = {"num_steps": 1000}  # the flag has no default of its own


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_defaults_that_pages_repeat_are_those_of_the_flags(page: Path) -> None:
    flags = flag_table(TrainConfig)
    for name, value in DEFAULT.findall(page.read_text()):
        if name in flags:
            default = DERIVED.get(name, flags[name].default)
            assert float(value.rstrip(".,").replace(",", "")) == default, name


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("guides/data-loading.md", f"tried {NUM_TRIES} times"),
        ("reference/metrics.md", f"With more than {MAX_SOURCES} sources"),
        ("reference/metrics.md", f"over the last {_TIMED_STEPS} steps"),
    ],
)
def test_counts_that_pages_repeat_are_those_of_the_code(page: str, text: str) -> None:
    assert text in (ROOT / "docs" / page).read_text()


def test_the_page_of_shards_has_all_metadata(tmp_path: Path) -> None:
    page = (ROOT / "docs/reference/shards.md").read_text()
    info = ShardInfo(vocab_size=300, sep_token=0, tokenizer_digest="none", has_masks=True)
    writer = ShardWriter(tmp_path / "shard-00000.arrow", info)
    writer.add(np.array([5, 7], info.dtype))
    writer.finish()
    with pa.ipc.open_file(tmp_path / "shard-00000.arrow") as file:
        metadata = {name.decode() for name in file.schema.metadata}
        assert file.schema.field("tokens").type == pa.large_list(pa.uint32())
    (row,) = [cells for cells in rows(page, "| part | format |") if cells[0] == "schema metadata"]
    assert set(re.findall(r"\w+", " ".join(names(row[1])))) == metadata


def test_defaults_in_sentences_are_those_of_flags() -> None:
    table = flag_table(TrainConfig)
    found = []
    for path in (ROOT / "docs").rglob("*.md"):
        found += re.findall(r"(\S+) is the default of `--(\w+)`", path.read_text())
    assert ("2023", "seed") in found
    for value, name in found:
        assert value == str(table[name].default), name
