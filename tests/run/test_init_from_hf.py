"""Runs that begin with the weights of a Hugging Face checkpoint, or with its shape alone."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fms_fsdp
from fms_fsdp.config import FP32, ModelConfig, ParallelConfig, TrainConfig
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.errors import ReadFailed, UserError
from fms_fsdp.hf import weights
from fms_fsdp.hf.weights import load_weights
from fms_fsdp.models.build import build_model
from fms_fsdp.models.init import clean_name
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.parallel import parallelize as parallelize_module
from fms_fsdp.parallel.parallelize import parallelize
from tests.cli import losses, run, trained
from tests.distributed.launch import run_ranks
from tests.hf.test_import import FOLDERS, their_model
from tests.warm import launch

FLAGS = ("--use_dummy_dataset=True", "--seq_length=32", "--report_interval=1", "--precision=FP32")
FLAGS += ("--global_batch_size=4", "--num_steps=2", "--trackers=none")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hf")
    for kind in FOLDERS:
        their_model(kind).save_pretrained(root / kind, max_shard_size="200KB")
    return root


def loaded(root: str, strategy: str, more: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of each folder as a model over all ranks has them, after they were read in place."""
    return {kind: _loaded(f"{root}/{kind}", strategy, more) for kind in FOLDERS}


def _loaded(path: str, strategy: str, more: dict[str, Any]) -> dict[str, torch.Tensor]:
    alone = not dist.is_initialized()
    rank, ranks = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    shards = {"none": 1, "hsdp": 2}.get(strategy, ranks)
    mesh = Mesh(ParallelDims(strategy, ranks // shards, shards), rank, "cpu")
    config = resolve_model(ModelConfig(init_from_hf=path, **more), seq_length=32)
    device = torch.device("cpu")
    model = parallelize(config, ParallelConfig(), mesh, device=device, precision=FP32, seed=None)
    load_weights(Path(path), model, mesh)
    return {
        clean_name(name): (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()
        for name, weight in model.named_parameters()
    }


@pytest.mark.slow
def test_sharded_weights_are_bit_equal(folders: Path) -> None:
    """Each rank reads its shards."""
    more = {"vocab_size": 333, "vocab_multiple_of": 64, "init_new_tokens": "mean"}
    of_ranks = [loaded(str(folders), "none", more)]
    of_ranks += run_ranks(loaded, 2, str(folders), "fsdp", more)
    of_ranks += run_ranks(loaded, 4, str(folders), "hsdp", more)
    for kind in FOLDERS:
        alone = fms_fsdp.load_model(str(folders / kind))[0].state_dict()
        for name, weight in ((name, each[kind][name]) for each in of_ranks for name in each[kind]):
            known = alone[name]
            assert torch.equal(weight[: len(known)], known), name
            if name in ("embed.weight", "head.weight"):
                assert weight.shape[0] == 384 and not weight[333:].any()
                mean = known.double().mean(0).float()
                assert (weight[300:333] - mean).abs().max() <= 1e-9, name


def error_of_bad_disk(path: str) -> str:
    """The error of a rank, if the second one's disk does not answer."""

    def read_badly(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", f"{path}/model.safetensors")

    rank = dist.get_rank()
    mesh = Mesh(ParallelDims("fsdp", 1, 2), rank, "cpu")
    model = build_model(resolve_model(ModelConfig(init_from_hf=path), seq_length=32))
    fill = read_badly if rank == 1 else weights.fill
    with patch.object(weights, "fill", fill), pytest.raises(ReadFailed) as caught:
        load_weights(Path(path), model, mesh)
    return str(caught.value)


def test_bad_disk_of_one_rank_ends_every_rank_alike(folders: Path) -> None:
    path = str(folders / "llama")
    first, second = run_ranks(error_of_bad_disk, 2, path)
    assert first == second
    assert first.startswith(f"rank 1: {path}/model.safetensors cannot be read: Input/output error;")


def forbid_init() -> None:
    def init_weights(*_: Any) -> None:
        raise AssertionError("weights are drawn although others replace them")

    parallelize_module.init_weights = init_weights  # type: ignore[assignment]


@pytest.mark.slow
def test_loaded_weights_are_not_drawn_before(folders: Path, tmp_path: Path) -> None:
    """From a Hugging Face checkpoint, the weights of a run, and to resume a run."""
    run_dir = tmp_path / "run"
    scratch = [*FLAGS, "--model_variant=tiny", f"--output_dir={tmp_path / 'new'}"]
    drawn = launch(scratch, before=forbid_init)
    assert drawn.returncode == 1 and "weights are drawn" in drawn.stderr
    from_hf = f"--init_from_hf={folders / 'llama3, tied, grouped'}"
    shape = f"--hf_config={folders / 'llama3, tied, grouped' / 'config.json'}"
    only_weights = [f"--ckpt_load_path={run_dir}", "--load_model_only"]
    for flags in (
        [from_hf, "--exit_step=1", f"--output_dir={run_dir}"],
        [from_hf, f"--output_dir={run_dir}"],
        [shape, *only_weights, f"--output_dir={tmp_path / 'weights'}"],
    ):
        ended = launch([*FLAGS, *flags], before=forbid_init)
        assert ended.returncode in (0, 75), ended.stderr[-3000:]  # 75: stopped by --exit_step


@pytest.mark.slow
def test_run_from_hf_weights_equals_one_process(folders: Path, tmp_path: Path) -> None:
    """It resumes from its own checkpoint."""
    path = tmp_path / "hf"
    shutil.copytree(folders / "llama3, tied, grouped", path)
    flags = [*FLAGS, f"--init_from_hf={path}"]
    for ranks in (0, 4):
        said = trained(*flags, f"--output_dir={tmp_path}/ranks{ranks}", nproc=ranks)
        assert f"loading weights only, from {path}" in said
    found = losses(tmp_path / "ranks0")
    assert losses(tmp_path / "ranks4") == pytest.approx(found, rel=1e-6)
    fresh = trained(*FLAGS, f"--hf_config={path}/config.json", f"--output_dir={tmp_path}/fresh")
    assert "starting from scratch" in fresh and losses(tmp_path / "fresh")[0] != found[0]
    for file in path.glob("*.safetensors"):
        file.unlink()
    flags.append("--num_steps=3")
    assert "resuming from step 2" in trained(*flags, f"--output_dir={tmp_path}/ranks0")
    rejected = run(*flags, f"--output_dir={tmp_path}/new", nproc=2)
    assert rejected.returncode != 0 and not (tmp_path / "new").exists()
    (line,) = [line for line in rejected.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: --init_from_hf ({path}) cannot be loaded: ")


def test_shape_is_that_of_hf_checkpoint(folders: Path) -> None:
    """Flags that differ are errors."""

    def shape(kind: str, seq_length: int = 32, data: int | None = None, **more: Any) -> Any:
        section = TrainConfig(model=ModelConfig(init_from_hf=str(folders / kind), **more)).model
        return resolve_model(section, seq_length=seq_length, data_vocab_size=data)

    qwen = shape("qwen3", num_layers=2, head_dim=24, dropout=0.1, z_loss=1e-4, data=200)
    assert (qwen.head_dim, qwen.qk_norm, qwen.vocab_size, qwen.max_seq_len) == (24, True, 300, 64)
    assert shape("qwen3", seq_length=100).max_seq_len == 100
    assert shape("neox", data=320, init_new_tokens="mean").vocab_size == 320
    cases: list[tuple[str, str, dict[str, Any]]] = [
        (r"--num_layers=3 does not match .* \(2\); remove", "qwen3", {"num_layers": 3}),
        ("--seq_length=65 does not match the 64 learned", "gpt2", {"seq_length": 65}),
        ("--max_seq_len=32 does not match the 64 learned", "gpt2", {"max_seq_len": 32}),
        ("has 300 tokens, the data .* 320; prepare the data", "llama", {"data": 320}),
        ("has 300 tokens, .* 299", "llama", {"vocab_size": 299, "init_new_tokens": "mean"}),
        ("--init_from_hf and --model_variant", "llama", {"model_variant": "tiny"}),
        ("--init_from_hf and --hf_config cannot", "llama", {"hf_config": "x"}),
        (r"--init_from_hf=.*none is not supported: .* has no config.json", "none", {}),
    ]
    for text, kind, flags in cases:
        with pytest.raises(UserError, match=text):
            shape(kind, **flags)


def test_hf_config_is_a_variant(folders: Path) -> None:
    """Flags replace its values."""
    path = folders / "mistral/config.json"

    def shape(data: int | None = None, **more: Any) -> Any:
        section = ModelConfig(hf_config=str(path), **more)
        assert section.name == "mistral"
        return resolve_model(section, seq_length=32, data_vocab_size=data)

    assert (shape().attn_window, shape().num_layers, shape().head_dim) == (16, 2, 16)
    changed = shape(data=99, num_layers=3, hidden_size=128)
    assert (changed.num_layers, changed.vocab_size, changed.head_dim) == (3, 99, 32)
    other, yarn = folders / "other.json", {"rope_scaling": {"type": "yarn", "factor": 2.0}}
    other.write_text(json.dumps(json.loads(path.read_text()) | yarn))
    with pytest.raises(UserError, match=r"--hf_config=.*other.json is not .*yarn contradicts"):
        resolve_model(ModelConfig(hf_config=str(other)), seq_length=32)
