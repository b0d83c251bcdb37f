"""Knowledge distillation: a step also minimises the KL divergence of the model's predictions from those of a
frozen teacher.

    a step minimises  (1 - w) · cross-entropy + w · T² · KL(softmax(t / T) ‖ softmax(s / T))
    before the student's forward pass   teacher, without gradients, up to what enters its head: h_ND
    in the student's loss, by chunks    t_CV = h_CD W^T, beside the student's logits s_CV; then W is freed

The logits of all tokens never exist at once, of neither model. The teacher is made by the recipe of the
student, so its weights are sharded alike; they are kept in the dtype of products, and no checkpoint holds
them. Its forward pass counts to the time of the step, not to the FLOPs of `mfu`, which are the student's.

C rows of a chunk, V vocabulary, N rows (tokens), D width of the teacher, s logits of the student, t of the
teacher, w `--teacher_weight`, T `--teacher_temperature`.

Source: Hinton et al. 2015, https://arxiv.org/abs/1503.02531, for T².
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.checkpoint.io import load_checkpoint
from fms_fsdp.config import NUM_BYTES, Precision, TrainConfig
from fms_fsdp.data.batch import IGNORED_LABEL
from fms_fsdp.data.corpus import Corpus
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import log
from fms_fsdp.errors import UserError
from fms_fsdp.extras.hf_folder import hf_tokenizer, is_hf_folder, load_weights, open_folder
from fms_fsdp.models.chunks import chunk_rows
from fms_fsdp.models.llama import Llama, Losses
from fms_fsdp.models.loss import Rows, Scale, empty_rows
from fms_fsdp.models.masks import compiled
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.parallel.fsdp import free_gathered
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.predict.memory import Memory, Step, minimum_memory
from fms_fsdp.run.resume import check_tokenizer, checkpoint_tokenizer
from fms_fsdp.state import RunConfig

_FLAG = "--teacher_path"
Pair = tuple[torch.Tensor, torch.Tensor]


def _precision_of(run: Precision) -> Precision:
    """The teacher's: its weights are kept in the dtype of the products, none in 8 bits."""
    return replace(run, weights=run.compute, gradients=run.compute, float8="")


@dataclass(frozen=True)
class Teacher:
    """A model whose predictions are learned. `checkpoint`: None where `path` is a folder of Hugging Face."""

    path: str
    shape: LlamaConfig
    checkpoint: Checkpoint | None

    def added_to(self, need: Memory, run: RunConfig) -> Memory:
        """Returns the memory of a rank with the teacher: its weights, the weights that FSDP gathers of
        it and, in a step, the input of its head and a chunk of its logits.

        Excluded is what `distilled_` makes of the logits if it is not compiled.
        """
        precision, step, size = _precision_of(run.precision), Step.of(run), self.shape.vocab_size
        shape = replace(step.shape, config=self.shape, precision=precision)
        own = minimum_memory(replace(step, shape=shape), 0)
        tokens = step.micro_batch * run.seq_length
        chunk = size * chunk_rows(tokens, size, run.device_type)
        working = NUM_BYTES[precision.compute] * (tokens * self.shape.hidden_size + chunk)
        return replace(
            need,
            weights=need.weights + own.weights,
            gathered=need.gathered + own.gathered,
            working=need.working + working * bool(need.working),  # not in a minimum
        )


def find_teacher(cfg: TrainConfig, model: LlamaConfig, corpus: Corpus | None) -> Teacher:
    """The teacher that `--teacher_path` names: the newest checkpoint of a run, a checkpoint, or a folder of
    Hugging Face. Reads records and headers only.

    Raises:
        UserError: there is none, it does not fit the model, or it has another tokenizer than the data.
    """
    path, checkpoint = cfg.training.teacher_path, None
    folder = Path(path).expanduser()
    if is_hf_folder(folder):
        shape, used = open_folder(folder, _FLAG).shape, hf_tokenizer(folder, f"{_FLAG} ({path})")
    else:
        from fms_fsdp.tools.trained_run import find_checkpoint

        checkpoint = find_checkpoint(path, None, _FLAG)
        shape, used = checkpoint.metadata.run.model, checkpoint_tokenizer(checkpoint)
    length = shape.max_seq_len if shape.pos_emb == "learned" else model.max_seq_len
    if shape.vocab_size != model.vocab_size:
        raise UserError(
            f"{_FLAG}={path} must have the model's vocabulary of {model.vocab_size} tokens, not "
            f"{shape.vocab_size}; choose another teacher"
        )
    if length < cfg.data.seq_length:
        raise UserError(
            f"{_FLAG}={path} has learned {length} positions, fewer than "
            f"--seq_length={cfg.data.seq_length}; set --seq_length={length} or less"
        )
    if builder := model.model_builder or shape.model_builder:
        raise UserError(
            f"{_FLAG} cannot be used with --model_builder={builder}, whose head it may not know; "
            f"remove {_FLAG if model.model_builder else 'it, or choose another teacher'}"
        )
    check_tokenizer(cfg, corpus, used, "choose a teacher of the tokenizer of the data")
    return Teacher(path, replace(shape, max_seq_len=length, attn_impl=model.attn_impl), checkpoint)


