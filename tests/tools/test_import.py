"""A folder of Hugging Face → a run: the same logits, the same folder again, or one line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fms_fsdp
from fms_fsdp.__main__ import main
from fms_fsdp.hf.config import config_from_hf, config_to_hf
from fms_fsdp.hf.weights import _open_weights as open_weights
from fms_fsdp.hf.weights import fuse, save_weights, weight_map
from fms_fsdp.models.variants import VARIANTS

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


def loaded(folder: Path) -> int:
    """The exit status of a command that reads the checkpoint in place."""
    return main(["generate", f"--path={folder}", "--prompt=a"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOLDERS)
def test_round_trip_is_bit_equal(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    theirs = their_model(kind)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="200KB")
    ours, tokenizer = fms_fsdp.load_model(str(tmp_path / "hf"))
    tokens = torch.randint(0, 300, (2, 48))
    with torch.no_grad():
        logits = theirs(tokens).logits
        assert tokenizer is None and (ours(tokens) - logits).abs().max() <= 1e-5
    weights, own, out = weight_map(ours.config), ours.state_dict(), tmp_path / "out"
    out.mkdir()
    shapes = {name: weight.shape for name, weight in weights.items()}
    save_weights(
        out,
        shapes,
        torch.float32,
        200_000,
        lambda name: fuse(ours.config, weights[name].ours, own.__getitem__),
    )
    (out / "config.json").write_text(json.dumps(config_to_hf(ours.config)))
    files = [load_file(path) for path in sorted((tmp_path / "hf").glob("*.safetensors"))]
    before = {
        name.replace("lm_head", "embed_out") if kind == "neox" else name: each
        for file in files
        for name, each in file.items()
    }
    made = [load_file(path) for path in sorted(out.glob("*.safetensors"))]
    after = {name: each for file in made for name, each in file.items()}
    assert len(made) > 1 and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again, told = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told.values()), told
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, logits)
    for name, weight in fms_fsdp.load_model(str(out))[0].state_dict().items():
        assert torch.equal(weight, own[name])


@pytest.mark.parametrize(
    "name",
    ["7b", "llama3.1_8b", "llama3.2_1b", "qwen2.5_7b", "pythia_70m",
     "gpt3_125m"],
)  # fmt: skip
def test_a_config_that_we_write_is_read_as_the_same_shape(name: str) -> None:
    variant = VARIANTS[name]
    found = config_from_hf(json.loads(json.dumps(config_to_hf(variant, "bfloat16", 2))))
    multiple = {"vocab_multiple_of": variant.vocab_multiple_of}
    assert found.__dict__ | multiple == variant.__dict__


def llama(**changes: Any) -> dict[str, Any]:
    """The config.json of Llama-2, as transformers 4 wrote it."""
    content = BASE | {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "pretraining_tp": 1,
    }
    return {key: value for key, value in (content | changes).items() if value is not ...}


def test_both_spellings_of_rope_are_read() -> None:
    old = config_from_hf(llama(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0}))
    new = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    assert config_from_hf(llama(rope_parameters=new)) == old
    assert config_from_hf(llama(rope_parameters=new, rope_theta=5e5, rope_scaling=new)) == old
    assert old.rope_scaling is not None and (old.rope_theta, old.rope_scaling.kind) == (
        5e5,
        "linear",
    )
    assert config_from_hf(llama()).rope_theta == 10_000
    neox = {
        "model_type": "gpt_neox",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    neox |= {
        "vocab_size": 300,
        "intermediate_size": 256,
        "rotary_pct": 0.5,
        "max_position_embeddings": 64,
    }
    assert config_from_hf(neox | {"partial_rotary_factor": 0.5}) == config_from_hf(neox)
    with pytest.raises(ValueError, match="partial_rotary_factor=0.25 contradicts"):
        config_from_hf(neox | {"partial_rotary_factor": 0.25})


def test_neox_20b_is_what_its_published_config_says() -> None:
    """`gelu_fast` is GELU by tanh, which its training fused with the bias; the exact one was taken here."""
    published = {
        "model_type": "gpt_neox",
        "hidden_act": "gelu_fast",
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
    }
    published |= {
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "vocab_size": 50432,
    }
    published |= {
        "intermediate_size": 24576,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
    }
    ours = VARIANTS["neox_20b"]
    assert ours.padded_vocab_size == 50432
    assert config_from_hf(published) == replace(ours, vocab_size=50432, vocab_multiple_of=1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "bloom"}, "model_type=bloom is not supported; supported: llama, mistral"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_act": "quick_gelu"}, "hidden_act=quick_gelu is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type=yarn is not supported"),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, "contradicts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"pretraining_tp": 2}, "pretraining_tp=2 is not supported"),
        ({"attention_multiplier": 0.5}, "attention_multiplier=0.5 is not supported"),
        ({"attention_multiplier": 0}, "attention_multiplier=0 is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True must be equal"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attention_bias": True, "hidden_act": "gelu"}, "hidden_act=gelu is not supported"),
        ({"attention_bias": True}, "attention_bias=True and mlp_bias=False must be equal"),
    ],
)
def test_a_field_that_our_models_do_not_have_is_refused_by_its_name(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        config_from_hf(llama(**changes))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


@pytest.mark.slow
def test_pickled_weights_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    their_model("llama").save_pretrained("hf")
    Path("hf/model.safetensors").unlink()
    torch.save({"x": Evil()}, "hf/pytorch_model.bin", pickle_module=pickle)
    capsys.readouterr()
    assert loaded(Path("hf")) == 2
    error = capsys.readouterr().err
    assert "convert pytorch_model.bin with transformers" in error and error.count("\n") == 1
    assert not Path("evil").exists()


@pytest.mark.slow
def test_what_is_not_whole_or_foreign_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = their_model("llama")
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="200KB")
    files = sorted((tmp_path / "hf").glob("model-*.safetensors"))
    assert len(files) > 1

    def refused(text: str, change: Any) -> None:
        folder = tmp_path / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "hf", folder)
        change(folder)
        capsys.readouterr()
        assert loaded(folder) == 2
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1, error

    def cut(folder: Path) -> None:
        os.truncate(folder / files[0].name, files[0].stat().st_size - 4)

    def rename(old: str, new: str) -> Any:
        def change(folder: Path) -> None:
            index = folder / "model.safetensors.index.json"
            index.write_text(index.read_text().replace(old, new))
            for file in files:
                data = (folder / file.name).read_bytes()
                (folder / file.name).write_bytes(data.replace(old.encode(), new.encode()))

        return change

    def widen(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | {"intermediate_size": 97}))

    refused("ends before its weights do", cut)
    refused("is missing; download", lambda folder: (folder / files[1].name).unlink())
    refused("must hold a complete checkpoint", lambda folder: (folder / "config.json").unlink())
    refused(
        "must hold a complete checkpoint", lambda folder: (folder / "config.json").write_text("{")
    )
    refused(
        "there is no model.safetensors",
        lambda folder: [path.unlink() for path in folder.glob("model*")],
    )

    def redirect(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        index.write_text(index.read_text().replace(files[1].name, f"../hf/{files[1].name}"))

    def poison(folder: Path) -> None:
        data = bytearray((folder / files[0].name).read_bytes())
        data[-4:] = b"\0\0\xc0\x7f"
        (folder / files[0].name).write_bytes(data)

    refused("outside of the folder", redirect)
    refused("holds values that are not finite", poison)
    refused("weight model.norm.weight is missing", rename("model.norm.weight", "model.norm.wright"))
    refused("has shape (96, 64), expected (97, 64)", widen)
    os.truncate(tmp_path / "hf" / files[0].name, 7)
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        open_weights(tmp_path / "hf")
