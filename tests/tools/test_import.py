"""A folder of Hugging Face → a run: the same logits, the same folder again, or one line."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fms_fsdp
from fms_fsdp.__main__ import main
from fms_fsdp.checkpoint.folders import problem
from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.extras.from_hf import config_from_hf
from fms_fsdp.extras.hf import hf_config
from fms_fsdp.extras.weight_files import open_weights
from fms_fsdp.models.variants import VARIANTS, resolve_model
from tests.cli import losses, metrics, trained
from tests.hf_folders import FAMILIES, write_folder

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


def imported(folder: Path, output: Path) -> int:
    return main(["import", f"--path={folder}", f"--output={output}"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOLDERS)
def test_an_imported_model_has_the_same_logits_and_goes_out_as_it_came_in(
    kind: str, tmp_path: Path
) -> None:
    theirs = their_model(kind)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="200KB")
    assert imported(tmp_path / "hf", tmp_path / "run") == 0
    ours, _ = fms_fsdp.load_model(str(tmp_path / "run"))
    in_place, tokenizer = fms_fsdp.load_model(str(tmp_path / "hf"))
    weights = in_place.state_dict()
    assert tokenizer is None and all(
        torch.equal(weights[name], w) for name, w in ours.state_dict().items()
    )
    tokens = torch.randint(0, 300, (2, 48))
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() <= 1e-6
    for number in (1, 2):
        run, out = tmp_path / ("run" if number == 1 else "again"), tmp_path / f"out{number}"
        assert main(["export", f"--path={run}", f"--output={out}", "--dtype=fp32"]) == 0
        if number == 1:
            assert imported(out, tmp_path / "again") == 0
    names = sorted(path.name for path in (tmp_path / "out1").iterdir())
    assert names == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    for name in names:
        assert (tmp_path / "out1" / name).read_bytes() == (tmp_path / "out2" / name).read_bytes(), (
            name
        )


@pytest.mark.parametrize(
    "name",
    [
        "7b",
        "llama3.1_8b",
        "llama3.2_1b",
        "qwen2.5_7b",
        "pythia_70m",
        "gpt3_125m",
    ],
)
def test_a_config_that_we_write_is_read_as_the_same_shape(name: str) -> None:
    variant = VARIANTS[name]
    found = config_from_hf(json.loads(json.dumps(hf_config(variant, "bfloat16", 2))))
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
    neox |= {"vocab_size": 300, "intermediate_size": 256, "rotary_pct": 0.5}
    assert config_from_hf(neox | {"partial_rotary_factor": 0.5}) == config_from_hf(neox)
    with pytest.raises(ValueError, match=r"partial_rotary_factor \(0.25\)"):
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
        ({"model_type": "bloom"}, r"model_type \(bloom\) must be one of llama, mistral"),
        ({"model_type": "granite"}, r"model_type \(granite\) must be one of llama, mistral"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_act": "quick_gelu"}, r"hidden_act \(quick_gelu\) must be one of"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling of type yarn must be"),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, "disagree"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor \(0.5\) must be left out"),
        ({"pretraining_tp": 2}, r"pretraining_tp \(2\) must be left out"),
        ({"attention_multiplier": 0.5}, r"attention_multiplier \(0.5\) must be left out"),
        ({"attention_multiplier": 0}, r"attention_multiplier \(0\) must be left out"),
        ({"use_sliding_window": True}, r"use_sliding_window \(True\) must be left out"),
        ({"mlp_bias": True}, r"mlp_bias \(True\) must be False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {"attention_bias": True, "hidden_act": "gelu"},
            r"hidden_act \(gelu\) must be one of silu",
        ),
        ({"attention_bias": True}, r"attention_bias \(True\) must be False, as mlp_bias is"),
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
def test_a_bin_folder_is_read_and_a_pickle_that_would_run_code_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = their_model("llama")
    theirs.save_pretrained("hf")
    Path("hf/model.safetensors").unlink()
    torch.save(theirs.state_dict(), "hf/pytorch_model.bin")
    assert imported(Path("hf"), Path("run")) == 0
    ours, _ = fms_fsdp.load_model("run")
    assert torch.equal(
        ours.state_dict()["embed.weight"], theirs.state_dict()["model.embed_tokens.weight"]
    )
    torch.save({"x": Evil()}, "hf/pytorch_model.bin", pickle_module=pickle)
    capsys.readouterr()
    assert imported(Path("hf"), Path("other")) == 2
    error = capsys.readouterr().err
    assert "pytorch_model.bin holds more than weights" in error and error.count("\n") == 1
    assert not Path("evil").exists() and not Path("other").exists()


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
        assert imported(folder, tmp_path / "run") == 2
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1, error
        assert not any(path.name.endswith(("run", "partial")) for path in tmp_path.iterdir())

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

    refused("ends before its tensors do", cut)
    refused("is missing: the folder is not whole", lambda folder: (folder / files[1].name).unlink())
    refused("must hold config.json", lambda folder: (folder / "config.json").unlink())
    refused("cannot be read", lambda folder: (folder / "config.json").write_text("{"))
    refused(
        "holds no model.safetensors",
        lambda folder: [path.unlink() for path in folder.glob("model*")],
    )
    refused("weight model.norm.weight is missing", rename("model.norm.weight", "model.norm.wright"))
    refused("must be of (97, 64), not (96, 64)", widen)
    os.truncate(tmp_path / "hf" / files[0].name, 7)
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        open_weights(tmp_path / "hf")
    (tmp_path / "taken").mkdir()
    assert imported(tmp_path / "hf", tmp_path / "taken") == 2
    assert "must not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_cannot_be_written_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    their_model("llama").save_pretrained(tmp_path / "hf")
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("fms_fsdp.checkpoint.io.shutil.disk_usage", lambda path: full)
    capsys.readouterr()
    assert imported(tmp_path / "hf", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert (
        "cannot be written: rank 0: " in error
        and "MiB are free" in error
        and error.count("\n") == 1
    )
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


STRETCHED = LLAMA3 | {"factor": 2.6666667, "low_freq_factor": 1.25}


@pytest.mark.parametrize("kind", [*FAMILIES, "stretched"])
def test_the_flags_that_import_prints_make_the_same_model_at_any_shorter_row(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind in FAMILIES:
        write_folder(tmp_path / "a folder", kind, rope_parameters=...)
    else:
        write_folder(tmp_path / "a folder", rope_scaling=STRETCHED, rope_parameters=...)
    capsys.readouterr()
    assert imported(tmp_path / "a folder", tmp_path / "a run") == 0
    *_, advice = capsys.readouterr().out.splitlines()
    flags = shlex.split(advice.removeprefix("train on with: "))
    assert (
        flags[0] == f"--ckpt_load_path={tmp_path / 'a run'}/checkpoints"
        and "--max_seq_len=64" in flags
    )
    shape = fms_fsdp.load_model(str(tmp_path / "a run"))[0].config
    cfg = parse_flags(TrainConfig, [*flags, "--use_dummy_dataset=True", "--seq_length=32"])
    made = resolve_model(cfg.model, seq_length=32)
    free = {"init_std": shape.init_std, "dropout": 0.0, "attn_dropout": 0.0}
    assert replace(made, **free) == replace(shape, **free)
    assert hf_config(made, "float32", None)["vocab_size"] == 300 and made.max_seq_len == 64
    longer = parse_flags(TrainConfig, [*flags, "--use_dummy_dataset=True", "--seq_length=65"])
    with pytest.raises(ValueError, match=r"--max_seq_len=64 must be at least --seq_length=65"):
        resolve_model(longer.model, seq_length=65)


@pytest.mark.slow
def test_a_training_goes_on_from_imported_weights_alike_on_any_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the flags that the command prints; and in the imported run's own folder."""
    their_model("llama3, tied, grouped").save_pretrained(tmp_path / "hf")
    assert imported(tmp_path / "hf", tmp_path / "run") == 0
    *_, advice = capsys.readouterr().out.splitlines()
    flags = advice.removeprefix("train on with: ").split()
    assert main(["ckpt", "verify", f"--path={tmp_path / 'run'}"]) == 0
    assert (
        "--rope_scaling=llama3:8:1:4:32" in flags
        and problem(tmp_path / "run/checkpoints/step_0") == ""
    )
    common = [
        "--use_dummy_dataset=True",
        "--seq_length=32",
        "--report_interval=1",
        "--mixed_precision=False",
    ]
    common += ["--global_batch_size=4", "--num_steps=2", "--trackers=none"]
    first = {}
    for ranks in (0, 2, 4):
        folder = tmp_path / f"ranks{ranks}"
        said = trained(*common, *flags, f"--output_dir={folder}", nproc=ranks)
        assert "loading weights only, from step 0" in said
        first[ranks] = losses(folder)
    assert first[2] == pytest.approx(first[0], rel=1e-6) and first[4] == pytest.approx(
        first[0], rel=1e-6
    )
    fresh = trained(*common, *flags[1:], f"--output_dir={tmp_path / 'fresh'}")
    assert "only weights" not in fresh and losses(tmp_path / "fresh")[0] != first[0][0]
    assert main(["export", f"--path={tmp_path}/ranks0", f"--output={tmp_path}/out"]) == 0
    said = json.loads((tmp_path / "out/config.json").read_text())
    assert said["max_position_embeddings"] == 64  # not the 32 of the rows
    inside = trained(*common, *flags[1:], f"--output_dir={tmp_path / 'run'}")
    assert "loading weights only" in inside and metrics(tmp_path / "run")[1]["loss"] == first[0][0]
