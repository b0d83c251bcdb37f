"""Unusable input is rejected at once, in one line that names it, and nothing is written.

A flag without effect is rejected or noted.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fms_fsdp.distributed.runtime import World
from fms_fsdp.errors import UserError
from fms_fsdp.logs import set_up_log
from fms_fsdp.run.stop import job_end
from fms_fsdp.state import RunConfig
from tests.cases import cases
from tests.cli import ROOT
from tests.fresh import copy_tracked
from tests.specs import planned
from tests.warm import COMMANDS, launch

TINY = (
    "--model_variant=tiny",
    "--use_dummy_dataset=True",
    "--seq_length=128",
    "--batch_size=2",
    "--trackers=none",
)


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder, which a refused flag leaves empty."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder


def plan(*argv: str) -> RunConfig:
    """Resolves a launch up to its first collective; a flag given here replaces that of TINY."""
    given = {argument.partition("=")[0] for argument in argv}
    world = World(0, 0, 1, 1)
    set_up_log(world.rank)
    return planned([*(flag for flag in TINY if flag.partition("=")[0] not in given), *argv], world)


def refusal(*argv: str) -> str:
    begin = time.process_time()
    with pytest.raises(UserError) as caught:
        plan(*argv)
    assert time.process_time() - begin < 20  # huge numbers are rejected, not computed with
    text = str(caught.value)
    assert "\n" not in text and text.isprintable() and not list(Path().iterdir())
    return text


def test_small_disk_matters_only_for_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fms_fsdp.run.checks.free_bytes", lambda folder: 3 * 2**19)
    text = refusal()
    assert "--ckpt_save_path=" in text and "1.5 MiB" in text and "GiB" not in text
    for due in ("--checkpoint_interval=5", "--checkpoint_schedule=5@9"):
        assert "for one checkpoint" in refusal("--save_last=False", due)
    plan("--save_last=False", "--checkpoint_interval=0")


def test_disk_without_a_size_is_accepted(disk_without_size: Path) -> None:
    """It was "must be writable", as /proc, which has no blocks either."""
    plan(f"--output_dir={disk_without_size / 'run'}")
    assert not list(disk_without_size.iterdir())


@cases(f"""
    argv | named
    --num_steps=1e999999999 | --num_steps=1e999999999 must be at most
    --num_steps=1e-999999999 | --num_steps=1e-999999999 must be an integer
    --keep_last_n=1 --keep_steps=1e999999999 | --keep_steps=1e999999999 must be at most
    --fsdp_activation_checkpointing=True --selective_checkpointing=every:1e999999999 | --selective_checkpointing=every
    --num_attention_heads=1e12 --hidden_size=2e12 --num_kv_heads=7 | --num_kv_heads=7 must divide
    --learning_rate={"9" * 1000000} | --learning_rate=9999
    --global_batch_size={2**43} --batch_size=3 | --global_batch_size={2**43} must
