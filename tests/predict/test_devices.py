"""Devices: the shipped table, a table of one's own, and every error."""

from __future__ import annotations

from pathlib import Path

import pytest

from fms_fsdp.errors import UserError
from fms_fsdp.predict.devices import find_device, known_device, peak_16bit_flops

OWN = """
[mine]
memory_gib = 24
tflops = { bf16 = 100, fp16 = 100 }
memory_gb_s = 1000
node_gb_s = 32
net_gb_s = 12.5
watts = 300
source = "a data sheet"
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(
    ("gpu", "tflops"),
    [
        ("Tesla V100-SXM2-32GB", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA GeForce RTX 3080", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100 80GB PCIe MIG 2g.20gb", None),
    ],
)
def test_peak_is_known_by_the_name(gpu: str, tflops: float | None) -> None:
    assert peak_16bit_flops(gpu) == (None if tflops is None else tflops * 1e12)


@pytest.mark.parametrize("name", ["a100_80gb", "h100_96gb_500w", "h100_pcie", "gh200", "mi300x"])
def test_shipped_device_names_its_data_sheet(name: str) -> None:
    device = find_device(name)
    assert device.source.startswith("https://") and 0 < device.clock <= 1


def test_less_power_lowers_the_clock() -> None:
    assert find_device("h100_80gb").clock == 1
    assert find_device("h100_96gb_500w").clock == pytest.approx((500 / 700) ** (1 / 3))


def test_a_device_of_ones_own(own: Path) -> None:
    mine = find_device("mine", str(own))
    assert (
        mine.memory_bytes == 24 * 2**30
        and mine.peak("fp16") == 1e14
        and mine.generation == "hopper"
    )
    assert find_device("h200", str(own)) == find_device("h200")
    changed = own.with_name("changed.toml")
    changed.write_text(OWN.replace("[mine]", "[h200]"))
    assert find_device("h200", str(changed)).memory_gib == 24


def test_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(
        UserError,
        match=r"--device=h10 must be described in .* be one of a100_40gb, .*did you mean h",
    ):
        find_device("h10")
    with pytest.raises(
        UserError, match=r"--hardware=FILE\.toml, as fms_fsdp/predict/devices\.toml"
    ):
        find_device("abacus")


def test_mfu_of_a_gpu_without_bf16_is_by_the_peak_of_fp16() -> None:
    assert peak_16bit_flops("Tesla T4") == 65e12
    with pytest.raises(UserError, match="no matmuls in bf16, .* set --precision=fp16, or"):
        find_device("t4").peak("bf16")


def test_a_device_without_such_products_says_which_it_has(own: Path) -> None:
    with pytest.raises(
        UserError, match=r"--device=mine has no matmuls in float8, only in bf16, fp16; set"
    ):
        find_device("mine", str(own)).peak("float8")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("watts = 300", "", "watts is missing or unknown; the fields are memory_gib, tflops"),
        ("watts = 300", "watts = 'many'", r"watts=many must be a number above 0"),
        ("watts = 300", "watts = true", r"watts=True must be a number above 0"),
        ("bf16 = 100, fp16 = 100", "fp64 = 100", "must have a peak for bf16, or for fp16 on"),
        ("{ bf16 = 100, fp16 = 100 }", "100", r"tflops=100 must have a peak"),
        ("watts = 300", "watts = 300\ngeneration = 'amper'", r"generation=amper must be one of"),
        ("[mine]", "mine = 3\n[other]", "device mine: .* is missing or unknown"),
        ("[mine]", "[mine", "cannot be read: .*Expected"),
    ],
)
def test_a_bad_table_is_refused_in_one_line(old: str, new: str, said: str, own: Path) -> None:
    own.write_text(OWN.replace(old, new))
    with pytest.raises(UserError, match=said) as error:
        find_device("mine", str(own))
    assert str(error.value).startswith(f"--hardware={own}") and "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "none.toml", tmp_path, binary):
        with pytest.raises(UserError, match=r"--hardware=.* cannot be read: "):
            find_device("h200", str(path))


@pytest.mark.parametrize(
    ("name", "gib", "found"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100_80gb"),
        ("NVIDIA H100", 94.5, "h100_96gb_500w"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100_40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100_80gb"),
        ("AMD Instinct MI300X", 191.5, "mi300x"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, None),
        ("NVIDIA RTX A6000", 47.4, "a6000"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA GeForce RTX 3090", 23.6, "rtx3090"),
        ("NVIDIA GeForce RTX 5090", 31.4, "rtx5090"),
        ("NVIDIA GeForce RTX 3080", 9.8, None),
        ("Tesla T4", 14.7, "t4"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100_32gb"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100_16gb"),
        ("Tesla V100-PCIE-16GB", 15.8, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.7, None),
    ],
)
def test_a_gpu_is_known_by_the_name_of_its_driver_and_its_memory(
    name: str, gib: float, found: str | None
) -> None:
    device = known_device(name, int(gib * 2**30))
    assert (device.name if device else None) == found
