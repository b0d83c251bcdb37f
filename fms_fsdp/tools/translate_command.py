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


def _value(word: str) -> str:
    if word in _SHELLS or word in _COMMANDS:  # the value is an empty variable
        raise ValueError
    return word


def _with_underscores(option: re.Match[str]) -> str:
    return "--" + option[0][2:].replace("-", "_")


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
        """Reads the options; returns the words after them. A value of an unknown option is one of these."""
        parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
        for option in _LAUNCHERS[self.name]["values"].split():
            parser.add_argument(*option.split("/"), type=_value)
        for option in _LAUNCHERS[self.name]["switches"].split():
            parser.add_argument(*option.split("/"), action="store_const", const="true")
        parser.add_argument("rest", nargs=argparse.REMAINDER)
        while True:
            spelled = [re.sub("^--[^=]+", _with_underscores, word) for word in words]
            try:
                found, unknown = parser.parse_known_args(spelled)
            except UserError:  # a value is missing
                self.unknown.append(words[0])
                words = words[1:]
                continue
            self.unknown += unknown
            num_rest = len(found.__dict__.pop("rest"))
            self.options |= vars(found)
            self.unknown += [name for name, value in vars(found).items() if not value]
            return words[len(words) - num_rest :]

    def factors(self) -> list[str]:
        """Returns the numbers whose product is the number of devices; "" if one is missing."""
        get = self.options.get
        env = os.environ.get
        match self.name:
            case "torchrun":
                nodes = get("nnodes") or env("PET_NNODES", "1")
                return [nodes, get("nproc_per_node") or env("PET_NPROC_PER_NODE", "1")]
            case "deepspeed":
                return [count_slots(self.options)]
            case "srun" if "ntasks" not in self.options:
                nodes = get("nodes") or env("SLURM_NNODES", "")
                if "ntasks_per_node" in self.options:
                    return [nodes, get("ntasks_per_node", "")]
                return [env("SLURM_NTASKS") or nodes]
        return [get("ntasks", "")]


@dataclass(frozen=True)
class Command:
    """A program with its arguments or, of deepy.py, with its configurations."""

    program: str
    launchers: list[Launcher]
    arguments: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def devices(self) -> Iterator[Key]:
        """Yields a key for the number of devices, unless nothing names it."""
        factors = [os.environ.get("WORLD_SIZE", "")]
        reason = ""
        counting = [each for each in self.launchers if "counts" in _LAUNCHERS[each.name]]
        if self.files:
            factors = [""]  # the configurations have it
        elif counting:
            inner = counting[-1]  # one around it starts a process per node
            factors = inner.factors()
            if inner.unknown:
                reason = f"the option {inner.unknown[0]} of {inner.name} is not known"
        wrong = [text for text in factors if text and not re.fullmatch("[1-9][0-9]*", text)]
        if wrong:
            reason = f"{wrong[0]} is not a number of devices"
        if reason:
            yield Key("launcher.devices", None, "command", shown(reason))
        elif all(factors):
            place = "command" if counting else "WORLD_SIZE"
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
    raise UserError("the command starts no Python program; name one that ends in .py, or follows -m")


def _read_deepy(launcher: Launcher, words: list[str]) -> list[str]:
    """Returns the configurations after the program; their suffix is optional."""
    names = list[str]()
    while words:
        names.append(words[0])
        words = launcher.parse(words[1:])
    folder = launcher.options.get("conf_dir", "")
    suffixes = (".yml", ".json")
    return [
        os.path.join(folder, name if name.endswith(suffixes) else f"{name}.yml")
        for name in names[1:]
    ]


def _inner_words(text: str) -> list[str]:
    """Returns the words of the command with options in `bash -c TEXT`."""
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
    with_options = [each for each in commands if any(word.startswith("--") for word in each)]
    return max(with_options, key=len, default=[])


def read_arguments(words: list[str], place: str) -> Iterator[Key]:
    """Yields a key for each `--name value …`, `--name=value` and `--switch`; the last one counts."""
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
        hidden = [word for word in given if "$" in word]
        if hidden:
            yield Key(name, None, place, f"{shown(hidden[0])} is known only to the shell")
        elif "" in given:
            yield Key(name, None, place, "its value is empty")
        elif len(given) > 1:
            yield Key(name, given, place)
        elif given:
            yield Key(name, given[0], place)
        else:  # torchtitan's --compile.no-enable switches off
            yield Key(name.replace(".no_", "."), ".no_" not in name, place)


def count_slots(options: Mapping[str, str]) -> str:
    """Returns the number of devices of deepspeed; "" if nothing names it, a text that it lacks.

    These are the slots of the hostfile after --include and --exclude, else nodes x GPUs.
    """
    path = options.get("hostfile", "")
    chosen = options.get("include", "")
    dropped = options.get("exclude", "")
    nodes = options.get("num_nodes", "")
    gpus = options.get("num_gpus", "")
    if os.path.isfile(path or _HOSTFILE):
        lines = re.findall(r"(?m)^\s*([^\s#]+)\s+slots=(\d+)", read_text(path or _HOSTFILE))
        hosts = {host: {str(slot) for slot in range(int(number))} for host, number in lines}
    elif chosen and not path:
        hosts = {}
    elif path and not (nodes and gpus):
        return f"the hostfile {path}"
    else:
        gpus = gpus if gpus.isdigit() else ""
        return str(int(nodes or 1) * int(gpus)) if gpus else ""
    named = dict[str, set[str]]()
    for part in filter(None, (chosen or dropped).split("@")):
        host, _, slots = part.partition(":")
        named[host] = set(slots.split(",")) if slots else hosts.get(host, set())
    if not chosen:
        named = {host: slots - named.get(host, set()) for host, slots in hosts.items()}
    sizes = [len(slots) for slots in named.values() if slots]
    if nodes:
        sizes = sizes[: int(nodes)]
    return str(sum(int(gpus or size) for size in sizes))
