"""Compares `inspect` with the stream and with the documents on disk."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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
from fms_fsdp.run.resume import choose_checkpoint
from fms_fsdp.state import TrainMetadata, read_run_config
from fms_fsdp.tools.inspect.step import (
    InspectConfig,
    inspected,
    step_fingerprint,
)
from fms_fsdp.tools.inspect.verify import verify_corpus
from tests.checkpoint.signing import sign
from tests.data.corpora import SEP, VOCAB, Files, write_corpus, write_counts, write_lists
from tests.specs import resolved

NUM_STEPS = 900  # of a run
SIZES = {"a": [6000, 3000], "b": [3000], "c": [1500]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_corpus(tmp_path_factory.mktemp("corpus"), SIZES)


def flags(files: Files, **changes: Any) -> InspectConfig:
    settings: dict[str, Any] = dict(
        data_path=str(files.root), sep_token=SEP, logical_shards=8, seed=1
    )
    return InspectConfig(**{**settings, "seq_length": 32, "global_batch_size": 4, **changes})


def write_run(folder: Path, files: Files, stream: TokenStream, step: int, **data: Any) -> Path:
    """Leaves what a run leaves: the newest launch's flags, and a checkpoint's data state."""
    section = files.section(**{"seq_length": 32, **data})
    config = TrainConfig(
        data=section, training=TrainingConfig(seed=1), checkpoint=CheckpointConfig()
    )
    batch = stream.global_batch_size
    config = replace(config, training=replace(config.training, num_steps=NUM_STEPS))
    record = resolved(
        config, model=TransformerConfig(1, 8, 8, 1, 1, VOCAB), batch=BatchPlan(batch, 1, 1)
    )
    record = replace(record, working_dir="")
    checkpoint = folder / "checkpoints" / f"step_{step}"
    checkpoint.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(record.content))
    saved = TrainMetadata(step, data=stream.state_dict(), **record.saved_with)
    (checkpoint / "train_state.json").write_text(json.dumps(saved.content))
    (checkpoint / ".metadata").touch()
    sign(checkpoint)
    return folder


@pytest.fixture(scope="module")
def run(files: Files, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A run of 60 steps: b is dropped after 20, c comes in after 40, two ranges are passed over. And its
    fingerprints."""
    folder, prints = tmp_path_factory.mktemp("run"), list[int]()
    launches = [("a,b", 4, "3:5"), ("a", 6, ""), ("a,c", 2, "43:50")]
    state: dict[str, Any] | None = None
    for i, (names, batch, skip) in enumerate(launches):
        data = {
            "datasets": tuple(names.split(",")),
            "weights": (1.0, 2.0)[: len(names.split(","))],
            "skip_steps": skip,
        }
        with files.stream(batch, seq_length=32, **data) as stream:
            if state is not None:
                stream.load_state_dict(state, 20 * i)
            prints += [fingerprint(stream.next_batch(), 0) for _ in range(20)]
            state = stream.state_dict()
            write_run(folder, files, stream, 20 * (i + 1), **data)
    return folder, prints


def test_a_run_folder_gives_the_fingerprints_of_every_step_of_its_history(
    run: tuple[Path, list[int]],
) -> None:
    folder, prints = run
    with inspected(InspectConfig(run=str(folder))) as data:
        assert data.run.step == 60 and data.run.num_steps == NUM_STEPS
        assert [step_fingerprint(data, step) for step in range(1, 61)] == [
            f"{value:016x}" for value in prints
        ]


def test_inspect_takes_the_checkpoint_that_training_would_take(
    run: tuple[Path, list[int]], tmp_path: Path
) -> None:
    """Corrupt ones are skipped; without a valid one, the error is the same as the error of a run."""
    folder, root = tmp_path / "run", tmp_path / "run" / "checkpoints"
    shutil.copytree(run[0], folder)
    with open(root / "step_60" / "train_state.json", "a") as file:
        file.write(" ")
    with inspected(InspectConfig(run=str(folder))) as data:
        assert data.run.step == 40
    for step in (20, 40, 60):
        (root / f"step_{step}" / "files.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    cfg = read_run_config(
        {**config, "resolved": config["resolved"] | {"working_dir": "/"}}, ""
    ).located
    with pytest.raises(ValueError, match="has no usable checkpoint") as refused:
        choose_checkpoint(replace(cfg, log=replace(cfg.log, output_dir=str(folder))))
    with pytest.raises(ValueError) as told, inspected(InspectConfig(run=str(folder))):
        pass
    assert str(told.value) == str(refused.value)


