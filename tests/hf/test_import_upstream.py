"""Checkpoints of upstream fms-fsdp: golden logits of the LLaMA of ibm-fms 1.13.1 with weights by formula."""

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
from tests.cases import cases

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


@pytest.mark.parametrize(
    ("form", "alpha"),
    [("file fused", 1), ("file older", 2), ("folder fused older", 1), ("folder", 2)],
)
def test_logits_equal_ibm_fms(tmp_path: Path, form: str, alpha: int) -> None:
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


@cases("""
    flags | text
    --num_layers=3 | weight model.layers.2.input_layernorm.weight is missing
    --num_layers=1 | layers.1.input_layernorm.weight is not part of this model
    --ffn_hidden_size=176 | must be of (352, 64), not (320, 64); give the flags
    --num_kv_heads=4 | must be of (192, 64), not (128, 64); give the flags
    --path=code.pth | code.pth is not a checkpoint of upstream fms-fsdp
    --path=absent.pth | does not exist; name a checkpoint
    --path=hf | is read in place: --init_from_hf
""")
def test_other_checkpoint_is_rejected(
    tmp_path: Path,
    flags: str,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, "file fused")
    torch.save({"model_state": Code()}, "code.pth")
    Path("hf").mkdir()
    Path("hf/config.json").write_text(json.dumps({"model_type": "llama"}))
    own = [*SHAPE, "--path=step_3_ckp.pth"]
    given = [flag for flag in own if flag.partition("=")[0] != flags.partition("=")[0]]
    assert main(["import", "--output=run", *given, flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line and not Path("run").exists() and not Path("ran").exists()
