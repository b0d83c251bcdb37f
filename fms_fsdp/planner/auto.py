"""What a launch chooses by the memory that a rank is expected to take (predict/memory.py).

    sharding_strategy   not given, and hsdp does not fit: fsdp, if that fits
    recompute=auto      none → cheap (where blocks are compiled) → ops → blocks, 1/4, 1/2, 3/4 or all of them;
                        the first that fits, else the last
    batch_size=auto     of the rows that divide the global batch the most that fit but for a margin, else the
                        fewest

With both `auto` the kind is the first that fits with the fewest rows, and the rows are the most that fit with
that kind. A run that goes on keeps what an earlier launch chose as long as that fits, without the margin. The
memory is the least of any rank (`Inputs.available`), so all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fms_fsdp.config import BatchPlan, ParallelConfig, TrainConfig
from fms_fsdp.config.batch import divisors
from fms_fsdp.errors import UserError
from fms_fsdp.mesh import resolve_dims
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.parallel.compile import compiles
from fms_fsdp.parts import load_part
from fms_fsdp.predict.memory import MemoryEstimate
from fms_fsdp.record import Record
from fms_fsdp.spec.data import Inputs, memory_of
from fms_fsdp.spec.machine import Machine

SHARES = ("1/4", "1/2", "3/4", "1")  # of the blocks, for --recompute=blocks
# Part of the memory that a choice of rows leaves free: the estimate leaves out the CUDA context, NCCL and
# fragments. Beside what one row too many costs, the end of the run, a few rows less cost little.
MARGIN = 0.1
_MOST_ROWS = 4096  # of a micro-step of a rank: divisors are tried one by one
_GIB = 2**30


class Load(NamedTuple):
    """Bytes that a rank needs of the device that it fills most, and bytes that it may use there."""

    needed: int
    available: int

    def fits(self, margin: float = 0.0) -> bool:
        return self.needed <= (1 - margin) * self.available

    @property
    def gib(self) -> str:
        return f"{self.needed / _GIB:.1f} GiB"

    @property
    def in_words(self) -> str:
        return f"{self.gib} of {self.available / _GIB:.1f} GiB a rank"


def _fullest(
    need: MemoryEstimate, section: ParallelConfig, machine: Machine, inputs: Inputs, *, least: bool = False
) -> Load:
    """The load of the device that is filled most; `least`: by the least that a rank needs, as refusals
    are."""
    loads = []
    for holder, part in need.by_holder(machine.device, section).items():
        loads.append(Load(part.total if least else part.expected, max(1, inputs.available[holder.type])))
    return max(loads, key=lambda load: load.needed / load.available)


def try_fsdp(cfg: TrainConfig, machine: Machine, inputs: Inputs, batch: BatchPlan) -> Machine:
    """The machine under fsdp in place of hsdp, which does not fit; as it is where fsdp fits no better."""

    def load(tried: Machine) -> Load:
        need = memory_of(cfg, tried, inputs, batch)
        return _fullest(need, cfg.parallel, tried, inputs, least=True)

    section = replace(cfg.parallel, sharding_strategy="fsdp")
    dims = resolve_dims(section, cfg.model.name, machine.world)
    why = f"hsdp over {machine.dims.size('shard')} devices would need {load(machine).in_words}"
    found = replace(machine, dims=dims, why_strategy=f"fsdp, because {why}")
    return found if load(found).fits() else machine


def plans(cfg: TrainConfig, model: LlamaConfig, machine: Machine, batch: BatchPlan) -> list[BatchPlan]:
    """The ways to divide the global batch of `batch` that the axes can use, the fewest rows first; `batch`
    where there is none, which is refused then."""
    per_rank = batch.batch_size * batch.grad_accum_steps
    unit = per_rank if batch.cuts_micro_steps else batch.ramp.unit // batch.dp_size
    found = [
        replace(batch, batch_size=rows, grad_accum_steps=per_rank // rows)
        for rows in divisors(unit, _MOST_ROWS)
    ]
    return [plan for plan in found if _is_allowed(cfg, model, machine, plan)] or [batch]


def _is_allowed(cfg: TrainConfig, model: LlamaConfig, machine: Machine, batch: BatchPlan) -> bool:
    """Whether the axes of the run can use these settings."""
    if machine.dims.divides_model:
        try:
            load_part("rules", folder="parallel").check_layout(cfg, model, machine, batch)
        except UserError:
            return False
    return True


@dataclass(frozen=True)
class Settings:
    """One choice of recomputation and rows."""

    section: ParallelConfig
    batch: BatchPlan

    @property
    def kind(self) -> str:
        """The recomputation in words."""
        name, share = self.section.recomputes, self.section.selective_checkpointing
        return f"{share} of the blocks" if name == "blocks" and share != "1" else name

    @property
    def rows(self) -> int:
        return self.batch.batch_size


@dataclass(frozen=True)
class Search:
    """All settings that a launch may choose among: the cheapest recomputation and the fewest rows first."""

    cfg: TrainConfig
    machine: Machine
    inputs: Inputs
    sections: Sequence[ParallelConfig]
    batches: Sequence[BatchPlan]

    def load(self, settings: Settings) -> Load:
        cfg = replace(self.cfg, parallel=settings.section)
        need = memory_of(cfg, self.machine, self.inputs, settings.batch)
        return _fullest(need, settings.section, self.machine, self.inputs)

    def best(self) -> Settings:
        """The first recomputation that fits with the fewest rows, and the most rows that fit with it."""
        tried = [Settings(section, self.batches[0]) for section in self.sections]
        first = next((each for each in tried if self.load(each).fits()), tried[-1])
        more = [replace(first, batch=batch) for batch in reversed(self.batches)]
        return next((each for each in more if self.load(each).fits(MARGIN)), first)

    def kept(self, before: Record | None) -> Settings | None:
        """What an earlier launch of this run chose; None where it had no choice, or cannot have it now."""
        if before is None:
            return None
        was, sections, batches = Settings(before.config.parallel, before.batch), self.sections, self.batches
        if self.cfg.parallel.recompute == "auto":
            chosen = "recompute" in before.chosen
            sections = [each for each in sections if chosen and Settings(each, was.batch).kind == was.kind]
        if self.cfg.training.batch_size == "auto":
            chosen = "batch_size" in before.chosen
            batches = [each for each in batches if chosen and each.batch_size == was.rows]
        return Settings(sections[0], batches[0]) if sections and batches else None


def choose_settings(
    cfg: TrainConfig, machine: Machine, inputs: Inputs, batch: BatchPlan, before: Record | None
) -> tuple[TrainConfig, BatchPlan, Mapping[str, str]]:
    """The flags with the chosen recomputation, the batch with the chosen rows, and a sentence for each flag
    that is `auto`. `before`: the launch that wrote the checkpoint of a run that goes on."""
    batches = [batch]
    if cfg.training.batch_size == "auto":
        batches = plans(cfg, inputs.model, machine, batch)
    search = Search(cfg, machine, inputs, _sections(cfg, machine, inputs, batches[0]), batches)
    kept = search.kept(before)
    stays = kept is not None and search.load(kept).fits()
    found = kept if kept is not None and stays else search.best()
    verb = (
        "keeps" if stays else "chose" if search.load(found).fits() else "found nothing that fits, and takes"
    )
    lost = None if stays else kept
    why = {}
    if cfg.parallel.recompute == "auto":
        why["recompute"] = f"auto {verb} {found.kind}: {_kind_in_figures(search, found, lost)}"
    if cfg.training.batch_size == "auto":
        division = f"{found.rows} rows x {batch.dp_size} ranks x {found.batch.grad_accum_steps} micro-steps"
        why["batch_size"] = f"auto {verb} {division}: {_rows_in_figures(search, found, lost)}"
    return replace(cfg, parallel=found.section), found.batch, why


def _sections(
    cfg: TrainConfig, machine: Machine, inputs: Inputs, batch: BatchPlan
) -> Sequence[ParallelConfig]:
    """The recomputations that there are for this launch, the cheapest first."""
    section = cfg.parallel
    if section.recompute != "auto":
        return [section]
    names = ["none", "cheap", "ops"] if compiles(section, machine.device) else ["none", "ops"]
    found = [replace(section, recompute=name) for name in names]
    found += [replace(section, recompute="blocks", selective_checkpointing=share) for share in SHARES]
    allowed = [
        each for each in found if _is_allowed(replace(cfg, parallel=each), inputs.model, machine, batch)
    ]
    return allowed or found[:1]


def _kind_in_figures(search: Search, found: Settings, lost: Settings | None) -> str:
    """What a rank needs with the chosen recomputation, and with the one it replaces."""
    if lost is not None and lost.kind != found.kind:
        return _in_figures(search, found, lost, f"{lost.kind}, as before")
    first = replace(found, section=search.sections[0])
    return _in_figures(search, found, None if first == found else first, first.kind)


def _rows_in_figures(search: Search, found: Settings, lost: Settings | None) -> str:
    """What a rank needs with the chosen rows, and with those that they replace or the next larger number."""
    if lost is not None and lost.rows != found.rows:
        return _in_figures(search, found, lost, f"{lost.rows} rows, as before")
    larger = next((each for each in search.batches if each.batch_size > found.rows), None)
    other = None if larger is None else replace(found, batch=larger)
    return _in_figures(search, found, other, "" if other is None else f"{other.rows} rows")


def _in_figures(search: Search, found: Settings, other: Settings | None, name: str) -> str:
    text = f"about {search.load(found).in_words}"
    return text if other is None else f"{text} ({name}: {search.load(other).gib})"
