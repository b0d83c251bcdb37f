"""The factory of models, and the buffers of a user's modules."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.init import clean_name
from fms_fsdp.models.llama import Llama
from fms_fsdp.packages import import_function


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


def fill_buffers(model: Llama, device: str | torch.device) -> None:
    """Gives the modules of `--model_builder` the values of their buffers, on this device.

    A model that was built on the meta device has none. The builder computes them again, on the CPU;
    its parameters stay on the meta device, so that no rank holds all of them.
    """
    names = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    if not names:
        return

    def drop_values(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(drop_values)  # type: ignore[arg-type]
    try:
        with torch.device("cpu"):
            rebuilt = build_model(model.config)
    finally:
        hook.remove()
    values = dict(rebuilt.named_buffers(remove_duplicate=False))
    for full_name in names:
        path, _, name = full_name.rpartition(".")
        setattr(model.get_submodule(path), name, values[clean_name(full_name)].to(device))
