"""Command lines keep their verdicts, their values and their default run names."""

from __future__ import annotations

import json
import lzma
from collections.abc import Collection, Sequence

from fms_fsdp.config.train_config import other_programs
from tests.config.command_lines import RECORD, answer, command_lines

# Reason -> command lines that may be accepted or rejected other than recorded. Values and default
# run names may never differ.
ALLOWED: dict[str, tuple[str, ...]] = {
    "--help says that the flag has no effect": (
        "--stochastic_rounding=0",
        "--nostochastic_rounding",
        "--stochastic_rounding=False",
        "--fsdp_prefetch=1 --sharding_strategy=ddp",
        "--reduce_dtype=bf16 --sharding_strategy=none",
        "--adam_beta1=0.5 --optimizer=sgd",
        "--weight_decay=0.2 --optimizer=rprop",
        "--min_lr=1e-9 --lr_schedule=constant",
        "--checkpoint_interval=5 --checkpoint_schedule=3@9",
        "--loss_scale_window=3 --precision=fp16 --loss_scale=4",
        "--load_model_only --ckpt_load_path=a --resuming_dataset=False",
        "--init_std=0.1 --init_from_hf=a",
        "--pp_virtual_stages=3 --pp_size=2",
    ),
    "one process is not divisible by the size of the axis": (
        "--sharding_strategy=none --tp_size=2",
    ),
    "a model has at most 100,000 blocks": ("--num_layers=1e6",),
    "BLOOM pads its vocabulary to a multiple of 250,880": ("--vocab_multiple_of=1e6",),
    "any number of logical shards is accepted": (
        "--logical_shards=1.5k",
        "--logical_shards=1e6",
        "--logical-shards 3",
        "--logical_shards=1000 --data_path=x",
    ),
    "the schedule rejects it": ("--warmup_steps=3 --num_steps=2",),
    "the form is checked with the flags, not with the machine": (
        "--optimizer=every:4",
        "--optimizer=10:20",
        "--optimizer=1-100:10,200-",
        "--optimizer=wiki:2",
        "--rampup_batch_size=1",
        "--rampup_batch_size=2",
        "--rampup_batch_size=1.5k",
        "--rampup_batch_size=4Ki",
        "--rampup_batch_size=1e6",
        "--rampup-batch-size 3",
    ),
}


def names_removed(line: Sequence[str], removed: Collection[str]) -> bool:
    """Returns whether a word of the command line is a removed flag."""
    names = (word.partition("=")[0].lstrip("-").replace("-", "_") for word in line)
    return any(name in removed or name.removeprefix("no") in removed for name in names)


def test_command_lines_keep_their_meaning() -> None:
    content = json.loads(lzma.decompress(RECORD.read_bytes()))
    removed = other_programs()["removed_defaults"].keys()
    defaults = {name: v for name, v in content["defaults"].items() if name not in removed}
    differing, used = [], set[str]()
    lines = command_lines(content["own_texts"])
    for line, expected in zip(lines, content["answers"], strict=True):
        found = answer(line)
        if isinstance(found, str) or expected is None:
            if isinstance(found, str) and expected is None:
                assert found.isprintable(), line
                continue
            if isinstance(found, str) and names_removed(line, removed):
                assert "it was removed" in found, line
                continue
            reasons = [reason for reason, allows in ALLOWED.items() if " ".join(line) in allows]
            used.update(reasons)
            if not reasons:
                differing.append((line, found if isinstance(found, str) else "accepted"))
            continue
        changed, run_name = expected
        assert not names_removed(line, removed), line
        values = {name: value for name, value in found[0].items() if name in defaults}
        if (values, found[1]) != ({**defaults, **changed}, run_name):
            differing.append((line, f"{run_name} is now {found[1]}"))
    assert not differing, "\n".join(map(str, differing[:50]))
    assert used == ALLOWED.keys(), "remove the reasons that no command line needs"
