"""Runs that are killed, on worlds that change, end where undisturbed ones do."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fms_fsdp.checkpoint.folders import complete_steps, corrupt_files, problem, read_files
from tests.cli import (
    ROOT,
    STORE_PER_ATTEMPT,
    TINY,
    losses,
    made_once,
    metrics,
    status,
    trained,
    under_torchrun,
)

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"} | STORE_PER_ATTEMPT


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

    enough = num_lines() + rng.randint(1, 40)
    moved = wait_for(lambda: process.poll() is not None or num_lines() >= enough, 60)
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
    return wait_for(lambda: not set(victims) & set(workers(process.pid)), 60)


@pytest.mark.slow
def test_a_run_killed_twenty_times_equals_the_undisturbed_one(tmp_path: Path) -> None:
    """Final weights and moments, losses and data fingerprints, to the last bit."""
    flags = [*TINY, "--num_steps=600", "--checkpoint_interval=4", "--keep_last_n=3"]
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    trained(*flags, f"--output_dir={calm}", nproc=2)
    launch = [
        sys.executable,
        "-m",
        "tests.warm_torchrun",
        *under_torchrun(2, "--max-restarts=60")[3:],
    ]
    with open(tmp_path / "output.txt", "w") as output:
        process = subprocess.Popen(
            [*launch, "main_training.py", *flags, f"--output_dir={disturbed}"],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=output,
            stderr=output,
        )
        rng, killed = random.Random(0), 0
        try:
            while killed < 21 and kill_at(
                ("step", "save", "commit")[killed % 3], process, disturbed, rng
            ):
                killed += 1
            process.wait(timeout=200)
        finally:
            process.kill()
    assert killed >= 20, f"the run ended after {killed} kills"
    assert process.returncode == 0, (tmp_path / "output.txt").read_text()[-3000:]
    assert status(disturbed) == status(calm)
    for name in ("loss", "grad_norm", "data_fingerprint", "lr", "tokens_seen"):
        assert [record[name] for _, record in sorted(metrics(disturbed).items())] == [
            record[name] for _, record in sorted(metrics(calm).items())
        ], name
    last = [read_files(folder / "checkpoints" / "step_600") for folder in (calm, disturbed)]
    tensors = [
        {name: entry for name, entry in files.items() if name.endswith(".distcp")} for files in last
    ]
    assert (
        tensors[0] == tensors[1] and len(tensors[0]) == 2
    )  # bytes and checksums of the tensors' files
    for step in (596, 600):
        folder = disturbed / "checkpoints" / f"step_{step}"
        assert not problem(folder) and not corrupt_files(folder)


@pytest.mark.slow
def test_rank_killed_five_times_trains_to_the_end(tmp_path: Path) -> None:
    """Plain torchrun: neither its agent nor its workers are forks."""
    run = tmp_path / "run"
    flags = [*TINY, "--num_steps=400", "--checkpoint_interval=4", f"--output_dir={run}"]
    command = under_torchrun(2, "--max-restarts=5", "main_training.py", *flags)
    with open(tmp_path / "output.txt", "w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=output, stderr=output)
        try:
            rng = random.Random(0)
            killed = sum(kill_at("step", process, run, rng) for _ in range(5))
            process.wait(timeout=200)
        finally:
            process.kill()
    text = (tmp_path / "output.txt").read_text()
    assert (killed, process.returncode) == (5, 0), text[-3000:]
    assert status(run)["status"] == "finished" and sorted(metrics(run)) == list(range(1, 401))


@pytest.mark.slow
def test_workers_on_two_nodes_meet_again_after_one_is_killed(tmp_path: Path) -> None:
    """Two agents count restarts differently: an agent whose workers were well may not count at all."""
    flags = [*TINY, "--num_steps=60", "--checkpoint_interval=5", f"--output_dir={tmp_path / 'run'}"]
    agents = []
    with open(tmp_path / "output.txt", "w") as output:
        for _ in range(2):
            launch = [
                *(sys.executable, "-m", "tests.warm_torchrun"),
                "--nnodes=2",
                "--nproc_per_node=1",
                "--max-restarts=3",
                "--rdzv_backend=c10d",
            ]
            launch += [
                "--rdzv_endpoint=localhost:29641",
                "--rdzv_id=two",
                "main_training.py",
                *flags,
            ]
            agents.append(
                subprocess.Popen(launch, cwd=ROOT, env=ENVIRONMENT, stdout=output, stderr=output)
            )
        try:
            for agent in agents:  # first a worker of one node, then of the other
                size = (
                    (tmp_path / "run" / "metrics.jsonl").stat().st_size if agent is agents[1] else 0
                )
                file = tmp_path / "run" / "metrics.jsonl"
                assert wait_for(
                    lambda file=file, size=size: file.exists() and file.stat().st_size > size, 120
                )
                for worker in workers(agent.pid):
                    os.kill(worker, signal.SIGKILL)
            codes = [agent.wait(timeout=120) for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    assert codes == [0, 0], (tmp_path / "output.txt").read_text()[-3000:]
    assert status(tmp_path / "run")["status"] == "finished" and sorted(
        metrics(tmp_path / "run")
    ) == list(range(1, 61))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps on four ranks, saved, then four more."""
    flags = [*TINY, "--num_steps=8", "--checkpoint_interval=4", "--batch_size=2"]
    return made_once(
        tmp_path_factory, "four", lambda run: trained(*flags, f"--output_dir={run}", nproc=4)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (4, ["--sharding_strategy=hsdp", "--hsdp_shard_size=2"]),
        (4, ["--sharding_strategy=ddp"]),
        (2, []),
        (2, ["--sharding_strategy=ddp"]),
        (2, ["--sharding_strategy=zero1", "--fsdp_blocks_per_group=2"]),
        (1, []),
    ],
)
def test_a_checkpoint_of_four_ranks_goes_on_in_any_world(
    four: Path, tmp_path: Path, nproc: int, flags: list[str]
) -> None:
    shutil.copytree(four / "checkpoints" / "step_4", tmp_path / "checkpoints" / "step_4")
    argv = [*TINY, "--num_steps=8", "--global_batch_size=8", f"--output_dir={tmp_path}", *flags]
    trained(*argv, nproc=0 if nproc == 1 else nproc)
    there, here = metrics(four), metrics(tmp_path)
    assert [here[step]["data_fingerprint"] for step in range(5, 9)] == [
        there[step]["data_fingerprint"] for step in range(5, 9)
    ]
    assert losses(tmp_path) == pytest.approx(
        losses(four)[4:], rel=2e-3
    )  # bf16; fp32 to 1e-6 in test_sharded_training


