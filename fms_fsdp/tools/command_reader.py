"""Reads a command of another program, as the shell has expanded it; nothing is executed.

    srun --ntasks=4 torchrun --nproc_per_node=8 pretrain_gpt.py --num-layers 24
    launcher        launcher                    program         arguments

config/other_programs.toml has the options of each launcher.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NoReturn

from fms_fsdp.config.train_config import other_programs
from fms_fsdp.config.values import shown
from fms_fsdp.errors import UserError
from fms_fsdp.tools.other_configs import Key, check_is_no_script, read_text

_LAUNCHERS = other_programs()["launchers"]
_COMMANDS = {word: name for name, table in _LAUNCHERS.items() for word in table["commands"].split()}
_SHELLS = ("bash", "sh", "zsh")
_ENDS = "\n;&|()"  # of a command within a text
_REDIRECTION = r"(?<!\S)[\d&]?(?:>>?|<)(?:&\d|\s*[^\s;&|]+)"
_HOSTFILE = "/job/hostfile"  # DeepSpeed's default
_SLOTS = ("hostfile", "include", "exclude", "num_nodes", "num_gpus")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


@dataclass
class Launcher:
    """A launcher before the program, with the options that its table has."""

    name: str
    options: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def parse(self, words: list[str]) -> list[str]:
        """Reads the options; returns the words after them, or after an unknown option."""
        parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
        table = _LAUNCHERS[self.name]
        for option in table["values"].split():
            parser.add_argument(*_spellings(option), type=word)
        for option in table["switches"].split():
            parser.add_argument(*_spellings(option), action="store_const", const="true")
        parser.add_argument("rest", nargs=argparse.REMAINDER)
        while True:
            try:
                found, unknown = parser.parse_known_args(words)
            except UserError as error:  # a value is missing
                self.unknown.append(str(error))
                words = words[1:]
                continue
            self.unknown += unknown
            rest: list[str] = found.__dict__.pop("rest")
            self.options |= vars(found)
            return rest

    def factors(self) -> list[str]:
        """Returns the numbers whose product is the number of devices; "" if one is missing."""
        get = self.options.get
        env = os.environ.get
        nodes = get("nodes") or env("SLURM_NNODES", "")
        match self.name:
            case "torchrun":
                return [
                    get("nnodes", env("PET_NNODES", "1")),
                    get("nproc_per_node", env("PET_NPROC_PER_NODE", "1")),
                ]
            case "deepspeed":
                return [count_slots(self.options)]
            case "srun" if "ntasks_per_node" in self.options and "ntasks" not in self.options:
                return [nodes, get("ntasks_per_node", "")]
            case "srun":
                return [get("ntasks") or env("SLURM_NTASKS") or nodes]
        return [get("ntasks", "")]


def _spellings(option: str) -> list[str]:
    """Returns the names of an option, whose words are joined by _ or by -."""
    names = option.split("/") + option.replace("_", "-").split("/")
    return list(dict.fromkeys(names))


def word(text: str) -> str:
    """Returns a value; its name is part of argparse's messages."""
    if text in {"", *_SHELLS, *_COMMANDS}:  # a variable is empty
        raise ValueError
    return text


@dataclass(frozen=True)
class Command:
    """A program with its arguments or, of deepy.py, with its configurations."""

    program: str
    launchers: list[Launcher]
    arguments: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def devices(self) -> Iterator[Key]:
        """Yields a key for the number of devices, unless nothing names it."""
        counting = [each for each in self.launchers if "counts" in _LAUNCHERS[each.name]]
        place = "command"
        unknown = list[str]()
        if self.files:
            return  # the configurations have it
        if counting:  # one around another starts a process per node
            factors = counting[-1].factors()
            unknown = counting[-1].unknown
        else:
            factors = [os.environ.get("WORLD_SIZE", "")]
            place = "WORLD_SIZE"
        unknown += [text for text in factors if text and not re.fullmatch("[1-9][0-9]*", text)]
        if unknown:
            yield Key("launcher.devices", None, place, shown(f"{unknown[0]} is not understood"))
        elif all(factors):
            yield Key("launcher.devices", prod(map(int, factors)), place)


