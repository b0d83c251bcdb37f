"""Launches of several ranks: where they resume, who reports a failure, what remains when torchrun dies."""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from fms_fsdp.checkpoint.folders import complete_steps
from fms_fsdp.data.batch import Batch
from fms_fsdp.data.stream import TokenStream
from fms_fsdp.errors import read_failed
from fms_fsdp.files import read_json
from fms_fsdp.run.run_dir import lock_folder
from tests.cli import ROOT, TINY, events, losses, metrics, run, status, trained, under_torchrun
from tests.data.corpora import SEP, write_corpus, write_lists
from tests.distributed.test_recovery import (
    ENVIRONMENT,
    TORCHRUN,
    two_agents,
    wait_for,
    workers,
)
from tests.warm import launch

LAUNCH = under_torchrun(2, "main_training.py")


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def has_open(torchrun: subprocess.Popen[str], file: Path) -> bool:
    """Returns whether a worker has opened the file."""
    links = (link for pid in workers(torchrun.pid) for link in Path(f"/proc/{pid}/fd").glob("*"))
    with suppress(OSError):  # a worker, or one of its files, may be gone meanwhile
        return any(link.resolve() == file.resolve() for link in links)
    return False


@pytest.mark.slow
def test_launch_waits_for_one_that_ends(tmp_path: Path) -> None:
    """All its ranks start from the last checkpoint of the other launch."""
    argv = [*TINY, "--dataset_builder=tests.scripts.paced_stream:build", "--checkpoint_interval=5"]
    argv += ["--min_lr_ratio=1", "--warmup_steps=1", "--trackers=none"]
    run, slowly = tmp_path / "run", tmp_path / "slowly"
    slowly.touch()
    commands = ([*LAUNCH, *argv, f"--output_dir={run}", f"--num_steps={n}"] for n in (40, 50))
    first = subprocess.Popen(
        next(commands),
        cwd=ROOT,
        env=ENVIRONMENT | {"PACE_FILE": str(slowly)},
        stdout=subprocess.DEVNULL,
    )
    assert wait_for(lambda: count_lines(run / "metrics.jsonl") > 0, 180)
    other = subprocess.Popen(
        next(commands), cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert wait_for(lambda: first.poll() is not None or has_open(other, run / ".lock"), 180)
    slowly.unlink()
    output, _ = other.communicate(timeout=200)
    assert (first.wait(60), other.returncode) == (0, 0), output
    trained(*argv, "--num_steps=50", f"--output_dir={tmp_path / 'calm'}", nproc=2)
    assert "resuming from step 40" in output
    assert losses(run) == losses(tmp_path / "calm")
    assert not list((run / "checkpoints").glob("*.*-*"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["flag", "lock"])
def test_rejected_launch_leaves_the_folder_unchanged(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "run"
    trained(*TINY, "--num_steps=1", f"--output_dir={folder}")
    (folder / "console.txt").write_text("of the running launch\n")
    flags = [*TINY, f"--output_dir={folder}", "--num_steps=2"]
    flags += ["--num_layers=3"] if fault == "flag" else []
    settings = ENVIRONMENT | {"NPROC_PER_NODE": "2", "SLURM_JOB_ID": "17"}
    settings.pop("LAUNCH_OUTCOME", None)
    lock = lock_folder(folder)
    if fault != "lock":
        lock.close()
    before = content(folder)
    command = ["bash", "scripts/train.sh", *flags]
    result = subprocess.run(
        command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=300
    )
    lock.close()
    words = "--num_layers=3 does not match"
    if fault == "lock":
        words = f"error: {folder} is in use by process {os.getpid()} on {socket.gethostname()}; "
    assert result.returncode == 2 and words in result.stderr + result.stdout
    assert content(folder) == before


def assert_saved(folder: Path, ranks: list[int]) -> None:
    """Waits until the run has saved, its ranks have ended, and its folder is free."""
    assert wait_for(lambda: status(folder)["status"] == "resume_me", 300), status(folder)
    assert wait_for(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in ranks), 300)
    with lock_folder(folder):
        assert (folder / "checkpoints" / f"step_{status(folder)['step']}").is_dir()


@pytest.mark.slow
def test_ranks_of_killed_torchrun_save_and_stop(tmp_path: Path) -> None:
    command = [*LAUNCH, *TINY, "--num_steps=100000", "--trackers=none", f"--output_dir={tmp_path}"]
    agent = subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert wait_for(lambda: count_lines(tmp_path / "metrics.jsonl") > 3, 300)
    orphans = workers(agent.pid)
    agent.kill()
    agent.wait(60)
    assert_saved(tmp_path, orphans)
    reason = status(tmp_path)["reason"]  # rank 0 may hear of it from the other rank first
    assert "the end of torchrun's agent" in reason or "a signal to another rank" in reason


@pytest.mark.slow
def test_killed_torchrun_stops_both_nodes(tmp_path: Path) -> None:
    flags = [*TINY, "--num_steps=100000", f"--output_dir={tmp_path}"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    agents = two_agents([*TORCHRUN, "main_training.py", *flags], 29643, [ROOT] * 2, **silent)
    try:
        assert wait_for(lambda: count_lines(tmp_path / "metrics.jsonl") > 3, 300)
        ranks = [pid for agent in agents for pid in workers(agent.pid)]
        agents[1].kill()
        assert_saved(tmp_path, ranks)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def test_rank_out_of_memory_reports_remedies(tmp_path: Path) -> None:
    argv = ["--model_variant=tiny", "--seq_length=64", "--num_steps=9", f"--output_dir={tmp_path}"]
    argv.append("--dataset_builder=tests.distributed.failing_stream:build")
    result = run(*argv, "--data_kwargs=rank=1,step=3", nproc=2)
    assert result.returncode == 1
    assert "[rank 1] failed: out of memory (CUDA out of memory." in result.stderr
    ended = status(tmp_path)
    assert ended["status"] == "failed" and "--recompute=blocks saves about" in ended["reason"]
    assert not list((tmp_path / "checkpoints").glob("step_*"))


def fail_to_read_step_3() -> None:
    """Lets the storage of rank 1 fail, after its retries."""
    batch_at = TokenStream.batch_at

    def failing(self: TokenStream, step: int) -> Batch:
        if step == 3 and self.dp_rank == 1:
            raise read_failed("/data/a.bin", "Input/output error")
        return batch_at(self, step)

    TokenStream.batch_at = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("num_steps", [2, 9])
def test_unreadable_batch_saves_the_last_step(tmp_path: Path, num_steps: int) -> None:
    """No rank begins a step that another one has no batch for. Steps after the last do not count."""
    flags = [*TINY, f"--num_steps={num_steps}", f"--output_dir={tmp_path}"]
    result = launch(flags, 2, before=fail_to_read_step_3)
    if num_steps == 2:
        assert result.returncode == 0, result.stderr
        return
    assert result.returncode == 1 and "Traceback" not in result.stderr
    reason = "rank 1: /data/a.bin cannot be read: Input/output error; the file is not corrupt: "
    reason += "repair the storage and start again: the run resumes from step 2"
    assert result.stderr.count(f"failed: {reason}\n") == 1
    ended = status(tmp_path)
    assert (ended["status"], ended["step"], ended["reason"]) == ("failed", 2, reason)
    assert complete_steps(tmp_path / "checkpoints") == [2]


def own_data(folder: Path) -> list[str]:
    """Returns the flags of a run on the corpus of a folder."""
    return [
        *(flag for flag in TINY if "dummy" not in flag),
        *(f"--data_path={folder}", "--vocab_size=5000", f"--sep_token={SEP}"),
    ]


@pytest.mark.slow
def test_sequences_masked_on_any_rank_are_counted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_corpus(data, {"web": [400] * 12})
    argv = [*own_data(data), "--on_missing=mask", "--num_steps=12", "--global_batch_size=4"]
    (data / "web" / "shard-00003.arrow").unlink()
    one, two = (run(*argv, f"--output_dir={tmp_path / str(n)}", nproc=n) for n in (0, 2))
    assert one.returncode == two.returncode == 0, two.stderr
    counts = [
        [record["masked_rows"] for record in metrics(tmp_path / name).values()]
        for name in ("0", "2")
    ]
    assert counts[0] == counts[1] and counts[0][-1] > 0
    assert f"  {counts[1][-1]} masked  " in two.stdout
    assert "[rank 1] sequence masked: " in two.stdout


@pytest.mark.slow  # starts an agent and two attempts of two ranks
def test_wrong_token_ends_every_attempt_once(tmp_path: Path) -> None:
    """The first attempt trains up to it; a further one finds it before it builds the model."""
    data = tmp_path / "data"
    files = write_corpus(data, {"web": [200] * 40})
    argv = [*own_data(data), "--batch_size=2", "--num_steps=25", "--checkpoint_interval=2"]
    documents = [document[:-1] for document in files.documents["web"][5]]  # without separators
    documents[0][0] = 6000
    write_lists(data / "web" / "shard-00005.arrow", documents)
    result = run(*argv, f"--output_dir={tmp_path / 'run'}", nproc=2, torchrun=("--max-restarts=1",))
    assert result.returncode == 1
    assert (result.stdout + result.stderr).count("has token 6000") == 1, result.stderr
    ended = status(tmp_path / "run")
    assert ended["status"] == "bad_input" and "has token 6000" in ended["reason"]
    assert ended["data_step"] > ended["step"]
    assert len(events(tmp_path / "run", "start")) == 1  # the further attempt made no step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--config=flags.toml", *TINY], "error: --config=flags.toml"),
        (
            ["--data_path=data", "--seq_length=64"],
            "error: --data_path=data is not a folder",  # before the ranks connect
        ),
    ],
)
def test_error_of_rank_1_alone_is_printed_once(
    tmp_path: Path, flags: list[str], error: str
) -> None:
    """Rank 1 left it to rank 0, which printed nothing, or that a connection was closed."""
    write_corpus(tmp_path / "node0" / "data", {"web": [300]})
    (tmp_path / "node0" / "flags.toml").touch()
    (tmp_path / "node1").mkdir()
    command = under_torchrun(2, str(ROOT / "tests/distributed/on_two_nodes.py"))
    ended = subprocess.run(
        [*command, str(tmp_path), *flags, f"--output_dir={tmp_path / 'run'}", "--num_steps=1"],
        cwd=ROOT,
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT), "LAUNCH_OUTCOME": str(tmp_path / "outcome")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = ended.stderr.splitlines()
    assert [line.startswith(error) for line in lines].count(True) == 1, ended.stderr
    assert 'Traceback (most recent call last):\n  File "/' not in ended.stderr
    outcome = read_json(tmp_path / "outcome")
    assert outcome["status"] == "bad_input" and outcome["reason"] in ended.stderr
    assert not (tmp_path / "run").exists()
