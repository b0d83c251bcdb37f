"""Validation: equal to a reference, at every world size, after a resume and offline.

It changes nothing of the training.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fms_fsdp
from fms_fsdp.__main__ import main as command
from fms_fsdp.checkpoint.folders import problem
from fms_fsdp.config import BF16, FP32, BatchPlan, DataConfig, EvalConfig, TrainConfig
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.data.batch import Batch
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.data.validation import HeldOut, open_held_out, scan_held_out
from fms_fsdp.distributed.mesh import Mesh, ParallelDims
from fms_fsdp.errors import UserError, note_once
from fms_fsdp.evaluate import evaluate
from fms_fsdp.generate import NO_RULES, TextModel, _allocate
from fms_fsdp.hf.trained import Trained
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.init import init_weights
from fms_fsdp.prepare.command import prepare
from fms_fsdp.prepare.prepare_flags import PrepareConfig
from fms_fsdp.run.startup_log import changed_validation
from fms_fsdp.tokenizers.tokenizer import ByteTokenizer, TextRules
from fms_fsdp.tools import evaluate_command
from fms_fsdp.tools.evaluate_command import (
    _eval_settings,
    _precision_of_evaluation,
    _shape_of_evaluation,
    _Subject,
    choice_scores,
    score_questions,
)
from fms_fsdp.tools.tool_flags import EvaluateConfig
from tests.cases import cases
from tests.cli import TINY, last_of_each, metrics, run, status, trained
from tests.hf_folders import write_folder
from tests.run.test_launch import wait_for
from tests.specs import resolved
from tests.warm import COMMANDS, launch, running

ALONE = Mesh(ParallelDims("none"), 0, "cpu")
SEQ = 32
FLAGS = ("--model_variant=tiny", f"--seq_length={SEQ}", "--report_interval=1", "--precision=fp32")
EVAL = ("--eval_interval=2", "--eval_at_start=True", "--eval_steps=3", "--eval_test=True")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of bytes, paragraphs of Python's library, with validation and test splits."""
    folder, library = tmp_path_factory.mktemp("corpus"), sysconfig.get_path("stdlib")
    config = PrepareConfig(
        input=f"docs={library}/json,code={library}/email",
        output=str(folder),
        include=("*.py",),
        limit_docs=400,
        tokenizer="byte",
        text_separator=r"\n\n",
        num_workers=1,
        split=(88, 8, 4),
    )
    prepare(config)
    return folder


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps on one process, all of it evaluated, a checkpoint at every second."""
    folder = tmp_path_factory.mktemp("whole")
    trained(*flags(corpus), *EVAL, f"--output_dir={folder}")
    return folder


def flags(corpus: Path, batch: int = 4) -> tuple[str, ...]:
    steps = ("--num_steps=4", "--checkpoint_interval=2")
    return (*FLAGS, f"--data_path={corpus}", f"--global_batch_size={batch}", *steps)


def evaluations(folder: Path, attempt: int = 1) -> dict[int, dict[str, float]]:
    """Step → the results of the launch's evaluation after it."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {
        record["step"]: {
            name: value for name, value in record.items() if name.startswith(("eval/", "test/"))
        }
        for record in records
        if {"eval/loss", "test/loss"} & record.keys() and record["attempt"] == attempt
    }


def saved(folder: Path, step: int) -> dict[str, Any]:
    """The metadata of a checkpoint."""
    content: dict[str, Any] = json.loads(
        (folder / f"checkpoints/step_{step}/train_state.json").read_text()
    )
    return content


def curve(folder: Path) -> list[tuple[float, float, str]]:
    return [
        (r["loss"], r["grad_norm"], r["data_fingerprint"])
        for _, r in sorted(metrics(folder).items())
    ]


def offline(*argv: str, nproc: int = 0) -> subprocess.CompletedProcess[str]:
    return launch(["evaluate", *argv], nproc, program=COMMANDS)


def held_out(corpus: Path, num_sequences: int = 12, **flags: Any) -> tuple[HeldOut, ...]:
    data = DataConfig(data_path=str(corpus), seq_length=SEQ)
    return opened(data, num_sequences, **{"eval_interval": 1, **flags})


