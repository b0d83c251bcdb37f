"""The flags of the commands in this package. Loads neither torch nor numpy: `--help` and wrong flags are
answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from fms_fsdp.config import EvalConfig, TrainConfig, TrainingConfig, flag
from fms_fsdp.config.batch_plan import BatchPlan, check_ramp
from fms_fsdp.config.flag import only_one
from fms_fsdp.config.values import joined, typed
from fms_fsdp.errors import UserError

if TYPE_CHECKING:
    from fms_fsdp.run.machine import Machine

_PATH = "run directory, folder of checkpoints, or one checkpoint"
_HELD_OUT_FLAGS = (
    "data_path",
    "eval_data_path",
    "eval_datasets",
    "eval_steps",
    "eval_test",
    "sep_token",
    "seq_length",
)
_TASK_FLAGS = ("task_path", "num_fewshot", "limit")
_USUAL_TOKENS = 10**12  # of a run without a length


@dataclass(frozen=True)
class CkptListConfig:
    """Lists every checkpoint with its size, tokens, validation loss and state."""

    path: str = flag("", _PATH, positional=True, form="path", required=True)


@dataclass(frozen=True)
class CkptVerifyConfig:
    """Compares every byte of every checkpoint with its checksum."""

    path: str = flag("", _PATH, positional=True, form="path", required=True)
    weights: bool = flag(False, "also read every weight, and find non-finite and absurd values")


@dataclass(frozen=True)
class CkptPruneConfig:
    """Deletes checkpoints; without --yes the command only shows which."""

    path: str = flag("", "run directory or folder of checkpoints", form="path", required=True)
    after: int | None = flag(None, "delete all checkpoints of later steps", min=0)
    leftovers: bool = flag(False, "also delete unfinished, corrupt and superseded checkpoints")
    yes: bool = flag(False, "delete; without this flag nothing is changed")


@dataclass(frozen=True)
class CkptInspectConfig:
    """Prints shape, norm, mean, spread, zeros and non-finite values of every tensor."""

    path: str = flag(
        "",
        "run directory, folder of checkpoints (the newest is read), checkpoint or Hugging Face checkpoint",
        positional=True,
        form="path",
        required=True,
    )
    step: int | None = flag(None, "read the checkpoint of this step", min=1)
    optimizer: bool = flag(False, "also print the optimizer's tensors")
    json: bool = flag(False, "print one JSON object")


@dataclass(frozen=True)
class StepConfig:
    """Which sequences of which step to list."""

    run: str = flag("", "run directory", form="path")
    data_path: str = flag("", "folder of the token shards (default: the run's)", form="path")
    step: int | None = flag(None, "step, from 1", min=1)
    rows: str = flag("", "a:b lists sequences a to b-1 of the global batch (default: all)")
    text: bool = flag(False, "show how the text of each document begins")
    json: bool = flag(False, "print one JSON object per sequence")


@dataclass(frozen=True)
class VerifyConfig:
    """Which shards to read."""

    run: str = flag("", "run directory; its data is also compared with its checkpoint", form="path")
    data_path: str = flag("", "folder of the token shards (default: the run's)", form="path")
    datasets: tuple[str, ...] = flag((), "sources (default: the run's, or all)")
    vocab_size: int | None = flag(
        None, "vocabulary size (default: the run's, or the shards')", min=1
    )
    sep_token: int | None = flag(
        None, "id of the separator (default: the run's, or the shards')", min=0
    )
    num_threads: int = flag(4, "shards read at the same time", min=1)


@dataclass(frozen=True)
class EvaluateConfig:
    """Which checkpoint to evaluate, and on which data. Defaults are the values of the run."""

    path: str = flag(
        "",
        "run, checkpoint folder (its newest checkpoint) or Hugging Face checkpoint",
        positional=True,
        form="path",
    )
    step: int | None = flag(None, "step of the checkpoint", min=1)
    data_path: str = flag("", "folder of the run's token shards (default: the run's)", form="path")
    eval_data_path: str = flag(
        "", "held-out shards (default: the run's, or validation/ in data_path)", form="path"
    )
    eval_datasets: tuple[str, ...] = flag((), "held-out sources (default: the run's, or all)")
    eval_steps: int | None = flag(None, "batches per source (default: the run's)", min=1)
    eval_test: bool = flag(False, "also evaluate test/ in data_path, or the run's test_data_path")
    sep_token: int | None = flag(None, "EOS id of shards that do not record it", min=0)
    seq_length: int | None = flag(
        None, "tokens per sequence (default: the run's; of a Hugging Face checkpoint 4096)", min=1
    )
    batch_size: int | None = flag(
        None, "sequences per pass and device (default: the run's, or 1)", min=1
    )
    questions: str = flag(
        "",
        "file of JSON lines with prompt, choices and answer (index of the right choice), instead of "
        "held-out data",
        form="path",
    )
    tasks: tuple[str, ...] = flag((), "tasks of lm-evaluation-harness, instead of held-out data")
    task_path: str = flag("", "folder of YAML files that define more tasks", form="path")
    num_fewshot: int | None = flag(
        None, "examples before each question (default: the task's)", min=0
    )
    limit: int | None = flag(None, "number of questions per task, for a trial", min=1)
    json: bool = flag(False, "print one JSON object")

    def __post_init__(self) -> None:
        only_one(self, "tasks", "questions")
        useless: tuple[str, ...] = ()
        if self.tasks:
            useless = _HELD_OUT_FLAGS
        elif self.questions:
            useless = (*_HELD_OUT_FLAGS, "batch_size")
        instead = "--tasks" if self.tasks else "--questions"
        for name in self._given(useless):
            given = f"--{name}={joined(getattr(self, name))}"
            raise UserError(f"{given} has no effect with {instead}; remove it")
        if not self.tasks:
            for name in self._given(_TASK_FLAGS):
                given = f"--{name}={joined(getattr(self, name))}"
                raise UserError(f"{given} has no effect without --tasks; remove it, or set --tasks")

    def _given(self, names: tuple[str, ...]) -> list[str]:
        """Returns those of the flags that are not at their default, such as --sep_token=0."""
        return [name for name in names if getattr(self, name) != getattr(type(self), name)]


@dataclass(frozen=True)
class GenerateConfig:
    """Checkpoint, prompts and sampling."""

    path: str = flag(
        "",
        "run, checkpoint folder (its newest checkpoint) or Hugging Face checkpoint",
        positional=True,
        form="path",
        required=True,
    )
    step: int | None = flag(None, "step of the checkpoint", min=1)
    prompt: str = flag("", "text to continue (default: a new document)", form="text")
    prompts: str = flag("", "file with one prompt per line, instead of --prompt", form="path")
    interactive: bool = flag(False, "read prompts from stdin, one per line, and answer each")
    num_samples: int = flag(1, "texts per prompt", min=1)
    max_new_tokens: int = flag(200, "maximum tokens per text", min=1)
    temperature: float = flag(0.8, "sampling temperature; 0 takes the most likely token", min=0)
    top_k: int = flag(0, "sample from the k most likely tokens; 0 is off", min=0)
    top_p: float = flag(
        1.0, "sample from the most likely tokens that have this probability", above=0, max=1
    )
    seed: int = flag(0, "sampling seed; the same seed gives the same text", min=0)
    batch_size: int = flag(16, "texts per forward pass", min=1)
    dtype: str = flag("fp32", "dtype of weights and computation", choices=("fp32", "bf16"))
    json: bool = flag(False, "print one JSON object per text")

    def __post_init__(self) -> None:
        only_one(self, "prompt", "prompts", "interactive")


@dataclass(frozen=True)
class ReportConfig:
    """A page of curves and tables from run directories."""

    runs: tuple[str, ...] = flag(
        (),
        "run directories; several runs are overlaid",
        positional=True,
        form="path",
        required=True,
    )
    output: str = flag(
        "", "HTML file to write (default: report.html in the first run directory)", form="path"
    )

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError("no run directory given; use `report RUN [RUN …]`")


@dataclass(frozen=True)
class PlannedEvaluations(EvalConfig):
    """The validations of a planned run, which has some, unlike a training by default."""

    eval_interval: int = flag(1000, "steps between validations; 0 is off", min=0)


@dataclass(frozen=True)
class EstimateFlags:
    """The flags of the command itself."""

    parameters: int | None = flag(
        None, "number of parameters instead of a variant; without attention", min=1
    )
    num_devices: int = flag(8, "number of devices", min=1, max=2**20)
    devices_per_node: int = flag(8, "number of devices of a node", min=1, max=2**20)
    tflops: float | None = flag(
        None, "achieved TFLOP/s of a device, recomputation included", min=1e-9
    )
    device: str | None = flag(None, "device of predict/devices.toml, whose speed is predicted")
    hardware: str = flag(
        "",
        "FILE.toml with devices of your own, such as fms_fsdp/predict/devices.toml",
        form="path",
        needs="device",
    )
    tokens_per_sec_per_device: float | None = flag(None, "measured tokens/s of a device", min=1e-9)
    batch_tokens: int = flag(4_194_304, "tokens of a step, unless flags set its batch", min=1)
    save_s: float = flag(10.0, "seconds that the loop waits in a save", min=0)
    eval_s: float = flag(60.0, "seconds of a validation", min=0)
    restarts_a_week: float = flag(
        2.0, "launches that end early per week; each loses half a save interval", min=0
    )
    restart_s: float = flag(600.0, "seconds from the end of a launch to the next step", min=0)
    search: bool = flag(
        False, "find the fastest layouts that fit; layout flags that are set stay", needs="device"
    )
    json: bool = flag(False, "print the prediction as JSON, a search as a list", needs="device")


@dataclass(frozen=True)
class EstimateConfig(TrainConfig, EstimateFlags):
    """The model to train, the devices, and the interruptions of the run.

    A device or one of two rates must be set. All flags of a training are flags too.
    """

    eval: PlannedEvaluations = PlannedEvaluations()

    def __post_init__(self) -> None:
        rates = ("tflops", "tokens_per_sec_per_device", "device")
        given = [f"--{name}" for name in rates if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} cannot be used together; remove {given[0]}")
        if not given:
            raise UserError(
                "estimate requires a device or its rate; set --device, e.g. h100_80gb, --tflops or "
                "--tokens_per_sec_per_device"
            )
        if self.training.epochs() is not None:
            raise UserError(
                f"--num_epochs={typed(self.training.num_epochs)} requires data; set --num_tokens"
            )
        if self.eval.eval_epochs:
            raise UserError(
                f"--eval_epochs={typed(self.eval.eval_epochs)} requires data; set --eval_interval"
            )
        if self.training.teacher_path:
            raise UserError(
                f"--teacher_path={self.training.teacher_path} is not supported by estimate, which "
                "knows no second model; use --dry_run of main_training.py for its memory"
            )
        autos = {"recompute": self.parallel.recompute, "batch_size": self.training.batch_size}
        for name, value in autos.items():
            if self.device is None and value == "auto":
                raise UserError(
                    f"--{name}=auto requires the memory of a device; set --device, or another value"
                )
        if self.device is not None and self.parameters is not None:
            raise UserError("--parameters is not supported with --device; set --model_variant")
        super().__post_init__()
        if self.device is None and self.training.rampup_batch_size:
            check_ramp(self.batches)

    @cached_property
    def machine(self) -> Machine:
        """The devices in nodes; those of a rate have any memory.

        Raises:
            UserError: there is no such device, or the last node would not be full.
        """
        number = self.num_devices
        node = min(number, self.devices_per_node)
        if number % node:
            below = number // node * node
            raise UserError(
                f"--num_devices={number} must be divisible by --devices_per_node={node}; "
                f"use {below} or {below + node}"
            )
        from fms_fsdp.run.machine import ESTIMATE_MARGIN, Machine

        if self.device is None:
            return Machine.of_gpus(2**62, number, node)
        named = Machine.named(self.device, number, node, self.hardware)
        return replace(named, margin=ESTIMATE_MARGIN)

    @cached_property
    def length(self) -> TrainingConfig:
        """The section of the length, with a usual one if no flag sets it."""
        training = self.training
        lengths = (training.num_steps, training.num_samples, training.num_tokens)
        if lengths == (None, None, None):
            training = replace(training, num_tokens=_USUAL_TOKENS)
        return training

    @property
    def unit_tokens(self) -> int:
        """The tokens of the unit in which `batches` counts: a sequence with a ramp, otherwise one."""
        return self.data.seq_length if self.training.rampup_batch_size else 1

    @cached_property
    def batches(self) -> BatchPlan:
        """The batch of each step, as if on one rank."""
        training = self.training
        sequences = training.global_batch_size
        if sequences is None and training.micro_batch_size and training.grad_accum_steps:
            from fms_fsdp.plan import resolve

            ranks = resolve(self, self.machine).dims.size("dp")
            sequences = training.micro_batch_size * training.grad_accum_steps * ranks
        tokens = self.batch_tokens
        if sequences is not None:
            tokens = sequences * self.data.seq_length
        return BatchPlan(tokens // self.unit_tokens, 1, 1, self.training.rampup, True)

    @property
    def num_tokens(self) -> int:
        """The tokens of the run."""
        length = self.length
        if length.num_steps is not None:
            return self.unit_tokens * self.batches.sequences_in(length.num_steps)
        if length.num_tokens is not None:
            return length.num_tokens
        assert length.num_samples is not None
        return length.num_samples * self.data.seq_length

    @property
    def num_steps(self) -> int:
        if self.training.num_steps:
            return self.training.num_steps
        num_units = -(-self.num_tokens // self.unit_tokens)  # rounded up
        return self.batches.steps_for(num_units)

    @property
    def idle_tokens(self) -> int:
        """The tokens that devices without a sequence could compute in the small batches of a ramp."""
        last = self.num_steps
        idle = 0
        for phase, following in pairwise(self.batches.phases()):
            steps = min(following.step, last) - min(phase.step, last)
            idle += steps * max(0, self.num_devices - phase.batch)
        return self.unit_tokens * idle
