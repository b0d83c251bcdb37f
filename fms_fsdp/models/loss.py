"""Cross-entropy of the output projection, chunk by chunk: the logits of all tokens never exist.

    for each chunk of tokens:  logits = h W^T, softmax in fp32, loss += …
                               dlogits = p - onehot  →  dh = dlogits W,  dW += dlogits^T h

The forward pass computes the gradients while it has the logits of a chunk: no matmul is repeated,
and the backward pass only scales them.

Shape suffixes: N tokens, C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fms_fsdp.data.batch import IGNORED_LABEL
from fms_fsdp.models.attention import compiled

# fp32 logits of a chunk. Fewer chunks are faster, since each adds a gradient of the whole head;
# smaller ones need less memory.
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}
Losses = tuple[torch.Tensor, ...]
# (gradient at the label, loss[, more losses]) of each token, (C 1) fp32, from (logits, labels)
Softmax = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | float], tuple[torch.Tensor, ...]]


def chunk_size(num_tokens: int, vocab_size: int, device_type: str) -> int:
    """Returns the tokens per chunk: chunks of nearly equal size within the budget of the device."""
    limit = max(128, CHUNK_BYTES.get(device_type, 2 << 30) // (4 * vocab_size))
    num_chunks = -(-num_tokens // limit)
    return -(-num_tokens // num_chunks)


def empty_logits(like: torch.Tensor, num_tokens: int, vocab_size: int) -> torch.Tensor:
    """Allocates logits (num_tokens, vocab_size).

    On a GPU each row begins at a multiple of 128 bytes: matmuls with an odd vocabulary size, such
    as 50,257, are slow otherwise.
    """
    multiple = 64 if like.is_cuda else 1
    padded_size = -(-vocab_size // multiple) * multiple
    logits = like.new_empty(num_tokens, padded_size)
    logits[:, vocab_size:] = 0  # kernels may read these columns, and NaN times zero is NaN
    return logits[:, :vocab_size]


def softmax_(
    logits_CV: torch.Tensor,
    label_C1: torch.Tensor,
    scale: torch.Tensor | float = 1.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """Replaces logits by their gradients, times `scale`, except at the labels.

    Returns for each token the gradient at its label, its loss and, with `z_loss`, its z-loss.
    """
    logp_CV = F.log_softmax(logits_CV, dim=-1, dtype=torch.float32)
    logp_C1 = logp_CV.gather(1, label_C1)
    logz_C1 = logits_CV[:, :1].float() - logp_CV[:, :1]
    p_CV = logp_CV.exp_()
    if z_loss:
        p_CV.mul_((1 + 2 * z_loss * logz_C1) * scale)
    elif isinstance(scale, torch.Tensor):  # as a float it is 1
        p_CV.mul_(scale)
    logits_CV.copy_(p_CV)
    return _at_label(logp_C1, logz_C1, z_loss)


def compiled_softmax_(
    logits_CV: torch.Tensor,
    label_C1: torch.Tensor,
    scale: torch.Tensor | float = 1.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """Computes `softmax_` as one kernel."""
    # Outside of the kernel, which may overwrite the logits before it reads them at the labels.
    at_label_C1 = logits_CV.gather(1, label_C1).float()
    logz_C1 = compiled(_normalize_)(logits_CV, scale, z_loss)
    return _at_label(at_label_C1 - logz_C1, logz_C1, z_loss)


def _normalize_(
    logits_CV: torch.Tensor, scale: torch.Tensor | float, z_loss: float
) -> torch.Tensor:
    logz_C1 = logits_CV.float().logsumexp(dim=-1, keepdim=True)
    logits_CV.copy_((logits_CV.float() - logz_C1).exp() * ((1 + 2 * z_loss * logz_C1) * scale))
    return logz_C1


def _at_label(logp_C1: torch.Tensor, logz_C1: torch.Tensor, z_loss: float) -> Losses:
    """Returns what `softmax_` does, from the log-probability of the label and log Z."""
    gradient_C1 = logp_C1.expm1()  # p - 1, exact near p = 1
    if not z_loss:
        return gradient_C1, -logp_C1
    pull_C1 = 2 * z_loss * logz_C1
    gradient_C1 = gradient_C1 + logp_C1.exp() * pull_C1
    return gradient_C1, -logp_C1, z_loss * logz_C1.square()


class _LinearCrossEntropy(torch.autograd.Function):
    """Sums of the losses of h_ND under the head W_VD.

    The gradient of the first sum includes the gradients of the others.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_N: torch.Tensor,
        softmax: Softmax,
        scale: torch.Tensor | float,
        first_token: int,
        largest_shard: int,
    ) -> Losses:
        is_masked_N1 = (labels_N == IGNORED_LABEL).unsqueeze(1)
        index_N1 = labels_N.unsqueeze(1).masked_fill(is_masked_N1, 0) - first_token
        head_VD = weight_VD.to(h_ND.dtype)
        num_tokens = h_ND.shape[0]
        vocab_size = weight_VD.shape[0]
        # All ranks of a sharded vocabulary need the same chunks.
        size = chunk_size(num_tokens, largest_shard or vocab_size, h_ND.device.type)
        need_h, need_weight, *_ = ctx.needs_input_grad
        dh_ND = torch.empty_like(h_ND) if need_h else None
        dweight_VD: torch.Tensor | None = None
        sums: list[torch.Tensor] = []
        buffer_CV = empty_logits(h_ND, min(size, num_tokens), vocab_size)
        for start in range(0, num_tokens, size):
            chunk = slice(start, start + size)
            # Masked tokens may hold any values; they must reach neither the loss nor dW.
            h_CD = h_ND[chunk].masked_fill(is_masked_N1[chunk], 0)
            logits_CV = torch.mm(h_CD, head_VD.T, out=buffer_CV[: len(h_CD)])
            gradient_C1, *losses_C1 = softmax(logits_CV, index_N1[chunk], scale)
            losses = [loss.masked_fill(is_masked_N1[chunk], 0).sum() for loss in losses_C1]
            if sums:
                losses = [total + loss for total, loss in zip(sums, losses, strict=True)]
            sums = losses
            # Not scatter_, which copies all of a bf16 tensor on CPUs.
            column_C = index_N1[chunk, 0].clamp(0, vocab_size - 1)
            row_C = torch.arange(len(h_CD), device=h_ND.device)
            logits_CV[row_C, column_C] = (gradient_C1 * scale).squeeze(1).to(h_ND.dtype)
            if dh_ND is not None:
                torch.mm(logits_CV, head_VD, out=dh_ND[chunk]).masked_fill_(is_masked_N1[chunk], 0)
            if need_weight:
                of_chunk_VD = logits_CV.T @ h_CD
                if size >= num_tokens:  # there is one chunk
                    dweight_VD = of_chunk_VD
                elif dweight_VD is None:
                    dweight_VD = of_chunk_VD.float()  # the sum over chunks in fp32
                else:
                    dweight_VD.add_(of_chunk_VD)
        if dweight_VD is not None:
            dweight_VD = dweight_VD.to(weight_VD.dtype)
        ctx.save_for_backward(dh_ND, dweight_VD, scale if isinstance(scale, torch.Tensor) else None)
        ctx.mark_non_differentiable(*sums[1:])
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dh_ND, dweight_VD, scale = ctx.saved_tensors
        factor = grads[0] if scale is None else grads[0] / scale
        # As a matrix the factor stays fp32: a bf16 factor would be off by up to 0.4 % everywhere.
        factor = factor.reshape(1, 1)

        def scaled(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None:  # nobody needs it
                return None
            return torch.mul(gradient, factor, out=torch.empty_like(gradient))

        return scaled(dh_ND), scaled(dweight_VD), None, None, None, None, None


def linear_cross_entropy(
    h_BSD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_BS: torch.Tensor,
    *,
    z_loss: float = 0.0,
    scale: torch.Tensor | None = None,
    compiled: bool = False,
    softmax: Callable[..., tuple[torch.Tensor, ...]] | None = None,
    first_token: int = 0,
    largest_shard: int = 0,
) -> Losses:
    """Returns the loss summed over labels (fp32), the number of labels (int64) and, with `z_loss`,
    the sum of z_loss · log(Z)², whose gradient is part of the gradient of the loss.

    Label -100 masks a token. `scale`: factor that multiplies the loss before the backward pass; the
    gradients are computed with it, so that fp16 can represent them. `compiled` fuses the softmax.
    Tensor parallelism and distillation pass their own `softmax`; the weight then may be the shard
    of a vocabulary from `first_token` on, of shards with at most `largest_shard` tokens.
    Source of the z-loss: Chowdhery et al. 2022 (PaLM), section 5.
    """
    if softmax is None:
        softmax = compiled_softmax_ if compiled else softmax_
    if z_loss:
        softmax = partial(softmax, z_loss=z_loss)
    labels_N = labels_BS.reshape(-1)
    if not torch.is_grad_enabled():  # the forward pass would compute gradients all the same
        h_BSD = h_BSD.detach()
        weight_VD = weight_VD.detach()
    loss_sum, *others = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        h_BSD.flatten(0, -2),
        weight_VD,
        labels_N,
        softmax,
        1.0 if scale is None else scale,
        first_token,
        largest_shard,
    )
    return loss_sum, (labels_N != IGNORED_LABEL).sum(), *others
