"""What a run starts from, what a resume may change, and how launches end on purpose."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fms_fsdp.checkpoint.folders import Checkpoint, complete_steps, leftovers
from fms_fsdp.config import BatchPlan, ModelConfig, TrainConfig
from fms_fsdp.config.batch import last_step
from fms_fsdp.config.flag import flag_table
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.optim.schedules import Milestones
from fms_fsdp.run.resume import (
    ResumePoint,
    check_resume,
    choose_checkpoint,
    learning_rate_jump,
)
from fms_fsdp.run.setup import find_corpus, open_stream
from fms_fsdp.state import RunConfig, TrainMetadata
from tests.cli import (
    ROOT,
    TINY,
    events,
    last_of_each,
    losses,
    metrics,
    run,
    status,
    trained,
    under_torchrun,
)
from tests.specs import FRESH, planned, resolved
from tests.warm import running


@pytest.fixture
def whole(eight_steps: Path) -> Path:
    """Eight steps without a stop, a checkpoint at every second; not to be changed."""
    return eight_steps


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def argv(folder: Path, *more: str) -> list[str]:
    return last_of_each([*TINY, "--checkpoint_interval=2", f"--output_dir={folder}", *more])


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    whole: Path, copy: Path
) -> None:
    """One is cut, which its size tells before any work; one has a changed byte, which the load finds out."""
    with open(copy / "checkpoints" / "step_8" / "__0_0.distcp", "r+b") as file:
        file.truncate(1000)
    with open(copy / "checkpoints" / "step_6" / "__0_0.distcp", "r+b") as file:
        file.seek(100_000)
        byte = file.read(1)
        file.seek(100_000)
        file.write(bytes([byte[0] ^ 1]))
    output = trained(*argv(copy, "--num_steps=8"))
    assert "skipped step_8: __0_0.distcp has 1,000 bytes" in output
    assert "step_6, which is corrupt: __0_0.distcp is corrupt: its checksum is wrong" in output
    assert "resuming from step 4" in output
    assert losses(copy) == losses(whole)
    assert complete_steps(copy / "checkpoints") == [2, 4, 6, 8]
    assert [word for _, word in leftovers(copy / "checkpoints")] == ["damaged", "damaged"]


def test_no_sound_checkpoint_is_an_error_and_not_a_fresh_start(copy: Path) -> None:
    for folder in (copy / "checkpoints").glob("step_*"):
        (folder / "files.json").unlink()
    result = run(*argv(copy, "--num_steps=9"))
    assert (
        result.returncode == 2
        and "has no usable checkpoint (step_8: files.json is missing" in result.stderr
        and result.stderr.count("\n") == 1
    )


def test_resume_must_and_never(copy: Path, tmp_path: Path) -> None:
    missing = run(*argv(tmp_path / "empty", "--num_steps=1", "--resume=must"))
    assert missing.returncode == 2 and "--resume=must requires a checkpoint, but" in missing.stderr
    there = run(*argv(copy, "--num_steps=9", "--resume=never"))
    assert there.returncode == 2 and "--resume=never, but" in there.stderr
    assert "starting from scratch: no checkpoint in" in trained(
        *argv(tmp_path / "fresh", "--num_steps=1", "--resume=never")
    )
    assert "resuming from step 8" in trained(*argv(copy, "--num_steps=9", "--resume=must"))


def test_going_back_sets_later_checkpoints_aside_once(copy: Path) -> None:
    """The same command, given again by a scheduler, goes on from what came of going back."""
    wrong = run(*argv(copy, "--num_steps=8", "--resume_step=5"))
    assert wrong.returncode == 2 and "use one of 2, 4, 6, 8" in wrong.stderr
    stopped = run(*argv(copy, "--num_steps=8", "--resume_step=4", "--exit_interval=2"))
    output = stopped.stdout
    assert (
        stopped.returncode == 75
        and "resuming from step 4" in output
        and "renaming 2 later checkpoints" in output
    )
    assert complete_steps(copy / "checkpoints") == [2, 4, 6]
    assert len(leftovers(copy / "checkpoints")) == 2
    again = trained(*argv(copy, "--num_steps=8", "--resume_step=4"))
    assert "resuming from step 6" in again and "saved since --resume_step=4" in again
    assert complete_steps(copy / "checkpoints") == [2, 4, 6, 8]


def test_what_changes_on_resume_is_announced(copy: Path) -> None:
    output = trained(*argv(copy, "--num_steps=10", "--learning_rate=1e-3", "--report_interval=2"))
    assert "from step 9: --learning_rate 0.0003 -> 0.001, --num_steps 8 -> 10" in output
    quiet = output.partition("changed, no effect on training: ")[2].partition("\n")[0]
    assert "--report_interval 1 -> 2" in quiet and "--learning_rate" not in quiet
    assert "learning rate of step 9: 3.000e-05 -> " in output
    unchanged = trained(
        *argv(copy, "--num_steps=11", "--learning_rate=1e-3", "--report_interval=2")
    )
    assert (
        "from step 11: --num_steps 10 -> 11" in unchanged
        and "--learning_rate" not in unchanged.split("from step 11")[1]
    )


def test_every_flag_says_what_it_does_on_resume() -> None:
    fields = flag_table(TrainConfig)
    assert {spec.resume for spec in fields.values()} == {"free", "logged", "fixed"}
    table = (ROOT / "docs" / "configuration.md").read_text()
    assert all(f"| `--{name}` |" in table for name in fields)


REFUSED = {
    "--model_variant=194m": "--num_layers=10 does not match the checkpoint",
    "--hf_config=x": "--hf_config and --model_variant cannot be used together",
    "--num_layers=3": "--num_layers=3 does not match the checkpoint",
    "--hidden_size=256": "--hidden_size=256 does not match the checkpoint",
    "--ffn_hidden_size=128": "--ffn_hidden_size=128 does not match the checkpoint",
    "--num_attention_heads=2": "--num_attention_heads=2 does not match the checkpoint",
    "--num_kv_heads=1": "--num_kv_heads=1 does not match the checkpoint",
    "--rope_theta=5": "--rope_theta=5.0 does not match the checkpoint",
    "--norm_eps=0.1": "--norm_eps=0.1 does not match the checkpoint",
    "--vocab_size=600": "--vocab_size=600 does not match the checkpoint",
    "--tie_embeddings=true": "--tie_embeddings=True does not match the checkpoint",
    "--norm=layernorm": "--norm=layernorm does not match the checkpoint",
    "--pos_emb=learned": "--pos_emb=learned does not match the checkpoint",
    "--relative_buckets=9": "--relative_buckets=9 has no effect without --pos_emb=relative",
    "--relative_max_distance=9": "--relative_max_distance=9 has no effect without --pos_emb=relative",
    "--activation=gelu": "--activation=gelu does not match the checkpoint",
    "--bias=True": "--bias=True does not match the checkpoint",
    "--head_dim=16": "--head_dim=16 does not match the checkpoint",
    "--rope_scaling=linear:2": "--rope_scaling=",
    "--rope_pct=0.5": "--rope_pct=0.5 does not match the checkpoint",
    "--qk_norm=True": "--qk_norm=True does not match the checkpoint",
    "--qkv_bias=True": "--qkv_bias=True does not match the checkpoint",
    "--parallel_residual=True": "--parallel_residual=True does not match the checkpoint",
    "--attn_window=4": "--attn_window=4 does not match the checkpoint",
    "--attn_window_pattern=LG": "--attn_window_pattern=LG has no effect without --attn_window",
    "--z_loss=1e-4": "--z_loss=0.0001 does not match the checkpoint",
    "--vocab_multiple_of=100": "--vocab_multiple_of=100 does not match the checkpoint",
    "--model_builder=fms_fsdp.models.llama:Llama": "--model_builder=fms_fsdp.models.llama:Llama",
    "--optimizer=sgd": "--optimizer=sgd does not match the state of the checkpoint",
    "--seed=7": "--seed=7 does not match the checkpoint (2023)",
}
ON_SHARDS_ONLY = {"sep_token", "packing"}  # tests/data/test_stream.py


def test_the_table_of_refused_flags_is_whole() -> None:
    refused = {name for name, spec in flag_table(TrainConfig).items() if spec.resume == "fixed"}
    assert {flag[2:].partition("=")[0] for flag in REFUSED} | ON_SHARDS_ONLY == refused


def test_refused_flags_are_refused(
    whole: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag, message in REFUSED.items():
        with pytest.raises(ValueError) as caught:
            flags = last_of_each(argv(whole, "--num_steps=9", flag))
            cfg = parse_flags(TrainConfig, flags)
            resume = choose_checkpoint(cfg)
            open_stream(planned(flags, resume=resume), find_corpus(cfg), resume, 0)
        assert message in str(caught.value), (flag, str(caught.value))


def test_limits_end_a_launch_and_not_the_run(whole: Path, tmp_path: Path) -> None:
    """Seven launches under different limits leave the losses of one."""
    tokens = metrics(whole)[1]["tokens_seen"]
    common = [*TINY, f"--output_dir={tmp_path}", "--checkpoint_interval=0"]
    first = run(*common, "--num_steps=8", "--exit_interval=2")
    assert (
        first.returncode == 75
        and status(tmp_path)["status"] == "resume_me"
        and status(tmp_path)["step"] == 2
    )
    assert "--exit_interval=2 is reached, at step 2" in status(tmp_path)["reason"]
    second = run(*common, "--num_steps=8", f"--exit_tokens={tokens + 1}")
    assert second.returncode == 75 and status(tmp_path)["step"] == 4
    third = run(*common, "--num_steps=8", "--exit_duration_in_mins=0.1")  # less than the margin
    assert third.returncode == 75 and status(tmp_path)["step"] == 5
    fourth = run(*common, "--num_steps=8", SLURM_JOB_END_TIME=str(int(time.time())))
    assert fourth.returncode == 75 and status(tmp_path)["step"] == 6
    rows = metrics(whole)[1]["samples_seen"]
    fifth = run(*common, "--num_steps=8", f"--exit_samples={rows}")
    assert (
        fifth.returncode == 75
        and f"--exit_samples={rows} is reached, at step 7" in status(tmp_path)["reason"]
    )
    trained(*common, f"--num_tokens={8 * tokens}")
    assert status(tmp_path)["status"] == "finished"
    assert losses(tmp_path) == losses(whole)


def test_exit_step_counts_the_steps_of_the_run(tmp_path: Path) -> None:
    common = [*TINY, f"--output_dir={tmp_path}", "--checkpoint_interval=0", "--num_steps=5"]
    for flag, step in (
        ("--exit_interval=2", 2),
        ("--exit_step=3", 3),
        ("--exit_step=2", 3),
        ("--exit_step=6", 5),
    ):
        assert run(*common, flag).returncode == (0 if step == 5 else 75)
        assert status(tmp_path)["step"] == step


def test_the_stop_file_stops_and_is_gone_with_the_next_launch(tmp_path: Path) -> None:
    common = [*TINY, f"--output_dir={tmp_path}", "--num_steps=100000", "--checkpoint_interval=0"]
    with running(common, output=tmp_path / "output") as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        (tmp_path / "STOP").touch()
        process.join(60)
        assert process.exitcode == 75
    assert f"stopped by the file {tmp_path / 'STOP'}" in (tmp_path / "output").read_text()
    step = status(tmp_path)["step"]
    assert complete_steps(tmp_path / "checkpoints") == [step]
    trained(*[flag for flag in common if "num_steps" not in flag], f"--num_steps={step + 1}")
    assert not (tmp_path / "STOP").exists() and status(tmp_path)["status"] == "finished"


@pytest.mark.parametrize(
    ("flags", "steps"), [(["--num_tokens=1k"], 8), (["--num_samples=7"], 4), ([], 1000)]
)
def test_the_length_of_a_run_in_any_unit(flags: list[str], steps: int) -> None:
    training = parse_flags(TrainConfig, flags).training
    assert last_step(training, BatchPlan(2, 1, 1), seq_length=64) == steps


def test_two_units_of_length_are_one_too_many() -> None:
    result = run(*TINY, "--num_steps=5", "--num_tokens=10M")
    assert result.returncode == 2 and "cannot be used together" in result.stderr


def test_two_runs_in_one_folder_are_refused_until_the_owner_dies(tmp_path: Path) -> None:
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 1 on another\n")
        file.flush()
        result = run(*argv(tmp_path, "--num_steps=1"))
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {tmp_path} is in use by process 1 on another; stop")
    trained(*argv(tmp_path, "--num_steps=1"))


def test_gradients_that_are_not_finite_end_the_run_with_the_data_named(tmp_path: Path) -> None:
    flags = ["--num_steps=20", "--learning_rate=1e30", "--warmup_steps=0", "--max_bad_steps=3"]
    result = run(*argv(tmp_path, *flags))
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "failed: step" in result.stderr and "3 in a row, --max_bad_steps=3" in result.stderr
    assert "Data fingerprint" in result.stderr and status(tmp_path)["status"] == "failed"
    bad = status(tmp_path)["reason"].split(":")[0].split()[1]
    assert complete_steps(tmp_path / "checkpoints")[-1] < int(bad)


def test_a_rank_that_hangs_leaves_its_stacks(tmp_path: Path) -> None:
    """One of two ranks hangs: both write their stacks, and the launch ends."""
    script = tmp_path / "hanging.py"
    script.write_text(
        "import os, sys, time\nsys.path.insert(0, os.getcwd())\nimport main_training, fms_fsdp.train as "
        "train\nstep = train.train_step\ndef hang(recipe, state, batch, clock):\n    if state.step "
        "== 3 and os.environ['RANK'] == '1':\n        time.sleep(1000)\n    return step(recipe, state, "
        "batch, clock)\ntrain.train_step = hang\nos._exit(main_training.main(sys.argv[1:]))\n"
    )
    command = under_torchrun(2, str(script))
    begin = time.monotonic()
    result = subprocess.run(
        [*command, *argv(tmp_path, "--num_steps=9", "--collective_timeout_s=4")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 1 and time.monotonic() - begin < 60
    assert "no step for" in result.stdout + result.stderr
    stacks = {path.name: path.read_text() for path in (tmp_path / "stacks").iterdir()}
    assert "in hang" in stacks["rank1.txt"]
    assert status(tmp_path)["status"] == "failed" and "no step for" in status(tmp_path)["reason"]


def test_the_parts_of_a_start_are_on_record(copy: Path) -> None:
    trained(*argv(copy, "--num_steps=9"))
    start = events(copy, "start")[-1]
    assert start["step"] == 9 and start["attempt"] == 2
    parts = {name: value for name, value in start.items() if name.endswith("_s")}
    assert set(parts) == {
        "launch_s",
        "checks_s",
        "data_s",
        "group_s",
        "model_s",
        "load_s",
        "first_step_s",
    }
    assert all(0 <= value < 60 for value in parts.values()) and 0.05 < sum(parts.values()) < 60


def test_versions_and_commit_are_in_the_checkpoint(whole: Path) -> None:
    state = json.loads((whole / "checkpoints" / "step_8" / "train_state.json").read_text())
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if head.returncode == 0:
        assert state["resolved"]["versions"]["commit"].startswith(head.stdout[:12])
    assert state["resolved"]["versions"]["torch"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_torchrun_ends_with_a_checkpoint(
    tmp_path: Path, number: signal.Signals
) -> None:
    signals = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    flags = argv(tmp_path, "--num_steps=100000", "--checkpoint_interval=0")
    command = under_torchrun(2, signals, "main_training.py", *flags)
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    records = tmp_path / "metrics.jsonl"
    # behind the second step every rank can save: while the first is recorded, a rank may still be in it
    while not (records.exists() and len(metrics(tmp_path)) > 1) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    process.wait(timeout=60)
    ended = status(tmp_path)
    assert ended["status"] == "resume_me" and number.name in ended["reason"]
    assert complete_steps(tmp_path / "checkpoints") == [ended["step"]]


def test_rotary_positions_take_another_length_and_learned_ones_do_not(tmp_path: Path) -> None:
    model = resolve_model(ModelConfig(model_variant="tiny"), seq_length=64)
    for pos_emb in ("rope", "learned"):
        before = replace(model, pos_emb=pos_emb)
        saved = TrainMetadata(4, **resolved(TrainConfig(), model=before).saved_with)
        checkpoint = Checkpoint(tmp_path / "step_4", saved)
        resume = ResumePoint(checkpoint, weights_only=True)
        resolved(TrainConfig(), model=before, resume=resume)
        other = replace(before, max_seq_len=128)
        if pos_emb == "rope":
            resolved(TrainConfig(), model=other, resume=resume)
            continue
        text = r"--max_seq_len=128 does not match the checkpoint .* \(64\)"
        with pytest.raises(ValueError, match=text):
            resolved(TrainConfig(), model=other, resume=resume)


def resume_of(before: RunConfig, *, fresh_data: bool = False) -> ResumePoint:
    """Returns the start of a run that resumes from step 600 of a launch."""
    saved = TrainMetadata(600, tokens_seen=600 * 80, rows_seen=600 * 10, **before.saved_with)
    return ResumePoint(Checkpoint(Path("step_600"), saved), fresh_data=fresh_data)


def test_a_seed_of_fresh_data_is_said_to_take_effect() -> None:
    """With --resuming_dataset=False the data begin anew, so the flags that decide their order take effect."""
    before, now = (parse_flags(TrainConfig, ["--data_path=a", f"--seed={seed}"]) for seed in (1, 2))
    for fresh_data, words in (
        (True, "from step 601: "),
        (False, "changed, no effect on training: "),
    ):
        resume = resume_of(resolved(before), fresh_data=fresh_data)
        assert check_resume(resolved(now), resume) == [f"{words}--seed 1 -> 2"]
    moved = parse_flags(
        TrainConfig, ["--data_path=b", "--seed=1", "--logical_shards=8", "--max_epochs=3"]
    )
    resume = resume_of(resolved(before), fresh_data=True)
    assert check_resume(resolved(moved), resume) == [
        "from step 601: --data_path a -> b, --logical_shards 1024 -> 8",
        "changed, no effect on training: --max_epochs None -> 3.0",
    ]


def launch_of(flags: list[str], num_steps: int, resume: ResumePoint = FRESH) -> RunConfig:
    """A launch of 80 tokens a step."""
    cfg = parse_flags(TrainConfig, ["--seq_length=8", f"--num_steps={num_steps}", *flags])
    return resolved(cfg, batch=BatchPlan(10, 1, 1), resume=resume)


@pytest.mark.parametrize(
    "flags", [[], ["--warmup_steps=10"], ["--warmup=400tokens"], ["--lr_schedule=linear"]]
)
def test_a_longer_run_moves_no_corner_of_the_schedule(flags: list[str]) -> None:
    first = launch_of(flags, 1000)
    for num_steps in (700, 1000, 2000):
        later = launch_of(flags, num_steps, resume_of(first))
        assert later.milestones == first.milestones
        assert learning_rate_jump(later, resume_of(first)) == ""


def test_a_changed_flag_of_the_schedule_makes_new_corners_and_is_told() -> None:
    resume = resume_of(launch_of(["--warmup=10"], 1000))
    now = launch_of(["--warmup=10", "--lr_decay=2000"], 2000, resume)
    assert now.milestones == Milestones(False, 10, 10, 2000)
    assert learning_rate_jump(now, resume) == "learning rate of step 601: 1.245e-04 -> 2.454e-04"


def test_the_last_phase_of_wsd_moves_with_the_end_until_it_has_begun() -> None:
    flags = ["--lr_schedule=wsd", "--warmup=0.05"]
    first = launch_of(flags, 1000)
    assert launch_of(flags, 2000, resume_of(first)).milestones == Milestones(False, 50, 1800, 2000)
    begun = replace(first, milestones=Milestones(False, 50, 590, 1000))
    assert launch_of(flags, 2000, resume_of(begun)).milestones == begun.milestones
