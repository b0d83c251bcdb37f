"""Unusable input is rejected at once, in one line that names it, and nothing is written.

bad_input.txt is the table of such lines: a row runs in this process, through the function that its
command calls. Errors about the content of a checkpoint, of shards or of another program's file are
tested with their subject. A flag without effect is rejected or noted.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

import main_training
from fms_fsdp import launch as launcher
from fms_fsdp import stages
from fms_fsdp.__main__ import COMMANDS, main
from fms_fsdp.distributed import runtime
from fms_fsdp.distributed.world import World
from fms_fsdp.errors import UserError
from fms_fsdp.logs import set_up_log
from fms_fsdp.run.status import RunStatus
from fms_fsdp.run.stop import job_end
from fms_fsdp.state import RunConfig
from tests.cli import ROOT
from tests.cli import TINY as TINY_RUN
from tests.data.corpora import write_corpus
from tests.fresh import copy_tracked
from tests.specs import planned
from tests.warm import COMMANDS as COMMANDS_PROGRAM
from tests.warm import TRAINING, launch

TINY = (
    "--model_variant=tiny",
    "--use_dummy_dataset=True",
    "--seq_length=128",
    "--batch_size=2",
    "--trackers=none",
)
DATA = ("--model_variant=tiny", "--data_path=data", "--seq_length=64", "--sep_token=3")
H100 = ("estimate", "--device=h100_80gb", "--num_devices=8", "--model_variant=tiny")
# The words of the table that stand for flags, as far as the row does not set them.
SHORT_FORMS = {
    "TINY": TINY,
    "RUN110": (*TINY[:2], "--num_steps=110", "--seq_length=40", "--batch_size=1")
    + ("--learning_rate=2.0", "--warmup=10"),
    "DATA": DATA,
    "H100": H100,
    "GRID": (*H100, "--seq_length=128", "--batch_size=2", "--num_layers=4", "--hidden_size=64")
    + ("--ffn_hidden_size=96", "--num_attention_heads=8", "--num_kv_heads=2", "--vocab_size=131"),
}
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "NODE_RANK", "NNODES", "NPROC_", "SLURM_")


class Row(NamedTuple):
    """A command line, and the line that it prints, in which … stands for any text."""

    command_line: str
    message: str

    def __str__(self) -> str:
        return self.command_line


def read_table() -> list[Row]:
    rows = list[Row]()
    command_lines = list[str]()
    message = ""
    for line in [*(ROOT / "tests/bad_input.txt").read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("    "):
            message = f"{message} {line.strip()}".strip()
            continue
        if message:
            rows += [Row(command_line, message) for command_line in command_lines]
            command_lines = []
            message = ""
        if line and not line.startswith("#"):
            command_lines.append(line)
    return rows


def name_of(flag: str) -> str:
    return flag.partition("=")[0]


def words_of(command_line: str) -> list[str]:
    """Returns the words of a row, with flags in place of its short form."""
    row = shlex.split(command_line)
    names = set(map(name_of, row))
    words = list[str]()
    for word in row:
        if word in SHORT_FORMS:
            words += [flag for flag in SHORT_FORMS[word] if name_of(flag) not in names]
        else:
            words.append(word)
    return words


def pattern_of(message: str, words: list[str]) -> str:
    """Returns the regular expression that the printed line must match."""
    for word in words:
        message = message.replace(f"{name_of(word)}=…", word)
    return ".*".join(map(re.escape, message.split("…")))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a corpus."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "in").mkdir()
    (folder / "in" / "a.txt").write_text("some text")
    write_corpus(folder / "data", {"web": [300, 200], "code": [400]})
    return folder


@pytest.fixture
def here(world: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`world` as the working folder, without variables of launchers; nothing is added to it."""
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    monkeypatch.chdir(world)
    before = sorted(world.rglob("*"))
    yield world
    assert sorted(world.rglob("*")) == before


def accept(*_: object) -> None:
    raise AssertionError("the launch is accepted")


