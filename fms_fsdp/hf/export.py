"""`python -m fms_fsdp export`: writes a checkpoint as a Hugging Face checkpoint."""

from __future__ import annotations

import json
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
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
from fms_fsdp.checkpoint.run_results import (
    checkpoint_data,
    is_rank0,
    recorded_tokenizer,
    require_checkpoint,
)
from fms_fsdp.config.flag import flag_values
from fms_fsdp.config.values import typed
from fms_fsdp.console import rewrite_line
from fms_fsdp.data.kept_tokenizer import read_kept_file, shards_bos_id
from fms_fsdp.errors import UserError
from fms_fsdp.files import check_output_is_new, write_folder
from fms_fsdp.hf.chat import (
    CHAT_FILE,
    NO_CHAT,
    ChatSettings,
    merged,
    parse_chat_settings,
    read_chat_settings,
)
from fms_fsdp.hf.families import config_to_hf
from fms_fsdp.hf.hf_flags import ExportConfig
from fms_fsdp.hf.hf_tokenizer import export_tokenizer
from fms_fsdp.hf.weights import fuse, save_weights, weight_map
from fms_fsdp.models.flops import num_params
from fms_fsdp.parallel.dtypes import DTYPES
from fms_fsdp.process import keep_freed_memory

_CARD = """\
---
license: unknown  # fill in
pipeline_tag: text-generation
---

Pretrained with fms_fsdp. The values below are from the checkpoint.

| | |
|---|---|
"""


def main(config: ExportConfig) -> None:
    """Exports into a temporary folder and renames it when it is complete.

    Raises:
        UserError: no valid checkpoint, a model that no Hugging Face family has, an existing --output.
        OSError: the output cannot be written.
    """
    if not is_rank0():  # under torchrun one process exports
        return
    keep_freed_memory()
    read_checkpoint(
        lambda: require_checkpoint(config.path, config.step, "--path"), partial(_export, config)
    )


def _export(config: ExportConfig, checkpoint: Checkpoint) -> None:
    if not checkpoint.metadata.is_healthy:
        raise UserError(
            f"{checkpoint.folder} {describe_health(checkpoint.metadata)}, so its weights are "
            "useless; set --step to an earlier one of `python -m fms_fsdp ckpt list`"
        )
    output = Path(config.output).expanduser()
    model = checkpoint.metadata.run.model
    weights = weight_map(model)
    check_output_is_new(output)
    shapes = {name: weight.shape for name, weight in weights.items()}
    numbers = {name: number for number, name in enumerate(weights, 1)}
    max_bytes = int(config.max_shard_gb * 1e9)
    with write_folder(output) as partial_folder, ThreadPoolExecutor(1) as pool:
        check = pool.submit(corrupt_files, checkpoint.folder)
        try:
            reader = CheckpointReader(checkpoint.folder)

            def read_ours(name: str) -> torch.Tensor:
                return load_tensor(reader, f"model.{name}")

            def read(name: str) -> torch.Tensor:
                rewrite_line(f"{numbers[name]} of {len(weights)} weights")
                return fuse(model, weights[name].ours, read_ours)

            save_weights(partial_folder, shapes, DTYPES[config.dtype], max_bytes, read)
            rewrite_line("")
            note = _write_description(checkpoint, partial_folder, config.dtype)
        finally:  # whatever fails on a corrupt checkpoint is reported as corruption
            wrong = check.result()
            if wrong:
                raise CorruptCheckpoint(checkpoint.folder, wrong[0])
    if note:
        print(f"note: {note}", file=sys.stderr)
    print(f"{output}: step {checkpoint.step}, {config.dtype}")


def _write_description(checkpoint: Checkpoint, folder: Path, dtype: str) -> str:
    """Writes model card, config.json and tokenizer; returns a note for the user."""
    model = checkpoint.metadata.run.model
    torch_dtype = str(DTYPES[dtype]).removeprefix("torch.")
    card = _card(checkpoint).encode(errors="backslashreplace")  # a path may not be UTF-8
    (folder / "README.md").write_bytes(card)
    tokenizer = recorded_tokenizer(checkpoint)
    generation: dict[str, Any] = {"eos_token_id": None, "do_sample": True}
    if tokenizer is None:
        _write_json(folder / "config.json", config_to_hf(model, torch_dtype))
        _write_json(folder / "generation_config.json", generation)
        return "the data of the training have no tokenizer: none was exported"
    bos_id = shards_bos_id(checkpoint_data(checkpoint), tokenizer)
    chat = _chat_settings(checkpoint)
    config = config_to_hf(model, torch_dtype, tokenizer.vocabulary.eos_id, bos_id)
    _write_json(folder / "config.json", config)
    generation |= chat.generation_settings(tokenizer)
    _write_json(folder / "generation_config.json", generation)
    wrong = export_tokenizer(tokenizer, folder, model.max_seq_len, bos_id, chat)
    return "; ".join(filter(None, (wrong, chat.note(tokenizer))))


def _chat_settings(checkpoint: Checkpoint) -> ChatSettings:
    """Returns the chat settings of the data's tokenizer, and of the model the run started from."""
    root = checkpoint_data(checkpoint)
    data = read_kept_file(root, CHAT_FILE)
    kept = NO_CHAT if data is None else parse_chat_settings(data, f"{root}/{CHAT_FILE}")
    start = checkpoint.metadata.run.located.model.init_from_hf
    if not start:
        return kept
    return merged(kept, read_chat_settings(Path(start)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _card(checkpoint: Checkpoint) -> str:
    """Returns the model card: the checkpoint's record of its training."""
    saved = checkpoint.metadata
    record = checkpoint.metadata.run
    data = record.config.data
    facts: dict[str, object] = {
        "step": saved.step,
        "tokens seen": saved.tokens_seen,
        "parameters": num_params(record.model),
        "context": record.model.max_seq_len,
        "validation loss": saved.validation_loss,
        "data": data.data_path,
        "sources": list(data.datasets) or "all",
        "weights": list(data.weights) or "by size",
    }
    for name, version in record.versions.items():
        facts[f"version of {name}"] = version
    facts["digest of the tokenizer"] = record.tokenizer or None
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value is not None)
    values = flag_values(record.config)
    flags = "\n".join(shlex.quote(f"--{name}={typed(value)}") for name, value in values.items())
    return f"{_CARD}{rows}\n\nAll flags of the training:\n\n```text\n{flags}\n```\n"
