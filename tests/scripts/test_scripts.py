"""The shell scripts, with stand-ins for training and torchrun: the commands they run and their exit status."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.flag import non_defaults
from fms_fsdp.config.parse import flag_texts, parse_flags
from fms_fsdp.run.run_dir import lock_folder
from scripts import quickstart_text
from scripts.quickstart import reads_text, train_flags
from scripts.quickstart_text import collect, find_inputs
from scripts.results import VARIABLES, last_losses
from tests.cases import cases
from tests.scripts.conftest import ROOT, environment, fake_python3, wait_for


def train(repo: Path, *flags: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", repo / "scripts/train.sh", *flags],
        cwd="/",
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


def called(repo: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((repo / "called.json").read_text())
    return content


def names_of(argv: list[str]) -> list[str]:
    """Returns the names of the flags, in one spelling."""
    names = (word.partition("=")[0].lstrip("-") for word in argv if word.startswith("-"))
    return [f"--{name.replace('-', '_')}" for name in names]


def changed(repo: Path) -> dict[str, Any]:
    """Returns the values of the training's flags that are not defaults."""
    values: dict[str, Any] = called(repo)["changed"]
    return values


def run_folder(repo: Path) -> Path:
    (folder,) = (repo / "runs").iterdir()
    return folder


def test_defaults_then_the_users_flags(repo: Path) -> None:
    ended = train(repo, "--num-steps=50", "--run_name=mine", SEQ_LENGTH="64")
    assert ended.returncode == 0, ended.stderr
    argv = called(repo)["argv"]
    assert argv[:2] == ["--config=quickstart,quickstart_text", "--seq_length=64"]
    assert argv[-2:] == ["--num-steps=50", "--run_name=mine"]
    values = changed(repo)
    assert (values["model_variant"], values["batch_size"]) == ("quickstart_2m", 16)
    assert (values["seq_length"], values["num_steps"]) == (64, 50)
    assert values["use_torch_compile"] is False
    assert (values["data_path"], values["weights"]) == ("data/quickstart-2", [2, 2, 1])
    console = (repo / "runs/mine/console.txt").read_text()
    for word in ("said on stdout", "said on stderr"):
        assert word in console and word in ended.stdout
    assert "tensorboard --logdir runs/mine/tensorboard" in ended.stdout
    assert (
        "note: the page of curves could not be made" in ended.stderr
    )  # the stand-in reports nothing
    assert "expandable_segments" not in str(called(repo)["env"].get("PYTORCH_CUDA_ALLOC_CONF", ""))


