"""Strategies and world sizes to layouts."""

from __future__ import annotations

import pytest

from fms_fsdp.config import ParallelConfig
from fms_fsdp.mesh import Layout, build_mesh, resolve_layout


def layout(variant: str = "tiny", world: int = 8, local: int = 4, **flags: object) -> Layout:
    return resolve_layout(
        ParallelConfig(**flags),  # type: ignore[arg-type]
        variant=variant,
        world_size=world,
        local_world_size=local,
    )


def test_defaults_follow_variant_and_world() -> None:
    assert layout("7b") == layout("llama2_13b") == Layout("hsdp", 2, 4)
    assert layout("70b") == layout("34b") == Layout("fsdp", 1, 8)
    assert layout("7b", world=1, local=1) == Layout("none", 1, 1)


def test_strategies_fill_the_world_in_any_case() -> None:
    assert layout(sharding_strategy="FSDP") == Layout("fsdp", 1, 8)
    assert layout(sharding_strategy="HSDP", hsdp_shard_size=2) == Layout("hsdp", 4, 2)
    assert layout(sharding_strategy="hsdp", hsdp_shard_size=8) == Layout(
        "hsdp", 1, 8
    )  # a group over several nodes
    assert layout(sharding_strategy="ddp") == Layout("ddp", 8, 1)
    assert layout(sharding_strategy="hsdp", world=1024, local=8) == Layout("hsdp", 128, 8)
    assert layout(sharding_strategy="hsdp", world=1024, local=8).dp_size == 1024
    assert build_mesh(Layout("none", 1, 1), "cpu") is None


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            dict(sharding_strategy="fdsp"),
            r"--sharding_strategy \(fdsp\) must be one of: fsdp, hsdp, ddp, none",
        ),
        (
            dict(sharding_strategy="none"),
            r"--sharding_strategy \(none\) is for one process, not for a world of 8",
        ),
        (
            dict(sharding_strategy="hsdp", hsdp_shard_size=3),
            r"--hsdp_shard_size \(3\) must divide the world size \(8 = replicas x hsdp_shard_size\); valid sizes: 1, 2, 4, 8",
        ),
        (
            dict(sharding_strategy="hsdp", local=5),
            r"--hsdp_shard_size \(5\), the devices of a node, must divide",
        ),
    ],
)
def test_an_impossible_layout_names_its_factors(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout(**flags)  # type: ignore[arg-type]
