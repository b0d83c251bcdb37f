"""Text → shards: the same bytes however the work is spread or interrupted, every document accounted for."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from fms_fsdp.__main__ import main as program
from fms_fsdp.config import DataConfig
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.data.tokenizer import load_tokenizer
from fms_fsdp.run.run_dir import lock_folder
from fms_fsdp.tools.prepare import encode
from fms_fsdp.tools.prepare.command import PrepareConfig, prepare
from fms_fsdp.tools.prepare.inputs import find_files, parse_input
from fms_fsdp.tools.prepare.writer import ShardInfo, ShardWriter, describe
from tests.warm import command

ROOT = Path(__file__).resolve().parents[3]


def run(output: Path, inputs: str, tokenizer: str = "byte", workers: int = 1, **options: object):
    return prepare(
        PrepareConfig(inputs, str(output), tokenizer=tokenizer, num_workers=workers, **options)
    )


def contents(output: Path) -> dict[str, bytes]:
    """Relative name → bytes of all that was made."""
    return {
        str(path.relative_to(output)): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def shards(folder: Path) -> Iterator[tuple[dict[str, str], list[list[int]]]]:
    for path in sorted(folder.glob("*.arrow")):
        table = pa.ipc.open_file(path).read_all()
        metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
        yield metadata, table.column("tokens").to_pylist()


def texts(folder: Path) -> list[str]:
    """The documents of a source, decoded from bytes."""
    return [bytes(t for t in row if t < 256).decode() for _, rows in shards(folder) for row in rows]


def write_jsonl(path: Path, values: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    return path


@pytest.fixture()
def corpus(tmp_path: Path) -> str:
    """Two sources: JSON lines big enough for many slices, and a folder of code."""
    rng = random.Random(1)
    words = ["alpha", "beta", "gamma", "delta", "\n", "é", "42", "    "]
    values = [" ".join(rng.choices(words, k=rng.randrange(1, 60))) for _ in range(400)]
    write_jsonl(tmp_path / "web/a.jsonl", values[:300])
    write_jsonl(tmp_path / "web/b.jsonl", values[300:])
    for i in range(30):
        (tmp_path / f"code/m{i % 4}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"code/m{i % 4}/f{i}.py").write_text(f"def f{i}():\n    return {values[i]!r}\n")
    return f"web={tmp_path / 'web'},code={tmp_path / 'code'}"


OPTIONS = dict(shard_tokens=2000, split=(80.0, 15.0, 5.0), dedup=True)


def test_the_number_of_workers_changes_no_byte(tmp_path: Path, corpus: str) -> None:
    made = []
    for workers in (1, 3):
        output = tmp_path / f"out{workers}"
        stats = run(output, corpus, "", workers, train_tokenizer=True, vocab_size=340, **OPTIONS)
        made.append(contents(output))
    assert made[0] == made[1]
    assert len([name for name in made[0] if name.endswith(".arrow")]) > 20
    assert (
        sorted(stats) == ["code", "web"]
        and stats["web"].documents + stats["web"].left_out["duplicate"] == 400
    )


def test_shards_hold_the_documents_in_order_and_say_what_they_are(
    tmp_path: Path, corpus: str
) -> None:
    output = tmp_path / "out"
    run(output, corpus, shard_tokens=3000)
    folder = tmp_path / "web"
    expected = [
        json.loads(line)["text"]
        for name in ("a", "b")
        for line in (folder / f"{name}.jsonl").read_text().splitlines()
    ]
    assert texts(output / "web") == expected
    rows = {}
    for metadata, documents in shards(output / "web"):
        assert int(metadata["n_docs"]) == len(documents)
        assert int(metadata["n_tokens"]) == sum(map(len, documents)) <= 3000
        assert int(metadata["max_token_id"]) == max(map(max, documents))
        assert (metadata["dtype"], metadata["vocab_size"], metadata["sep_token"]) == (
            "uint16",
            "258",
            "257",
        )
        assert (metadata["has_bos"], metadata["has_eos"]) == ("false", "false")
        assert metadata["tokenizer_digest"] == load_tokenizer("byte").vocabulary.digest
    lines = (output / "meta/counts.csv").read_text().splitlines()
    assert lines[0] == "dataset/filename,documents,tokens"
    rows = {
        name: (int(docs), int(tokens))
        for name, docs, tokens in (line.split(",") for line in lines[1:])
    }
    assert list(rows) == sorted(
        str(path.relative_to(output)) for path in [*output.glob("web/*"), *output.glob("code/*")]
    )
    for name in ("web", "code"):
        counted = [rows[f"{name}/{path.name}"] for path in sorted((output / name).iterdir())]
        assert counted == [(int(m["n_docs"]), int(m["n_tokens"])) for m, _ in shards(output / name)]


def test_training_reads_what_was_made(tmp_path: Path, corpus: str) -> None:
    output = tmp_path / "out"
    stats = run(output, corpus, shard_tokens=2000)
    opened = open_corpus(DataConfig(data_path=str(output), seq_length=64, datasets=("web", "code")))
    assert (opened.vocab_size, opened.sep_token) == (258, 257)
    for name, part in stats.items():
        source = opened.source(name)
        assert source is not None and source.num_tokens == part.tokens + part.documents


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, corpus: str) -> None:
    flags = [
        "prepare",
        f"--input={corpus}",
        "--tokenizer=byte",
        "--shard_tokens=300",
        "--num_workers=2",
    ]
    straight, output = tmp_path / "straight", tmp_path / "out"
    assert command(*flags, f"--output={straight}").returncode == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "fms_fsdp", *flags, f"--output={output}"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    while len(list(output.glob("meta/prepare/*/slice-*.json"))) < 5:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (output / "web").exists() and not (output / "meta/counts.csv").exists()
    for path in output.rglob("*.arrow"):  # what has its name is whole
        assert pa.ipc.open_file(path).num_record_batches == 1
    time.sleep(0.2)  # its workers end with it
    before = {
        path.name: path.stat().st_mtime_ns for path in output.glob("meta/prepare/web/slice-*.json")
    }
    again = command(*flags, f"--output={output}")
    assert again.returncode == 0 and "slices are already done" in again.stderr
    after = {
        path.name: path.stat().st_mtime_ns for path in output.glob("meta/prepare/web/slice-*.json")
    }
    assert before.items() <= after.items()
    assert contents(output) == contents(straight)


def test_interruption_at_every_slice_ends_in_the_same_bytes(
    tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = tmp_path / "straight"
    run(straight, corpus, **OPTIONS)
    real = encode.ShardWriter.finish
    output, calls, limit = tmp_path / "out", [0], [0]

    def finish(self: encode.ShardWriter) -> int:
        calls[0] += 1
        if calls[0] > limit[0]:
            raise MemoryError("stopped by the test")
        return real(self)

    monkeypatch.setattr(
        encode, "run_jobs", lambda function, jobs, *_: ((job, function(job)) for job in jobs)
    )
    monkeypatch.setattr(encode.ShardWriter, "finish", finish)
    for attempt in range(100):
        calls[0], limit[0] = 0, 2 + attempt % 3
        try:
            run(output, corpus, **OPTIONS)
            break
        except MemoryError:
            assert not (output / "web").exists() and not (output / "meta/counts.csv").exists()
    assert attempt > 5 and contents(output) == contents(straight)


def test_a_second_call_does_nothing_and_a_damaged_source_is_made_anew(
    tmp_path: Path, corpus: str
) -> None:
    output = tmp_path / "out"
    first = run(output, corpus, **OPTIONS)
    before = contents(output)
    times = {path: path.stat().st_mtime_ns for path in output.rglob("*.arrow")}
    assert run(output, corpus, **OPTIONS) == first
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*.arrow")} == times
    next((output / "web").iterdir()).unlink()
    assert run(output, corpus, **OPTIONS) == first
    assert contents(output) == before


def test_duplicates_keep_their_first_copy_over_all_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(3)
    a, b = ([f"text {rng.randrange(150)}" for _ in range(200)] for _ in range(2))
    inputs = f"a={write_jsonl(tmp_path / 'a.jsonl', a)},b={write_jsonl(tmp_path / 'b.jsonl', b)}"
    results = []
    for in_memory in (1, 2):
        output = tmp_path / f"out{in_memory}"
        stats = run(output, inputs, dedup=True, shard_tokens=100)
        results.append((texts(output / "a"), texts(output / "b")))
    seen = list(dict.fromkeys(a))
    assert (
        results[0] == results[1] == (seen, [text for text in dict.fromkeys(b) if text not in seen])
    )
    assert stats["a"].left_out == {"duplicate": 200 - len(seen)}
    assert not list(output.rglob("*.npy"))


def test_split_is_by_content_and_close_to_its_shares(tmp_path: Path) -> None:
    values = [f"document {i}" for i in range(3000)]
    one = write_jsonl(tmp_path / "one.jsonl", values)
    two = write_jsonl(tmp_path / "two.jsonl", values[::-1])
    output = tmp_path / "out"
    run(output, f"one={one},two={two}", split=(90.0, 8.0, 2.0))
    folders = {"train": output, "validation": output / "validation", "test": output / "test"}
    parts = {split: set(texts(folder / "one")) for split, folder in folders.items()}
    assert {split: set(texts(folder / "two")) for split, folder in folders.items()} == parts
    assert sum(map(len, parts.values())) == 3000 and set.union(*parts.values()) == set(values)
    for split, share in (("train", 0.9), ("validation", 0.08), ("test", 0.02)):
        assert abs(len(parts[split]) / 3000 - share) < 0.02
    validation = open_corpus(DataConfig(data_path=str(output / "validation"), seq_length=16))
    assert [source.name for source in validation.sources] == ["one", "two"]
    assert not any(
        "validation" in line for line in (output / "meta/counts.csv").read_text().splitlines()
    )


def test_filters_count_what_they_drop(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["", "a", "bb", "ccc", "dddd"])
    with open(path, "a") as file:
        file.write("\nnot json\n")
    stats = run(tmp_path / "out", f"x={path}", min_tokens=2, max_tokens=3)["x"]
    assert texts(tmp_path / "out/x") == ["bb", "ccc"]
    assert (stats.records, stats.documents, stats.tokens, stats.chars, stats.num_bad) == (
        7,
        2,
        5,
        5,
        1,
    )
    reasons = [
        "empty document",
        "shorter than 2 tokens",
        "longer than 3 tokens",
        "blank line",
        "not JSON",
    ]
    assert stats.left_out == dict.fromkeys(reasons, 1)
    assert stats.lengths == {"2": 2}  # both have 2–3 tokens
    report = describe({"x": stats})
    assert "1 blank line" in report and f"{path}:7 not JSON" in report
    assert json.loads((tmp_path / "out/meta/summary.json").read_text())["x"]["documents"] == 2


def test_too_many_bad_lines_stop_over_all_slices_and_a_higher_limit_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "good"}\n{"text": "bad}\n' * 20)
    flags = [
        "prepare",
        f"--input=x={path}",
        f"--output={tmp_path / 'out'}",
        "--tokenizer=byte",
        "--shard_tokens=30",
    ]
    ended = command(*flags, "--max_bad_lines=12")
    assert ended.returncode == 2
    error = ended.stderr.splitlines()[-1]
    assert (
        error.startswith("prepare: error: --max_bad_lines=12 exceeded in source x:")
        and f"{path}:" in error
    )
    assert not (tmp_path / "out/x").exists()
    assert command(*flags, "--max_bad_lines=20").returncode == 0
    assert texts(tmp_path / "out/x") == ["good"] * 20


def test_append_eos_stores_it_once(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["a", "bc"])
    stats = run(tmp_path / "out", f"x={path}", append_eos=True)["x"]
    metadata, rows = next(shards(tmp_path / "out/x"))
    assert (
        rows == [[97, 257], [98, 99, 257]] and metadata["has_eos"] == "true" and stats.tokens == 5
    )


def test_wide_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    info = encode.ShardInfo(1 << 17, 2, "digest")
    writer = encode.ShardWriter(tmp_path / "x.arrow", info)
    documents = [np.array([1, 100_000]), np.array([], dtype=np.int64), np.array([70_000])]
    for document in documents:
        writer.add(document)
    with pytest.raises(ValueError, match=r"token id \(131072\)"):
        writer.add(np.array([1 << 17]))
    writer.finish()
    metadata, rows = next(shards(tmp_path))
    assert rows == [[1, 100_000], [], [70_000]] and (
        metadata["dtype"],
        metadata["max_token_id"],
    ) == (
        "uint32",
        "100000",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["x.arrow"]


def test_record_batches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fms_fsdp.tools.prepare import writer as shard_writer

    monkeypatch.setattr(shard_writer, "MAX_BATCH_DOCUMENTS", 4)
    writer = encode.ShardWriter(tmp_path / "x.arrow", encode.ShardInfo(100, 2, ""))
    for i in range(10):
        writer.add(np.array([i]))
    writer.finish()
    file = pa.ipc.open_file(tmp_path / "x.arrow")
    assert [file.get_batch(i).num_rows for i in range(file.num_record_batches)] == [4, 4, 2]


def test_sources_may_be_added_later_with_the_tokenizer_of_the_folder(
    tmp_path: Path, corpus: str
) -> None:
    web, code = corpus.split(",")
    output = tmp_path / "out"
    run(output, web, "", train_tokenizer=True, vocab_size=320)
    before = (output / "tokenizer.model").read_bytes()
    with pytest.raises(ValueError, match="contains source web made with another tokenizer"):
        run(output, code, "byte")
    with pytest.raises(ValueError, match="remove --train_tokenizer"):
        run(output, code, "", train_tokenizer=True, vocab_size=320)
    run(output, code, "")
    assert (output / "tokenizer.model").read_bytes() == before
    together = tmp_path / "together"
    run(together, corpus, str(output / "tokenizer.model"))
    assert (together / "meta/counts.csv").read_bytes() == (output / "meta/counts.csv").read_bytes()
    assert contents(together / "code") == contents(output / "code")


def test_the_end_token_asked_for_holds_for_workers_and_later_sources(
    tmp_path: Path, corpus: str
) -> None:
    web, code = corpus.split(",")
    model, output = tmp_path / "model", tmp_path / "out"
    run(model, web, "", train_tokenizer=True, vocab_size=320)
    run(output, web, str(model), 2, eos_token="<s>", shard_tokens=2000, append_eos=True)
    run(output, code, "", append_eos=True)
    for name in ("web", "code"):
        for metadata, rows in shards(output / name):
            assert metadata["sep_token"] == "1" and all(row[-1] == 1 for row in rows)
    run(tmp_path / "other", web, "", train_tokenizer=True, vocab_size=310)
    (output / "tokenizer.model").write_bytes((tmp_path / "other/tokenizer.model").read_bytes())
    with pytest.raises(
        ValueError, match=r"tokenizer\.model was changed after its use; restore the file"
    ):
        run(output, code, "", append_eos=True)


def test_another_input_or_option_is_refused_unless_overwritten(tmp_path: Path, corpus: str) -> None:
    output = tmp_path / "out"
    run(output, corpus, split=(9.0, 1.0))
    with pytest.raises(
        ValueError, match="contains source web made with other min_tokens; choose another folder"
    ):
        run(output, corpus, split=(9.0, 1.0), min_tokens=3)
    write_jsonl(tmp_path / "web/c.jsonl", ["new document"])
    with pytest.raises(ValueError, match="made with other inputs"):
        run(output, corpus, split=(9.0, 1.0))
    assert (output / "validation/web").is_dir()
    run(output, corpus, overwrite=True)
    assert "new document" in texts(output / "web") and not (output / "validation/web").exists()
    assert (output / "validation/meta/counts.csv").read_text().count("\n") == 1
    foreign = tmp_path / "foreign"
    (foreign / "web").mkdir(parents=True)
    (foreign / "web/keep.arrow").write_text("mine")
    with pytest.raises(ValueError, match="has a folder web that prepare did not make"):
        run(foreign, corpus)
    assert (foreign / "web/keep.arrow").read_text() == "mine"


def test_one_prepare_at_a_time(tmp_path: Path, corpus: str) -> None:
    output = tmp_path / "out"
    output.mkdir()
    with (
        lock_folder(output),
        pytest.raises(ValueError, match="is in use by process.*wait for its end"),
    ):
        run(output, corpus)
    run(output, corpus)


def test_repeated_names_and_overlapping_paths_read_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "a,b=c").mkdir()
    write_jsonl(tmp_path / "a,b=c/1.jsonl", ["one"])
    write_jsonl(tmp_path / "2.jsonl", ["two"])
    folder = tmp_path / "a,b=c"
    inputs = f"x={tmp_path}/*.jsonl,x={folder}/1.jsonl,x={folder}"
    with pytest.raises(
        FileNotFoundError, match="--input"
    ):  # `b=` after a comma begins a source; such a path needs a glob
        run(tmp_path / "out", inputs)
    run(tmp_path / "out", inputs.replace("a,b=c", "a?b?c"))
    assert sorted(texts(tmp_path / "out/x")) == ["one", "two"]


def test_a_path_without_a_name_has_that_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my books, all"
    folder.mkdir()
    (folder / "one.tar.txt").touch()
    monkeypatch.chdir(folder)
    for text, name in (
        (".", "my_books_all"),
        (str(folder), "my_books_all"),
        (f"{folder}/../my books, all/", "my_books_all"),
        (f"{tmp_path}/*/*.txt", tmp_path.name),
        ("one.tar.txt", "one"),
        ("*.txt", "my_books_all"),
    ):
        assert parse_input(text) == {name: [text]}
    assert parse_input("one.tar.txt,a=b,c,../web") == {"one": ["one.tar.txt"], "a": ["b,c,../web"]}
    assert parse_input("web=web,web=more") == {"web": ["web", "more"]}
    assert parse_input("../web,sub/code,a=b") == {
        "web": ["../web"],
        "code": ["sub/code"],
        "a": ["b"],
    }


def test_the_command_takes_folders_without_their_flag(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(f"text of {name}")
    ended = command(
        "prepare", f"{tmp_path}/a", f"{tmp_path}/b", f"--output={tmp_path}/out", "--tokenizer=byte"
    )
    assert ended.returncode == 0, ended.stderr
    assert texts(tmp_path / "out/a") == ["text of a"] and texts(tmp_path / "out/b") == ["text of b"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(inputs="web="), "must have the form .NAME=.PATH"),
        (dict(inputs=""), "must have the form .NAME=.PATH"),
        (dict(inputs="=web"), "must have the form .NAME=.PATH"),
        (dict(inputs="nowhere,,web"), "must have the form .NAME=.PATH"),
        (dict(inputs="nowhere,"), "must have the form .NAME=.PATH"),
        (dict(inputs="meta=x"), "a source name must be"),
        (dict(inputs="some/meta"), r"--input=some/meta: a source name must be .*; write NAME=PATH"),
        (dict(inputs="/"), r"--input=/: a source name must be .*; write NAME=PATH"),
        (dict(inputs="a/web,b/web"), r"=a/web is not the only source named web; write NAME=a/web"),
        (dict(inputs="b/web,web=a"), r"=b/web is not the only source named web; write NAME=b/web"),
        (dict(tokenizer=""), "--tokenizer is missing"),
        (dict(tokenizer="byte", train_tokenizer=True), "cannot be used together"),
        (dict(vocab_size=500), "requires --train_tokenizer"),
        (dict(split=(1.0, -1.0)), "--split"),
        (dict(split=(1.0, 1.0, 1.0, 1.0)), "--split"),
        (dict(min_tokens=5, max_tokens=4), "--max_tokens"),
        (dict(min_tokens=10**6), "no documents to train on"),
    ],
)
def test_bad_options_are_one_line(
    tmp_path: Path, corpus: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as error:
        run(tmp_path / "out", **{"inputs": corpus, **options})
    assert "\n" not in str(error.value)


def test_advised_data_path_can_be_copied(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "my data"
    flags = [f"--input={corpus}", f"--output={output}", "--tokenizer=byte", "--num_workers=1"]
    assert program(["prepare", *flags]) == 0
    told = capsys.readouterr().out
    assert shlex.split(told.partition("train with ")[2])[0] == f"--data_path={output}"


def test_command_line() -> None:
    assert "prepare" in command("--help").stdout and command("--help").returncode == 0
    ended = command("prepare", "--help")
    assert ended.returncode == 0
    for name in PrepareConfig.__dataclass_fields__:
        assert f"--{name} " in ended.stdout
    for flags, words in [
        (["prepar"], "command (prepar) does not exist"),
        (["prepare", "--imput=x=y"], "did you mean --input?"),
        (
            ["prepare", "--output=x", "--input=x=/nonexistent"],
            "--input=/nonexistent does not exist",
        ),
        (["prepare", "--output=x", "--num_workers=two"], "--num_workers=two"),
    ]:
        ended = command(*flags)
        assert (
            ended.returncode == 2
            and words in ended.stderr.splitlines()[-1]
            and "Traceback" not in ended.stderr
        )
    assert not (ROOT / "x").exists()


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path: Path) -> None:
    """A worker's peak does not grow with the input: 20 and 120 MB of text in slices of 6 MB."""
    line = json.dumps({"text": "some words of a document, " * 200}) + "\n"
    peaks = []
    for megabytes in (20, 120):
        path = tmp_path / f"{megabytes}.jsonl"
        with open(path, "w") as file:
            for _ in range(megabytes * 10**6 // len(line)):
                file.write(line)
        code = (
            f"import resource, sys; from fms_fsdp.__main__ import main; main(['prepare', '--input=x={path}', "
            f"'--output={tmp_path / f'out{megabytes}'}', '--tokenizer=byte', '--shard_tokens=2M', "
            "'--num_workers=1']); whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN); "
            "print(max(resource.getrusage(who).ru_maxrss for who in whose))"
        )
        # by way of a shell, which forks: a process started by this one would begin with the peak of pytest
        command = ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, code]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks.append(int(ended.stdout.splitlines()[-1]) / 1024)
    assert peaks[1] < peaks[0] + 40 and peaks[1] < 400, peaks


