"""Pipeline parallelism: each rank of `pp` holds some layers, and micro-batches of rows pass through all.

    rank 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3     F forward: x_BSD goes to the next stage
    rank 1   .. F0 B0 F1 B1 F2 B2 F3 B3 ..     B backward: its gradient goes to the stage before

A stage is a Llama with consecutive layers, an FSDP root of its own. The first stage has the embedding, the
last one the head, where the loss is computed in the forward pass. Layers keep their global names, so the
stages of a rank together look like a part of the whole model. Schedules are those of torch.

FSDP gathers the weights of a stage once for a schedule, adds up whole gradients over its micro-batches, and
reduces them at its end. Evaluation and generation use no schedule: they hand x_BSD from stage to stage.

Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021, https://arxiv.org/abs/2104.04473 (1F1B,
interleaved); Qi et al. 2023, https://arxiv.org/abs/2401.10241 (zero bubble, V).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.profiler import record_function

from fms_fsdp.config import ParallelConfig, Precision
from fms_fsdp.data.batch import IGNORED_LABEL
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.stages import layers_of_stages, stages_of_rank
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.parallel.precision import DTYPES

if TYPE_CHECKING:
    from fms_fsdp.extras.decoding import KeyValueCache

_SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}
_KINDS = list(DTYPES.values())  # of what stages send, as numbers


def build_pipeline(
    config: LlamaConfig,
    section: ParallelConfig,
    mesh: Mesh,
    precision: Precision,
    device: torch.device,
    build: Callable[[range], Llama],
) -> Pipeline:
    """This rank's stages as one model (collective: every rank). `build` makes the stage of some layers, ready
    to train."""
    size, virtual = mesh.size("pp"), mesh.dims.virtual_stages
    layers = layers_of_stages(config, config.max_seq_len, size * virtual)
    own = stages_of_rank(mesh.place("pp"), size, virtual, section.pp_schedule)
    return Pipeline(
        config, section, mesh, precision, device, {stage: build(layers[stage]) for stage in own}
    )


class Pipeline(nn.Module):
    """The stages of this rank. Parameters and modules have the names that they have in the whole model.

    `stages`: by their numbers in the pipeline. Making one is collective: every rank.
    """

    def __init__(
        self,
        config: LlamaConfig,
        section: ParallelConfig,
        mesh: Mesh,
        precision: Precision,
        device: torch.device,
        stages: dict[int, Llama],
    ) -> None:
        super().__init__()
        self.config, self._section, self._mesh, self._device = config, section, mesh, device
        self._dtype, self._group = DTYPES[precision.compute], mesh.axis("pp").get_group()
        self._stages, self._num_stages = dict(stages), mesh.size("pp") * mesh.dims.virtual_stages
        self._schedules: dict[torch.Size, Any] = {}
        self._pending: list[
            tuple[dist.Work, torch.Tensor]
        ] = []  # what is on its way to another rank
        self._factor = torch.ones((), device=device)
        self._losses: list[
            tuple[torch.Tensor, ...]
        ] = []  # of the micro-batches, where the last stage is
        self.embed = stages[0].embed if 0 in stages else None
        self.blocks = nn.ModuleDict(
            {name: block for stage in stages.values() for name, block in stage.blocks.items()}
        )
        self.head = stages[self._last].head if self._last in stages else None
        self.rope = next(iter(stages.values())).rope
        self._rank_of = {
            stage: dist.get_global_rank(self._group, rank)
            for rank in range(mesh.size("pp"))
            for stage in stages_of_rank(rank, mesh.size("pp"), len(stages), section.pp_schedule)
        }
        mesh.sum(
            torch.zeros(1, device=device), "pp"
        )  # NCCL connects all ranks of a group at their first sum

    @property
    def _last(self) -> int:
        return self._num_stages - 1

    def train(self, mode: bool = True) -> Pipeline:
        """Lets the stages train, or evaluate."""
        super().train(mode)
        for stage in self._stages.values():
            stage.train(mode)
        return self

    def forward_backward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        keys_B: torch.Tensor | None = None,
        *,
        factor: torch.Tensor,
        loss_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """One schedule: forward and backward of all micro-batches of these rows (collective: every rank). The
        gradients of loss times `factor` are added to what the weights hold.

        Returns the summed loss and, with a z-loss, the summed z-loss; 0 where the last stage is not. The
        arguments are those of `Llama.forward`.
        """
        self._finish_sends()
        schedule = self._schedule_for(tokens_BS.shape)
        columns = {
            "positions_BS": self._positions(tokens_BS) if positions_BS is None else positions_BS,
            "document_ids_BS": document_ids_BS,
            "keys_B": keys_B,
        }
        if self.head is not None:
            columns["labels_BS"] = labels_BS
            if loss_scale is not None:  # a schedule cuts every argument into micro-batches
                columns["loss_scale"] = loss_scale.expand(self._num_micro_batches(len(tokens_BS)))
        given = {name: column for name, column in columns.items() if column is not None}
        inputs = () if self.embed is None else (tokens_BS,)
        self._factor = factor
        schedule.step(*inputs, target=labels_BS, return_outputs=False, **given)
        losses, self._losses = self._losses, []
        if losses:
            return tuple(torch.stack(values).sum() for values in zip(*losses, strict=True))
        return tuple(torch.zeros_like(factor) for _ in range(2 if self.config.z_loss else 1))

    def _scaled_loss(self, output: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
        """The loss of one micro-batch from the output of the last stage, which has seen the labels."""
        loss, _, *z_loss = output
        self._losses.append((loss.detach(), *(each.detach() for each in z_loss)))
        return loss * self._factor

    def _num_micro_batches(self, num_rows: int) -> int:
        return num_rows // self._section.pp_micro_batch_size

    def _schedule_for(self, shape: torch.Size) -> Any:
        """The schedule for tokens of this shape. Shapes of what stages send are told to torch, which else
        would find them out by a forward and backward pass."""
        if shape not in self._schedules:
            rows, length = self._section.pp_micro_batch_size, shape[1] // self._mesh.size("cp")
            if self._mesh.dims.sequence_parallel:
                length //= self._mesh.size("tp")
            with torch.device("meta"):
                tokens = torch.empty(rows, shape[1], dtype=torch.int64)
                size = rows, length, self.config.hidden_size
                between = torch.empty(size, dtype=self._dtype, requires_grad=True)
                loss, num_labels = (
                    torch.empty((), requires_grad=True),
                    torch.empty((), dtype=torch.int64),
                )
            losses = (
                (loss, num_labels, torch.empty_like(loss))
                if self.config.z_loss
                else (loss, num_labels)
            )
            made = [
                _Stage(
                    stage,
                    number,
                    self._num_stages,
                    self._device,
                    input_args=between if number else tokens,
                    output_args=losses if number == self._last else between,
                    group=self._group,
                )
                for number, stage in self._stages.items()
            ]
            kind = _SCHEDULES[self._section.pp_schedule]
            is_multi = issubclass(kind, PipelineScheduleMulti)
            self._schedules[shape] = kind(
                made if is_multi else made[0],
                self._num_micro_batches(shape[0]),
                loss_fn=self._scaled_loss,
                scale_grads=False,
            )
        return self._schedules[shape]

    def _positions(self, tokens_BS: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Later stages cannot tell the length of the rows from x_BSD, of which they may hold a part."""
        stop = start + tokens_BS.shape[1]
        return torch.arange(start, stop, device=tokens_BS.device).expand(tokens_BS.shape)

    @torch.no_grad()
    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        keys_B: torch.Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """A forward pass of all rows at once, without gradients (collective: every rank).

        With labels (summed loss, number of unmasked labels), the loss 0 where the last stage is not. A rank
        waits only for the stage before its own, so that in a row of calls the stages work at the same time.
        Without labels logits_BSV in fp32, the same on every rank of the pipeline, S = 1 with `caches`, one
        for each layer of the whole model, of which a rank fills those of its layers.
        """
        start = caches[0].length if caches else 0
        if positions_BS is None:
            positions_BS = self._positions(tokens_BS, start)
        output: Any = None
        for number, stage in self._stages.items():
            x = tokens_BS if number == 0 else self._received(number, output)
            own = None if caches is None else [caches[int(layer)] for layer in stage.blocks]
            output = stage(x, labels_BS, positions_BS, document_ids_BS, keys_B, own)
            if number < self._last and number + 1 not in self._stages:
                self._send(output, self._rank_of[number + 1])
        for layer, cache in enumerate(caches or ()):
            cache.length += 0 if str(layer) in self.blocks else tokens_BS.shape[1]
        if labels_BS is not None:
            loss = output[0] if self.head is not None else torch.zeros((), device=self._device)
            return loss, (labels_BS != IGNORED_LABEL).sum()
        return self._shared(output, tokens_BS.shape[0], 1 if caches else tokens_BS.shape[1])

    def _received(self, number: int, output: torch.Tensor) -> torch.Tensor:
        """What stage `number` takes in: from another rank, or the output of the stage before it."""
        if number - 1 in self._stages:
            return output
        header, source = (
            torch.empty(4, dtype=torch.int64, device=self._device),
            self._rank_of[number - 1],
        )
        dist.recv(header, source, self._group)
        kind, *shape = header.tolist()
        x_BSD = torch.empty(shape, dtype=_KINDS[kind], device=self._device)
        if x_BSD.numel():
            dist.recv(x_BSD, source, self._group)
        return x_BSD

    def _send(self, x_BSD: torch.Tensor, rank: int) -> None:
        """Starts to send dtype and shape, then values. One message may be on its way beside this one."""
        self._finish_sends()
        header = torch.tensor([_KINDS.index(x_BSD.dtype), *x_BSD.shape], device=self._device)
        for message in (header, x_BSD.contiguous()):
            if message.numel() and (work := dist.isend(message, rank, self._group)):
                self._pending.append((work, message))

    def _finish_sends(self) -> None:
        for work, _ in self._pending:
            work.wait()
        self._pending = []

    def _shared(self, output: torch.Tensor, rows: int, length: int) -> torch.Tensor:
        """The logits of the last stage on every rank of the pipeline."""
        shape = (rows, length, self.config.vocab_size)
        is_here = self.head is not None
        logits_BSV = output.float() if is_here else torch.empty(shape, device=self._device)
        dist.broadcast(logits_BSV, self._rank_of[self._last], self._group)
        return logits_BSV


class _Stage(PipelineStage):
    """A stage of torch whose passes have names in traces."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with record_function("forward"), record_function(f"stage {self.stage_index}"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with record_function("backward"), record_function(f"stage {self.stage_index}"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with record_function("backward"), record_function(f"stage {self.stage_index}"):
            return super().backward_weight_one_chunk(*args, **kwargs)
