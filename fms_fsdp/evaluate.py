"""Loss, perplexity and bits per byte on held-out sequences, during a run and by `evaluate`.

Each group of `batch_size` sequences is computed by one data-parallel rank, and the sums of all
groups are added exactly. So the results depend neither on the world size nor on the assignment of
groups to ranks. Evaluation draws no random number and consumes no training data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.profiler import record_function

from fms_fsdp.console import LINE_WIDTH, TIME_WIDTH, cut
from fms_fsdp.data.batch import IGNORED_LABEL
from fms_fsdp.data.validation import HeldOut
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import gather_objects
from fms_fsdp.errors import ReadFailed, checking_input, note_once, raise_first
from fms_fsdp.logs import log
from fms_fsdp.parallel.fsdp import evaluating
from fms_fsdp.state import TrainState

if TYPE_CHECKING:  # the command `evaluate` has none of them
    from fms_fsdp.metrics.timer import PhaseTimer
    from fms_fsdp.run.health import Watchdog
    from fms_fsdp.run.logger import MetricLogger
    from fms_fsdp.run.setup import Launch
    from fms_fsdp.run.stop import StopControl

MANY_SOURCES = 64  # whose evaluation may take longer than the steps between two


class EvaluationStopped(Exception):
    """The launch ends before the evaluation does. Raised on every rank at the same batch."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    sources: Sequence[HeldOut],
    *,
    batch_size: int,
    document_mask: bool,
    device: torch.device,
    mesh: Mesh,
    keep_alive: Callable[[], None] = lambda: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Returns loss, ppl and, if the tokenizer is known, bits_per_byte (collective: every rank).

    Losses are means per label, in nats; ppl is exp(loss). Names are `<group>/<source>/loss`, and
    `<group>/loss` over all tokens of a group, where the group is "eval" or "test". A source without
    labels has the loss NaN.

    batch_size      sequences per forward pass and data-parallel rank
    document_mask   restricts attention to the document, as in training
    keep_alive      is called before each forward pass
    is_stopped      whether to stop, identical on every rank; is called before each forward pass

    Example:
        values = evaluate(
            model, sources, batch_size=8, document_mask=False, device=device, mesh=mesh
        )
        print(values["eval/loss"])

    Raises:
        UserError: a shard cannot be used.
        ReadFailed: the storage of a rank does not answer; on every rank.
        EvaluationStopped: `is_stopped` returned True.
    """
    failures: list[ReadFailed] = []

    def sum_sources(members: Sequence[HeldOut]) -> list[list[float]]:
        """Returns for each source the loss in nats, the number of labels and their bytes (0: unknown).

        A pass computes one batch per rank, which may be of different sources: short sources share
        the passes.
        """
        batches = list[tuple[HeldOut, int]]()  # of a source, from a sequence on
        counts = list[int]()  # of batches, by source
        for source in members:
            starts = range(0, source.num_sequences, batch_size)
            batches += [(source, start) for start in starts]
            counts.append(len(starts))
        if len(members) > MANY_SOURCES:
            passes = -(-len(batches) // mesh.size("dp"))
            text = "evaluating %d sources of %s: %d forward passes per rank"
            log.info(text, len(members), members[0].group, passes)
        sums = torch.zeros(len(batches), 3, dtype=torch.float64)
        losses = torch.zeros(len(batches), dtype=torch.float64, device=device)
        for first in range(0, len(batches), mesh.size("dp")):
            keep_alive()
            if is_stopped():
                raise EvaluationStopped
            # FSDP needs every rank in every pass: a rank past the last batch has no labels
            index = first + mesh.axis_rank("dp")
            has_batch = index < len(batches)
            batch = members[0].no_sequences(batch_size)
            if has_batch:
                source, start = batches[index]
                try:
                    with checking_input(on_one_rank=True):
                        batch = source.sequences(start, start + batch_size)
                except ReadFailed as error:
                    # The other ranks are on their way into the same pass: this rank takes part
                    # without labels, and all of them raise the error at the end.
                    failures.append(error)
            columns = batch if document_mask else batch[:2]
            with record_function("evaluate"):
                loss, _ = model(*(column.to(device, non_blocking=True) for column in columns))
            if has_batch:
                losses[index] = loss
                labels = batch.labels_BS[batch.labels_BS != IGNORED_LABEL].numpy()
                sums[index, 1] = len(labels)
                if source.token_bytes is not None:
                    sums[index, 2] = int(source.token_bytes[labels].sum())
        sums[:, 0] = mesh.sum(losses, "cp_pp").cpu()
        by_source = mesh.sum(sums, "dp").split(counts)
        return [[math.fsum(column) for column in part.T.tolist()] for part in by_source]

    values: dict[str, float] = {}
    with evaluating(model):
        for group in dict.fromkeys(source.group for source in sources):
            members = [source for source in sources if source.group == group]
            sums = sum_sources(members)
            raise_first(gather_objects(failures[0] if failures else None))
            for source, source_sums in zip(members, sums, strict=True):
                values |= _averages(f"{group}/{source.name}", *source_sums)
                if source_sums[1] == 0:
                    note_once(
                        f"{group}/{source.name} has no labels in the sequences that are evaluated, so its "
                        "loss is nan; check its loss masks (--loss_on) and hidden shards (--on_missing)"
                    )
            loss, labels, num_bytes = (math.fsum(column) for column in zip(*sums, strict=True))
            # A source without labels has no bytes either, known or not.
            all_known = all(source_sums[2] for source_sums in sums if source_sums[1])
            values |= _averages(group, loss, labels, num_bytes if all_known else 0)
    return values


def _averages(name: str, loss_sum: float, num_labels: float, num_bytes: float) -> dict[str, float]:
    loss = loss_sum / num_labels if num_labels else math.nan
    perplexity = math.inf if loss > 700 else math.exp(loss)
    values = {f"{name}/loss": loss, f"{name}/ppl": perplexity}
    if num_bytes:
        values[f"{name}/bits_per_byte"] = loss_sum / math.log(2) / num_bytes
    return values


class Evaluator:
    """Evaluates at the steps of the flags, and after each --eval_epochs of the data.

    An evaluation that the end of the launch stops or prevents has no result; the checkpoint records
    `evaluation_pending`, and the next launch evaluates before its first step.
    """

    def __init__(
        self,
        launch: Launch,
        mesh: Mesh,
        state: TrainState,
        metrics: MetricLogger,
        watchdog: Watchdog,
        stop: StopControl,
        timer: PhaseTimer,
    ) -> None:
        run = launch.run
        self._cfg = run.config.eval
        self._sources = launch.held_out
        self._metrics = metrics
        self._timer = timer
        sources = () if launch.found.corpus is None else launch.found.corpus.sources
        num_tokens = sum(source.num_tokens for source in sources)
        self._every_tokens = 0  # without --eval_epochs
        if run.config.eval.eval_epochs:  # of which a small one is at least a token
            self._every_tokens = max(1, round(run.config.eval.eval_epochs * num_tokens))
        self._evaluate = partial(
            evaluate,
            state.model,
            batch_size=run.batch.batch_size,
            document_mask=run.config.data.document_mask,
            device=launch.device,
            mesh=mesh,
            keep_alive=watchdog.alive,
            is_stopped=partial(stop.interrupts, state),
        )

    def is_due(self, state: TrainState) -> bool:
        """Returns whether anything is evaluated after the last step."""
        return bool(self._due_sources(state))

    def run_if_due(self, state: TrainState) -> None:
        """Evaluates the groups that are due after the last step, or before the first step of a
        launch (collective: every rank)."""
        sources = self._due_sources(state)
        state.evaluation_pending = bool(sources)
        if sources:
            with self._timer.phase("eval", synchronize=True):
                self._run(sources, state)

    def _run(self, sources: list[HeldOut], state: TrainState) -> None:
        begin = time.perf_counter()
        try:
            values = self._evaluate(sources)
        except EvaluationStopped:
            log.info("eval @%d stopped: the next launch begins with it", state.step)
            return
        seconds = time.perf_counter() - begin
        state.evaluation_pending = False
        self._metrics.log(state, values | {"eval_s": seconds})
        for line in summary_lines(values, state.step, seconds):
            log.info(line)
        if math.isfinite(loss := values.get("eval/loss", math.nan)):
            state.validation = state.step, loss

    def _due_sources(self, state: TrainState) -> list[HeldOut]:
        return [source for source in self._sources if self._is_due(source.group, state)]

    def _is_due(self, group: str, state: TrainState) -> bool:
        cfg = self._cfg
        step = state.step
        is_last = state.is_done
        if group == "test":
            return is_last
        if step == state.start:
            return cfg.eval_at_start or state.evaluation_pending
        tokens = state.tokens_seen
        every = self._every_tokens
        if every and tokens // every > (tokens - state.current.tokens) // every:
            return True
        if cfg.eval_interval and step % cfg.eval_interval == 0:
            return True
        return is_last and bool(cfg.eval_interval or every)


def summary_lines(values: dict[str, float], step: int, seconds: float) -> list[str]:
    """Returns a text for each group: loss, perplexity, bits per byte, then the loss of its sources.

    A text has at most two lines, with as many sources as fit; metrics.jsonl has all of them.
    """
    names = [name.removesuffix("/loss") for name in values if name.endswith("/loss")]
    end = f"  ({seconds:.1f} s)"
    width = LINE_WIDTH - TIME_WIDTH - len(f"  …{end}")
    texts = []
    for group in [name for name in names if "/" not in name]:
        line = (
            f"{group} @{step}  loss {values[f'{group}/loss']:.4f}  ppl {values[f'{group}/ppl']:.2f}"
        )
        bits = values.get(f"{group}/bits_per_byte")
        line += "" if bits is None else f"  {bits:.3f} bits/byte"
        lines = [line]
        for name in names:
            if not name.startswith(f"{group}/"):
                continue
            source = cut(name.removeprefix(f"{group}/"), 30)
            part = f"  {source} {values[f'{name}/loss']:.4f}"
            if len(lines[-1] + part) <= width:
                lines[-1] += part
            elif len(lines) == 1:
                lines.append(part)
            else:
                lines[-1] += "  …"
                break
        texts.append("\n".join(lines) + end)
    return texts