def opened(
    data: DataConfig, num_sequences: int, vocab_size: int = 512, **flags: Any
) -> tuple[HeldOut, ...]:
    """At most `num_sequences` sequences of each source that the flags evaluate."""
    section = EvalConfig(eval_steps=num_sequences, **flags)
    trained = None if data.use_dummy_dataset else open_corpus(data)
    return open_held_out(section, scan_held_out(section, data, trained, vocab_size=vocab_size), 1)


def test_run_records_its_evaluations(whole: Path) -> None:
    found = evaluations(whole)
    assert list(found) == [0, 2, 4]
    measures = ("loss", "ppl", "bits_per_byte")
    names = {
        f"{source}/{name}" for source in ("eval", "eval/code", "eval/docs") for name in measures
    }
    assert set(found[0]) == set(found[2]) == names
    assert set(found[4]) == names | {name.replace("eval", "test") for name in names}
    assert found[0]["eval/loss"] == pytest.approx(math.log(258), rel=0.05)
    assert found[0]["eval/loss"] > found[2]["eval/loss"] > found[4]["eval/loss"]
    for values in found.values():
        for name in ("eval", "eval/docs", "eval/code"):
            assert values[f"{name}/ppl"] == pytest.approx(math.exp(values[f"{name}/loss"]))
    for step in (2, 4):
        assert saved(whole, step)["validation_loss"] == found[step]["eval/loss"]
    # the last evaluation comes after the last report
    spent = {step: record["eval_ms"] > 0 for step, record in metrics(whole).items()}
    assert spent == {1: True, 2: False, 3: True, 4: False}
    log = (whole / "log.txt").read_text()
    assert "validation: eval/code 12 sequences, eval/docs 12 sequences, test/code" in log
    line = next(text for text in log.splitlines() if "eval @4  " in text)
    assert f"eval @4  loss {found[4]['eval/loss']:.4f}  ppl " in line
    assert f"  docs {found[4]['eval/docs/loss']:.4f}  " in line


def test_losses_equal_a_slow_reference(corpus: Path, whole: Path) -> None:
    """Sequence by sequence from the logits in float64; the bytes from the decoded text."""
    model, _ = fms_fsdp.load_model(str(whole), step=4)
    recorded, sums = evaluations(whole)[4], dict[str, list[float]]()
    for source in held_out(corpus):
        for row in range(source.num_sequences):
            batch = source.sequences(row, row + 1)
            kept = batch.labels_BS[batch.labels_BS != -100]
            with torch.no_grad():
                logits = model(batch.tokens_BS).double().flatten(0, 1)
            loss = F.cross_entropy(logits, batch.labels_BS.flatten(), reduction="sum").item()
            text = [ByteTokenizer().decode([i]).encode("latin-1", "replace") for i in kept.tolist()]
            for name in ("eval", f"eval/{source.name}"):
                total = sums.setdefault(name, [0.0, 0, 0])
                for i, value in enumerate((loss, len(kept), sum(map(len, text)))):
                    total[i] += value
    assert sums.keys() == {"eval", "eval/docs", "eval/code"}
    for name, (loss, count, num_bytes) in sums.items():
        bits = loss / math.log(2) / num_bytes
        assert recorded[f"{name}/loss"] == pytest.approx(loss / count, rel=1e-6)
        assert recorded[f"{name}/bits_per_byte"] == pytest.approx(bits, rel=1e-6)


def test_validation_leaves_training_bit_equal(corpus: Path, whole: Path, tmp_path: Path) -> None:
    trained(*flags(corpus), f"--output_dir={tmp_path}")
    assert evaluations(tmp_path) == {} and curve(tmp_path) == curve(whole)


