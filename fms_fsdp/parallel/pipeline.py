"""Pipeline parallelism: each pp rank has some layers, and micro-batches pass through all ranks.

    rank 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3     F forward: sends hidden states to the next stage
    rank 1   .. F0 B0 F1 B1 F2 B2 F3 B3 ..     B backward: sends their gradient back

A stage is a Llama with consecutive layers and an FSDP root of its own; layout.py shows which rank
has which. The last stage computes the
loss in its forward pass. Schedules are torch's. FSDP gathers a stage's weights once per schedule,
accumulates unsharded gradients over the micro-batches, and reduces them at the end. Evaluation and
generation use no schedule: they pass hidden states from stage to stage.

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
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.llama import LanguageModel, Llama
from fms_fsdp.models.loss import Losses
from fms_fsdp.parallel.dtypes import DTYPES
from fms_fsdp.parallel.layout import layers_of_stages, stages_of_rank

if TYPE_CHECKING:
    from fms_fsdp.models.attention import KVCache

_SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}
_DTYPES = list(DTYPES.values())  # of hidden states, sent as an index


def build_pipeline(
    config: TransformerConfig,
    section: ParallelConfig,
    mesh: Mesh,
    precision: Precision,
    device: torch.device,
    build_stage: Callable[[range], Llama],
) -> Pipeline:
    """Returns this rank's stages as one model (collective).

    `build_stage` returns the stage with the given layers, ready to train.
    """
    size = mesh.size("pp")
    virtual = mesh.dims.virtual_stages
    layers = layers_of_stages(config, config.max_seq_len, size * virtual)
    own = stages_of_rank(mesh.axis_rank("pp"), size, virtual, section.pp_schedule)
    stages = {stage: build_stage(layers[stage]) for stage in own}
    return Pipeline(config, section, mesh, precision, device, stages)


class Pipeline(LanguageModel):
    """The stages of this rank, by their index. Making one is collective."""

    def __init__(
        self,
        config: TransformerConfig,
        section: ParallelConfig,
        mesh: Mesh,
        precision: Precision,
        device: torch.device,
        stages: dict[int, Llama],
    ) -> None:
        super().__init__()
        self.config = config
        self._section = section
        self._mesh = mesh
        self._device = device
        self._dtype = DTYPES[precision.compute]
        self._group = mesh.axis("pp").get_group()
        self._stages = dict(stages)  # in a dict, so that names have no prefix
        self._last = mesh.size("pp") * mesh.dims.virtual_stages - 1
        self._schedules: dict[torch.Size, Any] = {}
        # The tensors must live until they are sent.
        self._sends: list[tuple[dist.Work, torch.Tensor]] = []
        self._factor = torch.ones((), device=device)
        self._losses: list[tuple[torch.Tensor, ...]] = []  # of micro-batches, on the last stage
        self.embed = stages[0].embed if 0 in stages else None
        self.blocks = nn.ModuleDict()
        for own_stage in stages.values():
            self.blocks.update(dict(own_stage.blocks.items()))
        self.head = stages[self._last].head if self._last in stages else None
        self._rank_of = dict[int, int]()  # the global rank of each stage of the model
        for rank in range(mesh.size("pp")):
            stages_there = stages_of_rank(rank, mesh.size("pp"), len(stages), section.pp_schedule)
            for stage in stages_there:
                self._rank_of[stage] = dist.get_global_rank(self._group, rank)
        # NCCL connects all ranks of a group at their first collective, but only pairs at a send.
        mesh.sum(torch.zeros(1, device=device), "pp")

    def train(self, mode: bool = True) -> Pipeline:
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
        *,
        factor: torch.Tensor,
        loss_scale: torch.Tensor | None = None,
        mark: Callable[[str], None] = lambda phase: None,
    ) -> Losses:
        """Runs one schedule: forward and backward passes of all micro-batches."""
        self._finish_sends()
        if positions_BS is None:
            positions_BS = self._positions(tokens_BS)
        arguments = {"positions_BS": positions_BS}  # the schedule splits each into micro-batches
        if document_ids_BS is not None:
            arguments["document_ids_BS"] = document_ids_BS
        if self.head is not None:
            arguments["labels_BS"] = labels_BS
            if loss_scale is not None:
                num_micro_batches = self._num_micro_batches(len(tokens_BS))
                arguments["loss_scale"] = loss_scale.expand(num_micro_batches)
        inputs = () if self.embed is None else (tokens_BS,)
        self._factor = factor
        schedule = self._schedule_for(tokens_BS.shape)
        try:
            schedule.step(*inputs, target=labels_BS, return_outputs=False, **arguments)
        except RuntimeError as error:
            # torch wraps errors of a pass; callers treat errors such as OutOfMemoryError by type.
            raise error.__cause__ or error from None
        mark("forward_backward")
        losses = self._losses
        self._losses = []
        if losses:
            return tuple(torch.stack(values).sum() for values in zip(*losses, strict=True))
        num_losses = 2 if self.config.z_loss else 1
        return tuple(torch.zeros_like(factor) for _ in range(num_losses))

    def _scaled_loss(self, output: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
        """Returns the scaled loss of a micro-batch, which the last stage has computed."""
        loss, _, *z_loss = output
        self._losses.append((loss.detach(), *(each.detach() for each in z_loss)))
        return loss * self._factor

    def _num_micro_batches(self, batch_size: int) -> int:
        return batch_size // self._section.pp_micro_batch_size

    def _schedule_for(self, shape: torch.Size) -> Any:
        """Returns the schedule for tokens of this shape.

        It is given the shapes that stages send, which torch would infer by a forward and backward
        pass.
        """
        if shape in self._schedules:
            return self._schedules[shape]
        rows = self._section.pp_micro_batch_size
        length = shape[1] // self._mesh.size("cp")
        if self._mesh.dims.sequence_parallel:
            length //= self._mesh.size("tp")
        with torch.device("meta"):
            tokens = torch.empty(rows, shape[1], dtype=torch.int64)
            size = (rows, length, self.config.hidden_size)
            hidden = torch.empty(size, dtype=self._dtype, requires_grad=True)
            losses = [torch.empty((), requires_grad=True), torch.empty((), dtype=torch.int64)]
            if self.config.z_loss:
                losses.append(torch.empty(()))
        stages = []
        for index, stage in self._stages.items():
            stages.append(
                _Stage(
                    stage,
                    index,
                    self._last + 1,
                    self._device,
                    input_args=tokens if index == 0 else hidden,
                    output_args=tuple(losses) if index == self._last else hidden,
                    group=self._group,
                )
            )
        make_schedule = _SCHEDULES[self._section.pp_schedule]
        has_several_stages = issubclass(make_schedule, PipelineScheduleMulti)
        self._schedules[shape] = make_schedule(
            stages if has_several_stages else stages[0],
            self._num_micro_batches(shape[0]),
            loss_fn=self._scaled_loss,
            scale_grads=False,
        )
        return self._schedules[shape]

    def _positions(self, tokens_BS: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Returns positions: later stages, which may get a shard of the sequence, cannot infer them."""
        stop = start + tokens_BS.shape[1]
        return torch.arange(start, stop, device=tokens_BS.device).expand(tokens_BS.shape)

    @torch.no_grad()
    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        caches: Sequence[KVCache] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Runs a forward pass of the whole batch, without gradients (collective).

        With labels it returns (summed loss, number of labels), the loss 0 on ranks without the last
        stage. A rank waits only for the stage before its own: in successive calls all stages work
        at the same time. Without labels it returns fp32 logits (B S V) on every rank, S = 1 with
        `caches`, one per layer of the full model.
        """
        start = caches[0].length if caches else 0
        if positions_BS is None:
            positions_BS = self._positions(tokens_BS, start)
        output: Any = None
        for index, stage in self._stages.items():
            if index == 0:
                output = tokens_BS
            elif index - 1 not in self._stages:
                output = self._receive(self._rank_of[index - 1])
            own = None if caches is None else [caches[int(layer)] for layer in stage.blocks]
            # By keyword: hooks of tensor parallelism look for the caches.
            output = stage(output, labels_BS, positions_BS, document_ids_BS, caches=own)
            if index < self._last and index + 1 not in self._stages:
                self._send(output, self._rank_of[index + 1])
        for layer, cache in enumerate(caches or ()):
            if str(layer) not in self.blocks:  # its own blocks have advanced the others
                cache.length += tokens_BS.shape[1]
        if labels_BS is not None:
            loss = torch.zeros((), device=self._device) if self.head is None else output[0]
            return loss, (labels_BS != IGNORED_LABEL).sum()
        if self.head is None:
            length = 1 if caches else tokens_BS.shape[1]
            shape = (len(tokens_BS), length, self.config.vocab_size)
            output = torch.empty(shape, device=self._device)
        # Under tensor parallelism the logits may be a slice, which gloo would send wrongly.
        logits_BSV: torch.Tensor = output.float().contiguous()
        dist.broadcast(logits_BSV, self._rank_of[self._last], self._group)
        return logits_BSV

    def _receive(self, rank: int) -> torch.Tensor:
        """Receives what `_send` sends."""
        header = torch.empty(4, dtype=torch.int64, device=self._device)
        dist.recv(header, rank, self._group)
        dtype, *shape = header.tolist()
        x_BSD = torch.empty(shape, dtype=_DTYPES[dtype], device=self._device)
        if x_BSD.numel():
            dist.recv(x_BSD, rank, self._group)
        return x_BSD

    def _send(self, x_BSD: torch.Tensor, rank: int) -> None:
        """Starts to send dtype and shape, then the values."""
        self._finish_sends()
        header = torch.tensor([_DTYPES.index(x_BSD.dtype), *x_BSD.shape], device=self._device)
        for tensor in (header, x_BSD.contiguous()):
            if tensor.numel():
                work = dist.isend(tensor, rank, self._group)
                assert work is not None  # this rank is in the group
                self._sends.append((work, tensor))

    def _finish_sends(self) -> None:
        for work, _ in self._sends:
            work.wait()
        self._sends = []


class _Stage(PipelineStage):
    """A stage whose passes have names in traces."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with record_function("forward"), record_function(f"stage {self.stage_index}"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with record_function("backward"), record_function(f"stage {self.stage_index}"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with record_function("backward"), record_function(f"stage {self.stage_index}"):
            return super().backward_weight_one_chunk(*args, **kwargs)
