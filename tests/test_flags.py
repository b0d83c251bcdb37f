"""Flags, overlays and the batch arithmetic: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import typing
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from fms_fsdp.__main__ import COMMANDS, find_command
from fms_fsdp.__main__ import main as run_command
from fms_fsdp.config import (
    TrainConfig,
    TrainingConfig,
    as_dict,
    from_dict,
    plan_batch,
    train_config,
)
from fms_fsdp.config.flag import flag_table, flag_values, help_texts
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

ROOT = Path(__file__).parent.parent


def other_names() -> dict[str, str]:
    """Returns {flag of another program: the answer}."""
    content = train_config.other_names()
    here = {name: f"write {flag}" for flag, names in content["here"].items() for name in names}
    return here | content["gone"]


def parse(*argv: str) -> TrainConfig:
    return parse_flags(TrainConfig, argv)


@pytest.mark.parametrize(
    ("argument", "section", "name", "value"),
    [
        ("--seq-length=2048", "data", "seq_length", 2048),
        ("--seq_length=4Ki", "data", "seq_length", 4096),
        ("--num_steps=5_000_000", "training", "num_steps", 5_000_000),
        ("--num_steps=4k", "training", "num_steps", 4000),
        ("--num_steps=2M", "training", "num_steps", 2_000_000),
        ("--num_steps=1B", "training", "num_steps", 10**9),
        ("--num_steps=1.5k", "training", "num_steps", 1500),
        ("--num_steps=1e6", "training", "num_steps", 10**6),
        ("--learning_rate=1e-4", "optim", "learning_rate", 1e-4),
        ("--learning_rate=1", "optim", "learning_rate", 1.0),
        ("--use_dummy_dataset", "data", "use_dummy_dataset", True),
        ("--use_dummy_dataset=YES", "data", "use_dummy_dataset", True),
        ("--low_cpu_fsdp=False", "parallel", "low_cpu_fsdp", False),
        ("--low_cpu_fsdp=0", "parallel", "low_cpu_fsdp", False),
        ("--nolow_cpu_fsdp", "parallel", "low_cpu_fsdp", False),
        ("--mixed_precision=none", "precision", "mixed_precision", None),
        ("--sharding_strategy=HSDP", "parallel", "sharding_strategy", "hsdp"),
        ("--sharding_strategy=none", "parallel", "sharding_strategy", "none"),
        ("--sharding_strategy=", "parallel", "sharding_strategy", None),
        ("--datasets=a-b,lang=en/dataset=cc", "data", "datasets", ("a-b", "lang=en/dataset=cc")),
        ("--run_name=1e5", "log", "run_name", "1e5"),
        ("--run_name=007", "log", "run_name", "007"),
        ("--skip_steps=1:3", "data", "skip_steps", "1:3"),
    ],
)
def test_a_flag_is_read_by_the_type_of_its_field(
    argument: str, section: str, name: str, value: Any
) -> None:
    read = getattr(getattr(parse(argument), section), name)
    assert read == value and type(read) is type(value)


def test_a_text_keeps_its_spaces_and_brackets() -> None:
    read = parse("--sample_interval=1", "--sample_prompts=def main(,The ").eval.sample_prompts
    assert read == ("def main(", "The ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model_varient=7b"], "--model_varient is not a flag; did you mean --model_variant?"),
        (
            ["--sharding_strategy=fdsp"],
            "--sharding_strategy=fdsp must be one of fsdp, hsdp, ddp, none, zero1, zero2; did you mean "
            "fsdp?",
        ),
        (["--batch_size=two"], "--batch_size=two must be an integer"),
        (["--batch_size=1.5"], "--batch_size=1.5 must be an integer"),
        (["--batch_size=0"], "--batch_size=0 must be at least 1"),
        (["--learning_rate=nan"], "--learning_rate=nan must be a number"),
        (["--use_profiler=maybe"], "--use_profiler=maybe must be true or false"),
        (["7b"], "7b is not a flag"),
        (["--seq_length=64", "stray"], "stray is not a flag"),
        (["--selective_checkpointing=3"], "write 1/3 or every:3"),
        (["--selective_checkpointing=0"], "--fsdp_activation_checkpointing=False"),
        (["--datasets=a,b", "--weights=1"], "1 weights for 2 datasets"),
        (["--datasets=a,b", "--weights=1,-2"], "--weights=-2 must be at least 0"),
        (["--datasets=a,a"], "must name each source once; remove the second a"),
        (["--config=no_such_file"], "presets: bench, continue, gpt3_13b"),
        (["--load_model_only=True"], "--ckpt_load_path"),
        (
            ["--config_dir=there"],
            "--config_dir=there has no effect without --config; remove --config_dir or set",
        ),
    ],
)
def test_a_wrong_flag_is_one_line_with_the_remedy(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_flags(TrainConfig, argv)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_overlays_apply_from_left_to_right_and_flags_win(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        "# comments stay\nseq-length = 64\nnum_steps = 7\n[optim]\nlearning_rate = 1e-3\n"
    )
    (tmp_path / "b.json").write_text(
        json.dumps({"training": {"num_steps": 8}, "resolved": {"world_size": 4}})
    )
    parsed = parse_with_origins(
        TrainConfig, ["--config=a,b.json", f"--config_dir={tmp_path}", "--learning_rate=2e-3"]
    )
    assert parsed.config.data.seq_length == 64
    assert parsed.config.training.num_steps == 8
    assert parsed.config.optim.learning_rate == 2e-3
    assert parsed.origins["learning_rate"] == "flag" and parsed.origins["num_steps"].endswith(
        "b.json"
    )
    assert len(parsed.overridden) == 2
    shown = describe_flags(parsed)
    assert (
        "* num_steps = 8" in shown
        and "  seed = 2023" in shown
        and "overridden: learning_rate" in shown
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_stepz = 3", "did you mean --num_steps?"),
        ("[optim]\nnum_steps = 3", "belongs to [training]; move"),
        ("[optimizer]\nlearning_rate = 3", "[optimizer] is not a section; use"),
        ("num_steps = ", "cannot be read"),
        ("num_steps = true", "--num_steps=true must be an integer"),
    ],
)
def test_a_wrong_overlay_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ValueError) as caught:
        parse(f"--config={tmp_path / 'x.toml'}")
    assert message in str(caught.value)


def test_a_saved_config_repeats_the_run(tmp_path: Path) -> None:
    config = parse(
        "--model_variant=tiny", "--datasets=a,b", "--weights=2,1", "--mixed_precision=false"
    )
    (tmp_path / "config.json").write_text(json.dumps(as_dict(config)))
    assert parse(f"--config={tmp_path / 'config.json'}") == config


@pytest.mark.parametrize("path", sorted(PRESETS.glob("gpt3_*.toml")), ids=lambda path: path.stem)
def test_every_shipped_shape_is_a_model(path: Path) -> None:
    config = parse(f"--config={path.stem}")
    model = resolve_model(config.model, seq_length=config.data.seq_length)
    assert model.hidden_size % model.num_attention_heads == 0 and model.vocab_size == 50257
    if "paper" in path.stem:
        assert config.model.model_variant in VARIANTS and model.activation == "gelu_tanh"


def test_every_shipped_use_can_be_laid_over_a_model() -> None:
    uses = sorted(path.stem for path in PRESETS.glob("*.toml") if not path.stem.startswith("gpt3_"))
    assert uses == ["bench", "continue", "pretrain_7b", "profile"]
    for use in uses:
        parsed = parse_with_origins(
            TrainConfig, [f"--config={use}", "--model_variant=13b", "--ckpt_load_path=there"]
        )
        assert len(parsed.origins) > 3 and parsed.config.model.model_variant == "13b"


def test_every_flag_has_a_meaning_and_a_unique_name() -> None:
    fields = flag_table(TrainConfig)
    texts = help_texts(TrainConfig)
    assert texts.keys() == fields.keys() and all(len(text) > 10 for text in texts.values())
    sections = [part.name for part in dataclasses.fields(TrainConfig)]
    assert list(dict.fromkeys(spec.section for spec in fields.values())) == sections
    shown = help_text(TrainConfig, "x", every=True)
    assert all(f"--{name} (" in shown for name in fields)


def test_the_configuration_page_is_up_to_date() -> None:
    committed = (ROOT / "docs" / "reference" / "flags.md").read_text()
    assert committed == markdown(TrainConfig), (
        "run: python -m fms_fsdp.tools.flags_page > docs/reference/flags.md"
    )


def test_help_prints_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0 and "--model_variant" in capsys.readouterr().out


def test_names_of_other_programs_are_answered_with_flags_that_exist() -> None:
    flags = flag_table(TrainConfig)
    for name, answer in other_names().items():
        assert name not in flags, name
        with pytest.raises(ValueError) as caught:
            parse(f"--{name}=1")
        assert str(caught.value) == f"--{name} is not a flag; {answer}"
        for flag in re.findall(r"--(\w+)", answer):
            others = ("config", "nproc_per_node", "nnodes", "tokenizer", "bos_token", "bos")
            assert flag in flags or flag in others, answer


def test_the_tables_for_users_of_other_programs_agree_with_the_answers() -> None:
    flags, answers = flag_table(TrainConfig), other_names()
    page = (ROOT / "docs" / "migrate" / "other-frameworks.md").read_text()
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 50
    for theirs, ours in rows:
        for name in re.findall(r"`([a-z_]+)`", theirs):
            assert name in flags or name in answers, name
        for flag in re.findall(r"--(\w+)", ours):
            assert flag in flags or flag in ("nproc_per_node", "nnodes", "tokenizer"), flag


def test_removed_flags_of_a_config_pass_at_their_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version wrote these flags into config.json."""
    names = train_config.other_names()
    answers = train_config.by_name(names["removed"]["train"])
    assert names["removed_defaults"].keys() <= answers.keys()
    some = {"an_old_flag": 0.5} | names["removed_defaults"]
    reasons = {"it did nothing; remove it": ["an_old_flag"]} | names["removed"]["train"]
    changed = names | {"removed_defaults": some, "removed": {"train": reasons}}
    monkeypatch.setattr(train_config, "other_names", lambda: changed)
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


