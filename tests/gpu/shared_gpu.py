"""Part 6 of scripts/gpu_session.sh: ranks that share one GPU under real NCCL, against one rank on it.

    python -m tests.gpu.shared_gpu FOLDER [--device=cpu] [--cases=ddp,kill] [--budget_s=300]

There is one start per world size: its ranks run every case of that size, each with a mesh of its own. A line
of FOLDER/results.jsonl is written when a case ends, so a later call resumes; cases that did not pass are
repeated. A group that fails or hangs is ended, and the rest of its cases get another start.

A case that does not pass is run again by gloo on the same device, and plain torch runs the same collectives
without the product. Where plain torch fails too, the fault is not ours.

On a CPU the ranks use gloo, and blocks are compiled without code (aot_eager), unless --compile_backend says
otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu.nodes import free_port, node_environment
from tests.gpu.shared_cases import STEPS, all_cases, collectives_of, references
from tests.gpu.shared_life import LIFE, LifeFailed, Session
from tests.parallel.table import LAYOUTS, Row

PASSES = "agrees"
OURS = "ours"
NOT_OURS = {"cuda": "NCCL's sharing of a GPU", "cpu": "torch's gloo"}
REJECTED = "–"
GRACE_S = 10.0  # for the other ranks to fail by themselves, after one has
POLL_S = 0.05
PRELOAD = (
    "main_training",  # first: it sets the allocator before torch is imported
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "fms_fsdp.checkpoint.io",
    "fms_fsdp.plan",
    "fms_fsdp.run.startup_log",
    "fms_fsdp.train",
    "fms_fsdp.parallel.context",
    "fms_fsdp.parallel.parallelize",
    "fms_fsdp.parallel.pipeline",
    "fms_fsdp.parallel.tensor",
)


class Outcome(NamedTuple):
    """How a case ended: trained, rejected, failed or hung."""

    status: str
    losses: list[float] = []
    norms: list[float] = []
    reason: str = ""


@dataclass(frozen=True)
class Start:
    """One start of a group of ranks; `task` is `train` or `plain`."""

    folder: Path
    device_type: str
    world: int
    cases: list[Row]
    compile_backend: str
    timeout_s: float
    backend: str = "auto"
    task: str = "train"


# --- in a rank ---


def run_rank(start: Start, rank: int, port: int, folder: Path) -> None:
    """Runs the cases one after the other, as a rank; a case that fails ends the process."""
    os.environ.update(node_environment(rank, start.world, port))
    if start.device_type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    logs = start.folder / "logs"
    redirect_output(logs / f"start of world {start.world}.rank{rank}.txt")

    import torch

    from fms_fsdp.config import ParallelConfig, TrainingConfig
    from fms_fsdp.distributed import runtime
    from fms_fsdp.distributed.world import World

    if start.device_type == "cpu":
        torch.set_num_threads(1)
    if start.compile_backend:
        torch.compile = partial(torch.compile, backend=start.compile_backend)
    world = World.from_env()
    device = runtime.pick_device(world)
    section = ParallelConfig(
        sharding_strategy="none" if start.world == 1 else "fsdp",
        dist_backend=start.backend,
        matmul_precision="highest",
    )
    runtime.init_distributed(section, TrainingConfig(), world, device)

    for case in start.cases:
        redirect_output(logs / f"{slug(case.name)}.{start.task}.{start.backend}.rank{rank}.txt")
        outcome = run_case(start, case, world, device)
        line = {"case": case.name, **outcome._asdict()}
        with open(folder / f"rank{rank}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if outcome.status == "failed":
            os._exit(1)  # the other ranks may wait for this one
    runtime.sum_over_ranks([1])  # no rank leaves while another is in a collective
    os._exit(0)


def run_case(start: Start, case: Row, world: Any, device: Any) -> Outcome:
    """Returns how the case ended on this rank (collective)."""
    from fms_fsdp.errors import UserError

    try:
        if start.task == "plain":
            run_collectives(collectives_of(case.layout), device)
            return Outcome("trained")
        return train_case(case, world, device)
    except UserError as error:
        return Outcome("rejected", reason=str(error))
    except Exception as error:
        traceback.print_exc()
        return Outcome("failed", reason=f"{type(error).__name__}: {error}"[:500])


def train_case(case: Row, world: Any, device: Any) -> Outcome:
    """Trains the case in the process group of the start (collective)."""
    from tests.parallel.train_rows import cut_into_documents, train_row

    trained = train_row(case, world, device, STEPS, batch_of=cut_into_documents)
    return Outcome("trained", trained.values("loss"), trained.values("grad_norm"))


def run_collectives(names: Sequence[str], device: Any) -> None:
    """Runs collectives by torch alone, in fp32 and bf16, and asserts their values (collective)."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    rank = dist.get_rank()
    total = world * (world + 1) // 2
    for dtype in (torch.float32, torch.bfloat16):
        own = torch.full((world, 4096), rank + 1.0, dtype=dtype, device=device)
        other = torch.zeros_like(own)
        everyones = torch.arange(1, world + 1, dtype=dtype, device=device)[:, None]
        if "all_reduce" in names:
            summed = own.clone()
            dist.all_reduce(summed)
            assert (summed == total).all(), "all_reduce"
        if "all_gather" in names:
            dist.all_gather_into_tensor(other, own[:1])  # gloo compares shapes
            assert (other == everyones).all(), "all_gather"
        if "reduce_scatter" in names:
            part = torch.zeros_like(own[:1])
            dist.reduce_scatter_tensor(part, own)
            assert (part == total).all(), "reduce_scatter"
        if "all_to_all" in names:
            dist.all_to_all_single(other, own)
            assert (other == everyones).all(), "all_to_all"
        if "send_and_receive" in names:
            received = torch.zeros_like(own)
            following = dist.P2POp(dist.isend, own, (rank + 1) % world)
            previous = dist.P2POp(dist.irecv, received, (rank - 1) % world)
            for work in dist.batch_isend_irecv([following, previous]):
                work.wait()
            assert (received == (rank - 1) % world + 1).all(), "send_and_receive"


