"""The run folder: everything a run writes, under one path.

config.json (the latest launch) · config.<attempt>.json (each launch) · status.json · metrics.jsonl · log.txt · tensorboard/ · checkpoints/ · profile_traces/
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fms_fsdp.runtime import agree_on, log, log_to_file
from fms_fsdp.status import write_atomically


def open_run_folder(folder: Path, config: dict[str, Any], resolved: dict[str, Any], rank: int) -> int:
    """Makes the folder on rank 0, records this launch in it and returns its number, from 1 (collective: every rank)."""
    attempt = 0
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [re.fullmatch(r"config\.(\d+)\.json", path.name) for path in folder.iterdir()]
        attempt = 1 + max((int(match[1]) for match in numbers if match), default=0)
        text = json.dumps({**config, "resolved": resolved}, indent=1) + "\n"
        for name in (f"config.{attempt}.json", "config.json"):
            write_atomically(folder / name, text)
        log_to_file(folder / "log.txt")
        log.info("run folder %s (attempt %d)", folder, attempt)
    return agree_on(attempt)
