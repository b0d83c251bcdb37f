"""Loss, perplexity and bits per byte on held-out rows: in a run, and of a checkpoint by the command
`evaluate`.

    HeldOut.rows ── groups of batch_size rows, shared out over ranks ── forward without gradients
                 ── sums by group ── one exact sum

Invariant: a group of rows is computed as a whole by one rank, and the sums of all groups are added exactly,
so the numbers depend neither on the world size nor on who computes what. Nothing of the training is touched:
no random number is drawn, no gradient made, no row of the stream consumed.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.profiler import record_function

from fms_fsdp.config import EvalConfig
from fms_fsdp.data.batch import IGNORED_LABEL
from fms_fsdp.data.validation import HeldOut, close_held_out
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import log
from fms_fsdp.errors import checking_input
from fms_fsdp.observe.sinks import Sinks
from fms_fsdp.parallel.fsdp import evaluating
from fms_fsdp.state import TrainState


@dataclass(frozen=True)
class Forward:
    """How to compute: which model, in groups of how many rows, where. `alive` is called before each."""

    model: nn.Module
    batch_size: int
    document_mask: bool
    device: torch.device
    mesh: Mesh
    alive: Callable[[], None] = lambda: None


@torch.no_grad()
def evaluate(forward: Forward, sources: Sequence[HeldOut]) -> dict[str, float]:
    """`<group>/<source>/loss`, `…/ppl` and, where known, `…/bits_per_byte`; `<group>/loss` and so on over all
    tokens of a group (collective: every rank).

    Raises:
        UserError: a shard cannot be read.
    """
    values: dict[str, float] = {}
    with evaluating(forward.model):
        for group in dict.fromkeys(source.group for source in sources):
            totals: list[tuple[float, ...]] = []
            for source in sources:
                if source.group == group:
                    totals.append(_sums(forward, source))
                    values |= _means(f"{group}/{source.name}", *totals[-1])
            loss_sum, num_labels, num_bytes = map(math.fsum, zip(*totals, strict=True))
            has_bytes = all(total[2] for total in totals)
            values |= _means(group, loss_sum, num_labels, num_bytes if has_bytes else 0)
    return values


def _sums(forward: Forward, source: HeldOut) -> tuple[float, ...]:
    """Sum of the loss over the labels of all rows, in nats; number of labels; bytes of the text of the
    labels, 0 if not known."""
    mesh, size = forward.mesh, forward.batch_size
    sums = torch.zeros(-(-source.num_rows // size), 3, dtype=torch.float64)
    losses = torch.zeros(len(sums), dtype=torch.float64, device=forward.device)
    for first in range(0, len(sums), mesh.size("dp")):
        forward.alive()
        # the last ones may be past the end: all masked, for FSDP needs every rank in every pass
        group = first + mesh.place("dp")
        with checking_input(on_one_rank=True):
            batch = source.rows(group * size, (group + 1) * size)
        columns = batch if forward.document_mask else batch[:2]
        with record_function("evaluate"):
            loss_sum, _ = forward.model(
                *(column.to(forward.device, non_blocking=True) for column in columns)
            )
        if group < len(sums):
            losses[group] = loss_sum
            labels = batch.labels_BS[batch.labels_BS != IGNORED_LABEL].numpy()
            sums[group, 1] = len(labels)
            sums[group, 2] = (
                0 if source.token_bytes is None else int(source.token_bytes[labels].sum())
            )
    sums[:, 0] = mesh.sum(losses, "row").cpu()
    return tuple(map(math.fsum, mesh.sum(sums, "dp").T.tolist()))


def _means(name: str, loss_sum: float, num_labels: float, num_bytes: float) -> dict[str, float]:
    loss = loss_sum / max(1.0, num_labels)
    values = {f"{name}/loss": loss, f"{name}/ppl": math.exp(loss) if loss < 700 else math.inf}
    return values | (
        {f"{name}/bits_per_byte": loss_sum / math.log(2) / num_bytes} if num_bytes else {}
    )


class Evaluator:
    """Evaluates at the steps that the flags name, and each time that `every_tokens` more tokens are read (0:
    never), and leaves the loss to the checkpoint of the step.

    `forward.alive` is called between groups of rows; `mark(part)` tells the clock that a part of the run
    has ended.
    """

    def __init__(
        self,
        section: EvalConfig,
        forward: Forward,
        sources: Sequence[HeldOut],
        sinks: Sinks,
        mark: Callable[[str], None],
        every_tokens: int = 0,
    ) -> None:
        self._every_tokens = every_tokens
        self._section, self._forward, self._sources, self._sinks = section, forward, sources, sinks
        self._mark = mark

    def run_if_due(self, state: TrainState) -> None:
        """Evaluates the groups that are due after the last step, or before the first one of a launch
        (collective: every rank)."""
        sources = [source for source in self._sources if self._is_due(source.group, state)]
        if not sources:
            return
        self._mark("device")
        begin = time.perf_counter()
        values = evaluate(self._forward, sources)
        seconds = time.perf_counter() - begin
        self._sinks.write(state, values | {"eval_s": seconds})
        log.info("evaluation at step %d · %s · %.1f s", state.step, _line(values), seconds)
        if math.isfinite(loss := values.get("eval/loss", math.nan)):
            state.validation = state.step, loss
        self._forward.alive()
        self._mark("eval")

    def _is_due(self, group: str, state: TrainState) -> bool:
        section, step, last = self._section, state.step, state.is_done
        if group == "test":
            return last
        if step == state.start:
            return section.eval_at_start
        tokens, every = state.tokens_seen, self._every_tokens
        by_tokens = every > 0 and tokens // every > (tokens - state.batch_tokens) // every
        by_steps = section.eval_interval > 0 and step % section.eval_interval == 0
        return by_tokens or by_steps or (last and (section.eval_interval > 0 or every > 0))

    def close(self) -> None:
        """Closes the files."""
        close_held_out(self._sources)


def _line(values: dict[str, float]) -> str:
    """One line: the loss of each group over all tokens, then the loss of each source in the group."""
    losses = {
        key.removesuffix("/loss"): loss for key, loss in values.items() if key.endswith("/loss")
    }
    parts = []
    for group in (name for name in losses if "/" not in name):
        bits = values.get(f"{group}/bits_per_byte")
        more = "" if bits is None else f", {bits:.3f} bits/byte"
        parts.append(f"{group} loss {losses[group]:.4f}, ppl {values[f'{group}/ppl']:.2f}{more}")
        for name in (name for name in losses if name.startswith(f"{group}/")):
            parts.append(f"{name.partition('/')[2]} {losses[name]:.4f}")
    return textwrap.shorten(" · ".join(parts), 200, placeholder=" …")