def test_flags_beside_a_run_folder_hold_from_its_checkpoint_on(run: tuple[Path, list[int]]) -> None:
    config = InspectConfig(run=str(run[0]), datasets=("b",), weights=(1.0,), global_batch_size=8)
    with inspected(config) as data:
        assert data.changes[0] == "global batch: 2 -> 8"
        assert {place.source for place in data.order.addresses(61)} == {"b"} and len(
            data.order.addresses(61)
        ) == 8
        assert step_fingerprint(data, 7) == f"{run[1][6]:016x}"


def test_step_prints_each_row_and_the_fingerprint(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        f"--data_path={files.root}",
        "--seq_length=32",
        "--global_batch_size=4",
        "--seed=1",
        "--logical_shards=8",
    ]
    assert command(["inspect", "step", *argv, "--step=9", "--json=True", "--rows=1:3"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["row"] for record in records] == [1, 2]
    with files.stream(4, seq_length=32, sep_token=None) as stream:
        batch = stream.batch_at(9)
    assert {record["data_fingerprint"] for record in records} == {f"{fingerprint(batch, 0):016x}"}
    for record in records:
        for p in record["pieces"]:
            source, file = p["file"].split("/")
            text = files.documents[source][int(file[6:11])][p["document"]][p["start"] : p["stop"]]
            row = batch.tokens_BS[record["row"], p["at"] : p["at"] + len(text)]
            assert row.tolist() == text.tolist()
    assert command(["inspect", "step", *argv, "--step=9"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\nrow ") == 4 and records[0]["data_fingerprint"] in printed


def test_step_shows_how_the_text_of_each_document_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = "A\x1b[2Jtable\tof 漢字\u202e, " * 40
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": document}) + "\n")
    data = f"--data_path={tmp_path / 'out'}"
    assert (
        command(
            [
                "prepare",
                str(tmp_path / "x.jsonl"),
                f"--output={tmp_path / 'out'}",
                "--tokenizer=byte",
            ]
        )
        == 0
    )
    argv = [
        "inspect",
        "step",
        data,
        "--seq_length=128",
        "--global_batch_size=2",
        "--step=1",
        "--text",
    ]
    capsys.readouterr()
    assert command([*argv, "--json"]) == 0
    for record in map(json.loads, capsys.readouterr().out.splitlines()):
        for piece in record["pieces"]:
            whole = document.encode()[piece["start"] : piece["stop"]].decode(errors="replace")
            assert piece["text"] and whole.startswith(piece["text"].rstrip("\ufffd"))
    assert command(argv) == 0
    printed = capsys.readouterr().out
    assert r"\x1b[2Jtable\tof 漢字\u202e, A" in printed and printed.replace("\n", "").isprintable()
    assert max(map(len, printed.splitlines())) < 110


def test_text_without_a_tokenizer_is_refused_in_one_line(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        f"--data_path={files.root}",
        "--seq_length=32",
        "--global_batch_size=4",
        "--step=9",
        "--text",
    ]
    assert command(["inspect", "step", *argv]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        "inspect step: error: --text (True) needs the tokenizer that prepare puts"
    )
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("step --step=1 --seq_length=32", "global_batch_size () must be the rows of a step"),
        ("step --seq_length=32 --global_batch_size=4", "--step is missing"),
        (
            "step --step=1 --rows=3:9 --seq_length=32 --global_batch_size=4",
            "--rows (3:9) must be a:b",
        ),
        ("step --step=1 --run=nowhere", "run (nowhere) must be a run folder"),
    ],
)
def test_bad_input_is_one_line(
    files: Files, argv: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["inspect", *argv.split(), f"--data_path={files.root}"]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_a_run_on_synthetic_tokens_is_refused(
    files: Files, run: tuple[Path, list[int]], tmp_path: Path
) -> None:
    content = json.loads((run[0] / "config.json").read_text())
    content["data"] = as_dict(TrainConfig(data=replace(DataConfig(), use_dummy_dataset=True)))[
        "data"
    ]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with (
        pytest.raises(ValueError, match="trained on synthetic tokens"),
        inspected(InspectConfig(run=str(tmp_path))),
    ):
        pass


@pytest.mark.parametrize("name", ["inspect plan", "inspect find"])
def test_removed_command_names_its_replacement(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([*name.split(), "--seq_length=32"]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith(f"fms_fsdp: command {name} was removed; use ") and error.count("\n") == 1
    )


def test_inspect_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["inspect"]) == 2
    shown = capsys.readouterr()
    assert [line.split()[1] for line in shown.out.splitlines()[1:]] == ["step", "verify"]
    assert command(["inspect", "setp"]) == 2
    assert "did you mean inspect step?" in capsys.readouterr().err


class TestVerify:
    @pytest.mark.parametrize("layout", ["lists", "scalars"])
    @pytest.mark.parametrize("stored", [True, False])
    def test_a_whole_corpus_has_no_problems(
        self, tmp_path: Path, layout: str, stored: bool
    ) -> None:
        corpus = write_corpus(tmp_path, SIZES, layout=layout, stored=stored).corpus(seq_length=32)
        found = dict(verify_corpus(corpus, VOCAB))
        assert len(found) == 4 and not any(found.values())

    def test_every_damage_is_named_and_the_exit_status_is_2(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        files = write_corpus(tmp_path, {"a": [900] * 6})
        good = files.documents["a"][0]
        rows = [
            (f"a/shard-{i:05d}.arrow", len(s), sum(map(len, s)) - len(s))
            for i, s in enumerate(files.documents["a"])
        ]
        rows[1] = (rows[1][0], rows[1][1] + 1, rows[1][2])  # the counts are wrong
        write_counts(tmp_path, rows)
        path = tmp_path / "a" / "shard-00002.arrow"
        path.write_bytes(path.read_bytes()[:-500])  # truncated
        (tmp_path / "a" / "shard-00003.arrow").unlink()  # missing
        plain = [text[:-1] for text in files.documents["a"][4]]
        number = next(i for i, text in enumerate(plain) if i > 7 and len(text) > 2)
        plain[number][2] = VOCAB + 17  # beyond the vocabulary
        write_lists(tmp_path / "a" / "shard-00004.arrow", plain)
        assert command(["inspect", "verify", f"--data_path={tmp_path}", "--num_threads=2"]) == 2
        shown = capsys.readouterr()
        lines = sorted(shown.out.splitlines())
        assert len(lines) == 4 and "4 problems in 4 of 6 shards" in shown.err and good
        assert (
            "the counts file says" in lines[0]
            and "not a complete Arrow" in lines[1]
            and "does not exist" in lines[2]
        )
        assert (
            f"has token {VOCAB + 17} in document {number}, beyond vocab_size ({VOCAB})" in lines[3]
        )

    def test_a_stored_separator_that_is_missing_is_found(self, tmp_path: Path) -> None:
        files = write_corpus(tmp_path, {"a": [3000]}, stored=True)
        documents = files.documents["a"][0]
        documents[-1] = np.append(documents[-1][:-1], 7)
        write_lists(tmp_path / "a" / "shard-00000.arrow", documents, has_eos="true")
        [(_, problems)] = verify_corpus(files.corpus(seq_length=32), VOCAB)
        told = f"ends document {len(documents) - 1} with 7, not with the separator"
        assert len(problems) == 1 and told in problems[0]

    def test_a_whole_corpus_says_what_was_read(
        self, files: Files, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command(["inspect", "verify", f"--data_path={files.root}"]) == 0
        assert "4 shards of 3 sources are whole" in capsys.readouterr().out

    def test_a_run_folder_is_compared_with_its_checkpoint(
        self,
        files: Files,
        run: tuple[Path, list[int]],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert command(["inspect", "verify", f"--run={run[0]}"]) == 0
        assert "checkpoint of step 60" in capsys.readouterr().out
        shutil.copytree(files.root, tmp_path / "more")
        shutil.copy(
            tmp_path / "more" / "a" / "shard-00000.arrow",
            tmp_path / "more" / "a" / "shard-00009.arrow",
        )
        assert (
            command(["inspect", "verify", f"--run={run[0]}", f"--data_path={tmp_path / 'more'}"])
            == 2
        )
        assert "source a has 3 shards" in capsys.readouterr().err
