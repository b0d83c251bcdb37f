"""Launches of main_training.py whose ranks share one GPU: saves, signals, kills, late ranks, bad input.

Each function of LIFE starts processes, and returns in a few words what it has found.

Raises:
    LifeFailed: a launch did not end as it should.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu.nodes import free_port, node_environment

ROOT = Path(__file__).parent.parent.parent
FP32_BOUND = 1e-5
LATE_S = 20
COLLECTIVE_TIMEOUT_S = 20
COMMON = (
    "--trackers=none",
    "--report_interval=1",
    "--precision=fp32",
    "--matmul_precision=highest",
    "--use_torch_compile=False",
)
SMALL = (*COMMON, "--use_dummy_dataset=True")
MODEL_ON = {
    "cuda": ("--model_variant=quickstart", "--seq_length=256", "--num_steps=100"),
    "cpu": ("--model_variant=tiny", "--seq_length=64", "--num_steps=120"),
}
FSDP = "--sharding_strategy=fsdp"


class LifeFailed(Exception):
    """A launch did not end as it should."""


class Launch:
    """The ranks of one launch."""

    def __init__(self, session: Session, name: str, world: int, flags: list[str]) -> None:
        self.folder = session.folder / name
        self._timeout_s = session.timeout_s
        port = free_port()
        self.logs = [session.folder / f"{name}.rank{rank}.txt" for rank in range(world)]
        self.ranks = list[subprocess.Popen[bytes]]()
        command = [sys.executable, "main_training.py", *flags, f"--output_dir={self.folder}"]
        for rank, log in enumerate(self.logs):
            environment = os.environ | node_environment(rank, world, port)
            if session.device_type == "cpu":
                environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            with open(log, "ab") as file:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=file, stderr=file
                )
            self.ranks.append(process)

    def wait_for_step(self, step: int) -> None:
        """Waits until the launch has reported the step."""
        until = time.monotonic() + self._timeout_s
        while max(records(self.folder), default=0) < step:
            ended = [rank.poll() for rank in self.ranks if rank.poll() is not None]
            if ended or time.monotonic() > until:
                raise LifeFailed(f"no step {step}; exit statuses {ended}: {self.end_of_logs()}")
            time.sleep(0.05)

    def wait(self, *expected: int) -> list[int]:
        """Returns the exit statuses of all ranks, of which each must be one of `expected`."""
        until = time.monotonic() + self._timeout_s
        statuses = list[int]()
        for rank in self.ranks:
            try:
                statuses.append(rank.wait(max(0.1, until - time.monotonic())))
            except subprocess.TimeoutExpired as error:
                raise LifeFailed(f"a rank hangs: {self.end_of_logs()}") from error
        if not set(statuses) <= set(expected):
            raise LifeFailed(f"exit statuses {statuses}, not {expected}: {self.end_of_logs()}")
        return statuses

    def end_of_logs(self) -> str:
        """Returns the last characters that each rank printed."""
        return " | ".join(
            log.read_text(encoding="utf-8", errors="replace")[-300:] for log in self.logs
        )

    def text(self, rank: int) -> str:
        """Returns what a rank has printed."""
        return self.logs[rank].read_text(encoding="utf-8", errors="replace")


class Session:
    """A folder of launches, each of which must end within `timeout_s`; `close` ends those that still run."""

    def __init__(self, folder: Path, device_type: str, timeout_s: float) -> None:
        self.folder = folder
        self.timeout_s = timeout_s
        self.device_type = device_type
        self._launches = list[Launch]()
        shutil.rmtree(folder, ignore_errors=True)  # of a call that was interrupted
        folder.mkdir(parents=True)

    def launch(self, name: str, world: int, *flags: str) -> Launch:
        """Starts the ranks of a launch, in a run directory of that name."""
        launch = Launch(self, name, world, list(flags))
        self._launches.append(launch)
        return launch

    def model(self, num_sequences: int) -> list[str]:
        """Returns the flags of the model, and of a micro-batch of this size."""
        return [*MODEL_ON[self.device_type], f"--batch_size={num_sequences}"]

    def close(self) -> None:
        for launch in self._launches:
            for rank in launch.ranks:
                rank.kill()
                rank.wait()


def records(folder: Path) -> dict[int, dict[str, Any]]:
    """Returns the last report of each step."""
    path = folder / "metrics.jsonl"
    found = dict[int, dict[str, Any]]()
    if not path.exists():
        return found
    for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not text.endswith("\n"):  # being written
            continue
        line = json.loads(text)
        if "loss" in line and "event" not in line:
            found[line["step"]] = line
    return found


def compare(found: Path, expected: Path, metric: str = "loss") -> str:
    """Returns the largest relative difference of two runs.

    Raises:
        LifeFailed: steps are missing, or values differ by more than fp32 explains.
    """
    ours = records(found)
    theirs = records(expected)
    if ours.keys() != theirs.keys():
        raise LifeFailed(f"{found.name} has {len(ours)} steps, {expected.name} {len(theirs)}")
    largest = 0.0
    num_values = 0
    for step, record in theirs.items():
        if metric in record:
            largest = max(largest, abs(ours[step][metric] / record[metric] - 1))
            num_values += 1
    if not num_values or not largest <= FP32_BOUND:
        raise LifeFailed(f"{found.name} differs from {expected.name} by {largest:.2g} in {metric}")
    return f"{metric} {largest:.2g} over {num_values} values"


def save_and_resume(session: Session) -> str:
    """Two ranks save in the background and stop; four ranks and one rank resume with the same losses."""
    saves = [*SMALL, "--checkpoint_interval=6", "--lr_schedule=constant", "--warmup_steps=0"]
    length = ["--num_steps=20"]
    model = session.model(4)[:-2]
    whole = session.launch("whole", 2, *saves, *model, *length, FSDP, "--batch_size=4")
    whole.wait(0)
    flags = [*saves, *model, *length]
    stopped = session.launch("on_4", 2, *flags, FSDP, "--batch_size=4", "--exit_step=12")
    stopped.wait(75)
    shutil.copytree(stopped.folder, session.folder / "on_1")
    on_4 = session.launch("on_4", 4, *flags, FSDP, "--batch_size=2")
    on_4.wait(0)
    on_1 = session.launch("on_1", 1, *flags, "--batch_size=8")
    on_1.wait(0)
    for launch in (on_4, on_1):
        if "resuming from step 12" not in launch.text(0):
            raise LifeFailed(f"{launch.folder.name} did not resume: {launch.end_of_logs()}")
    by_four = compare(on_4.folder, whole.folder)
    by_one = compare(on_1.folder, whole.folder)
    return f"4 ranks: {by_four}; 1 rank: {by_one}"


def sigterm_to_one_rank(session: Session) -> str:
    """All ranks save and end with 75 when one gets SIGTERM; the next launch has the same losses."""
    flags = [*SMALL, *session.model(4), FSDP, "--checkpoint_interval=0"]
    whole = session.launch("whole", 2, *flags)
    whole.wait(0)
    stopped = session.launch("stopped", 2, *flags)
    stopped.wait_for_step(5)
    stopped.ranks[1].send_signal(signal.SIGTERM)
    stopped.wait(75)
    step = max(records(stopped.folder))
    session.launch("stopped", 2, *flags).wait(0)
    return f"stopped at step {step}; {compare(stopped.folder, whole.folder)}"


def kill_of_one_rank(session: Session) -> str:
    """The other rank ends within the collective's timeout with its reason; the next launch resumes."""
    flags = [*SMALL, *session.model(4), FSDP, "--checkpoint_interval=2", "--keep_last_n=2"]
    flags.append(f"--collective_timeout_s={COLLECTIVE_TIMEOUT_S}")
    whole = session.launch("whole", 2, *flags)
    whole.wait(0)
    killed = session.launch("killed", 2, *flags)
    killed.wait_for_step(5)
    killed.ranks[1].kill()
    begin = time.monotonic()
    statuses = killed.wait(1, -signal.SIGKILL, -signal.SIGABRT)
    waited_s = time.monotonic() - begin
    if statuses[0] == 0 or waited_s > COLLECTIVE_TIMEOUT_S + 100:
        raise LifeFailed(f"exit statuses {statuses} after {waited_s:.0f} s")
    status = json.loads((killed.folder / "status.json").read_text(encoding="utf-8"))
    if status["status"] != "failed" or not status.get("reason"):
        raise LifeFailed(f"status.json has no reason: {status}")
    again = session.launch("killed", 2, *flags)
    again.wait(0)
    if "resuming from step" not in again.text(0):
        raise LifeFailed(f"the next launch did not resume: {again.end_of_logs()}")
    same = compare(killed.folder, whole.folder)
    return f"exit statuses {statuses}, reason: {status['reason'][:100]}; {same}"


