"""`evaluate` of a run and of its exported folder: tasks of lm-evaluation-harness, held-out data, questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fms_fsdp
from fms_fsdp.__main__ import main
from tests.cli import TINY, trained

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
    flags = ["--train_tokenizer", "--vocab_size=300", "--tokenizer_sample_mb=1", "--num_workers=1"]
    assert main(["prepare", f"--input={folder}/text.txt", f"--output={folder}/data", *flags]) == 0
    flags = [*TINY, "--use_dummy_dataset=False", f"--data_path={folder}/data", "--precision=fp32"]
    flags += ["--num_steps=6", "--batch_size=4", "--trackers=none", f"--output_dir={folder}/run"]
    trained(*flags)
    assert main(["export", f"--path={folder}/run", f"--output={folder}/hf", "--dtype=fp32"]) == 0
    choices = [" grey", " red and much longer than the others", " blue"]
    questions = [
        {
            "text": f"The colour of number {number} is",
            "choices": choices,
            "answer": number % 3,
            "page": "Some words of a page. " * (4 * number + 1),
        }
        for number in range(5)
    ]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    data = f"{{data_files: {{test: {folder}/questions.jsonl}}, cache_dir: {folder}/cache}}"
    (folder / "tasks").mkdir()
    for name, content in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {data}\ntest_split: test\n"
        (folder / "tasks" / f"{name}.yaml").write_text(head + content)
    return folder


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """Runs `evaluate` and returns its results."""
    assert main(["evaluate", "--json", *argv]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_task_scores_equal_lm_eval(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=f"{folder}/tasks", include_defaults=False)
    model = {"pretrained": f"{folder}/hf", "dtype": "float32"}
    how: dict[str, Any] = {"task_manager": manager, "batch_size": 4, "device": "cpu"}
    expected = simple_evaluate(model="hf", model_args=model, tasks=list(TASKS), **how)["results"]
    for name in ("run", "hf"):
        flags = f"--task_path={folder}/tasks", f"--tasks={','.join(TASKS)}"
        found = printed(capsys, f"--path={folder}/{name}", *flags)["tasks"]
        for task in TASKS:
            scores = {key: value for key, value in found[task].items() if isinstance(value, float)}
            assert scores and scores.items() <= expected[task].items(), task


@pytest.mark.slow
def test_exported_folder_gives_the_same_results(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = folder / "choices.jsonl"
    asked = {"prompt": "The colour of number 7", "choices": [" is grey", " or red"], "answer": 0}
    questions.write_text(json.dumps(asked))
    held_out = f"--eval_data_path={folder}/data", "--eval_datasets=text", "--seq_length=64"
    texts, losses, scores = [], [], []
    for name, steps in (("run", 4), ("hf", 2)):  # of 4 and 8 sequences
        path = f"--path={folder}/{name}"
        assert main(["generate", path, "--prompt=The colour", "--temperature=0"]) == 0
        texts.append(capsys.readouterr().out)
        flags = *held_out, f"--eval_steps={steps}", "--batch_size=2"
        losses.append(printed(capsys, path, *flags)["eval/loss"])
        scores.append(printed(capsys, path, f"--questions={questions}"))
    assert texts[0] == texts[1] and len(texts[0]) > 20
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert scores[0]["acc"] == scores[1]["acc"] and scores[0]["questions"] == 1
    tokens = torch.arange(16)[None]
    run, hf = (fms_fsdp.load_model(f"{folder}/{name}")[0] for name in ("run", "hf"))
    assert torch.equal(run(tokens), hf(tokens))


@pytest.mark.slow  # imports lm_eval
def test_unknown_task_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", f"--path={folder}/run", "--tasks=nothing_of_the_kind"]) == 2
    assert "--tasks=nothing_of_the_kind" in capsys.readouterr().err
