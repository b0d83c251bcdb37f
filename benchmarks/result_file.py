"""Arguments, result file and machine description of the scripts in this folder.

A result goes to the temporary folder unless --output names a file, so no script changes the checkout by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def parser_of(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Returns a parser of --output and one option per default, which has the type of its default."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--output", type=Path, help="result file (default: a temporary file)")
    return parser


def about_machine() -> dict[str, Any]:
    """Returns the command, date, hardware, load and versions."""
    import torch

    from fms_fsdp.versions import versions

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "hardware": {
            "cpu": models[0] if models else platform.machine(),
            "cores": os.cpu_count(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "threads": torch.get_num_threads(),
            "load_before": os.getloadavg()[0],
        },
        "versions": versions(),
    }


def write_result(result: Mapping[str, Any], output: Path | None) -> None:
    """Writes the result to `output`, by default a new file in the temporary folder; prints its path."""
    path = output or Path(tempfile.mkdtemp(prefix="benchmark_")) / "result.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}", file=sys.stderr)
