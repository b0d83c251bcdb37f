"""Validation: the same numbers at every world size, after a resume and offline, as by a reference.

It changes nothing of the training.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fms_fsdp.checkpoint.folders import complete_steps, find_checkpoint
from fms_fsdp.checkpoint.io import load_checkpoint
from fms_fsdp.config import FP32, DataConfig, EvalConfig, ParallelConfig
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.data.tokenizer import ByteTokenizer
from fms_fsdp.data.validation import HeldOut, open_held_out, scan_held_out
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.tools.prepare.command import PrepareConfig, prepare
from tests.cli import metrics, run, trained
from tests.warm import COMMANDS, launch

SEQ = 32
FLAGS = ("--model_variant=tiny", f"--seq_length={SEQ}", "--report_interval=1", "--precision=fp32")
EVAL = ("--eval_interval=2", "--eval_at_start=True", "--eval_steps=3", "--eval_test=True")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of bytes, paragraphs of Python's library, with validation and test splits."""
    folder = tmp_path_factory.mktemp("corpus")
    library = Path(sysconfig.get_path("stdlib"))
    inputs = f"docs={library}/json,code={library}/email"
    options: dict[str, Any] = {
        "tokenizer": "byte",
        "text_separator": r"\n\n",
        "num_workers": 1,
        "split": (88, 8, 4),
    }
    prepare(
        PrepareConfig(
            input=inputs, output=str(folder), include=("*.py",), limit_docs=400, **options
        )
    )
    return folder


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps on one process, all of it evaluated, a checkpoint at every second."""
    folder = tmp_path_factory.mktemp("whole")
    trained(
        *flags(corpus), *EVAL, "--num_steps=4", "--checkpoint_interval=2", f"--output_dir={folder}"
    )
    return folder


def flags(corpus: Path, batch: int = 4) -> tuple[str, ...]:
    return (*FLAGS, f"--data_path={corpus}", f"--global_batch_size={batch}")


def evaluations(folder: Path, attempt: int = 1) -> dict[int, dict[str, float]]:
    """Step → what the launch's evaluation after it found."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        record["step"]: {
            name: value for name, value in record.items() if name.startswith(("eval/", "test/"))
        }
        for record in records
        if "eval/loss" in record and record["attempt"] == attempt
    }


def curve(folder: Path) -> list[tuple[float, float, str]]:
    return [
        (r["loss"], r["grad_norm"], r["data_fingerprint"])
        for _, r in sorted(metrics(folder).items())
    ]


def offline(*argv: str, nproc: int = 0) -> subprocess.CompletedProcess[str]:
    return launch(["evaluate", *argv], nproc, program=COMMANDS)


def held_out(corpus: Path, max_rows: int = 12, **changes: Any) -> tuple[HeldOut, ...]:
    data = DataConfig(data_path=str(corpus), seq_length=SEQ)
    return opened(data, max_rows, **{"eval_interval": 1, **changes})


def opened(
    data: DataConfig, max_rows: int, vocab_size: int = 512, **flags: Any
) -> tuple[HeldOut, ...]:
    """At most `max_rows` rows of each source that the flags evaluate."""
    section = EvalConfig(eval_steps=max_rows, **flags)
    trained = None if data.use_dummy_dataset else open_corpus(data)
    return open_held_out(section, scan_held_out(section, data, trained, vocab_size=vocab_size), 1)


def test_a_run_records_what_it_evaluates_and_learns(whole: Path) -> None:
    found = evaluations(whole)
    assert list(found) == [0, 2, 4]
    names = {
        f"eval/{source}/{what}"
        for source in ("code", "docs")
        for what in ("loss", "ppl", "bits_per_byte")
    }
    assert set(found[0]) == names | {"eval/loss", "eval/ppl", "eval/bits_per_byte"}
    assert {name for name in found[4] if name.startswith("test/")} == {
        n.replace("eval", "test") for n in set(found[0])
    }
    assert found[0]["eval/loss"] == pytest.approx(math.log(258), rel=0.05)
    assert found[0]["eval/loss"] > found[2]["eval/loss"] > found[4]["eval/loss"]
    for values in found.values():
        for name in ("eval", "eval/docs", "eval/code"):
            assert values[f"{name}/ppl"] == pytest.approx(math.exp(values[f"{name}/loss"]))
    states = [
        json.loads((whole / f"checkpoints/step_{s}/train_state.json").read_text()) for s in (2, 4)
    ]
    assert [state["validation_loss"] for state in states] == [
        found[2]["eval/loss"],
        found[4]["eval/loss"],
    ]
    spent = {step: record["eval_ms"] for step, record in metrics(whole).items()}
    assert (
        spent[1] > 0 and spent[3] > 0 and spent[2] == spent[4] == 0
    )  # the last one comes after the last report
    assert (
        "validation: eval/code 12 sequences, eval/docs 12 sequences, test/code"
        in (whole / "log.txt").read_text()
    )


