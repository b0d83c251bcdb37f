"""The package as a user gets it: a wheel, made of the sdist, works in an empty folder elsewhere."""

from __future__ import annotations

import importlib
import json
import os
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

IMPORTED_AS = {"lm-eval": "lm_eval"}


class Built(NamedTuple):
    """An sdist, the wheel made of it, the programs of an environment with the wheel, and what git tracks."""

    sdist: Path
    wheel: Path
    programs: Path
    tracked: list[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("package")
    tracked = copy_tracked(folder / "copy")
    make_sdist = "import setuptools.build_meta as build; build.build_sdist('../dist')"
    quiet = {"cwd": folder / "copy", "check": True, "capture_output": True, "env": outside()}
    subprocess.run([sys.executable, "-c", make_sdist], **quiet)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    shutil.rmtree(folder / "copy")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*pip, f"--wheel-dir={folder / 'dist'}", sdist], **quiet | {"cwd": folder})
    (wheel,) = (folder / "dist").glob("*.whl")
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
def test_the_wheel_holds_the_package_and_the_sdist_the_repository(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == {name for name in built.tracked if name.startswith("fms_fsdp/")} | {
        "main_training.py"
    }
    assert {
        "fms_fsdp/py.typed",
        "fms_fsdp/config/other_names.toml",
        "fms_fsdp/config/presets/bench.toml",
    } <= held
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {name for name in built.tracked if not name.startswith(".")} <= names


@pytest.mark.slow
def test_the_program_trains_in_an_empty_folder(built: Built, empty: Path) -> None:
    done = call(built, empty, "fms-fsdp", "train", *TINY, "--num_steps=2", "--run_name=first")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in empty.iterdir()] == ["runs"]
    assert json.loads((empty / "runs/first/status.json").read_text())["status"] == "finished"
    config = empty / "runs/first/config.json"
    by_module = [
        "-m",
        "main_training",
        f"--config={config},profile",
        "--num_steps=6",
        "--run_name=second",
    ]
    two = call(
        built,
        empty,
        "torchrun",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc_per_node=2",
        *by_module,
    )
    assert two.returncode == 0, two.stderr
    resolved = json.loads((empty / "runs/second/config.json").read_text())["resolved"]
    assert resolved["world_size"] == 2
    assert list(
        (empty / "runs/second/profile_traces").iterdir()
    )  # the shipped file profile.toml asks for it


@pytest.mark.slow
def test_the_program_prepares_own_text_and_trains_on_it(built: Built, empty: Path) -> None:
    (empty / "text").mkdir()
    (empty / "text" / "a.txt").write_text("All that is told is a tale. " * 200)
    made = call(
        built, empty, "fms-fsdp", "prepare", "--input=own=text", "--output=data", "--tokenizer=byte"
    )
    assert made.returncode == 0, made.stderr
    flags = [
        "--model_variant=tiny",
        "--data_path=data",
        "--datasets=own",
        "--seq_length=64",
        "--num_steps=2",
    ]
    done = call(built, empty, "fms-fsdp", "train", *flags, "--batch_size=2", "--output_dir=out")
    assert done.returncode == 0 and (empty / "out/checkpoints/step_2").is_dir(), done.stderr


QUESTIONS = {
    "--nmu_steps=3 --num_workers=1": 2,
    "--model_variant": 2,
    "--config=nosuch": 2,
    "--help": 0,
    "--version": 0,
    "--list_variants": 0,
    "": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "status"), QUESTIONS.items())
def test_train_answers_as_the_script_does_and_before_torch_is_imported(
    built: Built, empty: Path, flags: str, status: int
) -> None:
    imports = {"PYTHONPROFILEIMPORTTIME": "1"}
    ours = call(built, empty, "fms-fsdp", "train", *flags.split(), **imports)
    script = call(built, empty, "python", str(ROOT / "main_training.py"), *flags.split())
    assert ours.returncode == script.returncode == status
    assert ours.stdout == script.stdout.replace("python main_training.py", "fms-fsdp train")
    lines = ours.stderr.splitlines()
    assert [
        line for line in lines if not line.startswith("import time:")
    ] == script.stderr.splitlines()
    if flags:
        assert not [line for line in lines if re.search(r"\| +torch$", line)]
    assert not list(empty.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("program", ["fms-fsdp", "python -m fms_fsdp"])
def test_a_usage_names_the_program_as_it_was_called(
    built: Built, empty: Path, program: str
) -> None:
    for words, usage in (("", ""), ("train --help", " train"), ("prepare --help", " prepare")):
        asked = call(built, empty, *program.split(), *words.split())
        assert f"usage: {program}{usage} " in asked.stdout, asked.stdout + asked.stderr
    assert call(built, empty, *program.split(), "--version").stdout.startswith(
        "fms_fsdp 0.2.0, torch "
    )


@pytest.mark.slow
def test_ctrl_c_saves_and_ends_with_the_status_of_the_script(built: Built, empty: Path) -> None:
    flags = [*TINY, "--num_steps=100000", "--output_dir=run"]
    launch = subprocess.Popen(
        [built.programs / "fms-fsdp", "train", *flags],
        cwd=empty,
        env=outside() | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert launch.stdout is not None
    next(line for line in launch.stdout if " 2/100000 " in line)
    os.kill(launch.pid, signal.SIGINT)
    rest, _ = launch.communicate(timeout=60)
    assert launch.returncode == 75 and "Traceback" not in rest
    assert json.loads((empty / "run/status.json").read_text())["status"] == "resume_me"


def test_product_code_imports_each_package_of_an_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    code = "".join(path.read_text() for path in (ROOT / "fms_fsdp").rglob("*.py"))
    for extra in extras.keys() - {"dev"}:
        for package in extras[extra]:
            name = re.split(r"[<>=\[]", package)[0]
            pattern = rf"^ *(import|from) {IMPORTED_AS.get(name, name)}\b"
            assert re.search(pattern, code, re.MULTILINE), package


def test_a_syntax_warning_of_another_package_is_no_error_of_a_test(
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
