"""What `inspect` says, against the stream itself and against the documents on disk."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fms_fsdp.__main__ import main as command
from fms_fsdp.config import BatchPlan, CheckpointConfig, DataConfig, TrainConfig, TrainingConfig, as_dict
from fms_fsdp.data.batch import fingerprint
from fms_fsdp.data.stream import TokenStream
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.record import Saved, read_record
from fms_fsdp.spec.origin import choose_origin
from fms_fsdp.tools.inspect.find import Seen, find_document, find_file
from fms_fsdp.tools.inspect.plan import describe_plan, ignored_share, plan_sources, warnings_of
from fms_fsdp.tools.inspect.plot import document_lengths, mixture_over_time
from fms_fsdp.tools.inspect.step import InspectConfig, Inspected, inspected, row_record, step_fingerprint
from fms_fsdp.tools.inspect.verify import verify_corpus
from tests.checkpoint.signing import sign
from tests.data.corpora import SEP, VOCAB, Files, write_corpus, write_counts, write_lists
from tests.specs import resolved

NUM_STEPS = 900  # of a run
SIZES = {"a": [6000, 3000], "b": [3000], "c": [1500]}
Item = tuple[int, int, int, int, int]  # step, row, at, start, stop


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_corpus(tmp_path_factory.mktemp("corpus"), SIZES)


def flags(files: Files, **changes: Any) -> InspectConfig:
    settings: dict[str, Any] = dict(data_path=str(files.root), sep_token=SEP, logical_shards=8, seed=1)
    return InspectConfig(**{**settings, "seq_length": 32, "global_batch_size": 4, **changes})


def listed(data: Inspected, num_steps: int) -> dict[tuple[str, int], set[Item]]:
    """Everything that `step` says of the steps up to `num_steps`, by (file, document)."""
    found: dict[tuple[str, int], set[Item]] = {}
    for step in range(1, num_steps + 1):
        for row, place in enumerate(data.order.addresses(step)):
            for p in row_record(data, place, step, row)["pieces"]:
                item = (step, row, p["at"], p["start"], p["stop"])
                found.setdefault((p["file"], p["document"]), set()).add(item)
    return found


def check_find_agrees(files: Files, data: Inspected, num_steps: int, num_epochs: int) -> set[str]:
    """Asserts that `find` and `step` name the same places, and that `find` accounts for every token in every
    epoch."""
    told, fates = listed(data, num_steps), set[str]()
    for source in (source for corpus in data.corpora for source in corpus.sources):
        for file, path in enumerate(source.paths):
            for document, text in enumerate(files.documents[source.name][file]):
                found = list(find_document(data, source, file, document, num_epochs))
                seen = {(s.step, s.row, s.at, s.start, s.stop) for s in found if s.fate == "seen"}
                assert {item for item in seen if item[0] <= num_steps} == told.get((path, document), set())
                for epoch in range(num_epochs):
                    counts = np.zeros(len(text), dtype=int)
                    for s in (s for s in found if s.epoch == epoch):
                        counts[s.start : s.stop] += 1
                    assert (counts == 1).all()
                fates |= {s.fate for s in found}
    return fates


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_find_agrees_with_step_for_every_document(files: Files, packing: str) -> None:
    with inspected(flags(files, packing=packing)) as data:
        last = data.order.history.first_step_beyond(["b"], data.order.source("b").num_rows_until(2), 0) - 1
        fates = check_find_agrees(files, data, last, 2)
        assert fates == {"seen", "rest"}


@pytest.mark.parametrize("stored", [True, False])
def test_find_agrees_with_step_in_the_fms_fsdp_layout(tmp_path: Path, stored: bool) -> None:
    files = write_corpus(tmp_path, {"a": [2500, 900]}, layout="scalars", stored=stored)
    with inspected(flags(files)) as data:
        check_find_agrees(files, data, 30, 2)


def write_run(folder: Path, files: Files, stream: TokenStream, step: int, **data: Any) -> Path:
    """Leaves what a run leaves: the newest launch's flags, and a checkpoint's data state."""
    section = files.section(**{"seq_length": 32, **data})
    config = TrainConfig(data=section, training=TrainingConfig(seed=1), checkpoint=CheckpointConfig())
    batch = stream.rows.global_batch_size
    config = replace(config, training=replace(config.training, num_steps=NUM_STEPS))
    record = resolved(config, model=LlamaConfig(1, 8, 8, 1, 1, VOCAB), batch=BatchPlan(batch, 1, 1))
    record = replace(record, working_dir="")
    checkpoint = folder / "checkpoints" / f"step_{step}"
    checkpoint.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(record.content))
    saved = Saved(step, data=stream.state_dict(), **record.saved_with)
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
    """Damaged ones are passed over; where none is sound it is refused with the words of the run."""
    folder, root = tmp_path / "run", tmp_path / "run" / "checkpoints"
    shutil.copytree(run[0], folder)
    with open(root / "step_60" / "train_state.json", "a") as file:
        file.write(" ")
    with inspected(InspectConfig(run=str(folder))) as data:
        assert data.run.step == 40
    for step in (20, 40, 60):
        (root / f"step_{step}" / "files.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    cfg = read_record({**config, "resolved": config["resolved"] | {"working_dir": "/"}}, "").located
    with pytest.raises(ValueError, match="must be sound, and none is sound") as refused:
        choose_origin(replace(cfg, log=replace(cfg.log, output_dir=str(folder))))
    with pytest.raises(ValueError) as told, inspected(InspectConfig(run=str(folder))):
        pass
    assert str(told.value) == str(refused.value)


def test_find_agrees_with_step_through_a_runs_changes(files: Files, run: tuple[Path, list[int]]) -> None:
    with inspected(InspectConfig(run=str(run[0]))) as data:
        fates = check_find_agrees(files, data, 60, 1)
    assert fates == {"seen", "rest", "skipped", "dropped"}


def test_inspect_follows_changes_of_seq_length(files: Files, tmp_path: Path) -> None:
    """A run of 55 steps in rows of 32, 16 and 64 tokens: fingerprints, find against step, plan, an aligned
    question."""
    prints, used, state = list[int](), 0, None
    for i, size in enumerate((32, 16, 64)):
        with files.stream(4, seq_length=size) as stream:
            if state is not None:
                stream.load_state_dict(state, 20 * i)
            prints += [fingerprint(stream.next_batch(), 0) for _ in range(20 if i < 2 else 15)]
            used, state = 4 * size * (20 if i < 2 else 15) + used, stream.state_dict()
            step = stream.step
    run = write_run(tmp_path, files, stream, step, seq_length=64)
    with inspected(InspectConfig(run=str(run))) as data:
        assert [step_fingerprint(data, past) for past in range(1, step + 1)] == [
            f"{value:016x}" for value in prints
        ]
        fates = check_find_agrees(files, data, 100, 2)
        assert fates == {"seen", "rest"}
        plans = plan_sources(data, step, 4)
        assert sum(plan.used for plan in plans) == used
        text = describe_plan(data, plans, step)
        assert "from step 41 on: 4 rows of 64 tokens" in text and "left out by changes of seq_length" in text
    with inspected(InspectConfig(run=str(run), seq_length=32)) as data:
        assert data.changes[0] == "seq_length: 64 -> 32 tokens" and len(data.order.addresses(56)) == 4
        assert step_fingerprint(data, 55) == f"{prints[-1]:016x}"


def test_flags_beside_a_run_folder_hold_from_its_checkpoint_on(run: tuple[Path, list[int]]) -> None:
    config = InspectConfig(run=str(run[0]), datasets=("b",), weights=(1.0,), global_batch_size=8)
    with inspected(config) as data:
        assert data.changes[0] == "global batch: 2 -> 8 sequences"
        assert {place.source for place in data.order.addresses(61)} == {"b"} and len(
            data.order.addresses(61)
        ) == 8
        assert step_fingerprint(data, 7) == f"{run[1][6]:016x}"


def test_step_prints_each_row_and_the_fingerprint(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
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
        command(["prepare", str(tmp_path / "x.jsonl"), f"--output={tmp_path / 'out'}", "--tokenizer=byte"])
        == 0
    )
    argv = ["inspect", "step", data, "--seq_length=128", "--global_batch_size=2", "--step=1", "--text"]
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
    argv = [f"--data_path={files.root}", "--seq_length=32", "--global_batch_size=4", "--step=9", "--text"]
    assert command(["inspect", "step", *argv]) == 2
    told = capsys.readouterr().err
    assert told.startswith("inspect step: error: --text (True) needs the tokenizer that prepare puts")
    assert told.count("\n") == 1


def test_find_prints_when_a_document_is_seen(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        f"--data_path={files.root}",
        "--seq_length=32",
        "--global_batch_size=4",
        "--source=a",
        "--document=3",
    ]
    assert command(["inspect", "find", *argv, "--file=shard-00001.arrow", "--num_steps=200", "--json"]) == 0
    seen = [Seen(**json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    assert seen and all(item.step is None or item.step <= 200 for item in seen)
    last = max(item.step or 0 for item in seen)  # the step that ends the run counts
    for num_steps, expected in ((last, True), (last - 1, False)):
        flags = ["--file=shard-00001.arrow", f"--num_steps={num_steps}", "--json"]
        assert command(["inspect", "find", *argv, *flags]) == 0
        steps = [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()]
        assert (last in steps) is expected
    assert command(["inspect", "find", *argv, "--file=1", "--epochs=2"]) == 0
    assert "a/shard-00001.arrow document 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("step --step=1 --seq_length=32", "global_batch_size () must be the rows of a step"),
        ("step --seq_length=32 --global_batch_size=4", "--step is missing"),
        ("step --step=1 --rows=3:9 --seq_length=32 --global_batch_size=4", "--rows (3:9) must be a:b"),
        ("step --step=1 --run=nowhere", "run (nowhere) must be a run folder"),
        ("find --source=aa --file=0 --document=0 --seq_length=32 --global_batch_size=4", "--source (aa)"),
        (
            "find --source=a --file=shard-00007.arrow --document=0 --seq_length=32 --global_batch_size=4",
            "nearest: a/",
        ),
        ("find --source=a --file=0 --document=100000 --seq_length=32 --global_batch_size=4", "must be below"),
        ("plan --seq_length=32 --global_batch_size=4", "--num_steps is missing"),
    ],
)
def test_bad_input_is_one_line(
    files: Files, argv: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["inspect", *argv.split(), f"--data_path={files.root}"]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_inspect_alone_lists_its_four_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["inspect"]) == 2
    shown = capsys.readouterr()
    assert [line.split()[1] for line in shown.out.splitlines()[1:]] == ["plan", "step", "find", "verify"]
    assert command(["inspect", "plna"]) == 2
    rule = "does not exist; did you mean inspect plan?"
    assert capsys.readouterr() == ("", f"fms_fsdp: command (inspect plna) {rule}\n")
    assert command(["inspect", "xyz"]) == 2 and "commands: inspect plan, " in capsys.readouterr().err
    assert command(["inspect", "--help"]) == 0


def test_plan_counts_what_the_steps_hold(run: tuple[Path, list[int]]) -> None:
    with inspected(InspectConfig(run=str(run[0]))) as data:
        plans = {plan.name: plan for plan in plan_sources(data, 60, 4)}
        rows = [place.source for step in range(1, 61) for place in data.order.addresses(step)]
        assert {name: plan.used for name, plan in plans.items()} == {
            name: 32 * rows.count(name) for name in "abc"
        }
        assert plans["b"].weight == 0 and plans["c"].weight == pytest.approx(2 / 3, abs=1e-4)
        edges, shares = mixture_over_time(data, 60)
        assert {0, 20, 40, 60} <= set(edges.tolist()) and np.allclose(sum(shares.values()), 1)
        in_steps = (edges[:-1] >= 20) & (edges[:-1] < 40)
        assert (shares["a"][in_steps] == 1).all() and (shares["b"][in_steps] == 0).all()


def test_plan_names_the_step_at_which_an_epoch_ends(files: Files) -> None:
    with inspected(flags(files, seq_length=64)) as data:
        plan = next(plan for plan in plan_sources(data, 100, 0) if plan.name == "c")
        last_epochs = [
            max(p.epoch for p in data.order.addresses(step) if p.source == "c") for step in plan.ends[:1]
        ]
        assert last_epochs == [0]
        assert data.order.history.position(plan.ends[0])["c"] >= plan.geometry.num_rows
        assert data.order.history.position(plan.ends[0] - 1)["c"] < plan.geometry.num_rows


def test_plan_measures_ignored_labels_and_lengths(files: Files) -> None:
    with inspected(flags(files)) as data:
        rows = data.order.source("b").num_rows_until(1)
        share = ignored_share(data, "b", rows)
        assert 0 <= share < 0.02
        texts = [len(text) for shard in files.documents["b"] for text in shard]
        assert sorted(document_lengths(data)["b"].tolist()) == sorted(texts)


def test_plan_prints_tables_warnings_and_writes_charts(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [f"--data_path={files.root}", "--seq_length=32", "--global_batch_size=4", "--num_steps=2000"]
    page = tmp_path / "pages" / "plan.html"
    assert command(["inspect", "plan", *argv, f"--plot={page}"]) == 0
    printed = capsys.readouterr().out
    assert "warning: source a is read" in printed and "from step 1 on: 4 rows of 32 tokens a step" in printed
    assert printed.endswith(f"{page}\n")
    charts = dict(re.findall(r'<svg class="chart" id="(\w+)"(.*?)</svg>', page.read_text(), re.S))
    assert list(charts) == ["mixture", "lengths"]
    for chart in charts.values():
        labels = re.findall(r'data-label="([^"]*)" data-values="[^"]+" d="M[^"]+"', chart)
        assert labels == sorted(files.documents)
    assert ">seq_length</li>" in page.read_text() and ">newest checkpoint</li>" not in page.read_text()


@pytest.mark.parametrize(("ignored", "warned"), [(None, 0), (0.01, 0), (0.011, 1), (0.5, 1)])
def test_plan_warns_of_more_than_a_hundredth_of_masked_labels(
    files: Files, ignored: float | None, warned: int
) -> None:
    with inspected(flags(files, seq_length=64)) as data:
        plans = [replace(plan, ignored=ignored) for plan in plan_sources(data, 1, 0) if plan.name == "c"]
    assert sum("of its labels masked" in line for line in warnings_of(plans, 1)) == warned


def test_charts_of_a_plan_are_a_page(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [f"--data_path={files.root}", "--seq_length=32", "--global_batch_size=4", "--num_steps=20"]
    assert command(["inspect", "plan", *argv, "--plot=plan.png"]) == 2
    assert "--plot (plan.png) must be a page; name FILE.html" in capsys.readouterr().err


def test_a_run_on_synthetic_tokens_is_refused(
    files: Files, run: tuple[Path, list[int]], tmp_path: Path
) -> None:
    content = json.loads((run[0] / "config.json").read_text())
    content["data"] = as_dict(TrainConfig(data=replace(DataConfig(), use_dummy_dataset=True)))["data"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with (
        pytest.raises(ValueError, match="trained on synthetic tokens"),
        inspected(InspectConfig(run=str(tmp_path))),
    ):
        pass


class TestVerify:
    @pytest.mark.parametrize("layout", ["lists", "scalars"])
    @pytest.mark.parametrize("stored", [True, False])
    def test_a_whole_corpus_has_no_problems(self, tmp_path: Path, layout: str, stored: bool) -> None:
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
            "the counts file says" in lines[0] and "not a whole Arrow" in lines[1] and "missing" in lines[2]
        )
        assert f"holds token {VOCAB + 17} in document {number}, beyond vocab_size ({VOCAB})" in lines[3]

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
        self, files: Files, run: tuple[Path, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command(["inspect", "verify", f"--run={run[0]}"]) == 0
        assert "checkpoint of step 60" in capsys.readouterr().out
        shutil.copytree(files.root, tmp_path / "more")
        shutil.copy(
            tmp_path / "more" / "a" / "shard-00000.arrow", tmp_path / "more" / "a" / "shard-00009.arrow"
        )
        assert command(["inspect", "verify", f"--run={run[0]}", f"--data_path={tmp_path / 'more'}"]) == 2
        assert "source (a) has changed since the checkpoint" in capsys.readouterr().err


def test_a_shard_is_named_by_number_name_or_path(files: Files) -> None:
    source = files.corpus(seq_length=32).source("a")
    assert source is not None
    assert [find_file(source, text) for text in ("1", "shard-00001.arrow", "a/shard-00001.arrow")] == [
        1,
        1,
        1,
    ]
