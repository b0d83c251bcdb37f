"""The batch that the stream yields, and its fingerprint.

Shapes: B sequences of this data-parallel rank for one optimizer step, S tokens each. No padding: every
position of a sequence holds a token of the corpus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from fms_fsdp.data.permute import GOLDEN, MASK, mix64
from fms_fsdp.errors import UserError

if TYPE_CHECKING:  # `inspect` reads the data without it
    import torch

IGNORED_LABEL = -100


class Batch(NamedTuple):
    """The sequences of one rank for one optimizer step, (B S), in the order of the global batch.

    `labels_BS` is the true next token of the same document, or after a separator the first token of
    the next document, or -100 if neither exists. `positions_BS` counts from 0 in each document
    segment, `document_ids_BS` numbers the segments of a sequence from 0: equal ids are one segment
    of one document.
    """

    tokens_BS: torch.Tensor  # int64
    labels_BS: torch.Tensor  # int64
    positions_BS: torch.Tensor  # int32
    document_ids_BS: torch.Tensor  # int32


def check_batch(batch: Batch, vocab_size: int, step: int, first_sequence: int) -> None:
    """Raises UserError, with its place, for a token or a label that the model does not know. `first_sequence` is
    the position of sequence 0 in the global batch of `step`."""
    for name, ids_BS in zip(("token", "label"), batch[:2], strict=True):
        wrong_BS = (ids_BS < 0) | (ids_BS >= vocab_size)
        if name == "label":
            wrong_BS &= ids_BS != IGNORED_LABEL
        if wrong_BS.any():
            number, position = wrong_BS.nonzero()[0].tolist()
            raise UserError(
                f"{name} {ids_BS[number, position]} at step {step}, sequence {first_sequence + number}, position "
                f"{position} is outside the vocabulary ({vocab_size:,}); prepare the data with the "
                f"tokenizer of the model (`python -m fms_fsdp inspect step --step={step}` names the file)"
            )


def sequences_of_rank(global_batch_size: int, dp_rank: int, dp_size: int) -> tuple[int, int]:
    """Returns the sequences [start, stop) of the global batch that belong to a rank.

    Raises: UserError, naming the numbers of ranks that divide the batch.
    """
    num_sequences, rest = divmod(global_batch_size, dp_size)
    if rest:
        larger = (num_sequences + 1) * dp_size
        values = f"{num_sequences * dp_size} or {larger}" if num_sequences else str(larger)
        raise UserError(
            f"--global_batch_size={global_batch_size} must be divisible by {dp_size} (the "
            f"data-parallel size); use {values}"
        )
    return dp_rank * num_sequences, (dp_rank + 1) * num_sequences


def empty_batch(num_sequences: int, seq_length: int, *, pin_memory: bool = False) -> Batch:
    """Returns a batch of uninitialised CPU tensors, page-locked where asked."""
    import torch

    shape = (num_sequences, seq_length)
    dtypes = (torch.int64, torch.int64, torch.int32, torch.int32)
    return Batch(*(torch.empty(shape, dtype=dtype, pin_memory=pin_memory) for dtype in dtypes))


def fingerprint(batch: Batch, first_sequence: int) -> int:
    """Returns the fingerprint of a rank's batch, copied to the CPU if necessary (`array_fingerprint`)."""
    tokens_BS = batch.tokens_BS.cpu().numpy()
    labels_BS = batch.labels_BS.cpu().numpy()
    return array_fingerprint(tokens_BS, labels_BS, first_sequence)


def array_fingerprint(
    tokens_BS: npt.NDArray[np.int64], labels_BS: npt.NDArray[np.int64], first_sequence: int
) -> int:
    """Returns the sum modulo 2^64, over the sequences, of a 64-bit hash of (position, tokens, labels).

    Sums of the ranks' values, modulo 2^64, are the fingerprint of the global batch: equal at every
    world size. `first_sequence` is the position of sequence 0 in the global batch. A sequence hashes
    to mix64(a + b + mix64(position)), where a = sum_i mix64(token_i + (2i) * GOLDEN) and b =
    sum_i mix64(label_i + (2i + 1) * GOLDEN), all modulo 2^64.
    """
    num_sequences, seq_length = tokens_BS.shape
    salt_S = np.arange(seq_length, dtype=np.uint64) * np.uint64((2 * GOLDEN) & MASK)
    hashes_B = mix64(tokens_BS.view(np.uint64) + salt_S).sum(axis=1, dtype=np.uint64)
    label_salt_S = salt_S + np.uint64(GOLDEN)
    hashes_B += mix64(labels_BS.view(np.uint64) + label_salt_S).sum(axis=1, dtype=np.uint64)
    hashes_B += mix64(np.arange(first_sequence, first_sequence + num_sequences, dtype=np.uint64))
    return int(mix64(hashes_B).sum(dtype=np.uint64))
