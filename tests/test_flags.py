"""Flags, config files and the batch arithmetic: accepted values, and errors."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fms_fsdp.__main__ import COMMANDS, GROUPS, find_flags
from fms_fsdp.__main__ import main as run_command
from fms_fsdp.config import (
    TrainConfig,
    TrainingConfig,
    as_dict,
    from_dict,
    plan_batch,
    train_config,
)
from fms_fsdp.config.flag import flag as flag_row
from fms_fsdp.config.flag import (
    flag_table,
    flag_values,
    help_texts,
    non_defaults,
    unused_flags,
)
from fms_fsdp.config.formats import parse_block_fraction
from fms_fsdp.config.parse import (
    FIRST_FLAGS,
    PRESETS,
    describe_changes,
    describe_flags,
    help_text,
    parse_flags,
)
from fms_fsdp.config.parse import parse as parse_with_origins
from fms_fsdp.config.values import did_you_mean, format_bytes, plain
from fms_fsdp.errors import UserError
from fms_fsdp.models.variants import VARIANTS, resolve_model
from fms_fsdp.tools.flags_page import markdown
from tests.cases import cases
from tests.warm import ROOT, launch


def parse(*argv: str) -> TrainConfig:
    return parse_flags(TrainConfig, argv)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("--num_steps=5_000_000", 5_000_000),
        ("--num_steps=1.5k", 1500),
        ("--seq_length=4Ki", 4096),
        ("--learning_rate=1", 1.0),
        ("--use_dummy_dataset", True),
        ("--use_dummy_dataset=YES", True),
        ("--nolow_cpu_fsdp", False),
        ("--mixed_precision=none", None),
        ("--sharding_strategy=HSDP", "hsdp"),
        ("--sharding_strategy=none", "none"),
        ("--sharding_strategy=", None),
        ("--datasets=a-b,lang=en/dataset=cc", ("a-b", "lang=en/dataset=cc")),
        ("--sample_prompts=def main(,The ", ("def main(", "The ")),
        (r"--sample_prompts=Dear all\, we,The ", ("Dear all, we", "The ")),
        ("--run_name=1e5", "1e5"),
        ("--run_name=007", "007"),
    ],
)
def test_flag_has_the_type_of_its_field(argument: str, value: Any) -> None:
    name = argument.partition("=")[0].removeprefix("--").removeprefix("no")
    read = flag_values(parse(argument, "--sample_interval=1"))[name]
    assert read == value and type(read) is type(value)


def test_flag_may_repeat_its_value() -> None:
    assert parse("--num_steps=1000", "--num-steps", "1k").training.num_steps == 1000


def test_preset_continue_takes_hugging_face_weights() -> None:
    cfg = parse("--config=continue", "--init_from_hf=folder")
    assert cfg.checkpoint.load_model_only and cfg.optim.learning_rate == 3e-5


def test_flags_override_config_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        "# comments stay\nseq-length = 64\nnum_steps = 7\n[optim]\nlearning_rate = 1e-3\n"
    )
    content = {"training": {"num_steps": 8}, "resolved": {"world_size": 4}}
    (tmp_path / "b.json").write_text(json.dumps(content))
    given = ["--config=a,b.json", f"--config_dir={tmp_path}", "--learning_rate=2e-3"]
    parsed = parse_with_origins(TrainConfig, given)
    values = flag_values(parsed.config)
    assert (values["seq_length"], values["num_steps"], values["learning_rate"]) == (64, 8, 2e-3)
    assert parsed.origins["num_steps"].endswith("b.json")
    shown = describe_flags(parsed, {"vocab_size": 512})
    lines = (
        "* num_steps = 8",
        "seed = 2023",
        "vocab_size = none, which is 512",
        "overridden: learning_rate",
    )
    for line in lines:
        assert line in shown


@cases("""
    earlier | later | absent
    num_steps=7 | num_tokens=1M | num_steps
    num_tokens=9 | num_epochs="2" | num_tokens
    model_variant="tiny" | hf_config=hf | model_variant
    hf_config="hf" | model_variant=tiny | hf_config
    warmup_steps=7 | warmup=0.1 | warmup_steps
    min_lr_ratio=0.5 | min_lr=0 | min_lr_ratio
    checkpoint_schedule="5" | checkpoint_interval=7 | checkpoint_schedule
    mixed_precision=true | precision=fp32 | mixed_precision
    fsdp_activation_checkpointing=true | recompute=ops | fsdp_activation_checkpointing
    datasets=["a","b"];weights=[1,2] | datasets=a,c | weights
