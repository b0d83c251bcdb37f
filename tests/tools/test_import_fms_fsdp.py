"""Checkpoints of fms-fsdp: a golden of the LLaMA of ibm-fms 1.13.1, whose weights are a formula."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fms_fsdp import load_model
from fms_fsdp.__main__ import main

SHAPE = "--num_layers=2 --hidden_size=64 --ffn_hidden_size=160 --num_attention_heads=4 --num_kv_heads=2".split()
SHAPE.append("--rope_theta=500")
ROWS = {"query": 64, "key": 32, "value": 32, "wg": 160, "w1": 160, "dense": 64, "w2": 64}
FUSED = {"qkv_fused": ("query", "key", "value"), "wg1_fused": ("wg", "w1")}
# logits of tokens 0, 17, 95 at positions 0, 5 and the last; alpha 1 over 24 positions, alpha 2 over 48
GOLDEN = {
    1: [[-0.5305, 0.51797, 0.53957], [-0.2262, -0.0052, 0.71724], [0.44065, 0.94107, 0.71865]],
    2: [[-0.5305, 0.51797, 0.53957], [-0.2353, -0.01952, 0.71419], [0.213, -0.36407, 0.65266]],
}


def made(name: str, *shape: int) -> torch.Tensor:
    """The weight of that name, of ibm-fms 1.13.1."""
    for fused, parts in FUSED.items():
        if fused in name:
            return torch.cat(
                [made(name.replace(fused, part), ROWS[part], shape[1]) for part in parts]
            )
    wave = torch.arange(math.prod(shape), dtype=torch.float64)
    wave = torch.sin(wave * wave * 0.37 + zlib.crc32(name.encode()) % 1000)
    return (1 + 0.1 * wave if len(shape) == 1 else 0.1 * wave).float().view(shape)


def weights(fused: bool) -> dict[str, torch.Tensor]:
    names = ("qkv_fused", "wg1_fused") if fused else ("query", "key", "value", "wg", "w1")
    found = {"base_model.embedding.weight": made("base_model.embedding.weight", 96, 64)}
    for layer in range(2):
        start = f"base_model.layers.{layer}"
        for norm in ("ln", "ff_ln"):
            found[f"{start}.{norm}.weight"] = made(f"{start}.{norm}.weight", 64)
        for part in (*names, "dense", "w2"):
            place = (
                "ff_sub_layer" if part[0] == "w" else "attn" if part == "dense" else "attn.in_proj"
            )
            name, inner = f"{start}.{place}.{part}.weight", 160 if part == "w2" else 64
            found[name] = made(name, ROWS.get(part, 0), inner)
    found["base_model.dec_norm.weight"] = made("base_model.dec_norm.weight", 64)
    return found | {"head.weight": made("head.weight", 96, 64)}


def older(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names of ibm-fms before 1.0, of a compiled model, with the table that it kept."""
    changes = {"base_model.": "", "embedding": "shared.emb", "in_proj.": ""}
    found = {"_orig_mod.rot_emb.freqs": torch.zeros(3)}
    for name, value in state.items():
        name = "shared.head.weight" if name == "head.weight" else name
        for old, new in changes.items():
            name = name.replace(old, new)
        found[f"_orig_mod.{name}"] = value
    return found


def save(folder: Path, form: str) -> Path:
    state = weights(fused="fused" in form)
    state = older(state) if "older" in form else state
    if "file" in form:
        torch.save({"model_state": state, "step": 3, "tokens_seen": 7}, folder / "step_3_ckp.pth")
        return folder / "step_3_ckp.pth"
    for step in (9, 10):  # the newest is not the last by name
        optimizer = {
            "state": {"exp_avg": torch.ones(4), "step": 1.0},
            "param_groups": [{"lr": 0.1}],
        }
        changed = {name: value + (step == 9) for name, value in state.items()}
        place = folder / "checkpoints" / f"step_{step}_ckp"
        dcp.save({"model_state": changed, "optimizer_state": optimizer}, checkpoint_id=place)
        torch.save({"step": step}, place / "metadata.pth")
    return folder


@pytest.mark.parametrize("form", ["file fused", "file older", "folder fused older", "folder"])
@pytest.mark.parametrize("alpha", [1, 2])
def test_logits_are_those_of_ibm_fms(tmp_path: Path, form: str, alpha: int) -> None:
    path, run = save(tmp_path, form), tmp_path / "run"
    argv = ["import", f"--path={path}", f"--output={run}", f"--ntk_alpha={alpha}"]
    assert main([*argv, *SHAPE]) == 0
    model, _ = load_model(str(run))
    tokens = (torch.arange(24 * alpha) * 7 % 96)[None]
    with torch.no_grad():
        found = model(tokens)[0, [0, 5, -1]][:, [0, 17, 95]]
    torch.testing.assert_close(found, torch.tensor(GOLDEN[alpha]), rtol=0, atol=2e-5)


class Code:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("ran"),)


def test_what_is_no_such_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, "file fused")

    def refusal(*argv: str) -> str:
        given = {argument.partition("=")[0] for argument in argv}
        shape = [flag for flag in SHAPE if flag.partition("=")[0] not in given]
        path_given = [] if "--path" in given else [f"--path={path}"]
        assert main(["import", "--output=run", *path_given, *shape, *argv]) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1 and not Path("run").exists()
        return text

    assert "weight model.layers.2.input_layernorm.weight is missing" in refusal("--num_layers=3")
    assert "layers.1.input_layernorm.weight is not part of this model" in refusal("--num_layers=1")
    assert "must be of (352, 64), not (320, 64); give the flags" in refusal("--ffn_hidden_size=176")
    assert "must be of (192, 64), not (128, 64); give the flags" in refusal("--num_kv_heads=4")
    torch.save({"model_state": Code()}, "code.pth")
    assert "there is no model_state of weights alone" in refusal("--path=code.pth")
    assert "does not exist; name a checkpoint" in refusal("--path=absent.pth")
    assert not Path("ran").exists()
    Path("hf").mkdir()
    Path("hf/config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "is read in place: --init_from_hf" in refusal("--path=hf")
