"""Measures a step of each optimizer, and the bytes of its state, beside torch's fused AdamW in the same run.

    python benchmarks/bench_optim.py [--variant=quickstart --optimizers=adamw,muon --rounds=10 --output=FILE]

The model's parameters get random gradients; one process, no forward or backward pass. A round steps every
optimizer once, so that what disturbs the machine disturbs all. `torch_adamw` is torch.optim.AdamW(fused=True)
as anybody would build it. `bf16_pure` is AdamW over weights, gradients and moments in bf16, rounded by
chance, `bf16_pure_compiled` the same where blocks are compiled. Time is the median of the rounds after the
first two. A package that is missing leaves its optimizer out.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from result_file import about_machine, parser_of, write_result

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402

from fms_fsdp.config import FP32, OptimConfig, Precision  # noqa: E402
from fms_fsdp.config.optim import OPTIMIZERS  # noqa: E402
from fms_fsdp.models.flops import num_params  # noqa: E402
from fms_fsdp.models.init import init_weights  # noqa: E402
from fms_fsdp.models.llama import Llama  # noqa: E402
from fms_fsdp.models.variants import VARIANTS  # noqa: E402
from fms_fsdp.optim.optimizers import Optimizers, build_optimizers, state_bytes  # noqa: E402
from fms_fsdp.parallel.dtypes import cast_weights  # noqa: E402

REFERENCE, NOT_COUNTED = "torch_adamw", 2
PURE = ("bf16_pure", "bf16_pure_compiled")


def asked(name: str) -> tuple[OptimConfig, Precision]:
    """The flags that a contestant stands for."""
    precision = (
        Precision("bf16", weights="bf16", gradients="bf16", state="bf16") if name in PURE else FP32
    )
    return OptimConfig(optimizer="adamw" if name in (REFERENCE, *PURE) else name), precision


def build(name: str, model: Llama) -> Optimizers:
    """The optimizer over the model.

    Raises:
        ValueError: its package is missing.
    """
    if name == REFERENCE:
        return Optimizers(model, [torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)])
    section, precision = asked(name)
    cast_weights(model, precision)
    return build_optimizers(section, model, precision, compiled=name == "bf16_pure_compiled")


def timed_step(model: Llama, optimizers: Optimizers, device: torch.device) -> float:
    """Seconds of one step with new gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    norm = torch.ones((), device=device)
    wait(device)
    begin = time.perf_counter()
    optimizers.step(lambda base: base, norm)
    wait(device)
    return time.perf_counter() - begin


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    names = ",".join([*OPTIMIZERS, *PURE])
    parser = parser_of(__doc__, variant="quickstart", optimizers=names, rounds=10)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config, found, left_out = (
        VARIANTS[options.variant],
        dict[str, tuple[Llama, Optimizers]](),
        {},
    )
    for name in [REFERENCE, *options.optimizers.split(",")]:
        model = Llama(config).to(device)
        init_weights(model, 0)
        try:
            found[name] = model, build(name, model)
        except ValueError as error:
            left_out[name] = str(error)
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(options.rounds + NOT_COUNTED):
        for name, (model, optimizers) in found.items():
            times[name].append(timed_step(model, optimizers, device))
    medians = {name: statistics.median(each[NOT_COUNTED:]) for name, each in times.items()}
    results: dict[str, Any] = {}
    for name, seconds in medians.items():
        section, precision = asked(name)
        results[name] = {
            "step_ms": round(seconds * 1000, 3),
            "times_torch_adamw": round(seconds / medians[REFERENCE], 3),
            "bytes_a_parameter": round(
                state_bytes(section, config, precision) / num_params(config), 3
            ),
        }
        print(name, results[name], flush=True)
    record = about_machine() | {
        "device": device.type,
        "variant": options.variant,
        "rounds": options.rounds,
        "results": results,
        "left_out": left_out,
    }
    write_result(record, options.output)


if __name__ == "__main__":
    main()
