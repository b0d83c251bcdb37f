"""Runs that are killed, on worlds that change, end where undisturbed ones do."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fms_fsdp.checkpoint.folders import complete_steps, corrupt_files, problem, read_files
from fms_fsdp.run.run_dir import check_shared
from tests.cli import (
    ROOT,
    STORE_PER_ATTEMPT,
    TINY,
    metrics,
    status,
    trained,
    under_torchrun,
)
from tests.warm import launch

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
WARM_TORCHRUN = [sys.executable, "-m", "tests.warm_torchrun"]
PLAIN_ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
ENVIRONMENT = PLAIN_ENVIRONMENT | STORE_PER_ATTEMPT


def children(process: int, *options: str) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(process), *options], capture_output=True, text=True)
    return [int(text) for text in found.stdout.split()]


def workers(torchrun: int) -> list[int]:
    """Process ids of torchrun's workers: its children, or forks of a child that has imported the program."""
    own = children(torchrun, "-f", "main_training.py")
    return own or [fork for server in children(torchrun) for fork in children(server)]


def wait_for(condition: Callable[[], bool], timeout_s: float, pause_s: float = 0.03) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True


def kill_at(
    moment: str, process: subprocess.Popen[bytes], folder: Path, rng: random.Random
) -> bool:
    """Kills one of two workers with -9 in a step, a save or its commit; False if the run ended before."""
    file = folder / "metrics.jsonl"

    def num_lines() -> int:
        return file.read_bytes().count(b"\n") if file.exists() else 0

    enough = num_lines() + rng.randint(1, 12)
    moved = wait_for(lambda: process.poll() is not None or num_lines() >= enough, 300)
    if not moved or process.poll() is not None:
        return False
    saves = folder / "checkpoints"
    if moment == "step":
        time.sleep(0.1 * rng.random())
    elif moment == "save":
        wait_for(lambda: any(saves.glob("step_*.partial-*/*.distcp")), 20, pause_s=0.001)
    else:
        wait_for(lambda: any(saves.glob("step_*.partial-*/train_state.json")), 20, pause_s=0.001)
    victims = workers(process.pid)
    if not victims or process.poll() is not None:
        return False
    os.kill(rng.choice(victims), signal.SIGKILL)
    # till torchrun has ended the other one too: what that still writes is no sign of the next launch
    return wait_for(lambda: not set(victims) & set(workers(process.pid)), 300)


@pytest.mark.slow
def test_run_killed_six_times_is_exact(tmp_path: Path) -> None:
    """Final weights and moments, losses and data fingerprints, to the last bit."""
    flags = [*TINY, "--num_steps=112", "--checkpoint_interval=4", "--keep_last_n=3"]
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    trained(*flags, f"--output_dir={calm}", nproc=2)
    command = [*WARM_TORCHRUN, *under_torchrun(2, "--max-restarts=60")[3:]]
    with open(tmp_path / "output.txt", "w") as output:
        process = subprocess.Popen(
            [*command, "main_training.py", *flags, f"--output_dir={disturbed}"],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=output,
            stderr=output,
        )
        rng, killed = random.Random(0), 0
        try:
            while killed < 7 and kill_at(
                ("step", "save", "commit")[killed % 3], process, disturbed, rng
            ):
                killed += 1
            process.wait(timeout=200)
        finally:
            process.kill()
    assert killed >= 6, f"the run ended after {killed} kills"
    assert process.returncode == 0, (tmp_path / "output.txt").read_text()[-3000:]
    assert status(disturbed) == status(calm)
    found, expected = metrics(disturbed), metrics(calm)
    assert found.keys() == expected.keys()
    for step, record in expected.items():
        for name in ("loss", "grad_norm", "data_fingerprint", "lr", "tokens_seen"):
            assert found[step][name] == record[name], (step, name)
    last = [read_files(folder / "checkpoints" / "step_112") for folder in (calm, disturbed)]
    for name in ("__0_0.distcp", "__1_0.distcp"):  # size and checksum
        assert last[0][name] == last[1][name]
    for step in (108, 112):
        folder = disturbed / "checkpoints" / f"step_{step}"
        assert not problem(folder) and not corrupt_files(folder)


@pytest.mark.slow
def test_rank_killed_twice_trains_to_the_end(tmp_path: Path) -> None:
    """Plain torchrun, without a variable: neither its agent nor its workers are forks."""
    run = tmp_path / "run"
    flags = [*TINY, "--num_steps=40", "--checkpoint_interval=4", f"--output_dir={run}"]
    command = under_torchrun(2, "--max-restarts=2", "main_training.py", *flags)
    with open(tmp_path / "output.txt", "w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=PLAIN_ENVIRONMENT, stdout=output, stderr=output
        )
        try:
            rng = random.Random(0)
            killed = sum(kill_at("step", process, run, rng) for _ in range(2))
            process.wait(timeout=200)
        finally:
            process.kill()
    text = (tmp_path / "output.txt").read_text()
    assert (killed, process.returncode) == (2, 0), text[-3000:]
    assert status(run)["status"] == "finished" and sorted(metrics(run)) == list(range(1, 41))


