"""The shell scripts, with stand-ins for training and torchrun: which commands they run and how they end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from itertools import pairwise
from pathlib import Path

import pytest

from fms_fsdp.tools.prepare.inputs import find_files
from tests.cli import TINY, status
from tests.scripts.conftest import ROOT, environment, wait_for


def train(repo: Path, *flags: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", repo / "scripts/train.sh", *flags],
        cwd="/",
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def called(repo: Path) -> dict[str, object]:
    return json.loads((repo / "called.json").read_text())


def run_folder(repo: Path) -> Path:
    (folder,) = (repo / "runs").iterdir()
    return folder


def test_defaults_then_the_users_flags(repo: Path) -> None:
    ended = train(repo, "--num-steps=50", "--run_name=mine", SEQ_LENGTH="128")
    assert ended.returncode == 0, ended.stderr
    argv = called(repo)["argv"]
    assert argv[0] == "--model_variant=quickstart" and argv[-2:] == [
        "--num-steps=50",
        "--run_name=mine",
    ]
    assert (
        "--seq_length=128" in argv
        and "--data_path=data/quickstart" in argv
        and "--num_steps=700" not in argv
    )
    console = (repo / "runs/mine/console.txt").read_text()
    for word in ("said on stdout", "said on stderr"):
        assert word in console and word in ended.stdout
    assert "tensorboard --logdir runs/mine/tensorboard" in ended.stdout
    assert (
        "note: the page of curves could not be made" in ended.stderr
    )  # the stand-in reports nothing
    assert "expandable_segments" not in str(called(repo)["env"].get("PYTORCH_CUDA_ALLOC_CONF", ""))


@pytest.mark.parametrize(
    ("flags", "missing", "present"),
    [
        (
            ["--use_dummy_dataset=True"],
            ["--data_path", "--datasets", "--weights"],
            ["--model_variant", "--num_steps"],
        ),
        (
            ["--data-path", "elsewhere"],
            ["--datasets", "--weights"],
            ["--seq_length", "--data-path"],
        ),
        (["--config=my.toml"], ["--data_path", "--num_steps", "--model_variant"], ["--config"]),
        (
            ["--data_path=elsewhere", "--model_variant", "7b"],
            [
                "--seq_length",
                "--learning_rate",
                "--num_steps",
                "--batch_size",
                "--checkpoint_interval",
            ],
            ["--data_path", "--model_variant"],
        ),
        (["--data_path=elsewhere", "--init-from-hf=hf"], ["--model_variant", "--seq_length"], []),
        (
            ["--data_path=elsewhere", "--model_variant=quickstart"],
            [],
            ["--seq_length", "--num_steps"],
        ),
    ],
)
def test_data_of_the_users_own(
    repo: Path, flags: list[str], missing: list[str], present: list[str]
) -> None:
    (repo / "my.toml").write_text("num_steps = 7\n")
    shutil.rmtree(repo / "data")
    ended = train(repo, *flags)
    assert ended.returncode == 0, ended.stderr
    names = [argument.split("=")[0] for argument in called(repo)["argv"]]
    assert not set(missing) & set(names) and set(present) <= set(names)
    assert not (repo / "data").exists()


def test_another_model_on_own_data_gets_no_default_of_the_quickstart(repo: Path) -> None:
    """But variables of the environment stay; the quickstart's text keeps its recipe for any model."""
    ended = train(repo, "--data_path=own", MODEL_VARIANT="194m", SEQ_LENGTH="512", BATCH_SIZE="3")
    assert ended.returncode == 0, ended.stderr
    own = ["--model_variant=194m", "--seq_length=512", "--batch_size=3", "--data_path=own"]
    assert called(repo)["argv"] == own
    assert train(repo, "--hf_config=hf").returncode == 0
    names = [argument.split("=")[0] for argument in called(repo)["argv"]]
    assert "--model_variant" not in names and {"--seq_length", "--data_path"} <= set(names)


