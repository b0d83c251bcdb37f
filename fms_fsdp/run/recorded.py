"""The configuration that a run recorded, readable from any working folder.

Paths are recorded as they were typed, with the working folder of the launch beside them
(`resolved.working_dir`). Readers join the two. Links are not resolved: the user
may move what a link names. URIs, absolute paths and `~` stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.config import TrainConfig, flag_table, from_dict
from fms_fsdp.data.kept_tokenizer import UsedTokenizer, of_folder

_PATHS = {name for name, row in flag_table(TrainConfig).items() if row.form == "path"}


def working_folder() -> str:
    """Returns the working folder as the user's shell names it, links and all."""
    shell = os.environ.get("PWD", "")
    is_here = os.path.isabs(shell) and os.path.isdir(shell) and os.path.samefile(shell, ".")
    return shell if is_here else os.getcwd()


def recorded_sections(config: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the sections of a recorded configuration, their paths joined to the run's working folder."""
    sections = {}
    for name, section in config.items():
        if name != "resolved" and isinstance(section, dict):
            paths = _PATHS & section.keys()
            joined = {path: _joined(resolved.get("working_dir", ""), section[path]) for path in paths}
            sections[name] = section | joined
    return sections


def recorded_config(config: Mapping[str, Any], resolved: Mapping[str, Any]) -> TrainConfig:
    """Returns a recorded configuration with its paths joined to the run's working folder."""
    return from_dict(recorded_sections(config, resolved))


def data_of(checkpoint: Checkpoint) -> str:
    """Where the data lie that the checkpoint was trained on; "" for synthetic ones."""
    state = checkpoint.state
    return recorded_config(state["config"], state["resolved"]).data.data_path


def trained_with(checkpoint: Checkpoint) -> UsedTokenizer:
    """The tokenizer of the data that the checkpoint was trained on."""
    digest = str(checkpoint.state["resolved"].get("tokenizer", ""))
    return of_folder(f"the checkpoint {checkpoint.folder}", digest, data_of(checkpoint))


def _joined(start: str, path: Any) -> Any:
    stays = not isinstance(path, str) or not path or "://" in path or path.startswith("~")
    return path if stays else os.path.join(start, path)
