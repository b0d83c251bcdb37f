"""What a user asks in place of a training: `--version`, `--list_variants`, `--rules` and `--layouts`. The
first two work without torch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from fms_fsdp.config import ParallelConfig
from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.errors import print_and_end
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.variants import all_variants
from fms_fsdp.predict.memory import estimate_memory


def print_listing(argv: Sequence[str]) -> None:
    """Prints the listing that `argv` asks for and ends the process with status 0, if it asks for one."""
    listings = {"--version": version, "--list_variants": variants, "--list-variants": variants}
    listings |= {"--rules": rules, "--layouts": layouts}
    for argument in argv:
        if argument in listings:
            print_and_end(listings[argument]())


def version() -> str:
    """The versions of this package, where it is installed, and of torch."""
    installed = {each.name.replace("-", "_"): each.version for each in importlib.metadata.distributions()}
    return ", ".join(f"{name} {installed[name]}" for name in ("fms_fsdp", "torch") if name in installed)


def rules() -> str:
    """All rules that a launch is judged by, as a table."""
    from fms_fsdp.spec.rules import listing  # imports torch

    return listing()


def layouts() -> str:
    """What works with which axis, as a table."""
    from fms_fsdp.parallel.rules import features_table  # imports torch

    return features_table()


def variants() -> str:
    """A table of the variants: shape, parameters, and GiB of training state a rank."""
    head = f"{'variant':<14}{'layers':>6}{'width':>7}{'parameters':>16}"
    lines = [f"{'':43}  GiB of weights, gradients and moments on each of"]
    lines.append(head + "".join(f"{ranks:>10}" for ranks in ("1 rank", "8 ranks", "64 ranks")))
    for name, config in all_variants().items():
        count = num_params(config)
        shape = f"{name:<14}{config.num_layers:>6}{config.hidden_size:>7}{count:>16,}"
        sharded = [ParallelDims("fsdp", 1, ranks) for ranks in (1, 8, 64)]
        gib = [estimate_memory(config, dims, ParallelConfig()).state / 2**30 for dims in sharded]
        lines.append(shape + "".join(f"{each:10,.2f}" for each in gib))
    return "\n".join(lines)