""")
def test_later_layer_removes_alternatives(
    tmp_path: Path, earlier: str, later: str, absent: str
) -> None:
    (tmp_path / "a.toml").write_text(earlier.replace(";", "\n"))
    config = parse(f"--config={tmp_path / 'a.toml'}", f"--{later}".replace('"', ""))
    changed = non_defaults(config)
    assert later.partition("=")[0] in changed and absent not in changed


@cases("""
    text | flag | kept
    num_steps = 7 | --num_tokens=none | num_steps
    num_steps = 7 | --num_epochs=-1 | num_steps
    datasets = ["a", "b"];weights = [1, 2] | --datasets=a,b | weights
    batch_size = 4 | --global_batch_size=8 | batch_size
""")
def test_later_layer_keeps_other_flags(tmp_path: Path, text: str, flag: str, kept: str) -> None:
    (tmp_path / "a.toml").write_text(text.replace(";", "\n"))
    assert kept in non_defaults(parse(f"--config={tmp_path / 'a.toml'}", flag))


SHAPES = sorted(path.stem for path in PRESETS.glob("gpt3_*.toml"))
USES = ["bench", "continue", "pretrain_7b", "profile"]
QUICKSTART = ["quickstart", "quickstart_text"]  # tests/scripts/test_scripts.py


def test_every_preset_is_tested() -> None:
    assert {path.stem for path in PRESETS.glob("*.toml")} == {
        *SHAPES,
        *USES,
        *QUICKSTART,
        "shakespeare",  # tests/test_benchmarks.py
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_preset_loads_with_every_use(shape: str, tmp_path: Path) -> None:
    config = parse(f"--config={shape}")
    model = resolve_model(config.model, seq_length=config.data.seq_length)
    assert model.hidden_size % model.num_attention_heads == 0 and model.vocab_size == 50257
    if "paper" in shape:
        assert config.model.model_variant in VARIANTS and model.activation == "gelu_tanh"
    saved = tmp_path / "config.json"
    for use in USES:
        config = parse(f"--config={use},{shape}", "--ckpt_load_path=there", "--num_steps=5000")
        saved.write_text(json.dumps(as_dict(config)))
        assert parse(f"--config={saved}") == config


def test_every_flag_has_help() -> None:
    fields, texts = flag_table(TrainConfig), help_texts(TrainConfig)
    assert texts.keys() == fields.keys() and all(len(text) > 10 for text in texts.values())
    shown = help_text(TrainConfig, "x", every=True)
    assert all(f"\n  --{name}=" in shown for name in fields)
    flags = re.findall(r"^  --(\w+)=", help_text(TrainConfig, "x", every=False), re.MULTILINE)
    assert len(flags) == 10 and set(flags) == set(FIRST_FLAGS.split())


def test_help_shows_the_used_value_within_the_width() -> None:
    shown = help_text(TrainConfig, "x", every=True, width=90)
    assert max(map(len, shown.splitlines())) <= 90
    for flag in ("num_steps=INT [1000]", "data_path=PATH\n", "seed=INT [2023]"):
        assert f"\n  --{flag}" in shown
    assert "default none" not in shown and "(default: 1000)" not in shown


def test_help_of_estimate_begins_with_its_own_flags() -> None:
    config_type = find_flags("estimate")
    short = help_text(config_type, "estimate", every=False).splitlines()
    assert short[1].startswith("  --parameters=INT") and len(short) < 90
    assert any(line.startswith("  --model_variant=") for line in short)
    assert "--help=all also lists all other flags" in short[-1]
    assert "  --profiler_stacks=" in help_text(config_type, "estimate", every=True)


COMMANDS_WITH_REQUIRED_FLAGS = [
    name for name in COMMANDS if name != "train" and "inspect " not in name and name != "evaluate"
]


@pytest.mark.parametrize("command", COMMANDS_WITH_REQUIRED_FLAGS)
def test_required_flags_are_marked_and_required(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    required = [row.name for row in flag_table(find_flags(command)).values() if row.required]
    shown = help_text(find_flags(command), command, every=True)
    assert shown.count("(required)") == len(required)
    if required:
        assert run_command(command.split()) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_configuration_page_is_up_to_date() -> None:
    committed = (ROOT / "docs" / "reference" / "flags.md").read_text()
    assert committed == markdown(TrainConfig), (
        "run: python -m fms_fsdp.tools.flags_page > docs/reference/flags.md"
    )


def test_flags_of_other_programs_are_translated() -> None:
    flags = flag_table(TrainConfig)
    for name, answer in train_config.answers_for_others().items():
        assert name not in flags, name
        with pytest.raises(ValueError) as caught:
            parse(f"--{name}=1")
        assert str(caught.value) == f"--{name} is not a flag; {answer}"
        for flag in re.findall(r"--(\w+)", answer):
            others = ("config", "nproc_per_node", "nnodes", "tokenizer", "bos_token", "bos")
            assert flag in flags or flag in others, answer


def test_page_of_other_programs_agrees() -> None:
    flags, answers = flag_table(TrainConfig), train_config.answers_for_others()
    page = (ROOT / "docs" / "migrate" / "other-frameworks.md").read_text()
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 50
    for theirs, ours in rows:
        for name in re.findall(r"`([a-z_]+)`", theirs):
            assert name in flags or name in answers, name
        for flag in re.findall(r"--(\w+)", ours):
            assert flag in flags or flag in ("nproc_per_node", "nnodes", "tokenizer"), flag


def test_the_changelog_has_all_removed_flags() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    for removed in train_config.other_programs()["removed"].values():
        for flag in train_config.by_name(removed):
            assert f"--{flag}" in changelog, flag


def test_removed_flags_of_a_config_pass_at_their_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version wrote these flags into config.json."""
    names = train_config.other_programs()
    answers = train_config.by_name(names["removed"]["train"])
    assert names["removed_defaults"].keys() <= answers.keys()
    some = {"an_old_flag": 0.5} | names["removed_defaults"]
    reasons = {"it did nothing; remove it": ["an_old_flag"]} | names["removed"]["train"]
    changed = names | {"removed_defaults": some, "removed": {"train": reasons}}
    monkeypatch.setattr(train_config, "other_programs", lambda: changed)
    path = tmp_path / "config.json"
    for name, default in some.items():
        content = {"training": {"seed": 7, name: default}, "resolved": {}}
        path.write_text(json.dumps(content))
        assert from_dict(content).training.seed == parse(f"--config={path}").training.seed == 7
        content["training"][name] = "other"
        path.write_text(json.dumps(content))
        rejection = f"--{name}=other is not supported any more; "
        with pytest.raises(UserError, match=rejection):
            from_dict(content)
        with pytest.raises(UserError, match=rejection):
            parse(f"--config={path}")


