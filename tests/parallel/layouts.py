"""A small model and its batches for tests that build layouts of the axes by themselves."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fms_fsdp.config import ParallelConfig
from fms_fsdp.data.batch import IGNORED_LABEL, Batch
from fms_fsdp.distributed.dims import plan_dims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.world import World
from fms_fsdp.models.config import TransformerConfig

SEQ, VOCAB, ROWS = 16, 131, 8
SHAPE = TransformerConfig(4, 64, 96, 8, 4, VOCAB, max_seq_len=SEQ)
CPU = torch.device("cpu")


def rows_of(step: int, config: TransformerConfig) -> Batch:
    """The global batch of a step: masked labels, unevenly, and documents of uneven lengths."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, config.vocab_size, (ROWS, SEQ), generator=generator)
    labels = tokens.roll(-1, 1)
    for row in range(ROWS):
        labels[row, : row % 5] = IGNORED_LABEL
    is_first = torch.zeros(ROWS, SEQ, dtype=torch.bool)
    for row in range(ROWS):
        is_first[row, [3 + row % 4, 7, 12 - row % 3]] = True
    return with_documents(Batch(tokens, labels, None, None), is_first)


def with_documents(batch: Batch, is_first_BS: torch.Tensor) -> Batch:
    """Returns the batch with a document from each of these tokens on, and from each sequence's first."""
    is_first_BS[:, 0] = True
    index_BS = torch.arange(is_first_BS.shape[1]).expand_as(is_first_BS)
    start_BS = torch.where(is_first_BS, index_BS, 0).cummax(dim=1).values
    return batch._replace(
        positions_BS=(index_BS - start_BS).int(),
        document_ids_BS=(is_first_BS.cumsum(dim=1) - 1).int(),
    )


def mesh_of(section: ParallelConfig) -> Mesh:
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return Mesh(plan_dims(section, "tiny", World(rank, rank, size, size)), rank, "cpu")