def late_rank(session: Session) -> str:
    """A rank that stands still for 20 s lets the others wait, and changes nothing."""
    flags = [*SMALL, *session.model(4), FSDP, "--checkpoint_interval=0"]
    whole = session.launch("whole", 2, *flags)
    whole.wait(0)
    late = session.launch("late", 2, *flags)
    late.wait_for_step(5)
    late.ranks[1].send_signal(signal.SIGSTOP)
    time.sleep(LATE_S)
    step = max(records(late.folder))
    late.ranks[1].send_signal(signal.SIGCONT)
    late.wait(0)
    return f"stood still at step {step}; {compare(late.folder, whole.folder)}"


def evaluation_samples_export(session: Session) -> str:
    """Validation losses of fsdp and tp are those of one rank; each run has its texts and its export."""
    data = session.folder / "data"
    prepare = ["--input=docs", f"--output={data}", "--tokenizer=byte", "--split=90,10"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(
        [sys.executable, "-m", "fms_fsdp", "prepare", *prepare],
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=session.timeout_s,
    )
    model = session.model(4)[:-2]
    flags = [
        *COMMON,
        *model,
        f"--data_path={data}",
        "--num_steps=10",
        "--eval_interval=5",
        "--eval_steps=2",
        "--sample_interval=5",
        "--sample_prompts=The ",
        "--checkpoint_interval=5",
        "--export_interval=5",
    ]
    one = session.launch("one", 1, *flags, "--batch_size=8")
    one.wait(0)
    found = list[str]()
    for name, layout in (
        ("fsdp", [FSDP, "--batch_size=4"]),
        ("tp", ["--tp_size=2", "--batch_size=8"]),
    ):
        launch = session.launch(name, 2, *flags, *layout)
        launch.wait(0)
        evaluations = compare_evaluations(launch.folder, one.folder)
        texts = (launch.folder / "samples.txt").read_text(encoding="utf-8")
        if texts.count("The ") < 2:
            raise LifeFailed(f"{name} has no text after both evaluations: {texts[:200]}")
        for step in (5, 10):
            weights = launch.folder / "exports" / f"step_{step}" / "model.safetensors"
            if not weights.exists():
                raise LifeFailed(f"{name} lacks {weights}")
        found.append(f"{name}: {compare(launch.folder, one.folder)}, {evaluations}")
    return "; ".join(found)


def compare_evaluations(found: Path, expected: Path) -> str:
    """Returns the largest relative difference of validation losses.

    Raises:
        LifeFailed: one is missing, or differs by more than fp32 explains.
    """
    pairs = list(zip(evaluations(found), evaluations(expected), strict=True))
    if len(pairs) < 2:
        raise LifeFailed(f"{found.name} has {len(pairs)} evaluations")
    largest = max(abs(ours / theirs - 1) for ours, theirs in pairs)
    if not largest <= FP32_BOUND:
        raise LifeFailed(f"validation losses of {found.name} differ by {largest:.2g}")
    return f"validation {largest:.2g}"


def evaluations(folder: Path) -> list[float]:
    """Returns the validation losses of a run, in order."""
    losses = list[float]()
    for text in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "eval/loss" in line:
            losses.append(line["eval/loss"])
    return losses


def bad_input_on_one_rank(session: Session) -> str:
    """A token outside of the vocabulary on one rank ends both: one line, with status 2 there."""
    stream = "--dataset_builder=tests.gpu.bad_stream:build"
    flags = [*COMMON, *session.model(4), FSDP, stream, "--checkpoint_interval=2"]
    flags.append(f"--collective_timeout_s={COLLECTIVE_TIMEOUT_S}")
    launch = session.launch("bad", 2, *flags)
    statuses = launch.wait(1, 2, -signal.SIGABRT)
    lines = [line for line in launch.text(1).splitlines() if "vocab" in line]
    if statuses[1] != 2 or not lines:
        raise LifeFailed(f"exit statuses {statuses}: {launch.end_of_logs()}")
    return f"exit statuses {statuses}: {lines[0][:120]}"


LIFE: dict[str, Callable[[Session], str]] = {
    "save on 2 and resume on 4 and on 1": save_and_resume,
    "SIGTERM to one rank": sigterm_to_one_rank,
    "kill of one rank": kill_of_one_rank,
    "late rank": late_rank,
    "evaluation and samples and export": evaluation_samples_export,
    "bad input on one rank": bad_input_on_one_rank,
}
