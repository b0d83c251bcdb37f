"""Flags of the training data: sources, proportions, sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fms_fsdp.config.flag import WithoutEffect, fixed_flag, flag, logged_flag
from fms_fsdp.config.formats import parse_skips
from fms_fsdp.config.values import counted, joined
from fms_fsdp.errors import UserError

# condition, fix and flags of `WithoutEffect`
_SYNTHETIC = ("with --use_dummy_dataset", "--use_dummy_dataset", ("use_dummy_dataset",))


@dataclass(frozen=True)
class DataConfig:
    """The data: which sources, in which proportions, and how documents become sequences.

    When to change: always set `data_path`. Set `weights` if a good source is small; `--dry_run`
    shows how often each source is read. Set `document_mask` for short, unrelated documents, and
    `packing=bestfit` to split fewer documents. Longer sequences cost memory and time.
    """

    use_dummy_dataset: bool = logged_flag(False)
    """Train on synthetic tokens, which need no files, for tests and benchmarks."""
    data_path: str = flag("", form="path", orders_data=True)
    """Folder with one subfolder of token shards per source (see `python -m fms_fsdp prepare`) (no
    effect with --use_dummy_dataset)."""
    datasets: tuple[str, ...] = logged_flag((), form="source name")
    """Sources to train on, as names of subfolders of data_path (default: all) (no effect with
    --use_dummy_dataset)."""
    weights: tuple[float, ...] = logged_flag((), min=0)
    """Relative number of tokens from each source, in the order of --datasets; 0 omits a source
    (default: proportional to size) (no effect with --use_dummy_dataset)."""
    seq_length: int = fixed_flag(4096, min=1, orders_data=True)
    """Tokens per sequence, the context length of training."""
    sep_token: int | None = fixed_flag(None, min=0, orders_data=True)
    """Id of the token that ends each document (default: the shards' EOS token) (no effect with
    --use_dummy_dataset)."""
    logical_shards: int = flag(
        1024, min=1, max=2**20, in_name=True, orders_data=True, advanced=True
    )
    """Number of logical shards, whose shuffle windows are read interleaved; more of them shuffle
    more widely (no effect with --use_dummy_dataset)."""
    packing: str = fixed_flag("concat", choices="concat bestfit", orders_data=True)
    """How documents fill sequences: concat splits documents anywhere, bestfit splits few (no effect
    with --use_dummy_dataset)."""
    document_mask: bool = logged_flag(False)
    """Restrict attention to the document, and restart positions at each document."""
    loss_on: str = logged_flag("response", choices="response all", advanced=True)
    """Tokens in the loss of documents with a prompt: the response, or all (no effect with
    --use_dummy_dataset)."""
    skip_steps: str = logged_flag("", in_name=False, parse=parse_skips)
    """Steps whose data are skipped, e.g. after a loss spike: a:b skips steps a to b-1 (no effect
    with --use_dummy_dataset)."""
    on_missing: str = flag("error", choices="error mask", advanced=True)
    """Reaction to a shard that cannot be read: error ends the run, mask excludes its sequences from
    the loss (no effect with --use_dummy_dataset)."""
    max_epochs: float | None = flag(None, above=0, max=1e6)
    """Maximum number of epochs of any source; a longer run is an error (no effect with
    --use_dummy_dataset)."""
    dataset_builder: str = logged_flag("", advanced=True, form="module:function")
    """module:function that builds your own stream (see docs/guides/data-loading.md)."""
    data_kwargs: tuple[str, ...] = logged_flag(
        (), advanced=True, form="key=value", needs="dataset_builder"
    )
    """Arguments of dataset_builder: key=value,…."""

    def without_effect(self) -> Iterator[WithoutEffect]:
        """Yields the flags that these settings make useless."""
        if self.use_dummy_dataset:
            names = ("datasets", "weights", "skip_steps", "max_epochs")
            yield WithoutEffect(names, *_SYNTHETIC)

    def without_effect_in_training(self) -> Iterator[WithoutEffect]:
        """Yields the flags that are useless in training, and may have an effect on held-out data."""
        if self.use_dummy_dataset:
            names = ("data_path", "sep_token", "logical_shards", "packing", "loss_on", "on_missing")
            yield WithoutEffect(names, *_SYNTHETIC)

    def __post_init__(self) -> None:
        repeated = sorted({name for name in self.datasets if self.datasets.count(name) > 1})
        if repeated:
            raise UserError(
                f"--datasets={joined(self.datasets)} must name each source once; remove the second "
                f"{', '.join(repeated)}"
            )
        if self.weights and len(self.weights) != len(self.datasets):
            raise UserError(
                f"--weights={joined(self.weights)} must be one number per dataset, not "
                f"{counted(len(self.weights), 'weight')} for "
                f"{counted(len(self.datasets), 'dataset')} "
                f"({joined(self.datasets) or 'none named'}); list both in the same order"
            )
        if any(weight <= 0 for weight in self.weights):
            raise UserError(
                f"--weights={joined(self.weights)} must be above 0 for some source; set one weight "
                "to 1"
            )
