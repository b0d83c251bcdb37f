"""Resume points, the flags that a resume may change, and limits of a launch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fms_fsdp.checkpoint.folders import Checkpoint, complete_steps, leftovers
from fms_fsdp.checkpoint.io import collect_tensors, write_checkpoint
from fms_fsdp.config import BatchPlan, ModelConfig, TrainConfig
from fms_fsdp.config.batch_plan import last_step
from fms_fsdp.config.flag import flag_table
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.errors import UserError
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.optim.schedules import Milestones
from fms_fsdp.run.data_stream import open_stream
from fms_fsdp.run.resume import learning_rate_jump, list_changes
from fms_fsdp.run.resume_point import ResumePoint, choose_checkpoint
from fms_fsdp.run.setup import find_corpus
from fms_fsdp.run.startup_log import end_of_decay
from fms_fsdp.state import RunConfig, TrainMetadata
from tests.checkpoint.signing import flip_a_bit
from tests.checkpoint.test_checkpointer import made
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


def test_resume_skips_corrupt_checkpoints(whole: Path, copy: Path) -> None:
    """The size of a cut file shows before any work, a flipped bit only when it is loaded."""
    folder = copy / "checkpoints"
    os.truncate(folder / "step_8" / "__0_0.distcp", 1000)
    flip_a_bit(folder / "step_6" / "__0_0.distcp")
    output = trained(*argv(copy, "--num_steps=8"))
    assert "skipped step_8: __0_0.distcp has 1,000 bytes" in output
    assert "step_6, which is corrupt: __0_0.distcp is corrupt: its checksum is wrong" in output
    assert "resuming from step 4" in output
    assert losses(copy) == losses(whole)
    assert complete_steps(folder) == [2, 4, 6, 8]
    assert [word for _, word in leftovers(folder)] == ["damaged", "damaged"]


def test_corrupt_checkpoints_never_mean_a_fresh_start(copy: Path) -> None:
    for step in (4, 6, 8):
        (copy / "checkpoints" / f"step_{step}" / "files.json").unlink()
    flip_a_bit(copy / "checkpoints" / "step_2" / "__0_0.distcp")
    for _ in range(2):  # the first launch renames it
        result = run(*argv(copy, "--num_steps=9"))
        assert result.returncode == 2 and "no usable checkpoint" in result.stderr


def test_resume_must_and_never(whole: Path, tmp_path: Path) -> None:
    def chosen(folder: Path, resume: str) -> ResumePoint:
        return choose_checkpoint(parse_flags(TrainConfig, argv(folder, f"--resume={resume}")))

    with pytest.raises(UserError, match="--resume=must requires a checkpoint, but"):
        chosen(tmp_path, "must")
    with pytest.raises(UserError, match="--resume=never, but"):
        chosen(whole, "never")
    assert chosen(whole, "must").start.step == 8 and chosen(tmp_path, "never").start.step == 0


def test_resume_step_renames_later_checkpoints_once(copy: Path) -> None:
    """The same command, started again by a scheduler, resumes from its own checkpoints."""
    with pytest.raises(UserError, match="use one of 2, 4, 6, 8"):
        choose_checkpoint(parse_flags(TrainConfig, argv(copy, "--resume_step=5")))
    flags = argv(copy, "--num_steps=8", "--resume_step=4")
    for step in (4, 8):
        (copy / "exports" / f"step_{step}").mkdir(parents=True)
    stopped = run(*flags, "--exit_interval=2")
    assert stopped.returncode == 75 and "resuming from step 4" in stopped.stdout
    assert "renaming 2 later checkpoints" in stopped.stdout
    assert complete_steps(copy / "checkpoints") == [2, 4, 6]
    assert len(leftovers(copy / "checkpoints")) == 2
    assert sorted(os.listdir(copy / "exports")) == ["step_4", "step_8.superseded-1"]
    again = trained(*flags)
    assert "resuming from step 6" in again and "saved since --resume_step=4" in again
    assert complete_steps(copy / "checkpoints") == [2, 4, 6, 8]
    board = EventAccumulator(str(copy / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("loss/loss")] == list(range(1, 9))


@pytest.mark.parametrize(
    ("step", "end"),
    [
        (4, "; renaming 2 later checkpoints"),
        (6, "; renaming 1 later checkpoint"),
        (8, "checkpoints"),
    ],
)
def test_resume_step_counts_later_checkpoints(whole: Path, step: int, end: str) -> None:
    flags = argv(whole, f"--resume_step={step}")
    assert choose_checkpoint(parse_flags(TrainConfig, flags)).reason.endswith(end)


def test_repeated_resume_step_continues_weights_only_run(copy: Path, tmp_path: Path) -> None:
    """Its own steps are below --resume_step, which is a step of the other run: the command was an error."""
    flags = argv(tmp_path / "new", f"--ckpt_load_path={copy}", "--load_model_only=True")
    flags.append("--resume_step=8")
    cfg = parse_flags(TrainConfig, flags)
    assert choose_checkpoint(cfg).weights_only
    root = tmp_path / "new" / "checkpoints"
    root.mkdir(parents=True)
    model, optimizers = made(0)
    metadata = TrainMetadata(2, **resolved(cfg).saved_with)
    write_checkpoint(collect_tensors(model, optimizers), root, metadata)
    again = choose_checkpoint(cfg)
    assert again.is_resume and again.start.step == 2


def test_changes_and_phases_of_resume_are_recorded(copy: Path) -> None:
    output = trained(*argv(copy, "--num_steps=10", "--learning_rate=1e-3", "--report_interval=2"))
    assert "from step 9: --learning_rate 0.0003 -> 0.001, --num_steps 8 -> 10" in output
    quiet = output.partition("changed, no effect on training: ")[2].partition("\n")[0]
    assert "--report_interval 1 -> 2" in quiet and "--learning_rate" not in quiet
    assert "learning rate of step 9: 3.000e-05 -> " in output
    start = events(copy, "start")[-1]
    assert start["step"] == 9 and start["attempt"] == 2
    phases = {name: value for name, value in start.items() if name.endswith("_s")}
    names = "launch_s checks_s data_s group_s model_s load_s first_step_s"
    assert phases.keys() == set(names.split()) and sum(phases.values()) > 0.05
    assert all(0 <= value < 60 for value in phases.values())


DIFFERING = """
--num_layers=3 --hidden_size=256 --ffn_hidden_size=128 --num_attention_heads=2 --num_kv_heads=1
--rope_theta=5.0 --norm_eps=0.1 --vocab_size=600 --tie_embeddings=True --norm=layernorm
--pos_emb=learned --activation=gelu --bias=True --head_dim=16 --rope_pct=0.5 --qk_norm=True
--qkv_bias=True --parallel_residual=True --attn_window=4 --z_loss=0.0001 --vocab_multiple_of=100
--optimizer=sgd --seed=7 --rope_scaling=linear:2
"""
REJECTED = {flag: f"{flag} does not match the " for flag in DIFFERING.split()} | {
    "--model_variant=194m": "--num_layers=10 does not match the checkpoint",
    "--hf_config=x": "--hf_config and --model_variant cannot be used together",
    "--relative_buckets=9": "--relative_buckets=9 has no effect without --pos_emb=relative",
    "--relative_max_distance=9": "--relative_max_distance=9 has no effect without --pos_emb",
    "--attn_window_pattern=LG": "--attn_window_pattern=LG has no effect without --attn_window",
    "--model_builder=fms_fsdp.models.llama:Llama": "--model_builder=fms_fsdp.models.llama:Llama",
}
ON_SHARDS_ONLY = {"sep_token", "packing", "seq_length"}  # tests/data/test_stream.py


def test_rejected_flags_are_the_fixed_ones() -> None:
    fixed = {name for name, spec in flag_table(TrainConfig).items() if spec.resume == "fixed"}
    assert {flag[2:].partition("=")[0] for flag in REJECTED} | ON_SHARDS_ONLY == fixed


@pytest.mark.parametrize(("flag", "message"), REJECTED.items())
def test_resume_rejects_other_fixed_flag(whole: Path, flag: str, message: str) -> None:
    flags = argv(whole, "--num_steps=9", flag)
    with pytest.raises(ValueError) as caught:
        cfg = parse_flags(TrainConfig, flags)
        resume = choose_checkpoint(cfg)
        run = planned(flags, resume=resume)
        open_stream(cfg, run.batch, run.model.vocab_size, find_corpus(cfg), resume)
    assert message in str(caught.value)


@pytest.mark.slow
def test_limits_end_a_launch_not_the_run(whole: Path, tmp_path: Path) -> None:
    """Four launches have the losses of one. `--exit_step` counts the steps of the run."""
    first = metrics(whole)[1]
    flags = [*TINY, f"--output_dir={tmp_path}", "--checkpoint_interval=0", "--num_steps=8"]
    rows = first["samples_seen"]
    for flag, step in (("--exit_step=2", 2), ("--exit_step=1", 2), (f"--exit_samples={rows}", 3)):
        assert run(*flags, flag).returncode == 75
        ended = status(tmp_path)
        assert (ended["status"], ended["step"]) == ("resume_me", step)
        assert f"{flag} is reached, at step {step}" in ended["reason"]
    trained(*flags[:-1], f"--num_tokens={8 * first['tokens_seen']}")
    assert status(tmp_path)["status"] == "finished" and losses(tmp_path) == losses(whole)


def test_stop_file_stops_one_launch(tmp_path: Path) -> None:
    """Also one whose date is ahead of the clock."""
    common, stop = [*TINY, f"--output_dir={tmp_path}", "--checkpoint_interval=0"], tmp_path / "STOP"
    with running([*common, "--num_steps=100000"], output=tmp_path / "output") as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        stop.touch()
        process.join(60)
        assert process.exitcode == 75
    assert f"stopped by the file {stop}" in (tmp_path / "output").read_text()
    step = status(tmp_path)["step"]
    assert complete_steps(tmp_path / "checkpoints") == [step]
    os.utime(stop, (time.time() + 10_000, time.time() + 10_000))
    trained(*common, f"--num_steps={step + 1}")
    assert not stop.exists() and status(tmp_path)["status"] == "finished"


@pytest.mark.parametrize(("flag", "steps"), [("--num_tokens=1k", 8), ("--num_samples=7", 4)])
def test_length_of_run_in_any_unit(flag: str, steps: int) -> None:
    training = parse_flags(TrainConfig, [flag]).training
    assert last_step(training, BatchPlan(2, 1, 1), seq_length=64) == steps


def test_non_finite_gradients_end_the_run(tmp_path: Path) -> None:
    flags = ["--num_steps=20", "--learning_rate=1e30", "--warmup_steps=0", "--max_bad_steps=3"]
    result = run(*argv(tmp_path, *flags))
    assert result.returncode == 1 and "Traceback" not in result.stderr
    for words in ("failed: step", "3 of at most 3 consecutive", "Data fingerprint"):
        assert words in result.stderr
    ended = status(tmp_path)
    bad = int(ended["reason"].split(":")[0].split()[1])
    assert ended["status"] == "failed" and complete_steps(tmp_path / "checkpoints")[-1] < bad


HANGING = """
import os, sys, time
sys.path.insert(0, os.getcwd())
import main_training, fms_fsdp.train as train
step = train.train_step
def hang(settings, state, batch, clock):
    if state.step == 3 and os.environ["RANK"] == "1":
        time.sleep(1000)
    return step(settings, state, batch, clock)
