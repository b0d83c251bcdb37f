"""config.json files of published models are read, with the published number of parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fms_fsdp.errors import UserError
from fms_fsdp.hf.config import config_from_hf
from fms_fsdp.models.flops import num_params

CONFIGS = json.loads(Path(__file__).with_name("real_configs.json").read_text())
PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama31_8b": 8_030_261_248,
    "llama32_1b": 1_235_814_400,
    "tinyllama": 1_100_048_384,
    "smollm2_135m": 134_515_008,
    "deepseek_coder_1b": 1_346_471_936,
    "mistral_v01": 7_241_732_096,
    "qwen2_05b": 494_032_768,
    "qwen25_05b": 494_032_768,
    "r1_distill_qwen_15b": 1_777_088_000,
    "qwen3_06b": 596_049_920,
    "gpt2": 124_439_808,
    "pythia_70m": 70_426_624,
    "neox_20b": 20_554_567_680,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_config_is_read(name: str) -> None:
    assert num_params(config_from_hf(CONFIGS[name])) == PARAMETERS[name]


def test_unknown_field_is_off_if_false() -> None:
    config = CONFIGS["llama2_7b"]
    assert config_from_hf(config | {"use_new_trick": False}) == config_from_hf(config)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama2_7b", "use_new_trick", True),
        ("llama2_7b", "new_trick", 0),
        ("llama2_7b", "is_causal", False),
        ("gpt2", "scale_attn_weights", False),
        ("pythia_70m", "attention_bias", False),
    ],
)
def test_field_that_changes_the_model_is_rejected(name: str, field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"^{field}={value} is not supported for "):
        config_from_hf(CONFIGS[name] | {field: value})
