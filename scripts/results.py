"""Prints what a finished run of scripts/train.sh has reached, and what to do next."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fms_fsdp.config.values import counted
from fms_fsdp.files import read_json
from fms_fsdp.launch import say
from fms_fsdp.process import process_age_s

LENGTHS = ("num_steps", "num_tokens", "num_samples", "num_epochs", "lr_decay")
# The variables of train.sh that select what is trained, without its length.
VARIABLES = (
    "MODEL_VARIANT",
    "SEQ_LENGTH",
    "BATCH_SIZE",
    "LEARNING_RATE",
    "REPORT_INTERVAL",
    "CHECKPOINT_INTERVAL",
    "DATA_DIR",
    "DATASETS",
    "WEIGHTS",
    "EVAL_INTERVAL",
    "SAMPLE_INTERVAL",
    "RUN_NAME",
)
REPORT_PATIENCE_S = 60


class Stopwatch:
    """Seconds of each part of the script; the first part began with bash, which Python replaced."""

    def __init__(self) -> None:
        self.parts = dict[str, float]()

    def end_part(self, name: str) -> None:
        self.parts[name] = process_age_s() - sum(self.parts.values())

    def __str__(self) -> str:
        parts = [
            f"{name} {seconds:.0f} s" for name, seconds in self.parts.items() if seconds >= 0.5
        ]
        total = f"{process_age_s():.0f} s in total"
        return f"{', '.join(parts)}: {total}" if parts else total


def print_results(
    run_dir: Path, data_dir: str, given: Mapping[str, str], stopwatch: Stopwatch
) -> None:
    """Prints losses, a sample, the address of the page of curves, seconds, and next commands.

    given   the flags of the user
    """
    metrics = run_dir / "metrics.jsonl"
    try:
        print(f"final         {last_losses(metrics)}")
    except (OSError, ValueError) as error:
        say(f"note: {metrics} cannot be read: {error}")
    sample = last_sample(run_dir / "samples.txt")
    if sample:
        print("sample        " + sample.replace("\n", "\n              "))
    reason = write_report(run_dir)
    if reason:
        say(f"note: the page of curves could not be made: {reason}")
    else:
        print(f"report        {(run_dir / 'report.html').absolute().as_uri()}")
    stopwatch.end_part("page")
    print(f"time          {stopwatch}")
    for line in next_commands(run_dir, data_dir, given):
        print(line)


def last_losses(metrics: Path) -> str:
    """Returns the last loss of training, validation and test.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    last = dict[str, Any]()
    report = dict[str, Any]()
    num_steps = 0  # of the last report
    for line in metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "loss_mean" in record:
            num_steps = 1  # a launch reports its first step
            if record.get("attempt") == report.get("attempt"):
                num_steps = record["step"] - report["step"]
            report = record
        for key, value in record.items():
            if value is not None:
                last[key] = value
    losses = []
    if "loss_mean" in last:
        losses.append(f"train loss {last['loss_mean']:.4f} (last {counted(num_steps, 'step')})")
    for name, group in (("validation", "eval"), ("test", "test")):
        if f"{group}/loss" not in last:
            continue
        loss = f"{name} loss {last[f'{group}/loss']:.4f}"
        bits = last.get(f"{group}/bits_per_byte")
        if bits is not None:
            loss += f" ({bits:.3f} bits/byte)"
        losses.append(loss)
    return ", ".join(losses)


def last_sample(samples: Path) -> str:
    """Returns the last text that the model wrote during training; "" if it wrote none."""
    if not samples.is_file():
        return ""
    text = samples.read_text(encoding="utf-8", errors="replace")
    return re.split(r"^--- step \d+ ---\n", text, flags=re.MULTILINE)[-1].rstrip("\n")


def write_report(run_dir: Path) -> str:
    """Writes the page of curves; returns why that failed, or ""."""
    command = [sys.executable, "-m", "fms_fsdp", "report", str(run_dir)]
    try:
        ended = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=REPORT_PATIENCE_S,
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {REPORT_PATIENCE_S} s"
    if ended.returncode == 0:
        return ""
    return ended.stdout.partition("\n")[0]


def next_commands(run_dir: Path, data_dir: str, given: Mapping[str, str]) -> Iterator[str]:
    """Yields lines with what a user does after a run."""
    yield f"folder        {run_dir}: metrics.jsonl, checkpoints, log.txt, console.txt"
    if "VIRTUAL_ENV" not in os.environ and Path(sys.prefix) == Path(".venv").absolute():
        yield "activate      source .venv/bin/activate"
    yield f"curves        tensorboard --logdir {shlex.quote(f'{run_dir}/tensorboard')}"
    num_steps = read_json(run_dir / "status.json").get("step") or 1000
    yield f"train longer  {longer_command(given, 3 * num_steps)}"
    yield "your text     python -m fms_fsdp prepare --input=docs --output=data/docs --split=98,2 \\"
    yield f"                  --tokenizer={shlex.quote(f'{data_dir}/tokenizer.model')}"
    train = "bash scripts/train.sh --data_path=data/docs --datasets=docs"
    yield f"              {train}     (replace docs with your folder)"


def longer_command(given: Mapping[str, str], num_steps: int) -> str:
    """Returns the command of a longer run, over whose length the learning rate falls.

    given   the flags of the user, whose variables the command repeats too
    """
    flags = {name: text for name, text in given.items() if name not in LENGTHS}
    flags["num_steps"] = str(num_steps)
    if "lr_schedule" not in flags:
        flags["lr_decay"] = str(num_steps)
    words = ["bash", "scripts/train.sh"]
    words += [f"--{name}={text}" for name, text in flags.items()]
    variables = ""
    for name in VARIABLES:
        text = os.environ.get(name, "")
        if text:
            variables += f"{name}={shlex.quote(text)} "
    return variables + shlex.join(words)