@cases("""
    word | hint
    h100 | h100_80gb or h100_pcie
    h20  | h200
    h210 | h200
    x    |
""")
def test_prefix_beats_edit_distance(word: str, hint: str) -> None:
    known = ["h200", "h100_80gb", "h100_pcie"]
    assert did_you_mean(known, word, cutoff=0.4) == (f"; did you mean {hint}?" if hint else "")


@pytest.mark.parametrize(
    ("size", "text"),
    [(3 * 2**19, "1.5 MiB"), (2**30 - 2**20, "1023.0 MiB"), (2**30, "1.0 GiB")],
)
def test_sizes_below_a_gib_are_in_mib(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_questions_are_answered_without_a_run(tmp_path: Path) -> None:
    for question, part in (
        ("--version", f"torch {torch.__version__.partition('+')[0]}"),
        ("--help=all", "--profiler_stacks"),
        ("--list_variants", "\n7b                32   4096   6,738,415,616    100.41"),
    ):
        answer = launch([question], cwd=tmp_path)
        assert (answer.returncode, answer.stderr) == (0, "") and part in answer.stdout
    before = sorted(ROOT.glob("runs/*"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "scripts/train.sh", question],
        cwd=ROOT,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, answer.stdout, "")
    assert sorted(ROOT.glob("runs/*")) == before and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command",
    ["main_training.py --help", "-m fms_fsdp prepare --help", "-m fms_fsdp.tools.flags_page"],
)
def test_closed_pipe_causes_no_error(command: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; '{sys.executable}' {command} | head -c 1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 1, "")


@pytest.mark.parametrize("rampup", [(), (2, 2, 100), (4, 2, 100), (3, 3, 100)], ids=str)
def test_fix_of_rejected_batch_is_accepted(rampup: tuple[int, ...]) -> None:
    """A ramp of 2,2,100 on 4 ranks was told to set --batch_size=1, and that was rejected."""
    num_fixes = 0
    for total, dp_size, rows, accum in itertools.product(
        (1, 6, 7, 12, 24), (1, 2, 3, 4), (None, 1, 3, 8), (None, 1, 2, 5)
    ):
        flags: dict[str, Any] = {"batch_size": rows, "grad_accum_steps": accum}
        flags |= {"global_batch_size": total, "rampup_batch_size": rampup}
        try:
            plan_batch(TrainingConfig(**flags), dp_size)
            continue
        except UserError as error:
            text = str(error)
        if text.startswith("--rampup") != bool(rampup):
            continue  # another batch may not suit the ramp
        fix = text.partition("; ")[2]
        changes = [{name: int(value)} for name, value in re.findall(r"--(\w+)=(\d+)\b", fix)]
        if "micro_batch=True" in fix:
            changes.append({"rampup_micro_batch": True})
        if values := re.search(r"closest valid values: (\d+)(?: or (\d+))?", fix):
            changes += [{"global_batch_size": int(each)} for each in values.groups() if each]
        for change in changes:
            plan_batch(TrainingConfig(**{**flags, **change}), dp_size)
            num_fixes += 1
    assert num_fixes > 20


