"""`python -m fms_fsdp export`: a checkpoint of any layout → a folder that Hugging Face's programs load."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fms_fsdp.checkpoint.folders import (
    Checkpoint,
    CorruptCheckpoint,
    corrupt_files,
    describe_health,
    read_checkpoint,
)
from fms_fsdp.checkpoint.io import CheckpointReader, load_tensor
from fms_fsdp.config import flag
from fms_fsdp.config.flag import flag_values
from fms_fsdp.config.values import format_bytes, typed
from fms_fsdp.cpu_tuning import keep_freed_memory
from fms_fsdp.errors import UserError
from fms_fsdp.extras.hf import find_family, hf_config, hf_weights
from fms_fsdp.extras.hf_tokenizer import TOKENIZER_FILES
from fms_fsdp.extras.text_rules import begin_token
from fms_fsdp.extras.typed_json import read_table
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import num_params
from fms_fsdp.run.resume import checkpoint_data
from fms_fsdp.run.trained_run import find_checkpoint, is_rank0, kept_originals, recorded_tokenizer
from fms_fsdp.tools.export.safetensors import DTYPES, write_tensors
from fms_fsdp.tools.export.tokenizer_check import find_differences
from fms_fsdp.tools.export.tokenizers import write_tokenizer
from fms_fsdp.tools.table import show_progress
from fms_fsdp.tools.whole_folder import check_is_free, whole_folder

_CARD = """\
---
license: unknown  # fill in
pipeline_tag: text-generation
---

Pretrained with fms_fsdp; weights and configuration are those of its checkpoint.

| | |
|---|---|
"""


@dataclass(frozen=True)
class ExportConfig:
    """Which checkpoint to export, and how to write the folder."""

    path: str = flag(
        "",
        "a run folder, a folder of checkpoints or one checkpoint (of several, the newest)",
        form="path",
    )
    step: int | None = flag(None, "the checkpoint of this step", min=1)
    output: str = flag("", "the folder to make", form="path")
    dtype: str = flag("bf16", "type of the weights", choices=tuple(DTYPES))
    max_shard_gb: float = flag(5.0, "largest size of a weight file, in 10^9 bytes", above=0)

    def __post_init__(self) -> None:
        if not self.output:
            raise UserError("--output is missing; name the folder to make")


def main(config: ExportConfig) -> None:
    """Writes the folder beside its place and moves it there when it is whole.

    Raises:
        UserError: no sound checkpoint, a model that the format cannot hold, a place that is taken.
        OSError: it cannot be written.
    """
    if not is_rank0():  # under torchrun one process exports
        return
    keep_freed_memory()
    read_checkpoint(
        lambda: find_checkpoint(config.path, config.step, "--path"), partial(_export, config)
    )


def _export(config: ExportConfig, checkpoint: Checkpoint) -> None:
    if not checkpoint.metadata.is_healthy:
        raise UserError(
            f"{checkpoint.folder} {describe_health(checkpoint.metadata)}, so its weights are "
            "useless; set --step to an earlier one of `python -m fms_fsdp ckpt list`"
        )
    output = Path(config.output).expanduser()
    model = checkpoint.metadata.run.model
    find_family(model)
    check_is_free(output)
    with whole_folder(output) as unfinished, ThreadPoolExecutor(1) as pool:
        check = pool.submit(corrupt_files, checkpoint.folder)
        try:
            notes = _write(config, checkpoint, model, unfinished)
        finally:  # what fails on a damaged checkpoint is told as damage
            if wrong := check.result():
                raise CorruptCheckpoint(checkpoint.folder, wrong[0])
    for note in filter(None, notes):
        print(f"note: {note}", file=sys.stderr)
    print(f"{output}: step {checkpoint.step}, {config.dtype}")


def _write(
    config: ExportConfig, checkpoint: Checkpoint, model: TransformerConfig, folder: Path
) -> list[str]:
    """Fills the folder; returns what the user should know of it."""
    theirs, reader = hf_weights(model), CheckpointReader(checkpoint.folder)
    shapes = {name: each.shape for name, each in theirs.items()}
    dtype, num_bytes = DTYPES[config.dtype], sum(shape.numel() for shape in shapes.values())
    if (free := shutil.disk_usage(folder).free) < num_bytes * dtype.itemsize:
        needed = format_bytes(num_bytes * dtype.itemsize)
        raise UserError(
            f"--output={config.output} must have {needed} of free space, but {format_bytes(free)} "
            "are free; choose another folder"
        )

    def read(name: str) -> torch.Tensor:
        return theirs[name].made_of(lambda part: load_tensor(reader, f"model.{part}"))

    most = int(config.max_shard_gb * 1e9)
    for number, _ in enumerate(write_tensors(folder, shapes, dtype, most, read), 1):
        show_progress(f"{number} of {len(shapes)} weights")
    show_progress("")
    of_torch = str(dtype).removeprefix("torch.")
    (folder / "README.md").write_text(_card(checkpoint, model))
    tokenizer = recorded_tokenizer(checkpoint)
    if (originals := kept_originals(checkpoint)) is not None:
        said = read_table(originals / "config.json")
        begin, end = said.get("bos_token_id"), said.get("eos_token_id")
        _write_json(folder / "config.json", hf_config(model, of_torch, end, begin))
        for path in (originals / name for name in TOKENIZER_FILES if (originals / name).is_file()):
            shutil.copyfile(path, folder / path.name)
        return []
    eos_id = tokenizer.vocabulary.eos_id if tokenizer is not None else None
    begin = begin_token(checkpoint_data(checkpoint), tokenizer) if tokenizer is not None else None
    _write_json(folder / "config.json", hf_config(model, of_torch, eos_id, begin))
    _write_json(folder / "generation_config.json", {"eos_token_id": eos_id, "do_sample": True})
    if tokenizer is None:
        return ["no tokenizer lies beside the data of the training: the folder has none"]
    is_read = write_tokenizer(tokenizer, folder, model.max_seq_len, begin)
    if not is_read:
        return ["tokenizer.json has no such kind of sentencepiece: tokenizer.model is there alone"]
    return find_differences(tokenizer, folder, () if begin is None else (begin,))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _card(checkpoint: Checkpoint, model: TransformerConfig) -> str:
    """The model card: what the checkpoint says of its training."""
    saved, record = checkpoint.metadata, checkpoint.metadata.run
    data = record.config.data
    facts: dict[str, object] = {"step": saved.step, "tokens seen": saved.tokens_seen}
    facts |= {"parameters": num_params(model), "context": model.max_seq_len}
    facts |= {"validation loss": saved.validation_loss, "data": data.data_path}
    facts |= {"sources": list(data.datasets) or "all", "weights": list(data.weights) or "by size"}
    facts |= {f"version of {name}": text for name, text in record.versions.items()}
    facts |= {"digest of the tokenizer": record.tokenizer or None}
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value is not None)
    flags = "\n".join(
        shlex.quote(f"--{name}={typed(value)}")
        for name, value in flag_values(record.config).items()
    )
    return f"{_CARD}{rows}\n\nAll flags of the training:\n\n```text\n{flags}\n```\n"
