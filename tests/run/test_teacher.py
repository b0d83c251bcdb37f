"""Distillation: the loss against plain torch, ranks, resumes, unsuitable teachers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fms_fsdp
from fms_fsdp import distill as distill_module
from fms_fsdp.config import BF16, TrainConfig, TrainingConfig
from fms_fsdp.distill import DistillingSoftmax, Teacher, distill, find_teacher
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.world import World
from fms_fsdp.errors import UserError
from fms_fsdp.hf.trained import Trained
from fms_fsdp.models import loss as loss_module
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.loss import linear_cross_entropy
from tests.cli import TINY, last_of_each, metrics, run, trained
from tests.hf_folders import write_folder
from tests.specs import budget, planned, resolved

SHAPE = TransformerConfig(2, 32, 64, 4, 2, 61, max_seq_len=48)
FLAGS = (*TINY, "--global_batch_size=8", "--precision=fp32", "--trackers=none")
LEARNS = ("--teacher_weight=0.7", "--teacher_temperature=2", "--z_loss=1e-3", "--num_steps=4")


def learned(folder: Path) -> list[tuple[float, ...]]:
    """Of each step the loss, the KL divergence and the norm of the gradient."""
    records = (record for _, record in sorted(metrics(folder).items()))
    return [(record["loss"], record["teacher_kl"], record["grad_norm"]) for record in records]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of another shape: wider, with one head for both ends."""
    folder = tmp_path_factory.mktemp("teacher")
    shape = ("--hidden_size=192", "--tie_embeddings=True")
    trained(*FLAGS, *shape, "--num_steps=3", f"--output_dir={folder}")
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> Path:
    """A run that learns from it on one process."""
    folder = tmp_path_factory.mktemp("alone")
    trained(*FLAGS, *LEARNS, f"--teacher_path={teacher}", f"--output_dir={folder}")
    return folder


