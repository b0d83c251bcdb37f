"""`--version` and `--list_variants`: print a listing instead of training. Work without torch."""

from __future__ import annotations

from collections.abc import Sequence

from fms_fsdp.console import print_and_end
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.variants import VARIANTS


def print_listing(argv: Sequence[str]) -> None:
    """Prints the listing that `argv` asks for and ends the process with status 0, if it asks for one."""
    listings = {"--version": version, "--list_variants": variants, "--list-variants": variants}
    for argument in argv:
        if argument in listings:
            print_and_end(listings[argument]())


def version() -> str:
    """Returns the versions of torch and, if it is installed, of this package."""
    import importlib.metadata

    versions = dict[str, str]()
    for each in importlib.metadata.distributions():
        name = each.name.replace("-", "_")
        if name in ("fms_fsdp", "torch"):
            versions.setdefault(name, each.version)  # the first one is imported
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def variants() -> str:
    """Returns a table of the variants: shape, parameters, and GiB of training state per rank."""
    head = f"{'variant':<14}{'layers':>6}{'width':>7}{'parameters':>16}"
    lines = [f"{'':43}  GiB of weights, gradients and moments on each of"]
    lines.append(head + "".join(f"{ranks:>10}" for ranks in ("1 rank", "8 ranks", "64 ranks")))
    for name, config in VARIANTS.items():
        count = num_params(config)
        shape = f"{name:<14}{config.num_layers:>6}{config.hidden_size:>7}{count:>16,}"
        gib = [16 * count / ranks / 2**30 for ranks in (1, 8, 64)]  # in fp32, with AdamW
        lines.append(shape + "".join(f"{each:10,.2f}" for each in gib))
    return "\n".join(lines)
