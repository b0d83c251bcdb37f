"""The output of prepare: it goes on after a kill while it is published, and it never becomes input."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fms_fsdp.prepare import encode as pipeline
from fms_fsdp.prepare.writer import _read_entry, lock_output
from tests.prepare.test_prepare import OPTIONS, contents, run, write_corpus, write_jsonl


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


@pytest.mark.parametrize("before_it", [True, False])
def test_kill_at_any_change_on_disk_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_it: bool
) -> None:
    """Killed before or after every rename and removal, from the first shard to the last counts file."""
    inputs = write_corpus(tmp_path).partition(",")[0]
    old, new = dict(split=(80.0, 15.0, 5.0), min_tokens=2), dict(split=(80.0, 20.0), overwrite=True)
    run(tmp_path / "start", inputs, **old)
    shutil.copytree(tmp_path / "start", tmp_path / "straight")
    run(tmp_path / "straight", inputs, **new)
    left = 0
    real = {name: getattr(os, name) for name in ("rename", "replace", "unlink", "rmdir")}

    def change(name: str) -> Callable[..., object]:
        def killing(*args: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left == 0 and before_it:
                raise Killed
            result = real[name](*args, **options)
            if left == 0:
                raise Killed
            return result

        return killing

    monkeypatch.setattr(
        pipeline, "run_jobs", lambda function, jobs, *_: ((job, function(job)) for job in jobs)
    )
    for point in itertools.count(1):
        output = tmp_path / "out" / str(point)
        shutil.copytree(tmp_path / "start", output)
        left = point
        with monkeypatch.context() as killing:
            for name in real:
                killing.setattr(os, name, change(name))
            try:
                run(output, inputs, **new)
                break
            except Killed:
                pass
        run(output, inputs, **new)
        assert contents(output) == contents(tmp_path / "straight"), point
        assert not (output / ".partial").exists()
        shutil.rmtree(output)
    assert point > 12


def test_shard_lost_after_a_kill_is_remade(tmp_path: Path) -> None:
    inputs, output = write_corpus(tmp_path).partition(",")[0], tmp_path / "out"
    run(tmp_path / "straight", inputs, **OPTIONS)
    run(output, inputs, **OPTIONS)
    # as a kill leaves it: train/ is published, validation/ is not yet
    (output / ".partial" / "web").mkdir(parents=True)
    (output / "validation" / "web").rename(output / ".partial" / "web" / "validation")
    next((output / "web").glob("*.arrow")).unlink()
    run(output, inputs, **OPTIONS)
    assert contents(output) == contents(tmp_path / "straight")


def test_held_out_data_of_another_call_stay(tmp_path: Path) -> None:
    train = f"web={write_jsonl(tmp_path / 'a.jsonl', ['text'] * 20)}"
    held = f"web={write_jsonl(tmp_path / 'b.jsonl', ['held out'])}"
    output = tmp_path / "out"
    run(output, train)
    run(output / "validation", held)
    run(output / "test", held.replace("web", "code"))
    before = contents(output / "validation") | contents(output / "test")
    next((output / "web").glob("*.arrow")).unlink()
    run(output, train)
    run(output, train, min_tokens=2, overwrite=True)
    assert contents(output / "validation") | contents(output / "test") == before
    with pytest.raises(ValueError, match="has a folder validation/web that this source did not"):
        run(output, train, split=(50.0, 50.0), overwrite=True)
    assert contents(output / "validation") | contents(output / "test") == before


def test_split_of_a_replaced_plan_is_removed(tmp_path: Path) -> None:
    inputs = f"web={write_jsonl(tmp_path / 'a.jsonl', [f'text {i}' for i in range(50)])}"
    run(tmp_path / "out", inputs, split=(50.0, 30.0, 20.0))
    run(tmp_path / "out", inputs, split=(50.0, 0.0, 50.0), overwrite=True)
    assert not (tmp_path / "out" / "validation" / "web").exists()
    assert (tmp_path / "out" / "test" / "web").is_dir()
    assert not list((tmp_path / "out").rglob("replaced.json"))


def test_linked_folders_of_a_replaced_plan_are_replaced(tmp_path: Path) -> None:
    """The held-out shards stayed, also those that the new plan trains on, or the call failed."""
    inputs = f"web={write_jsonl(tmp_path / 'a.jsonl', [f'text {i}' for i in range(50)])}"
    out = tmp_path / "out"
    run(out, inputs, split=(50.0, 50.0))
    for name in ("web", "validation/web"):
        moved = tmp_path / name.replace("/", "-")
        (out / name).rename(moved)
        (out / name).symlink_to(moved)
    run(out, inputs, overwrite=True)
    assert not os.path.lexists(out / "validation" / "web")
    assert not (out / "web").is_symlink()
    assert os.listdir(out / "web") == ["shard-00000.arrow"]


@pytest.mark.parametrize(
    ("pattern", "options"),
    [("{root}/*.jsonl", {}), ("{root}", {"include": ("*.jsonl",)}), ("{root}/raw", {})],
)
def test_output_next_to_inputs_is_not_read(
    tmp_path: Path, pattern: str, options: dict[str, object]
) -> None:
    root = tmp_path / "data"
    write_jsonl(root / "a.jsonl", ["text"])
    write_jsonl(root / "raw" / "a.jsonl", ["text"])
    for _ in range(2):
        run(root / "tokens", f"web={pattern.format(root=root)}", **options)
    run(root / ".tokens", f"web={root}/raw")  # hidden folders are not read


def test_failing_call_leaves_another_folder_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^its own error$"), lock_output(tmp_path / "new" / "a"):
        run(tmp_path / "new" / "b", f"web={write_jsonl(tmp_path / 'a.jsonl', ['text'])}")
        raise ValueError("its own error")
    assert os.listdir(tmp_path / "new") == ["b"]


def test_malformed_journal_entry_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "entry.json"
    for text in ('{"shards": [{"split": "x", "file": "a.arrow"}]}', '{"shards": [{}]}', "[", "3"):
        path.write_text(text)
        with pytest.raises(ValueError, match="entry.json was not written by prepare; remove"):
            _read_entry(path)


def test_full_disk_is_named_with_its_fix(small_disk: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", ["word " * 100_000] * 10)
    message = f"--output={small_disk / 'out'} cannot be written: No space left on device; free disk"
    with pytest.raises(ValueError, match=message):
        run(small_disk / "out", str(tmp_path / "x.jsonl"), dedup=False)


def test_shard_of_an_old_plan_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training reads all shards of a folder, also one that the storage did not remove."""
    inputs = f"web={write_jsonl(tmp_path / 'a.jsonl', ['text'] * 20)}"
    run(tmp_path / "out", inputs)
    old = tmp_path / "out/.partial/web/train/shard-00009.arrow"
    old.parent.mkdir(parents=True)
    old.touch()
    unlink = os.unlink

    def failing(path: str | Path, **settings: int) -> None:
        if os.path.basename(path) == old.name:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        unlink(path, **settings)

    with monkeypatch.context() as storage:
        storage.setattr(os, "unlink", failing)
        with pytest.raises(OSError, match="Stale file handle"):
            run(tmp_path / "out", inputs, min_tokens=2, overwrite=True)
    run(tmp_path / "out", inputs, min_tokens=2, overwrite=True)
    assert os.listdir(tmp_path / "out/web") == ["shard-00000.arrow"]
