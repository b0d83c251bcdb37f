"""Compares `inspect` with the stream and with the documents on disk."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fms_fsdp.__main__ import main as command
from fms_fsdp.config import (
    BatchPlan,
    CheckpointConfig,
    DataConfig,
    TrainConfig,
    TrainingConfig,
    as_dict,
)
from fms_fsdp.data.batch import fingerprint
from fms_fsdp.data.stream import TokenStream
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.run.resume_point import choose_checkpoint
from fms_fsdp.state import TrainMetadata, read_run_config
from fms_fsdp.tools.inspect_command import RunData, open_run_data
from tests.cases import cases
from tests.checkpoint.signing import sign
from tests.data.corpora import VOCAB, Files, write_corpus, write_counts, write_lists
from tests.specs import resolved

NUM_STEPS, MODEL = 900, TransformerConfig(1, 8, 8, 1, 1, VOCAB)
SIZES = {"a": [6000, 3000], "b": [3000], "c": [1500]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_corpus(tmp_path_factory.mktemp("corpus"), SIZES)


def write_run(folder: Path, files: Files, stream: TokenStream, step: int, **data: Any) -> None:
    """Writes the files of a run: the newest launch's flags, and a checkpoint's data state."""
    section = files.section(**{"seq_length": 32, **data})
    training = TrainingConfig(seed=1, num_steps=NUM_STEPS)
    config = TrainConfig(data=section, training=training, checkpoint=CheckpointConfig())
    batch = BatchPlan(stream.global_batch_size, 1, 1)
    record = replace(resolved(config, model=MODEL, batch=batch), working_dir="")
    checkpoint = folder / "checkpoints" / f"step_{step}"
    checkpoint.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(record.content))
    saved = TrainMetadata(step, data=stream.state_dict(), **record.saved_with)
    (checkpoint / "train_state.json").write_text(json.dumps(saved.content))
    (checkpoint / ".metadata").touch()
    sign(checkpoint)


@pytest.fixture(scope="module")
def run(files: Files, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A run of 60 steps and its fingerprints: b is dropped after 20, c is added after 40, two ranges of
    steps are skipped."""
    folder, prints = tmp_path_factory.mktemp("run"), list[int]()
    launches = [(("a", "b"), 4, "3:5"), (("a",), 6, ""), (("a", "c"), 2, "43:50")]
    state: dict[str, Any] | None = None
    for i, (names, batch, skip) in enumerate(launches):
        data = {"datasets": names, "weights": (1.0, 2.0)[: len(names)], "skip_steps": skip}
        with files.stream(batch, seq_length=32, **data) as stream:
            if state is not None:
                stream.load_state_dict(state, 20 * i)
            prints += [fingerprint(stream.next_batch(), 0) for _ in range(20)]
            state = stream.state_dict()
            write_run(folder, files, stream, 20 * (i + 1), **data)
    return folder, prints


def step_fingerprint(data: RunData, step: int) -> str:
    return f"{fingerprint(data.stream.batch_at(step), 0):016x}"


def test_every_step_has_its_fingerprint(run: tuple[Path, list[int]]) -> None:
    folder, prints = run
    with open_run_data(str(folder)) as data:
        assert data.step == 60
        found = [step_fingerprint(data, step) for step in range(1, 61)]
        assert found == [f"{value:016x}" for value in prints]
        addresses = [a for step in range(1, 21) for a in data.stream.order.addresses(step)]
        assert {address.source for address in addresses} == {"a", "b"}  # b is dropped since
        assert all(data.stream.sequence_segments(address) for address in addresses)


def test_inspect_takes_the_checkpoint_of_training(
    run: tuple[Path, list[int]], tmp_path: Path
) -> None:
    """Corrupt ones are skipped; without a valid one, the error is the same as in training."""
    folder = shutil.copytree(run[0], tmp_path / "run")
    checkpoints = folder / "checkpoints"
    with open(checkpoints / "step_60" / "train_state.json", "a") as file:
        file.write(" ")
    with open_run_data(str(folder)) as data:
        assert data.step == 40
    for path in checkpoints.glob("*/files.json"):
        path.unlink()
    config = json.loads((folder / "config.json").read_text())
    config["resolved"]["working_dir"] = "/"
    cfg = read_run_config(config, "").located
    with pytest.raises(ValueError, match="has no usable checkpoint") as expected:
        choose_checkpoint(replace(cfg, log=replace(cfg.log, output_dir=str(folder))))
    with pytest.raises(ValueError) as raised, open_run_data(str(folder)):
        pass
    assert str(raised.value) == str(expected.value)