def test_tensorboard_has_the_evaluations(whole: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("eval/docs/bits_per_byte")]
    expected = [
        (step, values["eval/docs/bits_per_byte"]) for step, values in evaluations(whole).items()
    ]
    assert [step for step, _ in shown] == [0, 2, 4]
    assert [value for _, value in shown] == pytest.approx(
        [value for _, value in expected], rel=1e-6
    )


def test_the_numbers_are_those_of_a_slow_reference(corpus: Path, whole: Path) -> None:
    """Row by row from the logits in float64; the bytes from the decoded text."""
    checkpoint = find_checkpoint(whole / "checkpoints", step=4)
    assert checkpoint is not None
    model = parallelize(
        checkpoint.metadata.run.model,
        ParallelConfig(),
        Mesh(ParallelDims("none"), 0, "cpu"),
        device=torch.device("cpu"),
        precision=FP32,
        seed=0,
    )
    load_checkpoint(checkpoint.folder, model, None, is_alone=True)
    recorded, sums = evaluations(whole)[4], [0.0, 0, 0]
    for source in held_out(corpus):
        loss, count, num_bytes = 0.0, 0, 0
        for row in range(source.num_rows):
            batch = source.rows(row, row + 1)
            kept = batch.labels_BS[batch.labels_BS != -100]
            with torch.no_grad():
                logits = model(batch.tokens_BS)
            loss += F.cross_entropy(
                logits.double().flatten(0, 1), batch.labels_BS.flatten(), reduction="sum"
            ).item()
            count += len(kept)
            num_bytes += sum(
                len(ByteTokenizer().decode([i]).encode("latin-1", "replace")) for i in kept.tolist()
            )
        assert recorded[f"eval/{source.name}/loss"] == pytest.approx(loss / count, rel=1e-6)
        bits = loss / math.log(2) / num_bytes
        assert recorded[f"eval/{source.name}/bits_per_byte"] == pytest.approx(bits, rel=1e-6)
        sums = [sums[0] + loss, sums[1] + count, sums[2] + num_bytes]
    assert recorded["eval/loss"] == pytest.approx(sums[0] / sums[1], rel=1e-6)
    assert recorded["eval/bits_per_byte"] == pytest.approx(
        sums[0] / math.log(2) / sums[2], rel=1e-6
    )
    lines = (whole / "log.txt").read_text().splitlines()
    line = next(text for text in lines if "evaluation at step 4" in text)
    assert f"eval loss {recorded['eval/loss']:.4f}" in line
    assert f"eval/docs loss {recorded['eval/docs/loss']:.4f}" in line


def test_training_is_the_same_to_the_last_bit_with_and_without_validation(
    corpus: Path, whole: Path, tmp_path: Path
) -> None:
    trained(*flags(corpus), "--num_steps=4", "--checkpoint_interval=2", f"--output_dir={tmp_path}")
    assert evaluations(tmp_path) == {}
    assert curve(tmp_path) == curve(whole)


@pytest.mark.slow
def test_sharded_training_is_the_same_with_and_without_validation(
    corpus: Path, whole: Path, tmp_path: Path
) -> None:
    """At two ranks the first numbers are those of one, to the last bit; a later checkpoint is complete."""
    argv = (*flags(corpus), "--num_steps=4", "--checkpoint_interval=2", "--batch_size=2")
    trained(*argv, f"--output_dir={tmp_path / 'without'}", nproc=2)
    trained(*argv, *EVAL, f"--output_dir={tmp_path / 'with'}", nproc=2)
    assert curve(tmp_path / "with") == curve(tmp_path / "without")
    found = evaluations(tmp_path / "with")
    assert found[0] == evaluations(whole)[0]
    assert found[4] == pytest.approx(evaluations(whole)[4], rel=1e-5)
    told = offline(f"--path={tmp_path / 'with'}", "--json=True", "--eval_test=True")
    assert json.loads(told.stdout) == {"step": 4, "tokens_seen": 4 * 4 * SEQ, **found[4]}


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "strategy"), [(2, "ddp"), (4, "fsdp"), (4, "hsdp")])
def test_validation_is_equal_at_every_world_size(
    corpus: Path, tmp_path: Path, nproc: int, strategy: str
) -> None:
    """The rows divide over neither groups nor ranks: masked rows fill groups and whole ranks."""
    assert any(source.num_rows % 8 not in (0, 7) for source in held_out(corpus, max_rows=800))
    argv = (
        *flags(corpus, batch=8),
        "--eval_interval=2",
        "--eval_at_start=True",
        "--eval_steps=100",
        "--num_steps=2",
    )
    argv = (*argv, "--batch_size=2", "--checkpoint_interval=0")
    shards = ("--hsdp_shard_size=2",) if strategy == "hsdp" else ()
    trained(
        *argv,
        f"--sharding_strategy={strategy}",
        *shards,
        f"--output_dir={tmp_path / 'many'}",
        nproc=nproc,
    )
    trained(*argv, f"--output_dir={tmp_path / 'one'}")
    many, one = evaluations(tmp_path / "many"), evaluations(tmp_path / "one")
    assert many[0] == one[0]
    assert many[2] == pytest.approx(one[2], rel=1e-5)