@pytest.mark.slow
def test_a_save_slower_than_the_grace_period_leaves_the_last_one(tmp_path: Path) -> None:
    """torchrun gives its workers 2 s and the save takes 6: no checkpoint is half written; the run goes on."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import os, sys, time\nsys.path.insert(0, os.getcwd())\nimport main_training\nfrom "
        "fms_fsdp.checkpoint import io\nfinish = io._Writer.finish\ndef slow(self, "
        "metadata, results):\n    time.sleep(6)\n    finish(self, metadata, "
        "results)\nio._Writer.finish = slow\nos._exit(main_training.main(sys.argv[1:]))\n"
    )
    flags = [
        *TINY,
        "--num_steps=100000",
        "--checkpoint_interval=0",
        f"--output_dir={tmp_path / 'run'}",
    ]
    trained(*TINY, "--num_steps=2", f"--output_dir={tmp_path / 'run'}", nproc=2)
    for grace_s, saved in ((2, False), (60, True)):
        process = subprocess.Popen(
            under_torchrun(2, str(script), *flags),
            cwd=ROOT,
            env=ENVIRONMENT | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace_s)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        records = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        file = tmp_path / "run" / "metrics.jsonl"
        assert wait_for(
            lambda file=file, records=records: len(file.read_text().splitlines()) > records + 2, 60
        )
        time.sleep(0.5)
        threading.Timer(0.0, process.send_signal, (signal.SIGTERM,)).start()
        process.wait(timeout=60)
        steps = complete_steps(tmp_path / "run" / "checkpoints")
        assert (steps[-1] > 2) == saved, (grace_s, steps)
        assert (status(tmp_path / "run")["status"] == "resume_me") == saved


@pytest.mark.slow
def test_a_run_folder_that_nodes_do_not_share_is_refused(tmp_path: Path) -> None:
    """Two agents whose relative --output_dir lies in different places, as on nodes with local disks."""
    agents = []
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
        launch = [
            *TORCHRUN,
            "--nnodes=2",
            "--nproc_per_node=1",
            "--rdzv_backend=c10d",
            "--rdzv_endpoint=localhost:29642",
        ]
        launch += [
            "--rdzv_id=blind",
            str(ROOT / "main_training.py"),
            *TINY,
            "--num_steps=2",
            "--output_dir=run",
        ]
        agents.append(
            subprocess.Popen(
                launch,
                cwd=tmp_path / node,
                env=ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    assert all(agent.returncode for agent in agents)
    assert (
        sum(
            text.count("must be shared by all nodes, but 1 of 2 ranks do not see it")
            for text in outputs
        )
        == 1
    )
    assert not any((tmp_path / node / "run" / "metrics.jsonl").exists() for node in ("a", "b"))