def redirect_output(path: Path) -> None:
    """Appends to `path` what this process prints from here on, NCCL's lines too."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def slug(name: str) -> str:
    """Returns the name as part of a file's name."""
    return re.sub(r"[^\w.=]+", "_", name)


# --- in the process that starts the ranks ---


def outcomes(start: Start, deadline: float) -> Iterator[tuple[Row, Outcome]]:
    """Yields each case when it ends. A group that fails or hangs is replaced by another for the cases
    that are left; at `deadline` (time.monotonic) the group is ended."""
    left = list(start.cases)
    while left and time.monotonic() < deadline:
        for case, outcome in outcomes_of_group(replace(start, cases=left), deadline):
            left = left[left.index(case) + 1 :]
            yield case, outcome


def outcomes_of_group(start: Start, deadline: float) -> Iterator[tuple[Row, Outcome]]:
    """Yields each case of one group of ranks until one fails or hangs, or time is up."""
    folder = start.folder / "starts" / f"{time.time_ns()}"
    folder.mkdir(parents=True)
    (start.folder / "logs").mkdir(exist_ok=True)
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=run_rank, args=(start, rank, port, folder))
        for rank in range(start.world)
    ]
    for rank in ranks:
        rank.start()
    try:
        for case in start.cases:
            outcome = wait_for_case(case, ranks, folder, start.timeout_s, deadline)
            if outcome is None:
                return
            yield case, outcome
            if outcome.status in ("failed", "hung"):
                return
        for rank in ranks:
            rank.join(GRACE_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def wait_for_case(
    case: Row, ranks: Sequence[BaseProcess], folder: Path, timeout_s: float, deadline: float
) -> Outcome | None:
    """Returns how the case ended on all ranks; None if `deadline` comes first."""
    begin = time.monotonic()
    given_up = begin + timeout_s
    while True:
        is_over = all(not rank.is_alive() for rank in ranks)  # before the files are read
        lines = [line_of(folder / f"rank{rank}.jsonl", case.name) for rank in range(len(ranks))]
        ended = [line for line in lines if line is not None]
        if len(ended) == len(ranks):
            return joined(ended)
        failed = [line for line in ended if line.status == "failed"]
        if failed or any(rank.exitcode not in (0, None) for rank in ranks):
            given_up = min(given_up, time.monotonic() + GRACE_S)
        now = time.monotonic()
        if is_over or now > given_up:
            if failed:
                return failed[0]
            statuses = [rank.exitcode for rank in ranks]
            if set(statuses) == {255}:  # as multiprocessing says where its server was ended
                reason = (
                    "the process that forks the ranks was ended, by memory or a signal; run again"
                )
                return Outcome("failed", reason=reason)
            if any(status not in (0, None) for status in statuses):
                return Outcome("failed", reason=f"exit statuses {statuses}")
            return Outcome("hung", reason=f"not over after {now - begin:.0f} s")
        if now > deadline:
            return None
        time.sleep(POLL_S)


def line_of(path: Path, case: str) -> Outcome | None:
    """Returns what a rank wrote of a case; None if it has not ended there."""
    if not path.exists():
        return None
    for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not text.endswith("\n"):  # being written
            continue
        line = json.loads(text)
        if line.pop("case") == case:
            return Outcome(**line)
    return None


def joined(ended: list[Outcome]) -> Outcome:
    """Returns the outcome of all ranks: they must agree on every value."""
    for rank, outcome in enumerate(ended):
        if outcome.status == "failed":
            return outcome
        if outcome.status != ended[0].status:
            reason = f"rank 0 {ended[0].status}, rank {rank} {outcome.status}"
            return Outcome("failed", reason=reason)
        if (outcome.losses, outcome.norms) != (ended[0].losses, ended[0].norms):
            reason = f"rank {rank} reports other values than rank 0: {outcome.losses}"
            return Outcome("failed", reason=reason)
    return ended[0]


def difference(found: list[float], expected: list[float]) -> float:
    """Returns the largest relative difference; infinity where a value is not finite or missing."""
    if len(found) != len(expected) or not found:
        return math.inf
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        relative = abs(one / other - 1)
        if not math.isfinite(relative):
            return math.inf
        largest = max(largest, relative)
    return largest


def row_of(case: Row, outcome: Outcome, reference: Outcome) -> dict[str, Any]:
    """Returns the line of a case; `verdict` is still ours where it does not pass."""
    row: dict[str, Any] = {"case": case.name, "world": case.world}
    if outcome.status != "trained":
        return row | {"found": f"{outcome.status}: {outcome.reason}", "verdict": OURS}
    if reference.status != "trained":
        found = f"{case.reference.name} {reference.status}: {reference.reason}"
        return row | {"found": found, "verdict": OURS}
    loss = difference(outcome.losses, reference.losses)
    norm = difference(outcome.norms, reference.norms)
    agrees = loss <= case.bounds.loss and norm <= case.bounds.norm
    found = f"loss {loss:.2g}, gradient norm {norm:.2g}"
    return row | {"found": found, "verdict": PASSES if agrees else OURS}


class Results:
    """The lines of a session: results.jsonl of the cases, references.jsonl of the runs on one rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> dict[str, dict[str, Any]]:
        """Returns the last line of each case."""
        path = self._folder / name
        found = dict[str, dict[str, Any]]()
        if path.exists():
            for text in path.read_text(encoding="utf-8").splitlines():
                line = json.loads(text)
                found[line["case"]] = line
        return found

    def add(self, name: str, line: dict[str, Any]) -> None:
        """Appends a line."""
        with open(self._folder / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def has_passed(self, case: str) -> bool:
        """Returns whether a case need not run again."""
        line = self.read("results.jsonl").get(case)
        return line is not None and line["verdict"] != OURS

    def references(self) -> dict[str, Outcome]:
        """Returns the runs on one rank that trained."""
        lines = self.read("references.jsonl")
        found = dict[str, Outcome]()
        for name, line in lines.items():
            outcome = Outcome(line["status"], line["losses"], line["norms"], line["reason"])
            if outcome.status == "trained":
                found[name] = outcome
        return found


def run_references(start: Start, results: Results, deadline: float) -> dict[str, Outcome]:
    """Runs what the cases of `start` are compared with, unless a line of an earlier call has it."""
    found = results.references()
    missing = [case for case in references(start.cases) if case.name not in found]
    for case, outcome in outcomes(replace(start, world=1, cases=missing), deadline):
        results.add("references.jsonl", {"case": case.name, **outcome._asdict()})
        found[case.name] = outcome
    return found


def run_cases(
    start: Start, results: Results, expected: dict[str, Outcome], deadline: float
) -> Iterator[str]:
    """Runs the cases of one world size; yields a text when one ends."""
    for case, outcome in outcomes(start, deadline):
        reference = expected.get(case.reference.name)
        if reference is None:  # time was up before it ran
            continue
        row = row_of(case, outcome, reference)
        if is_rejected_by_machine(start.device_type, case, [outcome, reference]):
            row["verdict"] = REJECTED
        elif row["verdict"] == OURS and reference.status == "trained":
            row |= repeated(start, case)
        results.add("results.jsonl", row)
        yield f"{case.name}: {row['verdict']} ({row['found']})"


def is_rejected_by_machine(device_type: str, case: Row, ended: list[Outcome]) -> bool:
    """Returns whether a case is rejected for the machine's sake: it gets a dash. A GPU supports all that
    its version of torch does."""
    if not any(outcome.status == "rejected" for outcome in ended):
        return False
    major, minor = version("torch").split(".")[:2]
    return device_type == "cpu" or (int(major), int(minor)) < case.min_torch


def repeated(start: Start, case: Row) -> dict[str, str]:
    """Runs a case that did not pass by gloo, and its collectives by plain torch; returns the verdict."""
    alone = replace(start, cases=[case])
    row = dict[str, str]()
    if start.device_type == "cuda":
        by_gloo = next(outcomes(replace(alone, backend="gloo"), math.inf))[1]
        row["by gloo"] = f"{by_gloo.status}: {by_gloo.reason or by_gloo.losses}"
    return row | repeated_plainly(alone)


def run_life(start: Start, names: list[str], results: Results, deadline: float) -> Iterator[str]:
    """Runs the cases of real launches; yields a text when one ends."""
    for name in names:
        if time.monotonic() >= deadline:
            return
        folder = start.folder / "life" / slug(name)
        session = Session(folder, start.device_type, start.timeout_s)
        row: dict[str, Any] = {"case": name, "world": "launches"}
        try:
            row |= {"found": LIFE[name](session), "verdict": PASSES}
        except (LifeFailed, OSError, ValueError, KeyError) as error:
            row |= {"found": str(error)[:500], "verdict": OURS}
            collectives = Row(name, LAYOUTS["fsdp"])
            row |= repeated_plainly(replace(start, world=2, cases=[collectives]))
        finally:
            session.close()
        results.add("results.jsonl", row)
        yield f"{name}: {row['verdict']} ({row['found']})"


def repeated_plainly(start: Start) -> dict[str, str]:
    """Runs the collectives of the first case by plain torch; returns the verdict of a failure."""
    plain = next(outcomes(replace(start, task="plain"), math.inf))[1]
    verdict = OURS if plain.status == "trained" else NOT_OURS[start.device_type]
    return {"by plain torch": f"{plain.status}: {plain.reason}", "verdict": verdict}


def wanted(case: Row) -> str:
    """Returns the bounds of a case, for its row."""
    if math.isinf(case.bounds.norm):
        return f"loss at most {case.bounds.loss:g}"
    return f"loss at most {case.bounds.loss:g}, norm {case.bounds.norm:g}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the chosen cases that have not passed yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cases", default="", help="names, with commas (default: all)")
    parser.add_argument("--budget_s", type=float, default=300, help="no case begins after it")
    parser.add_argument("--timeout_s", type=float, default=180, help="of one case")
    parser.add_argument("--compile_backend", help="of torch.compile (default: as on top)")
    args = parser.parse_args(argv)
    deadline = time.monotonic() + args.budget_s
    compile_backend = args.compile_backend
    if compile_backend is None:
        compile_backend = "aot_eager" if args.device == "cpu" else ""

    cases = all_cases()
    life = list(LIFE)
    if args.cases:
        chosen = args.cases.split(",")
        unknown = set(chosen) - {case.name for case in cases} - set(life)
        if unknown:
            parser.error(f"--cases={','.join(sorted(unknown))} must be names of cases")
        cases = [case for case in cases if case.name in chosen]
        life = [name for name in life if name in chosen]

    results = Results(args.folder)
    plan = [{"case": case.name, "wanted": wanted(case)} for case in cases]
    plan += [{"case": name, "wanted": "as its docstring says"} for name in life]
    planned = {"device": args.device, "cases": plan}
    (args.folder / "planned.json").write_text(json.dumps(planned, indent=1), encoding="utf-8")

    multiprocessing.set_forkserver_preload(list(PRELOAD))
    left = [case for case in cases if not results.has_passed(case.name)]
    start = Start(
        args.folder.absolute(), args.device, 1, left, compile_backend, timeout_s=args.timeout_s
    )
    expected = run_references(start, results, deadline)
    for world in sorted({case.world for case in left}):
        group = replace(start, world=world, cases=[case for case in left if case.world == world])
        for text in run_cases(group, results, expected, deadline):
            print(text, flush=True)
    life = [name for name in life if not results.has_passed(name)]
    for text in run_life(start, life, results, deadline):
        print(text, flush=True)


if __name__ == "__main__":
    main()