def test_stop_abandons_validations_under_way(tmp_path: Path) -> None:
    """First the one of step 2, by a signal; then that of the last step, by a kill. Each comes first in the
    next launch."""
    argv = [*TINY, "--trackers=none", "--checkpoint_interval=0", "--eval_interval=2"]
    argv += [f"--output_dir={tmp_path}"]
    long, short = ("--eval_steps=1000000", "--eval_steps=1")
    metrics_file, last = tmp_path / "metrics.jsonl", tmp_path / "checkpoints/step_4"
    with running([*argv, "--num_steps=4", long]) as process:
        wait_for(lambda: metrics_file.exists() and '"step": 2,' in metrics_file.read_text())
        os.kill(process.pid or 0, signal.SIGTERM)
        process.join(20)
        assert process.exitcode == 75
    assert status(tmp_path)["step"] == 2 and evaluations(tmp_path) == {}
    assert saved(tmp_path, 2)["evaluation_pending"]
    assert run(*argv, "--num_steps=4", short, "--exit_step=3").returncode == 75
    assert list(evaluations(tmp_path, 2)) == [2]
    values = evaluations(tmp_path, 2)[2]
    assert saved(tmp_path, 2)["validation_loss"] == values["eval/loss"]
    assert values.items() <= saved(tmp_path, 2)["metrics"].items()
    with running([*argv, "--num_steps=4", long]) as process:
        wait_for(last.is_dir)
        process.kill()
        process.join(20)
    assert saved(tmp_path, 4)["evaluation_pending"] and not problem(last)
    output = trained(*argv, "--num_steps=4", short)
    assert "note: validation reads synthetic 2 sequences instead of " in output
    assert list(evaluations(tmp_path, 4)) == [4] and status(tmp_path)["status"] == "finished"
    assert saved(tmp_path, 4)["validation_loss"] == evaluations(tmp_path, 4)[4]["eval/loss"]
    assert "evaluation_pending" not in saved(tmp_path, 4) and not problem(last)
    assert "already finished" in trained(*argv, "--num_steps=4", short)


class Masked(HeldOut):
    """A source whose documents are prompts alone."""

    def sequences(self, start: int, stop: int) -> Batch:
        return self.no_sequences(stop - start)


