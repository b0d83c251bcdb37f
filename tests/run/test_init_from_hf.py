"""A training that begins with the weights of a folder of Hugging Face, or with the shape alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fms_fsdp
from fms_fsdp.config import FP32, ModelConfig, ParallelConfig, TrainConfig
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.hf.weights import load_weights
from fms_fsdp.models.init import clean_name
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.parallel.parallelize import parallelize
from tests.cli import losses, run, trained
from tests.distributed.launch import run_ranks
from tests.tools.test_import import FOLDERS, their_model

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
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    shards = {"none": 1, "hsdp": 2}.get(strategy, ranks)
    place = dist.get_rank() if dist.is_initialized() else 0
    mesh = Mesh(ParallelDims(strategy, ranks // shards, shards), place, "cpu")
    config = resolve_model(ModelConfig(init_from_hf=path, **more), seq_length=32)
    device = torch.device("cpu")
    model = parallelize(config, ParallelConfig(), mesh, device=device, precision=FP32, seed=0)
    load_weights(Path(path), model, mesh)
    return {
        clean_name(name): (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()
        for name, weight in model.named_parameters()
    }


@pytest.mark.slow
def test_each_rank_reads_its_part_and_the_bits_are_those_of_one(folders: Path) -> None:
    alone = {kind: fms_fsdp.load_model(str(folders / kind))[0].state_dict() for kind in FOLDERS}
    more = {"vocab_size": 333, "vocab_multiple_of": 64, "init_new_tokens": "mean"}
    of_ranks = [loaded(str(folders), "none", more)]
    of_ranks += run_ranks(loaded, 2, str(folders), "fsdp", more)
    of_ranks += run_ranks(loaded, 4, str(folders), "hsdp", more)
    for found in of_ranks:
        for kind, weights in found.items():
            for name, weight in weights.items():
                known = alone[kind][name]
                assert torch.equal(weight[: len(known)], known), name
                if name in ("embed.weight", "head.weight"):
                    assert weight.shape[0] == 384 and not weight[333:].any()
                    mean = known.double().mean(0).float()
                    assert (weight[300:333] - mean).abs().max() <= 1e-9, name


@pytest.mark.slow
def test_a_run_is_alike_on_any_number_of_ranks_and_goes_on_from_its_own_checkpoint(
    folders: Path, tmp_path: Path
) -> None:
    path = tmp_path / "hf"
    shutil.copytree(folders / "llama3, tied, grouped", path)
    found = {}
    for ranks in (0, 2, 4):
        folder = tmp_path / f"ranks{ranks}"
        said = trained(*FLAGS, f"--init_from_hf={path}", f"--output_dir={folder}", nproc=ranks)
        assert f"loading weights only, from {path}" in said
        found[ranks] = losses(folder)
    assert found[2] == pytest.approx(found[0], rel=1e-6) and found[4] == pytest.approx(
        found[0], rel=1e-6
    )
    fresh = trained(*FLAGS, f"--hf_config={path}/config.json", f"--output_dir={tmp_path}/fresh")
    assert "starting from scratch" in fresh and losses(tmp_path / "fresh")[0] != found[0][0]
    for file in path.glob("*.safetensors"):
        file.unlink()
    flags = [*FLAGS, f"--init_from_hf={path}", "--num_steps=3"]
    assert "resuming from step 2" in trained(*flags, f"--output_dir={tmp_path}/ranks0")
    refused = run(*flags, f"--output_dir={tmp_path}/new", nproc=2)
    assert refused.returncode != 0 and not (tmp_path / "new").exists()
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert (
        line.startswith(f"error: --init_from_hf ({path}) cannot be loaded: ")
        and "download the checkpoint again" in line
    )


def test_the_shape_is_that_of_the_folder_and_flags_beside_it_must_agree(folders: Path) -> None:
    def shape(kind: str, seq_length: int = 32, data: int | None = None, **more: Any) -> Any:
        section = TrainConfig(model=ModelConfig(init_from_hf=str(folders / kind), **more)).model
        return resolve_model(section, seq_length=seq_length, data_vocab_size=data)

    qwen = shape("qwen3", num_layers=2, head_dim=24, dropout=0.1, z_loss=1e-4, data=200)
    assert (qwen.head_dim, qwen.qk_norm, qwen.vocab_size, qwen.max_seq_len) == (24, True, 300, 64)
    assert shape("qwen3", seq_length=100).max_seq_len == 100
    assert shape("neox", data=320, init_new_tokens="mean").vocab_size == 320
    for text, kind, flags in (
        (
            r"--num_layers=3 does not match --init_from_hf=.* \(2\); remove --num_layers",
            "qwen3",
            {"num_layers": 3},
        ),
        ("--norm_eps=0.1 does not match", "llama", {"norm_eps": 0.1}),
        ("--seq_length=65 does not match the 64 learned positions", "gpt2", {"seq_length": 65}),
        ("--max_seq_len=32 does not match the 64 learned positions", "gpt2", {"max_seq_len": 32}),
        (
            "has 300 tokens, the data .* 320; prepare the data with the tokenizer",
            "llama",
            {"data": 320},
        ),
        ("has 300 tokens, .* 299", "llama", {"vocab_size": 299, "init_new_tokens": "mean"}),
        (
            r"--init_from_hf and --model_variant cannot be used",
            "llama",
            {"model_variant": "tiny"},
        ),
        (r"--init_from_hf and --hf_config cannot be used together", "llama", {"hf_config": "x"}),
        (r"--init_from_hf=.*none is not supported: .* has no config.json", "none", {}),
    ):
        with pytest.raises(ValueError, match=text):
            shape(kind, **flags)


def test_the_shape_alone_is_a_variant_of_which_flags_replace_values(folders: Path) -> None:
    def shape(data: int | None = None, **more: Any) -> Any:
        section = ModelConfig(hf_config=str(folders / "mistral/config.json"), **more)
        assert section.name == "mistral"
        return resolve_model(section, seq_length=32, data_vocab_size=data)

    assert (shape().attn_window, shape().num_layers, shape().head_dim) == (16, 2, 16)
    changed = shape(data=99, num_layers=3, hidden_size=128)
    assert (changed.num_layers, changed.vocab_size, changed.head_dim) == (3, 99, 32)
    content = json.loads((folders / "mistral/config.json").read_text())
    other = folders / "other.json"
    other.write_text(json.dumps(content | {"rope_scaling": {"type": "yarn", "factor": 2.0}}))
    with pytest.raises(
        ValueError,
        match=r"--hf_config=.*other.json is not supported: .*rope_type=yarn contradicts default",
    ):
        resolve_model(ModelConfig(hf_config=str(other)), seq_length=32)
