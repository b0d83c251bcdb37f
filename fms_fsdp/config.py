"""The configuration of a run: frozen section dataclasses, one flat name space of flags.

    TrainConfig ── model · data · parallel · optim · training · eval · checkpoint · log · profiler

Every field is declared with `flag(default, help, …)`, which is the only source of `--help` and of docs/configuration.md. A name is unique over
all sections, so `--seq_length` means `config.data.seq_length`. `None` means "derived": from the variant, the data, the world or the hardware.
Checks that need a single section run when it is made; `TrainConfig` adds those across sections. Imports nothing but the standard library.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    advanced: bool = False,
    resume: str = "",
) -> Any:
    """A dataclass field with its documentation: what `--help` prints and what a value must satisfy.

    `resume`: what another value does to a run that goes on from a checkpoint: "free", it trains the same; "announced", it takes effect from there
    on and is logged; "refused"; "" is the section's own `RESUME`.
    """
    metadata = dict(help=help, choices=choices, minimum=minimum, maximum=maximum, advanced=advanced, resume=resume)
    if isinstance(default, list | dict):
        raise TypeError("a flag's default must be immutable")
    return field(default=default, metadata=metadata)


def parse_selective_checkpointing(text: str) -> Fraction:
    """The share of blocks to checkpoint, in (0, 1]: from `1`, `1/2`, `0.33` or `every:k` (every k-th block).

    Raises:
        ValueError: not such a share. A bare integer k above 1 (fms-fsdp's spelling of "every k-th") is refused with ours.
    """
    try:
        share = Fraction(1, int(text[6:])) if text.startswith("every:") else Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(
            f"--selective_checkpointing ({text}) must be a share such as 1, 1/2, 0.33 or every:k"
        ) from None
    if share > 1 and share.denominator == 1:
        raise ValueError(
            f"--selective_checkpointing ({text}) must not exceed 1; for every {share}th block write 1/{share} or every:{share}"
        )
    if not 0 < share <= 1:
        remedy = "; to checkpoint none use --fsdp_activation_checkpointing=False" if share == 0 else ""
        raise ValueError(f"--selective_checkpointing ({text}) must lie above 0 and at most at 1{remedy}")
    return share


@dataclass(frozen=True)
class ModelConfig:
    """The model: a variant by name, and overrides of its fields. On resume they must come to the checkpoint's model."""

    RESUME: ClassVar[str] = "refused"

    model_variant: str = flag("7b", "the Llama variant, by name; an unknown name lists all of them")
    num_layers: int | None = flag(None, "transformer blocks (default: the variant's)", minimum=1)
    hidden_size: int | None = flag(None, "width of the residual stream (default: the variant's)", minimum=1)
    ffn_hidden_size: int | None = flag(
        None, "inner width of the SwiGLU feed-forward (default: the variant's)", minimum=1
    )
    num_attention_heads: int | None = flag(
        None, "query heads; must divide hidden_size (default: the variant's)", minimum=1
    )
    num_kv_heads: int | None = flag(
        None, "key/value heads; must divide num_attention_heads (default: the variant's)", minimum=1
    )
    rope_theta: float | None = flag(None, "base of the rotary frequencies (default: the variant's)", minimum=1)
    norm_eps: float | None = flag(None, "epsilon inside the norms (default: the variant's)", minimum=0)
    vocab_size: int | None = flag(None, "rows of the embedding (default: the data's, else the variant's)", minimum=2)
    tie_embeddings: bool | None = flag(None, "share the embedding with the output head (default: the variant's)")
    init_std: float | None = flag(
        None, "standard deviation of initial weights (default: the variant's)", minimum=0, resume="free"
    )
    norm: str = flag("rmsnorm", "normalization layer", choices=("rmsnorm", "layernorm"), advanced=True)
    pos_emb: str = flag("rope", "positional encoding", choices=("rope", "learned"), advanced=True)
    attn_impl: str = flag(
        "auto",
        "backend of scaled_dot_product_attention; auto leaves the choice to torch",
        choices=("auto", "flash", "efficient", "math"),
        advanced=True,
        resume="free",
    )


@dataclass(frozen=True)
class DataConfig:
    """The data: which sources, in which proportions, cut into which sequences."""

    RESUME: ClassVar[str] = "announced"

    use_dummy_dataset: bool = flag(False, "train on synthetic tokens: no files, no cost, for tests and benchmarks")
    data_path: str = flag(
        "", "folder with one subfolder of token shards per source (see `python -m fms_fsdp prepare`)", resume="free"
    )
    datasets: tuple[str, ...] = flag((), "sources to train on, subfolders of data_path (default: all of them)")
    weights: tuple[float, ...] = flag((), "share of tokens of each dataset, in their order (default: by their size)")
    seq_length: int = flag(4096, "tokens in a row: the context length trained on", minimum=1)
    sep_token: int | None = flag(
        None, "token id that ends every document (default: the one the shards name)", minimum=0, resume="refused"
    )
    logical_shards: int = flag(
        1024,
        "tapes read side by side, shared out by weight; more shuffle wider, fewer read less",
        minimum=1,
        advanced=True,
        resume="free",
    )
    packing: str = flag(
        "concat",
        "how documents fill rows: cut anywhere, or best-fit with few cuts",
        choices=("concat", "bestfit"),
        resume="refused",
    )
    document_mask: bool = flag(False, "attention stays within a document and positions restart with it")
    skip_steps: str = flag("", "a:b passes over the rows planned for steps a to b-1, after a loss spike")
    on_missing: str = flag(
        "error",
        "a shard that cannot be read stops the run, or its rows are masked",
        choices=("error", "mask"),
        advanced=True,
        resume="free",
    )
    max_epochs: float | None = flag(
        None, "refuse a run that would read any source more often than this", minimum=0, resume="free"
    )
    dataset_builder: str = flag("", "module:function that builds your own stream (see docs/data.md)", advanced=True)
    data_kwargs: tuple[str, ...] = flag((), "key=value,… handed to dataset_builder", advanced=True)

    def __post_init__(self) -> None:
        if len(set(self.datasets)) != len(self.datasets):
            twice = sorted({name for name in self.datasets if self.datasets.count(name) > 1})
            raise ValueError(
                f"--datasets ({','.join(self.datasets)}) must name a source once; repeated: {', '.join(twice)}"
            )
        if self.weights and len(self.weights) != len(self.datasets):
            raise ValueError(
                f"--weights ({_join(self.weights)}) must give one number per dataset: {len(self.weights)} weights "
                f"for {len(self.datasets)} datasets ({','.join(self.datasets) or 'none named'}); name both in the same order"
            )
        if any(weight <= 0 for weight in self.weights):
            raise ValueError(
                f"--weights ({_join(self.weights)}) must be positive; leave a dataset out to give it no tokens"
            )
        if self.logical_shards & (self.logical_shards - 1):
            below = 1 << (self.logical_shards.bit_length() - 1)
            nearest = below if self.logical_shards - below <= 2 * below - self.logical_shards else 2 * below
            raise ValueError(f"--logical_shards ({self.logical_shards}) must be a power of two; nearest: {nearest}")
        for item in self.data_kwargs:
            if "=" not in item:
                raise ValueError(f"--data_kwargs ({item}) must be written key=value; several are joined by commas")


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over devices, in which precision, and what is recomputed."""

    RESUME: ClassVar[str] = "free"

    sharding_strategy: str | None = flag(
        None,
        "fsdp shards over all devices, hsdp within groups, ddp replicates, none is one process "
        "(default: none on one device, hsdp for 7b and 13b, else fsdp)",
        choices=("fsdp", "hsdp", "ddp", "none"),
    )
    hsdp_shard_size: int | None = flag(
        None, "devices that share one copy under hsdp (default: those of a node)", minimum=1
    )
    mixed_precision: bool | None = flag(
        None,
        "bf16 compute with fp32 master weights and reductions (default: on where the hardware computes bf16)",
        resume="announced",
    )
    reduce_dtype: str = flag(
        "fp32", "precision of gradient reductions", choices=("fp32", "bf16"), advanced=True, resume="announced"
    )
    fsdp_activation_checkpointing: bool = flag(False, "recompute activations in the backward pass to save memory")
    selective_checkpointing: str = flag(
        "1", "share of blocks that recompute, evenly spaced: 1, 1/2, 0.33 or every:k", advanced=True
    )
    low_cpu_fsdp: bool = flag(
        True, "build on the meta device and initialise shard by shard: no rank holds the whole model"
    )
    use_torch_compile: bool = flag(False, "compile each block with torch.compile")
    reshard_after_forward: bool = flag(
        True,
        "free gathered weights after the forward pass (ZeRO-3); False keeps them (ZeRO-2)",
        advanced=True,
    )
    fsdp_prefetch: int = flag(0, "blocks gathered ahead of use beyond FSDP's own prefetch", minimum=0, advanced=True)
    cpu_offload: bool = flag(False, "keep sharded weights, gradients and optimizer state in host memory", advanced=True)
    dist_backend: str = flag(
        "auto",
        "process group backend; auto is nccl on GPU, gloo on CPU",
        choices=("auto", "nccl", "gloo"),
        advanced=True,
    )
    collective_timeout_s: int = flag(
        600, "seconds after which a collective that does not finish is an error", minimum=1, advanced=True
    )
    matmul_precision: str = flag(
        "high",
        "precision of fp32 matrix products on GPU: highest is fp32, high is TF32",
        choices=("highest", "high", "medium"),
        advanced=True,
    )

    def __post_init__(self) -> None:
        parse_selective_checkpointing(self.selective_checkpointing)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and the learning-rate schedule."""

    RESUME: ClassVar[str] = "announced"

    learning_rate: float = flag(3e-4, "peak learning rate, reached at the end of the warm-up", minimum=0)
    warmup_steps: int | None = flag(
        None, "steps of linear warm-up (default: 5 % of num_steps, at most 2000)", minimum=0
    )
    min_lr_ratio: float = flag(0.1, "share of the peak at the end of the cosine", minimum=0, maximum=1)
    adam_beta1: float = flag(0.9, "decay of the first moment", minimum=0, maximum=1)
    adam_beta2: float = flag(0.95, "decay of the second moment", minimum=0, maximum=1)
    adam_eps: float = flag(1e-8, "added to the root of the second moment", minimum=0, advanced=True)
    weight_decay: float = flag(0.1, "decoupled weight decay of matrices; norms have none", minimum=0)
    grad_clip: float = flag(1.0, "largest global norm of the gradient; 0 does not clip", minimum=0)

    def warmup(self, num_steps: int) -> int:
        """Steps of warm-up in a run of `num_steps`.

        Raises:
            ValueError: more are asked for than the run has.
        """
        if self.warmup_steps is None:
            return min(2000, max(1, num_steps // 20))
        if self.warmup_steps > num_steps:
            raise ValueError(
                f"--warmup_steps ({self.warmup_steps}) must not exceed --num_steps ({num_steps}); lower it"
            )
        return self.warmup_steps


@dataclass(frozen=True)
class TrainingConfig:
    """How long, in which batches, from which seed."""

    RESUME: ClassVar[str] = "announced"

    seed: int = flag(2023, "seed of weights and data order", minimum=0, resume="refused")
    num_steps: int | None = flag(
        None, "optimizer steps in total, those before a resume included (default: 1000)", minimum=1
    )
    num_tokens: int | None = flag(None, "length of the run in tokens instead, such as 300B", minimum=1)
    num_samples: int | None = flag(None, "length of the run in rows of seq_length tokens instead", minimum=1)
    batch_size: int | None = flag(
        None, "rows per data-parallel rank and micro-step (default: 2, or from the other two)", minimum=1
    )
    grad_accum_steps: int | None = flag(
        None, "micro-steps per optimizer step (default: 1, or from the other two)", minimum=1
    )
    global_batch_size: int | None = flag(
        None, "rows per optimizer step = batch_size x data-parallel size x grad_accum_steps", minimum=1
    )
    deterministic: bool = flag(
        False, "use only deterministic kernels (slower; CPU runs always repeat bit for bit)", advanced=True
    )
    max_bad_steps: int = flag(
        10,
        "steps in a row whose gradient is not finite before the run fails; such steps change nothing; 0 never fails",
        minimum=0,
        resume="free",
    )
    spike_threshold: float = flag(
        6.0,
        "log a loss that lies this many deviations above its recent mean; 0 does not look",
        minimum=0,
        advanced=True,
        resume="free",
    )
    exit_interval: int | None = flag(
        None, "end this launch after so many steps of its own; the same command goes on", minimum=1, resume="free"
    )
    exit_tokens: int | None = flag(None, "end this launch after so many tokens of its own", minimum=1, resume="free")
    exit_duration_in_mins: float | None = flag(
        None,
        "end this launch in time to be done, checkpoint included, so many minutes after its start",
        minimum=0,
        resume="free",
    )

    def __post_init__(self) -> None:
        given = [name for name in ("num_steps", "num_tokens", "num_samples") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                f"--{given[1]} ({getattr(self, given[1])}) must not be given beside --{given[0]}; choose one of them"
            )

    def steps_at(self, rows: int, seq_length: int, start: int = 0, tokens_seen: int = 0) -> int:
        """The run's last step, at `rows` of `seq_length` tokens a step from `start` on, where `tokens_seen` were behind it."""
        if self.num_tokens is None and self.num_samples is None:
            return 1000 if self.num_steps is None else self.num_steps
        tokens = self.num_tokens if self.num_tokens is not None else (self.num_samples or 0) * seq_length
        return max(start, start + -(-(tokens - tokens_seen) // (rows * seq_length)), 1)


@dataclass(frozen=True)
class EvalConfig:
    """Validation on held-out data; it changes nothing in what is trained."""

    RESUME: ClassVar[str] = "free"

    eval_interval: int = flag(
        0, "steps between evaluations on held-out data, the last step is evaluated too; 0 is off", minimum=0
    )
    eval_steps: int = flag(
        10, "global batches of each held-out source in an evaluation, always the same; at most one epoch", minimum=1
    )
    eval_at_start: bool = flag(False, "evaluate before the first step of every launch too")
    eval_data_path: str = flag(
        "",
        "folder of held-out token shards (default: validation/ in data_path, as `prepare --split` writes it; else data_path)",
    )
    eval_datasets: tuple[str, ...] = flag((), "held-out sources, subfolders there (default: all of them)")
    eval_test: bool = flag(False, "evaluate test/ in data_path once, after the last step")


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, where, what is kept, and what a run starts from."""

    RESUME: ClassVar[str] = "free"

    ckpt_save_path: str = flag(
        "", "folder of checkpoints (default: checkpoints/ in the run folder); a complete one there is resumed"
    )
    ckpt_load_path: str = flag("", "checkpoint root or step folder to start from when ckpt_save_path holds none")
    resuming_dataset: bool = flag(
        True, "data go on where the run of ckpt_load_path stood; off: step and optimizer go on, this run's data begin"
    )
    load_model_only: bool = flag(False, "take only the weights of ckpt_load_path: fresh optimizer, step 0, fresh data")
    resume: str = flag(
        "auto",
        "go on from the newest sound checkpoint if there is one, insist on one, or insist on a fresh start",
        choices=("auto", "must", "never"),
    )
    resume_step: int | None = flag(
        None,
        "go back to the checkpoint of this step and set later ones aside; those then made with this flag are gone on from",
        minimum=1,
    )
    checkpoint_interval: int = flag(
        1000, "steps between checkpoints; the last step is saved too; 0 saves only that", minimum=0
    )
    save_last: bool = flag(True, "save the last step; off for benchmarks", advanced=True)
    checkpoint_schedule: str = flag(
        "",
        "in its place: 10@100,18@1000,1500 saves every 10 steps up to 100, from there every 18 up to 1000, then every 1500",
    )
    async_checkpoint: bool = flag(
        True, "write checkpoints in the background: training waits only for the copy to host memory"
    )
    keep_last_n: int = flag(
        0, "keep the newest N checkpoints, delete others once a new one is complete; 0 keeps all", minimum=0
    )
    keep_every: int = flag(0, "beside keep_last_n keep the multiples of this for ever", minimum=0)
    keep_best: int = flag(0, "beside keep_last_n keep the N of the lowest validation loss", minimum=0)
    keep_steps: tuple[int, ...] = flag((), "beside keep_last_n keep these steps for ever", minimum=1)

    def __post_init__(self) -> None:
        if not self.keep_last_n and (self.keep_every or self.keep_best or self.keep_steps):
            raise ValueError("--keep_last_n (0) keeps every checkpoint; set it, or leave out the other --keep_ flags")
        if self.resume_step is not None and self.resume == "never":
            raise ValueError(f"--resume_step ({self.resume_step}) needs a checkpoint; leave out --resume=never")


@dataclass(frozen=True)
class LogConfig:
    """Where a run lives and what it tells."""

    RESUME: ClassVar[str] = "free"

    output_dir: str = flag("", "the run folder (default: runs/<run_name>)")
    run_name: str = flag("", "name of the run (default: the variant and a hash of what is trained)")
    report_interval: int = flag(10, "steps between reports; the first and the last step always report", minimum=1)
    log_param_norm: bool = flag(False, "report the norm of all parameters")
    log_num_zeros: bool = flag(False, "report how many entries of the gradient are zero", advanced=True)
    log_all_ranks: bool = flag(False, "every rank appends its lines to log.rank<N>.txt, not rank 0 alone to log.txt")
    trackers: tuple[str, ...] = flag(
        ("tensorboard",),
        "who is told beside metrics.jsonl; none of them can stop a run (see docs/metrics.md)",
        choices=("none", "tensorboard", "wandb", "mlflow", "aim", "codecarbon"),
    )
    tracker_project: str = flag("fms-fsdp", "project or experiment that trackers file the run under")
    tracker_entity: str = flag("", "team or account of wandb (default: the user's own)")
    tracker_metrics: tuple[str, ...] = flag(
        (), "names of the metrics that trackers get, such as loss,lr,*_ms (default: all)", advanced=True
    )
    tensorboard_dir: str = flag("", "folder of TensorBoard's files (default: tensorboard/ in the run folder)")

    def __post_init__(self) -> None:
        if "none" in self.trackers and len(self.trackers) > 1:
            raise ValueError(f"--trackers ({','.join(self.trackers)}) must not name others beside none; leave one out")


@dataclass(frozen=True)
class ProfilerConfig:
    """Traces of a few steps; also on demand: touch PROFILE in the run folder, or send SIGUSR2."""

    RESUME: ClassVar[str] = "free"

    use_profiler: bool = flag(False, "write a profiler trace of some steps of this launch")
    profiler_dir: str = flag("", "folder of traces (default: profile_traces/ in the run folder)")
    profiler_ranks: tuple[int, ...] = flag((0,), "ranks that write traces; empty: all", minimum=0)
    profiler_wait: int = flag(3, "steps of this launch before the profiler warms up", minimum=0)
    profiler_warmup: int = flag(2, "steps the profiler runs without recording", minimum=0, advanced=True)
    profiler_active: int = flag(3, "steps recorded", minimum=1)
    profiler_shapes: bool = flag(True, "record the shapes of operands", advanced=True)
    profiler_stacks: bool = flag(False, "record Python stacks; slower, larger", advanced=True)
    profiler_memory: bool = flag(False, "record allocations", advanced=True)
    memory_snapshot: bool = flag(
        False,
        "record the GPU allocator's history in the profiler's steps; a snapshot is always left when memory runs out",
    )


@dataclass(frozen=True)
class TrainConfig:
    """All sections of a run. Only `main_training.py` sees the whole."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    optim: OptimConfig = OptimConfig()
    training: TrainingConfig = TrainingConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    profiler: ProfilerConfig = ProfilerConfig()

    def __post_init__(self) -> None:
        if self.training.num_steps is not None:
            self.optim.warmup(self.training.num_steps)
        if self.checkpoint.keep_best and not self.eval.eval_interval:
            raise ValueError(
                f"--keep_best ({self.checkpoint.keep_best}) compares validation losses; set --eval_interval"
            )
        if self.checkpoint.load_model_only and not self.checkpoint.ckpt_load_path:
            raise ValueError("--load_model_only (True) needs the weights' place; add --ckpt_load_path=FOLDER")
        if "/" in self.log.run_name:
            raise ValueError(f"--run_name ({self.log.run_name}) must not contain '/'; use --output_dir for a path")

    @property
    def run_name(self) -> str:
        """The given name, or `<variant>-<8 hex digits>` of everything that decides what is trained (no lengths, intervals or paths of output)."""
        if self.log.run_name:
            return self.log.run_name
        content = dataclasses.asdict(self)
        for section in ("eval", "checkpoint", "log", "profiler"):
            del content[section]
        for name, declared in type(self.training).__dataclass_fields__.items():
            if name in ("num_steps", "num_tokens", "num_samples") or declared.metadata.get("resume") == "free":
                del content["training"][name]
        del content["data"]["skip_steps"]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.model.model_variant}-{digest}"

    @property
    def output_dir(self) -> str:
        """The run folder."""
        return self.log.output_dir or f"runs/{self.run_name}"

    @property
    def ckpt_save_path(self) -> str:
        """The folder of checkpoints."""
        return self.checkpoint.ckpt_save_path or f"{self.output_dir}/checkpoints"


@dataclass(frozen=True)
class BatchPlan:
    """The batch arithmetic of a run: global_batch_size = batch_size × dp_size × grad_accum_steps rows."""

    batch_size: int
    grad_accum_steps: int
    dp_size: int

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.dp_size * self.grad_accum_steps


def resolve_batch(section: TrainingConfig, dp_size: int) -> BatchPlan:
    """The three batch sizes from any two of them (or fewer: batch_size is then 2, grad_accum_steps 1).

    Raises:
        ValueError: the three contradict one another, or the global batch does not divide over the ranks.
    """
    rows, accum, total = section.batch_size, section.grad_accum_steps, section.global_batch_size
    if total is None:
        return BatchPlan(rows or 2, accum or 1, dp_size)
    if total % dp_size:
        valid = [size for size in range(1, total + 1) if total % size == 0]
        raise ValueError(
            f"--global_batch_size ({total}) must be divisible by the data-parallel size ({dp_size}); "
            f"valid sizes: {_join(valid)}"
        )
    per_rank = total // dp_size
    if rows is None:
        rows = per_rank // accum if accum else (2 if per_rank % 2 == 0 else 1)
    if accum is None and rows:
        accum = per_rank // rows
    if not rows or not accum or rows * accum * dp_size != total:
        raise ValueError(
            f"--global_batch_size ({total}) must equal batch_size ({section.batch_size or rows}) x data-parallel size ({dp_size}) "
            f"x grad_accum_steps ({section.grad_accum_steps or accum}); give two of the three, e.g. --batch_size=1"
        )
    return BatchPlan(rows, accum, dp_size)


def as_dict(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """The configuration by section, in JSON types; `--config=FILE` reads it back."""
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def from_dict(content: Mapping[str, Any]) -> TrainConfig:
    """The configuration that `as_dict` wrote, by this version or an earlier one: what it lacks has its default, what is unknown is passed over."""
    sections = {}
    for section in dataclasses.fields(TrainConfig):
        given, kind = content.get(section.name, {}), type(getattr(TrainConfig(), section.name))
        values = {spec.name: given[spec.name] for spec in dataclasses.fields(kind) if spec.name in given}
        sections[section.name] = kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})
    return TrainConfig(**sections)


def non_defaults(config: TrainConfig) -> Mapping[str, Any]:
    """Flat name → value of every field that differs from its default."""
    return {
        spec.name: value
        for section in dataclasses.fields(config)
        for spec in dataclasses.fields(getattr(config, section.name))
        if (value := getattr(getattr(config, section.name), spec.name)) != spec.default
    }


def _join(values: Any) -> str:
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
