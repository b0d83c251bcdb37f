"""The loss scale of fp16: the loss is multiplied by it, so that small gradients do not become zero.

fp16 holds no number beyond 65504 and none below 6e-8. A dynamic scale is as large as gradients allow:

    an overflow                       the step is skipped; it uses up one of `hysteresis`
    an overflow when none is left     the scale is halved too, but not below `floor`
    `window` steps in a row without   the scale is doubled, at most to 2^64; `hysteresis` is whole again

An overflow at `floor` that would halve the scale ends the run (run/health.py). All of it stays on the device,
so nothing waits for it.
Source: Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740; the rule is that of Megatron-LM,
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/grad_scaler.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fms_fsdp.config import PrecisionConfig

_FIRST, _LARGEST = 2.0**16, 2.0**64


class LossScale:
    """The factor of the loss, and the rule that moves the factor; equal on all ranks, because norms are
    equal.

    The section names a scale that never moves, or 0 for a dynamic one. `scale`: of the next step, fp32
    without dims. `before`: of the last one. `is_stuck`: whether that overflowed where the scale can be halved
    no more.
    """

    def __init__(self, section: PrecisionConfig, device: torch.device) -> None:
        self.is_dynamic = section.loss_scale == 0
        self._window, self._hysteresis = section.loss_scale_window, section.loss_scale_hysteresis
        self._floor = section.min_loss_scale
        self.scale = self.before = torch.tensor(section.loss_scale or max(_FIRST, self._floor), device=device)
        self._steps, self._left = (torch.tensor(number, device=device) for number in (0, self._hysteresis))
        self.is_stuck = torch.tensor(False, device=device)

    @torch.no_grad()
    def update(self, grad_norm: torch.Tensor) -> None:
        """Takes in the gradient norm of a step that was made with `scale`."""
        self.before = self.scale
        if not self.is_dynamic:
            return
        good = torch.isfinite(grad_norm)
        steps = torch.where(good, self._steps + 1, 0)
        left = torch.where(good, self._left, (self._left - 1).clamp(min=0))
        doubles, halves = steps >= self._window, ~good & (left == 0)
        factor = 1 + doubles.float() - 0.5 * halves.float()
        self.is_stuck = halves & (self.scale <= self._floor)
        self.scale = (self.scale * factor).clamp(self._floor, _LARGEST)
        self._steps = torch.where(doubles, 0, steps)
        self._left = torch.where(doubles, self._hysteresis, left)

    def state_dict(self) -> dict[str, float]:
        """Returns the state that a resume needs, as plain numbers; waits for the device."""
        return {"scale": self.scale.item(), "steps": self._steps.item(), "left": self._left.item()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes over a state of `state_dict`; settings and a fixed scale stay as this launch has set them."""
        if self.is_dynamic:
            self.scale.fill_(state["scale"]).clamp_(self._floor, _LARGEST)
            self._steps.fill_(state["steps"])
            self._left.fill_(state["left"]).clamp_(max=self._hysteresis)