def test_validation_is_bit_equal_before_and_after_a_resume(
    corpus: Path, whole: Path, tmp_path: Path
) -> None:
    argv = (
        *flags(corpus),
        *EVAL,
        "--num_steps=4",
        "--checkpoint_interval=2",
        f"--output_dir={tmp_path}",
    )
    assert run(*argv, "--exit_interval=2").returncode == 75
    trained(*argv)
    assert evaluations(tmp_path, attempt=2)[2] == evaluations(tmp_path)[2] == evaluations(whole)[2]
    assert evaluations(tmp_path, attempt=2)[4] == evaluations(whole)[4]


def test_keep_best_keeps_the_checkpoint_of_the_lowest_validation_loss(
    corpus: Path, tmp_path: Path
) -> None:
    keep = (
        "--checkpoint_interval=1",
        "--keep_last_n=1",
        "--keep_best=1",
        "--learning_rate=0.5",
        "--min_lr_ratio=1",
        "--warmup_steps=0",
    )
    argv = (
        *flags(corpus),
        "--eval_interval=1",
        "--eval_steps=1",
        "--num_steps=5",
        *keep,
        "--async_checkpoint=False",
    )
    trained(*argv, f"--output_dir={tmp_path}")
    losses = {step: values["eval/loss"] for step, values in evaluations(tmp_path).items()}
    best = min(losses, key=lambda step: losses[step])
    assert best != 5
    assert complete_steps(tmp_path / "checkpoints") == [best, 5]


def test_evaluations_come_with_passes_over_the_data(corpus: Path, tmp_path: Path) -> None:
    said = trained(*flags(corpus), "--num_steps=1", f"--output_dir={tmp_path / 'one'}")
    found = re.findall(r"^source \S+: ([\d,]+) tokens", said, re.MULTILINE)
    have = sum(int(text.replace(",", "")) for text in found)
    share = 2.5 * 4 * SEQ / have  # two and a half steps
    argv = (*flags(corpus), f"--eval_epochs={share:.9f}", "--eval_steps=1", "--num_steps=8")
    trained(*argv, f"--output_dir={tmp_path / 'run'}")
    assert sorted(evaluations(tmp_path / "run")) == [3, 5, 8]
    refused = run(*FLAGS, "--use_dummy_dataset=True", "--eval_epochs=1")
    assert (
        refused.returncode == 2
        and "cannot be used together; remove --eval_epochs" in refused.stderr
    )


def test_offline_gives_the_numbers_of_the_run(whole: Path) -> None:
    for step in (2, 4):
        told = offline(
            f"--path={whole}",
            f"--step={step}",
            "--json=True",
            *(["--eval_test"] if step == 4 else []),
        )
        assert told.returncode == 0, told.stderr
        assert json.loads(told.stdout) == {
            "step": step,
            "tokens_seen": step * 4 * SEQ,
            **evaluations(whole)[step],
        }