def test_changed_flags_apply_after_the_checkpoint(
    run: tuple[Path, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(run[0], tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    config["data"] |= {"datasets": ["b"], "weights": [1.0]}
    config["resolved"]["batch"] |= {"batch_size": 8, "global_batch_size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    with open_run_data(str(folder)) as data:
        assert data.changes[0] == "global batch: 2 -> 8"
        planned = data.stream.order.addresses(61)
        assert {address.source for address in planned} == {"b"} and len(planned) == 8
        assert step_fingerprint(data, 7) == f"{run[1][6]:016x}"
    assert command(["inspect", "step", f"--run={folder}", "--step=61"]) == 0
    note = "; planned: the newest checkpoint is of step 60, where global batch: 2 -> 8; "
    assert note in capsys.readouterr().out


def test_step_prints_each_sequence_and_the_fingerprint(
    files: Files, run: tuple[Path, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["inspect", "step", f"--run={run[0]}", "--step=9"]
    assert command([*argv, "--json", "--rows=1:3"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["row"] for record in records] == [1, 2]
    assert {record["data_fingerprint"] for record in records} == {f"{run[1][8]:016x}"}
    with open_run_data(str(run[0])) as data:
        tokens_BS = data.stream.batch_at(9).tokens_BS
    for record in records:
        for p in record["pieces"]:
            source, file = p["file"].split("/")
            text = files.documents[source][int(file[6:11])][p["document"]][p["start"] : p["stop"]]
            row = tokens_BS[record["row"], p["at"] : p["at"] + len(text)]
            assert row.tolist() == text.tolist()
    assert command(argv) == 0
    printed = capsys.readouterr().out
    assert printed.count("\nrow ") == 4 and records[0]["data_fingerprint"] in printed


def test_step_shows_the_text_of_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document, out = "A\x1b[2Jtable\tof 漢字\u202e, " * 40, tmp_path / "out"
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": document}) + "\n")
    assert command(["prepare", f"{tmp_path}/x.jsonl", f"--output={out}", "--tokenizer=byte"]) == 0
    config = TrainConfig(data=DataConfig(data_path=str(out), seq_length=128))
    content = resolved(config, model=MODEL, batch=BatchPlan(2, 1, 1)).content
    (tmp_path / "config.json").write_text(json.dumps(content))
    argv = ["inspect", "step", f"--run={tmp_path}", "--step=1", "--text"]
    capsys.readouterr()
    assert command([*argv, "--json"]) == 0
    for record in map(json.loads, capsys.readouterr().out.splitlines()):
        for piece in record["pieces"]:
            text = document.encode()[piece["start"] : piece["stop"]].decode(errors="replace")
            assert piece["text"] and text.startswith(piece["text"].rstrip("\ufffd"))
    assert command(argv) == 0
    printed = capsys.readouterr().out
    assert r"\x1b[2Jtable\tof 漢字\u202e, A" in printed and printed.replace("\n", "").isprintable()
    assert max(map(len, printed.splitlines())) < 110


@cases("""
    argv | text
    --run={run} --step=1 --rows=3:9 | --rows=3:9 must be a:b with 0 <= a < b <= 4
    --run={run} --step=1 --text | --text requires a tokenizer in
    --run={run} --step=1 --data_path=nowhere | --data_path=nowhere is not a folder
    --run={tmp} --step=1 | config.json must hold an object, not a list; restore it
""")
def test_bad_input_is_one_line(
    run: tuple[Path, list[int]],
    tmp_path: Path,
    argv: str,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text("[1]")
    assert command(["inspect", "step", *argv.format(run=run[0], tmp=tmp_path).split()]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_run_on_synthetic_tokens_is_an_error(run: tuple[Path, list[int]], tmp_path: Path) -> None:
    content = json.loads((run[0] / "config.json").read_text())
    synthetic = TrainConfig(data=replace(DataConfig(), use_dummy_dataset=True))
    content["data"] = as_dict(synthetic)["data"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not on synthetic tokens"), open_run_data(str(tmp_path)):
        pass


@pytest.mark.parametrize(
    ("layout", "stored"), [("lists", False), ("lists", True), ("scalars", True)]
)
def test_valid_corpus_has_no_problems(
    tmp_path: Path, layout: str, stored: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path, SIZES, layout=layout, stored=stored)
    assert command(["inspect", "verify", f"--data_path={tmp_path}", "--sep_token=3"]) == 0
    assert "4 shards of 3 sources are valid" in capsys.readouterr().out


def test_each_problem_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write_corpus(tmp_path, {"a": [900] * 7}, stored=True)
    documents, paths = files.documents["a"], sorted((tmp_path / "a").iterdir())
    rows = [
        (f"a/{p.name}", len(s), sum(map(len, s))) for p, s in zip(paths, documents, strict=True)
    ]
    rows[1] = (rows[1][0], rows[1][1] + 1, rows[1][2])
    write_counts(tmp_path, rows)
    os.truncate(paths[2], paths[2].stat().st_size - 500)
    paths[3].unlink()
    number = next(i for i, document in enumerate(documents[4]) if i > 7 and len(document) > 3)
    documents[4][number][2] = VOCAB + 17
    documents[5][-1][-1] = 7
    for i in (4, 5):
        write_lists(paths[i], documents[i], has_eos="true")
    assert command(["inspect", "verify", f"--data_path={tmp_path}", "--num_threads=2"]) == 2
    shown = capsys.readouterr()
    assert "5 problems in 5 of 7 shards" in shown.err
    lines, last = sorted(shown.out.splitlines()), len(documents[5]) - 1
    for line, text in zip(
        lines,
        (
            "the counts file says",
            "not a complete Arrow",
            "does not exist",
            f"token {VOCAB + 17} in document {number} is not below {VOCAB}",
            f"document {last} ends with 7, not with the separator",
        ),
        strict=True,
    ):
        assert text in line


def test_verify_compares_a_run_with_its_data(
    files: Files,
    run: tuple[Path, list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["inspect", "verify", f"--run={run[0]}"]
    assert command(argv) == 0
    assert "checkpoint of step 60" in capsys.readouterr().out
    more = shutil.copytree(files.root, tmp_path / "more")
    shutil.copy(more / "a" / "shard-00000.arrow", more / "a" / "shard-00009.arrow")
    assert command([*argv, f"--data_path={more}"]) == 2
    assert "source a has 3 shards" in capsys.readouterr().err
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(run[0] / "config.json", alone)
    capsys.readouterr()
    assert command([*argv[:2], f"--run={alone}"]) == 0
    assert "the run has no checkpoint yet" in capsys.readouterr().out
