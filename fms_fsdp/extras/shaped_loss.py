"""The softmax of capped logits c tanh(logits / c), with z_loss · log(Z)² beside the loss.

`models/loss.py` computes the loss of a head with this softmax where `--logit_softcap` or `--z_loss` is given.

C rows of a chunk, V vocabulary.

Source: Chowdhery et al. 2022 (PaLM), section 5, for z_loss; Gemma Team 2024 for the cap.
"""

from __future__ import annotations

import torch

from fms_fsdp.models.loss import Rows, Scale


def shaped_softmax_(
    logits_CV: torch.Tensor,
    index_C1: torch.Tensor,
    scale: Scale = 1.0,
    *,
    z_loss: float,
    softcap: float,
) -> Rows:
    """The gradient of each row at its label, its loss and, with `z_loss`, its z-loss; turns the logits into
    their gradients elsewhere, times `scale`, in place.

    A factor of 0 leaves its part out. The gradient: (p (1 + 2 z_loss log Z) - onehot) · (1 - tanh²).
    """
    capped_CV = logits_CV.float()
    slope_CV = torch.ones(1, 1, device=logits_CV.device).expand_as(capped_CV)
    if softcap:
        tanh_CV = (capped_CV / softcap).tanh()
        capped_CV, slope_CV = softcap * tanh_CV, 1 - tanh_CV.square()
    logz_C1 = capped_CV.logsumexp(dim=-1, keepdim=True)
    logp_CV, pull_C1 = capped_CV - logz_C1, 2 * z_loss * logz_C1
    label_C1 = logp_CV.gather(1, index_C1)
    logits_CV.copy_(logp_CV.exp() * ((1 + pull_C1) * scale) * slope_CV)
    gradient_C1 = (label_C1.expm1() + label_C1.exp() * pull_C1) * slope_CV.gather(1, index_C1)
    return gradient_C1, -label_C1, *([z_loss * logz_C1.square()] if z_loss else [])
