"""The softmax of logits of which each rank has some columns: no rank ever has whole rows.

    rank 0: columns 0 … v-1     ┐ largest ─ all-reduce ─ sum of exponentials │ label's logit ─ all-reduce ─ p
    rank 1: columns v … 2v-1    ┘

The two messages have one and two numbers for each row.

C rows of a chunk, V columns of this rank.

Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fms_fsdp.models.loss import Rows, Scale
from fms_fsdp.models.masks import compiled


def split_softmax_(
    logits_CV: torch.Tensor,
    index_C1: torch.Tensor,
    scale: Scale = 1.0,
    *,
    group: dist.ProcessGroup,
    compiles: bool = False,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Rows:
    """The softmax of capped logits of which each rank of the group has some columns, with two messages: the
    largest logit of each row, then the sum of its exponentials beside its label's logit.

    `index_C1` counts from the first column of this rank, and lies outside where another rank has the label.
    Returns the gradient of each row where `clamp` puts the index, its loss and, with `z_loss`, its z-loss:
    losses are alike on all ranks. Turns the logits into their gradients, but for the label, times `scale`,
    in place. `models/loss.py` says what the options are.
    """
    steps: list[Callable[..., Any]] = [_peak, _sums, _finish_]
    peak_of, sums_of, finish = map(compiled, steps) if compiles else steps
    is_own_C1 = (index_C1 >= 0) & (index_C1 < logits_CV.shape[1])
    # in front of code that overwrites it
    label_C1 = logits_CV.gather(1, index_C1.clamp(0, logits_CV.shape[1] - 1))
    peak_C1 = peak_of(logits_CV, softcap)
    dist.all_reduce(peak_C1, dist.ReduceOp.MAX, group)
    sums_C2 = sums_of(logits_CV, label_C1, is_own_C1, peak_C1, softcap)
    dist.all_reduce(sums_C2, group=group)
    found: Rows = finish(logits_CV, label_C1, is_own_C1, peak_C1, sums_C2, scale, softcap, z_loss)
    return found if z_loss else found[:2]


def _capped(logits: torch.Tensor, softcap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Capped logits in fp32, and the slope of the cap."""
    logits = logits.float()
    if not softcap:
        return logits, torch.ones(1, 1, device=logits.device)
    tanh = (logits / softcap).tanh()
    return softcap * tanh, 1 - tanh.square()


def _peak(logits_CV: torch.Tensor, softcap: float) -> torch.Tensor:
    peak_C1 = logits_CV.amax(dim=-1, keepdim=True)
    return _capped(peak_C1, softcap)[0]  # a cap keeps the order


def _sums(
    logits_CV: torch.Tensor,
    label_C1: torch.Tensor,
    is_own_C1: torch.Tensor,
    peak_C1: torch.Tensor,
    softcap: float,
) -> torch.Tensor:
    """The own summands of the sum of exponentials, and of the label's logit, which one rank has."""
    total_C1 = (_capped(logits_CV, softcap)[0] - peak_C1).exp().sum(dim=-1, keepdim=True)
    own_C1 = torch.where(is_own_C1, _capped(label_C1, softcap)[0] - peak_C1, 0.0)
    return torch.cat((total_C1, own_C1), dim=1)


def _finish_(
    logits_CV: torch.Tensor,
    label_C1: torch.Tensor,
    is_own_C1: torch.Tensor,
    peak_C1: torch.Tensor,
    sums_C2: torch.Tensor,
    scale: Scale,
    softcap: float,
    z_loss: float,
) -> Rows:
    """What is left to do with the sums over ranks; the gradient is that of extras/shaped_loss.py."""
    total_C1, shifted_C1 = sums_C2[:, :1], sums_C2[:, 1:]
    log_total_C1 = total_C1.log()
    logz_C1 = log_total_C1 + peak_C1
    pull_C1 = 2 * z_loss * logz_C1
    here_C1, slope_C1 = _capped(label_C1, softcap)
    logp_C1 = (here_C1 - peak_C1) - log_total_C1
    # of another rank's label: what stands in the column
    minus_one_C1 = torch.where(is_own_C1, logp_C1.expm1(), logp_C1.exp())
    gradient_C1 = (minus_one_C1 + logp_C1.exp() * pull_C1) * slope_C1
    capped_CV, slope_CV = _capped(logits_CV, softcap)
    p_CV = ((capped_CV - peak_C1) - log_total_C1).exp()
    logits_CV.copy_(p_CV * ((1 + pull_C1) * scale) * slope_CV)
    return gradient_C1, log_total_C1 - shifted_C1, z_loss * logz_C1.square()