def run_row(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs the words of a row; returns the exit status."""
    monkeypatch.setattr(launcher, "train", accept)
    while re.match("[A-Z_]+=", words[0]):
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    if words[0].startswith("-"):
        return train(words, monkeypatch)
    return main(words)


def train(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Ends as `main_training.py FLAGS` does, if that does not open a run directory."""

    def no_signals(_: RunStatus) -> SimpleNamespace:
        return SimpleNamespace(notes=[], wait_for_agent=lambda: None)

    monkeypatch.setattr(main_training, "StopSignals", no_signals)  # it would take those of pytest
    monkeypatch.setattr(runtime, "init_distributed", lambda *_: None)  # one process needs no group
    monkeypatch.setattr(stages, "open_run", accept)
    return main_training.main(flags)


@pytest.mark.parametrize("row", read_table(), ids=str)
def test_row_is_rejected(
    row: Row, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command_line, _, content = row.command_line.partition(" <<< ")
    words = words_of(command_line)
    pattern = pattern_of(row.message, words)
    file = here / words[-1].partition("=")[2]
    if content:
        file.write_text(content.encode().decode("unicode_escape"))
    begin = time.process_time()
    status = run_row(words, monkeypatch)
    assert time.process_time() - begin < 20  # huge numbers are rejected, not computed with
    if content:
        file.unlink()
    output, error = capsys.readouterr()
    assert status == 2, error
    (line,) = error.splitlines()
    assert line.startswith("error: ") and line.isprintable(), line
    assert re.fullmatch(pattern, line.removeprefix("error: ")), line
    assert len(line) <= 200 or "…" in row.message, line
    is_launch = words[0].startswith("-") or words[0] == "train"
    assert not output or is_launch  # which may have logged a note


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_process_with_a_wrong_flag_ends_with_2(tmp_path: Path, command: str) -> None:
    program = COMMANDS_PROGRAM if command else TRAINING
    ended = launch([*command.split(), "--no_such=1"], program=program, cwd=tmp_path)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr == "error: --no_such is not a flag; --help=all lists all flags\n"
    assert not list(tmp_path.iterdir())


def test_error_of_two_ranks_is_printed_once(tmp_path: Path) -> None:
    flags = [*TINY_RUN, "--pp_size=2", "--batch_size=1", f"--output_dir={tmp_path / 'run'}"]
    ended = launch(flags, 2)
    assert ended.statuses == [2, 2], ended.stderr
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1, ended.stderr
    assert "cannot use 1 micro-batches on 2 ranks; set --batch_size=2" in ended.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder, which a refused flag leaves empty."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder


def plan(*argv: str) -> RunConfig:
    """Resolves a launch up to its first collective; a flag given here replaces that of TINY."""
    world = World(0, 0, 1, 1)
    set_up_log(world.rank)
    names = set(map(name_of, argv))
    return planned([*(flag for flag in TINY if name_of(flag) not in names), *argv], world)


def refusal(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        plan(*argv)
    text = str(caught.value)
    assert "\n" not in text and text.isprintable() and not list(Path().iterdir())
    return text


@pytest.mark.usefixtures("empty")
def test_small_disk_matters_only_for_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fms_fsdp.run.checks.free_bytes", lambda folder: 3 * 2**19)
    text = refusal()
    assert "--ckpt_save_path=" in text and "1.5 MiB" in text and "GiB" not in text
    for due in ("--checkpoint_interval=5", "--checkpoint_schedule=5@9"):
        assert "for one checkpoint" in refusal("--save_last=False", due)
    plan("--save_last=False", "--checkpoint_interval=0")


def test_disk_without_a_size_is_accepted(disk_without_size: Path) -> None:
    """It was "must be writable", as /proc, which has no blocks either."""
    plan(f"--output_dir={disk_without_size / 'run'}")
    assert not list(disk_without_size.iterdir())


LONG_VALUES = {
    "--learning_rate": "9" * 1_000_000,
    "--checkpoint_schedule": "5@" + "9" * 5000,
    "--run_name": "a" * 300,
}
LONG_FILES = {
    "a.json": ('{"a":' * 100_000, '{"num_steps": %s}' % ("9" * 5000)),
    "a.toml": ("a = " + "[" * 100_000,),
}


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("flag", LONG_VALUES)
def test_long_value_is_shortened(flag: str) -> None:
    begin = time.process_time()
    text = refusal(f"{flag}={LONG_VALUES[flag]}")
    assert text.startswith(f"{flag}={LONG_VALUES[flag][:4]}") and len(text) < 600
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("name", LONG_FILES)
def test_deep_or_long_config_file_cannot_be_read(empty: Path, name: str) -> None:
    path = empty.parent / name
    for content in LONG_FILES[name]:
        path.write_text(content)
        text = refusal(f"--config={path}")
        assert text.startswith(f"--config={path} cannot be read: ") and len(text) < 600


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("text", ["a\nerror: forged", "a\0b", "\x1b[2Ja", "a\u2028b", "\udcff"])
@pytest.mark.parametrize(
    "flag",
    ["--run_name", "--output_dir", "--datasets", "--model_variant", "--config", "--no\tsuch"],
)
def test_name_cannot_forge_a_line(flag: str, text: str) -> None:
    assert refusal(f"{flag}={text}").startswith(flag.split("\t")[0])


@pytest.mark.parametrize(
    ("argv", "note"),
    [
        ("--hsdp_shard_size=2", "--hsdp_shard_size=2 has no effect with --sharding_strategy=none"),
        ("--matmul_precision=highest", "--matmul_precision=highest has no effect without a GPU"),
        ("--config=../site.toml", "--selective_checkpointing=1/2 has no effect"),  # from a file
        ("--config=../site.toml", "--skip_steps=5:7 has no effect with --use_dummy_dataset"),
    ],
)
def test_flag_without_effect_is_noted_once(
    empty: Path, capfd: pytest.CaptureFixture[str], argv: str, note: str
) -> None:
    (empty.parent / "site.toml").write_text("selective_checkpointing = '1/2'\nskip_steps = '5:7'\n")
    plan(argv)
    lines = capfd.readouterr().out.splitlines()
    assert len([line for line in lines if line[9:].startswith(f"note: {note}")]) == 1


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(
    ("text", "end"), [("Unknown", None), ("", None), ("1e9", None), ("4000000000", 4e9)]
)
def test_unusable_job_end_is_noted_and_ignored(
    text: str, end: float | None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", text)
    assert job_end() == end
    plan()
    noted = f"note: SLURM_JOB_END_TIME={text} is not a time" in capfd.readouterr().out
    assert noted == (text != "" and end is None)


def test_folder_named_as_a_run_file_is_rejected(empty: Path) -> None:
    (empty.parent / "run" / "metrics.jsonl").mkdir(parents=True)
    assert "metrics.jsonl is not a regular file; rename" in refusal(
        f"--output_dir={empty.parent / 'run'}"
    )


@pytest.mark.slow
def test_bad_input_of_script_leaves_no_folder(empty: Path) -> None:
    copy_tracked(empty)
    before = sorted(empty.rglob("*"))
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "scripts/train.sh", "--data_path=nowhere", "--model_variant=tiny"],
        cwd=empty,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2 and "error: " in done.stdout + done.stderr
    assert sorted(path for path in empty.rglob("*") if path.name != ".setup.lock") == before


@pytest.mark.parametrize(
    "command",
    [
        "main_training.py",
        "-m fms_fsdp prepare",
        "-m fms_fsdp report runs/x",
        "-m fms_fsdp train",
        "-m fms_fsdp.tools.flags_page",
    ],
)
def test_missing_packages_are_one_line_with_fix(command: str) -> None:
    bare = [sys.executable, "-S", *command.split()]  # without site-packages
    done = subprocess.run(bare, cwd=ROOT, capture_output=True, text=True, timeout=300)
    remedy = "source .venv/bin/activate (bash scripts/train.sh makes it), or pip install -e ."
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {sys.executable} has no package torch; {remedy}\n"


def test_advice_names_packages_of_the_index() -> None:
    files = [*ROOT.glob("fms_fsdp/**/*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("scripts/*.*")]
    text = "".join(file.read_text() for file in [*files, ROOT / "README.md"])
    named = set(re.findall(r"pip install '?(?!-)([\w\[\]-]+)", text))
    known = "pyyaml wandb tokenizers transformers matplotlib zstandard lm-eval lm-eval[hf]"
    known += " huggingface_hub pre-commit vllm"
    assert named <= set(known.split()), named
