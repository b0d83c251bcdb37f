"""What the results of this folder's scripts begin with, and where they go: never into the checkout by
themselves."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HELP = "result file (default: a new one in the temporary folder)"


def about_machine() -> dict[str, Any]:
    """The command, the hardware and the versions: what figures depend on."""
    import torch

    from fms_fsdp.distributed.runtime import versions

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    hardware = {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "gpus": gpus,
    }
    return {
        "command": " ".join(["python", *sys.argv]),
        "hardware": hardware
        | {"threads": torch.get_num_threads(), "load_before": os.getloadavg()[0]},
        "versions": versions(),
    }


def write_result(result: Mapping[str, Any], output: Path | None) -> None:
    """Writes the file that --output names, or else a new one in the temporary folder; prints its path."""
    path = output or Path(tempfile.mkdtemp(prefix="benchmark_")) / "result.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path}", file=sys.stderr)
