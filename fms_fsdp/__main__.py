"""Dispatch of the commands beside training: `python -m fms_fsdp COMMAND --flag=value …`, each with its own `--help`.

Exit statuses: 0 done, 2 bad input (one line on stderr), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# command, of one word or two → (module, its dataclass of flags, what it does); the module's `main(config)` runs it and is imported only then
COMMANDS = {
    "prepare": (
        "fms_fsdp.tools.prepare.prepare",
        "PrepareConfig",
        "text, source code, JSON lines, Parquet → token shards",
    ),
    "convert": (
        "fms_fsdp.tools.prepare.convert",
        "ConvertConfig",
        "token ids of Megatron-LM, datatrove, Parquet, Arrow → token shards",
    ),
    "inspect plan": (
        "fms_fsdp.tools.inspect.plan",
        "PlanConfig",
        "tokens and epochs of each source by step N, a picture",
    ),
    "inspect step": (
        "fms_fsdp.tools.inspect.step",
        "StepConfig",
        "files, documents and tokens in the rows of any step",
    ),
    "inspect find": ("fms_fsdp.tools.inspect.find", "FindConfig", "when a document was or will be seen"),
    "inspect verify": (
        "fms_fsdp.tools.inspect.verify",
        "VerifyConfig",
        "every shard against the counts, to its last token",
    ),
    "trace": ("fms_fsdp.tools.trace", "TraceConfig", "where the time of a profiler trace went, as a table"),
    "evaluate": ("fms_fsdp.evaluate", "EvaluateConfig", "loss, perplexity and bits per byte of a checkpoint"),
    "ckpt list": ("fms_fsdp.tools.ckpt", "ListConfig", "the checkpoints of a run: size, tokens, health"),
    "ckpt verify": ("fms_fsdp.tools.ckpt", "VerifyConfig", "every byte against its checksum"),
    "ckpt prune": (
        "fms_fsdp.tools.ckpt",
        "PruneConfig",
        "delete what need not be kept; a dry run by default",
    ),
    "estimate": ("fms_fsdp.tools.estimate", "EstimateConfig", "how long a training will take, as a range"),
    "report": ("fms_fsdp.tools.report.page", "ReportConfig", "a page of curves and tables from run folders"),
}


def main(argv: Sequence[str]) -> int:
    """Runs one command; returns its exit status."""
    group = argv[0] if argv else ""
    num_words = 2 if any(name.startswith(f"{group} ") for name in COMMANDS) else 1
    command = " ".join(argv[:num_words])
    if command not in COMMANDS:
        listed = [name for name in COMMANDS if num_words == 2 and name.startswith(f"{group} ")] or list(
            COMMANDS
        )
        listing = "\n".join(f"  {name:<15} {COMMANDS[name][2]}" for name in listed)
        print(
            f"usage: python -m fms_fsdp COMMAND [--flag=value …]   (COMMAND --help lists its flags)\n{listing}"
        )
        if argv and argv[-1] in ("-h", "--help", "help"):
            return 0
        if len(argv) < num_words:
            return 2
        print(f"fms_fsdp: command ({command}) does not exist; commands: {', '.join(listed)}", file=sys.stderr)
        return 2
    from fms_fsdp.flags import parse_flags

    module = importlib.import_module(COMMANDS[command][0])
    try:
        config = parse_flags(
            getattr(module, COMMANDS[command][1]), argv[num_words:], f"python -m fms_fsdp {command}"
        )
        module.main(config)
    except (ValueError, OSError) as error:
        print(f"{command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{command}: stopped; start it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
