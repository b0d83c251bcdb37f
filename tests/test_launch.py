"""The launcher (fms_fsdp/launch.py): commands from variables, and children that stand in for training."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fms_fsdp.launch import Child, build_command, exit_status, read_nodes
from tests.cases import cases
from tests.cli import ROOT
from tests.scripts.conftest import wait_for

# A main_training.py: acquires the run directory, then does as PLAN says.
TRAINING = """
import json, os, signal, sys, time
from pathlib import Path
run = Path(next(flag for flag in sys.argv if flag.startswith("--output_dir=")).partition("=")[2])
outcome = Path(os.environ["LAUNCH_OUTCOME"])
def write(status, reason=""):
    content = {"status": status, "reason": reason, "claimed": plan != "starting"}
    outcome.with_suffix(".tmp").write_text(json.dumps(content))
    outcome.with_suffix(".tmp").rename(outcome)
def count(number, frame):
    heard.append(signal.Signals(number).name)
plan, _, status = os.environ["PLAN"].partition(":")
heard = []
if plan == "imports":  # no handlers yet
    run.mkdir(parents=True, exist_ok=True)
    (run / "ready").touch()
    time.sleep(60)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, count)
print("before the run directory")
run.mkdir(parents=True, exist_ok=True)
write("running")
print("\\x1b[1;36mcoloured\\x1b[0m", file=sys.stderr)
if plan == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
if plan in ("wait", "twice", "starting"):
    (run / "ready").touch()
    while not heard and not (run / "STOP").exists():
        time.sleep(0.02)
    (run / "asked").touch()
    while not (run / "end").exists() or (plan == "twice" and not heard):
        time.sleep(0.02)
    stop = "STOP" if (run / "STOP").exists() else ""
    print("heard", *heard, stop)
    write("resume_me", "as told")
    sys.exit(int(status))
if plan != "no outcome":
    write(plan, "as told")
sys.exit(int(status))
"""
SET_BY_LAUNCHERS = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "NNODES", "NPROC_", "MAX_RESTARTS")


def launch(folder: Path, plan: str, **variables: str) -> subprocess.Popen[str]:
    """Starts `fms-fsdp train` in a session of its own, with the stand-in in the working folder."""
    (folder / "main_training.py").write_text(TRAINING)
    kept = {name: v for name, v in os.environ.items() if not name.startswith(SET_BY_LAUNCHERS)}
    command = [sys.executable, "-m", "fms_fsdp", "train"]
    command += ["--use_dummy_dataset=True", f"--output_dir={folder / 'run'}"]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), "PLAN": plan, "NPROC_PER_NODE": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=restore_signals,
    )


def restore_signals() -> None:
    """A shell without job control lets its background ignore SIGINT, and nohup SIGHUP."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def torchrun(tmp_path: Path) -> dict[str, str]:
    """Variables with which a stand-in takes the place of torchrun: it runs the training once."""
    package = tmp_path / "torch/distributed"
    package.mkdir(parents=True)
    (tmp_path / "torch/__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "run.py").write_text(
        "import runpy, sys\n"
        "sys.argv = sys.argv[sys.argv.index('-m') + 1 :]\n"
        "runpy.run_module('main_training', run_name='__main__')\n"
    )
    return {"MAX_RESTARTS": "1"}


NODES = "NNODES=2 NODE_RANK=1 MASTER_ADDR=first"
SLURM = "SLURM_JOB_ID=123456 SLURM_STEP_NUM_NODES=2 SLURM_PROCID=0 MASTER_ADDR=node3"


@cases(f"""
    variables | gpus | words
     | 8 | torch.distributed.run --nproc_per_node=8 --max_restarts=0
    NPROC_PER_NODE=2 | 0 | --standalone --local-addr=127.0.0.1 -m main_training --num_steps=3
    MAX_RESTARTS=2 | 0 | --nproc_per_node=1 --max_restarts=2
    {NODES} | 0 | --nnodes=2 --rdzv_id=run --rdzv_backend=c10d --rdzv_endpoint=first:12000
    {NODES} MASTER_PORT=1234 | 0 | --rdzv_endpoint=first:1234 --rdzv_conf=is_host=0,read_timeout=600
    {NODES} LOCAL_ADDR=me | 0 | --rdzv_conf=is_host=0,read_timeout=600 --local-addr=me -m
    {NODES} RDZV_CONF=a=1 | 0 | --rdzv_conf=is_host=0,read_timeout=600,a=1 -m
    {SLURM} | 8 | --nnodes=2 --rdzv_id=123456 --rdzv_backend=c10d --rdzv_endpoint=node3:15456
    {SLURM} SLURM_STEP_NODELIST=node[3-4] PATH=/nowhere | 8 | --rdzv_endpoint=node3:15456
    {SLURM} NNODES=9 | 8 | --rdzv_conf=is_host=1,read_timeout=600
    NNODES=2:4 MASTER_ADDR=first | 0 | --max_restarts=100
    NNODES=2:4 MASTER_ADDR=first | 0 | --rdzv_conf=is_host=0
    NNODES=02:4 NODE_RANK=0 MASTER_ADDR=first | 0 | --nnodes=2:4
""")
def test_variables_decide_the_command(variables: str, gpus: str, words: str) -> None:
    environment = dict(word.split("=", 1) for word in variables.split())
    command = build_command(read_nodes(environment, int(gpus)), environment, ["--num_steps=3"])
    assert f" {words}" in " ".join(command)


@pytest.mark.parametrize(("variables", "num_gpus"), [({}, 0), ({"NPROC_PER_NODE": "1"}, 8)])
def test_one_process_needs_no_torchrun(variables: dict[str, str], num_gpus: int) -> None:
    command = build_command(read_nodes(variables, num_gpus), variables, ["--num_steps=3"])
    assert command == [sys.executable, "-m", "main_training", "--num_steps=3"]


