"""What is trained: the model, the data, how both are spread, the optimizer, the length of the run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from fms_fsdp.config.flag import check_path, check_source_name, flag, joined
from fms_fsdp.config.values import exact_number, shown


def parse_selective_checkpointing(text: str) -> Fraction:
    """The share of blocks to checkpoint, in (0, 1]: from `1`, `1/2`, `0.33` or `every:k` (every k-th block).

    Raises:
        ValueError: not such a share. A bare integer k above 1 (fms-fsdp's spelling of "every k-th") is refused with ours.
    """
    above, _, below = (f"1/{text[6:]}" if text.startswith("every:") else text).partition("/")
    parts = [exact_number(above), exact_number(below or "1")]
    if None in parts or not parts[1]:
        raise ValueError(
            f"--selective_checkpointing ({shown(text)}) must be a share such as 1, 1/2, 0.33 or every:k"
        )
    share = Fraction(parts[0] or 0) / parts[1]
    if 1 < share <= 1000 and share.denominator == 1:
        raise ValueError(
            f"--selective_checkpointing ({text}) must not exceed 1; for one block in {share} write 1/{share} "
            f"or every:{share}"
        )
    if not Fraction(1, 10**6) <= share <= 1:
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
    rope_theta: float | None = flag(
        None, "base of the rotary frequencies (default: the variant's)", minimum=1
    )
    norm_eps: float | None = flag(None, "epsilon inside the norms (default: the variant's)", minimum=0)
    vocab_size: int | None = flag(
        None, "rows of the embedding (default: the data's, else the variant's)", minimum=2
    )
    tie_embeddings: bool | None = flag(
        None, "share the embedding with the output head (default: the variant's)"
    )
    init_std: float | None = flag(
        None,
        "standard deviation of initial weights (default: the variant's)",
        above=0,
        maximum=10,
        resume="free",
        in_name=True,
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

    use_dummy_dataset: bool = flag(
        False, "train on synthetic tokens: no files, no cost, for tests and benchmarks"
    )
    data_path: str = flag(
        "",
        "folder with one subfolder of token shards per source (see `python -m fms_fsdp prepare`)",
        resume="free",
    )
    datasets: tuple[str, ...] = flag(
        (), "sources to train on, subfolders of data_path (default: all of them)"
    )
    weights: tuple[float, ...] = flag(
        (), "share of tokens of each dataset, in their order (default: by their size)"
    )
    seq_length: int = flag(4096, "tokens in a row: the context length trained on", minimum=1)
    sep_token: int | None = flag(
        None,
        "token id that ends every document (default: the one the shards name)",
        minimum=0,
        resume="refused",
    )
    logical_shards: int = flag(
        1024,
        "tapes read side by side, shared out by weight; more shuffle wider, fewer read less",
        minimum=1,
        maximum=2**20,
        advanced=True,
        resume="free",
        in_name=True,
    )
    packing: str = flag(
        "concat",
        "how documents fill rows: cut anywhere, or best-fit with few cuts",
        choices=("concat", "bestfit"),
        resume="refused",
    )
    document_mask: bool = flag(False, "attention stays within a document and positions restart with it")
    skip_steps: str = flag(
        "", "a:b passes over the rows planned for steps a to b-1, after a loss spike", in_name=False
    )
    on_missing: str = flag(
        "error",
        "a shard that cannot be read stops the run, or its rows are masked",
        choices=("error", "mask"),
        advanced=True,
        resume="free",
    )
    max_epochs: float | None = flag(
        None,
        "refuse a run that would read any source more often than this",
        above=0,
        maximum=1e6,
        resume="free",
    )
    dataset_builder: str = flag(
        "", "module:function that builds your own stream (see docs/data.md)", advanced=True
    )
    data_kwargs: tuple[str, ...] = flag((), "key=value,… handed to dataset_builder", advanced=True)

    def __post_init__(self) -> None:
        check_path("--data_path", self.data_path)
        for name in self.datasets:
            check_source_name("--datasets", name)
        if len(set(self.datasets)) != len(self.datasets):
            twice = sorted({name for name in self.datasets if self.datasets.count(name) > 1})
            raise ValueError(
                f"--datasets ({','.join(self.datasets)}) must name a source once; repeated: {', '.join(twice)}"
            )
        if self.weights and len(self.weights) != len(self.datasets):
            raise ValueError(
                f"--weights ({joined(self.weights)}) must give one number per dataset: {len(self.weights)} weights "
                f"for {len(self.datasets)} datasets ({','.join(self.datasets) or 'none named'}); name both in the same order"
            )
        if any(weight <= 0 for weight in self.weights):
            raise ValueError(
                f"--weights ({joined(self.weights)}) must be positive; leave a dataset out to give it no tokens"
            )
        if self.logical_shards & (self.logical_shards - 1):
            below = 1 << (self.logical_shards.bit_length() - 1)
            nearest = below if self.logical_shards - below <= 2 * below - self.logical_shards else 2 * below
            raise ValueError(
                f"--logical_shards ({self.logical_shards}) must be a power of two; nearest: {nearest}"
            )
        for item in filter(None, self.skip_steps.replace(" ", "").split(",")):
            match = re.fullmatch(r"(\d{1,15}):(\d{1,15})", item)
            if match is None or not 1 <= int(match[1]) < int(match[2]):
                raise ValueError(
                    f"--skip_steps ({item}) must be a:b with 1 <= a < b, the steps a to b - 1; write 100:120"
                )
        if self.dataset_builder and not re.fullmatch(
            r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", self.dataset_builder
        ):
            raise ValueError(
                f"--dataset_builder ({self.dataset_builder}) must be importable as module:function"
            )
        for item in self.data_kwargs:
            if "=" not in item:
                raise ValueError(
                    f"--data_kwargs ({item}) must be written key=value; several are joined by commas"
                )


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
        "fp32",
        "precision of gradient reductions",
        choices=("fp32", "bf16"),
        advanced=True,
        resume="announced",
    )
    fsdp_activation_checkpointing: bool = flag(
        False, "recompute activations in the backward pass to save memory"
    )
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
    fsdp_prefetch: int = flag(
        0, "blocks gathered ahead of use beyond FSDP's own prefetch", minimum=0, advanced=True
    )
    cpu_offload: bool = flag(
        False, "keep sharded weights, gradients and optimizer state in host memory", advanced=True
    )
    dist_backend: str = flag(
        "auto",
        "process group backend; auto is nccl on GPU, gloo on CPU",
        choices=("auto", "nccl", "gloo"),
        advanced=True,
    )
    collective_timeout_s: int = flag(
        600,
        "seconds after which a collective that does not finish is an error",
        minimum=1,
        maximum=10**8,
        advanced=True,
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
    adam_beta1: float = flag(0.9, "decay of the first moment", minimum=0, below=1)
    adam_beta2: float = flag(0.95, "decay of the second moment", minimum=0, below=1)
    adam_eps: float = flag(
        1e-8, "added to the root of the second moment", minimum=0, maximum=1, advanced=True
    )
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
                f"--warmup_steps ({self.warmup_steps}) must not exceed --num_steps ({num_steps}); raise that"
            )
        return self.warmup_steps


@dataclass(frozen=True)
class TrainingConfig:
    """How long, in which batches, from which seed."""

    RESUME: ClassVar[str] = "announced"

    seed: int = flag(2023, "seed of weights and data order", minimum=0, maximum=2**63 - 1, resume="refused")
    num_steps: int | None = flag(
        None,
        "optimizer steps in total, those before a resume included (default: 1000)",
        minimum=1,
        in_name=False,
    )
    num_tokens: int | None = flag(
        None, "length of the run in tokens instead, such as 300B", minimum=1, in_name=False
    )
    num_samples: int | None = flag(
        None, "length of the run in rows of seq_length tokens instead", minimum=1, in_name=False
    )
    batch_size: int | None = flag(
        None,
        "rows per data-parallel rank and micro-step (default: 2, or from the other two)",
        minimum=1,
        in_name=True,
    )
    grad_accum_steps: int | None = flag(
        None, "micro-steps per optimizer step (default: 1, or from the other two)", minimum=1, in_name=True
    )
    global_batch_size: int | None = flag(
        None,
        "rows per optimizer step = batch_size x data-parallel size x grad_accum_steps",
        minimum=1,
        in_name=True,
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
        None,
        "end this launch after so many steps of its own; the same command goes on",
        minimum=1,
        resume="free",
    )
    exit_tokens: int | None = flag(
        None, "end this launch after so many tokens of its own", minimum=1, resume="free"
    )
    exit_samples: int | None = flag(
        None, "end this launch after so many rows of its own", minimum=1, resume="free"
    )
    exit_step: int | None = flag(
        None, "end the launch that reaches this step of the run", minimum=1, resume="free"
    )
    exit_duration_in_mins: float | None = flag(
        None,
        "end this launch in time to be done, checkpoint included, so many minutes after its start",
        above=0,
        resume="free",
    )
    exit_margin_s: float | None = flag(
        None,
        "seconds before the time limit at which this launch begins to end (default: from its own steps, evaluations and saves)",
        minimum=0,
        advanced=True,
        resume="free",
    )

    def __post_init__(self) -> None:
        given = [
            name for name in ("num_steps", "num_tokens", "num_samples") if getattr(self, name) is not None
        ]
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