@pytest.mark.parametrize(
    ("flags", "interval"),
    [
        (["--data_path=own"], "--eval_interval=175"),
        (["--data-path", "own"], "--eval_interval=175"),
        (["--data_path=own", "--eval-interval=7"], "--eval-interval=7"),
        (["--data_path=other"], ""),
    ],
)
def test_own_data_with_a_held_out_part_is_validated(
    repo: Path, flags: list[str], interval: str
) -> None:
    for folder in ("own/validation/web", "other/web"):
        (repo / folder).mkdir(parents=True)
    ended = train(repo, *flags)
    assert ended.returncode == 0, ended.stderr
    assert [word for word in called(repo)["argv"] if "eval" in word] == (
        [interval] if interval else []
    )
    assert "--split=98,2" in ended.stdout


@pytest.mark.parametrize(
    ("flag", "dropped"),
    [
        ("--num_tokens=1M", "--num_steps"),
        ("--num-samples=9", "--num_steps"),
        ("--global_batch_size=4", "--batch_size"),
    ],
)
def test_a_default_that_contradicts_the_users_flag_is_dropped(
    repo: Path, flag: str, dropped: str
) -> None:
    assert train(repo, flag).returncode == 0
    argv = called(repo)["argv"]
    assert flag in argv and dropped not in [argument.split("=")[0] for argument in argv]
    assert (
        train(repo, "--num_tokens=1M", "--num_steps=5").returncode == 2
    )  # the user's own contradiction stays


@pytest.mark.parametrize(
    ("given", "dropped"),
    [
        (["--batch_size=4"], "--batch_size"),
        (["--batch-size=4"], "--batch_size"),
        (["--batch_size", "4"], "--batch_size"),
        (["-batch-size", "4"], "--batch_size"),
        (["--datasets=stdlib"], "--weights"),
        (["--checkpoint-schedule", "5"], "--checkpoint_interval"),
        (["--output_dir", "runs/mine"], "--output_dir"),
        (["--output-dir=runs/mine"], "--output_dir"),
    ],
)
def test_a_flag_of_the_users_in_any_spelling_is_given_once(
    repo: Path, given: list[str], dropped: str
) -> None:
    """Given twice with two values it would be refused."""
    ended = train(repo, *given, RUN_NAME="job-7")
    assert ended.returncode == 0, ended.stderr
    argv = [str(word) for word in called(repo)["argv"]]
    assert argv[-len(given) - ("output" not in dropped) :][: len(given)] == given
    names = [
        word.lstrip("-").replace("-", "_").partition("=")[0]
        for word in argv
        if word.startswith("-")
    ]
    assert len(set(names)) == len(names)
    assert (dropped[2:] in names) == (
        given[0].lstrip("-").replace("-", "_").startswith(dropped[2:])
    )


