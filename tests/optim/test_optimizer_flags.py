"""`--optimizer` and its companions: defaults, bytes of the state, and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from fms_fsdp.config import OptimConfig
from fms_fsdp.config.optim import OPTIMIZERS
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.optim.optimizers import (
    TORCH_OPTIMIZERS,
    build_optimizers,
    optimizer_arguments,
    own_optimizers,
    state_bytes,
)
from tests.cli import TINY, losses, run, trained
from tests.specs import planned
from tests.warm import command


@pytest.mark.parametrize("name", [*OPTIMIZERS, "torch.optim:RAdam"])
def test_optimizer_is_accepted_with_its_defaults(name: str) -> None:
    flags = ("--decay_norms=True", "--decay_embeddings=False") if name != "rprop" else ()
    planned([*TINY, f"--optimizer={name}", *flags])


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_sm3_with_fp16_logs_a_note(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fms_fsdp")
    planned([*TINY, "--optimizer=sm3", f"--precision={precision}"])
    assert ("note: sm3 sums squared gradients" in caplog.text) == (precision == "fp16")


def test_muon_requires_matrices_in_blocks() -> None:
    with pytest.raises(ValueError, match="muon requires matrices in blocks"):
        build_optimizers(OptimConfig(optimizer="muon"), nn.Linear(3, 3))


def test_only_rprop_has_no_weight_decay() -> None:
    settings = {name: optimizer_arguments(name, OptimConfig()) for name in OPTIMIZERS}
    # muon hands what is no matrix of a block to adamw
    settings["muon"] |= settings["adamw"]
    assert {name for name in OPTIMIZERS if "weight_decay" not in settings[name]} == {"rprop"}
    assert TORCH_OPTIMIZERS.keys() | own_optimizers().keys() == set(OPTIMIZERS)


def test_norms_and_embeddings_decay_by_flag() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.distance_bias = nn.Embedding(3, 2), nn.Embedding(3, 2)
            self.blocks, self.norm = nn.Linear(2, 2), nn.RMSNorm(2)

    for norms, embeddings in ((False, True), (True, False)):
        model = Model()
        section = OptimConfig(optimizer="muon", decay_norms=norms, decay_embeddings=embeddings)
        parts = build_optimizers(section, model).optimizers
        groups = [group for part in parts for group in part.param_groups]
        decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
        found = {name: decay[id(p)] for name, p in model.named_parameters()}
        assert found == {
            "embed.weight": 0.1 * embeddings,
            "distance_bias.weight": 0.1 * embeddings,
            "blocks.weight": 0.1,
            "blocks.bias": 0.1 * norms,
            "norm.weight": 0.1 * norms,
        }


def test_state_bytes_follow_the_optimizer() -> None:
    model = VARIANTS["7b"]
    n = num_params(model)
    found = {name: state_bytes(OptimConfig(optimizer=name), model) / n for name in OPTIMIZERS}
    assert 4 < found.pop("muon") < 4.5
    assert found.pop("adafactor") < 0.1 and 4 < found.pop("sm3") < 4.1
    assert found == {
        **dict.fromkeys(("adamw", "adam", "lamb", "adadelta", "adamax", "rprop"), 8),
        **dict.fromkeys(("adagrad", "rmsprop", "novograd"), 4),
        "sgd": 0,
        "madgrad": 12,
    }
    settings = OptimConfig(optimizer="rmsprop", optimizer_kwargs=("momentum=0.9", "centered=true"))
    assert state_bytes(settings, model) == 12 * n


@pytest.mark.slow
def test_run_resumes_with_its_optimizer_only(tmp_path: Path) -> None:
    """On two ranks with Muon; `ckpt verify` finds its checkpoints valid."""
    through, parts = tmp_path / "through", tmp_path / "parts"
    flags = [*TINY, "--lr_schedule=constant", "--warmup=0", "--optimizer=muon"]
    flags.append("--mixed_precision=false")
    trained(*flags, f"--output_dir={through}", "--num_steps=3")
    flags += [f"--output_dir={parts}", "--checkpoint_interval=3", "--batch_size=1"]
    trained(*flags, "--num_steps=3", nproc=2)
    assert losses(parts) == pytest.approx(losses(through), rel=1e-3)
    ended = run(*flags, "--optimizer=adamw", "--num_steps=6", nproc=2)
    assert ended.returncode != 0
    assert "--optimizer=adamw does not match the state of the checkpoint" in ended.stderr
    assert "(muon); set it so" in ended.stderr
    trained(*flags, "--optimizer_kwargs=scale=original", "--num_steps=6", nproc=2)
    verified = command("ckpt", "verify", f"--path={parts}")
    assert verified.returncode == 0 and verified.stdout.count("valid: ") == 2, verified.stdout


def test_settings_that_change_the_state_are_rejected(tmp_path: Path) -> None:
    flags = [*TINY, f"--output_dir={tmp_path}", "--checkpoint_interval=1", "--optimizer=sgd"]
    trained(*flags, "--num_steps=1")
    rejected = run(*flags, "--num_steps=2", "--optimizer_kwargs=momentum=0.9")
    assert rejected.returncode == 2 and rejected.stderr.count("\n") == 1, rejected.stderr
    assert "--optimizer_kwargs=momentum=0.9 does not match the state" in rejected.stderr
