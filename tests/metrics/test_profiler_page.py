"""A trace of a run on TensorBoard's profiler page, asked over HTTP as a browser does."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cli import TINY, trained


def get(port: int, page: str) -> Any:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{port}/data/plugin/pytorch_profiler/{page}", timeout=20
    ) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
def test_tensorboard_shows_the_trace(tmp_path: Path) -> None:
    argv = [
        "--use_profiler=True",
        "--profiler_wait=1",
        "--profiler_warmup=1",
        "--profiler_active=2",
    ]
    trained(*TINY, "--num_steps=6", *argv, f"--output_dir={tmp_path}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        "-m",
        "tensorboard.main",
        f"--logdir={tmp_path / 'profile_traces'}",
        f"--port={port}",
        "--host=127.0.0.1",
    ]
    server = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        runs: dict[str, Any] = {}
        for _ in range(120):
            try:
                runs = get(port, "runs")
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass
            if runs.get("runs"):
                break
            time.sleep(0.5)
        (run,) = runs["runs"]
        views = get(port, f"views?run={run}")
        assert any("Overview" in str(view) for view in views), views
        workers = get(port, f"workers?run={run}&view=Overview")
        assert workers == ["rank0"], workers
    finally:
        server.terminate()
        server.wait(20)
