"""Dispatch of the commands beside training: `python -m fms_fsdp COMMAND --flag=value …`, each with its own `--help`.

Exit statuses: 0 done, 2 bad input (one line on stderr), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# command → (module, its dataclass of flags, what it does); the module's `main(config)` runs it and is imported only then
COMMANDS = {
    "prepare": ("fms_fsdp.data.prepare", "PrepareConfig", "text, source code, JSON lines, Parquet → token shards"),
    "convert": (
        "fms_fsdp.data.convert",
        "ConvertConfig",
        "token ids of Megatron-LM, datatrove, Parquet, Arrow → token shards",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Runs one command; returns its exit status."""
    command = argv[0] if argv else ""
    if command not in COMMANDS:
        listing = "\n".join(f"  {name:<10} {about}" for name, (_, _, about) in COMMANDS.items())
        print(f"usage: python -m fms_fsdp COMMAND [--flag=value …]   (COMMAND --help lists its flags)\n{listing}")
        if command in ("", "-h", "--help", "help"):
            return 0 if command else 2
        print(f"fms_fsdp: command ({command}) does not exist; commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    from fms_fsdp.flags import parse_flags

    module = importlib.import_module(COMMANDS[command][0])
    try:
        config = parse_flags(getattr(module, COMMANDS[command][1]), argv[1:], f"python -m fms_fsdp {command}")
        module.main(config)
    except (ValueError, OSError) as error:
        print(f"{command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{command}: stopped; the same command goes on where it was", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
