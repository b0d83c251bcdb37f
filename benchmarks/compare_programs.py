"""Compares installed packages, a mistyped flag and data loading with upstream fms-fsdp, torchtitan and litgpt.

    python benchmarks/compare_programs.py --ours=ENV --fms_fsdp=ENV --torchtitan=ENV --litgpt=ENV \\
        --output=programs.json

ENV is a fresh environment of a program, `python -m venv ENV` and `ENV/bin/pip install` with `.`,
`litgpt requests` or `torchtitan triton` (they import requests and triton but do not ask for them; triton
comes with torch for GPUs). fms-fsdp is no package: its environment has ibm-fms, fire, pyarrow and
transformers, and its folder `fms_fsdp` lies in site-packages. All need the same torch. A program that is not
given is left out; so is what cannot be measured of one.

With --data, the data loaders of ours and fms-fsdp read the same shards (bench_data.py makes them, in the
layout of fms-fsdp) at 4096 tokens a row, 2 rows a batch, one rank, no workers, one thread. Each first draws
10,000 rows: so many fill the shuffle buffer of fms-fsdp, and the files are in the page cache then. All times
are CPU seconds, user and system. Every measurement is a process of its own, three times; medians count.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SEQ_LENGTH, ROWS, WARM_BATCHES, BATCHES = 4096, 2, 5000, 1000
ROUNDS, WRONG = 3, "--learning_rat=1"
# What torch itself brings, with and without a GPU, and the installers: left out for all alike.
TORCH = re.compile(
    r"torch|triton|nvidia-.*|cuda-.*|filelock|typing-extensions|sympy|mpmath|networkx|jinja2|markupsafe"
    r"|fsspec|pip|setuptools"
)
PACKAGES = {"ours": "fms-fsdp", "fms_fsdp": "", "torchtitan": "torchtitan", "litgpt": "litgpt"}
# fms-fsdp trains on GPUs only: here only its function that takes the flags is called.
TAKES_FLAGS = """
from fms_fsdp.config import train_config
from fms_fsdp.utils.config_utils import update_config
update_config(train_config(), learning_rat=1)
"""
TITAN = [
    "{env}/bin/python",
    "-m",
    "torchtitan.train",
    "--module=llama3",
    "--config=llama3_debugmodel",
]
COMMANDS = {
    "ours": ["{env}/bin/python", f"{ROOT}/main_training.py", "--model_variant=tiny", WRONG],
    "fms_fsdp": ["{env}/bin/python", "-c", TAKES_FLAGS],
    "torchtitan": [*TITAN, WRONG],
    "litgpt": ["{env}/bin/litgpt", "pretrain", "pythia-14m", WRONG],
}


# --- packages ---


def site_packages(env: Path) -> Path:
    for found in env.glob("lib/python3*/site-packages"):
        return found
    raise SystemExit(f"error: {env} must be an environment; make it with `python -m venv {env}`")


def installed(name: str, env: Path) -> dict[str, Any]:
    """Packages and megabytes beside the program's own and torch's, compiled Python left out."""
    every = importlib.metadata.distributions(path=[str(site_packages(env))])
    found = {re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(): each for each in every}
    own = found.pop(PACKAGES[name], None)
    brought = {key: each for key, each in found.items() if not TORCH.fullmatch(key)}
    paths = [Path(str(file.locate())) for each in brought.values() for file in each.files or []]
    size = sum(path.stat().st_size for path in paths if path.suffix != ".pyc" and path.is_file())
    used = {key: found[key].version for key in ("torch", "pyarrow", "ibm-fms") if key in found}
    result: dict[str, Any] = {"versions": used}
    if own is not None:  # fms-fsdp asks for an address of GitHub: what pip would bring is not known
        result |= {"version": own.version, "packages": len(brought), "mb": round(size / 1e6, 1)}
    return result


# --- a mistyped flag ---


def mistyped(name: str, env: Path) -> dict[str, Any]:
    """What the command line answers to a flag that does not exist, after one call that warms up."""
    command = [part.format(env=env) if "{env}" in part else part for part in COMMANDS[name]]
    rounds, settings = [], os.environ | {"PYTHONPATH": ""}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(1 + ROUNDS):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            rounds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    lines = [line.strip("│ ") for line in (done.stdout + done.stderr).splitlines()]
    return {
        "exit_status": done.returncode,
        "cpu_s": statistics.median(rounds[1:]),
        "cpu_s_rounds": rounds[1:],
        "answer": next((line for line in lines if "learning_rat" in line), ""),
    }


# --- the data loaders; each function runs in a process of its own ---


def anonymous_mib() -> float:
    """Resident memory that no file backs."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.partition("RssAnon:")[2].split()[0]) / 1024