train.train_step = hang
os._exit(main_training.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_hanging_rank_leaves_stacks_and_ends(tmp_path: Path) -> None:
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    flags = argv(tmp_path, "--num_steps=9", "--collective_timeout_s=4")
    begin = time.monotonic()
    result = subprocess.run(
        [*under_torchrun(2, str(script)), *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 1 and time.monotonic() - begin < 120
    assert "no step for" in result.stdout + result.stderr
    assert "in hang" in (tmp_path / "stacks" / "rank1.txt").read_text()
    assert status(tmp_path)["status"] == "failed" and "no step for" in status(tmp_path)["reason"]


def test_checkpoint_records_versions_and_commit(whole: Path) -> None:
    state = json.loads((whole / "checkpoints" / "step_8" / "train_state.json").read_text())
    versions = state["resolved"]["versions"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if head.returncode == 0:
        assert versions["commit"].startswith(head.stdout[:12])
    assert versions["torch"]


def test_learned_positions_keep_their_length(tmp_path: Path) -> None:
    model = resolve_model(ModelConfig(model_variant="tiny"), seq_length=64)
    for pos_emb in ("rope", "learned"):
        before = replace(model, pos_emb=pos_emb)
        saved = TrainMetadata(4, **resolved(TrainConfig(), model=before).saved_with)
        resume = ResumePoint(Checkpoint(tmp_path / "step_4", saved), weights_only=True)
        resolved(TrainConfig(), model=before, resume=resume)
        other = replace(before, max_seq_len=128)
        if pos_emb == "rope":
            resolved(TrainConfig(), model=other, resume=resume)
            continue
        with pytest.raises(UserError, match=r"--max_seq_len=128 does not match .* \(64\)"):
            resolved(TrainConfig(), model=other, resume=resume)


def resume_of(before: RunConfig, *, fresh_data: bool = False) -> ResumePoint:
    """Returns the start of a run that resumes from step 600 of a launch."""
    saved = TrainMetadata(600, tokens_seen=600 * 80, rows_seen=600 * 10, **before.saved_with)
    return ResumePoint(Checkpoint(Path("step_600"), saved), fresh_data=fresh_data)


def test_fresh_data_follows_changed_flags() -> None:
    """With --resuming_dataset=False the flags of the data order take effect."""
    before, other = (
        parse_flags(TrainConfig, ["--data_path=a", f"--seed={seed}"]) for seed in (1, 2)
    )
    moved = ["--data_path=b", "--seed=1", "--logical_shards=8", "--max_epochs=3"]
    cases: list[tuple[TrainConfig, bool, list[str]]] = [
        (other, True, ["from step 601: --seed 1 -> 2"]),
        (other, False, ["changed, no effect on training: --seed 1 -> 2"]),
        (
            parse_flags(TrainConfig, moved),
            True,
            [
                "from step 601: --data_path a -> b, --logical_shards 1024 -> 8",
                "changed, no effect on training: --max_epochs None -> 3.0",
            ],
        ),
    ]
    for now, fresh_data, lines in cases:
        resume = resume_of(resolved(before), fresh_data=fresh_data)
        assert list(list_changes(resolved(now), resume)) == lines


def test_larger_batch_of_a_rank_changes_no_batch() -> None:
    """A resumed run keeps its global batch, so the flag is not logged as taken."""
    before, now = (parse_flags(TrainConfig, [f"--batch_size={size}"]) for size in (2, 4))
    resume = resume_of(resolved(before, batch=BatchPlan(2, 1, 1)))
    assert list(list_changes(resolved(now, batch=BatchPlan(2, 1, 1)), resume)) == [
        "--batch_size=4 is not reached: the run keeps its global batch of 2 sequences "
        "(2 sequences x 1 rank x 1 accumulation step); set --global_batch_size to change it"
    ]
    lines = list(list_changes(resolved(now, batch=BatchPlan(4, 1, 1)), resume))
    assert lines == ["from step 601: --batch_size 2 -> 4"]


def launch_of(flags: list[str], num_steps: int, resume: ResumePoint = FRESH) -> RunConfig:
    """A launch of 80 tokens a step."""
    cfg = parse_flags(TrainConfig, ["--seq_length=8", f"--num_steps={num_steps}", *flags])
    return resolved(cfg, batch=BatchPlan(10, 1, 1), resume=resume)


@pytest.mark.parametrize(
    "flags", [[], ["--warmup_steps=10"], ["--warmup=400tokens"], ["--lr_schedule=linear"]]
)
def test_longer_run_keeps_its_schedule(flags: list[str]) -> None:
    first = launch_of(flags, 1000)
    notes = dict[int, str]()
    for num_steps in (700, 1000, 2000):
        later = launch_of(flags, num_steps, resume_of(first))
        assert later.milestones == first.milestones
        assert learning_rate_jump(later, resume_of(first)) == ""
        notes[num_steps] = end_of_decay(later, first, resume_of(first).start)
    assert re.fullmatch(
        r"the run ends with a learning rate of \d\.\d\de-0[45], because its decay ends later, at "
        r"(step 1000|token 80000); --lr_decay=700 decays to the end",
        notes[700],
    )
    assert notes[1000] == ""
    assert notes[2000].endswith("; --lr_decay=2000 decays to the end")


def test_kept_warmup_may_exceed_a_shorter_run() -> None:
    """The decay was said to end at 700, and the launch was rejected."""
    flags = ["--warmup=800"]
    first = launch_of(flags, 1000)
    assert launch_of(flags, 700, resume_of(first)).milestones == first.milestones


def test_changed_schedule_flag_is_logged() -> None:
    resume = resume_of(launch_of(["--warmup=10"], 1000))
    now = launch_of(["--warmup=10", "--lr_decay=2000"], 2000, resume)
    assert now.milestones == Milestones(False, 10, 10, 2000)
    assert learning_rate_jump(now, resume) == "learning rate of step 601: 1.245e-04 -> 2.454e-04"


def test_decay_of_wsd_moves_until_begun() -> None:
    flags = ["--lr_schedule=wsd", "--warmup=0.05"]
    first = launch_of(flags, 1000)
    assert launch_of(flags, 2000, resume_of(first)).milestones == Milestones(False, 50, 1800, 2000)
    # The last 61 steps would have begun at 549, and it is step 600.
    assert launch_of(flags, 610, resume_of(first)).milestones == Milestones(False, 50, 600, 610)
    # Nor does it begin within the warmup.
    warming = replace(first, milestones=Milestones(False, 605, 900, 1000))
    assert launch_of(flags, 610, resume_of(warming)).milestones == Milestones(False, 605, 605, 610)
    # Step 600 still has the peak: a run that stopped there was decayed to its old end.
    at_peak = replace(first, milestones=Milestones(False, 50, 600, 1000))
    assert launch_of(flags, 2000, resume_of(at_peak)).milestones == Milestones(
        False, 50, 1800, 2000
    )
    begun = replace(first, milestones=Milestones(False, 50, 590, 1000))
    assert launch_of(flags, 2000, resume_of(begun)).milestones == begun.milestones
    shorter = launch_of(flags, 700, resume_of(begun))
    note = end_of_decay(shorter, begun, resume_of(begun).start)
    assert "--lr_decay=110 decays" in note  # the steps from 590 to 700
    longer = launch_of(flags, 2000, resume_of(begun))
    note = end_of_decay(longer, begun, resume_of(begun).start)
    assert "--lr_decay=1410 decays" in note  # the steps from 590 to 2000
    followed = launch_of([*flags, "--lr_decay=1410"], 2000, resume_of(begun))
    assert followed.milestones == Milestones(False, 100, 590, 2000)
