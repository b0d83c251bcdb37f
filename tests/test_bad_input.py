"""An input that cannot be used is refused at once, in one line that names it, and nothing is written.

A flag without effect is refused or gets a note.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fms_fsdp.config import TrainConfig, as_dict
from fms_fsdp.config.parse import PRESETS, parse_flags
from fms_fsdp.distributed.runtime import World, set_up_log
from fms_fsdp.state import RunConfig
from tests.cli import ROOT, run
from tests.fresh import copy_tracked
from tests.specs import planned
from tests.warm import COMMANDS, TRAINING, launch

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


def plan(*argv: str, ranks: int = 1) -> RunConfig:
    """What a launch finds in front of its first collective; a flag given here replaces that of TINY."""
    given = {argument.partition("=")[0] for argument in argv}
    flags = [flag for flag in TINY if flag.partition("=")[0] not in given]
    world = World(0, 0, ranks, ranks)
    set_up_log(world)
    return planned([*flags, *argv], world)


def refusal(*argv: str, ranks: int = 1) -> str:
    begin = time.process_time()
    with pytest.raises(ValueError) as caught:
        plan(*argv, ranks=ranks)
    assert time.process_time() - begin < 20  # huge numbers are refused, not computed with
    text = str(caught.value)
    assert "\n" not in text and text.isprintable() and not list(Path().iterdir())
    return text


def test_a_small_disk_is_no_reason_where_nothing_will_be_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2**20))
    assert "--ckpt_save_path=" in (text := refusal()) and "for one checkpoint" in text
    for due in ("--checkpoint_interval=5", "--checkpoint_schedule=5@9"):
        assert "for one checkpoint" in refusal("--save_last=False", due)
    plan("--save_last=False", "--checkpoint_interval=0")


def test_sizes_below_a_gib_are_in_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that 0.0 GiB were needed and 0.0 GiB were free."""
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=3 * 2**19))
    text = refusal()
    assert "1.5 MiB" in text and "0.0" not in text and "GiB" not in text


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (
            "--num_steps=1e999999999",
            "--num_steps=1e999999999 must be at most 1,000,000,000,000,000",
        ),
        ("--num_steps=1e-999999999", "--num_steps=1e-999999999 must be an integer"),
        ("--num_steps=-1e999999999", "--num_steps=-1e999999999 must be at least"),
        ("--keep_last_n=1 --keep_steps=1e999999999", "--keep_steps=1e999999999 must be at most"),
        (
            "--fsdp_activation_checkpointing=True --selective_checkpointing=1e-999999999",
            "--selective_checkpointing=1e-9999",
        ),
        (
            "--fsdp_activation_checkpointing=True --selective_checkpointing=every:1e999999999",
            "--selective_checkpointing=every",
        ),
        (
            "--num_attention_heads=1e12 --hidden_size=2e12 --num_kv_heads=7",
            "--num_kv_heads=7 must divide",
        ),
        (
            "--num_attention_heads=7 --hidden_size=1e15",
            "--num_attention_heads=7 must divide hidden_size",
        ),
        ("--num_steps=" + "9" * 1_000_000, "--num_steps=9999"),
        ("--learning_rate=" + "9" * 1_000_000, "--learning_rate=9999"),
    ],
)
def test_a_number_of_any_size_is_refused_without_a_hang(argv: str, named: str) -> None:
    text = refusal(*argv.split())
    assert text.startswith(named) and len(text) < 600


def test_a_huge_global_batch_is_refused_without_a_hang() -> None:
    text = refusal("--global_batch_size=999999999999999", "--batch_size=none", ranks=2)
    assert text.startswith(
        "--global_batch_size=999999999999999 must be divisible by 2 (= data-parallel size 2)"
    )
    assert "a data-parallel size of 1, 3, 9" in text


