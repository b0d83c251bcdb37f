"""The configuration of a run: frozen section dataclasses, one flat name space of flags.

    TrainConfig ── model · data · parallel · optim · training · checkpoint · log

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
from typing import Any


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    advanced: bool = False,
) -> Any:
    """A dataclass field with its documentation: what `--help` prints and what a value must satisfy."""
    metadata = dict(help=help, choices=choices, minimum=minimum, maximum=maximum, advanced=advanced)
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
    """The model: a variant by name, and overrides of its fields."""

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
    init_std: float | None = flag(None, "standard deviation of initial weights (default: the variant's)", minimum=0)
    norm: str = flag("rmsnorm", "normalization layer", choices=("rmsnorm", "layernorm"), advanced=True)
    pos_emb: str = flag("rope", "positional encoding", choices=("rope", "learned"), advanced=True)
    attn_impl: str = flag(
        "auto",
        "backend of scaled_dot_product_attention; auto leaves the choice to torch",
        choices=("auto", "flash", "efficient", "math"),
        advanced=True,
    )


@dataclass(frozen=True)
class DataConfig:
    """The data: which sources, in which proportions, cut into which sequences."""

    use_dummy_dataset: bool = flag(False, "train on synthetic tokens: no files, no cost, for tests and benchmarks")
    data_path: str = flag("", "folder with one subfolder of token shards per source (see `python -m fms_fsdp prepare`)")
    datasets: tuple[str, ...] = flag((), "sources to train on, subfolders of data_path (default: all of them)")
    weights: tuple[float, ...] = flag((), "share of tokens of each dataset, in their order (default: by their size)")
    seq_length: int = flag(4096, "tokens in a row: the context length trained on", minimum=1)
    sep_token: int | None = flag(
        None, "token id that ends every document (default: the one the shards name)", minimum=0
    )
    logical_shards: int = flag(
        1024,
        "tapes read side by side, shared out by weight; more shuffle wider, fewer read less",
        minimum=1,
        advanced=True,
    )
    packing: str = flag(
        "concat",
        "how documents fill rows: cut anywhere, or best-fit with few cuts",
        choices=("concat", "bestfit"),
    )
    document_mask: bool = flag(False, "attention stays within a document and positions restart with it")
    skip_steps: str = flag("", "a:b passes over the rows planned for steps a to b-1, after a loss spike")
    on_missing: str = flag(
        "error",
        "a shard that cannot be read stops the run, or its rows are masked",
        choices=("error", "mask"),
        advanced=True,
    )
    max_epochs: float | None = flag(None, "refuse a run that would read any source more often than this", minimum=0)
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
    )
    reduce_dtype: str = flag("fp32", "precision of gradient reductions", choices=("fp32", "bf16"), advanced=True)
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


@dataclass(frozen=True)
class TrainingConfig:
    """How long, in which batches, from which seed."""

    seed: int = flag(2023, "seed of weights and data order", minimum=0)
    num_steps: int = flag(1000, "optimizer steps in total, those before a resume included", minimum=1)
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


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, where, and what a run starts from."""

    ckpt_save_path: str = flag(
        "", "folder of checkpoints (default: checkpoints/ in the run folder); a complete one there is resumed"
    )
    ckpt_load_path: str = flag("", "checkpoint root or step folder to start from when ckpt_save_path holds none")
    load_model_only: bool = flag(False, "take only the weights of ckpt_load_path: fresh optimizer, step 0, fresh data")
    checkpoint_interval: int = flag(
        1000, "steps between checkpoints; the last step is always saved; 0 saves only that", minimum=0
    )


@dataclass(frozen=True)
class LogConfig:
    """Where a run lives and what it tells."""

    output_dir: str = flag("", "the run folder (default: runs/<run_name>)")
    run_name: str = flag("", "name of the run (default: the variant and a hash of what is trained)")
    report_interval: int = flag(10, "steps between reports; the first and the last step always report", minimum=1)
    use_profiler: bool = flag(False, "write a profiler trace into profile_traces/ of the run folder")
    profiler_wait: int = flag(3, "steps of this launch before the profiler warms up", minimum=0, advanced=True)
    profiler_warmup: int = flag(2, "steps the profiler runs without recording", minimum=0, advanced=True)
    profiler_active: int = flag(3, "steps recorded", minimum=1, advanced=True)


@dataclass(frozen=True)
class TrainConfig:
    """All sections of a run. Only `main_training.py` sees the whole."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    optim: OptimConfig = OptimConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        warmup = self.optim.warmup_steps
        if warmup is not None and warmup > self.training.num_steps:
            raise ValueError(
                f"--warmup_steps ({warmup}) must not exceed --num_steps ({self.training.num_steps}); lower it"
            )
        if self.checkpoint.load_model_only and not self.checkpoint.ckpt_load_path:
            raise ValueError("--load_model_only (True) needs the weights' place; add --ckpt_load_path=FOLDER")
        if "/" in self.log.run_name:
            raise ValueError(f"--run_name ({self.log.run_name}) must not contain '/'; use --output_dir for a path")

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up, the default derived from num_steps."""
        given = self.optim.warmup_steps
        return min(2000, max(1, self.training.num_steps // 20)) if given is None else given

    @property
    def run_name(self) -> str:
        """The given name, or `<variant>-<8 hex digits>` of everything that decides what is trained (no lengths, intervals or paths of output)."""
        if self.log.run_name:
            return self.log.run_name
        content = dataclasses.asdict(self)
        for section in ("checkpoint", "log"):
            del content[section]
        del content["training"]["num_steps"], content["data"]["skip_steps"]
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