@pytest.mark.parametrize(
    ("text", "fraction"), [("1", 1), ("1/2", 1 / 2), ("every:4", 1 / 4), ("0.5", 1 / 2)]
)
def test_selective_checkpointing_is_a_fraction(text: str, fraction: float) -> None:
    assert parse_block_fraction("selective_checkpointing", text) == fraction


def test_former_names_of_kept_results_are_read() -> None:
    now = parse("--recompute=ops", "--recompute_ops=attention,matmuls")
    former = parse("--recompute=ops", "--recompute_ops=attention,products")
    recorded = as_dict(now)
    recorded["parallel"]["recompute_ops"] = ["attention", "products"]  # by an earlier version
    assert now == former == from_dict(recorded)
    assert as_dict(former)["parallel"]["recompute_ops"] == ["attention", "matmuls"]


def test_positional_arguments_fill_the_list_flag() -> None:
    from fms_fsdp.tools.tool_flags import ReportConfig

    config = parse_flags(ReportConfig, ["runs/a", "runs/b", "--output=x.html"])
    assert (config.runs, config.output) == (("runs/a", "runs/b"), "x.html")
    assert parse_flags(ReportConfig, ["--runs=runs/a"]).runs == ("runs/a",)


@pytest.mark.parametrize("command", ["prepare", "inspect step"])
def test_help_of_command_begins_with_its_purpose(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command([*command.split(), "--help"])
    purpose, usage, first, *_ = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0 and purpose == f"{command}: {COMMANDS[command].purpose}"
    assert usage.startswith(f"usage: python -m fms_fsdp {command}") and first.startswith("  --")


@pytest.mark.parametrize("name", ["param", "grad_accum", "optimizer_state", "reduce"])
def test_dtype_flags_take_names_of_precisions(name: str) -> None:
    """--param_dtype=bfloat16 was rejected where --precision=bfloat16 was not."""
    needs = ["--param_dtype=bf16"] if name == "grad_accum" else []
    for text, expected in (("bfloat16", "bf16"), ("BF16", "bf16"), ("32", "fp32")):
        found = parse(f"--{name}_dtype={text}", *needs).precision
        assert getattr(found, f"{name}_dtype") == expected


def test_model_of_config_file_is_named_by_sizes() -> None:
    """--config=gpt3_175b was refused for the memory of `194m`."""
    assert parse("--config=gpt3_175b").model.name_and_sizes.startswith(
        "194m with num_layers 96, hidden_size 12"
    )
    assert parse("--model_variant=7b").model.name_and_sizes == "7b"


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (2100.4, 3, "2,100"),
        (18_432.0, 2, "18,000"),
        (0.0000123456, 3, "0.0000123"),
        (99.96, 3, "100"),
        (0.0, 3, "0"),
    ],
)
def test_printed_number_has_no_exponent(value: float, digits: int, text: str) -> None:
    """`estimate` printed 2.1e+03 GiB."""
    assert plain(value, digits) == text


