"""All commands: `fms-fsdp COMMAND --flag=value …`, or `python -m fms_fsdp COMMAND …`; each has a `--help`.

Exit statuses: 0 done, 1 a bug (a traceback) or keys that `translate` leaves out, 2 bad input (one
line on stderr), 130 stopped by Ctrl-C; `train` starts the training (fms_fsdp/launch.py) and has the
exit statuses of main_training.py.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import sys
import typing
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fms_fsdp.console import set_up_streams
from fms_fsdp.cpu_tuning import before_torch
from fms_fsdp.errors import (
    PROGRAM,
    RunFailed,
    UserError,
    check_installed,
    is_for_user,
    is_storage_failure,
    printing,
    read_failed,
)

CALLED = PROGRAM or "python -m fms_fsdp"
# command, of one word or two → (module:function, what it does); the type of the function's
# `config` declares the flags, and the module is imported only to run the command
COMMANDS = {
    "train": (
        "",
        "train a model with one process per GPU, as main_training.py does",
    ),
    "prepare": (
        "fms_fsdp.prepare.command:main",
        "tokenize text, source code, JSON lines or Parquet into token shards",
    ),
    "convert": (
        "fms_fsdp.prepare.convert:main",
        "convert token ids of Megatron-LM, datatrove, Parquet or Arrow into token shards",
    ),
    "inspect step": (
        "fms_fsdp.tools.inspect:print_step",
        "list the files, documents and tokens of any step's sequences",
    ),
    "inspect verify": (
        "fms_fsdp.tools.inspect:verify",
        "check every shard against its recorded counts, to the last token",
    ),
    "evaluate": (
        "fms_fsdp.tools.evaluate:main",
        "compute the held-out loss of a checkpoint, or answer questions or tasks of lm-eval",
    ),
    "generate": (
        "fms_fsdp.tools.generate:main",
        "continue a prompt with the model of a checkpoint",
    ),
    "import": (
        "fms_fsdp.hf.import_upstream:main",
        "convert a checkpoint of upstream fms-fsdp to a Hugging Face checkpoint",
    ),
    "export": ("fms_fsdp.hf.export:main", "write a checkpoint as a Hugging Face checkpoint"),
    "ckpt list": (
        "fms_fsdp.tools.ckpt:list_checkpoints",
        "list the checkpoints of a run: size, tokens, validation loss, health",
    ),
    "ckpt verify": (
        "fms_fsdp.tools.ckpt:verify_checkpoints",
        "check all files of the checkpoints against their checksums",
    ),
    "ckpt inspect": (
        "fms_fsdp.tools.ckpt:inspect",
        "print shape, norm and spread of every tensor of a checkpoint",
    ),
    "ckpt prune": (
        "fms_fsdp.tools.ckpt:prune_checkpoints",
        "delete checkpoints after a step, and unfinished or corrupt ones",
    ),
    "estimate": (
        "fms_fsdp.tools.estimate:main",
        "predict memory, speed and days of a training, or find the fastest layout",
    ),
    "translate": (
        "fms_fsdp.tools.translate:main",
        "convert the configuration of another trainer into a TOML file of flags",
    ),
    "report": (
        "fms_fsdp.tools.report:main",
        "write a page of curves and tables from run directories",
    ),
}
REMOVED = {  # command -> what to use in its place
    "score": "use evaluate --questions=FILE",
    "trace": "read summary.txt, which the profiler writes next to each trace",
    "inspect plan": "use --dry_run of main_training.py, which prints tokens and epochs of each source",
    "inspect find": "use inspect step, which lists the documents of any step",
}


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Runs one command; returns its exit status."""
    set_up_streams()
    check_installed()
    if argv[:1] == ["--version"]:
        from fms_fsdp.models.listings import print_listing

        print_listing(argv)
    in_group = [name for name in COMMANDS if argv and name.startswith(f"{argv[0]} ")]
    num_words = 2 if in_group else 1
    command = " ".join(argv[:num_words])
    if command in REMOVED:
        print(f"fms_fsdp: command {command} was removed; {REMOVED[command]}", file=sys.stderr)
        return 2
    if command not in COMMANDS:
        return _print_commands(argv, num_words, in_group or list(COMMANDS))
    if command == "train":
        from fms_fsdp import launch
        from fms_fsdp.models.listings import print_listing

        print_listing(argv[1:])
        try:
            return launch.main(argv[1:])
        except KeyboardInterrupt:  # before the training has started
            print("train: stopped; run the command again", file=sys.stderr)
            return 130
    from fms_fsdp.config.parse import parse_flags

    before_torch()
    run = find_command(command)
    gc.enable()
    config_type = typing.get_type_hints(run)["config"]
    flags = list(argv[num_words:])
    try:
        with printing():
            if command == "translate":  # the words of another program's command are not our flags
                from fms_fsdp.tools.translate import split_command

                flags, words = split_command(flags)
                run = partial(run, words=words)  # type: ignore[call-arg]
            if {"-h", "--help"} & set(flags):
                print(f"{command}: {COMMANDS[command][1]}")
            run(parse_flags(config_type, flags, f"{CALLED} {command}"))
    except (UserError, OSError) as error:
        if is_storage_failure(error) and isinstance(error, OSError) and error.filename is not None:
            print(
                f"{command}: failed: {read_failed(error.filename, error.strerror)}", file=sys.stderr
            )
            return 1
        if not is_for_user(error):
            raise
        print(f"{command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RunFailed as error:  # such as a storage that does not answer
        print(f"{command}: failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{command}: stopped; run the command again", file=sys.stderr)
        return 130
    return 0


def find_command(command: str) -> Callable[[Any], object]:
    """Imports and returns the function of a command."""
    module, _, function = COMMANDS[command][0].partition(":")
    found: Callable[[Any], object] = getattr(importlib.import_module(module), function)
    return found


def _print_commands(argv: Sequence[str], num_words: int, listed: Sequence[str]) -> int:
    wants_help = bool(argv) and argv[-1] in ("-h", "--help", "help")
    is_whole = len(argv) >= num_words and not wants_help
    last_words = {name.split()[-1]: name for name in listed}
    near = difflib.get_close_matches(argv[num_words - 1], last_words, n=1) if is_whole else []
    if not near:
        with printing():
            print(f"usage: {CALLED} COMMAND [--flag=value …]   (COMMAND --help lists its flags)")
            for name in listed:
                print(f"  {name:<15} {COMMANDS[name][1]}")
    if is_whole:
        hint = f"did you mean {last_words[near[0]]}?" if near else f"commands: {', '.join(listed)}"
        print(
            f"fms_fsdp: command ({' '.join(argv[:num_words])}) does not exist; {hint}",
            file=sys.stderr,
        )
    return 0 if wants_help else 2


if __name__ == "__main__":
    sys.exit(main())