def test_slurm_nodes_rendezvous_at_the_first(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/bash\n[[ "$*" == "show hostnames node[3-4]" ]] && echo node3 node4\n'
    )
    scontrol.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_STEP_NODELIST": "node[3-4]"}
    nodes = read_nodes({**variables, "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "1"})
    assert (nodes.rendezvous, nodes.is_host) == ("node3:12000", False)


@cases("""
    returncode | outcome | status
    0 | finished | 0
    0 | resume_me | 75
    75 | resume_me | 75
    1 | bad_input | 2
    2 | bad_input | 2
    2 | | 2
    1 | failed | 1
    0 | failed | 1
    -9 | running | 1
    1 | | 1
    0 | | 0
""")
def test_exit_status_follows_the_outcome(returncode: str, outcome: str, status: str) -> None:
    assert exit_status(int(returncode), outcome) == int(status)


@cases("""
    plan | status | words
    finished:0 | 0 |
    bad_input:2 | 2 |
    no outcome:1 | 1 | failed: see
    crash: | 1 | failed: see
""")
def test_output_goes_to_terminal_and_console(
    tmp_path: Path, plan: str, status: str, words: str
) -> None:
    process = launch(tmp_path, plan)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == int(status), output
    console = (tmp_path / "run/console.txt").read_text()
    assert console == "before the run directory\ncoloured\n"
    assert "\x1b[1;36mcoloured" in output and words in output
    assert output.count("\n") == (3 if words else 2)


def test_output_is_not_kept_without_a_console_file(tmp_path: Path) -> None:
    """It was searched again with each piece: 10 MB took seconds, in which the training waited."""
    (tmp_path / "console.txt").mkdir()
    outcome = tmp_path / "outcome.json"
    outcome.write_text('{"claimed": true}')
    console = Child([], {}, tmp_path, outcome)._open_console()
    assert console is not None
    console.close()


def test_failure_without_a_reason_points_to_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the rendezvous of torchrun fails, before any process of the training."""
    child = Child([], {}, tmp_path, tmp_path / "outcome.json")
    child.explain(1, child.reason())
    assert capsys.readouterr().err.endswith("no process gave a reason; see the output above\n")


def test_closed_pipe_keeps_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fms-fsdp train 2>&1 | tee` whose tee ended with Ctrl-C: the status is 75, not that of a traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stderr", stream)
    Child([], {}, tmp_path, tmp_path / "outcome.json").explain(75, "saved step 5")
    with suppress(BrokenPipeError):
        stream.close()


def stopped(folder: Path, plan: str, *numbers: int, **variables: str) -> str:
    """Returns the output of a training that the whole group of the launcher asked to stop."""
    process = launch(folder, plan, **variables)
    try:
        wait_for(folder / "run/ready")
        for number in numbers:
            os.killpg(process.pid, number)
            wait_for(folder / "run/asked")
        time.sleep(0.3)  # so that a second signal would reach the training
    finally:
        (folder / "run/end").touch()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert not (folder / "run/STOP").exists()
    return output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_process_gets_the_signal_once(tmp_path: Path, number: int) -> None:
    output = stopped(tmp_path, "wait:75", number, signal.SIGTERM)
    assert f"heard {signal.Signals(number).name} \n" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_torchrun_gets_stop_and_no_signal(
    tmp_path: Path, torchrun: dict[str, str], number: int
) -> None:
    output = stopped(tmp_path, "wait:0", number, signal.SIGTERM, **torchrun)
    assert "heard STOP\n" in output
    words = "stopped early, the same command resumes the run: as told; see "
    assert words in output
    assert "heard STOP\n" in (tmp_path / "run/console.txt").read_text()


def test_stop_file_that_stays_hides_no_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS another node has removed it; the launch ended with a traceback and status 1."""
    (tmp_path / "outcome.json").write_text('{"claimed": true}')
    child = Child([], {}, tmp_path, tmp_path / "outcome.json")
    child.is_torchrun = True
    child._signals.append(signal.SIGTERM)
    process = subprocess.Popen(["sleep", "0.3"])
    unlink = Path.unlink

    def failing(path: Path, missing_ok: bool = False) -> None:
        if path.name == "STOP":
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", failing)
    child._wait(process)
    assert (tmp_path / "STOP").exists() and process.returncode == 0


def test_second_interrupt_reaches_torchrun(tmp_path: Path, torchrun: dict[str, str]) -> None:
    output = stopped(tmp_path, "twice:0", signal.SIGTERM, signal.SIGINT, **torchrun)
    assert "heard SIGINT STOP\n" in output


def test_signal_ends_torchrun_before_the_run(tmp_path: Path, torchrun: dict[str, str]) -> None:
    output = stopped(tmp_path, "starting:0", signal.SIGTERM, **torchrun)
    assert "heard SIGTERM \n" in output
    assert not (tmp_path / "run/console.txt").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("ranks", ["one process", "torchrun"])
def test_signal_during_imports_is_a_stop(
    tmp_path: Path, torchrun: dict[str, str], number: int, ranks: str
) -> None:
    """The launch failed with status 1, and no process gave a reason."""
    variables = torchrun if ranks == "torchrun" else {}
    process = launch(tmp_path, "imports", **variables)
    wait_for(tmp_path / "run/ready")
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    words = "stopped early, the same command resumes the run: a signal ended it before the training"
    assert words in output


def test_mistyped_flag_ends_before_any_work(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fms_fsdp", "train", "--num_step=5"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2 and not list(tmp_path.iterdir())
    lines = process.stderr.splitlines()
    assert lines[-1] == "error: --num_step is not a flag; did you mean --num_steps?"
    assert not [line for line in lines if line.endswith("| torch")]
