"""The flags of a training: data, parallelism, optimizer, length. One row a flag: see flag.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from fms_fsdp.config.flag import announced_flag, free_flag, refused_flag
from fms_fsdp.config.ramp import BatchIntervals
from fms_fsdp.config.spans import parse_epochs, parse_selective_checkpointing, parse_skips

_LONG_ROW = 8192  # tokens, from which on the feed-forward is computed again as a whole


# fmt: off
@dataclass(frozen=True)
class DataConfig:
    """The data: which sources, in which proportions, and how documents become rows.

    When to change: always name `data_path`. `weights` where a good source is small; `inspect plan` shows how
    often each is read. `seq_length` is what the model can look back on: longer rows cost memory and time.
    `document_mask` for short documents that have nothing to do with one another; `packing=bestfit` where
    documents should stay whole.
    """

    use_dummy_dataset: bool = announced_flag(False,
        help="train on synthetic tokens, which need no files and no time, for tests and benchmarks")
    data_path: str = free_flag("", form="path", orders_data=True,
        help="folder with one subfolder of token shards for each source (see `python -m fms_fsdp prepare`)")
    datasets: tuple[str, ...] = announced_flag((), form="source name",
        help="sources to train on, by the names of their subfolders in data_path (default: all)")
    weights: tuple[float, ...] = announced_flag((),
        help="share of each source in the tokens, in the order of --datasets (default: by size)")
    seq_length: int = announced_flag(4096, "tokens in a row, the context length of training", minimum=1)
    sep_token: int | None = refused_flag(None, minimum=0, orders_data=True,
        help="id of the token that ends every document (default: the id that the shards name)")
    logical_shards: int = free_flag(1024, minimum=1, maximum=2**20, orders_data=True, in_name=True,
        advanced=True, help="number of tapes that a run reads side by side; more tapes shuffle more widely")
    packing: str = refused_flag("concat", choices=("concat", "bestfit"), orders_data=True,
        help="how documents fill rows: concat cuts documents anywhere, bestfit makes few cuts")
    document_mask: bool = announced_flag(False,
        help="attention stays within a document, and positions start again with each document")
    loss_on: str = announced_flag("response", choices=("response", "all"), advanced=True,
        help="tokens that the loss counts of documents with a prompt: the response, or all")
    skip_steps: str = announced_flag("", in_name=False, parse=parse_skips,
        help="a:b leaves out the rows that are planned for steps a to b-1, for example after a loss spike")
    on_missing: str = free_flag("error", choices=("error", "mask"), advanced=True,
        help="what follows if a shard cannot be read: error ends the run, mask hides rows of the shard")
    max_epochs: float | None = free_flag(None, above=0, maximum=1e6,
        help="number of passes over a source that no run may exceed")
    dataset_builder: str = announced_flag("", advanced=True,
        help="module:function that builds your own stream (see docs/data.md)")
    data_kwargs: tuple[str, ...] = announced_flag((), "key=value,… given to dataset_builder", advanced=True)
    # fmt: on


# fmt: off
@dataclass(frozen=True)
class ParallelConfig:
    """The division of the model over devices, and what the backward pass computes again.

    When to change: start with the defaults. If memory is short, first `batch_size`, then `recompute`: `cheap`
    with compile, `ops`, `blocks` with a share of them. Then `hsdp_shard_size` or `fsdp`, last `cpu_offload`.
    On a CPU, once shapes are settled, `use_torch_compile`. docs/performance.md has the order for tuning.
    """

    sharding_strategy: str | None = free_flag(None, choices=("fsdp", "hsdp", "ddp", "none", "zero1", "zero2"),
        help="fsdp shards over all devices, hsdp within groups of devices, ddp replicates; zero2 is fsdp "
        "that gathers weights once a step, zero1 also reduces gradients once; none is for one process "
        "(default: none on one device, hsdp for 7b and 13b if it fits, otherwise fsdp)")
    hsdp_shard_size: int | None = free_flag(None, minimum=1,
        help="number of devices that share one copy of the model under hsdp (default: the devices of a node)")
    tp_size: int = free_flag(1, minimum=0,
        help="number of devices that divide each matrix of a block and the vocabulary (tensor parallel)")
    cp_size: int = free_flag(1, minimum=0,
        help="number of devices that divide the tokens of each row (context parallel)")
    pp_size: int = free_flag(1, minimum=0,
        help="number of devices that divide the layers (pipeline parallel)")
    sequence_parallel: bool | None = free_flag(None, advanced=True,
        help="between matrices devices of tp hold parts of the sequence, not copies (default: with tp)")
    cp_method: str = free_flag("auto", choices=("auto", "ulysses", "gather"), advanced=True,
        help="how attention sees a divided row: ulysses trades tokens for heads, gather collects all keys; "
        "auto is ulysses where the heads suffice")
    pp_schedule: str = free_flag("1f1b", choices=("1f1b", "gpipe", "interleaved", "zbv"),
        help="order of the forward and backward passes of micro-batches in a pipeline")
    pp_virtual_stages: int | None = free_flag(None, minimum=1, advanced=True,
        help="number of stages on each device of an interleaved pipeline (default: 2)")
    pp_micro_batch_size: int = free_flag(1, minimum=1,
        help="number of rows that go through a pipeline at a time; batch_size must be a multiple")
    debug_sync_blocks: bool = free_flag(False, advanced=True, part="sync_blocks",
        help="wait for the device behind each block, to find the block of a fault; slow")
    async_tp: bool = free_flag(False, advanced=True,
        help="overlap messages of tp with matrix products, where blocks are compiled for a GPU")
    recompute: str | None = free_flag(None, choices=("none", "cheap", "ops", "blocks", "auto"),
        help="what the backward pass computes again, to save memory: cheap all but products and attention, "
        "if compiled; ops all but what --recompute_ops names; blocks whole blocks; auto the first of these "
        "that fits the memory, then more and more blocks (default: none)")
    fsdp_activation_checkpointing: bool | None = free_flag(None, "True is --recompute=blocks, False is none")
    selective_checkpointing: str = free_flag("1", parse=parse_selective_checkpointing, advanced=True,
        help="share of the blocks that --recompute=blocks takes, evenly spaced: 1, 1/2, 0.33 or every:k")
    recompute_segment: int = free_flag(1, minimum=1, advanced=True,
        help="number of blocks in a row that --recompute=blocks computes again as one, from one kept input")
    recompute_ops: tuple[str, ...] = free_flag((), advanced=True,
        choices=("attention", "every_second_product", "products"),
        help="results that --recompute=ops keeps (default: attention,every_second_product, of which rows of "
        "8,192 tokens and more keep no product of the feed-forward)")
    low_cpu_fsdp: bool = free_flag(True, "build the model shard by shard: no rank holds the whole model")
    use_torch_compile: bool | None = free_flag(None, "compile blocks with torch.compile (default: on GPUs)")
    reshard_after_forward: bool | None = free_flag(None, advanced=True,
        help="free gathered weights after the forward pass, not the step (default: False for zero1, zero2)")
    sync_each_micro_step: bool | None = free_flag(None, advanced=True,
        help="reduce gradients to shards in each micro-step, not once a step (default: False for zero1)")
    fsdp_blocks_per_group: int | None = free_flag(None, minimum=1, advanced=True,
        help="number of blocks in a row that are gathered and reduced together (default: recompute_segment)")
    fsdp_prefetch: int = free_flag(0, minimum=0, advanced=True,
        help="number of groups of blocks that are gathered ahead of use, in addition to FSDP's own prefetch")
    cpu_offload: bool = free_flag(False, "hold weights, gradients, optimizer state on the CPU", advanced=True)
    dist_backend: str = free_flag("auto", choices=("auto", "nccl", "gloo"), advanced=True,
        help="backend of the process group; auto is nccl on GPU and gloo on CPU")
    collective_timeout_s: int = free_flag(600, minimum=1, maximum=10**8, advanced=True,
        help="seconds without a finished step and without progress of a save, after which the launch fails")
    matmul_precision: str = free_flag("high", choices=("highest", "high", "medium"), advanced=True,
        help="precision of fp32 matrix products on GPU: highest is fp32, high is TF32")

    def implied(self) -> dict[str, bool]:
        """The values of flags that a pipeline or the sharding strategy decides; most strategies decide none.

        The micro-batches of a pipeline pass through weights that are gathered once a step, and leave whole
        gradients.
        """
        strategy = (self.sharding_strategy or "").lower()
        if self.pp_size > 1:
            return {"reshard_after_forward": False, "sync_each_micro_step": False}
        if strategy not in ("zero1", "zero2"):
            return {}
        return {"reshard_after_forward": False, "sync_each_micro_step": strategy == "zero2"}

    def resolved(self, name: str) -> bool:
        """The value of `reshard_after_forward` or `sync_each_micro_step`, as implied or by the flag."""
        return self.implied().get(name, getattr(self, name) is not False)

    @property
    def recomputes(self) -> str:
        """The value of `recompute`, which has a second name; `auto` until a launch is resolved."""
        return self.recompute or ("blocks" if self.fsdp_activation_checkpointing else "none")

    def kept_ops(self, seq_length: int = 0) -> tuple[str, ...]:
        """Results that blocks keep under `ops`, where rows have so many tokens. `attention_products`: every
        second product, but of attention alone; not a value of the flag."""
        products = "attention_products" if seq_length >= _LONG_ROW else "every_second_product"
        return (self.recompute_ops or ("attention", products)) if self.recomputes == "ops" else ()

    def for_rows(self, seq_length: int) -> ParallelConfig:
        """The section for rows of so many tokens, to build a model by."""
        return replace(self, recompute_ops=self.kept_ops(seq_length))

    @property
    def segment(self) -> int:
        """Blocks that are computed again together."""
        return self.recompute_segment if self.recomputes == "blocks" else 1

    @property
    def blocks_per_group(self) -> int:
        """Blocks that FSDP gathers together: whole segments."""
        return self.fsdp_blocks_per_group or self.segment

    @property
    def recomputed_share(self) -> Fraction:
        """The share of the blocks that are computed again, as a whole or but for some operations."""
        if self.recomputes == "blocks":
            return parse_selective_checkpointing("selective_checkpointing", self.selective_checkpointing)
        return Fraction(1 if self.recomputes == "ops" else 0)


# fmt: off
@dataclass(frozen=True)
class TrainingConfig:
    """The length of the run and of a launch, the batch, the seed, a teacher.

    When to change: `batch_size` is as large as the memory allows; `global_batch_size` decides how the model
    learns and stays the same on any number of devices. The length in steps, tokens or samples, one of them.
    The limits of a launch where a machine is lent for some hours.
    """

    seed: int = refused_flag(2023, minimum=0, maximum=2**63 - 1, orders_data=True,
        help="seed of the weights and of the order of the data")
    num_steps: int | None = announced_flag(None, minimum=1, in_name=False,
        help="number of optimizer steps of the whole run, with the steps before a resume (default: 1000)")
    num_tokens: int | None = announced_flag(None, minimum=1, in_name=False,
        help="length of the run in tokens, such as 300B, instead of num_steps")
    num_samples: int | None = announced_flag(None, minimum=1, in_name=False,
        help="length of the run in rows of seq_length tokens, instead of num_steps")
    num_epochs: str = announced_flag("", in_name=False, parse=parse_epochs,
        help="length of the run in passes over the data (1.5) or over one source (wiki:2), not in num_steps")
    batch_size: int | Literal["auto"] | None = announced_flag(None, minimum=1, words=("auto",),
        help="number of rows for each data-parallel rank and micro-step; auto is the largest that fits the "
        "memory and leaves the global batch as it is (default: 2, or from the other two)")
    grad_accum_steps: int | None = announced_flag(None, minimum=1,
        help="number of micro-steps in an optimizer step (default: 1, or from the other two)")
    global_batch_size: int | None = announced_flag(None, minimum=1,
        help="number of rows in an optimizer step = batch_size x data-parallel size x grad_accum_steps")
    rampup_batch_size: tuple[int, ...] = announced_flag((), minimum=1,
        help="start,increment,samples: the global batch grows from start rows by increment rows at a time, "
        "and is global_batch_size after so many samples (rows)")
    rampup_round: int = announced_flag(1, minimum=1, advanced=True,
        help="each batch of the ramp is rounded down to a multiple of so many rows, so that ranks and "
        "micro-steps can share each")
    rampup_micro_batch: bool = free_flag(False,
        help="micro-steps of a ramp have the most rows, up to batch_size, that divide the step's rows "
        "(torch.compile: one compilation for each number)")
    deterministic: bool = announced_flag(False, advanced=True,
        help="use only deterministic kernels, which are slower (CPU runs always repeat bit for bit)")
    teacher_path: str = announced_flag("", form="path", part="teacher",
        help="run, checkpoint or folder of Hugging Face of a frozen model whose predictions are learned, too")
    teacher_weight: float = announced_flag(0.5, above=0, maximum=1, part="teacher",
        help="w: a step minimises (1 - w) x cross-entropy + w x the KL divergence from the teacher")
    teacher_temperature: float = announced_flag(1.0, above=0, maximum=1000, part="teacher",
        help="T: the KL divergence is that of logits / T, times T squared")
    max_bad_steps: int = free_flag(10, minimum=0,
        help="the run fails after so many steps in a row whose gradient is not finite (such a step changes "
        "no weight); 0 never fails")
    spike_threshold: float = free_flag(6.0, minimum=0, advanced=True,
        help="standard deviations above the recent mean at which the log calls a loss a spike; 0 is off")
    exit_interval: int | None = free_flag(None, minimum=1,
        help="end this launch after this many steps of its own; the same command goes on with the run")
    exit_tokens: int | None = free_flag(None, "end this launch after this many tokens of its own", minimum=1)
    exit_samples: int | None = free_flag(None, "end this launch after this many rows of its own", minimum=1)
    exit_step: int | None = free_flag(None, "end the launch that reaches this step of the run", minimum=1)
    exit_duration_in_mins: float | None = free_flag(None, above=0,
        help="end this launch within this many minutes of its start, the last checkpoint included")
    gc_interval: int = free_flag(50, minimum=0, advanced=True,
        help="number of steps between collections of Python's garbage on all ranks; 0 lets Python choose")
    exit_margin_s: float | None = free_flag(None, minimum=0, advanced=True,
        help="seconds before the time limit at which the launch begins to end (default: as measured)")
    # fmt: on

    @property
    def given_rows(self) -> int | None:
        """`batch_size` where it is a number."""
        return self.batch_size if isinstance(self.batch_size, int) else None

    @property
    def rampup(self) -> tuple[int, ...]:
        """Start, increment and samples of the ramp, and the multiple to which its batches are rounded down if
        that is not 1; () without a ramp."""
        rounded = self.rampup_batch_size and self.rampup_round > 1
        return (*self.rampup_batch_size, self.rampup_round) if rounded else self.rampup_batch_size

    def epochs(self) -> tuple[str, float] | None:
        """The source of `num_epochs` ("" for all) and the number of passes over the source; None if not
        given."""
        return parse_epochs("num_epochs", self.num_epochs)

    def steps_at(self, batches: BatchIntervals, seq_length: int, start: int = 0, tokens_seen: int = 0) -> int:
        """The last step of the run, by its length in steps, tokens or samples; `batches` holds from `start`
        on.

        `tokens_seen`: the tokens of the steps up to `start`.
        """
        if self.num_tokens is None and self.num_samples is None:
            return 1000 if self.num_steps is None else self.num_steps
        tokens = self.num_tokens if self.num_tokens is not None else (self.num_samples or 0) * seq_length
        return max(start + batches.steps_for(-(-(tokens - tokens_seen) // seq_length)), 1)