def test_offline_prints_a_table_of_any_source(corpus: Path, whole: Path) -> None:
    argv = (
        f"--path={whole / 'checkpoints' / 'step_4'}",
        f"--eval_data_path={corpus}",
        "--eval_datasets=docs",
    )
    told = offline(*argv, "--eval_steps=1")
    assert told.returncode == 0, told.stderr
    lines = [line.split() for line in told.stdout.splitlines()]
    assert [line[:2] for line in lines[1:]] == [
        ["source", "sequences"],
        ["eval/docs", "4"],
        ["eval", "4"],
    ]
    assert float(lines[2][2]) < math.log(258)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--path=/none"], "--path (/none) must hold a complete checkpoint"),
        (["--path={whole}", "--step=3"], "of step 3"),
        (["--path={whole}", "--data_path=/none"], "/none"),
        (
            ["--path={whole}", "--eval_datasets=dox"],
            "--eval_datasets=dox is not a folder with files in",
        ),
    ],
)
def test_offline_bad_input_is_one_line(whole: Path, argv: list[str], message: str) -> None:
    told = offline(*(item.format(whole=whole) for item in argv))
    assert told.returncode == 2 and told.stderr.count("\n") == 1 and message in told.stderr, (
        told.stderr
    )


def test_rows_do_not_depend_on_grouping_and_none_comes_twice(corpus: Path) -> None:
    source = next(source for source in held_out(corpus, max_rows=10**6) if source.name == "docs")
    assert source.num_rows == source.stream.corpus.sources[0].num_tokens // SEQ > 20
    one_by_one = [source.rows(row, row + 1) for row in range(source.num_rows)]
    together = source.rows(0, source.num_rows + 3)
    for column, parts in zip(together, zip(*one_by_one, strict=True), strict=True):
        if column is not together.labels_BS:
            assert torch.equal(column[: source.num_rows], torch.cat(parts))
    assert (together.labels_BS[source.num_rows :] == -100).all()
    assert torch.equal(
        together.labels_BS[: source.num_rows], torch.cat([batch.labels_BS for batch in one_by_one])
    )
    assert len({batch.tokens_BS.numpy().tobytes() for batch in one_by_one}) > 0.9 * source.num_rows


def test_synthetic_rows_are_other_than_those_trained_on() -> None:
    data = DataConfig(use_dummy_dataset=True, seq_length=SEQ)
    sources = opened(data, 5, eval_interval=1, eval_test=True)
    assert [(source.group, source.name, source.num_rows) for source in sources] == [
        ("eval", "synthetic", 5),
        ("test", "synthetic", 5),
    ]
    assert not torch.equal(sources[0].rows(0, 5).tokens_BS, sources[1].rows(0, 5).tokens_BS)


def test_nothing_is_opened_unless_asked_for(corpus: Path) -> None:
    assert held_out(corpus, eval_interval=0) == ()


def test_weights_of_the_training_data_do_not_concern_it(corpus: Path) -> None:
    data = DataConfig(
        data_path=str(corpus), datasets=("docs", "code"), weights=(2, 1), seq_length=SEQ
    )
    sources = opened(data, 3, eval_interval=1, eval_test=True)
    names = [(group, name) for group in ("eval", "test") for name in ("code", "docs")]
    assert [(source.group, source.name) for source in sources] == names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"eval_datasets": ("doc",)},
            r"--eval_datasets=doc is not a folder with files in .*; did you mean docs",
        ),
        ({"eval_data_path": "/none"}, r"--eval_data_path=/none is not a folder"),
        (
            {"eval_data_path": "{corpus}", "eval_datasets": ("docs",)},
            r"--eval_datasets \(docs\) must not be trained on",
        ),
        ({"eval_data_path": "{corpus}"}, r"--eval_datasets \(code\) must not be trained on"),
    ],
)
def test_bad_held_out_data_is_refused(corpus: Path, changes: dict[str, Any], message: str) -> None:
    given = {k: v.format(corpus=corpus) if isinstance(v, str) else v for k, v in changes.items()}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        held_out(corpus, **given)


def test_data_without_a_split_is_refused_until_a_source_is_held_out(
    corpus: Path, tmp_path: Path
) -> None:
    for name in ("docs", "code", "meta"):
        (tmp_path / name).symlink_to(corpus / name)
    with pytest.raises(
        ValueError, match=r"--eval_interval \(1\) needs held-out data, and data_path has no folder"
    ):
        held_out(tmp_path)
    data = DataConfig(data_path=str(tmp_path), datasets=("code",), seq_length=SEQ)
    (source,) = opened(data, 3, eval_interval=1, eval_datasets=("docs",))
    assert source.name == "docs" and source.token_bytes is not None


def test_a_vocabulary_beyond_the_models_is_refused(corpus: Path) -> None:
    data = DataConfig(data_path=str(corpus), seq_length=SEQ)
    with pytest.raises(ValueError, match=r"has a vocabulary of 258, the model one of 200"):
        opened(data, 3, vocab_size=200, eval_interval=1)