""")
def test_huge_number_is_rejected_without_a_hang(argv: str, named: str) -> None:
    text = refusal(*argv.split())
    assert text.startswith(named) and len(text) < 600


@cases(f"""
    argv | named
    --adam_beta1=1 | --adam_beta1=1 must be below 1
    --adam_eps=1e300 | --adam_eps=1e300 must be at most 1
    --seed={2**64} | --seed={2**64} must be at most
    --max_epochs=1e308 | --max_epochs=1e308 must be at most
    --seq_length=1e9 | --seq_length and the batch must fit
    --batch_size=1e15 | --seq_length and the batch must fit
    --checkpoint_schedule=5@{"9" * 5000} | --checkpoint_schedule=5@99
    --dataset_builder=.a:b | --dataset_builder=.a:b must be module:function
    --dataset_builder=a:b.c | --dataset_builder=a:b.c must be module:function
    --attn_impl=efficient | --attn_impl=efficient requires a GPU
    --attn_impl=cudnn | --attn_impl=cudnn requires a GPU
    --dist_backend=nccl | --dist_backend=nccl requires a GPU
    --precision=bf17 | --precision=bf17 must be one of bf16, fp32, fp16, bf16_pure
    --precision=fp16 --mixed_precision=True | --precision=fp16 and --mixed_precision
    --precision=bf16_pure --param_dtype=fp32 | --param_dtype=fp32 is not supported with --precision
    --precision=bf16_pure --optimizer_state_dtype=fp32 | --optimizer_state_dtype=fp32 is not supported with --precision=bf16_pure
    --mixed_precision=False --param_dtype=bf16 | --param_dtype=bf16 is not supported with --precision
    --precision=bf16_mixed_sr --param_dtype=bf16 | --param_dtype=bf16 is not supported with --precision=bf16_mixed_sr; use
    --grad_accum_dtype=bf16 | --grad_accum_dtype=bf16 requires bf16 weights
    --precision=fp16 --min_loss_scale=0 | --min_loss_scale=0 must be above 0
    --recompute=cheap | --recompute=cheap requires compiled blocks; set --use_torch_comp
    --recompute=blocks --recompute_segment=2 --fsdp_blocks_per_group=3 | --fsdp_blocks_per_group=3 must be divisible by --recompute_segment=2; remove
    --recompute=blocks --recompute_segment=2 --model_builder=a:b | --recompute_segment=2 is not supported with --model_builder=a:b
    --recompute=ops --recompute_ops=norms | --recompute_ops=norms must be one of
    --recompute=ops --recompute_ops=attention --attn_dropout=0.1 | --recompute_ops=attention is not supported with --attn_dropout=0.1, whose
    --recompute=ops --fsdp_activation_checkpointing=True | --recompute=ops and --fsdp_activation_checkpointing=True
    --export_interval=7 --checkpoint_interval=2 | --export_interval=7 must be a multiple of
    --export_interval=1000 --checkpoint_schedule=5 | --export_interval=1000 must be a multiple of
    --export_interval=1000 --pos_emb=alibi | --pos_emb=alibi (not rope) is not
    --cpu_offload=True | --cpu_offload requires a sharded model; set --sharding_strategy
    --profiler_dir=/proc/x | --profiler_dir=/proc/x must be writable
    --datasets=,, | --datasets=,, must not have an empty item
    --skip_steps=abc | --skip_steps=abc must be a:b
    --config=/ | --config=/ is not a file
    --config=, | --config= is not a file
    --- | --- is not a flag
    - | - is not a flag
    --run_name=.. | --run_name=.. must be a name of at most
    --run_name=a/b | --run_name=a/b must be a name of at most
    --run_name={"a" * 300} | --run_name=aaa
    --datasets=/etc | --datasets=/etc must be the name of a subfolder
    --eval_datasets=a,b/../c | --eval_datasets=b/../c must be the name of a subfolder
    --model_variant=../../x | --model_variant=../../x must be a name of at most
    --num_steps=5 --num_tokens=10M | --num_steps and --num_tokens cannot be used together
    --keep_last_n=1 --keep_best=1 | --keep_best=1 requires validation losses
    --tracker_metrics=loss,*_ms@0 | --tracker_metrics=
    --tracker_metrics=@5 | --tracker_metrics=