def planned(repo: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> dict[str, Any]:
    """Returns the values of `changed` for these flags, without a start of the script."""
    monkeypatch.chdir(repo)
    passed_on = train_flags(["--data_path=data/quickstart-2"], flags)
    values = non_defaults(parse_flags(TrainConfig, passed_on))
    as_json: dict[str, Any] = json.loads(json.dumps(values))
    return as_json


SIZES = "seq_length learning_rate num_steps batch_size checkpoint_interval"


@pytest.mark.parametrize(
    ("flags", "missing", "present"),
    [
        ("--use_dummy_dataset=True", "data_path", "model_variant num_steps"),
        ("--data-path elsewhere", "", "seq_length"),
        ("--config=my.toml", "data_path model_variant seq_length batch_size", "num_steps"),
        ("--data_path=elsewhere --model_variant 194m", SIZES, "model_variant"),
        ("--data_path=elsewhere --init-from-hf=hf", "model_variant seq_length", ""),
    ],
)
def test_own_data_gets_no_quickstart_defaults(
    repo: Path, monkeypatch: pytest.MonkeyPatch, flags: str, missing: str, present: str
) -> None:
    (repo / "my.toml").write_text("num_steps = 7\n")
    names = set(planned(repo, monkeypatch, *flags.split()))
    assert set(present.split()) <= names
    assert not {*missing.split(), "datasets", "weights"} & names
    assert not reads_text(flag_texts(TrainConfig, flags.split()))


def test_own_data_prepares_no_text(repo: Path) -> None:
    shutil.rmtree(repo / "data")
    ended = train(repo, "--use_dummy_dataset=True")
    assert ended.returncode == 0, ended.stderr
    names = set(changed(repo))
    assert {"model_variant", "num_steps"} <= names
    assert not {"data_path", "datasets", "weights"} & names
    assert not (repo / "data").exists()


def test_environment_variables_stay_with_own_data(repo: Path) -> None:
    """The quickstart's text keeps its recipe for any model."""
    ended = train(repo, "--data_path=own", MODEL_VARIANT="194m", SEQ_LENGTH="512", BATCH_SIZE="3")
    assert ended.returncode == 0, ended.stderr
    own = ["--model_variant=194m", "--seq_length=512", "--batch_size=3", "--data_path=own"]
    assert called(repo)["argv"] == own
    assert train(repo, "--hf_config=hf").returncode == 0
    values = changed(repo)
    assert "model_variant" not in values and values["data_path"] == "data/quickstart-2"
    assert values["seq_length"] == 128 and "use_torch_compile" not in values


@pytest.mark.parametrize(
    ("flags", "interval"),
    [
        (["--data-path", "own"], ["--eval_interval=130"]),
        (["--data_path=own", "--eval-interval=7"], ["--eval-interval=7"]),
        (["--data_path=other"], []),
    ],
)
def test_own_held_out_data_is_evaluated(repo: Path, flags: list[str], interval: list[str]) -> None:
    for folder in ("own/validation/web", "other/web"):
        (repo / folder).mkdir(parents=True)
    ended = train(repo, *flags)
    assert ended.returncode == 0, ended.stderr
    assert [word for word in called(repo)["argv"] if "eval" in word] == interval
    assert "--split=98,2" in ended.stdout


@cases("""
    flag | script | dropped
    --num_tokens=1M | | num_steps
    --num_epochs=2 | --num_steps=5 | num_steps
    --global_batch_size=4 | | batch_size
    --datasets=stdlib | --weights=1,1,1 | weights
    --hf_config=hf | --model_variant=194m | model_variant
    --data_path=own | --datasets=stdlib | datasets
    --num_epochs=2 | --datasets=stdlib | weights
""")
def test_default_contradicting_a_flag_is_dropped(flag: str, script: str, dropped: str) -> None:
    """A default of the preset, or a flag that train.sh sets."""
    flags = train_flags(["--data_path=data/quickstart-2", *script.split()], [flag])
    values = non_defaults(parse_flags(TrainConfig, flags))
    assert flag.partition("=")[0].removeprefix("--") in values and dropped not in values


def test_contradicting_flags_of_the_user_are_rejected(repo: Path) -> None:
    assert train(repo, "--num_tokens=1M", "--num_steps=5").returncode == 2


@cases("""
    given | name
    --batch-size=4 | batch_size
    -batch-size 4 | batch_size
    --eval-interval 5 | eval_interval
""")
def test_flag_in_any_spelling_is_passed_once(given: str, name: str) -> None:
    """Twice with two values is an error."""
    script = ["--data_path=data/quickstart-2", f"--{name}=7"]
    config = parse_flags(TrainConfig, train_flags(script, given.split()))
    assert non_defaults(config)[name] == int(given[-1])


@pytest.mark.parametrize(
    ("flags", "sampled"),
    [
        ([], {"sample_interval": 195, "sample_prompts": ["def main("]}),
        (["--sample-interval=9"], {"sample_interval": 9}),
        (["--sample_prompts=a,b"], {"sample_interval": 195, "sample_prompts": ["a", "b"]}),
        (["--data_path=own"], {"sample_interval": 195}),
        (["--data_path=without"], {}),
        (["--data_path=own", "--model_variant=194m"], {}),
    ],
)
def test_samples_are_those_that_the_data_allow(
    repo: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], sampled: dict[str, Any]
) -> None:
    make_data(repo)
    values = planned(repo, monkeypatch, *flags)
    assert {name: v for name, v in values.items() if name.startswith("sample_")} == sampled


def make_data(repo: Path) -> None:
    """Makes the folders of three corpora, one of them without a tokenizer."""
    for folder in ("data/quickstart-2", "own", "without"):
        (repo / folder).mkdir(parents=True, exist_ok=True)
        if folder != "without":
            (repo / folder / "tokenizer.model").touch()