@pytest.mark.parametrize(
    ("flags", "sampled"),
    [
        ([], ["--sample_interval=350", "--sample_prompts=def main("]),
        (["--sample-interval=9"], ["--sample-interval=9"]),
        (["--sample_prompts=a,b"], ["--sample_interval=350", "--sample_prompts=a,b"]),
        (["--data_path=own"], ["--sample_interval=350"]),
        (["--data_path=without"], []),
        (["--data_path=own", "--model_variant=194m"], []),
        (["--use_dummy_dataset=True"], []),
    ],
)
def test_the_run_itself_writes_the_text_of_the_end(
    repo: Path, flags: list[str], sampled: list[str]
) -> None:
    """With the model in memory: what loads it again takes longer than a slow machine's user waits."""
    for folder in ("data/quickstart", "own", "without"):
        (repo / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("data/quickstart", "own"):
        (repo / folder / "tokenizer.model").touch()
    (repo / "runs/mine").mkdir(parents=True)
    texts = "--- step 350 ---\nearly\n--- step 700 ---\ndef main(x):\n    return x\n"
    (repo / "runs/mine/samples.txt").write_text(texts)
    ended = train(repo, *flags, "--run_name=mine")
    assert ended.returncode == 0, ended.stderr
    assert [word for word in called(repo)["argv"] if "sample" in word] == sampled
    assert (
        "sample  def main(x):\n            return x\n" in ended.stdout
        and "early" not in ended.stdout
    )
    assert re.search(r"^time    ((\w+ \d+ s, )*\w+ \d+ s: )?\d+ s in all$", ended.stdout, re.M)


def test_data_without_a_tokenizer_are_trained_on_without_samples(repo: Path) -> None:
    ended = train(repo)
    assert ended.returncode == 0, ended.stderr
    assert "sample" not in " ".join(called(repo)["argv"]) and "\nsample " not in ended.stdout


def test_the_quickstart_is_compiled_where_the_machine_can(repo: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.touch()
    compiler.chmod(0o755)
    headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    for changes, flags, compiled in (
        ({"CXX": str(compiler)}, [], ["--use_torch_compile=True"] if headers else []),
        ({"CXX": "no-such-compiler"}, [], []),
        ({"CXX": str(compiler)}, ["--use_torch_compile=False"], ["--use_torch_compile=False"]),
        ({"CXX": str(compiler)}, ["--use_dummy_dataset=True"], []),
    ):
        assert train(repo, *flags, **changes).returncode == 0
        assert [word for word in called(repo)["argv"] if "compile" in word] == compiled, (
            changes,
            flags,
        )


def test_the_hint_for_a_longer_run_names_its_length_once(repo: Path) -> None:
    ended = train(repo, "--num-steps", "5", "--run_name=my run")
    hint = "longer  bash scripts/train.sh --run_name=my\\ run --num_steps=3000 --lr_decay=3000"
    assert hint in ended.stdout
    ended = train(repo, "--num_tokens=9M", REASON="finished 40 steps")
    assert "longer  bash scripts/train.sh --num_steps=120 --lr_decay=120" in ended.stdout


@pytest.mark.parametrize(
    "name",
    [
        *("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MAX_RESTARTS", "MASTER_PORT"),
        *("SLURM_STEP_NUM_NODES", "SLURM_GPUS_ON_NODE"),
    ],
)
@pytest.mark.parametrize("text", ["x[$(touch ran)]", "abc", "-1", "08x", "9" * 30, "1\n2", "1.5"])
def test_a_number_of_the_environment_is_checked_before_any_arithmetic(
    repo: Path, name: str, text: str
) -> None:
    ended = train(repo, "--num_steps=3", **{name: text})
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert (
        ended.stderr.startswith(f"train.sh: error: {name} (")
        and "must be a whole number from" in ended.stderr
    )
    assert (
        not (repo / "ran").exists()
        and not (repo / "called.json").exists()
        and not (repo / "runs").exists()
    )


@pytest.mark.parametrize("name", ["../../x", "..", "a\nb", "\x1b[31m"])
def test_a_run_name_of_the_environment_is_a_bare_name(repo: Path, name: str) -> None:
    ended = train(repo, RUN_NAME=name)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1) and ended.stderr.startswith(
        "error: RUN_NAME="
    )
    assert (
        not (repo / "called.json").exists()
        and not (repo / "runs").exists()
        and not (repo.parent / "x").exists()
    )


def test_zero_processes_are_refused_and_zeros_in_front_are_not_octal(repo: Path) -> None:
    ended = train(repo, NPROC_PER_NODE="0")
    assert (
        ended.returncode == 2 and "NPROC_PER_NODE (0) must be a whole number from 1" in ended.stderr
    )
    assert train(repo, NPROC_PER_NODE="01", MAX_RESTARTS="00").returncode == 0


@pytest.mark.parametrize(
    ("plan", "status", "words"),
    [
        ("finished:0", 0, "made"),
        ("bad_input:2", 2, "bad input: as told"),
        ("bad_input:1", 2, "bad input: as told"),  # torchrun's own code
        ("resume_me:0", 75, "stopped early"),  # as under torchrun
        ("resume_me:75", 75, "stopped early"),
        ("failed:1", 1, "failed: as told"),
        ("running:137", 1, "failed"),
        ("crash", 1, "failed: see runs/"),
    ],
)
def test_exit_status(repo: Path, plan: str, status: int, words: str) -> None:
    ended = train(repo, PLAN=plan)
    assert ended.returncode == status, ended.stderr
    assert words in ended.stdout + ended.stderr


def test_an_old_status_is_not_believed(repo: Path) -> None:
    assert train(repo, PLAN="bad_input:2").returncode == 2
    assert train(repo, PLAN="crash").returncode == 1


def test_a_mistyped_flag_ends_before_any_work(repo: Path) -> None:
    shutil.rmtree(repo / "data")
    ended = train(repo, "--num_step=5")
    assert ended.returncode == 2
    assert ended.stderr.strip() == "error: --num_step is not a flag; did you mean --num_steps?"
    assert (
        not (repo / "data").exists()
        and not (repo / "runs").exists()
        and not (repo / "called.json").exists()
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stop_is_passed_on(repo: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        ["bash", repo / "scripts/train.sh"],
        env=environment(PLAN="wait"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        wait_for(repo / "waiting")
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 75, output
    assert "stopped early, the same command continues the run: as told" in output


def test_a_signal_to_the_whole_group_is_one_stop(repo: Path) -> None:
    """SLURM and terminals send it twice: the launch gets it once, and the script still records its output."""
    with subprocess.Popen(
        ["bash", repo / "scripts/train.sh"],
        env=environment(PLAN="count"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        wait_for(repo / "waiting")
        for _ in range(2):
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(0.3)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 75, output
    assert "heard 1" in output and "heard 1" in (run_folder(repo) / "console.txt").read_text()


def fake_programs(repo: Path) -> Path:
    """A python that only notes how torchrun is called, and a scontrol that lists the nodes."""
    folder = repo / "fake"
    folder.mkdir()
    python = folder / "python"
    python.write_text(
        '#!/bin/bash\nif [[ "$*" == *torch.distributed.run* ]]; then'
        f' printf "%s\\n" "$@" >>"{repo}/torchrun.txt";'
        f' printf "%s" "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" >"{repo}/store.txt"; exit 0; fi\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    scontrol = folder / "scontrol"
    scontrol.write_text(
        '#!/bin/bash\n[[ "$*" == "show hostnames node[3-4]" ]] && printf "node3\\nnode4\\n"\n'
    )
    for path in (python, scontrol):
        path.chmod(0o755)
    return folder


def test_several_processes_go_through_torchrun(repo: Path) -> None:
    fake = fake_programs(repo)
    assert train(repo, PYTHON=str(fake / "python"), NPROC_PER_NODE="4").returncode == 0
    words = (repo / "torchrun.txt").read_text().split("\n")
    assert words[:4] == ["-m", "torch.distributed.run", "--nproc_per_node=4", "--max_restarts=0"]
    assert words[5:8] == ["--standalone", "--local-addr=127.0.0.1", "main_training.py"]
    assert (repo / "store.txt").read_text() == "1"
    assert (
        train(repo, PYTHON=str(fake / "python"), MAX_RESTARTS="2").returncode == 0
    )  # one process that shall restart
    assert "--max_restarts=2" in (repo / "torchrun.txt").read_text()


def test_nodes_of_a_slurm_job_meet_at_the_first(repo: Path) -> None:
    fake = fake_programs(repo)
    slurm = {
        "SLURM_JOB_ID": "123456",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "node[3-4]",
        "SLURM_PROCID": "1",
        "SLURM_GPUS_ON_NODE": "8",
        "NPROC_PER_NODE": "",
    }
    path = f"{fake}:{os.environ['PATH']}"
    ended = train(repo, PYTHON=str(fake / "python"), PATH=path, **slurm)
    assert ended.returncode == 0, ended.stderr
    words = (repo / "torchrun.txt").read_text().split("\n")
    assert "--nnodes=2" in words and "--nproc_per_node=8" in words and "--rdzv_id=123456" in words
    assert "--rdzv_endpoint=node3:15456" in words and "--standalone" not in words
    assert "--rdzv_conf=is_host=0,read_timeout=600" in words


def test_nodes_without_a_scheduler_are_named_by_variables(repo: Path) -> None:
    fake = fake_programs(repo)
    nodes = {"PYTHON": str(fake / "python"), "NNODES": "2", "NODE_RANK": "0"}
    ended = train(repo, **nodes)
    assert ended.returncode == 2 and "error: NNODES (2) needs NODE_RANK" in ended.stderr
    ended = train(repo, **nodes, MASTER_ADDR="first", MASTER_PORT="1234")
    assert ended.returncode == 0, ended.stderr
    words = (repo / "torchrun.txt").read_text().split("\n")
    assert (
        "--nnodes=2" in words and "--rdzv_endpoint=first:1234" in words and "--rdzv_id=run" in words
    )
    assert "--rdzv_conf=is_host=1,read_timeout=600" in words


def test_a_name_from_the_environment_is_the_weakest(repo: Path) -> None:
    """As train.slurm gives it; and PREPARE_ONLY prints the folder, and nothing else, without training."""
    (repo / "my.toml").write_text('run_name = "of-the-file"\n')
    for flags, folder in (
        (["--num_steps=3"], "runs/job-7"),
        (["--run_name=mine"], "runs/mine"),
        (["--config=my.toml"], "runs/of-the-file"),
    ):
        ended = train(repo, *flags, RUN_NAME="job-7", PREPARE_ONLY="1")
        assert (ended.returncode, ended.stdout) == (0, folder + "\n"), ended.stderr
        assert not (repo / "called.json").exists()
    assert train(repo, RUN_NAME="job-7").returncode == 0
    assert (
        called(repo)["argv"][-1] == "--output_dir=runs/job-7"
        and (repo / "runs/job-7/status.json").exists()
    )


def test_a_site_file_is_read_first(repo: Path) -> None:
    (repo / "scripts/site.sh").write_text("export NCCL_SOCKET_IFNAME=ib0\n")
    assert train(repo).returncode == 0
    assert called(repo)["env"]["NCCL_SOCKET_IFNAME"] == "ib0"


def test_what_is_shared_is_made_once(repo: Path) -> None:
    """Two at once, as two jobs or array tasks start: the second waits for the first and makes nothing."""
    code = (
        "source scripts/environment.sh; make() { [[ -f made ]] && return; sleep 0.5; echo x >>made; }\n"
        "under_lock make & under_lock make & wait; under_lock make"
    )
    assert subprocess.run(["bash", "-c", code], cwd=repo, timeout=30).returncode == 0
    assert (repo / "made").read_text() == "x\n"


def test_a_python_without_the_packages_is_refused(repo: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    ended = train(repo, PYTHON=str(tmp_path / "bare/bin/python"))
    assert ended.returncode == 1 and "lacks packages of pyproject.toml" in ended.stderr


def test_the_environment_is_judged_by_versions(repo: Path) -> None:
    def satisfies(*extras: str) -> bool:
        code = f'source scripts/environment.sh && satisfies "{sys.executable}" ' + " ".join(extras)
        return subprocess.run(["bash", "-c", code], cwd=repo).returncode == 0

    assert satisfies()
    started = time.monotonic()
    assert satisfies("dev")
    assert time.monotonic() - started < 2
    project = (repo / "pyproject.toml").read_text()
    (repo / "pyproject.toml").write_text(project.replace('"fire>=', '"fire>=99.'))
    assert not satisfies()
    (repo / "pyproject.toml").write_text(project.replace('"fire>=', '"no-such-package-here>='))
    assert not satisfies()


def test_the_environment_is_made_with_the_constraints(repo: Path, tmp_path: Path) -> None:
    """With a stand-in for python3: which commands make .venv, and that a failure of pip is told."""
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "python3").write_text(
        "#!/bin/bash\n"
        'if [[ "$1 $2" == "-m venv" ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit 0; fi\n'
        'if [[ "$1 $2" == "-m pip" && "$3" == "install" ]]; then printf "%s\\n" "$@" >"$LOG"; exit 3; fi\n'
        'if [[ "$1" == "-c" && "$2" == *version_info* && $# == 2 ]]; then exit 0; fi\n'
        '[[ "$1" == "--version" ]] && echo Python 3.12.0\n'
        'exit $([[ "$1" == --version ]] && echo 0 || echo 1)\n'
    )
    (fake / "python3").chmod(0o755)
    env = environment(LOG=str(tmp_path / "pip.txt"), PATH=f"{fake}:/usr/bin:/bin")
    del env["PYTHON"]
    ended = subprocess.run(
        ["bash", repo / "scripts/test.sh"], env=env, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1 and "pip could not install the packages" in ended.stderr
    words = (tmp_path / "pip.txt").read_text().splitlines()
    assert f"{repo}/constraints.txt" in words and f"{repo}[dev]" in words and "--no-input" in words
    assert "installing packages into .venv (dev)" in ended.stderr


@pytest.mark.slow
def test_two_nodes_without_a_scheduler_train(tmp_path: Path) -> None:
    """Real training: two launches on this machine, a node each; a signal to one of them stops both."""
    folder = tmp_path / "run"
    flags = [*TINY, "--num_steps=100000", f"--output_dir={folder}"]
    nodes = [
        subprocess.Popen(
            ["bash", ROOT / "scripts/train.sh", *flags],
            env=environment(
                NNODES="2", NODE_RANK=rank, MASTER_ADDR=socket.gethostname(), OMP_NUM_THREADS="1"
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    wait_for(folder / "metrics.jsonl", patience_s=120)
    nodes[1].send_signal(signal.SIGUSR1)
    outputs = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [75, 75], outputs
    assert "devices: 2 x cpu" in "".join(outputs) and "stopped by" in status(folder)["reason"]
    assert (folder / "checkpoints" / f"step_{status(folder)['step']}").is_dir()


@pytest.mark.slow
def test_the_quickstart_leaves_machine_made_tables_out() -> None:
    script = (ROOT / "scripts/train.sh").read_text()
    skipped = "".join(re.findall(r"skip\+?='(.*)'", script)).split(",")
    stdlib = sysconfig.get_paths()["stdlib"]
    kept = {file.name: file.size for file in find_files(stdlib, ("*.py",), skipped)}
    assert {"argparse.py", "json/decoder.py"} <= kept.keys() and sum(kept.values()) > 5e6
    tables = (
        "_sysconfigdata",
        "pydoc_data/",
        "encodings/",
        "stringprep",
        "re/_casefix",
        "html/entities",
    )
    assert not [name for name in kept if name.startswith(tables)]


def test_quickstart_text_is_the_same_each_time(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        target = tmp_path / name / "prose.jsonl"
        ended = subprocess.run(
            [sys.executable, ROOT / "scripts/quickstart_text.py", target],
            capture_output=True,
            text=True,
            check=True,
        )
        made.append((ended.stdout.replace(str(target), "PROSE"), target.read_bytes()))
    assert made[0] == made[1]
    inputs, prose = made[0]
    assert (
        inputs.startswith("stdlib=")
        and "packages=" in inputs
        and inputs.strip().endswith("prose=PROSE")
    )
    assert 4_000_000 < len(prose) < 9_000_000
    assert all("text" in json.loads(line) for line in prose.splitlines()[:50])


@pytest.mark.parametrize(
    "script",
    [
        "train.sh",
        "train.slurm",
        "cron.slurm",
        "pulse.sh",
        "run_folder.sh",
        "test.sh",
        "check.sh",
        "environment.sh",
        "../.ci/run",
    ],
)
def test_scripts_are_sound(script: str) -> None:
    path = ROOT / "scripts" / script
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    if script != "environment.sh":
        assert os.access(path, os.X_OK) and "set -euo pipefail" in path.read_text()
    shellcheck = shutil.which(
        "shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    assert shellcheck, "shellcheck comes with the extra dev"
    ended = subprocess.run(
        [shellcheck, "-x", path], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stdout


def test_constraints_pin_what_pyproject_names() -> None:
    import re
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    normal = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    for requirement in named:
        name = re.match(r"[A-Za-z0-9_.-]+", requirement)
        assert name and re.sub(r"[-_.]+", "-", name[0]).lower() in normal, requirement
    assert pins["torch"] == "2.13.0"


@pytest.mark.parametrize(
    "script", sorted(path.name for path in (ROOT / "scripts").iterdir() if path.is_file())
)
def test_no_sentence_of_a_comment_is_cut_in_the_middle(script: str) -> None:
    """The first word of a line did not fit behind the line before; indented lines stand by themselves."""
    lines = (ROOT / "scripts" / script).read_text().splitlines()
    for line, following in pairwise(lines):
        goes_on = re.match(r"# (?!shellcheck)\S", line) and re.match(r"# (?!----)[a-z-]", following)
        if goes_on and line[-1] not in ".:;)":
            assert len(f"{line} {following.split()[1]}") > 108, line
