"""`evaluate --tasks`: what lm-evaluation-harness gives on the exported folder, from the checkpoint itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.slow
def test_tasks_are_scored_as_on_the_exported_folder(folder: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=f"{folder}/tasks", include_defaults=False)
    expected = simple_evaluate(
        model="hf",
        model_args={"pretrained": f"{folder}/hf", "dtype": "float32"},
        tasks=list(TASKS),
        task_manager=manager,
        batch_size=4,
        device="cpu",
    )
    found = evaluated(folder, f"--tasks={','.join(TASKS)}")["tasks"]
    for task in TASKS:
        numbers = {k: v for k, v in found[task].items() if isinstance(v, float)}
        assert numbers == {k: v for k, v in expected["results"][task].items() if k in numbers}, task


def test_unknown_task_and_torchrun_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", f"--path={folder}/run", "--tasks=nothing_of_the_kind"]) == 2
    assert "--tasks=nothing_of_the_kind must be a task" in capsys.readouterr().err