def test_run_generates_text_at_its_end(repo: Path) -> None:
    """With the model in memory: to load it again takes longer than a slow machine's user waits."""
    make_data(repo)
    (repo / "runs/mine").mkdir(parents=True)
    texts = "--- step 195 ---\nearly\n--- step 390 ---\ndef main(x):\n    return x\n"
    (repo / "runs/mine/samples.txt").write_text(texts)
    ended = train(repo, "--run_name=mine")
    assert ended.returncode == 0, ended.stderr
    samples = {name: v for name, v in changed(repo).items() if name.startswith("sample_")}
    assert samples == {"sample_interval": 195, "sample_prompts": ["def main("]}
    assert "sample        def main(x):\n                  return x\n" in ended.stdout
    assert "early" not in ended.stdout
    assert re.search(
        r"^time          ((\w+ \d+ s, )*\w+ \d+ s: )?\d+ s in total$", ended.stdout, re.M
    )


def test_data_without_tokenizer_generates_no_text(repo: Path) -> None:
    ended = train(repo)
    assert ended.returncode == 0, ended.stderr
    assert "sample_interval" not in changed(repo) and "\nsample " not in ended.stdout
    assert "sample_prompts" not in changed(repo)


def test_hint_for_longer_run_names_its_length(repo: Path) -> None:
    ended = train(repo, "--num-steps", "5", "--run_name=my run")
    hint = "train longer  bash scripts/train.sh '--run_name=my run' --num_steps=9 --lr_decay=9\n"
    assert hint in ended.stdout
    ended = train(
        repo, "--num_tokens=9M", "--lr_schedule=constant", RUN_NAME="my run", NUM_STEPS="7"
    )
    command = "bash scripts/train.sh --lr_schedule=constant --num_steps=9"
    assert f"train longer  RUN_NAME='my run' {command}\n" in ended.stdout


def test_hint_knows_the_variables_of_the_script() -> None:
    text = (ROOT / "scripts/train.sh").read_text().partition("Where to train")[0]
    names = re.findall(r"\$\{([A-Z_]+):-", text)
    assert {*names, "RUN_NAME"} - {"NUM_STEPS"} == {*VARIABLES}


def test_last_loss_is_of_the_last_launch(tmp_path: Path) -> None:
    """A launch reports its first step, which may be before the last step of the launch before."""
    path = tmp_path / "metrics.jsonl"
    reports = [(1, 1), (1, 10), (1, 20)]
    lines = [{"attempt": a, "step": step, "loss_mean": 5.0 - a} for a, step in reports]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert last_losses(path) == "train loss 4.0000 (last 10 steps)"
    with path.open("a") as file:
        file.write(json.dumps({"attempt": 2, "step": 11, "loss_mean": 3.0}) + "\n")
    assert last_losses(path) == "train loss 3.0000 (last 1 step)"


def test_wrong_number_in_environment_is_rejected(repo: Path) -> None:
    shutil.rmtree(repo / "data")
    ended = train(repo, NNODES="x[$(touch ran)]")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "error: NNODES=x[$(touch ran)] must be a whole number from 1" in ended.stderr
    assert not {"ran", "data", "called.json", "runs"} & {path.name for path in repo.iterdir()}


@pytest.mark.parametrize("name", ["../../x", "..", "a\nb", "\x1b[31m"])
def test_run_name_variable_is_a_bare_name(repo: Path, name: str) -> None:
    ended = train(repo, RUN_NAME=name)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith("error: RUN_NAME=") and not (repo.parent / "x").exists()
    assert not {"called.json", "runs"} & {path.name for path in repo.iterdir()}


def test_leading_zeros_are_not_octal(repo: Path) -> None:
    assert train(repo, NPROC_PER_NODE="01", MAX_RESTARTS="00").returncode == 0


