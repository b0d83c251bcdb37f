"""Finds the flags of scripts/train.sh: presets of the quickstart, the script's, then the user's.

Usage: python -m scripts.quickstart [flags of the script] -- [flags of the user]. Prints, each with a
null character at its end, the run directory, "text" if the run reads the quickstart's text, and the
flags. A mistyped flag ends it with exit status 2. Imports no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fms_fsdp.compiler import missing_for_compilation
from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import flag_texts, parse_flags, replaced_by
from fms_fsdp.errors import UserError

MODEL = "quickstart"
OWN_DATA = ("data_path", "use_dummy_dataset", "dataset_builder")
# Flags of the script that describe its own text.
TEXT = ("data_path", "datasets", "weights", "eval_interval", "sample_interval")


def train_flags(script: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Returns the flags of a run: the presets that apply, the script's flags, the user's.

    script   flags of train.sh as --name=value; an empty value leaves the decision to the preset

    Raises:
        UserError: one of the user's flags is not valid.
    """
    given = flag_texts(TrainConfig, argv)
    if "config" in given:  # the user's file decides
        return [*argv]
    pairs = [flag.removeprefix("--").partition("=") for flag in script]
    set_by_script = {name: value for name, _, value in pairs if value}
    if reads_text(given):
        presets = ["quickstart", "quickstart_text"]
        values = set_by_script | defaults_of_text(Path(set_by_script["data_path"]), given)
    else:
        presets = [] if is_other_model({**set_by_script, **given}) else ["quickstart"]
        values = {name: value for name, value in set_by_script.items() if name not in TEXT}
        for name, value in defaults_of_own_data(given).items():
            if name in set_by_script or presets:
                values[name] = set_by_script.get(name, value)
    if "global_batch_size" in given and presets:
        # The preset's batch size need not divide the global batch.
        values.setdefault("batch_size", "none")
    replaced = {*given, *replaced_by(given, values)}
    flags = [f"--{name}={value}" for name, value in values.items() if name not in replaced]
    if presets:
        flags.insert(0, f"--config={','.join(presets)}")
    return [*flags, *argv]


def reads_text(given: Mapping[str, str]) -> bool:
    """Returns whether the flags name no data of the user's own."""
    return given.keys().isdisjoint(("config", *OWN_DATA))


def is_other_model(given: Mapping[str, str]) -> bool:
    """Returns whether the flags name another model than the quickstart's."""
    if not given.keys().isdisjoint(("init_from_hf", "hf_config")):
        return True
    return given.get("model_variant", MODEL) != MODEL


def defaults_of_text(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Returns what the machine, and the text if it is there, change in the presets."""
    values = dict[str, str]()
    is_prepared = (folder / "meta/counts.csv").is_file()
    if is_prepared and not (folder / "tokenizer.model").is_file():  # samples need a tokenizer
        values["sample_interval"] = "0"
    if "sample_interval" in values or "sample_interval" in given:
        values["sample_prompts"] = ""
    if not missing_here():
        values["use_torch_compile"] = "True"
    return values


def defaults_of_own_data(given: Mapping[str, str]) -> dict[str, str]:
    """Returns the intervals of evaluation and samples, where the data have what they need."""
    values = dict[str, str]()
    if "data_path" in given:
        folder = Path(given["data_path"]).expanduser()
        if (folder / "validation").is_dir():
            values["eval_interval"] = "175"
        if (folder / "tokenizer.model").is_file():
            values["sample_interval"] = "350"
    return values


def missing_here() -> str:
    """Returns why torch.compile would fail on this machine's CPU or GPU; "" if nothing is missing."""
    return missing_for_compilation("cpu") or missing_for_compilation("cuda")


def find_run(flags: Sequence[str], name: str) -> tuple[str, list[str]]:
    """Returns the run directory and the flags; `name` names the run unless a flag or a file does.

    Raises:
        UserError: a flag or the name is not valid.
    """
    config = parse_flags(TrainConfig, flags)
    if not name or config.log.output_dir:
        return config.output_dir, [*flags]
    if not config.log.run_name:
        try:
            config = parse_flags(TrainConfig, [*flags, f"--run_name={name}"])
        except UserError as error:
            raise UserError(str(error).replace("--run_name", "RUN_NAME")) from error
    return config.output_dir, [*flags, f"--output_dir={config.output_dir}"]


def main(argv: Sequence[str]) -> int:
    """Prints the run directory, whether the text is read, and the flags."""
    end = argv.index("--")
    script, argv = argv[:end], argv[end + 1 :]
    try:
        flags = train_flags(script, argv)
        folder, flags = find_run(flags, os.environ.get("RUN_NAME", ""))
        given = flag_texts(TrainConfig, argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if reads_text(given) and "use_torch_compile" not in given and missing_here():
        print(f"train.sh: note: blocks are not compiled: {missing_here()}", file=sys.stderr)
    for text in (folder, "text" if reads_text(given) else "", *flags):
        print(text, end="\0")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
