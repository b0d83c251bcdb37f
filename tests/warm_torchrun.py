"""torchrun whose workers are forks of a process that has imported the program.

    python -m tests.warm_torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node=2 main_training.py …

The agent, its store, its restarts and the variables of the workers are torchrun's own.
"""

from __future__ import annotations

import os
import sys
import uuid

from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

import tests.warm  # noqa: F401 - says what the process that is forked has imported


def train(*flags: str) -> None:
    """In a worker: one launch of the program, which ends the process with its exit status."""
    import torch

    import main_training

    torch.set_num_threads(1)
    sys.argv = ["main_training.py", *flags]
    status = main_training.main(list(flags))
    sys.stdout.flush()
    if status:
        os._exit(status)


def main(argv: list[str]) -> None:
    """Runs the workers; raises ChildFailedError where they fail more often than `--max-restarts` allows."""
    args = parse_args(argv)
    if args.standalone:
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = (
            "c10d",
            "localhost:0",
            str(uuid.uuid4()),
        )
    config, _, (_, script, *flags) = config_from_args(args)
    assert script == "main_training.py", script
    config.start_method = "forkserver"
    elastic_launch(config, train)(*flags)


if __name__ == "__main__":
    main(sys.argv[1:])
