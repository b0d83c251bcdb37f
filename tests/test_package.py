"""The package as users install it: a wheel from the sdist works in an empty folder."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli import ROOT, TINY
from tests.fresh import copy_tracked, make_environment, outside


class Built(NamedTuple):
    """An sdist, the wheel made of it, the programs of an environment with the wheel, and what git tracks."""

    sdist: Path
    wheel: Path
    programs: Path
    tracked: list[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("package")
    tracked, dist = copy_tracked(folder / "copy"), folder / "dist"
    make_sdist = "import setuptools.build_meta as build; build.build_sdist('../dist')"
    quiet = {"cwd": folder / "copy", "check": True, "capture_output": True, "env": outside()}
    subprocess.run([sys.executable, "-c", make_sdist], **quiet)
    (sdist,) = dist.glob("*.tar.gz")
    shutil.rmtree(folder / "copy")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*pip, f"--wheel-dir={dist}", sdist], **quiet | {"cwd": folder})
    (wheel,) = dist.glob("*.whl")
    make_environment(folder / "venv", str(wheel))
    return Built(sdist, wheel, folder / "venv" / "bin", tracked)


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def call(
    built: Built, cwd: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program of the environment, in a folder outside the checkout."""
    return subprocess.run(
        [built.programs / words[0], *words[1:]],
        cwd=cwd,
        env=outside() | variables,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
def test_wheel_and_sdist_have_all_files(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = {name for name in built.tracked if name.startswith("fms_fsdp/")}
    assert held == package | {"main_training.py"} and "fms_fsdp/config/presets/bench.toml" in held
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {name for name in built.tracked if not name.startswith(".")} <= names


@pytest.mark.slow
def test_program_trains_in_an_empty_folder(built: Built, empty: Path) -> None:
    """On its own prepared text, alone and with torchrun, with a shipped preset."""
    (empty / "text").mkdir()
    (empty / "text" / "a.txt").write_text("All that is told is a tale. " * 200)
    prepare = ("prepare", "--input=own=text", "--output=data", "--tokenizer=byte")
    made = call(built, empty, "fms-fsdp", *prepare)
    assert made.returncode == 0, made.stderr
    flags = ("--model_variant=tiny", "--data_path=data", "--datasets=own", "--seq_length=64")
    sizes = ("--batch_size=2", "--num_steps=2", "--run_name=first")
    done = call(built, empty, "fms-fsdp", "train", *flags, *sizes)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in empty.iterdir()} == {"text", "data", "runs"}
    assert json.loads((empty / "runs/first/status.json").read_text())["status"] == "finished"
    config = f"--config={empty / 'runs/first/config.json'},profile"
    launcher = ("torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc_per_node=2")
    again = ("-m", "main_training", config, "--num_steps=6", "--run_name=second")
    two = call(built, empty, *launcher, *again)
    assert two.returncode == 0, two.stderr
    second = empty / "runs/second"
    assert json.loads((second / "config.json").read_text())["resolved"]["world_size"] == 2
    assert list((second / "profile_traces").iterdir())  # profile.toml asks for it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "status"), [("--nmu_steps=3", 2), ("--config=nosuch", 2), ("--help", 0), ("", 2)]
)
def test_train_answers_before_torch_is_imported(
    built: Built, empty: Path, flags: str, status: int
) -> None:
    """As the script does; the launcher has one stream for the output of its ranks."""
    variables = {"PYTHONPROFILEIMPORTTIME": "1"}
    ours = call(built, empty, "fms-fsdp", "train", *flags.split(), **variables)
    script = call(built, empty, "python", str(ROOT / "main_training.py"), *flags.split())
    assert ours.returncode == script.returncode == status
    lines = [*ours.stdout.splitlines(), *ours.stderr.splitlines()]
    own = [line for line in lines if not line.startswith("import time:")]
    text = script.stdout.replace("python main_training.py", "fms-fsdp train")
    assert own == [*text.splitlines(), *script.stderr.splitlines()]
    assert not list(empty.iterdir())
    assert not flags or not [line for line in lines if re.search(r"\| +torch$", line)]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["fms-fsdp", "python -m fms_fsdp"])
def test_usage_names_the_program_as_called(built: Built, empty: Path, program: str) -> None:
    for words, usage in (("", ""), ("prepare --help", " prepare")):
        asked = call(built, empty, *program.split(), *words.split())
        assert f"usage: {program}{usage} " in asked.stdout, asked.stdout + asked.stderr
    version = call(built, empty, *program.split(), "--version").stdout
    assert version.startswith("fms_fsdp 0.2.0, torch ")


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint(built: Built, empty: Path) -> None:
    launch = subprocess.Popen(
        [built.programs / "fms-fsdp", "train", *TINY, "--num_steps=100000", "--output_dir=run"],
        cwd=empty,
        env=outside() | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert launch.stdout is not None
    next(line for line in launch.stdout if " 2/100000 " in line)
    launch.send_signal(signal.SIGINT)
    rest, _ = launch.communicate(timeout=300)
    assert launch.returncode == 75 and "Traceback" not in rest
    assert json.loads((empty / "run/status.json").read_text())["status"] == "resume_me"


def test_each_package_of_an_extra_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    code = "".join(path.read_text() for path in (ROOT / "fms_fsdp").rglob("*.py"))
    for extra, packages in project["optional-dependencies"].items():
        for package in packages if extra not in ("test", "dev") else ():
            name = re.split(r"[<>=\[]", package)[0].replace("-", "_").replace("pyyaml", "yaml")
            assert re.search(rf"^ *(import|from) {name}\b", code, re.MULTILINE), package


def test_syntax_warning_of_other_package_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They appear wherever the bytecode of a package is not written."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for folder in ("site-packages", "own"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"odd_{folder[:3]}.py").write_text("text = '\\d'\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert importlib.import_module("odd_sit").text == "\\d"
    with pytest.raises(SyntaxError, match="invalid escape sequence|is an invalid escape"):
        importlib.import_module("odd_own")
