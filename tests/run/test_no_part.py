"""A plain Llama trains without optional parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli import ROOT, metrics
from tests.data.corpora import SEP, VOCAB, write_corpus

# The server of tests/warm.py has imported the commands, so this is a process of its own, which forks itself.
DRIVER = """
import json, os, sys
import main_training
import torch, torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp  # once for all forks

for flags in json.loads(sys.argv[1]):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    status = main_training.main(flags)
    loaded = [name for name in sys.modules if name.startswith("fms_fsdp.")]
    print("\\nENDED", json.dumps([status, sorted(loaded)]), flush=True)
    os._exit(0)
"""
SMALL = [
    *("--model_variant=7b", "--num_layers=2", "--hidden_size=64", "--ffn_hidden_size=128"),
    *("--num_attention_heads=4", f"--vocab_size={VOCAB}", "--seq_length=64", "--batch_size=2"),
    *("--report_interval=1", "--checkpoint_interval=2"),
]


OPTIONAL = ("tools", "hf", "generate", "samples", "distill", "models.gpt")
OPTIONAL += tuple(f"parallel.{name}" for name in ("float8", "tensor", "context", "pipeline"))


def is_apart(module: str) -> bool:
    return module.removeprefix("fms_fsdp.").startswith(OPTIONAL)


def endings(launches: list[list[str]]) -> list[tuple[int, list[str]]]:
    """The exit status of each launch, and the modules of this project that it has imported."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(launches)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    ended: list[Any] = [
        json.loads(line.partition(" ")[2])
        for line in done.stdout.splitlines()
        if line.startswith("ENDED")
    ]
    assert len(ended) == len(launches), done.stdout + done.stderr
    return [(status, modules) for status, modules in ended]


CHOSEN = {
    "--dropout=0.1": "models.gpt",
    "--norm=scalenorm": "models.gpt",
    "--precision=float8": "parallel.float8",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the plain launches."""
    return tmp_path_factory.mktemp("no_part") / "run"


@pytest.fixture(scope="module")
def ended(run: Path) -> list[tuple[int, list[str]]]:
    """The endings of four plain launches, and of one for each part."""
    corpus = run.parent / "corpus"
    write_corpus(corpus, {"web": [4000, 3000]})
    flags = [*SMALL, f"--data_path={corpus}", f"--sep_token={SEP}", f"--output_dir={run}"]
    launches = [
        [*flags, "--num_steps=2", "--num_kv_heads=3"],
        [*flags, "--num_steps=2"],
        [*flags, "--num_steps=4", "--seed=7"],
        [*flags, "--num_steps=4"],
    ]
    for number, flag in enumerate(CHOSEN):
        folder = run.parent / f"part_{number}"
        launches.append(
            [*SMALL, "--use_dummy_dataset", "--num_steps=1", flag, f"--output_dir={folder}"]
        )
    return endings(launches)


@pytest.mark.slow
def test_a_refusal_a_save_and_a_resume_load_no_part(
    run: Path, ended: list[tuple[int, list[str]]]
) -> None:
    plain = ended[:4]
    assert [status for status, _ in plain] == [2, 0, 2, 0]
    for _, modules in plain:
        assert not list(filter(is_apart, modules))
    assert sorted(metrics(run)) == [1, 2, 3, 4] and (run / "checkpoints" / "step_4").is_dir()


def test_a_part_that_is_chosen_is_the_only_one(ended: list[tuple[int, list[str]]]) -> None:
    """Without this the test above could pass because nothing is ever found."""
    parts = [(status, list(filter(is_apart, modules))) for status, modules in ended[4:]]
    assert parts == [(0, [f"fms_fsdp.{part}"]) for part in CHOSEN.values()]