PATH_FLAGS = [  # command, flag, other flags that it needs
    ("train", "data_path", ""),
    ("train", "eval_data_path", "--eval_interval=5"),
    ("train", "test_data_path", ""),
    ("train", "output_dir", ""),
    ("train", "ckpt_save_path", ""),
    ("train", "ckpt_load_path", ""),
    ("train", "tensorboard_dir", ""),
    ("train", "profiler_dir", "--use_profiler=True"),
    ("train", "init_from_hf", ""),
    ("train", "hf_config", ""),
    ("train", "teacher_path", ""),
    ("train", "sample_prompts", "--sample_interval=5"),
    ("ckpt list", "path", ""),
    ("ckpt inspect", "path", ""),
    ("report", "runs", ""),
    ("report", "output", "--runs=b"),
    ("export", "path", "--output=b"),
    ("export", "output", "--path=b"),
    ("import", "path", "--output=b"),
    ("import", "output", "--path=b"),
    ("evaluate", "path", ""),
    ("generate", "prompts", "--path=b"),
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with the file `a`."""
    (tmp_path / "a").write_text("Once upon a time\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("command", "name", "others"), PATH_FLAGS)
def test_path_flags_expand_the_home_directory(
    command: str, name: str, others: str, home: Path
) -> None:
    config = parse_flags(find_flags(command), [f"--{name}=~/a", *others.split()])
    value = flag_values(config)[name]
    assert (value[0] if isinstance(value, tuple) else value) == f"{home}/a"


@pytest.mark.parametrize("argv", ["--config=~/flags.toml", "--config=flags --config_dir=~"])
def test_config_file_and_its_paths_expand_home(argv: str, home: Path) -> None:
    (home / "flags.toml").write_text('output_dir = "~/a"\n')
    assert parse(*argv.split()).log.output_dir == f"{home}/a"


def test_logged_flags_can_be_copied() -> None:
    given = ["--data_path=/data/the first corpus", "--datasets=a,b", "--sample_interval=5"]
    given += [
        r"--sample_prompts=It's $HOME\, or,The end",
        f"--output_dir=/runs/{'long name ' * 12}x",
    ]
    parsed = parse_with_origins(TrainConfig, given)
    lines = describe_changes(parsed).split(" \\\n")
    assert len(lines) == 3 and all(len(line) <= 98 for line in lines[:-1])
    label, *copied = shlex.split(" ".join(lines))
    assert label == "flags:" and parse(*copied) == parsed.config


@dataclass(frozen=True)
class Misspelt:
    """A flag whose row needs another one that is none."""

    interval: int = flag_row(0, "steps between two")
    size: int = flag_row(1, "size of each", needs="interval|count")


def test_needed_flag_must_be_a_flag() -> None:
    """Otherwise the flag would never have an effect. The page on extending names only flags."""
    with pytest.raises(AssertionError, match=r"size needs interval\|count, which is not a flag"):
        list(unused_flags(Misspelt(size=2)))
    needed = re.findall(r'needs="(\w+)[="]', (ROOT / "docs/extending.md").read_text())
    assert needed and set(needed) <= set(flag_table(TrainConfig))


CODE = """
import runpy, sys
program = {program!r}
sys.argv = [program, *{argv}]
run = runpy.run_path if program.endswith(".py") else runpy.run_module
try:
    run(program, run_name="__main__")
except SystemExit as ended:
    print("status", ended.code, [name for name in ("torch", "pyarrow") if name in sys.modules])
"""


def check_ends_without_torch(program: str, argv: list[str], status: int) -> str:
    """Runs a program, and returns what it writes to stderr."""
    code = CODE.format(program=program, argv=argv)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == f"status {status} []", done.stderr
    return done.stderr


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "train"])
@pytest.mark.parametrize(("flag", "status"), [("--help", 0), ("--pathh=x", 2)])
def test_flags_are_answered_without_torch(command: str, flag: str, status: int) -> None:
    """Both took 8 CPU seconds in half of the commands."""
    check_ends_without_torch("fms_fsdp", [*command.split(), flag], status)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model_variant=tiny", "--data_path is missing"),
        ("--model_variant=tiny --data_path=/nowhere", "--data_path=/nowhere is not a folder"),
        ("--use_dummy_dataset=True --model_variant=nope", "--model_variant=nope does not exist"),
        ("--use_dummy_dataset=True --tp_size=3", "--tp_size=3 must divide the world size"),
        (
            "--use_dummy_dataset=True --model_variant=tiny --head_dim=7",
            "--num_attention_heads=4 must",
        ),
    ],
)
def test_launch_is_rejected_without_torch(flags: str, words: str) -> None:
    """It took 11 CPU seconds to say that --data_path is missing."""
    error = check_ends_without_torch("main_training.py", flags.split(), 2)
    assert error.startswith(f"error: {words}") and error.count("\n") == 1


def test_help_lists_each_command_once_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help"]) == 0
    listed = [
        line[2:17].rstrip() for line in capsys.readouterr().out.splitlines() if line[:2] == "  "
    ]
    assert sorted(listed) == sorted(COMMANDS) and listed == [
        n for names in GROUPS.values() for n in names
    ]
    assert run_command(["ckpt", "--help"]) == 0
    shown = capsys.readouterr().out
    of_group = [name for name in COMMANDS if name.startswith("ckpt ")]
    assert [name for name in COMMANDS if f"  {name} " in shown] == of_group
