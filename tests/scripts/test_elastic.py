"""Launches on any number of nodes (NNODES=MIN:MAX): their torchrun, and a real one whose nodes die and return."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import fms_fsdp
from tests.cli import ROOT, TINY, last_of_each, metrics, status, trained
from tests.scripts.conftest import environment

FLAGS = (
    *TINY,
    "--dataset_builder=tests.scripts.paced_stream:build",
    "--global_batch_size=12",
    "--batch_size=1",
    "--num_steps=110",
    "--learning_rate=1e-3",
    "--precision=fp32",
    "--checkpoint_interval=5",
    "--trackers=none",
)


TP = ("--tp_size=2", "--batch_size=3")


class Node:
    """A node of its own address: train.sh, torchrun's agent and its workers."""

    def __init__(self, number: int, folder: Path, port: str, *more: str, nproc: int) -> None:
        self.address = f"127.0.0.{number + 2}"
        settings = {
            "NNODES": "1:3",
            "NODE_RANK": str(number),
            "MASTER_ADDR": "127.0.0.2",
            "MASTER_PORT": port,
            "LOCAL_ADDR": self.address,
            "NPROC_PER_NODE": str(nproc),
            "RDZV_CONF": "last_call_timeout=3,keep_alive_interval=1",
            "PACE_FILE": str(folder / "slowly"),
            "OMP_NUM_THREADS": "1",
        }
        flags = last_of_each([*FLAGS, *more, f"--output_dir={folder / 'run'}"])
        self.output = folder / f"output.{number}.{time.time_ns()}"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                ["bash", ROOT / "scripts/train.sh", *flags],
                env=environment(**settings),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def die(self) -> None:
        """Kills all of it at once, as the loss of a machine does."""
        pattern = f"torch.distributed.run.*--local-addr={self.address} "
        (agent,) = subprocess.check_output(["pgrep", "-f", pattern], text=True).split()
        workers = subprocess.run(
            ["pgrep", "-P", agent], capture_output=True, text=True
        ).stdout.split()
        for pid in (*workers, agent):
            os.kill(int(pid), signal.SIGKILL)
        self.process.wait(30)

    def end(self) -> int:
        return self.process.wait(400)


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    started: list[Node] = []
    yield started
    for node in started:
        if node.process.poll() is None:
            node.die()


def wait(what: Callable[[], bool], nodes: list[Node], patience_s: float = 300) -> None:
    deadline = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < deadline, [node.output.read_text()[-3000:] for node in nodes]
        time.sleep(0.1)


def is_at(run: Path, size: int, after: int) -> Callable[[], bool]:
    """Whether a run has come to a step with so many ranks."""

    def reached() -> bool:
        content = status(run) if (run / "status.json").exists() else {}
        newest = max(metrics(run), default=0) if (run / "metrics.jsonl").exists() else 0
        return [world[1] for world in content.get("worlds", [])][-1:] == [size] and newest >= after

    return reached


def assert_undisturbed(run: Path, whole: Path) -> None:
    """The rows of each step are those of a whole run, and so are the weights at the end."""
    expected, found = metrics(whole), metrics(run)
    assert sorted(expected) == sorted(found) == list(range(1, max(expected) + 1))
    for step, record in expected.items():
        assert found[step]["data_fingerprint"] == record["data_fingerprint"], step
    weights = [fms_fsdp.load_model(str(folder))[0].state_dict() for folder in (run, whole)]
    for name, weight in weights[1].items():
        # Other worlds sum in another order, and Adam magnifies rounding where gradients are tiny.
        torch.testing.assert_close(weights[0][name], weight, rtol=0, atol=1e-4)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.mark.slow
def test_run_survives_nodes_that_die_and_return(tmp_path: Path, nodes: list[Node]) -> None:
    """Ranks 4 → 2 → 4 with --tp_size=2: C (two ranks) is lost and comes back; A hosts the rendezvous."""
    run, port = tmp_path / "run", free_port()
    (tmp_path / "slowly").touch()

    def newest() -> int:
        return max(metrics(run))

    nodes += [
        Node(0, tmp_path, port, *TP, nproc=1),
        Node(1, tmp_path, port, *TP, nproc=1),
        Node(2, tmp_path, port, *TP, nproc=2),
    ]
    wait(is_at(run, 4, after=7), nodes)
    nodes[2].die()
    wait(is_at(run, 2, after=newest() + 2), nodes)
    nodes.append(Node(2, tmp_path, port, *TP, nproc=2))
    wait(is_at(run, 4, after=newest() + 2), nodes)
    (tmp_path / "slowly").unlink()
    ends = [nodes[0].end(), nodes[1].end(), nodes[3].end()]
    assert ends == [0, 0, 0], [node.output.read_text()[-3000:] for node in nodes]
    ended = status(run)
    assert ended["status"] == "finished" and [size for _, size in ended["worlds"]] == [4, 2, 4]
    joined = "".join(node.output.read_text() for node in nodes)
    assert "stopped by SIGTERM, at step" in joined, "workers that others join save first"

    whole = tmp_path / "whole"
    trained(*FLAGS, f"--output_dir={whole}", nproc=2)
    assert_undisturbed(run, whole)


@pytest.mark.slow
def test_loss_of_the_host_ends_resumable(tmp_path: Path, nodes: list[Node]) -> None:
    (tmp_path / "slowly").touch()
    port = free_port()
    nodes += [Node(0, tmp_path, port, nproc=1), Node(1, tmp_path, port, nproc=1)]
    wait(lambda: (tmp_path / "run/checkpoints/step_5").exists(), nodes)
    nodes[0].die()
    output = nodes[1].output
    assert nodes[1].end() == 75, output.read_text()[-3000:]
    assert "hosts the rendezvous (127.0.0.2:" in output.read_text()


@pytest.mark.slow
def test_batch_the_nodes_cannot_share_is_rejected(tmp_path: Path, nodes: list[Node]) -> None:
    nodes += [Node(0, tmp_path, free_port(), "--global_batch_size=8", nproc=3)]
    assert nodes[0].end() == 2, nodes[0].output.read_text()[-3000:]
    text = nodes[0].output.read_text()
    assert text.count("error: --global_batch_size=8 ") == 1 and "of 1, 2, 4, 8" in text, (
        "no restart"
    )
    assert not (tmp_path / "run").exists()
