"""The Python part of scripts/train.sh: finds the flags, prepares the text, trains, prints the results.

Usage: python -m scripts.quickstart [flags of the script] -- [flags of the user]. The flags of a run
are the presets of the quickstart, then the script's, then the user's. A wrong flag ends it with
exit status 2 before any work. Imports no torch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fms_fsdp import launch
from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import flag_texts, parse, parse_flags, replaced_by
from fms_fsdp.console import printing
from fms_fsdp.errors import UserError, is_for_user
from scripts.quickstart_text import prepare_text
from scripts.results import Stopwatch, print_results

MODELS = ("quickstart_2m", "quickstart")  # the second was its model before
QUESTIONS = ("--help", "-h", "--version", "--list_variants", "--list-variants")
OWN_DATA = ("data_path", "use_dummy_dataset", "dataset_builder")
# Flags of the script that describe its own text.
TEXT = ("data_path", "datasets", "weights", "eval_interval", "sample_interval")


def train_flags(script: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Returns the flags of a run: the presets that apply, the script's flags, the user's.

    script   flags of train.sh as --name=value

    Raises:
        UserError: one of the user's flags is not valid.
    """
    given = flag_texts(TrainConfig, argv)
    if "config" in given:  # the user's file decides
        return [*argv]
    set_by_script = flag_texts(TrainConfig, script)
    if reads_text(given):
        presets = ["quickstart", "quickstart_text"]
        values = set_by_script | defaults_of_text(Path(set_by_script["data_path"]), given)
    else:
        presets = [] if is_other_model({**set_by_script, **given}) else ["quickstart"]
        values = {name: value for name, value in set_by_script.items() if name not in TEXT}
        for name, value in defaults_of_own_data(given).items():
            if name in set_by_script or presets:
                values[name] = set_by_script.get(name, value)
    if presets and is_other_model({**set_by_script, **given}):
        # The preset does not compile, because its model is small; the program decides.
        values.setdefault("use_torch_compile", "none")
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
    return given.get("model_variant", MODELS[0]) not in MODELS


def defaults_of_text(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Returns what the text, if it is there, changes in the presets."""
    values = dict[str, str]()
    is_prepared = (folder / "meta/counts.csv").is_file()
    if is_prepared and not (folder / "tokenizer.model").is_file():  # samples need a tokenizer
        values["sample_interval"] = "0"
    if "sample_interval" in values or "sample_interval" in given:
        values["sample_prompts"] = ""
    return values


def defaults_of_own_data(given: Mapping[str, str]) -> dict[str, str]:
    """Returns the intervals of evaluation and samples, where the data have what they need."""
    values = dict[str, str]()
    if "data_path" in given:
        folder = Path(given["data_path"]).expanduser()
        if (folder / "validation").is_dir():
            values["eval_interval"] = "130"
        if (folder / "tokenizer.model").is_file():
            values["sample_interval"] = "195"
    return values


def find_run(flags: Sequence[str], name: str) -> tuple[list[str], Path]:
    """Returns flags and run directory; `name` names the run unless a flag or a file does.

    Raises:
        UserError: a flag or the name is not valid.
    """
    config = parse_flags(TrainConfig, flags)
    if not name or config.log.output_dir:
        return [*flags], Path(config.output_dir)
    if not config.log.run_name:
        try:
            config = parse_flags(TrainConfig, [*flags, f"--run_name={name}"])
        except UserError as error:
            raise UserError(str(error).replace("--run_name", "RUN_NAME")) from error
    return [*flags, f"--output_dir={config.output_dir}"], Path(config.output_dir)


def train(script: Sequence[str], argv: Sequence[str]) -> int:
    """Trains with the flags of the script and of the user; returns the exit status of the launch.

    Raises:
        UserError: a flag or a variable is not valid, or the text could not be prepared.
    """
    stopwatch = Stopwatch()
    stopwatch.end_part("environment")
    flags, folder = find_run(train_flags(script, argv), os.environ.get("RUN_NAME", ""))
    given = flag_texts(TrainConfig, argv)
    data_dir = flag_texts(TrainConfig, script)["data_path"]
    # A login node has neither the GPUs nor the nodes of the training.
    only_prepares = bool(os.environ.get("PREPARE_ONLY"))
    nodes = launch.Nodes(num_ranks=1)
    if not only_prepares:
        nodes = launch.read_nodes(os.environ, launch.count_gpus(os.environ))

    if reads_text(given):
        prepare_text(Path(data_dir))
    stopwatch.end_part("text")
    if only_prepares:
        print(folder)
        return launch.FINISHED

    status = launch.train(nodes, flags, folder)
    stopwatch.end_part("training")
    is_dry_run = parse(TrainConfig, flags).dry_run
    if status == launch.FINISHED and nodes.is_host and not is_dry_run:
        # The training has ended: signals end this process again.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        with printing():
            print_results(folder, data_dir, given, stopwatch)
    return status


def main(argv: Sequence[str]) -> int:
    """Trains, or answers --help and the like; returns the exit status."""
    end = argv.index("--")
    script = [flag for flag in argv[:end] if not flag.endswith("=")]
    argv = argv[end + 1 :]
    for word in argv:
        if word.partition("=")[0] in QUESTIONS:
            os.execv(sys.executable, [sys.executable, "main_training.py", word])
    try:
        return train(script, argv)
    except (UserError, OSError) as error:
        if not is_for_user(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return launch.BAD_INPUT
    except KeyboardInterrupt:  # before the training has started
        launch.say("stopped; run the command again")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