@pytest.mark.parametrize("name", ["a.json", "a.toml"])
def test_a_huge_number_in_a_file_is_refused_with_the_file(empty: Path, name: str) -> None:
    (empty.parent / name).write_text(
        '{"num_steps": "1e999999999"}' if name == "a.json" else "num_steps = '1e999999999'"
    )
    assert refusal(f"--config={empty.parent / name}").startswith(
        f"{empty.parent / name}: --num_steps=1e999999999 must"
    )


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("--adam_beta1=1", "--adam_beta1=1 must be below 1"),
        ("--adam_beta2=1.0", "--adam_beta2=1.0 must be below 1"),
        ("--adam_eps=1e300", "--adam_eps=1e300 must be at most 1"),
        (f"--seed={2**64}", f"--seed={2**64} must be at most"),
        ("--num_steps=1e30", "--num_steps=1e30 must be at most"),
        ("--num_tokens=1e40", "--num_tokens=1e40 must be at most"),
        ("--max_epochs=1e308", "--max_epochs=1e308 must be at most"),
        ("--eval_steps=1e30", "--eval_steps=1e30 must be at most"),
        ("--seq_length=1e9", "--seq_length and the batch must fit"),
        ("--batch_size=1e15", "--seq_length and the batch must fit"),
        ("--num_layers=1e15", "--num_layers=1e15 must be at most"),
        ("--collective_timeout_s=1e30", "--collective_timeout_s=1e30 must be at most"),
        ("--checkpoint_schedule=5@" + "9" * 5000, "--checkpoint_schedule=5@99"),
        ("--dataset_builder=.a:b", "--dataset_builder=.a:b must be module:function"),
        ("--dataset_builder=a:b.c", "--dataset_builder=a:b.c must be module:function"),
        ("--attn_impl=efficient", "--attn_impl=efficient requires a GPU"),
        ("--attn_impl=cudnn", "--attn_impl=cudnn requires a GPU"),
        (
            "--precision=bf17",
            "--precision=bf17 must be one of bf16, fp32, fp16, bf16_pure, bf16_mixed_sr",
        ),
        (
            "--precision=fp16 --mixed_precision=True",
            "--precision=fp16 and --mixed_precision",
        ),
        (
            "--precision=fp32 --mixed_precision=True",
            "--precision=fp32 and --mixed_precision",
        ),
        (
            "--precision=bf16_pure --param_dtype=fp32",
            "--param_dtype=fp32 is not supported with --precision",
        ),
        (
            "--precision=bf16_pure --optimizer_state_dtype=fp32",
            "--optimizer_state_dtype=fp32 is not supported with --precision=bf16_pure",
        ),
        (
            "--mixed_precision=False --param_dtype=bf16",
            "--param_dtype=bf16 is not supported with --precision",
        ),
        (
            "--precision=fp16 --param_dtype=bf16",
            "--param_dtype=bf16 is not supported with --precision=fp16",
        ),
        (
            "--precision=bf16_mixed_sr --param_dtype=bf16",
            "--param_dtype=bf16 is not supported with --precision=bf16_mixed_sr; use --precision=bf16",
        ),
        (
            "--grad_accum_dtype=bf16",
            "--grad_accum_dtype=bf16 requires bf16 weights, but they are fp32; set --param_dtype",
        ),
        ("--param_dtype=fp16 --precision=bf16", "--param_dtype=fp16 must be one of fp32, bf16"),
        ("--precision=fp16 --min_loss_scale=0", "--min_loss_scale=0 must be above 0"),
        (
            "--recompute=cheap",
            "--recompute=cheap requires compiled blocks; set --use_torch_compile=True",
        ),
        ("--recompute=some", "--recompute=some must be one of"),
        (
            "--recompute=blocks --recompute_segment=2 --fsdp_blocks_per_group=3",
            "--fsdp_blocks_per_group=3 must be divisible by --recompute_segment=2; remove",
        ),
        (
            "--recompute=blocks --recompute_segment=2 --model_builder=a:b",
            "--recompute_segment=2 is not supported with --model_builder=a:b",
        ),
        ("--recompute=ops --recompute_ops=norms", "--recompute_ops=norms must be one of"),
        (
            "--recompute=ops --fsdp_activation_checkpointing=True",
            "--recompute=ops and --fsdp_activation_checkpointing=True",
        ),
        (
            "--recompute=blocks --fsdp_activation_checkpointing=False",
            "--recompute=blocks and --fsdp_activation_checkpointing=False",
        ),
        (
            "--export_interval=7 --checkpoint_interval=2",
            "--export_interval=7 must be a multiple of",
        ),
        (
            "--export_interval=7 --checkpoint_interval=0",
            "--export_interval=7 must be a multiple of",
        ),
        (
            "--export_interval=1000 --checkpoint_schedule=5",
            "--export_interval=1000 must be a multiple of",
        ),
        (
            "--relative_buckets=16",
            "--relative_buckets=16 has no effect without --pos_emb=relative",
        ),
        (
            "--pos_emb=alibi --relative_max_distance=16",
            "--relative_max_distance=16 has no effect without --pos_emb=relative",
        ),
        ("--export_interval=1000 --pos_emb=relative", "--pos_emb=relative (not rope) is not"),
        ("--export_interval=1000 --pos_emb=alibi", "--pos_emb=alibi (not rope) is not"),
        ("--gc_interval=-1", "--gc_interval=-1 must be at least 0"),
        ("--dist_backend=nccl", "--dist_backend=nccl requires a GPU"),
        (
            "--cpu_offload=True",
            "--cpu_offload requires a sharded model; set --sharding_strategy=fsdp",
        ),
        ("--profiler_dir=/proc/x", "--profiler_dir=/proc/x must be writable"),
        ("--output_dir=/proc/x", "--output_dir=/proc/x must be writable"),
        ("--exit_duration_in_mins=0", "--exit_duration_in_mins=0 must be above 0"),
        ("--datasets=,,", "--datasets=,, must not have an empty item"),
        ("--init_std=0", "--init_std=0 must be above 0"),
        (f"--logical_shards={2**200}", f"--logical_shards={2**200} must be at most"),
        ("--skip_steps=abc", "--skip_steps=abc must be a:b"),
        ("--config=/", "--config=/ is not a file"),
        ("--config=.", "--config=. is not a file"),
        ("--config=,", "--config= is not a file"),
        ("---", "--- is not a flag"),
        ("-", "- is not a flag"),
        ("--run_name=..", "--run_name=.. must be a name of at most"),
        ("--run_name=a/b", "--run_name=a/b must be a name of at most"),
        ("--run_name=" + "a" * 300, "--run_name=aaa"),
        ("--datasets=../..", "--datasets=../.. must be the name of a subfolder"),
        ("--datasets=/etc", "--datasets=/etc must be the name of a subfolder"),
        ("--eval_datasets=a,b/../c", "--eval_datasets=b/../c must be the name of a subfolder"),
        ("--model_variant=../../x", "--model_variant=../../x must be a name of at most"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_before_any_work(argv: str, named: str) -> None:
    assert refusal(*argv.split()).startswith(named)


@pytest.mark.parametrize("text", ["a\nerror: forged", "a\0b", "\x1b[2Ja", "a\u2028b", "\udcff"])
@pytest.mark.parametrize(
    "flag",
    ["--run_name", "--output_dir", "--datasets", "--model_variant", "--config", "--no\tsuch"],
)
def test_a_name_cannot_forge_a_line(flag: str, text: str) -> None:
    assert refusal(f"{flag}={text}").startswith(flag.split("\t")[0])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "[1,2]", "must contain flags by name, not a list"),
        ("a.json", '"x"', "must contain flags by name, not a str"),
        ("a.json", "null", "must contain flags by name, not a NoneType"),
        ("a.json", "[" * 100_000, "cannot be read"),
        ("a.json", '{"a":' * 100_000, "cannot be read"),
        ("a.toml", "a = " + "[" * 100_000, "cannot be read"),
        (
            "a.json",
            '{"run_name": null}',
            "--run_name must be one value of type str, not NoneType",
        ),
        ("a.json", '{"run_name": ["a"]}', "--run_name must be one value of type str, not list"),
        (
            "a.json",
            '{"keep_steps": [[1]]}',
            "--keep_steps must be one value of type int, not list",
        ),
        (
            "a.json",
            '{"num_steps": 1, "training": {"num_steps": 2}}',
            "num_steps is set to 1 and to 2; remove one",
        ),
        ("a.json", '{"num_steps": %s}' % ("9" * 5000), "cannot be read"),
        ("a.toml", "num_steps = 1\nnum-steps = 2", "num_steps is set to 1 and to 2; remove one"),
        ("a.toml", "num_steps = nan", "--num_steps=nan must be an integer"),
        ("a.toml", "run_name = 2026-01-01", "--run_name must be one value of type str, not date"),
    ],
)
def test_a_file_of_flags_that_cannot_be_read_is_named(
    empty: Path, name: str, text: str, words: str
) -> None:
    path = empty.parent / name
    path.write_text(text)
    refused = refusal(f"--config={path}")
    assert str(path) in refused and words in refused and len(refused) < 600


