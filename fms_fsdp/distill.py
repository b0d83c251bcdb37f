"""Knowledge distillation: a step also minimizes the KL divergence from a frozen teacher's predictions.

    a step minimizes  (1 - w) · cross-entropy + w · T² · KL(softmax(t / T) ‖ softmax(s / T))
    before the student's forward pass: the teacher, without gradients, up to the input of its head
    in the student's loss, by chunks:  t_CV = h_CD W^T, with the student's logits s_CV

The logits of all tokens never exist at once, of neither model. The teacher is built as the student
is, so its weights are sharded too; they are kept in the compute dtype, and no checkpoint has them.
Its forward pass counts in the time of a step, but not in the FLOPs of `mfu`.

N tokens, C tokens of a chunk, V vocabulary, D width of the teacher; s logits of the student, t of
the teacher; w `--teacher_weight`, T `--teacher_temperature`.

Source: Hinton et al. 2015, https://arxiv.org/abs/1503.02531.
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
from fms_fsdp.errors import UserError
from fms_fsdp.hf.trained import open_trained
from fms_fsdp.hf.weights import load_weights
from fms_fsdp.logs import log
from fms_fsdp.models.attention import compiled
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.llama import LanguageModel
from fms_fsdp.models.loss import Losses, chunk_size, empty_logits
from fms_fsdp.parallel.fsdp import free_gathered
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.predict.memory import Memory, Step, minimum_memory
from fms_fsdp.run.resume import check_tokenizer
from fms_fsdp.state import RunConfig

_FLAG = "--teacher_path"
Pair = tuple[torch.Tensor, torch.Tensor]


def _teacher_precision(run: Precision) -> Precision:
    """Returns the precision of the teacher: weights in the compute dtype, none in float8."""
    return replace(run, weights=run.compute, gradients=run.compute, float8="")


@dataclass(frozen=True)
class Teacher:
    """The teacher's shape and weights; `checkpoint` is None if `path` is a Hugging Face checkpoint."""

    path: str
    shape: TransformerConfig
    checkpoint: Checkpoint | None

    def added_to(self, need: Memory, step: Step) -> Memory:
        """Returns the memory of a rank with the teacher: its weights, sharded and gathered, and, in a
        step, the input of its head and a chunk of its logits."""
        precision = _teacher_precision(step.setup.precision)
        setup = replace(step.setup, config=self.shape, precision=precision)
        own = minimum_memory(replace(step, setup=setup, optimizer_bytes=0))
        tokens = step.micro_batch * setup.seq_length
        vocab_size = self.shape.vocab_size
        chunk = vocab_size * chunk_size(tokens, vocab_size, setup.device_type)
        working = NUM_BYTES[precision.compute] * (tokens * self.shape.hidden_size + chunk)
        return replace(
            need,
            weights=need.weights + own.weights,
            gathered=need.gathered + own.gathered,
            working=need.working + working if need.working else 0,  # a minimum has none
        )


def find_teacher(cfg: TrainConfig, model: TransformerConfig, corpus: Corpus | None) -> Teacher:
    """Returns the teacher of `--teacher_path`: a run (its newest checkpoint), a checkpoint, or a
    Hugging Face checkpoint. Reads metadata only.

    Raises:
        UserError: there is none, it does not fit the model, or its tokenizer is not the data's.
    """
    path = cfg.training.teacher_path
    trained = open_trained(path, None, _FLAG)
    shape = trained.model
    used = trained.used_tokenizer(f"{_FLAG}={path}")
    length = shape.max_seq_len if shape.pos_emb == "learned" else model.max_seq_len
    if shape.vocab_size != model.vocab_size:
        raise UserError(
            f"{_FLAG}={path} must have the model's vocabulary of {model.vocab_size} tokens, not "
            f"{shape.vocab_size}; choose another teacher"
        )
    if length < cfg.data.seq_length:
        raise UserError(
            f"{_FLAG}={path} has {length} learned positions, fewer than "
            f"--seq_length={cfg.data.seq_length}; set --seq_length={length} or less"
        )
    if model.model_builder:
        raise UserError(
            f"{_FLAG} cannot be used with --model_builder={model.model_builder}, whose head it may "
            f"not know; remove {_FLAG}"
        )
    if shape.model_builder:
        raise UserError(
            f"{_FLAG}={path} is of --model_builder={shape.model_builder}, whose head is not "
            "supported; choose another teacher"
        )
    check_tokenizer(cfg, corpus, used, "choose a teacher of the tokenizer of the data")
    shape = replace(shape, max_seq_len=length, attn_impl=model.attn_impl)
    return Teacher(path, shape, trained.checkpoint)


def attach_teacher(
    found: Teacher, run: RunConfig, device: torch.device, model: LanguageModel, mesh: Mesh
) -> None:
    """Builds the teacher, loads its weights, and makes each step of the model learn from it
    (collective: every rank).

    Raises:
        UserError: the weights are corrupt.
    """
    cfg = run.config
    checkpoint = found.checkpoint
    precision = _teacher_precision(run.precision)
    teacher = parallelize(
        found.shape, cfg.parallel, mesh, device=device, precision=precision, seed=None
    )
    if checkpoint is None:
        load_weights(Path(found.path).expanduser(), teacher, mesh, _FLAG)
    else:
        load_checkpoint(checkpoint.folder, teacher, None, is_alone=mesh.size("world") == 1)
    log.info("teacher: %s", found.path if checkpoint is None else checkpoint.folder)
    distill(model, teacher, cfg.training.teacher_weight, cfg.training.teacher_temperature)