def attach(found: Teacher, run: RunConfig, device: torch.device, model: Llama, mesh: Mesh) -> None:
    """Builds the teacher, loads its weights, and lets each step of the model learn from it (collective: every
    rank).

    Raises:
        UserError: the weights are damaged.
    """
    own, cfg, checkpoint = _precision_of(run.precision), run.config, found.checkpoint
    teacher = parallelize(found.shape, cfg.parallel, mesh, device=device, precision=own, seed=0)
    if checkpoint is None:
        load_weights(Path(found.path).expanduser(), teacher, mesh, _FLAG)
    else:
        load_checkpoint(checkpoint.folder, teacher, None, is_alone=mesh.size("world") == 1)
    log.info("the teacher is %s", found.path if checkpoint is None else checkpoint.folder)
    teach(model, teacher, cfg.training.teacher_weight, cfg.training.teacher_temperature)


def teach(model: Llama, teacher: Llama, *how: float) -> None:
    """Lets the model learn from the teacher wherever it trains: its loss then has T² KL as its last scalar.
    Evaluation is what it was. `how`: w and T.

    The model does not hold the teacher as a module: its parameters, which are saved, stay its own.
    """
    softcap = teacher.config.logit_softcap
    assert model.head is not None and teacher.head is not None
    entered: list[Pair] = []  # what the teacher's head was given in this pass: h_BSD and its weight
    plain: Callable[..., Losses] = model.head.loss

    def listen(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if module.training:
            with torch.no_grad():
                entered.append(teacher(*inputs[:4]))

    def loss(
        h_BSD: torch.Tensor, weight_VD: torch.Tensor, labels_BS: torch.Tensor, **more: Any
    ) -> Losses:
        if entered:
            theirs_BSD, head_VD = entered.pop()
            theirs_BSD.masked_fill_((labels_BS == IGNORED_LABEL).unsqueeze(-1), 0)
            more["teacher"] = lesson(theirs_BSD.flatten(0, 1), head_VD, softcap, *how)
        losses = plain(h_BSD, weight_VD, labels_BS, **more)
        free_gathered(teacher)
        return losses

    teacher.requires_grad_(False).eval()
    teacher.head.loss = lambda h_BSD, weight_VD, labels_BS, **more: (h_BSD, weight_VD)
    model.head.loss = loss
    model.register_forward_pre_hook(
        listen, prepend=True
    )  # before FSDP gathers weights of the model


def lesson(
    theirs_ND: torch.Tensor, head_VD: torch.Tensor, cap: float, *how: float
) -> Callable[..., Rows]:
    """The softmax that learns what a teacher predicts for the rows of a pass, whose loss calls it chunk by
    chunk in their order. `cap`: of the teacher's logits; `how`: w and T."""

    def softmax_(
        logits_CV: torch.Tensor, index_C1: torch.Tensor, scale: Scale, **shape: Any
    ) -> Rows:
        nonlocal theirs_ND
        h_CD, theirs_ND = theirs_ND[: len(logits_CV)], theirs_ND[len(logits_CV) :]
        theirs_CV = torch.mm(h_CD, head_VD.T, out=empty_rows(h_CD, len(h_CD), len(head_VD)))
        theirs_CV = cap * (theirs_CV.float() / cap).tanh() if cap else theirs_CV
        # outside of what is compiled: code of torch 2.11 reads them after the logits have been overwritten
        ours, theirs = ((chunk, chunk.gather(1, index_C1)) for chunk in (logits_CV, theirs_CV))
        mix_: Callable[..., Rows] = compiled(distilled_) if shape.pop("compiles") else distilled_
        return mix_(ours, theirs, scale, *how, **shape)

    return softmax_


def distilled_(
    ours: Pair,
    theirs: Pair,
    scale: Scale,
    weight: float,
    temperature: float,
    z_loss: float,
    softcap: float,
) -> Rows:
    """The gradient of each row at its label, its loss, its z-loss if there is one, and T² KL; turns our
    logits into their gradients elsewhere, times `scale`, in place. Each pair: logits_CV, and those at the
    labels.

    The gradient, in fp32, is that of all these in their shares, p = softmax(s), s perhaps capped:
    ((1 - w) (p - onehot) + 2 z_loss log Z p + w T (softmax(s / T) - softmax(t / T))) · (1 - tanh²).
    """

    def cap(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        tanh = (logits.float() / softcap).tanh() if softcap else logits.float()
        return (softcap * tanh, 1 - tanh.square()) if softcap else (tanh, 1.0)

    def pull(ours: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
        away = (ours / temperature - our_total_C1).exp() - (soft - their_total_C1).exp()
        return weight * temperature * away + 2 * z_loss * logz_C1 * (ours - logz_C1).exp()

    (ours_CV, slope_CV), (ours_C1, slope_C1) = map(cap, ours)
    soft_CV, soft_C1 = (logits.float() / temperature for logits in theirs)
    logz_C1 = ours_CV.logsumexp(dim=-1, keepdim=True)
    our_total_C1 = (ours_CV / temperature).logsumexp(dim=-1, keepdim=True)
    their_total_C1 = soft_CV.logsumexp(dim=-1, keepdim=True)
    gap_CV = (soft_CV - their_total_C1) - (ours_CV / temperature - our_total_C1)
    kl_C1 = temperature**2 * ((soft_CV - their_total_C1).exp() * gap_CV).sum(dim=-1, keepdim=True)
    logp_C1 = ours_C1 - logz_C1
    gradient_C1 = ((1 - weight) * logp_C1.expm1() + pull(ours_C1, soft_C1)) * slope_C1
    gradient_CV = (1 - weight) * (ours_CV - logz_C1).exp() + pull(ours_CV, soft_CV)
    ours[0].copy_(gradient_CV * slope_CV * scale)
    return gradient_C1, -logp_C1, *([z_loss * logz_C1.square()] if z_loss else []), kl_C1