def test_keep_best_without_validation_is_refused() -> None:
    result = run(*FLAGS, "--use_dummy_dataset=True", "--keep_last_n=1", "--keep_best=1")
    assert (
        result.returncode == 2
        and "--keep_best=1 requires validation losses, but evaluation is off" in result.stderr
    )


def test_an_object_store_is_evaluated_like_a_folder(corpus: Path) -> None:
    data = DataConfig(data_path=f"file://{corpus}", seq_length=SEQ)
    remote = opened(data, 3, eval_interval=1)
    for here, there in zip(held_out(corpus, max_rows=3), remote, strict=True):
        assert torch.equal(here.rows(0, 3).labels_BS, there.rows(0, 3).labels_BS)
        assert there.token_bytes is not None and there.token_bytes.tolist() == [1] * 256 + [0] * 256


def test_a_missing_test_split_is_told(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "docs").symlink_to(corpus / "docs")
    with pytest.raises(FileNotFoundError, match=r"--eval_test=.*/test is not a folder"):
        held_out(tmp_path, eval_interval=0, eval_test=True)


def test_a_test_folder_elsewhere_is_evaluated_once_when_the_run_is_finished(
    corpus: Path, tmp_path: Path
) -> None:
    """Not by a launch that is stopped, and in its own number of rows; the command gives the same numbers."""
    argv = (*flags(corpus), "--num_steps=4", "--checkpoint_interval=2", f"--output_dir={tmp_path}")
    argv = (*argv, f"--test_data_path={corpus / 'validation'}", "--test_steps=2")
    assert run(*argv, "--exit_interval=2").returncode == 75
    records = (tmp_path / "metrics.jsonl").read_text()
    assert "test/" not in records
    output = trained(*argv)
    assert "evaluation at step 4: test loss" in output
    assert "test/code 8 sequences, test/docs 8 sequences" in (tmp_path / "log.txt").read_text()
    assert "evaluation" not in trained(*argv), "a run that is finished is not evaluated again"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (found,) = (record for record in lines if "test/loss" in record)
    assert (found["step"], found["attempt"]) == (4, 2) and "eval/loss" not in found
    told = json.loads(
        offline(f"--path={tmp_path}", "--json=True", "--eval_test=True", "--eval_steps=2").stdout
    )
    shown = {name: value for name, value in found.items() if name.startswith("test/")}
    assert shown == {name: value for name, value in told.items() if name.startswith("test/")}
    assert shown == {
        name.replace("eval/", "test/"): told[name] for name in told if name.startswith("eval/")
    }


@pytest.mark.slow
def test_the_test_folder_gives_the_same_numbers_at_every_world_size(
    corpus: Path, tmp_path: Path
) -> None:
    argv = ("--use_dummy_dataset=True", "--global_batch_size=4", "--num_steps=2", "--batch_size=2")
    argv = (
        *FLAGS,
        *argv,
        "--vocab_size=512",
        f"--test_data_path={corpus / 'test'}",
        "--learning_rate=0",
    )
    found = []
    for nproc in (0, 2):
        trained(*argv, f"--output_dir={tmp_path / str(nproc)}", nproc=nproc)
        lines = (tmp_path / str(nproc) / "metrics.jsonl").read_text().splitlines()
        (record,) = (record for record in map(json.loads, lines) if "test/loss" in record)
        found.append({name: value for name, value in record.items() if name.startswith("test/")})
    assert found[0] == found[1] and set(found[0]) >= {
        "test/loss",
        "test/docs/loss",
        "test/code/loss",
    }


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--test_data_path=/none", "--test_data_path=/none is not a folder"),
        ("--test_data_path={corpus}", "--test_data_path, source (code) must not be trained on"),
        (
            "--test_steps=3",
            "--test_steps=3 has no effect without --eval_test or --test_data_path",
        ),
    ],
)
def test_a_bad_test_folder_is_refused_before_any_work(
    corpus: Path, tmp_path: Path, flag: str, message: str
) -> None:
    argv = (*flags(corpus), flag.format(corpus=corpus), f"--output_dir={tmp_path / 'run'}")
    result = run(*argv)
    assert result.returncode == 2 and message in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_bad_test_folder_is_refused_alike_on_every_rank(corpus: Path, tmp_path: Path) -> None:
    argv = (*flags(corpus), "--test_data_path=/none", f"--output_dir={tmp_path / 'run'}")
    result = run(*argv, nproc=2)
    assert result.returncode != 0 and not (tmp_path / "run").exists()
    assert result.stderr.count("--test_data_path=/none is not a folder") == 1, result.stderr
