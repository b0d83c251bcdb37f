"""Weights of a Hugging Face checkpoint: the same logits, the same file again, or one line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fms_fsdp
from fms_fsdp.__main__ import main
from fms_fsdp.hf.families import config_to_hf
from fms_fsdp.hf.weights import fuse, save_weights, weight_map

BASE = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", BASE),
    "llama3, tied, grouped": (
        "LlamaConfig",
        BASE | {"num_key_value_heads": 2, "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    ),
    "mistral": (
        "MistralConfig",
        BASE | {"num_key_value_heads": 2, "sliding_window": 16, "head_dim": 16},
    ),
    "qwen3": ("Qwen3Config", BASE | {"num_key_value_heads": 2, "head_dim": 24}),
    "qwen2": ("Qwen2Config", BASE | {"num_key_value_heads": 2}),
    "gpt2": ("GPT2Config", dict(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=64)),
    "neox": ("GPTNeoXConfig", BASE | {"intermediate_size": 256, "rotary_pct": 0.25}),
}


def their_model(kind: str, seed: int = 0) -> Any:
    import transformers

    name, values = FOLDERS[kind]
    config = getattr(transformers, name)(**values, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in FOLDERS if kind != "llama"])
def test_round_trip_is_bit_equal(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    def tensors(folder: Path) -> dict[str, torch.Tensor]:
        files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
        assert len(files) > 1
        return {name: tensor for file in files for name, tensor in file.items()}

    theirs = their_model(kind)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="200KB")
    ours, tokenizer = fms_fsdp.load_model(str(tmp_path / "hf"))
    tokens = torch.randint(0, 300, (2, 48))
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() <= 1e-5 and tokenizer is None
    weights, own, out = weight_map(ours.config), ours.state_dict(), tmp_path / "out"
    out.mkdir()

    def fused(name: str) -> torch.Tensor:
        return fuse(ours.config, weights[name].ours, own.__getitem__)

    shapes = {name: weight.shape for name, weight in weights.items()}
    save_weights(out, shapes, torch.float32, 200_000, fused)
    before, after = tensors(tmp_path / "hf"), tensors(out)
    if kind == "neox":  # transformers 5 has another name for it
        before["embed_out.weight"] = before.pop("lm_head.weight", before.get("embed_out.weight"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    (out / "config.json").write_text(json.dumps(config_to_hf(ours.config)))
    for name, weight in fms_fsdp.load_model(str(out))[0].state_dict().items():
        assert torch.equal(weight, own[name])


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


@pytest.mark.slow
def test_corrupt_checkpoint_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hf, index = tmp_path / "hf", "model.safetensors.index.json"
    their_model("llama").save_pretrained(hf, max_shard_size="200KB")
    first, second, *_ = sorted(path.name for path in hf.glob("model-*.safetensors"))

    def change(folder: Path, old: str, new: str, *names: str) -> None:
        for name in names:
            data = (folder / name).read_bytes()
            (folder / name).write_bytes(data.replace(old.encode(), new.encode()))

    def cut(folder: Path) -> None:
        os.truncate(folder / first, (folder / first).stat().st_size - 4)

    def remove(pattern: str) -> Callable[[Path], None]:
        def damage(folder: Path) -> None:
            for path in folder.glob(pattern):
                path.unlink()

        return damage

    def pickled(folder: Path) -> None:
        remove("model*")(folder)
        torch.save({"x": Evil()}, folder / "pytorch_model.bin", pickle_module=pickle)

    def redirect(folder: Path) -> None:
        change(folder, second, f"../hf/{second}", index)

    def rename(folder: Path) -> None:
        names = [path.name for path in folder.glob("model*")]
        change(folder, "model.norm.weight", "model.norm.wright", *names)

    def untie(folder: Path) -> None:
        names = [path.name for path in folder.glob("model*")]
        change(folder, "lm_head.weight", "no_head.weight", *names)

    def widen(folder: Path) -> None:
        change(folder, '"intermediate_size": 96', '"intermediate_size": 97', "config.json")

    for text, damage in {
        "ends before its weights do": cut,
        "is missing; download": remove(second),
        "must hold a complete checkpoint": remove("config.json"),
        "there is no model.safetensors": remove("model*"),
        "convert pytorch_model.bin with transformers: AutoModelForCausalLM."
        "from_pretrained('broken').save_pretrained('broken')": pickled,
        "outside of the folder": redirect,
        "weight model.norm.weight is missing": rename,
        'set "tie_word_embeddings": true in config.json if it is the embedding, or': untie,
        "has shape (96, 64), expected (97, 64)": widen,
        "is not a complete safetensors file": lambda folder: os.truncate(folder / first, 7),
    }.items():
        shutil.rmtree("broken", ignore_errors=True)
        damage(shutil.copytree(hf, tmp_path / "broken"))
        capsys.readouterr()
        assert main(["generate", "--path=broken", "--prompt=a"]) == 2
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1, error
    assert not Path("evil").exists()
