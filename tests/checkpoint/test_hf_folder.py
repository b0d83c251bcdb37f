"""Weights of a folder of Hugging Face: which files, which names, which values."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fms_fsdp
from fms_fsdp.__main__ import main
from fms_fsdp.errors import UserError, note_once
from fms_fsdp.tools.export.safetensors import write_tensors
from tests.hf_folders import FAMILIES, model_of, weights_of, write_folder, write_weights


def loads_the_model(folder: Path, kind: str) -> bool:
    found = fms_fsdp.load_model(str(folder))[0].state_dict()
    return all(torch.equal(found[name], weight) for name, weight in model_of(kind).state_dict().items())


def without_prefix(kind: str) -> dict[str, torch.Tensor]:
    prefixes = ("model.", "transformer.", "gpt_neox.")
    return {
        name.partition(".")[2] if name.startswith(prefixes) else name: weight
        for name, weight in weights_of(kind).items()
    }


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("form", ["safetensors", "bin", "bin of before 1.6"])
def test_weights_without_prefix_and_with_masks_are_read(kind: str, form: str, tmp_path: Path) -> None:
    write_folder(tmp_path, kind)
    weights = without_prefix(kind)
    if kind == "gpt2":
        weights |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)}
        weights |= {
            "h.0.attn.masked_bias": torch.tensor(-1e4),
            "h.1.attn.bias": torch.ones(8, dtype=torch.uint8),
        }
    if kind == "gpt_neox":
        weights |= {"layers.0.attention.bias": torch.ones(1, 8, 8, dtype=torch.uint8)}
        weights["lm_head.weight"] = weights.pop("embed_out.weight")
    if form == "safetensors":
        write_weights(tmp_path, weights)
    else:
        (tmp_path / "model.safetensors").unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=form == "bin")
    assert loads_the_model(tmp_path, kind)


def test_an_old_bin_with_code_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tools.test_import import Evil

    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").unlink()
    torch.save({"x": Evil()}, "hf/pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match="holds more than weights"):
        fms_fsdp.load_model("hf")
    assert not Path("evil").exists()


def test_of_two_forms_that_of_transformers_is_read_and_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note_once.cache_clear()
    write_folder(tmp_path)
    other = {name: weight + 1 for name, weight in weights_of("llama").items()}
    (tmp_path / "x").mkdir()
    write_weights(tmp_path / "x", other)
    (tmp_path / "x/model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    index: dict[str, Any] = {"weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert loads_the_model(tmp_path, "llama")
    assert "holds model.safetensors beside an index of other files; model.safetensors is read" in (
        capsys.readouterr().err
    )
    (tmp_path / "model.safetensors").unlink()
    assert not loads_the_model(tmp_path, "llama")


def test_a_tied_head_that_is_stored_must_be_the_embedding(tmp_path: Path) -> None:
    write_folder(tmp_path, tie_word_embeddings=True)
    with pytest.raises(
        UserError, match=r"weight lm_head.weight is not model.embed_tokens.weight.*tie_word_embed"
    ):
        fms_fsdp.load_model(str(tmp_path))
    weights = weights_of("llama")
    write_weights(tmp_path, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    assert fms_fsdp.load_model(str(tmp_path))[0].config.tie_embeddings


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_named(
    value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, name in (
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("gpt2", "transformer.h.0.attn.c_attn.bias"),
    ):
        weights = {each: weight.clone() for each, weight in weights_of(kind).items()}
        weights[name].view(-1)[5] = value
        write_folder(tmp_path / kind, kind)
        write_weights(tmp_path / kind, weights)
        with pytest.raises(UserError, match=f"weight {name} holds values that are not finite"):
            fms_fsdp.load_model(str(tmp_path / kind))
        assert main(["import", f"--path={tmp_path}/{kind}", f"--output={tmp_path}/run"]) == 2
        assert f"weight {name} holds values that are not finite" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
        with pytest.raises(UserError, match=f"weight {name} holds values .* choose another checkpoint"):
            shapes = {each: weight.shape for each, weight in weights.items()}
            list(write_tensors(tmp_path, shapes, torch.float32, 10**9, weights.__getitem__))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(300, 32, dtype=torch.complex64), "must be of floating point, not torch.complex64"),
        (torch.ones(300, 32).to_sparse(), "must be a plain tensor"),
        (torch.ones(300, 32, dtype=torch.int64), "must be of floating point, not torch.int64"),
        (3, "must be a plain tensor"),
        (torch.ones(300, 31), r"must be of \(300, 32\), not \(300, 31\)"),
    ],
)
def test_what_is_no_weight_in_a_bin_is_one_line(value: Any, text: str, tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights_of("llama") | {"lm_head.weight": value}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=f"weight lm_head.weight {text}"):
        fms_fsdp.load_model(str(tmp_path))


def test_many_layers_and_positions_end_in_a_line_at_once(tmp_path: Path) -> None:
    for changes, text in (
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers \(1000000000\) must be a whole number from 1 to"),
        ({"num_hidden_layers": 9000}, r"the number of layers \(9000\) must be .* \(2\)"),
        ({"max_position_embeddings": 10**9}, r"max_position_embeddings \(1000000000\) must be"),
        ({"vocab_size": 1 << 28, "hidden_size": 1 << 20, "head_dim": ...}, "must be of"),
    ):
        write_folder(tmp_path, **changes)
        with pytest.raises(UserError, match=text):
            fms_fsdp.load_model(str(tmp_path))


def test_a_path_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_folder(tmp_path / "hf")
    assert main(["import", "--path=~/hf", "--output=~/run"]) == 0
    assert main(["export", "--path=~/run", "--output=~/out", "--dtype=fp32"]) == 0
    assert loads_the_model(tmp_path / "out", "llama") and loads_the_model(Path("~/out"), "llama")
    shutil.rmtree(tmp_path / "out")


def test_an_export_in_fp16_refuses_what_becomes_infinite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {name: weight.clone() for name, weight in weights_of("llama").items()}
    weights["model.layers.0.mlp.down_proj.weight"][0, 0] = 7e4
    write_folder(tmp_path / "hf")
    write_weights(tmp_path / "hf", weights)
    assert main(["import", f"--path={tmp_path}/hf", f"--output={tmp_path}/run"]) == 0
    assert main(["export", f"--path={tmp_path}/run", f"--output={tmp_path}/bf16"]) == 0
    capsys.readouterr()
    assert main(["export", f"--path={tmp_path}/run", f"--output={tmp_path}/fp16", "--dtype=fp16"]) == 2
    error = capsys.readouterr().err
    assert "down_proj.weight" in error and "in fp16" in error and error.count("\n") == 1
    assert not (tmp_path / "fp16").exists()
