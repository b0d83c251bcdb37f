"""Text to shards: the same bytes with any workers and interruptions, every document accounted for."""

from __future__ import annotations

import errno
import json
import os
import random
import shlex
import shutil
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
from fms_fsdp.prepare import encode
from fms_fsdp.prepare.command import prepare
from fms_fsdp.prepare.input_files import parse_input
from fms_fsdp.prepare.prepare_flags import PrepareConfig
from fms_fsdp.prepare.writer import ShardInfo, ShardWriter, describe
from fms_fsdp.run.run_dir import lock_folder
from fms_fsdp.tokenizers.load import load_tokenizer
from tests.warm import COMMANDS, command, running

ROOT = Path(__file__).resolve().parents[2]


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
    """Decodes the documents of a source, which are bytes."""
    return [bytes(t for t in row if t < 256).decode() for _, rows in shards(folder) for row in rows]


def write_jsonl(path: Path, values: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    return path


def write_corpus(folder: Path) -> str:
    """Writes two sources: JSON lines big enough for many slices, and a folder of code."""
    rng = random.Random(1)
    words = ["alpha", "beta", "gamma", "delta", "\n", "é", "42", "    "]
    values = [" ".join(rng.choices(words, k=rng.randrange(1, 60))) for _ in range(400)]
    write_jsonl(folder / "web/a.jsonl", values[:300])
    write_jsonl(folder / "web/b.jsonl", values[300:])
    for i in range(30):
        (folder / f"code/m{i % 4}").mkdir(parents=True, exist_ok=True)
        (folder / f"code/m{i % 4}/f{i}.py").write_text(f"def f{i}():\n    return {values[i]!r}\n")
    return f"web={folder / 'web'},code={folder / 'code'}"


@pytest.fixture()
def corpus(tmp_path: Path) -> str:
    return write_corpus(tmp_path)


OPTIONS = dict(shard_tokens=2000, split=(80.0, 15.0, 5.0), dedup=True)


@pytest.mark.slow
def test_number_of_workers_changes_no_byte(tmp_path: Path, corpus: str) -> None:
    options = dict(train_tokenizer=True, vocab_size=340, **OPTIONS)
    run(tmp_path / "three", corpus, "", 3, **options)
    web = run(tmp_path / "one", corpus, "", 1, **options)["web"]
    made = contents(tmp_path / "one")
    assert made == contents(tmp_path / "three")
    assert len([name for name in made if name.endswith(".arrow")]) > 20
    assert web.documents + web.left_out["duplicate"] == 400


def test_shards_and_counts_describe_the_documents(tmp_path: Path, corpus: str) -> None:
    output = tmp_path / "out"
    stats = run(output, corpus, shard_tokens=3000)
    lines = [(tmp_path / f"web/{name}.jsonl").read_text().splitlines() for name in "ab"]
    assert texts(output / "web") == [json.loads(line)["text"] for line in sum(lines, [])]
    expected = {"dtype": "uint16", "vocab_size": "258", "sep_token": "257"}
    expected |= {"has_bos": "false", "has_eos": "false"}
    expected |= {"tokenizer_digest": load_tokenizer("byte").vocabulary.digest}
    rows = ["dataset/filename,documents,tokens"]
    for name in ("code", "web"):
        paths = sorted((output / name).iterdir())
        for path, (metadata, documents) in zip(paths, shards(output / name), strict=True):
            counts = len(documents), sum(map(len, documents))
            assert (int(metadata["n_docs"]), int(metadata["n_tokens"])) == counts
            assert int(metadata["max_token_id"]) == max(map(max, documents))
            assert counts[1] <= 3000 and expected.items() <= metadata.items()
            rows.append(f"{name}/{path.name},{counts[0]},{counts[1]}")
    assert (output / "meta/counts.csv").read_text().splitlines() == rows
    opened = open_corpus(DataConfig(data_path=str(output), seq_length=64))
    assert (opened.vocab_size, opened.sep_token) == (258, 257)
    for source in opened.sources:
        assert source.num_tokens == stats[source.name].tokens + stats[source.name].documents


@pytest.mark.slow
def test_killed_prepare_resumes(tmp_path: Path, corpus: str) -> None:
    straight, output = tmp_path / "straight", tmp_path / "out"
    run(straight, corpus, shard_tokens=300)
    flags = [f"--input={corpus}", "--tokenizer=byte", "--shard_tokens=300", "--num_workers=2"]
    argv = ["prepare", *flags, f"--output={output}"]
    with running(argv, program=COMMANDS) as process:
        while len(list(output.glob("meta/prepare/*/slice-*.json"))) < 5:
            assert process.exitcode is None, "it ended before it could be killed"
            time.sleep(0.002)
    assert not (output / "web").exists() and not (output / "meta/counts.csv").exists()
    for path in output.rglob("*.arrow"):  # a file with its final name is complete
        assert pa.ipc.open_file(path).num_record_batches == 1
    time.sleep(0.2)  # its workers end with it

    def entries() -> set[tuple[str, int]]:
        paths = output.glob("meta/prepare/web/slice-*.json")
        return {(path.name, path.stat().st_mtime_ns) for path in paths}

    before = entries()
    again = command(*argv)
    assert again.returncode == 0 and "slices are already done" in again.stderr
    assert before <= entries() and contents(output) == contents(straight)


def test_second_call_makes_only_missing_shards(tmp_path: Path, corpus: str) -> None:
    output = tmp_path / "out"
    first, before = run(output, corpus, **OPTIONS), contents(output)
    times = {path: path.stat().st_mtime_ns for path in output.rglob("*.arrow")}
    assert run(output, corpus, **OPTIONS) == first
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*.arrow")} == times
    next((output / "web").iterdir()).unlink()
    assert run(output, corpus, **OPTIONS) == first
    assert contents(output) == before


def test_hashes_are_on_disk_before_they_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power failure leaves an empty file, which is taken for a complete one."""
    path = tmp_path / "hashes-00000.npy"
    synced: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append((os.fstat(fd).st_size, path.exists()))
    )
    encode._save(path, np.arange(3, dtype=np.uint64))
    assert synced[0] == (path.stat().st_size, False)


def test_hashes_on_a_full_disk_are_an_error(small_disk: Path) -> None:
    """np.save lost the last block in silence: all later calls failed on a truncated file."""
    path = small_disk / "hashes-00000.npy"
    free = shutil.disk_usage(small_disk).free
    (small_disk / "other").write_bytes(b"x" * free)
    with pytest.raises(OSError, match="No space left on device"):
        encode._save(path, np.arange(9, dtype=np.uint64))
    (small_disk / "other").unlink()
    encode._save(path, np.arange(9, dtype=np.uint64))
    assert np.load(path).tolist() == list(range(9))
    encode._save(path, np.zeros(3, dtype=bool))
    assert np.load(path).tolist() == [False, False, False]


def test_first_copy_of_duplicates_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(3)
    a, b = ([f"text {rng.randrange(150)}" for _ in range(200)] for _ in range(2))
    inputs = f"a={write_jsonl(tmp_path / 'a.jsonl', a)},b={write_jsonl(tmp_path / 'b.jsonl', b)}"
    output, seen = tmp_path / "out", list(dict.fromkeys(a))
    monkeypatch.setattr("fms_fsdp.prepare.encode.DEDUP_NOTE_DOCUMENTS", 400)
    stats = run(output, inputs, dedup=True, shard_tokens=100)
    assert "--dedup needs 0.0 GB of memory for 400 documents" in capsys.readouterr().err
    assert texts(output / "a") == seen
    assert texts(output / "b") == [text for text in dict.fromkeys(b) if text not in seen]
    assert stats["a"].left_out == {"duplicate": 200 - len(seen)}
    assert not list(output.rglob("*.npy"))


def test_split_follows_content_and_fractions(tmp_path: Path) -> None:
    values = [f"document {i}" for i in range(3000)]
    one = write_jsonl(tmp_path / "one.jsonl", values)
    two = write_jsonl(tmp_path / "two.jsonl", values[::-1])
    output, parts = tmp_path / "out", []
    run(output, f"one={one},two={two}", split=(90.0, 8.0, 2.0))
    for folder, fraction in (("", 0.9), ("validation", 0.08), ("test", 0.02)):
        parts.append(set(texts(output / folder / "one")))
        assert parts[-1] == set(texts(output / folder / "two"))
        assert abs(len(parts[-1]) / 3000 - fraction) < 0.02
    assert sum(map(len, parts)) == 3000 and set.union(*parts) == set(values)
    validation = open_corpus(DataConfig(data_path=str(output / "validation"), seq_length=16))
    assert [source.name for source in validation.sources] == ["one", "two"]
    assert "validation" not in (output / "meta/counts.csv").read_text()


def test_split_without_training_documents_is_rejected(tmp_path: Path) -> None:
    """It was "no records"."""
    path = write_jsonl(tmp_path / "x.jsonl", ["a", "b"])
    with pytest.raises(ValueError, match="^--split sends 2 documents, all of source x, to valid"):
        run(tmp_path / "out", f"x={path}", split=(1e-9, 1.0))


def test_filters_count_rejected_documents(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["", "a", "bb", "ccc", "dddd"])
    with open(path, "a") as file:
        file.write("\nnot json\n")
    stats = run(tmp_path / "out", f"x={path}", min_tokens=2, max_tokens=3)["x"]
    assert texts(tmp_path / "out/x") == ["bb", "ccc"]
    counts = (stats.records, stats.documents, stats.tokens, stats.chars, stats.num_bad)
    assert counts == (7, 2, 5, 5, 1) and stats.lengths == {"2": 2}  # both have 2–3 tokens
    reasons = ["empty document", "shorter than 2 tokens", "longer than 3 tokens"]
    assert stats.left_out == dict.fromkeys([*reasons, "blank line", "not JSON"], 1)
    report = describe({"x": stats})
    assert "1 blank line" in report and f"{path}:7 not JSON" in report
    assert json.loads((tmp_path / "out/meta/summary.json").read_text())["x"]["documents"] == 2


def test_bad_lines_are_limited_over_all_slices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "x.jsonl", tmp_path / "out"
    path.write_text('{"text": "good"}\n{"text": "bad}\n' * 20)
    argv = ["prepare", f"--input=x={path}", f"--output={output}", "--tokenizer=byte"]
    argv += ["--shard_tokens=30", "--num_workers=1"]
    assert program([*argv, "--max_bad_lines=12"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: --max_bad_lines=12 is exceeded in source x:")
    assert f"{path}:" in error and not (output / "x").exists()
    # Slices of the first call count too: 13 of its lines and 3 of this call's are malformed.
    assert program([*argv, "--max_bad_lines=15"]) == 2
    # The last slice exceeds the limit, so the second of these calls has no slice left to encode.
    for _ in range(2):
        assert program([*argv, "--max_bad_lines=19"]) == 2
    assert not (output / "x").exists()
    assert program([*argv, "--max_bad_lines=20"]) == 0
    assert texts(output / "x") == ["good"] * 20


def test_writer_stores_large_ids_and_rejects_others(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x.arrow", ShardInfo(1 << 17, 2, "digest"))
    for document in ([1, 100_000], [], [70_000]):
        writer.add(np.array(document, dtype=np.int64))
    for kind in (np.uint8, np.uint16, np.uint32):
        writer.add(np.array([0, 255], kind))
    for bad in (np.array([1 << 17], np.uint32), np.array([-1]), np.array([1 << 32])):
        with pytest.raises(ValueError, match="is outside the vocabulary of 131,072"):
            writer.add(bad)
    writer.finish()
    ((metadata, rows),) = shards(tmp_path)
    assert rows == [[1, 100_000], [], [70_000], *[[0, 255]] * 3]
    assert (metadata["dtype"], metadata["max_token_id"]) == ("uint32", "100000")
    assert [path.name for path in tmp_path.iterdir()] == ["x.arrow"]


def test_record_batches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fms_fsdp.prepare.writer.MAX_BATCH_DOCUMENTS", 4)
    writer = ShardWriter(tmp_path / "x.arrow", ShardInfo(100, 2, ""))
    for i in range(10):
        writer.add(np.array([i]))
    writer.finish()
    file = pa.ipc.open_file(tmp_path / "x.arrow")
    assert [file.get_batch(i).num_rows for i in range(file.num_record_batches)] == [4, 4, 2]


def test_later_source_uses_the_folders_tokenizer(tmp_path: Path, corpus: str) -> None:
    web, code = corpus.split(",")
    output = tmp_path / "out"
    run(output, web, "", train_tokenizer=True, vocab_size=320)
    before = (output / "tokenizer.model").read_bytes()
    with pytest.raises(ValueError, match="contains source web made with another tokenizer"):
        run(output, code, "byte")
    with pytest.raises(ValueError, match="remove --train_tokenizer"):
        run(output, code, "", train_tokenizer=True, vocab_size=320)
    run(output, code, str(output))
    assert (output / "tokenizer.model").read_bytes() == before
    run(output, web, "", train_tokenizer=True, vocab_size=320)
    assert (output / "tokenizer.model").read_bytes() == before
    together = tmp_path / "together"
    run(together, corpus, str(output / "tokenizer.model"))
    assert (together / "meta/counts.csv").read_bytes() == (output / "meta/counts.csv").read_bytes()
    assert contents(together / "code") == contents(output / "code")


@pytest.mark.slow
def test_eos_token_holds_for_later_sources(tmp_path: Path, corpus: str) -> None:
    web, code = corpus.split(",")
    model, output = tmp_path / "model", tmp_path / "out"
    run(model, web, "", train_tokenizer=True, vocab_size=320)
    run(output, web, str(model), 2, eos_token="<s>", shard_tokens=2000, append_eos=True)
    run(output, code, "", append_eos=True)
    for name in ("web", "code"):
        for metadata, rows in shards(output / name):
            assert (metadata["sep_token"], metadata["has_eos"]) == ("1", "true")
            assert all(row[-1] == 1 not in row[:-1] for row in rows)
    run(tmp_path / "other", web, "", train_tokenizer=True, vocab_size=310)
    shutil.copy(tmp_path / "other" / "tokenizer.model", output)
    with pytest.raises(ValueError, match=r"tokenizer\.model was changed .*; restore the file"):
        run(output, code, "", append_eos=True)


def test_other_input_or_option_requires_overwrite(tmp_path: Path, corpus: str) -> None:
    output = tmp_path / "out"
    run(output, corpus, split=(9.0, 1.0))
    with pytest.raises(ValueError, match="contains source web made with other min_tokens; choose"):
        run(output, corpus, split=(9.0, 1.0), min_tokens=3)
    write_jsonl(tmp_path / "web/c.jsonl", ["new document"])
    with pytest.raises(ValueError, match="made with other inputs"):
        run(output, corpus, split=(9.0, 1.0))
    assert (output / "validation/web").is_dir()
    run(output, corpus, overwrite=True)
    assert "new document" in texts(output / "web") and not (output / "validation/web").exists()
    assert (output / "validation/meta/counts.csv").read_text().count("\n") == 1
    foreign = tmp_path / "foreign/web/keep.arrow"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    for overwrite in (False, True):  # which removed the folder
        with pytest.raises(ValueError, match="has a folder web that prepare did not make"):
            run(tmp_path / "foreign", corpus, overwrite=overwrite)
        assert foreign.read_text() == "mine"


def test_folder_in_use_is_rejected(tmp_path: Path, corpus: str) -> None:
    output, match = tmp_path / "out", "is in use by process.*wait for its end"
    output.mkdir()
    with lock_folder(output), pytest.raises(ValueError, match=match):
        run(output, corpus)


def test_overlapping_paths_read_each_file_once(tmp_path: Path) -> None:
    folder = tmp_path / "a,b=c"
    write_jsonl(folder / "1.jsonl", ["one"])
    write_jsonl(tmp_path / "2.jsonl", ["two"])
    inputs = f"x={tmp_path}/*.jsonl,x={folder}/1.jsonl,x={folder}"
    with pytest.raises(FileNotFoundError, match="--input"):  # `,b=` begins a source
        run(tmp_path / "out", inputs)
    run(tmp_path / "out", inputs.replace("a,b=c", "a?b?c"))
    assert sorted(texts(tmp_path / "out/x")) == ["one", "two"]


def test_source_is_named_after_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my books, all"
    folder.mkdir()
    (folder / "one.tar.txt").touch()
    monkeypatch.chdir(folder)
    for text, sources in {
        ".": {"my_books_all": ["."]},
        str(folder): {"my_books_all": [str(folder)]},
        "../my books, all/": {"my_books_all": ["../my books, all/"]},
        f"{tmp_path}/*/*.txt": {tmp_path.name: [f"{tmp_path}/*/*.txt"]},
        "one.tar.txt": {"one": ["one.tar.txt"]},
        "*.txt": {"my_books_all": ["*.txt"]},
        "one.tar.txt,a=b,c,../web": {"one": ["one.tar.txt"], "a": ["b,c,../web"]},
        "web=web,web=more": {"web": ["web", "more"]},
        "../web,sub/code,a=b": {"web": ["../web"], "code": ["sub/code"], "a": ["b"]},
    }.items():
        assert parse_input(text) == sources


def test_command_takes_folders_and_prints_data_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(f"text of {name}")
    folders, output = [f"{tmp_path}/a", f"{tmp_path}/b"], tmp_path / "my data"
    argv = ["prepare", *folders, f"--output={output}", "--tokenizer=byte", "--num_workers=1"]
    assert program(argv) == 0
    assert [texts(output / name) for name in "ab"] == [["text of a"], ["text of b"]]
    flags = shlex.split(capsys.readouterr().out.partition("train with ")[2])
    assert flags[0] == f"--data_path={output}"


def test_source_without_documents_is_rejected(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["text"])
    with pytest.raises(
        ValueError, match=r"^--input: source x has no documents .*; check the input"
    ):
        run(tmp_path / "out", f"x={path}", min_tokens=10**6)


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path: Path) -> None:
    """A worker's peak does not grow with the input: 20 and 120 MB of text in slices of 6 MB."""
    line, peaks = json.dumps({"text": "some words of a document, " * 200}) + "\n", []
    for megabytes in (20, 120):
        path = tmp_path / f"{megabytes}.jsonl"
        path.write_text(line * (megabytes * 10**6 // len(line)))
        argv = ["prepare", f"--input=x={path}", f"--output={tmp_path}/out{megabytes}"]
        argv += ["--tokenizer=byte", "--shard_tokens=2M", "--num_workers=1"]
        code = (
            f"import resource; from fms_fsdp.__main__ import main; main({argv}); "
            "whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN); "
            "print(max(resource.getrusage(who).ru_maxrss for who in whose))"
        )
        # by way of a shell, which forks: a process started by this one would begin with its peak
        shell = ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, code]
        ended = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks.append(int(ended.stdout.splitlines()[-1]) / 1024)
    assert peaks[1] < peaks[0] + 40 and peaks[1] < 400, peaks


ORPHANS = """
import multiprocessing, os, signal
from fms_fsdp.prepare.encode import _run_in_processes
if __name__ == "__main__":
    for _ in _run_in_processes(abs, [1, 2, 3], [1, 2, 3], 2):
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EPERM, errno.ENOSPC])
def test_missing_shared_memory_is_named(
    tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def failing(*args: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", failing)
    with pytest.raises(ValueError, match="^--num_workers=2 requires .*/dev/shm, .*=1$"):
        run(tmp_path / "out", corpus, workers=2)
    assert run(tmp_path / "out", corpus, workers=1)


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(ORPHANS)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, env=env
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
