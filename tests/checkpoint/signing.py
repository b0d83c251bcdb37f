"""Makes a checkpoint whole again, after a test has changed its files."""

from __future__ import annotations

from pathlib import Path

from fms_fsdp.checkpoint.folders import FILES, Checksum, render_files


def sign(folder: Path, **others: tuple[int, int]) -> None:
    """Writes a files.json that says what lies in the folder, and `others` (size and checksum) that do not."""
    found = dict[str, tuple[int, int]]()
    for path in folder.iterdir():
        if path.name != FILES:
            total, content = Checksum(), path.read_bytes()
            total.update(content)
            found[path.name] = len(content), total.value
    (folder / FILES).write_text(render_files(found | others))
