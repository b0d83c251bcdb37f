"""The time of a step: measured costs divided by the speed that a device reaches.

    matmuls        FLOPs / (peak x efficiency) + bytes / memory bandwidth
    attention      FLOPs of the keys that a token sees / (peak x efficiency)
    memory         bytes of all other operations / memory bandwidth; fewer if compiled
    optimizer      weights and moments read and written, gradients read twice / memory bandwidth
    communication  bytes / link; of FSDP's the fraction that computation does not hide
    bubble         micro-batches that a rank of the pipeline waits for

The efficiencies are fitted on published runs by `benchmarks/judge_plan.py --calibrate`.
Source: Williams et al. 2009, "Roofline"; Narayanan et al. 2021, https://arxiv.org/abs/2104.04473
(bubble).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from fms_fsdp.config import NUM_BYTES
from fms_fsdp.config.values import rounded_bytes
from fms_fsdp.distributed.axes import AXES, JOINED, ParallelDims
from fms_fsdp.predict.devices import Device
from fms_fsdp.predict.memory import Step, held_by
from fms_fsdp.predict.meter import Cost, ModelSetup, cost, units


class Efficiency(NamedTuple):
    """Fractions of the data sheet that programs reach.

    matmul, attention  of the peak
    memory             of the bandwidth of the device's memory
    links              of the bandwidth of links
    exposed            of FSDP's communication that computation does not hide
    fused              of the bytes of element-wise operations that remain if they are compiled
    old_attention      of `attention`, by the first flash kernels (2022), which older programs use
    float8             of the rate that matmuls in bf16 suggest; scaling costs the rest; not fitted
    """

    matmul: float
    attention: float
    memory: float = 0.8
    links: float = 0.791
    exposed: float = 0.596
    fused: float = 0.228
    old_attention: float = 0.573
    float8: float = 0.85


EFFICIENCY = {"ampere": Efficiency(0.815, 0.56), "hopper": Efficiency(0.652, 0.308)}
_DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "float8",
    "float8_e5m2": "float8",
}


def rank_cost(setup: ModelSetup, stage: int, num_sequences: int) -> Cost:
    """Returns the cost of a micro-batch on the rank at this stage of the pipeline."""
    held = held_by(setup, stage)
    total = Cost()
    if held.embed:
        total = total.plus(cost(setup, "embed", num_sequences))
    if held.plain:
        total = total.plus(cost(setup, "block", num_sequences), held.plain)
    if held.recomputed:
        total = total.plus(cost(setup, "recomputed", num_sequences), held.recomputed)
    if held.head:
        total = total.plus(cost(setup, "head", num_sequences))
    return total


def slowest(step: Step) -> tuple[int, Cost]:
    """Returns the stage in the pipeline that computes longest, and the cost of a micro-batch there."""
    stages = range(step.setup.dims.pp)
    costs = {stage: rank_cost(step.setup, stage, step.micro_batch) for stage in stages}
    slowest_stage = max(costs, key=lambda stage: sum(costs[stage].flops.values()))
    return slowest_stage, costs[slowest_stage]


def step_time(
    step: Step,
    device: Device,
    devices_per_node: int,
    reached: Efficiency | None = None,
    computed: Cost | None = None,
) -> dict[str, float]:
    """Returns the seconds of a step by part, on the rank that computes longest; `computed`: the cost
    of a micro-batch there by another program."""
    reached = reached or EFFICIENCY[device.generation]
    setup = step.setup
    dims = setup.dims
    num_micro_batches = step.num_micro_batches
    stage, own = slowest(step)
    computed = computed or own
    bandwidth = 1e9 * device.memory_gb_s * reached.memory

    times = dict[str, float]()
    for name, seconds in _computing(setup, device, reached, computed).items():
        times[name] = num_micro_batches * seconds
    busy = sum(times.values())

    # The update reads and writes the weights and two moments, and reads the gradients twice.
    precision = setup.precision
    bytes_per_param = 2 * NUM_BYTES[precision.weights]
    bytes_per_param += 2 * NUM_BYTES[precision.gradients]
    bytes_per_param += 4 * NUM_BYTES[precision.state]
    num_params = held_by(setup, stage).params(setup)
    times["optimizer"] = bytes_per_param * num_params / dims.size("shard") / bandwidth

    for axis, size in sent_by(step, stage, computed).items():
        seconds = size / _link(dims, axis, device, devices_per_node) / reached.links
        if axis not in ("tp", "cp", "pp"):  # FSDP's: computation hides most of it
            hiding = busy
            if axis == "dp_replicate" or not dims.sync_each_micro_step:
                # Only the last backward pass sends; backward passes are two thirds of the time.
                hiding = busy * 2 / 3 / step.accum
            seconds = max(reached.exposed * seconds, seconds - hiding)
        times[f"{axis} communication"] = seconds

    # An idle rank waits for pp - 1 micro-batches. The split backward passes of zbv fill most of it.
    filled = 4 if setup.section.pp_schedule == "zbv" else dims.virtual_stages
    idle = (dims.pp - 1) / filled
    times["bubble"] = step.accum * idle * busy / num_micro_batches
    return {name: seconds for name, seconds in times.items() if seconds}


def _computing(
    setup: ModelSetup, device: Device, reached: Efficiency, total: Cost
) -> dict[str, float]:
    """Returns the seconds of a micro-batch."""
    bandwidth = 1e9 * device.memory_gb_s * reached.memory
    matmuls = total.moved["matmul"] / bandwidth
    for dtype, flops in total.flops.items():
        if dtype in _DTYPES:
            name = _DTYPES[dtype]
            gain = reached.float8 if name == "float8" else 1
            matmuls += flops / (device.peak(name) * device.clock * reached.matmul * gain)

    # Flash attention skips pairs that the mask hides; the counted FLOPs are those of all pairs.
    rate = device.peak(setup.precision.compute) * device.clock * reached.attention
    visible = _visible_pairs(setup)
    attention = total.flops["attention"] * visible
    attention += total.flops["old attention"] * (visible / reached.old_attention)
    attention /= rate

    fused = reached.fused if setup.compiled else 1
    memory = total.moved["other"] * fused / bandwidth
    return {
        "matmuls": matmuls / device.gain,
        "attention": attention / device.gain,
        "memory": memory / device.gain,
    }


def _visible_pairs(setup: ModelSetup) -> float:
    """Returns the fraction of all pairs of tokens that causal attention in windows computes.

    Example: about 1/2 without windows, as a token sees half of the sequence on average.
    """
    length = setup.seq_length
    keys_per_token = 0.0  # mean over the sequence, summed over layers
    for window in setup.config.windows:
        width = min(window or length, length)
        keys_per_token += width - width * width / (2 * length)  # the first tokens see fewer keys
    return keys_per_token / len(setup.config.windows) / length


def sent(step: Step) -> Counter[str]:
    """Returns the bytes that a rank sends in a step, by axis: for each, the maximum over the
    pipeline."""
    found = Counter[str]()
    for stage in range(step.setup.dims.pp):
        found |= sent_by(step, stage, rank_cost(step.setup, stage, step.micro_batch))
    return found


def sent_by(step: Step, stage: int, computed: Cost) -> Counter[str]:
    """Returns the bytes that the rank at this stage of the pipeline sends in a step, by axis.

    An algorithm sends at least these: all-gather and reduce-scatter over s ranks (s - 1) / s of the
    unsharded tensor, all-reduce twice that.
    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    setup = step.setup
    dims = setup.dims
    precision = setup.precision
    held = held_by(setup, stage)
    params = held.params(setup)
    compute = NUM_BYTES[precision.compute]
    reduce = NUM_BYTES[precision.reduce]
    total = Counter({axis: step.num_micro_batches * size for axis, size in computed.sent.items()})

    # FSDP gathers and reduces once per schedule of a pipeline, and each gradient-accumulation step
    # is a schedule.
    repeats = step.accum if dims.pp > 1 else 1
    num_reductions = step.accum if dims.sync_each_micro_step else repeats
    if dims.keeps_weights:
        gathered = params * repeats
    else:
        blocks = held.blocks * units(setup)["block"]
        gathered = (params + blocks) * step.accum  # the backward pass gathers blocks again
    shards = dims.size("shard")
    shard_axis = "shard" if dims.cp > 1 else "dp_shard"
    unsharded = compute * gathered + reduce * params * num_reductions
    total[shard_axis] = unsharded * (shards - 1) // shards
    replicas = dims.dp_replicate
    total["dp_replicate"] = 2 * reduce * params * repeats // shards * (replicas - 1) // replicas

    if dims.tp > 1:
        summands = compute * computed.summands * num_reductions
        total["tp"] += int(summands * 2 * (dims.tp - 1) / dims.tp)
    if dims.pp > 1:
        # Hidden states go to the next stage, and their gradients to the one before, unless the rank
        # holds that stage too.
        last = dims.pp * dims.virtual_stages - 1
        forward = [each for each in held.stages if each < last and each + 1 not in held.stages]
        backward = [each for each in held.stages if each > 0 and each - 1 not in held.stages]
        hidden = (
            step.accum * step.num_sequences * setup.seq_length // dims.cp * setup.config.hidden_size
        )
        if dims.sequence_parallel:
            hidden //= dims.tp
        total["pp"] = compute * hidden * (len(forward) + len(backward))
    return Counter({axis: int(size) for axis, size in total.items() if size})


def sent_summary(sizes: Mapping[str, int]) -> str:
    """Returns the line at the start of a run; "" if nothing is sent."""
    parts = ", ".join(f"{axis} {rounded_bytes(size)}" for axis, size in sizes.items())
    return f"sent per rank and step: {parts}" if parts else ""


def _link(dims: ParallelDims, axis: str, device: Device, devices_per_node: int) -> float:
    """Returns the bytes/s of a ring over the axis: in a node, or by one link per rank there."""
    innermost = JOINED.get(axis, (axis,))[-1]
    stride = 1
    for inner in AXES[AXES.index(innermost) + 1 :]:
        stride *= dims.size(inner)
    ranks_per_node = min(dims.size(axis), max(1, devices_per_node // stride))
    within = 1e9 * device.node_gb_s
    if ranks_per_node == dims.size(axis):
        return within
    between = 1e9 * device.net_gb_s * ranks_per_node
    if ranks_per_node == 1:
        return between
    return min(within, between)
