"""How much of its data sheet a device reaches: a few numbers for each generation of devices.

They are fitted on published runs: `python benchmarks/judge_plan.py --calibrate FILE.tsv …` prints them, and
docs/plan.md shows how well it predicts what it was not fitted on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Curves:
    """The efficiencies of a generation of devices.

    products: share of the peak that large matrix products reach; power and clocks leave no more.
    edges: part of a product's reads and writes that its multiplications do not hide; small matrices feel it.
    attention: share of the peak of attention with heads of 128; softmax runs beside the products.
    small_heads: the same for heads of 64 against heads of 128; a tile then has half the products per softmax.
    old_attention: the share of the first flash kernels (2022), which older programs use.
    eager, compiled: time of what memory bounds, against its bytes at the full bandwidth: no kernel reaches
        it, and an eager program writes what the compiler keeps in registers.
    logits: bytes moved for each logit; softmax and loss read and write logits several times.
    float8: how much faster products in float8 are; scaling costs part of the doubled peak.
    kernels: seconds a layer and pass in which the device waits for the next kernel.
    node, net: share of a link's bandwidth that collectives reach, within a node and between nodes.
    hop: seconds that each node of a ring adds to a collective.
    overlapped: share of the messages of tp that stays visible where products and messages overlap.
    exposed: share of FSDP's messages that computation does not hide: the first and last unit of each pass.
    optimizer: time of the optimizer against its bytes at the full bandwidth.
    """

    products: float
    attention: float
    old_attention: float
    eager: float
    compiled: float
    edges: float
    small_heads: float
    logits: float
    float8: float
    kernels: float
    node: float
    net: float
    hop: float
    overlapped: float
    exposed: float
    optimizer: float


SHARED = dict(
    compiled=1.36,
    edges=1.76,
    small_heads=0.936,
    logits=14.4,
    float8=1.7,
    kernels=0.000116,
    node=0.74,
    net=0.595,
    hop=1.45e-05,
    overlapped=0.661,
    exposed=0.455,
    optimizer=1.2,
)
CURVES = {
    "ampere": Curves(products=0.866, attention=0.45, old_attention=0.328, eager=2.4, **SHARED),
    "hopper": Curves(products=0.69, attention=0.275, old_attention=0.178, eager=1.92, **SHARED),
}
