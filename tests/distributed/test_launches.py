"""Launches of several ranks: who starts where, who tells what failed, and what is left when torchrun dies."""

from __future__ import annotations

import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from fms_fsdp.run.run_dir import lock_folder
from tests.cli import ROOT, TINY, events, losses, metrics, run, status, trained, under_torchrun
from tests.data.corpora import SEP, write_corpus, write_lists
from tests.distributed.test_recovery import ENVIRONMENT, TORCHRUN, wait_for, workers

LAUNCH = under_torchrun(2, "main_training.py")


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.slow
def test_a_launch_that_begins_while_another_ends_goes_on_where_that_one_ended(
    tmp_path: Path,
) -> None:
    """All its ranks start from the last checkpoint of the other launch."""
    argv = [
        *TINY,
        "--checkpoint_interval=5",
        "--min_lr_ratio=1",
        "--warmup_steps=1",
        "--trackers=none",
    ]
    first, other = (
        [*LAUNCH, *argv, f"--output_dir={tmp_path / 'run'}", f"--num_steps={n}"] for n in (300, 400)
    )
    process = subprocess.Popen(first, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    assert wait_for(lambda: count_lines(tmp_path / "run" / "metrics.jsonl") > 270, 180)
    result = subprocess.run(
        other, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=200
    )
    assert process.wait(60) == 0 and result.returncode == 0, result.stdout + result.stderr
    trained(*argv, "--num_steps=400", f"--output_dir={tmp_path / 'calm'}", nproc=2)
    assert "resuming from step 300" in result.stdout
    assert losses(tmp_path / "run") == losses(tmp_path / "calm")
    assert not list((tmp_path / "run" / "checkpoints").glob("*.*-*"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["flag", "lock"])
def test_a_refused_launch_through_train_sh_leaves_the_folder_to_the_byte(
    tmp_path: Path, fault: str
) -> None:
    folder = tmp_path / "run"
    trained(*TINY, "--num_steps=1", f"--output_dir={folder}")
    (folder / "console.txt").write_text("of the running launch\n")
    flags = [
        *TINY,
        f"--output_dir={folder}",
        "--num_steps=2",
        *(["--num_layers=3"] if fault == "flag" else []),
    ]
    settings = ENVIRONMENT | {"NPROC_PER_NODE": "2", "SLURM_JOB_ID": "17"}
    settings = {name: text for name, text in settings.items() if name != "LAUNCH_OUTCOME"}
    lock = lock_folder(folder)
    if fault != "lock":
        lock.close()
    before = content(folder)
    command = ["bash", "scripts/train.sh", *flags]
    result = subprocess.run(
        command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=120
    )
    lock.close()
    words = "--num_layers=3 does not match" if fault == "flag" else "is in use by process"
    assert result.returncode == 2 and words in result.stderr + result.stdout
    after = content(folder)
    assert {**after, ".lock": b"", "checkpoints/.lock": b""} == {
        **before,
        ".lock": b"",
        "checkpoints/.lock": b"",
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_ranks_whose_torchrun_is_killed_save_and_free_the_folder(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [*LAUNCH, *TINY, "--num_steps=100000", "--trackers=none", f"--output_dir={tmp_path}"]
    agent = subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert wait_for(lambda: count_lines(tmp_path / "metrics.jsonl") > 3, 90)
    orphans = workers(agent.pid)
    agent.send_signal(number)
    agent.wait(60)
    assert wait_for(lambda: status(tmp_path)["status"] == "resume_me", 60)
    assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in orphans), 60)
    reason = status(tmp_path)["reason"]  # rank 0 may hear of it from the other rank first
    assert "the end of torchrun's agent" in reason or "a signal to another rank" in reason
    with lock_folder(tmp_path):
        assert (tmp_path / "checkpoints" / f"step_{status(tmp_path)['step']}").is_dir()


@pytest.mark.slow
def test_one_of_two_torchruns_is_killed_and_all_ranks_stop(tmp_path: Path) -> None:
    launch = [
        *TORCHRUN,
        "--nnodes=2",
        "--nproc_per_node=1",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=localhost:29643",
    ]
    launch += [
        "--rdzv_id=half",
        "main_training.py",
        *TINY,
        "--num_steps=100000",
        f"--output_dir={tmp_path}",
    ]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    start = partial(subprocess.Popen, launch, cwd=ROOT, env=ENVIRONMENT, **silent)
    agents = [start() for _ in range(2)]
    try:
        assert wait_for(lambda: count_lines(tmp_path / "metrics.jsonl") > 3, 90)
        ranks = [pid for agent in agents for pid in workers(agent.pid)]
        agents[1].kill()
        assert wait_for(lambda: status(tmp_path)["status"] == "resume_me", 90), status(tmp_path)
        assert wait_for(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in ranks), 90)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    with lock_folder(tmp_path):
        assert (tmp_path / "checkpoints" / f"step_{status(tmp_path)['step']}").is_dir()


def test_the_rank_that_runs_out_of_memory_tells_what_would_help(tmp_path: Path) -> None:
    stream = [
        "--dataset_builder=tests.distributed.failing_stream:build",
        "--data_kwargs=rank=1,step=3",
    ]
    argv = ["--model_variant=tiny", "--seq_length=64", "--num_steps=9", f"--output_dir={tmp_path}"]
    result = run(*argv, *stream, nproc=2, torchrun=())
    assert result.returncode == 1
    assert "[rank 1] failed: out of memory (CUDA out of memory." in result.stderr
    ended = status(tmp_path)
    assert ended["status"] == "failed" and "--recompute=blocks saves about" in ended["reason"]
    assert not list((tmp_path / "checkpoints").glob("step_*"))


def test_rows_masked_on_any_rank_are_counted_and_told(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_corpus(data, {"web": [400] * 12})
    argv = [
        *TINY,
        f"--data_path={data}",
        "--on_missing=mask",
        "--num_steps=12",
        "--global_batch_size=4",
    ]
    argv = [flag for flag in argv if "dummy" not in flag] + [
        "--vocab_size=5000",
        f"--sep_token={SEP}",
    ]
    (data / "web" / "shard-00003.arrow").unlink()
    one, two = (
        run(*argv, f"--output_dir={tmp_path / str(nproc)}", nproc=nproc, MKL_NUM_THREADS="1")
        for nproc in (0, 2)
    )
    assert one.returncode == two.returncode == 0, two.stderr
    counts = [
        [record["masked_rows"] for record in metrics(tmp_path / name).values()]
        for name in ("0", "2")
    ]
    assert counts[0] == counts[1] and counts[0][-1] > 0
    assert f"  {counts[1][-1]} rows masked  " in two.stdout
    assert "[rank 1] sequence masked: " in two.stdout


def test_wrong_tokens_end_every_attempt_at_once_and_are_told_once(tmp_path: Path) -> None:
    """The first attempt trains up to them; a further one finds them before it builds the model."""
    data = tmp_path / "data"
    files = write_corpus(data, {"web": [200] * 40})
    argv = [flag for flag in TINY if "dummy" not in flag] + [
        f"--data_path={data}",
        "--batch_size=2",
    ]
    argv += ["--num_steps=25", "--vocab_size=5000", f"--sep_token={SEP}", "--checkpoint_interval=2"]
    documents = [
        document[:-1] for document in files.documents["web"][5]
    ]  # as they are on disk, without separators
    documents[0][0] = 6000
    write_lists(data / "web" / "shard-00005.arrow", documents)
    result = run(*argv, f"--output_dir={tmp_path / 'run'}", nproc=2, torchrun=("--max-restarts=2",))
    assert result.returncode == 1
    assert (result.stdout + result.stderr).count("has token 6000") == 1, result.stderr
    ended = status(tmp_path / "run")
    assert ended["status"] == "bad_input" and "has token 6000" in ended["reason"]
    assert ended["data_step"] > ended["step"]
    assert len(events(tmp_path / "run", "start")) == 1  # the further attempts made no step