def test_a_flag_given_twice_must_say_the_same() -> None:
    for argv in (
        "--num_steps=5 --num_steps=6",
        "--num-steps 5 --num_steps=6",
        "--seed=5 --num_steps=5 --seed=6",
    ):
        assert "=5 is also set to 6; remove one of them" in refusal(*argv.split())
    assert "--use_profiler=True is also set to False" in refusal(
        "--use_profiler", "--nouse_profiler"
    )
    assert "--config=bench is also set to profile" in refusal("--config=bench", "--config=profile")
    assert plan("--num_steps=1000", "--num-steps", "1k").num_steps == 1000


@pytest.mark.parametrize(
    "argv",
    [
        "--selective_checkpointing=1/2",
        "--selective_checkpointing=1/2 --fsdp_activation_checkpointing=False",
        "--selective_checkpointing=1/2 --recompute=ops",
        "--recompute_ops=attention --recompute=blocks",
        "--recompute_segment=2 --recompute=ops",
        "--loss_scale=8.0 --precision=bf16",
        "--min_loss_scale=2.0",
        "--float8_scaling=tensor",
        "--hsdp_shard_size=2 --sharding_strategy=zero1",
        "--hsdp_shard_size=2 --sharding_strategy=fsdp",
        "--skip_steps=5:7",
        "--max_epochs=2",
        "--data_path=elsewhere",
        "--eval_steps=3",
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
    assert len([line for line in lines if line.startswith(f"note: {note}")]) == 1


def test_every_pair_of_shipped_overlays_and_the_config_of_every_run_still_load(empty: Path) -> None:
    names = sorted(path.stem for path in PRESETS.glob("*.toml"))
    for pair in itertools.permutations(names, 2):
        config = parse_flags(
            TrainConfig,
            [f"--config={','.join(pair)}", "--ckpt_load_path=there", "--num_steps=5000"],
        )
        path = empty.parent / "config.json"
        path.write_text(json.dumps(as_dict(config)))
        assert parse_flags(TrainConfig, [f"--config={path}"]) == config


def test_a_job_end_that_is_no_time_counts_as_not_set(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fms_fsdp.run.stop import job_end

    for text, end in (
        ("Unknown", None),
        ("", None),
        ("nan", None),
        ("1e9", None),
        ("4000000000", 4e9),
    ):
        monkeypatch.setenv("SLURM_JOB_END_TIME", text)
        assert job_end() == end
    monkeypatch.setenv("SLURM_JOB_END_TIME", "Unknown")
    plan()
    assert (
        "note: SLURM_JOB_END_TIME=Unknown is not a time, so it is ignored" in capfd.readouterr().out
    )


def test_a_folder_in_the_place_of_a_file_of_the_run_is_refused(empty: Path) -> None:
    (empty.parent / "run" / "metrics.jsonl").mkdir(parents=True)
    assert "must have metrics.jsonl as a file" in refusal(f"--output_dir={empty.parent / 'run'}")


@pytest.mark.parametrize(
    ("flags", "variables", "words"),
    [
        ((), {"RANK": "abc"}, "RANK=abc requires WORLD_SIZE"),
        (("--output_dir=/proc/x",), {}, "--output_dir=/proc/x must be writable"),
        (("--attn_impl=efficient",), {}, "--attn_impl=efficient requires a GPU"),
    ],
)
def test_the_command_ends_with_2_and_one_line(
    tmp_path: Path, flags: tuple[str, ...], variables: dict[str, str], words: str
) -> None:
    ended = run(
        *TINY, "--num_steps=1", *(flags or (f"--output_dir={tmp_path / 'run'}",)), **variables
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert ended.stderr.startswith(f"error: {words}") and not (tmp_path / "run").exists()


def test_checkpoints_that_are_never_evaluated_cannot_be_ranked() -> None:
    flags = ("--keep_best=1", "--keep_last_n=1", "--eval_interval=3")
    text = refusal(*flags, "--checkpoint_interval=0")
    assert text.startswith("--keep_best=1 requires eval/loss at a checkpoint before the last")
    plan(*flags, "--checkpoint_interval=6")


BAD_FLAGS = [
    "--nmu_steps=3",
    "--config=nowhere.toml",
    "--model_variant=nosuch --use_dummy_dataset=True",
    "--data_path=nowhere --model_variant=tiny",
    "--data_path=in --model_variant=tiny",
    "--use_dummy_dataset=True --model_variant=tiny --batch_size=3 --global_batch_size=7",
    "--use_dummy_dataset=True --model_variant=tiny --ckpt_load_path=nowhere",
]


def bad(cwd: Path, *words: str | Path) -> None:
    """Runs a command that must end with 2 and leave the folder as it is; text to read lies in `in`."""
    variables = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTHON": sys.executable}
    refused(
        cwd,
        lambda: subprocess.run(
            words, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, timeout=100
        ),
    )


def bad_fork(cwd: Path, program: str, *flags: str) -> None:
    """As `bad`, for a launch of the program or of its commands."""
    refused(cwd, lambda: launch(flags, program=program, cwd=cwd))


def refused(cwd: Path, run: Callable[[], subprocess.CompletedProcess[str]]) -> None:
    (cwd / "in").mkdir(exist_ok=True)
    (cwd / "in" / "a.txt").write_text("some text")
    before = sorted(cwd.rglob("*"))
    done = run()
    assert done.returncode == 2 and "error: " in done.stdout + done.stderr, (
        f"{done.args}\n{done.stdout}\n{done.stderr}"
    )
    assert sorted(path for path in cwd.rglob("*") if path.name != ".setup.lock") == before, (
        done.args
    )


@pytest.mark.slow
@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_bad_input_of_a_training_leaves_no_folder(empty: Path, flags: str) -> None:
    bad_fork(empty, TRAINING, *flags.split())


@pytest.mark.slow
def test_bad_input_of_the_script_leaves_no_folder(empty: Path) -> None:
    copy_tracked(empty)
    for flags in (BAD_FLAGS[0], *BAD_FLAGS[3:6]):
        bad(empty, "bash", "scripts/train.sh", *flags.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--no_such=1 --tokenizer=byte",
        "--tokenizer=nowhere.model",
        "",
        "--train_tokenizer --vocab_size=30000",
        "--tokenizer=byte --split=1,-1",
        "--tokenizer=byte --input=nowhere",
        "--tokenizer=byte --text_separator=x --shard_tokens=0",
    ],
)
def test_bad_input_of_prepare_leaves_no_folder(empty: Path, flags: str) -> None:
    source = [] if "--input" in flags else ["--input=in"]
    bad_fork(empty, COMMANDS, "prepare", *source, "--output=out/deep", *flags.split())


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
def test_an_environment_without_the_packages_is_one_line_with_the_remedy(command: str) -> None:
    bare = [sys.executable, "-S", *command.split()]  # without site-packages
    done = subprocess.run(bare, cwd=ROOT, capture_output=True, text=True, timeout=60)
    remedy = "source .venv/bin/activate (bash scripts/train.sh makes it), or pip install -e ."
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {sys.executable} has no package torch; {remedy}\n"


def test_no_remedy_names_a_package_that_no_index_has() -> None:
    files = [
        *ROOT.glob("fms_fsdp/**/*.py"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "README.md",
        *ROOT.glob("scripts/*.*"),
    ]
    named = {
        name
        for file in files
        for name in re.findall(r"pip install '?(?!-)([\w\[\]-]+)", file.read_text())
    }
    known = "wandb tokenizers transformers matplotlib zstandard lm-eval lm-eval[hf]"
    assert named <= set(known.split()), named