@pytest.mark.parametrize(
    ("plan", "status", "words"),
    [
        ("finished:0", 0, "your text  "),
        ("bad_input:2", 2, "bad_input: as told"),
        ("bad_input:1", 2, "bad_input: as told"),  # torchrun's own code
        ("resume_me:0", 75, "resume_me: as told"),  # as under torchrun
        ("failed:1", 1, "failed: as told"),
        ("crash", 1, "failed: see runs/"),
    ],
)
def test_exit_status(repo: Path, plan: str, status: int, words: str) -> None:
    ended = train(repo, PLAN=plan)
    assert ended.returncode == status, ended.stderr
    output = ended.stdout + ended.stderr
    assert words in output and ("your text  " in output) == (status == 0)


def test_old_status_is_ignored(repo: Path) -> None:
    assert train(repo, PLAN="bad_input:2").returncode == 2
    assert train(repo, PLAN="crash").returncode == 1


def test_mistyped_flag_is_rejected_before_any_work(repo: Path) -> None:
    shutil.rmtree(repo / "data")
    ended = train(repo, "--num_step=5")
    assert ended.returncode == 2
    assert ended.stderr.strip() == "error: --num_step is not a flag; did you mean --num_steps?"
    assert not {"data", "runs", "called.json"} & {path.name for path in repo.iterdir()}


def started(plan: str, repo: Path) -> subprocess.Popen[str]:
    """Starts train.sh in a group of its own, and waits until its training runs."""
    process = subprocess.Popen(
        ["bash", repo / "scripts/train.sh"],
        env=environment(PLAN=plan),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(repo / "waiting")
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_stop_signal_is_passed_on(repo: Path, number: signal.Signals) -> None:
    process = started("wait", repo)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 75, output
    assert "resume_me: as told" in output


def test_signal_to_the_group_is_one_stop(repo: Path) -> None:
    """SLURM and terminals send it twice: the launch gets it once, and the script still records its output."""
    process = started("count", repo)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.3)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 75, output
    assert "heard 1" in output and "heard 1" in (run_folder(repo) / "console.txt").read_text()


def test_run_name_in_environment_is_a_default(repo: Path) -> None:
    """As train.slurm gives it; and PREPARE_ONLY prints the folder, and nothing else, without training."""
    (repo / "my.toml").write_text('run_name = "of-the-file"\n')
    for flags, folder in (
        (["--num_steps=3"], "runs/job-7"),
        (["--run_name=mine"], "runs/mine"),
        (["--config=my.toml"], "runs/of-the-file"),
        (["--output_dir", "runs/other"], "runs/other"),
    ):
        ended = train(repo, *flags, RUN_NAME="job-7", PREPARE_ONLY="1")
        assert (ended.returncode, ended.stdout) == (0, folder + "\n"), ended.stderr
        assert not (repo / "called.json").exists()
    assert train(repo, RUN_NAME="job-7").returncode == 0
    assert (
        called(repo)["argv"][-1] == "--output_dir=runs/job-7"
        and (repo / "runs/job-7/status.json").exists()
    )


def test_site_file_is_read_first(repo: Path) -> None:
    """train.slurm took its output for a part of the run directory's name."""
    (repo / "scripts/site.sh").write_text("export NCCL_SOCKET_IFNAME=ib0\necho Loading cuda/13\n")
    prepared = train(repo, "--run_name=mine", PREPARE_ONLY="1")
    assert prepared.stdout == "runs/mine\n" and "Loading cuda/13" in prepared.stderr
    assert train(repo).returncode == 0
    assert called(repo)["env"]["NCCL_SOCKET_IFNAME"] == "ib0"


