"""An evaluation of a sharded model leaves it as it was: sharded."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.tensor import DTensor

from fms_fsdp.config import FP32, DataConfig, EvalConfig, ParallelConfig
from fms_fsdp.data.validation import open_held_out, scan_held_out
from fms_fsdp.errors import ReadFailed
from fms_fsdp.evaluate import evaluate
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.parallel.parallelize import parallelize
from tests.data.corpora import SEP, VOCAB, write_corpus
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import mesh_of


def evaluated() -> tuple[list[str], bool, float]:
    """Names of parameters that are whole after an evaluation, the mode the model is left in, and the loss."""
    section = ParallelConfig(sharding_strategy="fsdp", reshard_after_forward=False)
    mesh, cpu = mesh_of(section), torch.device("cpu")
    config = TransformerConfig(2, 32, 32, 2, 1, 64, max_seq_len=16)
    model = parallelize(config, section, mesh, device=cpu, precision=FP32, seed=1)
    data = DataConfig(use_dummy_dataset=True, seq_length=16)
    flags = EvalConfig(eval_interval=1, eval_steps=5)
    sources = open_held_out(flags, scan_held_out(flags, data, None, vocab_size=64), 1)
    values = evaluate(model, sources, batch_size=2, document_mask=False, device=cpu, mesh=mesh)
    whole = [
        name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)
    ]
    return whole, model.training, values["eval/loss"]


def unreadable() -> str:
    """The error of an evaluation whose rows the second rank cannot read."""
    mesh, cpu = mesh_of(ParallelConfig(sharding_strategy="ddp")), torch.device("cpu")
    config = TransformerConfig(2, 32, 32, 2, 1, 64, max_seq_len=16)
    section = ParallelConfig(sharding_strategy="ddp")
    model = parallelize(config, section, mesh, device=cpu, precision=FP32, seed=1)
    data = DataConfig(use_dummy_dataset=True, seq_length=16)
    flags = EvalConfig(eval_interval=1, eval_steps=5)
    sources = open_held_out(flags, scan_held_out(flags, data, None, vocab_size=64), 1)

    def fail(step: int) -> NoReturn:
        raise ReadFailed("shard-00000.arrow cannot be read")

    if mesh.axis_rank("dp") == 1:
        for source in sources:
            source.stream.batch_at = fail  # type: ignore[method-assign]
    try:
        evaluate(model, sources, batch_size=2, document_mask=False, device=cpu, mesh=mesh)
    except ReadFailed as error:
        return str(error)
    return ""


def short_sources(folder: str) -> tuple[int, dict[str, float]]:
    """The forward passes of this rank for five sources of one batch each, and their values."""
    mesh, cpu = mesh_of(ParallelConfig(sharding_strategy="ddp")), torch.device("cpu")
    config = TransformerConfig(2, 32, 32, 2, 1, VOCAB, max_seq_len=16)
    section = ParallelConfig(sharding_strategy="ddp")
    model = parallelize(config, section, mesh, device=cpu, precision=FP32, seed=1)
    data = DataConfig(data_path=folder, seq_length=16, sep_token=SEP)
    flags = EvalConfig(eval_interval=1, eval_data_path=folder, eval_steps=3)
    sources = open_held_out(flags, scan_held_out(flags, data, None, vocab_size=VOCAB), 1)
    num_passes = 0

    def count(*_: object) -> None:
        nonlocal num_passes
        num_passes += 1

    model.register_forward_pre_hook(count)
    values = evaluate(model, sources, batch_size=4, document_mask=False, device=cpu, mesh=mesh)
    return num_passes, values


def test_short_sources_share_the_passes(tmp_path: Path) -> None:
    write_corpus(tmp_path, {name: [100] for name in "abcde"})
    ((num_passes, alone),) = run_ranks(short_sources, 1, str(tmp_path))
    assert num_passes == 5 and len({alone[f"eval/{name}/loss"] for name in "abcde"}) == 5
    assert run_ranks(short_sources, 2, str(tmp_path)) == [(3, alone)] * 2


def test_unreadable_rows_end_every_rank() -> None:
    """The other ranks waited for the rank in the next pass."""
    assert run_ranks(unreadable, 2) == ["rank 1: shard-00000.arrow cannot be read"] * 2


def test_weights_are_sharded_again_after_evaluation() -> None:
    first, second = run_ranks(evaluated, 2)
    assert first == second and first[:2] == ([], True) and 3 < first[2] < 6
