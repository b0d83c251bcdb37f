"""The batch and the plan of what `estimate` is asked: what is not given is chosen here.

rows of a step   --global_batch_size, or --batch_size x --grad_accum_steps x ranks, or those of --batch_tokens
micro-steps      the largest that fit the device, where neither of the two is given
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fms_fsdp.config import TrainConfig, TrainingConfig
from fms_fsdp.config.batch import divisors
from fms_fsdp.errors import UserError
from fms_fsdp.mesh import resolve_dims
from fms_fsdp.planner.plan import Cluster, Plan, changed, make_plan
from fms_fsdp.planner.search import KINDS, MARGIN, MOST_ROWS
from fms_fsdp.predict.hardware import DeviceKind


@dataclass(frozen=True)
class Choice:
    """A plan, and whether its micro-steps are the largest that fit."""

    plan: Plan
    is_fitted: bool = False


def with_global_batch(training: TrainingConfig, dp_size: int, most: int) -> TrainingConfig:
    """The section with a global batch: the one that its flags give, else at most `most` rows, as many as the
    ranks and the flag that is given can divide."""
    rows, micro_steps = int(training.batch_size or 0), training.grad_accum_steps
    unit = (rows or 1) * (micro_steps or 1) * dp_size
    if training.global_batch_size is None:
        total = unit if rows and micro_steps else max(1, most // unit) * unit
        return replace(training, global_batch_size=total)
    return training


def choose_plan(config: TrainConfig, cluster: Cluster, most: int) -> Choice:
    """The plan of a launch of at most `most` rows a step, if its flags do not say how many; under
    `--recompute=auto` that of the first kind that fits, else of the last.

    Raises:
        UserError: such a launch would be refused.
    """
    if config.parallel.recompute != "auto":
        return _choose_rows(config, cluster, most)
    choices = []
    for kind in KINDS:
        choices.append(_choose_rows(changed(config, kind), cluster, most))
        if choices[-1].plan.fits:
            break
    return choices[-1]


def _choose_rows(config: TrainConfig, cluster: Cluster, most: int) -> Choice:
    """The plan with the rows that its flags give, else with the most that fit."""
    dims = resolve_dims(config.parallel, config.model.name, cluster.world)
    training = with_global_batch(config.training, dims.size("dp"), most)
    config = replace(config, training=training)
    assert training.global_batch_size is not None
    rows_of_rank, rest = divmod(training.global_batch_size, dims.size("dp"))
    if rest or training.batch_size or training.grad_accum_steps:
        return Choice(make_plan(config, cluster))
    plan, refusal = None, UserError("no number of rows fits")
    sizes = [rows_of_rank] if dims.pp > 1 else reversed(divisors(rows_of_rank, MOST_ROWS))
    for rows in sizes:
        micro_steps = rows_of_rank // rows
        try:
            cut = replace(training, batch_size=rows, grad_accum_steps=micro_steps)
            plan = make_plan(replace(config, training=cut), cluster)
        except UserError as error:
            refusal = error
            continue
        if plan.needed <= MARGIN * plan.available:
            return Choice(plan, is_fitted=dims.pp == 1)
    if plan is None:
        raise refusal
    return Choice(plan)


def rows_to_search(config: TrainConfig, cluster: Cluster, most: int) -> int:
    """The rows of a step of a search: those that the flags give, else at most `most`, as many as can be dealt
    out to the devices.

    Raises:
        UserError: the flags give rows for each rank, and no such ranks can be.
    """
    training = config.training
    if training.global_batch_size is None and training.batch_size and training.grad_accum_steps:
        dims = resolve_dims(config.parallel, config.model.name, cluster.world)
        training = with_global_batch(training, dims.size("dp"), most)
    if training.global_batch_size is not None:
        return training.global_batch_size
    given = int(training.batch_size or 0) or training.grad_accum_steps or 1
    unit = max(divisors(cluster.num_devices, most)) * given
    return max(1, most // unit) * unit


def cluster_of(hardware: DeviceKind, num_devices: int, devices_per_node: int) -> Cluster:
    """The cluster, of one node or of whole nodes.

    Raises:
        UserError: the last node would not be full.
    """
    whole = num_devices // devices_per_node * devices_per_node
    if num_devices > devices_per_node and whole != num_devices:
        raise UserError(
            f"--num_devices ({num_devices}) must be whole nodes of --devices_per_node ({devices_per_node}); "
            f"choose {whole} or {whole + devices_per_node}"
        )
    return Cluster(hardware, num_devices, devices_per_node)