def theirs(data: Path, state: Path) -> tuple[Callable[[], Any], Callable[[], int]]:
    """Opens fms-fsdp's loader; returns what draws a batch, and what saves its state."""
    module: Any = importlib.import_module("fms_fsdp.utils.dataloader_utils")
    settings: dict[str, Any] = {"seq_length": SEQ_LENGTH, "batch_size": ROWS, "num_workers": 0}
    settings |= {"data_path": str(data), "datasets": "web,code,books", "weights": "0.7,0.2,0.1"}
    settings |= {"file_type": "arrow", "col_name": "tokens", "eos_token": 0, "strip_tokens": ""}
    settings |= dict.fromkeys(["bos_token", "bol_token", "eol_token"]) | {"logical_shards": 1024}
    settings |= {"seed": 2023, "checkpoint_interval": 10_000, "resuming_dataset": False}
    settings |= {
        "ckpt_save_path": str(state),
        "ckpt_load_path": str(state),
        "verbose_loaders": False,
    }
    loader = module.get_data_loader(SimpleNamespace(**settings), 0, 1)
    batches = iter(loader)

    def save() -> int:
        folder = state / "checkpoints" / f"step_{WARM_BATCHES + BATCHES}_ckp"
        loader.dataset.save_to_path(str(folder))
        return sum(path.stat().st_size for path in folder.iterdir())

    return lambda: next(batches), save


def ours(data: Path, state: Path) -> tuple[Callable[[], Any], Callable[[], int]]:
    """Opens this program's stream; returns what draws a batch, and what saves its state."""
    import bench_data

    stream = bench_data.open_stream(bench_data.section_of(str(data)), ROWS)
    saved = state / "stream.json"
    if saved.exists():
        stream.load_state_dict(
            json.loads(saved.read_text(encoding="utf-8")), WARM_BATCHES + BATCHES
        )
    return stream.next_batch, lambda: saved.write_text(
        json.dumps(stream.state_dict()), encoding="utf-8"
    )


def load(name: str, data: Path, state: Path) -> dict[str, float]:
    """Opens, draws a batch; where nothing is saved yet, warms up, measures and saves too."""
    import pyarrow.ipc  # noqa: F401
    import torch

    torch.set_num_threads(1)
    importlib.import_module("bench_data" if name == "ours" else "fms_fsdp.utils.dataloader_utils")
    resumes = any(state.iterdir())
    before, begin = anonymous_mib(), time.process_time()
    draw, save = (ours if name == "ours" else theirs)(data, state)
    draw()
    first_s = time.process_time() - begin
    if resumes:
        return {"resume_cpu_s": first_s}
    for _ in range(WARM_BATCHES - 1):
        draw()
    begin = time.process_time()
    for _ in range(BATCHES):
        draw()
    rate = BATCHES * ROWS * SEQ_LENGTH / (time.process_time() - begin)
    result = {
        "first_batch_cpu_s": first_s,
        "tokens_per_cpu_s": rate,
        "memory_mib": anonymous_mib() - before,
    }
    return result | {"state_bytes": float(save())}


def loaders(name: str, env: Path, data: Path) -> dict[str, Any]:
    """Medians of the rounds; each round has a process that reads and saves, and one that resumes."""
    settings = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT) if name == "ours" else "",
    }
    rounds = []
    for _ in range(ROUNDS):
        found = dict[str, float]()
        with tempfile.TemporaryDirectory() as state:
            for _ in ("read and save", "resume"):
                command = [f"{env}/bin/python", __file__, f"--load={name}", f"--data={data}"]
                command.append(f"--state={state}")
                done = subprocess.run(command, env=settings, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"error: the loader of {name} failed: {done.stderr[-2000:]}")
                found |= json.loads(done.stdout.splitlines()[-1])
        rounds.append(found)
    medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    return {**medians, "rounds": rounds}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    for name in PACKAGES:
        parser.add_argument(f"--{name}", type=Path, metavar="ENV")
    parser.add_argument(
        "--data", type=Path, help="folder of the shards, made if missing; none: no loaders"
    )
    parser.add_argument("--output", type=Path, required=True, help="result file")
    parser.add_argument("--load", choices=PACKAGES, help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.load:
        print(json.dumps(load(flags.load, flags.data, flags.state)))
        return
    sys.path.insert(0, str(ROOT))
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0]}
    for name in PACKAGES:
        env: Path | None = getattr(flags, name)
        if env is not None:
            result[name] = {"installed": installed(name, env)}
            result[name]["mistyped_flag"] = mistyped(name, env.absolute())
            print(name, json.dumps(result[name], indent=1), flush=True)
    if flags.data is not None:
        import bench_data

        bench_data.make_corpus(flags.data, 150_000_000, 250_000, "documents")
        counts = flags.data / "meta" / "counts.csv"
        listed = counts.read_text(encoding="utf-8")  # fms-fsdp wants a slash before the names
        counts.write_text(re.sub(r"^(?=[a-z]+/shard)", "/", listed, flags=re.M), encoding="utf-8")
        for name in {"ours", "fms_fsdp"} & result.keys():
            result[name]["loader"] = loaders(
                name, getattr(flags, name).absolute(), flags.data.absolute()
            )
    flags.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {flags.output}")


if __name__ == "__main__":
    main()