""")
def test_unusable_value_is_rejected_before_any_work(argv: str, named: str) -> None:
    assert refusal(*argv.split()).startswith(named)


@pytest.mark.parametrize("text", ["a\nerror: forged", "a\0b", "\x1b[2Ja", "a\u2028b", "\udcff"])
@pytest.mark.parametrize(
    "flag",
    ["--run_name", "--output_dir", "--datasets", "--model_variant", "--config", "--no\tsuch"],
)
def test_name_cannot_forge_a_line(flag: str, text: str) -> None:
    assert refusal(f"{flag}={text}").startswith(flag.split("\t")[0])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "[1,2]", "must contain flags by name, not a list"),
        ("a.json", "null", "must contain flags by name, not a NoneType"),
        ("a.json", '{"a":' * 100_000, "cannot be read"),
        ("a.toml", "a = " + "[" * 100_000, "cannot be read"),
        ("a.json", '{"run_name": null}', "--run_name must be one value of type str, not NoneType"),
        ("a.json", '{"keep_steps": [[1]]}', "--keep_steps must be one value of type int, not list"),
        (
            "a.json",
            '{"num_steps": 1, "training": {"num_steps": 2}}',
            "num_steps is set to 1 and to 2; remove one",
        ),
        ("a.json", '{"num_steps": 7, "num_steps": 9}', "num_steps is set twice"),
        (
            "a.json",
            '{"training": {"num_steps": 7}, "training": {"seed": 5}}',
            "training is set twice",
        ),
        ("a.json", '\ufeff{"num_steps": 0}', "--num_steps=0 must"),
        ("a.toml", "\ufeffnum_steps = 0", "--num_steps=0 must"),
        ("a.json", '{"num_steps": "1e999999999"}', ": --num_steps=1e999999999 must"),
        ("a.json", '{"num_steps": %s}' % ("9" * 5000), "cannot be read"),
        ("a.toml", "num_steps = 1\nnum-steps = 2", "num_steps is set to 1 and to 2; remove one"),
        ("a.toml", "num_steps = nan", "--num_steps=nan must be an integer"),
        ("a.toml", "run_name = 2026-01-01", "--run_name must be one value of type str, not date"),
    ],
)
def test_unusable_config_file_is_named(empty: Path, name: str, text: str, words: str) -> None:
    path = empty.parent / name
    path.write_text(text)
    message = refusal(f"--config={path}")
    assert str(path) in message and words in message and len(message) < 600


def test_flag_given_twice_must_agree() -> None:
    for argv, values in (
        ("--num_steps=5 --seed=5 --num-steps 6", "5 is also set to 6"),
        ("--use_profiler --nouse_profiler", "True is also set to False"),
        ("--config=bench --config=profile", "bench is also set to profile"),
    ):
        assert f"={values}; remove one" in refusal(*argv.split())
    assert plan("--num_steps=1000", "--num-steps", "1k").num_steps == 1000


@pytest.mark.parametrize(
    "argv",
    [
        "--selective_checkpointing=1/2",
        "--selective_checkpointing=1/2 --fsdp_activation_checkpointing=False",
        "--recompute_ops=attention --recompute=blocks",
        "--recompute_segment=2 --recompute=ops",
        "--loss_scale=8.0 --precision=bf16",
        "--float8_scaling=tensor",
        "--hsdp_shard_size=2 --sharding_strategy=fsdp",
        "--skip_steps=5:7",
        "--loss_on=all",
        "--data_path=elsewhere",
        "--eval_steps=3",
        "--test_steps=3",
        "--teacher_weight=0.2",
        "--data_kwargs=a=b",
        "--resuming_dataset=False",
    ],
)
def test_typed_flag_without_effect_is_rejected(argv: str) -> None:
    flag = argv.split()[0].removesuffix(".0")
    name, text = flag.partition("=")[0], refusal(*argv.split())
    assert text.startswith((f"{flag} has no effect without --", f"{flag} has no effect with --"))
    assert f"; remove {name} or " in text


@pytest.mark.parametrize(
    ("argv", "note"),
    [
        ("--hsdp_shard_size=2", "--hsdp_shard_size=2 has no effect with --sharding_strategy=none"),
        ("--matmul_precision=highest", "--matmul_precision=highest has no effect without a GPU"),
        ("--config=../site.toml", "--selective_checkpointing=1/2 has no effect"),  # from a file
        ("--config=../site.toml", "--skip_steps=5:7 has no effect with --use_dummy_dataset"),
    ],
)
def test_flag_without_effect_is_noted_once(
    empty: Path, capfd: pytest.CaptureFixture[str], argv: str, note: str
) -> None:
    (empty.parent / "site.toml").write_text("selective_checkpointing = '1/2'\nskip_steps = '5:7'\n")
    plan(argv)
    lines = capfd.readouterr().out.splitlines()
    assert len([line for line in lines if line[9:].startswith(f"note: {note}")]) == 1


@pytest.mark.parametrize(
    ("text", "end"), [("Unknown", None), ("", None), ("1e9", None), ("4000000000", 4e9)]
)
def test_unusable_job_end_is_noted_and_ignored(
    text: str, end: float | None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", text)
    assert job_end() == end
    plan()
    noted = f"note: SLURM_JOB_END_TIME={text} is not a time" in capfd.readouterr().out
    assert noted == (text != "" and end is None)


def test_folder_named_as_a_run_file_is_rejected(empty: Path) -> None:
    (empty.parent / "run" / "metrics.jsonl").mkdir(parents=True)
    assert "metrics.jsonl is not a regular file; rename" in refusal(
        f"--output_dir={empty.parent / 'run'}"
    )


def test_keep_best_requires_evaluated_checkpoints() -> None:
    flags = ("--keep_best=1", "--keep_last_n=1", "--eval_interval=3")
    assert "--keep_best=1 has nothing to rank" in refusal(*flags, "--checkpoint_interval=0")
    plan(*flags, "--checkpoint_interval=6")


def check_rejected(ended: subprocess.CompletedProcess[str], folder: Path, words: str) -> None:
    """A launch ended with 2 and one line, and left the folder with its file `in/a.txt` alone."""
    assert ended.returncode == 2, f"{ended.args}\n{ended.stdout}\n{ended.stderr}"
    lines = [line for line in ended.stderr.splitlines() if "error: " in line]
    assert len(lines) == 1 and words in lines[0], ended.stderr
    left = {path.name for path in folder.rglob("*")} - {".setup.lock"}
    assert left == {"in", "a.txt"}


@pytest.fixture
def text(empty: Path) -> Path:
    """A working folder with a file of text."""
    (empty / "in").mkdir()
    (empty / "in" / "a.txt").write_text("some text")
    return empty


DUMMY = "--model_variant=tiny --use_dummy_dataset=True"


@cases(f"""
    flags | words
    --nmu_steps=3 | --nmu_steps is not a flag
    --config=nowhere.toml | --config=nowhere.toml is not a file
    --model_variant=70b --use_dummy_dataset=True | --model_variant=70b must fit the
    --model_variant=7c --use_dummy_dataset=True | 7b
    --model_variant=7b --sharding_strategy=hsdp | --data_path
    --model_variant=tiny --data_path=nowhere | nowhere
    --model_variant=tiny --data_path=in | in
    --model_variant=tiny --dataset_builder=no.such:thing | --dataset_builder=no.such:thing
    {DUMMY} --num_attention_heads=7 | num_attention_heads=7
    {DUMMY} --batch_size=3 --global_batch_size=7 | --global_batch_size=7 must be
    {DUMMY} --ckpt_load_path=/none | --ckpt_load_path=/none
    {DUMMY} --output_dir=/proc/nowhere | --output_dir=/proc/nowhere must be writable
    {DUMMY} --attn_impl=efficient | --attn_impl=efficient requires a GPU
