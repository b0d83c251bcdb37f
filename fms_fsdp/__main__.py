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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fms_fsdp.console import PROGRAM, printing, set_up_streams
from fms_fsdp.errors import RunFailed, UserError, is_for_user, is_storage_failure, read_failed
from fms_fsdp.packages import check_installed
from fms_fsdp.process import before_torch

CALLED = PROGRAM or "python -m fms_fsdp"


class Command(NamedTuple):
    """A command: the class of its flags, which loads neither torch nor numpy, and its function.

    Both are module:name. The function takes the flags, and is imported only when they are right.
    """

    flags: str
    function: str
    purpose: str


# by the one or two words of the command
COMMANDS = {
    "train": Command(
        "fms_fsdp.config:TrainConfig",
        "fms_fsdp.launch:main",  # which takes the flags as words, and does not parse them
        "train a model with one process per GPU, as main_training.py does",
    ),
    "prepare": Command(
        "fms_fsdp.prepare.prepare_flags:PrepareConfig",
        "fms_fsdp.prepare.command:main",
        "tokenize text, source code, JSON lines or Parquet into token shards",
    ),
    "convert": Command(
        "fms_fsdp.prepare.prepare_flags:ConvertConfig",
        "fms_fsdp.prepare.convert:main",
        "convert token ids of Megatron-LM, datatrove, Parquet or Arrow into token shards",
    ),
    "inspect step": Command(
        "fms_fsdp.tools.tool_flags:StepConfig",
        "fms_fsdp.tools.inspect_command:print_step",
        "list the files, documents and tokens of any step's sequences",
    ),
    "inspect verify": Command(
        "fms_fsdp.tools.tool_flags:VerifyConfig",
        "fms_fsdp.tools.inspect_command:verify",
        "check every shard against its recorded counts, to the last token",
    ),
    "evaluate": Command(
        "fms_fsdp.tools.tool_flags:EvaluateConfig",
        "fms_fsdp.tools.evaluate_command:main",
        "compute the held-out loss of a checkpoint, or answer questions or tasks of lm-eval",
    ),
    "generate": Command(
        "fms_fsdp.tools.tool_flags:GenerateConfig",
        "fms_fsdp.tools.generate_command:main",
        "continue a prompt with the model of a checkpoint",
    ),
    "import": Command(
        "fms_fsdp.hf.hf_flags:ImportConfig",
        "fms_fsdp.hf.import_upstream:main",
        "convert a checkpoint of upstream fms-fsdp to a Hugging Face checkpoint",
    ),
    "export": Command(
        "fms_fsdp.hf.hf_flags:ExportConfig",
        "fms_fsdp.hf.export:main",
        "write a checkpoint as a Hugging Face checkpoint",
    ),
    "ckpt list": Command(
        "fms_fsdp.tools.tool_flags:CkptListConfig",
        "fms_fsdp.tools.ckpt_command:list_checkpoints",
        "list the checkpoints of a run: size, tokens, validation loss, health",
    ),
    "ckpt verify": Command(
        "fms_fsdp.tools.tool_flags:CkptVerifyConfig",
        "fms_fsdp.tools.ckpt_command:verify_checkpoints",
        "check all files of the checkpoints against their checksums",
    ),
    "ckpt inspect": Command(
        "fms_fsdp.tools.tool_flags:CkptInspectConfig",
        "fms_fsdp.tools.tensor_stats:inspect",
        "print shape, norm and spread of every tensor of a checkpoint",
    ),
    "ckpt prune": Command(
        "fms_fsdp.tools.tool_flags:CkptPruneConfig",
        "fms_fsdp.tools.ckpt_command:prune_checkpoints",
        "delete checkpoints after a step, and unfinished or corrupt ones",
    ),
    "estimate": Command(
        "fms_fsdp.tools.tool_flags:EstimateConfig",
        "fms_fsdp.tools.estimate_command:main",
        "predict memory, speed and days of a training, or find the fastest layout",
    ),
    "translate": Command(
        "fms_fsdp.tools.translate_command:TranslateConfig",
        "fms_fsdp.tools.translate_command:main",
        "convert the configuration of another trainer into a TOML file of flags",
    ),
    "report": Command(
        "fms_fsdp.tools.tool_flags:ReportConfig",
        "fms_fsdp.tools.report_command:main",
        "write a page of curves and tables from run directories",
    ),
}
# the order in which --help lists them
GROUPS = {
    "Data": ("prepare", "convert", "inspect step", "inspect verify"),
    "Training": ("train", "estimate", "translate", "report"),
    "Checkpoints": ("ckpt list", "ckpt verify", "ckpt inspect", "ckpt prune", "import", "export"),
    "Models": ("evaluate", "generate"),
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
        print(f"error: command {command} was removed; {REMOVED[command]}", file=sys.stderr)
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
            print("stopped; run the command again", file=sys.stderr)
            return 130
    from fms_fsdp.config.parse import parse_flags

    config_type = find_flags(command)
    flags = list(argv[num_words:])
    more: dict[str, Any] = {}
    try:
        with printing():
            if command == "translate":  # the words of another program's command are not our flags
                from fms_fsdp.tools.translate_command import split_command

                flags, more["words"] = split_command(flags)
            if {"-h", "--help"} & set(flags):
                print(f"{command}: {COMMANDS[command].purpose}")
            config = parse_flags(config_type, flags, f"{CALLED} {command}")
            before_torch()
            run = find_command(command)
            gc.enable()
            run(config, **more)
    except (UserError, OSError) as error:
        if is_storage_failure(error) and isinstance(error, OSError) and error.filename is not None:
            print(f"failed: {read_failed(error.filename, error.strerror)}", file=sys.stderr)
            return 1
        if not is_for_user(error):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RunFailed as error:  # such as a storage that does not answer
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; run the command again", file=sys.stderr)
        return 130
    return 0


def find_flags(command: str) -> type[Any]:
    """Imports and returns the class that declares the flags of a command."""
    found: type[Any] = _import(COMMANDS[command].flags)
    return found


def find_command(command: str) -> Callable[..., object]:
    """Imports and returns the function of a command."""
    found: Callable[..., object] = _import(COMMANDS[command].function)
    return found


def _import(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _print_commands(argv: Sequence[str], num_words: int, listed: Sequence[str]) -> int:
    wants_help = bool(argv) and argv[-1] in ("-h", "--help", "help")
    is_whole = len(argv) >= num_words and not wants_help
    last_words = {name.split()[-1]: name for name in listed}
    near = difflib.get_close_matches(argv[num_words - 1], last_words, n=1) if is_whole else []
    if not near:
        with printing():
            print(f"usage: {CALLED} COMMAND [--flag=value …]   (COMMAND --help lists its flags)")
            if len(listed) == len(COMMANDS):
                print("A first run: `bash scripts/train.sh`. The pages: docs/README.md.")
            for group, names in GROUPS.items():
                shown = [name for name in names if name in listed]
                if shown:
                    print(f"\n{group}")
                for name in shown:
                    print(f"  {name:<15} {COMMANDS[name].purpose}")
    if is_whole:
        hint = f"did you mean {last_words[near[0]]}?" if near else f"commands: {', '.join(listed)}"
        print(
            f"error: command ({' '.join(argv[:num_words])}) does not exist; {hint}",
            file=sys.stderr,
        )
    return 0 if wants_help else 2


if __name__ == "__main__":
    sys.exit(main())
