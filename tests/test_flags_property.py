"""Any value of any flag, file and variable is accepted, or refused at once in one line."""

from __future__ import annotations

import gc
import json
import os
import random
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.flag import flag_table
from fms_fsdp.config.parse import PRESETS
from fms_fsdp.distributed.runtime import World, set_up_log
from fms_fsdp.errors import UserError, checking_input
from tests.specs import planned
from tests.warm import launch

BASE = {
    "model_variant": "tiny",
    "use_dummy_dataset": "True",
    "seq_length": "64",
    "trackers": "none",
    "num_steps": "1",
}
FIELDS = flag_table(TrainConfig)
VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_END_TIME",
)
GOOD = {
    "int": ["0", "1", "2", "3", "4", "8", "16", "4Ki", "1e3", "1_000"],
    "float": ["0", "0.1", "0.5", "1", "1e-8", "3e-4", "2"],
    "bool": ["true", "False", "yes", "0"],
    "str": ["", "none", "a", "x-y", "tiny", "1/2", "1:3", "5@20,10", "a:b", "every:2"],
}
BAD = [
    "",
    " ",
    "nan",
    "inf",
    "-inf",
    "-1",
    "-0.5",
    "1e999999999",
    "-1e999999999",
    "1e-999999999",
    "1e30",
    "1e308",
    "1e15",
    "1e9",
    str(2**63),
    str(2**64),
    "9" * 5000,
    "0x10",
    "1__0",
    "_",
    "٣",
    "1.5.2",
    "1e",
    "2**64",
    "true",
    "None",
    "null",
    "[]",
    "[1,2]",
    "{}",
    ",",
    ",,",
    "a,,b",
    "../..",
    "..",
    ".",
    "/",
    "/proc/x",
    "/dev/null/x",
    "a/../../b",
    "~",
    "a\nb",
    "\x1b[31m",
    "a\0b",
    "\udcff",
    "é",
    "\u2028",
    "1/0",
    "every:0",
    "every:x",
    "5@",
    "@",
    "1:1",
    "3:1",
    "--seed=1",
    "=",
    "x" * 5000,
    "$(touch x)",
    "https://[",
    ".a:b",
    "os:",
    ":",
    "tests.data.custom_stream:nothing",
    "1/1e999999999",
    "%s",
    "{0}",
    "\\",
    "'",
    '"',
]


@dataclass
class Case:
    """What one launch is given."""

    flags: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    file: str = ""
    ranks: int = 1
    names: set[str] = field(default_factory=set)

    def plan(self) -> str:
        """ "" if it is accepted, else the line that refuses it."""
        try:
            with checking_input():
                world = World.from_env() if self.variables else World(0, 0, self.ranks, self.ranks)
                planned(self.flags, world)
        except UserError as error:  # any other error is a bug
            return str(error)
        return ""


def kind_of(name: str) -> str:
    return next(kind for kind in ("int", "float", "bool", "str") if kind in str(FIELDS[name].type))


def value_of(rng: random.Random, name: str) -> str:
    spec = FIELDS[name]
    if spec.choices and rng.random() < 0.5:
        return rng.choice(spec.choices)
    chosen = rng.choice(GOOD[kind_of(name)]) if rng.random() < 0.4 else rng.choice(BAD)
    return ",".join([chosen] * rng.choice([1, 1, 2])) if "tuple" in str(spec.type) else chosen


def content_of(rng: random.Random, flags: dict[str, str], is_json: bool) -> str:
    """A file with those flags, well-formed or not."""
    kind = rng.random()
    if kind < 0.15:
        return rng.choice(
            [
                "[1,2]",
                '"x"',
                "null",
                "",
                "[" * 50_000,
                '{"a":' * 50_000,
                "\0",
                "a = = b",
                "{}",
                "[model]",
                "[x]\na=1",
            ]
        )
    values = {
        name: rng.choice([text, [text], {text: 1}, None, 1e400, True])
        for name, text in flags.items()
    }
    texts = {name: text.encode("utf-8", "replace").decode() for name, text in flags.items()}
    if is_json:
        return json.dumps(
            values
            if kind < 0.4
            else {FIELDS[name].section: {name: text} for name, text in texts.items()}
        )
    return "\n".join(
        f"{name} = {json.dumps(text) if kind < 0.7 else text}" for name, text in texts.items()
    )


