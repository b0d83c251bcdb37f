"""Any value of any flag, file and variable is accepted, or rejected at once in one line."""

from __future__ import annotations

import gc
import json
import os
import random
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.flag import flag_table
from fms_fsdp.config.parse import PRESETS
from fms_fsdp.distributed.world import World
from fms_fsdp.errors import UserError, checking_input
from fms_fsdp.logs import set_up_log
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
VARIABLES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
VARIABLES += ["SLURM_JOB_END_TIME"]
GOOD = {
    "int": "0 1 2 3 4 8 16 4Ki 1e3 1_000".split(),
    "float": "0 0.1 0.5 1 1e-8 3e-4 2".split(),
    "bool": "true False yes 0".split(),
    "str": ["", *"none a x-y tiny 1/2 1:3 5@20,10 a:b every:2".split()],
}
BAD = [
    *"nan -inf -1 1e999999999 -1e999999999 1e-999999999 1e30 1e308 1e15 1e9 0x10 1__0 _ ٣ 1.5.2".split(),
    *"1e 2**64 true None null [] [1,2] {} , ,, a,,b ../.. . / /proc/x /dev/null/x a/../../b ~".split(),
    *"é 1/0 every:0 every:x 5@ @ 1:1 3:1 --seed=1 = https://[ .a:b os: : 1/1e999999999 %s {0}".split(),
    *("\\", "'", '"', "", " ", "a\nb", "\x1b[31m", "a\0b", "\udcff", "\u2028", "$(touch x)"),
    *(str(2**64), "9" * 5000, "x" * 5000, "tests.data.custom_stream:nothing"),
]
FILES = ["[1,2]", '"x"', "null", "", "[" * 50_000, '{"a":' * 50_000, "\0", "a = = b", "[x]\na=1"]


@dataclass
class Case:
    """The input of one launch, and the names of which its error names one."""

    flags: list[str]
    names: set[str]
    variables: dict[str, str] = field(default_factory=dict)
    ranks: int = 1

    def error(self) -> str:
        """Returns the line that rejects it, or "" if it is accepted."""
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
    """Returns a file with those flags, well-formed or not."""
    kind = rng.random()
    if kind < 0.15:
        return rng.choice(FILES)
    texts = {name: text.encode("utf-8", "replace").decode() for name, text in flags.items()}
    if not is_json:
        quoted = {name: json.dumps(text) if kind < 0.7 else text for name, text in texts.items()}
        return "\n".join(f"{name} = {text}" for name, text in quoted.items())
    if kind >= 0.4:
        return json.dumps({FIELDS[name].section: {name: text} for name, text in texts.items()})
    values = {n: rng.choice([text, [text], {text: 1}, None, 1e400]) for n, text in flags.items()}
    return json.dumps(values)


def make_case(rng: random.Random, folder: Path) -> Case:
    """Returns a case of flags, of a config file or of variables of the environment."""
    names = rng.sample(sorted(FIELDS), rng.choice([1, 1, 2, 3]))
    given, kind = {name: value_of(rng, name) for name in names}, rng.random()
    if kind < 0.1:
        base = [f"--{name}={value}" for name, value in BASE.items()]
        name = rng.choice(VARIABLES)
        text = rng.choice([text for text in BAD + GOOD["int"] if "\0" not in text])
        return Case(base, {name}, {name: text})
    base = [f"--{name}={value}" for name, value in BASE.items() if name not in given]
    case = Case(base, set(given), ranks=rng.choice([1, 1, 1, 2, 8]))
    if kind < 0.35:
        path = folder / rng.choice(["a.json", "a.toml", "a b.toml"])
        content = content_of(rng, given, path.suffix == ".json")
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
        case.flags.append(f"--config={path}")
        case.names.add(str(path))
        return case
    dashes = rng.choice(["--", "--", "-"])
    for name, text in given.items():
        case.flags.append(f"{dashes}{rng.choice([name, name.replace('_', '-')])}={text}")
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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for config files; the working folder is another, which stays empty."""
    here = tmp_path / "far" / "from" / "here"  # above these is the data of other tests
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    set_up_log(1)  # quiet
    return tmp_path


@pytest.mark.parametrize(
    ("seed", "cases"), [(1, 300), pytest.param(2, 1000, marks=pytest.mark.slow)]
)
def test_any_value_is_accepted_or_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, cases: int
) -> None:
    rng, rejected = random.Random(seed), 0
    plain = Case([f"--{name}={value}" for name, value in BASE.items()], set())
    assert plain.error() == ""  # its imports are not timed
    gc.freeze()  # nor is a collection of the objects of other tests
    for number in range(cases):
        case = make_case(rng, folder)
        begin = time.process_time()
        with monkeypatch.context() as patch:
            for name, text in case.variables.items():
                patch.setenv(name, text)
            error = case.error()
        shown = f"case {number}: {[flag[:100] for flag in case.flags]} {case.variables} -> {error[:1000]}"
        assert time.process_time() - begin < 2, shown  # --recompute=auto measures several
        assert not os.listdir(), shown
        assert error.isprintable() and len(error) < 2000, shown
        assert not error or any(name in error for name in case.names), shown
        rejected += bool(error)
    assert 0.3 < rejected / cases < 0.95


@pytest.mark.slow
def test_launch_accepts_the_same_values(folder: Path) -> None:
    """A rejected launch ends with 2 and one line, an accepted one trains a step."""
    rng, left = random.Random(2), {"accepted": 6, "rejected": 14}
    while sum(left.values()):
        case = make_case(rng, folder)
        case.ranks = 1
        # `World.from_env` alone reads variables; the timeout is too short for a busy machine
        if case.variables or "collective_timeout_s" in case.names or "\0" in "".join(case.flags):
            continue
        kind = "rejected" if case.error() else "accepted"
        given = [
            flag
            for flag in case.flags
            if flag.partition("=")[0].strip("-").replace("-", "_") in case.names
        ]
        is_small = all(len(flag.partition("=")[2]) < 3 for flag in given)
        if not left[kind] or (kind == "accepted" and not is_small):
            continue
        left[kind] -= 1
        here = folder / f"{kind}{left[kind]}"
        here.mkdir()
        ended = launch(case.flags, cwd=here)
        shown = (
            f"{[flag[:100] for flag in case.flags]} -> {ended.returncode} {ended.stderr[-1000:]}"
        )
        # some need a checkpoint, for which the plan does not look
        if kind == "accepted" and ended.returncode != 2:
            assert ended.returncode == 0 and any(here.iterdir()), shown
        else:
            assert ended.returncode == 2 and ended.stderr.count("\n") == 1, shown
            assert ended.stderr.startswith("error: ") and not any(here.iterdir()), shown
