"""A model of the user's own: the page's example trains, loads and is counted."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fms_fsdp
from fms_fsdp.hf.config import find_family
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.llama import FeedForward, Llama
from fms_fsdp.models.variants import VARIANTS
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