def make_case(rng: random.Random, folder: Path) -> Case:
    given = {
        name: value_of(rng, name) for name in rng.sample(sorted(FIELDS), rng.choice([1, 1, 2, 3]))
    }
    kind = rng.random()
    if kind < 0.1:
        given = {}
    case = Case(ranks=rng.choice([1, 1, 1, 2, 8]), names=set(given))
    base = [f"--{name}={value}" for name, value in BASE.items() if name not in given]
    if kind < 0.1:
        name = rng.choice(VARIABLES)
        case.variables = {
            name: rng.choice([text for text in BAD + GOOD["int"] if "\0" not in text])
        }
        case.flags, case.names = base, {name}
    elif kind < 0.35:
        path = folder / rng.choice(["a.json", "a.toml", "a b.toml"])
        path.write_bytes(
            content_of(rng, given, path.suffix == ".json").encode("utf-8", "surrogateescape")
        )
        case.flags, case.names = [*base, f"--config={path}"], case.names | {str(path)}
    else:
        mark = rng.choice(["--{}={}", "--{}={}", "-{}={}"])
        case.flags = [
            *base,
            *(
                mark.format(rng.choice([name, name.replace("_", "-")]), text)
                for name, text in given.items()
            ),
        ]
        if rng.random() < 0.1:
            presets = {path.stem: path for path in PRESETS.glob("*.toml")}
            overlay = rng.choice([*presets, *BAD])
            case.flags.append(f"--config={overlay}")
            case.names |= {"config", "model_variant", "num_steps", "ckpt_load_path"}
            if overlay in presets:
                sections = tomllib.loads(presets[overlay].read_text()).values()
                case.names |= {name for section in sections for name in section}
    return case


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where files of flags lie; the working folder beside them is to stay empty."""
    here = tmp_path / "far" / "from" / "here"  # above these lie the data of other tests
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    set_up_log(World(1, 0, 2, 2))  # quiet
    yield tmp_path


@pytest.mark.parametrize(
    ("seed", "cases"), [(1, 300), pytest.param(2, 2000, marks=pytest.mark.slow)]
)
def test_any_value_is_accepted_or_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, cases: int
) -> None:
    rng, refused = random.Random(seed), 0
    plain = Case([f"--{name}={value}" for name, value in BASE.items()])
    assert plain.plan() == ""  # what the first plan imports is not timed
    gc.freeze()  # a search for garbage among what other tests left is not timed
    for number in range(cases):
        case = make_case(rng, folder)
        begin = time.process_time()
        with monkeypatch.context() as patch:
            for name, text in case.variables.items():
                patch.setenv(name, text)
            text = case.plan()
        shown = f"case {number}: {[flag[:100] for flag in case.flags]} {case.variables} -> {text[:1000]}"
        assert time.process_time() - begin < 2, shown  # --recompute=auto measures several
        assert not os.listdir(), shown
        assert text.isprintable() and len(text) < 2000, shown
        assert not text or any(name in text for name in case.names), shown
        refused += bool(text)
    assert 0.3 < refused / cases < 0.95


@pytest.mark.slow
def test_the_command_does_what_the_plan_says(folder: Path) -> None:
    """Sixty launches: a refused one ends with 2 and one line, an accepted one trains a step."""
    rng, left = random.Random(2), {"accepted": 15, "refused": 45}
    while sum(left.values()):
        case = make_case(rng, folder)
        case.ranks = 1
        kind = "refused" if case.plan() else "accepted"
        given = [
            flag
            for flag in case.flags
            if flag.partition("=")[0].strip("-").replace("-", "_") in case.names
        ]
        is_small = all(len(flag.partition("=")[2]) < 3 for flag in given)
        if (
            not left[kind]
            or (kind == "accepted" and not is_small)
            or any("\0" in flag for flag in case.flags)
        ):
            continue
        if case.variables or "collective_timeout_s" in case.names:
            continue  # read by `World.from_env` alone; too short for a busy machine
        left[kind] -= 1
        here = folder / f"{kind}{left[kind]}"
        here.mkdir()
        ended = launch(case.flags, cwd=here)
        shown = (
            f"{[flag[:100] for flag in case.flags]} -> {ended.returncode} {ended.stderr[-1000:]}"
        )
        if (
            kind == "accepted" and ended.returncode != 2
        ):  # some need a checkpoint, which the plan does not look for
            assert ended.returncode == 0 and any(here.iterdir()), shown
        else:
            assert (
                ended.returncode == 2
                and ended.stderr.count("\n") == 1
                and ended.stderr.startswith("error: ")
            ), shown
            assert not any(here.iterdir()), shown