def distill(
    model: LanguageModel, teacher: LanguageModel, weight: float, temperature: float
) -> None:
    """Makes the model learn from the teacher in training mode: its losses then end with T² KL.

    The teacher is not a submodule of the model, whose parameters are saved.
    """
    assert model.head is not None and teacher.head is not None
    outputs: list[Pair] = []  # of the teacher in this pass: the input of its head, and the weight
    plain: Callable[..., Losses] = model.head.loss

    def run_teacher(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        outputs.clear()  # of a pass that raised before its loss
        if module.training:
            with torch.no_grad():
                outputs.append(teacher(*inputs[:4]))

    def loss(
        h_BSD: torch.Tensor, weight_VD: torch.Tensor, labels_BS: torch.Tensor, **more: Any
    ) -> Losses:
        if outputs:
            theirs_BSD, head_VD = outputs.pop()
            theirs_BSD.masked_fill_((labels_BS == IGNORED_LABEL).unsqueeze(-1), 0)
            softmax = DistillingSoftmax(
                theirs_BSD.flatten(0, 1), head_VD, weight, temperature, more["compiled"]
            )
            more["softmax"] = softmax
        losses = plain(h_BSD, weight_VD, labels_BS, **more)
        free_gathered(teacher)
        return losses

    teacher.requires_grad_(False).eval()
    teacher.head.loss = lambda h_BSD, weight_VD, labels_BS, **more: (h_BSD, weight_VD)
    model.head.loss = loss
    # First of all hooks: before FSDP gathers weights of the model.
    model.register_forward_pre_hook(run_teacher, prepend=True)


@dataclass
class DistillingSoftmax:
    """`softmax_` of models/loss.py for one pass, whose loss calls it for one chunk after the other."""

    theirs_ND: torch.Tensor  # input of the teacher's head, of the chunks to come
    head_VD: torch.Tensor
    weight: float
    temperature: float
    is_compiled: bool

    def __call__(
        self,
        logits_CV: torch.Tensor,
        label_C1: torch.Tensor,
        scale: torch.Tensor | float = 1.0,
        z_loss: float = 0.0,
    ) -> tuple[torch.Tensor, ...]:
        size = len(logits_CV)
        h_CD = self.theirs_ND[:size]
        self.theirs_ND = self.theirs_ND[size:]
        theirs_CV = torch.mm(h_CD, self.head_VD.T, out=empty_logits(h_CD, size, len(self.head_VD)))
        # Outside of the kernel, which may overwrite the logits before it reads them at the labels.
        ours = (logits_CV, logits_CV.gather(1, label_C1))
        theirs = (theirs_CV, theirs_CV.gather(1, label_C1))
        kernel: Callable[..., tuple[torch.Tensor, ...]] = distilled_softmax_
        if self.is_compiled:
            kernel = compiled(kernel)
        return kernel(ours, theirs, scale, self.weight, self.temperature, z_loss)


def distilled_softmax_(
    ours: Pair,
    theirs: Pair,
    scale: torch.Tensor | float,
    weight: float,
    temperature: float,
    z_loss: float,
) -> tuple[torch.Tensor, ...]:
    """Replaces our logits by their gradients, times `scale`, except at the labels.

    Each pair has the logits (C V) and those at the labels (C 1). Returns for each token the
    gradient at its label, its loss, its z-loss if there is one, and T² KL. The gradient, with p =
    softmax(s): (1 - w) (p - onehot) + 2 z_loss log Z p + w T (softmax(s / T) - softmax(t / T)).
    """

    ours_CV = ours[0].float()
    ours_C1 = ours[1].float()
    soft_CV = theirs[0].float() / temperature
    soft_C1 = theirs[1].float() / temperature
    logz_C1 = ours_CV.logsumexp(dim=-1, keepdim=True)
    our_total_C1 = (ours_CV / temperature).logsumexp(dim=-1, keepdim=True)
    their_total_C1 = soft_CV.logsumexp(dim=-1, keepdim=True)
    gap_CV = (soft_CV - their_total_C1) - (ours_CV / temperature - our_total_C1)
    kl_C1 = temperature**2 * ((soft_CV - their_total_C1).exp() * gap_CV).sum(dim=-1, keepdim=True)

    def pull(ours: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of T² KL and of the z-loss."""
        difference = (ours / temperature - our_total_C1).exp() - (soft - their_total_C1).exp()
        return weight * temperature * difference + 2 * z_loss * logz_C1 * (ours - logz_C1).exp()

    logp_C1 = ours_C1 - logz_C1
    gradient_C1 = (1 - weight) * logp_C1.expm1() + pull(ours_C1, soft_C1)
    gradient_CV = (1 - weight) * (ours_CV - logz_C1).exp() + pull(ours_CV, soft_CV)
    ours[0].copy_(gradient_CV * scale)
    if not z_loss:
        return gradient_C1, -logp_C1, kl_C1
    return gradient_C1, -logp_C1, z_loss * logz_C1.square(), kl_C1