""")
def test_bad_training_input_leaves_no_folder(text: Path, flags: str, words: str) -> None:
    check_rejected(launch([*flags.split(), "--num_steps=1"], cwd=text), text, words)


@pytest.mark.slow
def test_bad_input_of_script_leaves_no_folder(empty: Path) -> None:
    copy_tracked(empty)
    before = sorted(empty.rglob("*"))
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHON": sys.executable}
    for flags in ("--nmu_steps=3", "--data_path=nowhere --model_variant=tiny"):
        done = subprocess.run(
            ["bash", "scripts/train.sh", *flags.split()],
            cwd=empty,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 2 and "error: " in done.stdout + done.stderr
        assert sorted(path for path in empty.rglob("*") if path.name != ".setup.lock") == before


@cases("""
    flags | words
    --no_such=1 --tokenizer=byte | --no_such is not a flag
    --tokenizer=nowhere.model | nowhere.model
     | tokenizer
    --tokenizer=byte --split=1,-1 | --split
    --tokenizer=byte --input=nowhere | nowhere
""")
def test_bad_input_of_prepare_leaves_no_folder(text: Path, flags: str, words: str) -> None:
    source = [] if "--input" in flags else ["--input=in"]
    argv = ["prepare", *source, "--output=out/deep", *flags.split()]
    check_rejected(launch(argv, program=COMMANDS, cwd=text), text, words)


@pytest.mark.parametrize(
    "command",
    [
        "main_training.py",
        "-m fms_fsdp prepare",
        "-m fms_fsdp report runs/x",
        "-m fms_fsdp train",
        "-m fms_fsdp.tools.flags_page",
    ],
)
def test_missing_packages_are_one_line_with_fix(command: str) -> None:
    bare = [sys.executable, "-S", *command.split()]  # without site-packages
    done = subprocess.run(bare, cwd=ROOT, capture_output=True, text=True, timeout=300)
    remedy = "source .venv/bin/activate (bash scripts/train.sh makes it), or pip install -e ."
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {sys.executable} has no package torch; {remedy}\n"


def test_advice_names_packages_of_the_index() -> None:
    files = [*ROOT.glob("fms_fsdp/**/*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("scripts/*.*")]
    text = "".join(file.read_text() for file in [*files, ROOT / "README.md"])
    named = set(re.findall(r"pip install '?(?!-)([\w\[\]-]+)", text))
    known = "pyyaml wandb tokenizers transformers matplotlib zstandard lm-eval lm-eval[hf]"
    known += " huggingface_hub vllm pre-commit"
    assert named <= set(known.split()), named