@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns of deprecated calls it makes
@pytest.mark.parametrize(
    ("weight", "temperature", "z_loss", "compiled"),
    [
        (0.3, 2.0, 0.0, False),
        (1.0, 1.0, 0.0, False),
        (0.6, 1.5, 1e-2, False),
        pytest.param(0.6, 1.5, 1e-2, True, marks=pytest.mark.slow),  # generates code
    ],
)
def test_distillation_loss_equals_plain_torch(
    weight: float,
    temperature: float,
    z_loss: float,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference is in fp64; in chunks of 32 of 201 rows. Masked rows of the teacher hold anything."""
    monkeypatch.setattr(loss_module, "chunk_size", lambda *_: 32)
    torch.manual_seed(0)
    h, head = torch.randn(3, 67, 24, requires_grad=True), torch.randn(501, 24, requires_grad=True)
    theirs, their_head = torch.randn(201, 40), 0.3 * torch.randn(501, 40)
    labels = torch.randint(0, 501, (3, 67))
    labels[torch.rand(3, 67) < 0.3] = -100
    kept = labels.flatten() != -100
    softmax = DistillingSoftmax(theirs, their_head, weight, temperature, compiled)
    more = {"z_loss": z_loss} if z_loss else {}
    loss, count, *z, kl = linear_cross_entropy(h, head, labels, softmax=softmax, **more)
    logits = (h.double() @ head.double().T).flatten(0, 1)
    their_logits = theirs.double() @ their_head.double().T
    entropy = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    pair = [F.log_softmax(each / temperature, -1) for each in (logits, their_logits)]
    rows = F.kl_div(*pair, reduction="none", log_target=True).sum(-1)
    divergence = temperature**2 * rows[kept].sum()
    of_z = z_loss * logits.logsumexp(-1).square()[kept].sum()
    assert count == kept.sum() and len(z) == bool(z_loss)
    expected = [entropy, *([of_z] if z else []), divergence]
    torch.testing.assert_close(
        [loss, *z, kl], [each.float() for each in expected], rtol=1e-5, atol=0
    )
    goal = (1 - weight) * entropy + weight * divergence + of_z
    wanted = torch.autograd.grad(goal, (h, head))
    torch.testing.assert_close(torch.autograd.grad(loss, (h, head)), wanted, rtol=1e-4, atol=1e-4)


def test_failed_pass_leaves_no_teacher_output() -> None:
    model, teacher = build_model(SHAPE), build_model(SHAPE)
    distill(model, teacher, 0.5, 1.0)
    tokens = torch.arange(48).view(1, 48)
    assert len(model(tokens, tokens)) == 3
    fail = model.blocks["1"].register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens, tokens)
    fail.remove()
    assert len(model.eval()(tokens, tokens)) == 2


def test_gradient_uses_the_loss_scale() -> None:
    torch.manual_seed(0)
    theirs, their_head = torch.randn(64, 16), torch.randn(99, 16)
    labels, found = torch.randint(0, 99, (1, 64)), []
    for scale in (None, torch.tensor(64.0)):
        h, head = torch.ones(1, 64, 8, requires_grad=True), torch.ones(99, 8, requires_grad=True)
        softmax = DistillingSoftmax(theirs, their_head, 0.5, 2.0, is_compiled=False)
        loss, _, _ = linear_cross_entropy(h, head, labels, softmax=softmax, scale=scale)
        (loss * 4.0).backward()
        found.append((h.grad, head.grad))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_model_does_not_hold_its_teacher() -> None:
    """Nor does it evaluate with it."""
    torch.manual_seed(0)
    model, other = build_model(SHAPE), build_model(replace(SHAPE, hidden_size=48))
    names = [name for name, _ in model.named_parameters()]
    tokens = torch.randint(0, 61, (2, 48))
    labels = tokens.masked_fill(tokens < 9, -100)
    before = model.eval()(tokens, labels)
    distill(model, other, 0.5, 1.0)
    assert [name for name, _ in model.named_parameters()] == names
    torch.testing.assert_close(model(tokens, labels), before, rtol=0, atol=0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    plain = build_model(other.config)
    plain.load_state_dict(other.state_dict())
    ids = (torch.arange(48) > 20).long().expand(2, 48)
    documents = torch.arange(48).sub(21 * ids[0]).expand(2, 48), ids
    loss, _, kl = model.train()(tokens, labels, *documents)
    loss.backward()
    with torch.no_grad():
        ours, theirs = (
            F.log_softmax(each.eval()(tokens, None, *documents), -1) for each in (model, plain)
        )
    expected = F.kl_div(ours, theirs, reduction="none", log_target=True)[labels != -100].sum()
    torch.testing.assert_close(kl, expected, rtol=1e-4, atol=0)
    assert kl > 0 and all(parameter.grad is not None for parameter in model.parameters())
    assert not any(each.requires_grad or each.grad is not None for each in other.parameters())


@pytest.mark.slow
def test_model_learns_nothing_from_itself(tmp_path: Path) -> None:
    flags = [*FLAGS, "--precision=bf16", "--num_steps=1"]
    trained(*flags, "--learning_rate=0", f"--output_dir={tmp_path / 'first'}")
    more = [f"--teacher_path={tmp_path / 'first'}", "--teacher_weight=1", "--weight_decay=0"]
    trained(*flags, *more, f"--output_dir={tmp_path / 'second'}")
    ((loss, kl, norm),) = learned(tmp_path / "second")
    assert loss == metrics(tmp_path / "first")[1]["loss"] and kl == 0 and norm == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        pytest.param("--sharding_strategy=fsdp --recompute=blocks", id="fsdp"),
        pytest.param("--sharding_strategy=ddp --use_torch_compile=True", id="ddp"),
    ],
)
def test_ranks_learn_as_one_process(teacher: Path, alone: Path, tmp_path: Path, more: str) -> None:
    flags = [*FLAGS, *LEARNS, f"--teacher_path={teacher}", "--eval_interval=4"]
    flags += ["--batch_size=2", *more.split(), f"--output_dir={tmp_path}"]
    trained(*flags, nproc=2, backend="aot_eager")
    for one, other in zip(learned(alone), learned(tmp_path), strict=True):
        assert other == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_resume_with_teacher_is_exact(teacher: Path, alone: Path, tmp_path: Path) -> None:
    """The checkpoint needs no teacher."""
    flags = [*FLAGS, *LEARNS, f"--teacher_path={teacher}", f"--output_dir={tmp_path}"]
    assert run(*flags, "--exit_step=2").returncode == 75
    assert "resuming from step 2" in trained(*flags)
    assert learned(tmp_path) == learned(alone)
    assert fms_fsdp.load_model(str(tmp_path))[0].config.hidden_size == 128
    without = [flag for flag in flags if not flag.startswith("--teacher")]
    said = trained(*without, "--num_steps=5")
    assert "teacher_path" in said and "teacher_kl" not in metrics(tmp_path)[5]


@pytest.mark.slow
def test_hf_checkpoint_teaches(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "llama")
    flags = [*TINY[1:], "--seq_length=32", "--num_steps=1", "--precision=fp32"]
    flags += ["--global_batch_size=4", f"--init_from_hf={source}", f"--teacher_path={source}"]
    trained(*flags, f"--output_dir={tmp_path / 'run'}", nproc=2)
    ((_, kl, _),) = learned(tmp_path / "run")
    assert abs(kl) < 1e-6


@pytest.mark.parametrize(
    ("flags", "ranks", "text"),
    [
        ("--vocab_size=600", 1, r"--teacher_path=.* vocabulary of 600 tokens, not 512"),
        ("--teacher_path=/none", 1, r"--teacher_path \(/none\) must hold a complete"),
        ("--teacher_weight=0", 1, "--teacher_weight"),
        ("--tp_size=2", 2, "--teacher_path"),
    ],
)
def test_unsuitable_teacher_is_rejected(
    teacher: Path, tmp_path: Path, flags: str, ranks: int, text: str
) -> None:
    argv = [*FLAGS, f"--teacher_path={teacher}", flags, f"--output_dir={tmp_path / 'run'}"]
    with pytest.raises(UserError, match=text):
        planned(last_of_each(argv), World(0, 0, ranks, ranks))
    assert not (tmp_path / "run").exists()


def test_learned_positions_and_user_models_are_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cfg = TrainConfig(training=TrainingConfig(teacher_path=str(tmp_path)))
    shape = replace(SHAPE, pos_emb="learned", max_seq_len=64)
    for config, text in (
        (shape, r"64 learned positions, fewer than --seq_length="),
        (
            replace(SHAPE, model_builder="a:b"),
            r"is of --model_builder=a:b, whose head is not supported",
        ),
    ):
        found = Trained(tmp_path, config)
        monkeypatch.setattr(distill_module, "open_trained", lambda *_, found=found: found)
        with pytest.raises(UserError, match=text):
            find_teacher(cfg, replace(SHAPE, max_seq_len=4096), None)


def test_memory_of_a_rank_counts_the_teacher() -> None:
    run = resolved(
        TrainConfig(), model=SHAPE, dims=ParallelDims("fsdp", dp_shard=4), precision=BF16
    )
    shape = replace(SHAPE, hidden_size=64, num_layers=5)
    memory = budget()
    taught = replace(memory, teacher=Teacher("", shape, None))
    for alone, both in (
        (memory.minimum(run), taught.minimum(run)),
        (memory.need(run), taught.need(run)),
    ):
        assert both.weights - alone.weights == 2 * num_params(shape) // 4
        assert both.gathered > alone.gathered
    assert taught.need(run).working - memory.need(run).working >= 2 * run.seq_length * (64 + 61)
