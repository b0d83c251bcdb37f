"""The flags of what is trained: model, data, parallelism, optimizer, length. One row a flag: see flag.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from fms_fsdp.config.flag import announced_flag, free_flag, refused_flag
from fms_fsdp.config.values import exact_number, joined, shown


def parse_selective_checkpointing(text: str) -> Fraction:
    """The share of blocks to checkpoint, in (0, 1]: from `1`, `1/2`, `0.33` or `every:k` (every k-th block).

    Raises:
        ValueError: not such a share. In fms-fsdp an integer k above 1 meant "every k-th"; the error says how
            to write that.
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


# fmt: off
@dataclass(frozen=True)
class ModelConfig:
    """The model: the name of a variant, and fields that replace its values.

    On resume, the flags together must give the model of the checkpoint.
    """

    model_variant: str = refused_flag("7b", form="folder name",
        help="name of the Llama variant; an unknown name prints all names")
    num_layers: int | None = refused_flag(None, minimum=1,
        help="number of transformer blocks (default: the variant's)")
    hidden_size: int | None = refused_flag(None, minimum=1,
        help="width of the residual stream (default: the variant's)")
    ffn_hidden_size: int | None = refused_flag(None, minimum=1,
        help="inner width of the SwiGLU feed-forward block (default: the variant's)")
    num_attention_heads: int | None = refused_flag(None, minimum=1,
        help="number of query heads; it must divide hidden_size (default: the variant's)")
    num_kv_heads: int | None = refused_flag(None, minimum=1,
        help="number of key/value heads; it must divide num_attention_heads (default: the variant's)")
    rope_theta: float | None = refused_flag(None, minimum=1,
        help="base of the rotary frequencies (default: the variant's)")
    norm_eps: float | None = refused_flag(None, minimum=0,
        help="epsilon inside the norms (default: the variant's)")
    vocab_size: int | None = refused_flag(None, minimum=2,
        help="number of rows of the embedding (default: the data's; the variant's if the data name none)")
    tie_embeddings: bool | None = refused_flag(None,
        help="the output head uses the weights of the embedding (default: the variant's)")
    init_std: float | None = free_flag(None, above=0, maximum=10, in_name=True,
        help="standard deviation of the initial weights (default: the variant's)")
    norm: str = refused_flag("rmsnorm", choices=("rmsnorm", "layernorm"), advanced=True,
        help="type of the normalization layers")
    pos_emb: str = refused_flag("rope", choices=("rope", "learned"), advanced=True,
        help="type of the positional encoding")
    attn_impl: str = free_flag("auto", choices=("auto", "flash", "efficient", "math"), advanced=True,
        help="backend of scaled_dot_product_attention; with auto, torch chooses it")


@dataclass(frozen=True)
class DataConfig:
    """The data: which sources, in which proportions, and how documents become rows."""

    use_dummy_dataset: bool = announced_flag(False,
        help="train on synthetic tokens, for tests and benchmarks; they need no files and cost no time")
    data_path: str = free_flag("", form="path", orders_data=True,
        help="folder with one subfolder of token shards for each source (see `python -m fms_fsdp prepare`)")
    datasets: tuple[str, ...] = announced_flag((), form="source name",
        help="sources to train on, by the names of their subfolders in data_path (default: all)")
    weights: tuple[float, ...] = announced_flag((),
        help="share of tokens of each source, in the order of --datasets (default: by size)")
    seq_length: int = announced_flag(4096, minimum=1,
        help="number of tokens in a row; this is the context length of training")
    sep_token: int | None = refused_flag(None, minimum=0, orders_data=True,
        help="id of the token that ends every document (default: the id that the shards name)")
    logical_shards: int = free_flag(1024, minimum=1, maximum=2**20, advanced=True, in_name=True,
        orders_data=True,
        help="number of tapes that are read side by side, divided by weight; more tapes shuffle more widely, "
        "fewer tapes read less")
    packing: str = refused_flag("concat", choices=("concat", "bestfit"), orders_data=True,
        help="how documents fill rows: concat cuts them anywhere, bestfit makes few cuts")
    document_mask: bool = announced_flag(False,
        help="attention stays within a document, and positions start again with each document")
    skip_steps: str = announced_flag("", in_name=False,
        help="a:b leaves out the rows that are planned for steps a to b-1; use it after a loss spike")
    on_missing: str = free_flag("error", choices=("error", "mask"), advanced=True,
        help="what happens if a shard cannot be read: error stops the run, mask masks its rows")
    max_epochs: float | None = free_flag(None, above=0, maximum=1e6,
        help="refuse a run that reads any source more often than this")
    dataset_builder: str = announced_flag("", advanced=True,
        help="module:function that builds your own stream (see docs/data.md)")
    data_kwargs: tuple[str, ...] = announced_flag((), advanced=True,
        help="arguments for dataset_builder, written key=value,…")
    # fmt: on

    def __post_init__(self) -> None:
        self._check_sources()
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
        dotted_name = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"
        if self.dataset_builder and not re.fullmatch(dotted_name, self.dataset_builder):
            raise ValueError(
                f"--dataset_builder ({self.dataset_builder}) must be importable as module:function"
            )
        for item in self.data_kwargs:
            if "=" not in item:
                raise ValueError(
                    f"--data_kwargs ({item}) must be written key=value; several are joined by commas"
                )

    def _check_sources(self) -> None:
        names, weights = ",".join(self.datasets), joined(self.weights)
        if twice := sorted({name for name in self.datasets if self.datasets.count(name) > 1}):
            raise ValueError(f"--datasets ({names}) must name a source once; repeated: {', '.join(twice)}")
        if self.weights and len(self.weights) != len(self.datasets):
            raise ValueError(
                f"--weights ({weights}) must give one number per dataset: {len(self.weights)} weights for "
                f"{len(self.datasets)} datasets ({names or 'none named'}); name both in the same order"
            )
        if any(weight <= 0 for weight in self.weights):
            raise ValueError(
                f"--weights ({weights}) must be positive; leave a dataset out to give it no tokens"
            )