def test_orphaned_workers_end(tmp_path: Path) -> None:
    """Workers that wait for a job when their parent is killed do not stay behind."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, os, signal\nfrom fms_fsdp.tools.prepare.encode import _run_in_processes\nif "
        "__name__ == '__main__':\n    for _ in _run_in_processes(abs, [1, 2, 3], [1, 2, 3], 2):\n        "
        "print(*[child.pid for child in multiprocessing.active_children()], flush=True)\n        "
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, env=env
    )
    pids = ended.stdout.split()
    assert len(pids) == 2

    def lives(pid: str) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
        except OSError:
            return False

    deadline = time.monotonic() + 10
    while any(map(lives, pids)):
        assert time.monotonic() < deadline, "workers live on without their parent"
        time.sleep(0.05)


def test_globs_and_files_name_the_same(tmp_path: Path, corpus: str) -> None:
    assert (
        len(find_files(str(tmp_path / "code/m?/*.py")))
        == len(find_files(str(tmp_path / "code")))
        == 30
    )


@pytest.mark.parametrize("command", ["prepare", "convert"])
def test_removed_flag_names_its_reason(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program([command, "--log_interval=5", "--input=x", "--output=y"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{command}: error: --log_interval is not a flag; it was removed,")
    assert line.endswith("every 5 seconds; remove the flag")


def test_writer_rejects_ids_of_any_type(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x.arrow", ShardInfo(300, 1, ""))
    for kind in (np.uint8, np.uint16, np.uint32, np.int64):
        writer.add(np.array([0, 255], kind))
    for bad in (np.array([300], np.uint16), np.array([-1]), np.array([1 << 32])):
        with pytest.raises(ValueError, match=r"must be in \[0, 300\), the vocabulary"):
            writer.add(bad)