def test_source_without_labels_has_no_loss(
    corpus: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does it change its group's; this is printed once."""
    model, _ = fms_fsdp.load_model(str(whole), step=4)
    sources = held_out(corpus)
    masked = Masked("eval", "prompts", 8, sources[0].stream, sources[0].token_bytes)

    def evaluated(*sources: HeldOut) -> dict[str, float]:
        return evaluate(
            model,
            sources,
            batch_size=4,
            document_mask=False,
            device=torch.device("cpu"),
            mesh=ALONE,
        )

    expected = evaluated(*sources)
    values = evaluated(*sources, masked)
    assert expected.items() <= values.items() and "eval/bits_per_byte" in expected
    assert math.isnan(values["eval/prompts/loss"]) and math.isnan(values["eval/prompts/ppl"])
    alone = evaluated(masked)
    assert math.isnan(alone["eval/loss"]) and "eval/bits_per_byte" not in alone
    assert capsys.readouterr().err.count("eval/prompts has no labels") == 1


@pytest.mark.slow
def test_sharded_validation_equals_one_process(corpus: Path, whole: Path, tmp_path: Path) -> None:
    """The first loss to the last bit. Training is bit-equal with and without validation."""
    argv = (*flags(corpus), "--batch_size=2")
    trained(*argv, f"--output_dir={tmp_path / 'without'}", nproc=2)
    trained(*argv, *EVAL, f"--output_dir={tmp_path / 'with'}", nproc=2)
    assert curve(tmp_path / "with") == curve(tmp_path / "without")
    found, expected = evaluations(tmp_path / "with"), evaluations(whole)
    assert found[0] == expected[0] and found[4] == pytest.approx(expected[4], rel=1e-5)
    told = offline(f"--path={tmp_path / 'with'}", "--json=True", "--eval_test=True")
    assert json.loads(told.stdout) == {"step": 4, "tokens_seen": 4 * 4 * SEQ, **found[4]}


@pytest.mark.slow
def test_uneven_validation_equals_one_process(corpus: Path, tmp_path: Path) -> None:
    """Neither groups nor ranks divide the sequences: masked ones fill groups and whole ranks."""
    assert any(
        source.num_sequences % 8 not in (0, 7) for source in held_out(corpus, num_sequences=800)
    )
    argv = (*flags(corpus, batch=8), "--eval_interval=2", "--eval_at_start=True")
    argv = (*argv, "--eval_steps=100", "--num_steps=2", "--batch_size=2")
    shards = ("--sharding_strategy=hsdp", "--hsdp_shard_size=2")
    trained(*last_of_each([*argv, *shards, f"--output_dir={tmp_path / 'many'}"]), nproc=4)
    trained(*last_of_each([*argv, f"--output_dir={tmp_path / 'one'}"]))
    many, one = evaluations(tmp_path / "many"), evaluations(tmp_path / "one")
    assert many[0] == one[0] and many[2] == pytest.approx(one[2], rel=1e-5)


def test_validation_is_bit_equal_after_resume(corpus: Path, whole: Path, tmp_path: Path) -> None:
    argv = (*flags(corpus), *EVAL, f"--output_dir={tmp_path}")
    assert run(*argv, "--exit_interval=2").returncode == 75
    trained(*argv)
    first, second, expected = evaluations(tmp_path), evaluations(tmp_path, 2), evaluations(whole)
    assert second[2] == first[2] == expected[2] and second[4] == expected[4]


@pytest.mark.slow
def test_eval_epochs_evaluates_by_passes(corpus: Path, tmp_path: Path) -> None:
    sources = open_corpus(DataConfig(data_path=str(corpus), seq_length=SEQ)).sources
    fraction = 2.5 * 4 * SEQ / sum(source.num_tokens for source in sources)
    trained(
        *flags(corpus)[:-2],
        f"--eval_epochs={fraction:.9f}",  # two and a half steps
        "--eval_steps=1",
        "--num_steps=8",
        f"--output_dir={tmp_path}",
    )
    assert sorted(evaluations(tmp_path)) == [3, 5, 8]


def test_offline_equals_the_run(whole: Path) -> None:
    for step, more in ((2, []), (4, ["--eval_test"])):
        told = offline(f"--path={whole}", f"--step={step}", "--json=True", *more)
        assert told.returncode == 0, told.stderr
        expected = {"step": step, "tokens_seen": step * 4 * SEQ, **evaluations(whole)[step]}
        assert json.loads(told.stdout) == expected


def test_offline_prints_a_table_of_any_source(corpus: Path, whole: Path) -> None:
    data = (f"--eval_data_path={corpus}", "--eval_datasets=docs", "--eval_steps=1")
    told = offline(f"--path={whole / 'checkpoints' / 'step_4'}", *data)
    assert told.returncode == 0, told.stderr
    _, header, *lines = (line.split() for line in told.stdout.splitlines())
    assert header[:2] == ["source", "sequences"]
    assert [line[:2] for line in lines] == [["eval/docs", "4"], ["eval", "4"]]
    assert float(lines[0][2]) < math.log(258)


@cases("""
    flag | message
    --path=/none | --path (/none) must hold a complete checkpoint
    --step=3 | of step 3
    --data_path=/none | /none
    --eval_datasets=dox | --eval_datasets=dox is not a folder with files in
""")
def test_offline_bad_input_is_one_line(
    whole: Path, flag: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = [] if flag.startswith("--path") else [f"--path={whole}"]
    assert command(["evaluate", *path, flag]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and message in told


def test_sequences_do_not_depend_on_grouping(corpus: Path) -> None:
    source = next(
        source for source in held_out(corpus, num_sequences=10**6) if source.name == "docs"
    )
    num_sequences = source.num_sequences
    assert num_sequences == source.stream.corpus.sources[0].num_tokens // SEQ > 20
    one_by_one = [source.sequences(row, row + 1) for row in range(num_sequences)]
    together = source.sequences(0, num_sequences + 3)
    for column, parts in zip(together, zip(*one_by_one, strict=True), strict=True):
        assert torch.equal(column[:num_sequences], torch.cat(parts))
    assert (together.labels_BS[num_sequences:] == -100).all()
    assert len({batch.tokens_BS.numpy().tobytes() for batch in one_by_one}) > 0.9 * num_sequences


def test_sources_are_those_of_the_flags(corpus: Path, tmp_path: Path) -> None:
    """In order of their names, whatever the weights; a validation split is not required."""
    synthetic = DataConfig(use_dummy_dataset=True, seq_length=SEQ)
    first, second = opened(synthetic, 5, eval_interval=1, eval_test=True)
    assert (first.group, first.name, first.num_sequences) == ("eval", "synthetic", 5)
    assert (second.group, second.name, second.num_sequences) == ("test", "synthetic", 5)
    assert not torch.equal(first.sequences(0, 5).tokens_BS, second.sequences(0, 5).tokens_BS)
    assert held_out(corpus, eval_interval=0) == ()
    weighted = DataConfig(
        data_path=str(corpus), datasets=("docs", "code"), weights=(2, 1), seq_length=SEQ
    )
    sources = opened(weighted, 3, eval_interval=1, eval_test=True)
    names = [(group, name) for group in ("eval", "test") for name in ("code", "docs")]
    assert [(source.group, source.name) for source in sources] == names
    for name in ("docs", "code", "meta"):
        (tmp_path / name).symlink_to(corpus / name)
    unsplit = DataConfig(data_path=str(tmp_path), datasets=("code",), seq_length=SEQ)
    (source,) = opened(unsplit, 3, eval_interval=1, eval_datasets=("docs",))
    assert source.name == "docs" and source.token_bytes is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_datasets": ("doc",)}, r"--eval_datasets=doc is not .*; did you mean docs"),
        ({"eval_data_path": "/none"}, r"--eval_data_path=/none is not a folder"),
        (
            {"eval_data_path": "{corpus}", "eval_datasets": ("docs",)},
            r"--eval_datasets \(docs\) must not be trained on",
        ),
        ({"eval_data_path": "{corpus}"}, r"--eval_datasets \(code\) must not be trained on"),
        (
            {"eval_data_path": "{corpus}/docs/.."},
            r"--eval_datasets \(code\) must not be trained on",
        ),
        (
            {"eval_data_path": "{corpus}/docs"},
            r"\(\.\) must not be trained on, but its shard shard-",
        ),
        ({"test_data_path": "/none"}, "--test_data_path=/none is not a folder"),
        (
            {"test_data_path": "{corpus}"},
            r"--test_data_path, source \(code\) must not be trained on",
        ),
        ({"data": "{empty}"}, "^evaluation requires held-out data, but --data_path has no"),
        (
            {"data": "{empty}", "eval_interval": 0, "eval_test": True},
            r"--eval_test=.*/test is not a folder",
        ),
        ({"vocab_size": 200}, r"has a vocabulary of 258, the model one of 200"),
    ],
)
def test_bad_held_out_data_is_rejected(
    corpus: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    for name in ("docs", "code", "meta"):
        (tmp_path / name).symlink_to(corpus / name)
    given = {
        name: value.format(corpus=corpus, empty=tmp_path) if isinstance(value, str) else value
        for name, value in changes.items()
    }
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        held_out(given.pop("data", corpus), **given)


def test_test_data_needs_a_folder_to_be_in() -> None:
    """Beside a user's own stream it was read from /test, at the root of the disk."""
    data = DataConfig(dataset_builder="module:function")
    with pytest.raises(UserError, match="--eval_test=True requires --data_path"):
        scan_held_out(EvalConfig(eval_test=True), data, None, vocab_size=8)


def test_short_validation_source_names_its_cure(corpus: Path) -> None:
    longest = max(source.stream.corpus.sources[0].num_tokens for source in held_out(corpus))
    data = DataConfig(data_path=str(corpus), seq_length=longest + 1)
    message = (
        "^--eval_data_path: validation source code has .*; name longer sources in --eval_datasets"
    )
    with pytest.raises(UserError, match=message):
        opened(data, 1, eval_interval=1)


def test_changed_batch_is_noted_for_validation(corpus: Path) -> None:
    cfg = parse_flags(TrainConfig, ["--eval_interval=1", "--eval_steps=3"])
    before = resolved(cfg, batch=BatchPlan(4, 1, 1))
    after = resolved(cfg, batch=BatchPlan(6, 1, 1))
    assert changed_validation(before, before, held_out(corpus, num_sequences=12)) == ""
    assert changed_validation(after, before, held_out(corpus, num_sequences=18)) == (
        "validation reads code 18 sequences instead of 12, docs 18 sequences instead of 12, so its "
        "losses do not continue the earlier ones; --eval_steps=2 reads as many as before"
    )


def test_object_store_equals_a_folder(corpus: Path) -> None:
    data = DataConfig(data_path=f"file://{corpus}", seq_length=SEQ)
    remote = opened(data, 3, eval_interval=1)
    for here, there in zip(held_out(corpus, num_sequences=3), remote, strict=True):
        assert torch.equal(here.sequences(0, 3).labels_BS, there.sequences(0, 3).labels_BS)
        assert there.token_bytes is not None and there.token_bytes.tolist() == [1] * 256 + [0] * 256


@pytest.mark.slow
def test_test_data_is_evaluated_once_at_the_end(corpus: Path, tmp_path: Path) -> None:
    """Not by a launch that is stopped, and with its own number of sequences."""
    argv = (*flags(corpus), f"--output_dir={tmp_path}")
    argv = (*argv, f"--test_data_path={corpus / 'validation'}", "--test_steps=2")
    assert run(*argv, "--exit_interval=2").returncode == 75
    assert evaluations(tmp_path) == {}
    assert "test @4  loss " in trained(*argv)
    assert "test/code 8 sequences, test/docs 8 sequences" in (tmp_path / "log.txt").read_text()
    assert "test @4" not in trained(*argv), "a finished run is not evaluated again"
    assert evaluations(tmp_path, 3) == {}
    ((step, found),) = evaluations(tmp_path, 2).items()
    assert step == 4 and "eval/loss" not in found
    told = json.loads(
        offline(f"--path={tmp_path}", "--json=True", "--eval_test=True", "--eval_steps=2").stdout
    )
    assert found == {name: value for name, value in told.items() if name.startswith("test/")}
    assert found == {
        name.replace("eval/", "test/"): told[name] for name in told if name.startswith("eval/")
    }


@pytest.mark.parametrize("answer", ["-1", "true", "2", "null"])
def test_answer_must_be_the_index_of_a_choice(whole: Path, tmp_path: Path, answer: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(f'{{"prompt": "a", "choices": [" b", " c"], "answer": {answer}}}\n')
    config = EvaluateConfig(path=str(whole), questions=str(path))
    with pytest.raises(UserError, match="the index of the answer"):
        score_questions(config)


def test_questions_need_finite_logits() -> None:
    """Comparisons with nan had chosen the first answer."""
    model = build_model(TransformerConfig(1, 16, 32, 2, 2, 300, max_seq_len=64))
    init_weights(model, 1)
    loaded = TextModel(model, ByteTokenizer(), NO_RULES)
    assert len(choice_scores(loaded, "one", [" two", " three"])) == 2
    assert model.head is not None
    torch.nn.init.constant_(model.head.weight, torch.nan)
    with pytest.raises(UserError, match="the logits are not finite"):
        choice_scores(loaded, "one", [" two", " three"])


@pytest.mark.parametrize("before", [(), (256,)])
def test_choice_scores_equal_a_plain_sum(before: tuple[int, ...]) -> None:
    """A text without a BOS token follows the end of another; a space before a choice is the choice's."""
    model = build_model(TransformerConfig(1, 16, 32, 2, 2, 300, max_seq_len=64, init_std=0.3))
    init_weights(model, 1)
    loaded = TextModel(model.double(), ByteTokenizer(), TextRules(before))
    expected = []
    for choice in (" two", " three"):
        ids = [*(before or (257,)), *b"one", *choice.encode()]
        score = 0.0
        for position in range(len(ids) - len(choice), len(ids)):
            with torch.no_grad():
                logits = model(torch.tensor([ids[:position]]))[0, -1]
            score += float(logits.log_softmax(-1)[ids[position]])
        expected.append(score)
    assert choice_scores(loaded, "one", [" two", " three"]) == pytest.approx(expected, rel=1e-4)
    assert choice_scores(loaded, "one ", ["two", "three"]) == pytest.approx(expected, rel=1e-4)


def test_questions_count_right_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sum of a choice, and by the sum per character without the space before it."""
    scores = iter([[-4.0, -6.0], [-4.0, -6.0], [-6.0, -4.0]])
    monkeypatch.setattr(evaluate_command, "load_with_tokenizer", lambda *_: None)
    monkeypatch.setattr(evaluate_command, "choice_scores", lambda *_: next(scores))
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "a", "choices": [" bc", " bcdef"], "answer": 0}\n' * 3)
    values, text = score_questions(EvaluateConfig(path="run", questions=str(path)))
    # -4 / 2 against -6 / 5: the longer one; -6 / 2 against -4 / 5: the longer one too
    assert values == {"acc": 2 / 3, "acc_norm": 0.0, "questions": 3}
    assert text == "acc 0.6667, acc_norm 0, questions 3"


def test_questions_are_read_on_the_device_of_the_model() -> None:
    """On a GPU they stayed on the CPU, where the rotary table is until the first pass."""
    loaded = TextModel(
        _allocate(TransformerConfig(1, 16, 32, 2, 2, 300), "meta"), ByteTokenizer(), NO_RULES
    )
    devices = []

    def answer(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        devices.append(args[0].device.type)
        raise InterruptedError

    loaded.model.register_forward_pre_hook(answer)
    with pytest.raises(InterruptedError):
        choice_scores(loaded, "one", [" two"])
    assert devices == ["meta"]


def test_question_with_unknown_token_is_one_line() -> None:
    """It was an IndexError of torch."""
    model = build_model(TransformerConfig(1, 16, 32, 2, 2, 258, max_seq_len=64))
    loaded = TextModel(model, ByteTokenizer(), NO_RULES)
    assert len(choice_scores(loaded, "one", [" two"])) == 1
    small = build_model(TransformerConfig(1, 16, 32, 2, 2, 257, max_seq_len=64))
    with pytest.raises(UserError, match="token 257 is not in the model's vocabulary of 257"):
        choice_scores(loaded._replace(model=small), "one", [" two"])


def test_tasks_require_a_tokenizer(
    eight_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval ended in a traceback of transformers."""
    tasks = SimpleNamespace(match_tasks=lambda names: names)
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=None))
    monkeypatch.setitem(
        sys.modules, "lm_eval.tasks", SimpleNamespace(TaskManager=lambda **_: tasks)
    )
    monkeypatch.setitem(sys.modules, "lm_eval.utils", SimpleNamespace(make_table=None))
    monkeypatch.setattr(evaluate_command, "is_installed", lambda _: True)
    write_folder(tmp_path)
    for path in (eight_steps, tmp_path):
        config = EvaluateConfig(path=str(path), tasks=("a",))
        with pytest.raises(UserError, match=r"--path=.* has no tokenizer; put the tokenizer of"):
            evaluate_command.main(config)


def test_data_path_replaces_synthetic_tokens(corpus: Path) -> None:
    """A run on synthetic tokens was evaluated on these, whatever --data_path said."""
    trained_on = TrainConfig(data=DataConfig(use_dummy_dataset=True, seq_length=SEQ))
    cfg = _eval_settings(EvaluateConfig(), trained_on)
    (listing,) = scan_held_out(cfg.eval, cfg.data, None, vocab_size=512)
    assert listing.corpus is None
    cfg = _eval_settings(EvaluateConfig(data_path=str(corpus)), trained_on)
    (listing,) = scan_held_out(cfg.eval, cfg.data, None, vocab_size=512)
    assert listing.corpus is not None
    assert [source.name for source in listing.corpus.sources] == ["code", "docs"]


def test_learned_positions_are_not_made_up(tmp_path: Path) -> None:
    """Those beyond the checkpoint's had become its mean position."""
    shape = TransformerConfig(1, 16, 32, 2, 2, 300, max_seq_len=64, pos_emb="learned")
    subject = _Subject(Trained(tmp_path, shape), FP32, TrainConfig(), 1, 1)
    assert _shape_of_evaluation(subject, 64).max_seq_len == 64
    with pytest.raises(UserError, match="--seq_length=65 must be at most the 64 learned positions"):
        _shape_of_evaluation(subject, 65)
    rotary = replace(subject, trained=Trained(tmp_path, replace(shape, pos_emb="rope")))
    assert _shape_of_evaluation(rotary, 65).max_seq_len == 65


@pytest.mark.parametrize(
    ("scaling", "capability", "is_kept"),
    [
        ("row", (8, 0), False),
        ("row", (8, 9), False),
        ("row", (9, 0), True),
        ("tensor", (8, 0), False),
        ("tensor", (8, 9), True),
    ],
)
def test_float8_run_is_evaluated_on_any_gpu(
    scaling: str,
    capability: tuple[int, int],
    is_kept: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A GPU without the kernels ended in a traceback of torch."""
    note_once.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old")
    trained_in = replace(BF16, float8=scaling)
    found = _precision_of_evaluation(trained_in, torch.device("cuda"))
    assert found == (trained_in if is_kept else BF16)
    assert ("Old has no kernels for the run's float8" in capsys.readouterr().err) is not is_kept
    assert _precision_of_evaluation(trained_in, torch.device("cpu")) == trained_in
