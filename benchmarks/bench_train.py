"""Measures training throughput for every combination of flags: runs of main_training.py on dummy data.

    python benchmarks/bench_train.py --model_variant=194m --seq_length=512 --batch_size=2,4,8 \\
        --use_torch_compile=false,true
    python benchmarks/bench_train.py --nproc=8 --model_variant=7b,llama3_8b --sharding_strategy=fsdp,hsdp \\
        --seq_length=4096,8192 --batch_size=1,2,4,8 --fsdp_activation_checkpointing=false,true
    python benchmarks/bench_train.py --use_dummy_dataset=False --data_path=data/quickstart-2 --seq_length=128 \\
        --num_steps=780 --eval_interval=780 --learning_rate=1.2e-3,2e-3

Any flag of main_training.py can have several values, joined by commas; only --output_dir is the benchmark's
own. Batch sizes run in ascending order. If one runs out of memory, the larger ones of the same combination
are skipped. A rate is the median over reports of four steps, without the first report; --num_steps and
--report_interval change that. `--torchrun` starts one process by torchrun too. Each sweep
writes one result file with hardware, versions, command and every report, also of validations. The table marks
the fastest combination of each variant and length.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from result_file import about_machine, write_result

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
OWN = {
    "nproc": "1",
    "rounds": "5",
    "timeout_s": "1800",
    "output": "",
    "torchrun": "false",
}
STEPS_A_REPORT = 4
Case = dict[str, str]


def parse(argv: list[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Our own settings, and the values of each flag to sweep."""
    own, swept = dict(OWN), {}
    for argument in argv:
        name, given, value = argument.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not argument.startswith("--"):
            raise SystemExit(f"error: argument ({argument}) must be written --name=value,value")
        if name in own:
            own[name] = value if given else "true"
        else:
            swept[name] = value.split(",") if given else ["true"]
    if "batch_size" in swept:
        swept["batch_size"].sort(key=int)
    return own, swept


def cases(swept: dict[str, list[str]]) -> list[Case]:
    """All combinations; the batch size changes fastest."""
    names = sorted(swept, key=lambda name: name == "batch_size")
    return [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(swept[name] for name in names))
    ]


def settings_of(case: Case, own: dict[str, str]) -> Case:
    """The flags of a run: those of the case, and what it leaves open."""
    interval = int(case.get("report_interval", STEPS_A_REPORT))
    usual = {
        "use_dummy_dataset": "True",
        "report_interval": str(interval),
        "checkpoint_interval": "0",
    }
    usual |= {"num_steps": str(interval * (int(own["rounds"]) + 1)), "save_last": "False"}
    return usual | case


def run_case(case: Case, own: dict[str, str]) -> dict[str, Any]:
    """One run: its reports and their medians, or why there are none."""
    folder = Path(tempfile.mkdtemp(prefix="bench_train_"))
    settings = settings_of(case, own)
    flags = [f"--{name}={value}" for name, value in settings.items()]
    flags.append(f"--output_dir={folder}")
    launch = [sys.executable]
    if own["nproc"] != "1" or own["torchrun"] == "true":
        # by its address: the name of a machine need not resolve
        launch += ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        launch += [f"--nproc_per_node={own['nproc']}"]
    command = [*launch, "main_training.py", *flags]
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=float(own["timeout_s"])
        )
        status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        reports, validations = read_reports(folder, int(settings["report_interval"]))
    except subprocess.TimeoutExpired:
        return {"case": case, "problem": f"no end after {own['timeout_s']} s"}
    except (OSError, ValueError):
        return {
            "case": case,
            "problem": (done.stderr.strip().splitlines() or ["no status.json"])[-1][
                :300
            ].removeprefix("error: "),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result: dict[str, Any] = {"case": case, "command": " ".join(["python", *command[1:]])}
    result |= {"wall_s": round(time.perf_counter() - begin, 1), "reports": reports}
    result |= {"validations": validations} if validations else {}
    if done.returncode:
        return result | {"problem": status["reason"] or f"exit status {done.returncode}"}
    if not reports:
        return result | {"problem": "no report after the first interval; raise --num_steps"}
    for name in (
        "tokens_per_sec_per_device",
        "tflops_per_device",
        "mfu",
        "hfu",
        "step_time_ms",
        "peak_mem_gib",
    ):
        values = [report[name] for report in reports if report.get(name) is not None]
        if values:
            result[name] = max(values) if name == "peak_mem_gib" else statistics.median(values)
    return result


def lacks_memory(problem: str) -> bool:
    """Returns whether a case did not fit; an illegal memory access is another problem."""
    return "memory" in problem and "memory access" not in problem


def read_reports(folder: Path, interval: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the reports of training after the first interval, which compiles, and of validation."""
    records = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    reports = [record for record in records if "loss" in record and record["step"] > interval]
    return reports, [record for record in records if "eval/loss" in record]


def table(results: list[dict[str, Any]]) -> str:
    """Markdown; * marks the best of each variant and length."""
    varied = [
        name for name in results[0]["case"] if len({result["case"][name] for result in results}) > 1
    ]
    varied = varied or ["model_variant"]
    best: dict[tuple[str, str], float] = {}
    for result in results:
        key = (result["case"].get("model_variant", ""), result["case"].get("seq_length", ""))
        best[key] = max(best.get(key, 0.0), result.get("tokens_per_sec_per_device", 0.0))
    columns = ["tokens/s/device", "TFLOP/s/device", "MFU", "HFU", "step ms", "GiB"]
    lines = [
        "| " + " | ".join([*varied, *columns]) + " |",
        "|" + "---|" * (len(varied) + len(columns)),
    ]
    for result in results:
        cells = [result["case"].get(name, "") for name in varied]
        if "problem" in result:
            word = result["problem"].partition(":")[0][:60]
            if word != "skipped" and lacks_memory(result["problem"]):
                word = "out of memory"
            lines.append("| " + " | ".join([*cells, word, *[""] * 5]) + " |")
            continue
        rate = result["tokens_per_sec_per_device"]
        key = (result["case"].get("model_variant", ""), result["case"].get("seq_length", ""))
        shown = [f"{rate:,.0f}{' *' if rate == best[key] else ''}"]
        shown += [
            f"{result[name]:.3g}" if name in result else ""
            for name in ("tflops_per_device", "mfu", "hfu")
        ]
        shown += [f"{result['step_time_ms']:.0f}", f"{result['peak_mem_gib']:.2f}"]
        lines.append("| " + " | ".join([*cells, *shown]) + " |")
    return "\n".join(lines)


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    own, swept = parse(sys.argv[1:])
    results: list[dict[str, Any]] = []
    full: list[Case] = []  # combinations without their batch size that ran out of memory
    for case in cases(swept):
        rest = {name: value for name, value in case.items() if name != "batch_size"}
        if rest in full:
            results.append({"case": case, "problem": "skipped: a smaller batch is out of memory"})
            continue
        result = run_case(case, own)
        if lacks_memory(result.get("problem", "")):
            full.append(rest)
        results.append(result)
        told = (
            result.get("problem") or f"{result['tokens_per_sec_per_device']:,.0f} tokens/s/device"
        )
        print(
            f"{' '.join(f'{name}={value}' for name, value in case.items())}: {told}",
            file=sys.stderr,
            flush=True,
        )
    print(table(results))
    write_result(
        about_machine() | {"results": results}, Path(own["output"]) if own["output"] else None
    )


if __name__ == "__main__":
    main()
