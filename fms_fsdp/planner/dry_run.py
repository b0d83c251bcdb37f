"""`--dry_run`: a launch that is checked and resolved, says what it would do, and ends. Nothing is written.

It goes the way of a launch up to its claim: flags, world, process group, data, memory, the choices by memory,
then the checkpoint and the first rows of the data. It takes no lock, so another run may hold the folders.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from fms_fsdp import runtime
from fms_fsdp.config import TrainConfig
from fms_fsdp.data.held_out import close_held_out
from fms_fsdp.flags import Parsed, describe_changes
from fms_fsdp.parallel.compile import compiles
from fms_fsdp.predict.hardware import hardware_of
from fms_fsdp.predict.speed import Program, Work, step_time
from fms_fsdp.run.status import FINISHED, Launch
from fms_fsdp.spec.data import Inputs
from fms_fsdp.spec.machine import Machine
from fms_fsdp.spec.origin import find_origin
from fms_fsdp.spec.resolve import Spec, open_stream, resolve
from fms_fsdp.spec.words import announce, describe


def tell_launch(parsed: Parsed[TrainConfig], machine: Machine, inputs: Inputs, launch: Launch) -> None:
    """Prints on rank 0 what the launch would do, and ends it as finished (collective: every rank).

    Raises:
        UserError, OSError: what the launch itself would be refused for; alike on every rank.
    """
    cfg = parsed.config
    origin = runtime.agreed(partial(find_origin, cfg, inputs.corpus))
    spec = resolve(cfg, machine, inputs, origin)
    open_stream(spec).close()
    runtime.log.info("%s\n%s", describe_changes(parsed), dry_run_text(spec))
    announce(spec)
    close_held_out(spec.held_out)
    launch.end(FINISHED, "dry run: nothing was written")
    runtime.log.info(launch.reason)


def dry_run_text(spec: Spec) -> str:
    """What a dry run says of the launch, one line for each fact; what it starts from follows."""
    lines = [describe(spec), *_predicted(spec), f"run folder: {spec.config.output_dir}"]
    if spec.start == spec.num_steps:
        lines.append(f"steps: none, the run is already finished at step {spec.start}")
    else:
        lines.append(f"steps: {spec.start + 1:,} to {spec.num_steps:,}")
    return "\n".join(lines)


def _predicted(spec: Spec) -> Iterator[str]:
    """What a rank is expected to take of its device, and on a GPU that is known how fast the run goes."""
    device, section = spec.device, spec.config.parallel
    need = spec.memory(section).by_holder(device, section)[device].expected / 2**30
    available = spec.inputs.available[device.type] / 2**30
    yield f"memory: about {need:.3g} GiB a rank, {available:.3g} are available"
    if device.type != "cuda":
        return
    name, memory = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
    if (hardware := hardware_of(name, memory)) is None:
        yield f"speed: no curves are known for {name}"
        return
    args = spec.model, spec.dims, section, spec.precision, spec.batch, spec.seq_length, hardware
    work = Work(*args, spec.world.local_world_size, Program(compiles(section, device)))
    seconds = step_time(work).total
    rate = spec.batch.global_batch_size * spec.seq_length / seconds / spec.world.world_size
    yield f"speed: about {seconds:.3g} s a step, {rate:,.0f} tokens/s a device, by curves of {hardware.name}"
