"""What README and docs/ tell a reader to type works as printed.

Blocks of commands run in the order of the pages, in a copy of the repository with an environment of its own.
A block after `<!-- needs: gpu -->` (or cluster, network, docker) cannot run here, and a block that starts the
checks and the tests has run before (.ci/run): the parser of the program reads them, as it reads the commands
within sentences. A `text` block that follows directly is the output: each of its lines is printed, in this order
(tests/printed.py). `python main_training.py` and `python -m fms_fsdp` start as forks (tests/warm_shell.py).
"""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.distributed.run import get_args_parser

from fms_fsdp.__main__ import COMMANDS, find_flags
from fms_fsdp.config import TrainConfig
from fms_fsdp.config.flag import flag_table
from fms_fsdp.config.parse import parse_flags
from tests.cli import ROOT
from tests.fresh import copy_tracked, make_environment, outside
from tests.printed import missing_line
from tests.warm_shell import on_path, warm_programs

OUTSIDE_DOCS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "benchmarks/README.md")]
PAGES = [*OUTSIDE_DOCS, *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"<!-- needs: (gpu|cluster|network|docker) -->\n\Z")
# An output that contains text of documents, which changes with them, stands after `<!-- varies -->`.
OUTPUT = re.compile(r"\s*(<!-- varies -->\n)?```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = "python|torchrun|bash|source|fms-fsdp|sbatch|srun|docker|torchx|tensorboard|for"
# Two spaces after a name are a column of a table: `prepare` prints one with the head "source".
COMMAND = re.compile(rf"^ *([A-Z_]+=\S* )*({PROGRAMS}) (?! )", re.MULTILINE)
ACTIVATE = "source .venv/bin/activate"
PLACEHOLDERS = {"…", "...", "[flags]", "[RUN", "…]"}
TRAINING = {"main_training.py", "main_training", "train.sh", "train.slurm", "my_training.py"}
OWN_CHECKS = ("bash scripts/check.sh", "bash scripts/test.sh")
# the commands stay as printed: these variables make them short
SHORT = {"NUM_STEPS": "2", "RUN_NAME": "docs"}


class Block(NamedTuple):
    """Commands of a page: where they stand, what they need and whether the environment is active there."""

    place: str
    text: str
    needs: str
    is_active: bool
    output: str = ""
    output_varies: bool = False

    @property
    def is_run(self) -> bool:
        """Returns whether the commands run here: they need no other machine, and are not run by CI itself."""
        return not self.needs and not self.text.startswith(OWN_CHECKS)


def blocks() -> Iterator[Block]:
    for page in PAGES:
        content = page.read_text()
        for fence in FENCED.finditer(content):
            if fence[1] == "bash":
                before = content[: fence.start()]
                needs = NEEDS.search(before)
                is_active = page.name != "README.md" or ACTIVATE in before
                place = f"{page.stem}:{before.count(chr(10)) + 1}"
                needed = needs[1] if needs else ""
                output = OUTPUT.match(content, fence.end())
                if output is None:
                    yield Block(place, fence[2], needed, is_active)
                else:
                    varies = output[1] is not None
                    yield Block(place, fence[2], needed, is_active, output[2], varies)


def is_for_python(block: Block) -> bool:
    """Returns whether the block makes the run that the Python of docs/guides/generation.md loads."""
    return "--run_name=code" in block.text


def inline_commands() -> Iterator[tuple[str, str]]:
    """Page and command of each `command` within sentences, tables and manifests."""
    for page in PAGES:
        for language, text in FENCED.findall(page.read_text()):
            for command in re.findall(
                r"\bbash scripts/[^\"\n]+", text if language == "yaml" else ""
            ):
                yield page.stem, command
        for quoted in re.findall(r"`([^`]+)`", FENCED.sub("", page.read_text())):
            if COMMAND.match(text := " ".join(quoted.split())):
                yield page.stem, text


def read_by_its_parser(line: str) -> None:
    """Lets the program that a line of shell starts parse its flags; fails if it starts none that is known."""
    words = [word for word in shlex.split(line, comments=True) if word not in PLACEHOLDERS]
    while words and re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    if words[0] == "torchrun":
        known = get_args_parser()._option_string_actions
        script = next(
            (i for i, word in enumerate(words[1:], 1) if not word.startswith("-")), len(words)
        )
        assert all(word.partition("=")[0] in known for word in words[1:script]), line
    for i, word in enumerate(words):
        rest = words[i + 1 :]
        if " " in word and any(name in word for name in TRAINING):  # a command for another machine
            return read_by_its_parser(re.split("&& *", word)[-1])
        if Path(word).name in TRAINING:
            assert (ROOT / word).is_file() or word in ("main_training", "my_training.py"), line
            flags = list(itertools.takewhile(lambda flag: flag != ">", rest))
            flags = [flag for flag in flags if flag not in ("--", "--model_variant=mine")]
            return _parse(TrainConfig, flags)
        if word in ("fms_fsdp", "fms-fsdp") and (i == 0 or words[i - 1] == "-m"):
            if rest[:1] == ["train"]:
                return _parse(TrainConfig, rest[1:])
            if rest == ["--version"]:
                return None
            num_words = 1 if rest[0] in COMMANDS else 2
            flags_type = find_flags(" ".join(rest[:num_words]))
            if flags := rest[num_words:]:  # without flags a sentence only names the command
                _parse(flags_type, flags)
            return None
        if word == "benchmarks/bench_train.py":
            sys.path.insert(0, str(ROOT / "benchmarks"))
            bench = importlib.import_module("bench_train")
            for case in bench.cases(bench.parse(rest)[1]):
                _parse(TrainConfig, [f"--{flag}={value}" for flag, value in case.items()])
            return None
        if word.startswith(("scripts/", "benchmarks/", "fms_fsdp.tools.", "tests.gpu.")):
            file = ROOT / (word if "/" in word else word.replace(".", "/") + ".py")
            flags = [flag.partition("=")[0] for flag in rest if flag.startswith("--")]
            assert file.is_file() and all(flag in file.read_text() for flag in flags), line
            return None
    assert words[0] in ("docker", "source", "tensorboard", "torchrun", "sbatch", "lm_eval"), line


def _parse(config_type: type[Any], flags: list[str]) -> None:
    try:
        parse_flags(config_type, flags)
    except SystemExit as ended:  # --help
        assert ended.code == 0


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks, with the environment that scripts/train.sh makes in it."""
    folder = tmp_path_factory.mktemp("clone")
    copy_tracked(folder)
    make_environment(folder / ".venv", "--editable", str(folder))
    return folder


def test_the_commands_of_all_pages_are_found() -> None:
    found = {block.text: block for block in blocks()}
    assert not found["bash scripts/train.sh\n"].is_active
    assert {"gpu", "cluster", "network", "docker"} == {block.needs for block in blocks()} - {""}
    assert ("README", "bash scripts/check.sh") in inline_commands()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_finished_and_its_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"\b(TODO|FIXME|XXX|TBD|[A-Z]+-URL)\b", text)
    links = re.findall(r"\]\(([^)#:\s]+)\)", text)
    assert all((page.parent / link).exists() for link in links), links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_stand_in_bash_blocks(page: Path) -> None:
    for language, text in FENCED.findall(page.read_text()):
        assert language in ("bash", "python") or not COMMAND.search(text), text
        assert language, f"a block of {page.name} names no language: {text}"


@pytest.mark.parametrize(("page", "command"), sorted(set(inline_commands())))
def test_a_command_within_a_sentence_is_one_that_its_program_takes(page: str, command: str) -> None:
    read_by_its_parser(command)


@pytest.mark.parametrize(
    "block", [block for block in blocks() if not block.is_run], ids=lambda block: block.place
)
def test_a_command_that_needs_more_than_this_machine_is_read_by_its_parser(block: Block) -> None:
    lines = [line for line in block.text.replace("\\\n", " ").splitlines() if COMMAND.match(line)]
    lines += re.findall(r"^ +ssh .*", block.text, re.MULTILINE)
    assert lines
    for line in lines:
        if not line.startswith("for "):
            read_by_its_parser(line.removesuffix("&"))


@pytest.mark.parametrize(
    "line",
    [
        "python main_training.py --nmu_steps=3",
        "sbatch --nodes=2 scripts/train.slurm --no_such=1",
        "ssh node 'cd x && NNODES=4 bash scripts/train.sh --no_such=1'",
        "python -m fms_fsdp prepare --no_such=1",
        "fms-fsdp no_such",
        "torchrun --no_such=2 main_training.py",
        "python scripts/no_such.py",
        "python benchmarks/bench_train.py --no_such=1,2",
        "python no_such.py",
    ],
)
def test_a_command_that_no_program_takes_is_noticed(line: str) -> None:
    with pytest.raises((ValueError, KeyError, AssertionError, FileNotFoundError)):
        read_by_its_parser(line)


@pytest.mark.parametrize(
    ("shown", "printed", "found"),
    [
        ("08:51:02 step 1/20  loss 6.9", "23:01:59 step 1/20  loss 7.1234", True),
        ("step 20/20  5,901 tok/s  410 MiB/11 GiB  0s left", "step 20/20  1 tok/s  1 GiB/5 GiB  2m left", True),
        ("a  2 files\n…\nc", "a       13 files\nb\nc", True),
        ("data_fingerprint 49c76a7e1e61ad2e", "data_fingerprint dad77546965b8972", True),
        ("a thing that …", "a thing that is long", True),
        ("c\na", "a\nc", False),
        ("saved runs/a", "saved runs/b", False),
        ("2 binary files", "2 empty documents", False),
    ],
)  # fmt: skip
def test_output_is_compared_by_pattern(shown: str, printed: str, found: bool) -> None:
    assert (missing_line(shown, printed, "python main_training.py") is None) == found


def test_predictions_are_compared_by_value() -> None:
    command = "python -m fms_fsdp estimate --model_variant=7b"
    assert missing_line("total  48.62", "total  48.62", command) is None
    assert missing_line("total  48.62", "total  48.63", command) == "total  48.62"


@pytest.fixture(scope="module")
def programs(clone: Path) -> Iterator[Path]:
    """A folder with programs that start as forks."""
    folder = clone.parent / "programs"
    with warm_programs(folder, clone / ".venv/bin/python"):
        yield folder


def run_block(block: Block, clone: Path, programs: Path) -> None:
    """Runs the commands in the clone; fails if one of them does, or prints other lines than the page."""
    script = block.text
    if block.is_active:
        script = f"{ACTIVATE}\n{on_path(programs)}\n{block.text}"
    environment = outside() | SHORT
    del environment["OMP_NUM_THREADS"]
    result = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, f"{block.text}\n{result.stdout[-6000:]}"
    missing = missing_line(block.output, result.stdout, block.text, varies=block.output_varies)
    assert missing is None, (
        f"{block.place} shows {missing!r}, but printed:\n{result.stdout[-6000:]}"
    )


def test_tour_quotes_the_code() -> None:
    """docs/design/tour.md: each block is in the file that is named last before it."""
    page = (ROOT / "docs/design/tour.md").read_text()
    stops = [fence for fence in FENCED.finditer(page) if fence[1] == "python"]
    assert len(stops) == 12
    for fence in stops:
        file = re.findall(r"`([\w/]+\.py)`", page[: fence.start()])[-1]
        code = (ROOT / file).read_text()
        first = fence[2].splitlines()[0]
        indents = set(re.findall(rf"^( *){re.escape(first)}$", code, re.MULTILINE))
        quotes = [textwrap.indent(fence[2], indent) for indent in indents]
        assert any(quote in code for quote in quotes), f"{file} has no\n{fence[2]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [block for block in blocks() if block.is_run and not is_for_python(block)],
    ids=lambda block: block.place,
)
def test_a_block_of_commands_works_as_printed(clone: Path, programs: Path, block: Block) -> None:
    run_block(block, clone, programs)


@pytest.mark.slow
def test_python_examples_run(clone: Path, programs: Path) -> None:
    """docs/guides/generation.md: the commands that make the run `code`, then its Python."""
    (commands,) = [block for block in blocks() if is_for_python(block)]
    run_block(commands, clone, programs)
    page = (ROOT / "docs/guides/generation.md").read_text()
    examples = [text for language, text in FENCED.findall(page) if language == "python"]
    (clone / "page.py").write_text("\n".join(examples))
    ended = subprocess.run(
        [clone / ".venv/bin/python", "page.py"],
        cwd=clone,
        env=outside(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^\d\.\d\d nats per token$", ended.stdout, re.MULTILINE)
    assert "def save(" in ended.stdout and "finished 3 steps: runs/python" in ended.stdout


NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"


@pytest.mark.parametrize(
    ("words", "choices"),
    [
        ("{} optimizers", "optimizer"),
        ("{} schedules", "lr_schedule"),
        ("{} kinds of activation", "recompute"),
    ],
)
def test_what_readme_counts_in_words_is_what_the_flags_offer(words: str, choices: str) -> None:
    kinds = set(flag_table(TrainConfig)[choices].choices) - {"none", "auto"}
    assert words.format(NUMBERS.split()[len(kinds)]) in PAGES[0].read_text()