# fmt: off
@dataclass(frozen=True)
class ParallelConfig:
    """How the model is divided over devices, in which precision it computes, and what it computes twice."""

    sharding_strategy: str | None = free_flag(None, choices=("fsdp", "hsdp", "ddp", "none"),
        help="fsdp shards over all devices, hsdp shards within groups of devices, ddp replicates, none uses "
        "one process (default: none on one device, hsdp for 7b and 13b, otherwise fsdp)")
    hsdp_shard_size: int | None = free_flag(None, minimum=1,
        help="number of devices that share one copy of the model under hsdp (default: the devices of a node)")
    mixed_precision: bool | None = announced_flag(None,
        help="compute in bf16 and keep weights and reductions in fp32 "
        "(default: on if the hardware computes bf16)")
    reduce_dtype: str = announced_flag("fp32", choices=("fp32", "bf16"), advanced=True,
        help="precision of gradient reductions")
    fsdp_activation_checkpointing: bool = free_flag(False,
        help="compute activations again in the backward pass; this saves memory and costs time")
    selective_checkpointing: str = free_flag("1", advanced=True,
        help="share of the blocks that compute activations again, evenly spaced: 1, 1/2, 0.33 or every:k")
    low_cpu_fsdp: bool = free_flag(True,
        help="build the model on the meta device and initialise it shard by shard; "
        "no rank holds the whole model")
    use_torch_compile: bool = free_flag(False, help="compile each block with torch.compile")
    reshard_after_forward: bool = free_flag(True, advanced=True,
        help="free the gathered weights after the forward pass (ZeRO-3); False keeps them (ZeRO-2)")
    fsdp_prefetch: int = free_flag(0, minimum=0, advanced=True,
        help="number of blocks that are gathered ahead of use, in addition to FSDP's own prefetch")
    cpu_offload: bool = free_flag(False, advanced=True,
        help="keep sharded weights, gradients and optimizer state in host memory")
    dist_backend: str = free_flag("auto", choices=("auto", "nccl", "gloo"), advanced=True,
        help="backend of the process group; auto is nccl on GPU and gloo on CPU")
    collective_timeout_s: int = free_flag(600, minimum=1, maximum=10**8, advanced=True,
        help="seconds without a finished step and without progress of a save, after which the launch fails")
    matmul_precision: str = free_flag("high", choices=("highest", "high", "medium"), advanced=True,
        help="precision of fp32 matrix products on GPU: highest is fp32, high is TF32")

    def __post_init__(self) -> None:
        parse_selective_checkpointing(self.selective_checkpointing)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and the schedule of its learning rate."""

    learning_rate: float = announced_flag(3e-4, minimum=0,
        help="peak learning rate, at the end of the warm-up")
    warmup_steps: int | None = announced_flag(None, minimum=0,
        help="number of steps of the linear warm-up (default: 5 % of num_steps, at most 2000)")
    min_lr_ratio: float = announced_flag(0.1, minimum=0, maximum=1,
        help="learning rate at the end of the cosine, as a share of the peak")
    adam_beta1: float = announced_flag(0.9, minimum=0, below=1, help="decay of the first moment")
    adam_beta2: float = announced_flag(0.95, minimum=0, below=1, help="decay of the second moment")
    adam_eps: float = announced_flag(1e-8, minimum=0, maximum=1, advanced=True,
        help="number that is added to the root of the second moment")
    weight_decay: float = announced_flag(0.1, minimum=0,
        help="decoupled weight decay of matrices; norms have none")
    grad_clip: float = announced_flag(1.0, minimum=0,
        help="largest global norm of the gradient; 0 does not clip")
    # fmt: on

    def warmup(self, num_steps: int) -> int:
        """Steps of warm-up in a run of `num_steps`.

        Raises:
            ValueError: the warm-up is longer than the run.
        """
        if self.warmup_steps is None:
            return min(2000, max(1, num_steps // 20))
        if self.warmup_steps > num_steps:
            raise ValueError(
                f"--warmup_steps ({self.warmup_steps}) must not exceed --num_steps ({num_steps}); raise that"
            )
        return self.warmup_steps


# fmt: off
@dataclass(frozen=True)
class TrainingConfig:
    """The length of the run and of a launch, the batch, the seed."""

    seed: int = refused_flag(2023, minimum=0, maximum=2**63 - 1, orders_data=True,
        help="seed of the weights and of the order of the data")
    num_steps: int | None = announced_flag(None, minimum=1, in_name=False,
        help="number of optimizer steps of the whole run, with those before a resume (default: 1000)")
    num_tokens: int | None = announced_flag(None, minimum=1, in_name=False,
        help="length of the run in tokens, such as 300B; give it instead of num_steps")
    num_samples: int | None = announced_flag(None, minimum=1, in_name=False,
        help="length of the run in rows of seq_length tokens; give it instead of num_steps")
    batch_size: int | None = announced_flag(None, minimum=1,
        help="number of rows for each data-parallel rank and micro-step (default: 2, or from the other two)")
    grad_accum_steps: int | None = announced_flag(None, minimum=1,
        help="number of micro-steps in an optimizer step (default: 1, or from the other two)")
    global_batch_size: int | None = announced_flag(None, minimum=1,
        help="number of rows in an optimizer step = batch_size x data-parallel size x grad_accum_steps")
    deterministic: bool = announced_flag(False, advanced=True,
        help="use only deterministic kernels; they are slower (CPU runs always repeat bit for bit)")
    max_bad_steps: int = free_flag(10, minimum=0,
        help="the run fails after this many steps in a row whose gradient is not finite; "
        "such a step changes no weight; 0 never fails")
    spike_threshold: float = free_flag(6.0, minimum=0, advanced=True,
        help="log a loss that lies this many standard deviations above its recent mean; 0 logs none")
    exit_interval: int | None = free_flag(None, minimum=1,
        help="end this launch after this many steps of its own; the same command continues the run")
    exit_tokens: int | None = free_flag(None, minimum=1,
        help="end this launch after this many tokens of its own")
    exit_samples: int | None = free_flag(None, minimum=1,
        help="end this launch after this many rows of its own")
    exit_step: int | None = free_flag(None, minimum=1,
        help="end the launch that reaches this step of the run")
    exit_duration_in_mins: float | None = free_flag(None, above=0,
        help="end this launch within this many minutes of its start, the last checkpoint included")
    exit_margin_s: float | None = free_flag(None, minimum=0, advanced=True,
        help="number of seconds before the time limit at which this launch begins to end "
        "(default: measured from its steps, evaluations and saves)")
    # fmt: on

    def __post_init__(self) -> None:
        lengths = {
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "num_samples": self.num_samples,
        }
        first, *others = [name for name, value in lengths.items() if value is not None] or [""]
        if others:
            raise ValueError(
                f"--{others[0]} ({lengths[others[0]]}) must not be given beside --{first}; choose one of them"
            )

    def steps_at(self, rows: int, seq_length: int, start: int = 0, tokens_seen: int = 0) -> int:
        """The last step of the run, if each step from `start` on takes `rows` of `seq_length` tokens.

        `tokens_seen`: the tokens of the steps up to `start`.
        """
        if self.num_tokens is None and self.num_samples is None:
            return 1000 if self.num_steps is None else self.num_steps
        tokens = self.num_tokens if self.num_tokens is not None else (self.num_samples or 0) * seq_length
        return max(start, start + -(-(tokens - tokens_seen) // (rows * seq_length)), 1)
