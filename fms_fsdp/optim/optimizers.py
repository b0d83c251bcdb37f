"""The optimizer: AdamW over the model's parameters, matrices decayed and norms not."""

from __future__ import annotations

import torch
from torch import nn

from fms_fsdp.config import OptimConfig


def build_optimizer(section: OptimConfig, model: nn.Module) -> torch.optim.AdamW:
    """AdamW, fused where torch has a fused kernel, with its state allocated, so that a checkpoint can be loaded into it.

    Decay applies to tensors of two or more dims only. The learning rate is set by the loop before every step.
    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", https://arxiv.org/abs/1711.05101.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=section.learning_rate,
        betas=(section.adam_beta1, section.adam_beta2),
        eps=section.adam_eps,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def step_if_finite(optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor) -> None:
    """The optimizer's step, or nothing at all, step count included, where `grad_norm` is not finite; the device decides.

    Fused optimizers take `found_inf` for this, as GradScaler hands it to them.
    """
    optimizer.found_inf = (~torch.isfinite(grad_norm)).to(torch.float32)  # type: ignore[attr-defined]
    optimizer.step()