def test_a_dotted_name_is_known_by_its_last_part() -> None:
    with pytest.raises(ValueError, match=r"--optimizer.lr is not a flag; write --learning_rate"):
        parse("--optimizer.lr=1")


@pytest.mark.parametrize(
    ("command", "argument", "hint"),
    [
        ("estimate", "--devices=h100", "did you mean --device or --devices_per_node?"),
        ("estimate", "--lr=1", "write --learning_rate"),
        ("generate", "--model=a", "write --path"),
        ("export", "--out=a", "did you mean --output?"),
        ("export", "--colour=a", "--help=all lists all flags"),
        ("ckpt prune", "--keep_last_n=3", "it was removed"),
        ("train", "--rules", "it was removed, because each error names its fix; use --dry_run"),
    ],
)
def test_unknown_flag_suggests_own_flags_first(command: str, argument: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_flags(config_type_of(command), [argument], f"fms-fsdp {command}")
    assert f"{argument.partition('=')[0]} is not a flag; {hint}" in str(caught.value)


@pytest.mark.parametrize(
    ("word", "hint"),
    [("h100", "h100_80gb or h100_pcie"), ("h20", "h200"), ("h210", "h200"), ("x", "")],
)
def test_prefix_beats_edit_distance(word: str, hint: str) -> None:
    known = ["h200", "h100_80gb", "h100_pcie"]
    assert did_you_mean(known, word, cutoff=0.4) == (f"; did you mean {hint}?" if hint else "")


@pytest.mark.parametrize(
    ("size", "text"),
    [(3 * 2**19, "1.5 MiB"), (2**30 - 2**20, "1023.0 MiB"), (2**30, "1.0 GiB")],
)
def test_sizes_below_a_gib_are_shown_in_mib(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_all_unknown_flags_are_answered_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        parse("--num_workers=1", "--lr=3", "--colour=red", "--num_step=2")
    assert str(caught.value) == (
        "--num_workers is not a flag; one thread reads ahead; there are no worker processes. "
        "--lr is not a flag; write --learning_rate. --colour is not a flag; --help=all lists all flags. "
        "--num_step is not a flag; did you mean --num_steps?"
    )


@pytest.mark.parametrize(
    "argument", ["--model_variant", "--nomodel_variant", "--seq-length", "--config"]
)
def test_a_flag_without_its_value_is_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=r"--\w+ requires a value; write --\w+=VALUE"):
        parse(argument)


def test_switches_need_no_value() -> None:
    config = parse("--use_torch_compile", "--noasync_checkpoint")
    assert (config.parallel.use_torch_compile, config.checkpoint.async_checkpoint) == (True, False)


def test_help_opens_with_the_flags_that_a_newcomer_needs() -> None:
    first = help_text(TrainConfig, "x", every=False)
    flags = re.findall(r"^  --(\w+) ", first, re.MULTILINE)
    assert len(flags) == 10 and set(flags) == set(FIRST_FLAGS.split())
    assert len(re.findall(r"^  --", help_text(TrainConfig, "x", every=True), re.MULTILINE)) > 100


@pytest.mark.parametrize(
    ("question", "part"),
    [
        ("--list_variants", "\n7b                32   4096   6,738,415,616    100.41"),
        ("--version", f"torch {torch.__version__.partition('+')[0]}"),
        ("--help=all", "--profiler_stacks"),
    ],
)
def test_questions_are_answered_by_the_entrypoint_and_by_the_script(
    question: str, part: str
) -> None:
    answers, before = [], sorted(ROOT.glob("runs/*"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for command in ([sys.executable, "main_training.py"], ["bash", "scripts/train.sh"]):
        done = subprocess.run(
            [*command, question],
            cwd=ROOT,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (0, "")
        answers.append(done.stdout)
    assert part in answers[0] and answers[0] == answers[1]
    assert sorted(ROOT.glob("runs/*")) == before


@pytest.mark.parametrize(
    "command",
    ["main_training.py --help", "-m fms_fsdp prepare --help", "-m fms_fsdp.tools.flags_page"],
)
def test_a_reader_who_has_seen_enough_causes_no_error(command: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; '{sys.executable}' {command} | head -c 1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 1, "")


def test_the_run_name_depends_on_what_is_trained_alone() -> None:
    name = parse("--model_variant=tiny").run_name
    assert name.startswith("tiny-") and len(name) == len("tiny-") + 8
    assert (
        name
        == parse(
            "--model_variant=tiny", "--num_steps=5", "--report_interval=3", "--output_dir=x"
        ).run_name
    )
    assert name != parse("--model_variant=tiny", "--learning_rate=1").run_name


@pytest.mark.parametrize(
    ("rows", "accum", "total", "expected"),
    [
        (None, None, None, (2, 1)),
        (4, None, None, (4, 1)),
        (4, 3, None, (4, 3)),
        (4, None, 32, (4, 2)),
        (None, 2, 32, (4, 2)),
        (None, None, 32, (2, 4)),
        (None, None, 12, (1, 3)),
        (4, 2, 32, (4, 2)),
    ],
)
def test_two_batch_sizes_give_the_third(
    rows: int | None, accum: int | None, total: int | None, expected: Any
) -> None:
    plan = plan_batch(
        TrainingConfig(batch_size=rows, grad_accum_steps=accum, global_batch_size=total), dp_size=4
    )
    assert (plan.batch_size, plan.grad_accum_steps) == expected
    assert plan.global_batch_size == (total or expected[0] * expected[1] * 4)


@pytest.mark.parametrize(
    ("rows", "accum", "total", "message"),
    [
        (None, None, 6, "6 must be divisible by 4 (= data-parallel size 4); closest valid values"),
        (None, None, 6, "4 or 8; or a data-parallel size of 1, 2, 3, 6"),
        (
            3,
            None,
            32,
            "must be divisible by 12 (= data-parallel size 4 x --batch_size=3); closest valid values: "
            "24 or 36",
        ),
        (4, 4, 32, "must equal data-parallel size 4 x --batch_size=4 x --grad_accum_steps=4 = 64"),
        (None, 3, 32, "(= data-parallel size 4 x --grad_accum_steps=3); closest valid values: 24"),
    ],
)
def test_contradicting_batch_sizes_are_rejected(
    rows: int | None, accum: int | None, total: int, message: str
) -> None:
    """Only flags that were given are named."""
    section = TrainingConfig(batch_size=rows, grad_accum_steps=accum, global_batch_size=total)
    with pytest.raises(ValueError) as caught:
        plan_batch(section, dp_size=4)
    assert message in str(caught.value)


RAMPS = [(), (2, 2, 100), (4, 2, 100), (3, 3, 100), (1, 1, 100)]


@pytest.mark.parametrize("rampup", RAMPS, ids=str)
def test_fix_of_rejected_batch_is_accepted(rampup: tuple[int, ...]) -> None:
    """A ramp of 2,2,100 on 4 ranks was told to set --batch_size=1, and that was rejected."""
    num_fixes = 0
    for total, dp_size in itertools.product((1, 6, 7, 8, 12, 24), (1, 2, 3, 4)):
        for rows, accum in itertools.product((None, 1, 2, 3, 8), (None, 1, 2, 5)):
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


def test_selective_checkpointing_is_a_share_of_blocks() -> None:
    def share_of(text: str) -> Fraction:
        return parse_block_fraction("selective_checkpointing", text)

    assert share_of("1") == 1
    assert share_of("1/2") == share_of("every:2") == Fraction(1, 2)
    assert share_of("0.33") == Fraction(33, 100)


def test_arguments_without_a_name_make_up_the_list_that_wants_them() -> None:
    from fms_fsdp.tools.report import ReportConfig

    config = parse_flags(ReportConfig, ["runs/a", "runs/b", "--output=x.html"])
    assert (config.runs, config.output) == (("runs/a", "runs/b"), "x.html")
    assert parse_flags(ReportConfig, ["--runs=runs/a"]).runs == ("runs/a",)
    with pytest.raises(ValueError, match=r"runs/a is not a flag"):
        parse("runs/a")


@pytest.mark.parametrize("command", ["prepare", "inspect step", "ckpt list"])
def test_the_help_of_a_command_opens_with_what_it_does(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command([*command.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert lines[0] == f"{command}: {COMMANDS[command][1]}"
    assert lines[1].startswith(f"usage: python -m fms_fsdp {command}") and lines[2].startswith(
        "  --"
    )


@pytest.mark.parametrize(
    "name", ["param_dtype", "grad_accum_dtype", "optimizer_state_dtype", "reduce_dtype"]
)
def test_every_flag_of_a_dtype_takes_the_names_that_precision_takes(name: str) -> None:
    """--param_dtype=bfloat16 was refused where --precision=bfloat16 was not."""
    for text, expected in (
        ("bfloat16", "bf16"),
        ("BF16", "bf16"),
        ("float32", "fp32"),
        ("32", "fp32"),
    ):
        found = parse(
            f"--{name}={text}", "--param_dtype=bf16" if name == "grad_accum_dtype" else "--seed=1"
        )
        assert getattr(found.precision, name) == expected


def test_a_config_file_s_model_is_named_by_its_sizes_too() -> None:
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
        (81.27, 3, "81.3"),
    ]
    + [(0.0, 3, "0"), (99.96, 3, "100"), (120.0, 2, "120"), (1.5, 3, "1.5")],
)
def test_a_figure_for_people_has_no_exponent(value: float, digits: int, text: str) -> None:
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


def config_type_of(command: str) -> type[Any]:
    """Returns the dataclass that declares the flags of a command."""
    if command == "train":
        return TrainConfig
    main = find_command(command)
    found: type[Any] = typing.get_type_hints(main)["config"]
    return found


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
    config = parse_flags(config_type_of(command), [f"--{name}=~/a", *others.split()])
    value = flag_values(config)[name]
    assert (value[0] if isinstance(value, tuple) else value) == f"{home}/a"


def test_paths_in_config_files_expand_home(home: Path) -> None:
    (home / "flags.toml").write_text('output_dir = "~/a"\n')
    assert parse(f"--config={home}/flags.toml").log.output_dir == f"{home}/a"


@pytest.mark.parametrize("argv", ["--config=~/flags.toml", "--config=flags --config_dir=~"])
def test_config_files_are_found_in_home(argv: str, home: Path) -> None:
    (home / "flags.toml").write_text("seed = 12\n")
    assert parse(*argv.split()).training.seed == 12


@pytest.mark.parametrize(
    ("command", "name", "others"),
    [row for row in PATH_FLAGS if row[1] in ("data_path", "output_dir", "path", "output")],
)
def test_paths_with_unexpanded_variables_are_rejected(command: str, name: str, others: str) -> None:
    """A folder named $RUNS appeared."""
    with pytest.raises(UserError) as caught:
        parse_flags(config_type_of(command), [f"--{name}=$RUNS/a", *others.split()])
    assert f"--{name}" in str(caught.value) and "$RUNS" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_logged_flags_can_be_copied() -> None:
    given = ["--data_path=/data/the first corpus", "--datasets=a,b", "--sample_interval=5"]
    given += ["--sample_prompts=It's $HOME,The end", f"--output_dir=/runs/{'long name ' * 12}x"]
    parsed = parse_with_origins(TrainConfig, given)
    label, *copied = shlex.split(describe_changes(parsed))
    assert label == "flags:" and parse(*copied) == parsed.config
