"""JSON files, and writes of files and folders that a reader sees complete or not at all. Standard library
only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Replaces the file in one step. `sync`: the new content also survives a power failure.

    Raises:
        OSError: the folder cannot be written, or the disk is full; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file; {} where the file is missing or no such file."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: Any) -> None:
    """Writes indented JSON, atomically and synced to disk."""
    write_atomically(path, json.dumps(content, indent=1) + "\n", sync=True)
