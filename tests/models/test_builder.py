"""A model of the user's own: the page's example trains, loads and is counted."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fms_fsdp
from fms_fsdp.config import BF16, FP32, ParallelConfig, Precision
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.generate import _allocate
from fms_fsdp.hf.families import find_family
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.init import clean_name, init_weights
from fms_fsdp.models.llama import FeedForward, Llama
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.parallel.parallelize import parallelize
from tests.cli import ROOT, TINY, run, trained


class Wide(Llama):
    """Blocks with parameters that no formula knows."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        for block in self.blocks.values():
            block.extra = torch.nn.Linear(3, 5)


def test_parameters_of_custom_model_are_counted() -> None:
    config = replace(VARIANTS["tiny"], model_builder=f"{__name__}:Wide")
    assert isinstance(build_model(config), Wide)
    assert num_params(config) == num_params(VARIANTS["tiny"]) + 2 * 20
    with pytest.raises(ValueError, match="--model_builder=tests.models.test_builder:Wide"):
        find_family(config)


class WithExperts(Llama):
    """The last block has tensors of three dims, as experts have, and one of none."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        block = self.blocks[str(config.num_layers - 1)]
        block.experts = torch.nn.Parameter(torch.empty(600, 4, 8))
        block.gain = torch.nn.Parameter(torch.empty(()))


def test_tensors_of_any_dims_are_initialized_and_counted() -> None:
    config = replace(VARIANTS["tiny"], model_builder=f"{__name__}:WithExperts")
    model = build_model(config)
    init_weights(model, 1)
    block = model.blocks[str(config.num_layers - 1)]
    assert block.gain.item() == 1
    assert block.experts.std().item() == pytest.approx(config.init_std, rel=0.02)
    assert len(block.experts.unique()) > 0.99 * block.experts.numel()
    # The count of a block is the mean of all, rounded down.
    assert num_params(config) == num_params(VARIANTS["tiny"]) + 600 * 4 * 8
    assert num_params(config) + 1 == sum(weight.numel() for weight in model.parameters())


class Gain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.full((3,), 0.5), persistent=False)
        self.weight = torch.nn.Parameter(torch.ones(3))


def with_buffers(config: TransformerConfig) -> Llama:
    model = Llama(config)
    first = Gain()
    for block in model.blocks.values():
        block.extra = Gain()
        block.extra.gain = first.gain  # one buffer of several modules
    return model


@pytest.mark.parametrize("low_cpu_fsdp", [False, True])
def test_buffers_have_the_values_of_the_builder(low_cpu_fsdp: bool) -> None:
    config = replace(VARIANTS["tiny"], model_builder=f"{__name__}:with_buffers")
    cpu = torch.device("cpu")
    section = ParallelConfig(recompute="blocks", low_cpu_fsdp=low_cpu_fsdp)
    mesh = Mesh(ParallelDims("none"), 0, "cpu")
    trained = parallelize(config, section, mesh, device=cpu, precision=BF16, seed=1)
    for model in (trained, _allocate(config, "cpu")):
        gains = dict(model.named_buffers(remove_duplicate=False))
        assert len(gains) == config.num_layers
        assert all(gain.tolist() == [0.5] * 3 for gain in gains.values())
        assert all(parameter.device == cpu for parameter in model.parameters())


class Doubled(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Convolution(torch.nn.Module):
    """A layer of torch with weights, and a weight of its own."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.inner = torch.nn.Conv1d(config.hidden_size, config.hidden_size, 1)
        self.mixing = torch.nn.Parameter(torch.empty(config.hidden_size, config.hidden_size))

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return self.inner(x_BSD.transpose(1, 2)).transpose(1, 2) @ self.mixing


def with_own_layers(config: TransformerConfig) -> Llama:
    model = Llama(config)
    model.blocks["0"].feed_forward = Convolution(config)
    hidden = config.hidden_size
    model.blocks["1"].attention.o_proj = Doubled(hidden, hidden, bias=False)
    return model


def own_gradients(precision: Precision, **flags: str) -> dict[str, torch.Tensor]:
    """Returns the loss and the gradients of `with_own_layers` on one process."""
    builder = f"{__name__}:with_own_layers"
    config = replace(VARIANTS["tiny"], model_builder=builder, max_seq_len=32)
    section = ParallelConfig(**flags)  # type: ignore[arg-type]
    mesh = Mesh(ParallelDims("none"), 0, "cpu")
    cpu = torch.device("cpu")
    model = parallelize(config, section, mesh, device=cpu, precision=precision, seed=1)
    tokens = torch.arange(64).view(2, 32)
    loss, _ = model(tokens, tokens.roll(-1, 1))
    loss.backward()
    gradients = {clean_name(name): weight.grad for name, weight in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("flags", [{}, {"recompute": "blocks"}], ids=str)
@pytest.mark.parametrize("float8", ["", "row"])
def test_own_layers_keep_their_forward_pass(float8: str, flags: dict[str, str]) -> None:
    """float8 replaced that of a Linear; without FSDP, 16 bits met weights in fp32."""
    exact = own_gradients(FP32)
    found = own_gradients(replace(BF16, float8=float8), **flags)
    for name, value in exact.items():
        assert found[name].dtype == torch.float32
        error = (found[name] - value).norm() / value.norm()
        assert error < (0.08 if float8 else 0.02), name


@pytest.mark.slow
def test_model_of_the_docs_trains_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "reference" / "models.md").read_text()
    script = re.search(r"cat > my_model.py <<'END'\n(.*?)END\n", page, re.DOTALL)
    assert script is not None
    (tmp_path / "my_model.py").write_text(script[1])
    flags = (*TINY, "--num_steps=2", "--trackers=none", f"--output_dir={tmp_path / 'run'}")
    trained(*flags, "--model_builder=my_model:build", PYTHONPATH=f"{tmp_path}:{ROOT}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    model, _ = fms_fsdp.load_model(str(tmp_path / "run"))
    feed = model.blocks["1"].feed_forward
    assert type(feed).__name__ == "GatedReLU" and isinstance(feed, FeedForward)
    for other, text in (
        (["--num_steps=3"], "--model_builder= does not match the checkpoint"),
        (
            ["--model_builder=nowhere:f", f"--output_dir={tmp_path / 'no'}"],
            "must be importable as module:function",
        ),
    ):
        rejected = run(*flags, *other)
        assert rejected.returncode == 2 and text in rejected.stderr
    assert rejected.stderr.count("\n") == 1 and not (tmp_path / "no").exists()
