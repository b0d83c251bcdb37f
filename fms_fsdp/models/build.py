"""The factory of models."""

from __future__ import annotations

from fms_fsdp.errors import import_function
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.llama import Llama


def build_model(config: TransformerConfig, layers: range | None = None) -> Llama:
    """Builds the model of this shape, or the pipeline stage with these layers.

    Raises:
        UserError: `--model_builder` names no function.
    """
    if config.model_builder:
        model: Llama = import_function(config.model_builder, "--model_builder")(config)
        return model
    if config.is_llama:
        return Llama(config, layers)
    from fms_fsdp.models.gpt import GPT

    return GPT(config, layers)