def test_python_without_packages_is_rejected(repo: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    ended = train(repo, PYTHON=str(tmp_path / "bare/bin/python"))
    assert ended.returncode == 1 and "lacks packages of pyproject.toml" in ended.stderr


def test_environment_is_checked_by_versions(repo: Path) -> None:
    def has_packages(*extras: str) -> bool:
        command = [sys.executable, "scripts/has_packages.py", *extras]
        return subprocess.run(command, cwd=repo).returncode == 0

    assert has_packages()
    assert has_packages("test")
    project = (repo / "pyproject.toml").read_text()
    (repo / "pyproject.toml").write_text(project.replace('"fire>=', '"fire>=99.'))
    assert not has_packages()
    (repo / "pyproject.toml").write_text(project.replace('"fire>=', '"no-such-package-here>='))
    assert not has_packages()
    (repo / "pyproject.toml").write_text(project.replace('"pytest>=', '"pytest>=99.'))
    assert has_packages() and not has_packages("test") and not has_packages("dev")


def test_environment_is_made_with_constraints(repo: Path, tmp_path: Path) -> None:
    """With a stand-in for python3: which commands make .venv, and that a failure of pip is told."""
    path = fake_python3(tmp_path / "bin", 'printf "%s\\n" "$@" >"$LOG"')
    env = environment(LOG=str(tmp_path / "pip.txt"), PATH=path)
    del env["PYTHON"]
    ended = subprocess.run(
        ["bash", repo / "scripts/test.sh"], env=env, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 1 and "pip could not install the packages" in ended.stderr
    words = (tmp_path / "pip.txt").read_text().splitlines()
    assert f"{repo}/constraints.txt" in words and f"{repo}[test]" in words and "--no-input" in words
    assert "Installing packages into .venv (test)" in ended.stderr


def test_prose_is_documentation_and_docstrings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text once and in the same order; short texts and tests are skipped."""
    monkeypatch.setattr(quickstart_text, "DOCUMENTED", ())
    page, docstring = "A page. " * 60, "A docstring. " * 40
    for name, text in {
        "site/one/METADATA": page,
        "site/one/copy.md": page,
        "site/one/short.rst": "Too short.",
        "stdlib/module.py": f'"""{docstring}"""\n',
        "stdlib/tests/module.py": f'"""{docstring} Of a test."""\n',
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("first", "second"):
        collect(tmp_path / "stdlib", tmp_path / "site", tmp_path / name)
    first = (tmp_path / "first").read_text()
    assert first == (tmp_path / "second").read_text()
    texts = [json.loads(line)["text"].strip() for line in first.splitlines()]
    assert sorted(texts) == [docstring.strip(), page.strip()]


@pytest.mark.slow  # reads all packages twice
def test_quickstart_text_is_deterministic(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        target = tmp_path / name / "prose.jsonl"
        inputs = find_inputs(target)
        made.append((inputs.replace(str(target), "PROSE"), target.read_bytes()))
    assert made[0] == made[1]
    inputs, prose = made[0]
    assert inputs.startswith("stdlib=")
    assert "packages=" in inputs
    assert inputs.endswith("prose=PROSE")
    assert 4_000_000 < len(prose) < 9_000_000
    assert all("text" in json.loads(line) for line in prose.splitlines()[:50])


def test_text_is_prepared_once(repo: Path) -> None:
    """Two at once, as two jobs or array tasks start: the second waits, and finds the text made."""
    shutil.rmtree(repo / "data/quickstart-2")
    (repo / "data/quickstart_text").mkdir()
    lock = lock_folder(repo / "data/quickstart_text")
    second = subprocess.Popen(
        ["bash", repo / "scripts/train.sh"],
        env=environment(PREPARE_ONLY="1"),
        stdout=subprocess.PIPE,
        text=True,
    )
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(2)
    (repo / "data/quickstart-2/meta").mkdir(parents=True)
    (repo / "data/quickstart-2/meta/counts.csv").touch()
    lock.close()
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 0 and output.startswith("runs/")
    assert not (repo / "data/quickstart_text/prose.jsonl").exists()


SCRIPTS = "train.sh train.slurm cron.slurm pulse.sh run_folder.sh test.sh check.sh environment.sh"


@pytest.mark.parametrize("script", [*SCRIPTS.split(), "../.ci/run"])
def test_scripts_pass_shellcheck(script: str) -> None:
    path = ROOT / "scripts" / script
    if script != "environment.sh":
        assert os.access(path, os.X_OK) and "set -euo pipefail" in path.read_text()
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=folders)
    assert shellcheck, "shellcheck comes with the extra test"
    ended = subprocess.run(
        [shellcheck, "-x", path], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout


def test_constraints_pin_all_requirements() -> None:
    def name_of(requirement: str) -> str:
        return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *extras["test"], *extras["dev"][1:]]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert set(map(name_of, named)) <= set(map(name_of, lines)) and "torch==2.13.0" in lines
