"""`evaluate --tasks`: what lm-evaluation-harness gives on the exported folder, from the checkpoint itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fms_fsdp.__main__ import main
from tests.cli import ROOT, TINY, trained, under_torchrun

SETTINGS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
TASKS = {
    "colours": """\
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "pages": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "words": """\
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["e e", "\\n"], max_gen_toks: 9}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its export, and the files of three tasks, one of each kind."""
    folder = tmp_path_factory.mktemp("harness")
    text = "".join(f"The colour of number {i} is grey, or red.\n\n" for i in range(800))
    (folder / "text.txt").write_text(text)
    prepared = [
        "--train_tokenizer",
        "--vocab_size=300",
        "--tokenizer_sample_mb=1",
        "--num_workers=1",
    ]
    assert (
        main(["prepare", f"--input={folder}/text.txt", f"--output={folder}/data", *prepared]) == 0
    )
    flags = (*TINY, "--use_dummy_dataset=False", f"--data_path={folder}/data", "--precision=fp32")
    trained(
        *flags, "--num_steps=6", "--batch_size=4", "--trackers=none", f"--output_dir={folder}/run"
    )
    assert main(["export", f"--path={folder}/run", f"--output={folder}/hf", "--dtype=fp32"]) == 0
    questions = []
    for number in range(5):
        choices = [" grey", " red and much longer than the others", " blue"]
        text, page = (
            f"The colour of number {number} is",
            "Some words of a page. " * (4 * number + 1),
        )
        questions.append({"text": text, "choices": choices, "answer": number % 3, "page": page})
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    data = f"{{data_files: {{test: {folder}/questions.jsonl}}, cache_dir: {folder}/cache}}"
    (folder / "tasks").mkdir()
    for name, content in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {data}\ntest_split: test\n"
        (folder / "tasks" / f"{name}.yaml").write_text(head + content)
    return folder


def evaluated(folder: Path, *flags: str, nproc: int = 0) -> dict[str, Any]:
    command = (
        [*under_torchrun(nproc, "-m", "fms_fsdp")] if nproc else [sys.executable, "-m", "fms_fsdp"]
    )
    command += ["evaluate", f"--path={folder}/run", f"--task_path={folder}/tasks", "--json", *flags]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | SETTINGS, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    content: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return content


def answers(model: Any, folder: Path) -> dict[str, list[Any]]:
    """What a model answers to each question of each task."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=f"{folder}/tasks", include_defaults=False)
    found = simple_evaluate(model=model, tasks=list(TASKS), task_manager=manager, log_samples=True)
    return {name: [sample["resps"] for sample in found["samples"][name]] for name in TASKS}


@pytest.mark.slow
def test_every_answer_is_that_of_the_harness_on_the_exported_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM

    from fms_fsdp.distributed.axes import ParallelDims
    from fms_fsdp.distributed.mesh import Mesh
    from fms_fsdp.evaluate import Forward
    from fms_fsdp.generate import load
    from fms_fsdp.tools.harness import HarnessModel

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    theirs = answers(
        HFLM(pretrained=f"{folder}/hf", device="cpu", batch_size=3, dtype="float32"), folder
    )
    found, cpu = load(f"{folder}/run", None, "cpu"), torch.device("cpu")
    assert found.tokenizer is not None
    forward = Forward(found.model, 2, False, cpu, Mesh(ParallelDims("none"), 0, "cpu"))
    ours = answers(HarnessModel(forward, found.tokenizer, found.rules), folder)
    assert ours["words"] == theirs["words"] and any(words != [[""]] for words in ours["words"])
    for their_scores, our_scores in zip(theirs["colours"], ours["colours"], strict=True):
        for ((their_score, their_greedy),), ((our_score, our_greedy),) in zip(
            their_scores, our_scores, strict=True
        ):
            assert our_score == pytest.approx(their_score, abs=1e-4) and our_greedy == their_greedy
    for ((their_score,),), ((our_score,),) in zip(theirs["pages"], ours["pages"], strict=True):
        assert our_score == pytest.approx(their_score, abs=1e-4)
    longest = max(len(question) for question in theirs["pages"])
    assert longest and len(ours["pages"]) == 5


@pytest.mark.slow
def test_the_command_gives_the_same_on_one_process_and_sharded_over_two(folder: Path) -> None:
    one = evaluated(folder, f"--tasks={','.join(TASKS)}")
    two = evaluated(folder, f"--tasks={','.join(TASKS)}", "--batch_size=1", nproc=2)
    assert one["step"] == two["step"] == 6 and set(one["tasks"]) == set(TASKS)
    for name, values in one["tasks"].items():
        for key, value in values.items():
            if isinstance(value, float):
                assert two["tasks"][name][key] == pytest.approx(value, rel=1e-5), (name, key)
    few = evaluated(folder, "--tasks=colours", "--limit=2")["tasks"]["colours"]
    assert few["sample_len"] == 2 if "sample_len" in few else few["acc,none"] in (0.0, 0.5, 1.0)


@pytest.mark.slow
def test_what_is_no_task_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", f"--path={folder}/run", "--tasks=nonesuch"]) == 2
    assert "--tasks (nonesuch) must name tasks of lm-evaluation-harness" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", ["--limit=3", "--task_path=x", "--tasks=a --eval_steps=3", "--tasks=a --eval_test"]
)
def test_flags_without_effect_are_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--path=runs/none", *flags.split()]) == 2
    assert "has no effect" in capsys.readouterr().err
