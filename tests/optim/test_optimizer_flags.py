"""`--optimizer` and its companions: what is refused, what is kept, and how a run goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from fms_fsdp.config import OptimConfig
from fms_fsdp.config.optim import OPTIMIZERS
from fms_fsdp.distributed.runtime import World, set_up_log
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

HERE = [*OPTIMIZERS]


def refusal(*flags: str) -> str:
    """The line that refuses the flags before any work; empty if they are accepted."""
    set_up_log(World(1, 0, 2, 2))  # quiet
    try:
        planned(["--model_variant=tiny", "--use_dummy_dataset=True", *flags])
    except ValueError as error:
        return str(error)
    return ""


REFUSED = {
    "--optimizer=adamv": "did you mean adam?",
    "--optimizer=torch.optim:Nothing": "must be importable as module:function",
    "--optimizer=no_such_module:build": "must be importable as module:function",
    "--optimizer=os:getcwd": "must take an argument: the parameters",
    "--optimizer=textwrap:dedent": "cannot be built",
    "--optimizer=muon --optimizer_kwargs=nesterof=true": "did you mean nesterov?",
    "--optimizer=sgd --optimizer_kwargs=momentum": "must have the form key=value",
    "--optimizer=sgd --optimizer_kwargs=momentum=high": "--optimizer_kwargs=high must be a number",
    "--optimizer=sgd --optimizer_kwargs=momentum=-1": "Invalid momentum value: -1",
    "--optimizer=sgd --optimizer_kwargs=lr=1": "has a flag of its own; use --learning_rate",
    "--optimizer_kwargs=betas=0.9:0.99": "use --adam_beta1 and --adam_beta2",
    "--optimizer_kwargs=eps=1e-6": "use --adam_eps",
    "--optimizer_kwargs=weight_decay=0": "use --weight_decay",
    "--optimizer_kwargs=fused=false": "adamw must be one of amsgrad; did you mean amsgrad?",
    "--optimizer=rprop --optimizer_kwargs=etas=2:3": "cannot be built: Invalid eta values",
    "--optimizer=muon --optimizer_kwargs=scale=large": "scale=large must be rms or original",
    "--optimizer=muon --optimizer_kwargs=ns_steps=1e9": "ns_steps=1000000000 must be from 1 to 100",
    "--optimizer=muon --optimizer_kwargs=momentum=1": "momentum=1 must be at least 0 and below 1",
    "--optimizer=adafactor --optimizer_kwargs=d=0": "beta2_decay must be at most 0",
    "--optimizer=torch.optim:SGD --adam_beta2=0.9": "--adam_beta1 has no effect on --optimizer=torch.optim",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_does_not_fit_is_one_line_before_any_work(flags: str) -> None:
    line = refusal(*flags.split())
    assert REFUSED[flags] in line and line.startswith("--") and "\n" not in line, line


@pytest.mark.parametrize("name", [*HERE, "torch.optim:RAdam"])
def test_every_optimizer_is_accepted_with_its_defaults(name: str) -> None:
    flags = ("--decay_norms=True", "--decay_embeddings=False") if name != "rprop" else ()
    assert refusal(f"--optimizer={name}", *flags) == ""


def test_sm3_with_fp16_is_warned_of() -> None:
    argv = (*TINY, "--optimizer=sm3", "--num_steps=1", "--trackers=none", "--dry_run")
    assert "note: sm3 sums squared gradients" in trained(*argv, "--precision=fp16")
    assert "note: sm3" not in trained(*argv, "--precision=fp32")


def test_a_model_without_matrices_in_blocks_cannot_have_muon() -> None:
    with pytest.raises(ValueError, match="muon requires matrices in blocks"):
        build_optimizers(OptimConfig(optimizer="muon"), nn.Linear(3, 3))


def test_the_table_of_flags_without_effect_is_that_of_the_signatures() -> None:
    settings = {name: optimizer_arguments(name, OptimConfig()) for name in HERE}
    settings["muon"] |= optimizer_arguments(
        "adamw", OptimConfig()
    )  # for what is no matrix of a block
    assert {name for name in HERE if "weight_decay" not in settings[name]} == {"rprop"}
    assert TORCH_OPTIMIZERS.keys() | own_optimizers().keys() == set(OPTIMIZERS)


def test_norms_and_the_embedding_decay_where_asked() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.distance_bias, self.blocks, self.norm = (
                nn.Embedding(3, 2),
                nn.Embedding(3, 2),
                nn.Linear(2, 2, bias=False),
                nn.RMSNorm(2),
            )

    for norms, embeddings in ((False, True), (True, False)):
        model = Model()
        section = OptimConfig(optimizer="muon", decay_norms=norms, decay_embeddings=embeddings)
        groups = [
            group
            for part in build_optimizers(section, model).optimizers
            for group in part.param_groups
        ]
        decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
        found = {name: decay[id(p)] for name, p in model.named_parameters()}
        expected = {"embed.weight": embeddings, "blocks.weight": True, "norm.weight": norms}
        expected["distance_bias.weight"] = embeddings
        assert found == {name: 0.1 if decays else 0.0 for name, decays in expected.items()}


def test_bytes_of_state_are_those_of_what_is_kept() -> None:
    model = VARIANTS["7b"]
    a_parameter = {
        name: state_bytes(OptimConfig(optimizer=name), model) / num_params(model) for name in HERE
    }
    whole = {
        "adamw": 8,
        "adam": 8,
        "sgd": 0,
        "lamb": 8,
        "adagrad": 4,
        "adadelta": 8,
        "adamax": 8,
        "rmsprop": 4,
    }
    assert {name: a_parameter[name] for name in whole} == whole
    assert (a_parameter["rprop"], a_parameter["novograd"], a_parameter["madgrad"]) == (8, 4, 12)
    assert (
        4 < a_parameter["muon"] < 4.5
        and a_parameter["adafactor"] < 0.1 < 4 < a_parameter["sm3"] < 4.1
    )
    settings = OptimConfig(optimizer="rmsprop", optimizer_kwargs=("momentum=0.9", "centered=true"))
    assert state_bytes(settings, model) == 12 * num_params(model)


def test_a_run_goes_on_with_its_optimizer_and_with_no_other(tmp_path: Path) -> None:
    """On two ranks with Muon; and its checkpoints are sound to `ckpt verify`."""
    flags = (
        *TINY,
        "--lr_schedule=constant",
        "--warmup=0",
        "--optimizer=muon",
        "--mixed_precision=false",
    )
    through = (*flags, f"--output_dir={tmp_path / 'through'}", "--num_steps=6")
    trained(*through)
    parts = (
        *flags,
        f"--output_dir={tmp_path / 'parts'}",
        "--checkpoint_interval=3",
        "--batch_size=1",
    )
    trained(*parts, "--num_steps=3", nproc=2)
    for given, text in {
        "--optimizer=adamw": "--optimizer=adamw does not match the state of the checkpoint",
        "--optimizer_kwargs=scale=original": "",
    }.items():
        ended = run(*parts, given, "--num_steps=6", nproc=2)
        assert (text in ended.stdout + ended.stderr) and (ended.returncode != 0) == bool(text), (
            ended.stderr
        )
        if text:
            assert "(muon); set it so" in ended.stdout + ended.stderr
    verified = command("ckpt", "verify", f"--path={tmp_path / 'parts'}")
    assert verified.returncode == 0 and verified.stdout.count("valid: ") == 2, (
        verified.stdout + verified.stderr
    )
    first = losses(tmp_path / "through")[:3]
    assert losses(tmp_path / "parts")[:3] == pytest.approx(first, rel=1e-3)
    assert re.search("adamw|muon", (tmp_path / "parts" / "log.txt").read_text())


def test_settings_that_change_the_state_do_not_resume(tmp_path: Path) -> None:
    flags = (
        *TINY,
        f"--output_dir={tmp_path}",
        "--checkpoint_interval=1",
        "--num_steps=1",
        "--optimizer=sgd",
    )
    trained(*flags)
    refused = run(*flags, "--num_steps=2", "--optimizer_kwargs=momentum=0.9")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert (
        "--optimizer_kwargs=momentum=0.9 does not match the state of the checkpoint"
        in refused.stderr
    )
    assert torch.isfinite(torch.tensor(losses(tmp_path))).all()