def two_agents(
    command: list[str],
    port: int,
    folders: Sequence[Path],
    env: dict[str, str] = ENVIRONMENT,
    **more: Any,
) -> list[subprocess.Popen[str]]:
    """Starts an agent of torchrun, with one worker, in each folder."""
    nodes = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d"]
    nodes += [f"--rdzv_endpoint=localhost:{port}", f"--rdzv_id={port}"]
    agent = [*command[:3], *nodes, *command[3:]]
    return [subprocess.Popen(agent, cwd=folder, env=env, text=True, **more) for folder in folders]


@pytest.mark.slow
def test_two_nodes_survive_killed_workers(tmp_path: Path) -> None:
    """Two agents count restarts differently: an agent whose workers were well may not count at all.

    Both attempts use the store of the agent; tests/scripts/test_elastic.py has one per attempt.
    """
    run = tmp_path / "run"
    flags = [*TINY, "--num_steps=20", "--checkpoint_interval=5", f"--output_dir={run}"]
    file, size = run / "metrics.jsonl", 0
    with open(tmp_path / "output.txt", "w") as output:
        command = [*WARM_TORCHRUN, "--max-restarts=3", "main_training.py", *flags]
        agents = two_agents(
            command, 29641, [ROOT] * 2, PLAIN_ENVIRONMENT, stdout=output, stderr=output
        )
        try:
            for agent in agents:  # first a worker of one node, then of the other
                assert wait_for(lambda size=size: file.exists() and file.stat().st_size > size, 300)
                for worker in workers(agent.pid):
                    os.kill(worker, signal.SIGKILL)
                size = file.stat().st_size
            codes = [agent.wait(timeout=300) for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    assert codes == [0, 0], (tmp_path / "output.txt").read_text()[-3000:]
    assert status(run)["status"] == "finished" and sorted(metrics(run)) == list(range(1, 21))


SLOW_SAVE = """
import os, sys, time
sys.path.insert(0, os.getcwd())
import main_training
from fms_fsdp.checkpoint import io

finish = io._Writer.finish


def slow(self, metadata, results):
    time.sleep(6)
    finish(self, metadata, results)


io._Writer.finish = slow
os._exit(main_training.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_slow_save_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    """torchrun gives its workers 2 s and the save takes 6: no checkpoint is half written; the run resumes.

    With 60 s it saves, also after a signal that torchrun handles only if it is told to.
    """
    run, script = tmp_path / "run", tmp_path / "slow.py"
    script.write_text(SLOW_SAVE)
    flags = [*TINY, "--num_steps=100000", "--checkpoint_interval=0", f"--output_dir={run}"]
    trained(*TINY, "--num_steps=2", f"--output_dir={run}", nproc=2)
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    signals = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    for grace_s, number, saved in ((2, signal.SIGTERM, False), (60, signal.SIGUSR1, True)):
        env = ENVIRONMENT | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace_s)}
        command = under_torchrun(2, signals, str(script), *flags)
        process = subprocess.Popen(command, cwd=ROOT, env=env, **silent)
        file = run / "metrics.jsonl"
        records = len(file.read_text().splitlines())
        assert wait_for(
            lambda file=file, records=records: len(file.read_text().splitlines()) > records + 2, 60
        )
        time.sleep(0.5)
        process.send_signal(number)
        process.wait(timeout=300)
        steps = complete_steps(run / "checkpoints")
        assert (steps[-1] > 2) == saved, (grace_s, steps)
        assert (status(run)["status"] == "resume_me") == saved
    assert "SIGUSR1" in status(run)["reason"] and status(run)["step"] == steps[-1]


def become_node(folder: Path) -> None:
    """Makes this rank the only one of its node, with a folder of its own.

    The rank waits a second for the file of rank 0, not 30.
    """
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.chdir(folder / os.environ["RANK"])
    check_shared.__defaults__ = (1.0,)


@pytest.mark.slow
def test_unshared_run_directory_is_rejected(tmp_path: Path) -> None:
    """Two nodes whose relative --output_dir is in different places, as on local disks."""
    folders = [tmp_path / node for node in ("0", "1")]
    for folder in folders:
        folder.mkdir()
    flags = [*TINY, "--num_steps=2", "--output_dir=run"]
    ended = launch(flags, 2, before=functools.partial(become_node, tmp_path))
    assert ended.statuses == [2, 2], ended.stderr
    output = ended.stdout + ended.stderr
    assert output.count("must be shared by all nodes, but 1 of 2 ranks do not see it") == 1
    assert not any((folder / "run" / "metrics.jsonl").exists() for folder in folders)
