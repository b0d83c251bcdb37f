"""The stretch of rotary frequencies that `--rope_scaling` writes as a text."""

from __future__ import annotations

from fms_fsdp.config.values import parse_number
from fms_fsdp.errors import UserError
from fms_fsdp.models.variants import RopeScaling


def parse_scaling(text: str) -> RopeScaling | None:
    """`linear:4`, `llama3:8` or `llama3:8:1:4:8192`; a linear one of 1 is none.

    Raises:
        UserError: not such a text.
    """
    kind, *numbers = text.split(":")
    values = [float(parse_number(number) or 0) for number in numbers]
    lengths = {"linear": (1,), "llama3": (1, 4)}.get(kind, ())
    if (
        len(values) not in lengths
        or min(values) < 1
        or (len(values) == 4 and values[1] >= values[2])
    ):
        raise UserError(
            f"--rope_scaling ({text}) must be linear:FACTOR or llama3:FACTOR[:LOW:HIGH:LENGTH], of numbers "
            "from 1 on, LOW below HIGH; write the flag so"
        )
    if kind == "linear":
        return RopeScaling(values[0], kind="linear") if values[0] > 1 else None
    factor, low, high, length = values if len(values) == 4 else (*values, 1.0, 4.0, 8192.0)
    return RopeScaling(factor, low, high, int(length))