def read_command(words: list[str]) -> Command:
    """Returns the parts of a command.

    Raises:
        UserError: it starts no Python program, or it starts a shell script.
    """
    launchers = list[Launcher]()
    is_module = False
    while words:
        word, *words = words
        name = word if is_module else re.sub(r"^python[\d.]+$", "python", os.path.basename(word))
        if name in _COMMANDS:
            launcher = Launcher(_COMMANDS[name])
            launchers.append(launcher)
            words = launcher.parse(words)
            is_module = "module" in launcher.options
            if launcher.name == "deepy":
                return Command(word, launchers, files=_read_deepy(launcher, words))
        elif is_module or name.endswith(".py"):
            return Command(word, launchers, words)
        elif name in _SHELLS and words and re.match("-[a-z]*c$", words[0]):
            words = _inner_words(" ".join(words[1:2]))
        else:
            check_is_no_script(word)
    raise UserError(
        "the command starts no Python program; name one that ends in .py, or follows -m"
    )


def _read_deepy(launcher: Launcher, words: list[str]) -> list[str]:
    """Returns the configurations after the program; their suffix is optional."""
    files = list[str]()
    while words:
        name, *words = words
        files.append(name if name.endswith((".yml", ".json")) else f"{name}.yml")
        words = launcher.parse(words)
    return [os.path.join(launcher.options.get("conf_dir", ""), name) for name in files[1:]]


def _inner_words(text: str) -> list[str]:
    """Returns the words of the command with options in `bash -c TEXT`."""
    text = text.replace("\\\n", " ")
    lexer = shlex.shlex(re.sub(_REDIRECTION, " ", text), posix=True, punctuation_chars=_ENDS)
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    commands = [list[str]()]
    try:
        for word in lexer:
            if set(word) <= set(_ENDS):
                commands.append([])
            elif not set(text) & set("\"'\\"):  # bash replaces the variables that are exported
                commands[-1] += os.path.expandvars(word).split()
            else:
                commands[-1].append(word)
    except ValueError:
        raise UserError("the text of bash -c has an open quote; close it") from None
    return max(commands, key=len)


def read_arguments(words: list[str], place: str) -> Iterator[Key]:
    """Yields a key for each `--name value …` and `--switch`; of equal names the last one."""
    values = dict[str, list[str]]()
    own = list[str]()
    for word in words:
        if re.match(r"--?[^\W\d]", word):
            name, *own = word.lstrip("-").split("=", 1)
            name = name.replace("-", "_").lower()
            values.pop(name, None)
            values[name] = own
        else:
            own.append(word)
    for name, given in values.items():
        hidden = [word for word in given if "$" in word or not word]
        if hidden:
            yield Key(name, None, place, f"only the shell knows the value {hidden[0]}".rstrip())
        elif given:
            yield Key(name, given if len(given) > 1 else given[0], place)
        else:  # torchtitan's --compile.no-enable switches off
            yield Key(name.replace(".no_", "."), ".no_" not in name, place)


def count_slots(options: Mapping[str, str]) -> str:
    """Returns the number of devices of deepspeed; "" if nothing names it, a text that it lacks.

    These are the slots of the hostfile after --include and --exclude, else nodes x GPUs.
    """
    path, chosen, dropped, nodes, gpus = map(options.get, _SLOTS, [""] * 5)
    hosts = dict[str, int]()
    for number in (nodes, gpus):
        if number and not number.isdigit():
            return number
    if os.path.isfile(path or _HOSTFILE):
        lines = re.findall(r"(?m)^\s*([^\s#]+)\s+slots=(\d+)", read_text(path or _HOSTFILE))
        hosts = {host: int(slots) for host, slots in lines}
    elif path and not (nodes and gpus):
        return f"the hostfile {path}"
    elif not chosen:
        return str(int(nodes or 1) * int(gpus)) if gpus else ""
    used = dict[str, int]() if chosen else dict(hosts)
    for part in filter(None, (chosen or dropped).split("@")):
        host, _, slots = part.partition(":")
        number_of_slots = len(set(slots.split(","))) if slots else hosts.get(host, 0)
        used[host] = number_of_slots if chosen else hosts.get(host, 0) - number_of_slots
    sizes = [size for size in used.values() if size]
    return str(sum(int(gpus or size) for size in sizes[: int(nodes or len(sizes))]))
