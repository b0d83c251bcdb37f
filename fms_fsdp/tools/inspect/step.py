"""The data of any step: `python -m fms_fsdp inspect step`, and how `inspect` commands open a run.

    a run folder: config.json, newest checkpoint's train_state.json ─┐
    or the flags of the data, the seed and the batch ────────────────┴─> Inspected: the data of any step

Invariant: nothing is recorded and nothing is replayed. The answer is computed by the pure functions that the
run itself uses, so it holds for any past or future step. Steps after the newest checkpoint are those of a run
that resumes with the flags of the run folder, or with those given here.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.config import DataConfig, TrainingConfig, flag
from fms_fsdp.config.batch import BatchPlan, check_ramp
from fms_fsdp.data.batch import IGNORED_LABEL, empty_batch, fingerprint
from fms_fsdp.data.corpus import Corpus, Source, open_corpus
from fms_fsdp.data.order import Address, Order
from fms_fsdp.data.sequences import Columns
from fms_fsdp.data.shards import ShardError
from fms_fsdp.data.stream import TokenStream
from fms_fsdp.data.tokenizer import find_tokenizer
from fms_fsdp.errors import MissingInput, UserError
from fms_fsdp.run.resume import ResumePoint, choose_checkpoint
from fms_fsdp.state import read_run_config

ANY_VOCABULARY = 1 << 32
_EXCERPT = 80  # tokens, and characters
_DATA_FLAGS = (
    "data_path datasets weights seq_length packing logical_shards sep_token skip_steps".split()
)


@dataclass(frozen=True)
class InspectConfig:
    """Which data: those of a run folder, or of the flags of a run. A flag beside a run folder replaces the
    value of the run."""

    run: str = flag(
        "",
        "a run folder: which data its run has seen, and would see with the flags given here",
        form="path",
    )
    data_path: str = flag("", "folder of the token shards", form="path")
    datasets: tuple[str, ...] = flag((), "sources, as in training")
    weights: tuple[float, ...] = flag((), "share of tokens of each dataset, as in training")
    seq_length: int | None = flag(
        None, "tokens per sequence (default: the run's, else 4096)", min=1
    )
    packing: str | None = flag(
        None, "way to fill sequences (default: the run's)", choices=("concat", "bestfit")
    )
    logical_shards: int | None = flag(
        None, "number of logical shards (default: the run's, else 1024)", min=1
    )
    sep_token: int | None = flag(
        None, "the separator's id (default: the run's or the shards')", min=0
    )
    skip_steps: str = flag("", "steps whose data are skipped, a:b for a to b-1, as in training")
    seed: int | None = flag(None, "seed of the order (default: the run's, else 2023)", min=0)
    global_batch_size: int | None = flag(None, "sequences per step (default: the run's)", min=1)
    rampup_batch_size: tuple[int, ...] = flag(
        (), "start,increment,samples (default: the run's)", min=1
    )
    rampup_round: int = flag(
        1, "multiple of the batches of --rampup_batch_size, as in training", min=1
    )


@dataclass(frozen=True)
class StepConfig(InspectConfig):
    """Which rows of which step to list."""

    step: int | None = flag(None, "number of the step, from 1 on", min=1)
    rows: str = flag("", "a:b lists the rows a to b-1 of the step's global batch (default: all)")
    json: bool = flag(False, "print one JSON object for each row")
    fingerprint: bool = flag(
        True, "compute the data_fingerprint of metrics.jsonl; reads the whole batch"
    )
    text: bool = flag(
        False, "show how the text of each document in a row begins; reads the whole batch"
    )


@dataclass(frozen=True)
class Run:
    """What a run folder says; without one, what holds for flags alone."""

    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    batch: int | None = None
    vocab_size: int | None = None
    num_steps: int | None = None  # where the run ends
    resume: ResumePoint | None = None  # None: it has trained no step

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint whose data go on."""
        return self.resume.checkpoint if self.resume and not self.resume.fresh_data else None

    @property
    def step(self) -> int:
        """The last step trained on."""
        return self.resume.checkpoint.step if self.resume and self.resume.checkpoint else 0


@dataclass(frozen=True)
class Inspected:
    """The data of a run, opened. `changes`: what the flags change from the step after the newest checkpoint
    on, in words."""

    run: Run
    stream: TokenStream
    corpora: tuple[Corpus, ...]
    section: DataConfig
    changes: tuple[str, ...]

    @property
    def order(self) -> Order:
        return self.stream.order

    @property
    def sources(self) -> dict[str, Source]:
        """The sources that are there, by name."""
        return {source.name: source for corpus in self.corpora for source in corpus.sources}


@contextmanager
def inspected(config: InspectConfig) -> Iterator[Inspected]:
    """Opens the data that the flags name; nothing of it is read yet.

    Raises: UserError: bad flags, no such run, data other than the run's.
    """
    run = read_run(config.run)
    section, batch = data_section(config, run.data), config.global_batch_size or run.batch
    if batch is None:
        remedy = "give this flag, or --run=FOLDER of a run that has started"
        raise UserError(f"--global_batch_size () must be the rows of a step; {remedy}")
    ramp = config if config.rampup_batch_size else run.training
    training = TrainingConfig(
        rampup_batch_size=ramp.rampup_batch_size, rampup_round=ramp.rampup_round
    )
    if training.rampup:
        check_ramp(BatchPlan(batch, 1, 1, training.rampup, True))
    corpus = open_corpus(section)
    seed = run.training.seed if config.seed is None else config.seed
    vocab = run.vocab_size or corpus.vocab_size or ANY_VOCABULARY
    stream = TokenStream(
        section,
        corpus,
        seed=seed,
        vocab_size=vocab,
        global_batch_size=batch,
        dp_rank=0,
        dp_size=1,
        rampup=training.rampup,
    )
    try:
        corpora, changes = [corpus], list[str]()
        if run.checkpoint:
            changes = stream.load_state_dict(run.checkpoint.metadata.data, run.step)
            corpora += _open_dropped(
                stream, section, corpus, run.checkpoint.metadata.data["sources"]
            )
        elif run.step:
            stream.begin_after(run.step)
        yield Inspected(run, stream, tuple(corpora), section, tuple(changes))
    finally:
        stream.close()


def data_section(config: InspectConfig, of_run: DataConfig) -> DataConfig:
    """Returns the run's data flags with those given on the command line in their place."""
    if of_run.use_dummy_dataset or of_run.dataset_builder:
        kind = "synthetic tokens" if of_run.use_dummy_dataset else "a dataset_builder of its own"
        rule = f"trained on {kind}, which inspect cannot follow"
        raise UserError(f"--run ({config.run}) {rule}; inspect a run on shards")
    given: dict[str, Any] = {"weights": ()} if config.datasets else {}
    for name in _DATA_FLAGS:
        if (value := getattr(config, name)) not in (None, "", ()):
            given[name] = value
    return replace(of_run, **given)


def read_run(folder: str) -> Run:
    """Returns the newest launch's flags, and the checkpoint that the run would go on from; without a folder,
    the defaults.

    Raises: UserError: no such run, or training would refuse its checkpoints.
    """
    if not folder:
        return Run()
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise MissingInput(
            f"--run ({folder}) must be a run folder with config.json; look under runs/"
        )
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"--run ({folder}) has a config.json that cannot be read: {error!r}"
        ) from None
    record = read_run_config(content, path)
    cfg, batch, vocab_size = record.located, record.batch.global_batch_size, record.model.vocab_size
    kept = replace(cfg.checkpoint, resume="auto")
    found = choose_checkpoint(
        replace(cfg, checkpoint=kept, log=replace(cfg.log, output_dir=folder))
    )
    resume = found if found.is_resume else None
    return Run(cfg.data, cfg.training, batch, vocab_size, record.num_steps, resume)


def _open_dropped(
    stream: TokenStream, section: DataConfig, corpus: Corpus, known: Mapping[str, Sequence[Any]]
) -> Iterator[Corpus]:
    """Opens the sources that earlier steps used and the flags no longer name, as far as they are still
    there."""
    for name in sorted(set(known) - {source.name for source in corpus.sources}):
        try:
            dropped = open_corpus(replace(section, datasets=(name,), weights=()), corpus.storage)
        except FileNotFoundError:
            continue  # its steps can still be placed, its documents not be named
        if dropped.sources[0].digest != known[name][0]:
            remedy = "restore its shards, or inspect a copy of its shards"
            raise UserError(f"source ({name}) of earlier steps has changed since; {remedy}")
        stream.open_sources(dropped)
        yield dropped


def row_record(data: Inspected, address: Address, step: int, row: int) -> dict[str, Any]:
    """Returns the address of a sequence and its document segments in order, as JSON values.

    A segment is tokens [start, stop) of a document, with its separator, at token `at` of the sequence. If the
    shard has loss masks, `num_labels` of its tokens are in the loss.
    """
    record: dict[str, Any] = {
        "step": step,
        "row": row,
        "source": address.source,
        "epoch": address.epoch,
        "sequence": address.n,
        "window": address.window,
        "position": address.position,
    }
    try:
        segments = data.stream.documents_of(address)
    except ShardError as error:
        if data.section.on_missing != "mask":
            raise
        return record | {"masked": str(error), "pieces": []}
    reader, at, found = data.stream.reader(address.source), 0, list[dict[str, Any]]()
    paths = reader.source.paths
    for file, document, start, stop in segments:
        found.append(
            {"file": paths[file], "document": document, "start": start, "stop": stop, "at": at}
        )
        at += stop - start
    if any(reader.shard(file).has_masks for file in {segment[0] for segment in segments}):
        out = Columns(*(column[0].numpy() for column in empty_batch(1, at)))
        data.stream.read(address, out)
        for piece in found:
            labels = out.labels[piece["at"] : piece["at"] + piece["stop"] - piece["start"]]
            piece["num_labels"] = int((labels != IGNORED_LABEL).sum())
    return record | {"pieces": found}


def step_fingerprint(data: Inspected, step: int) -> str:
    """Returns the step's `data_fingerprint`, as metrics.jsonl has it."""
    return f"{fingerprint(data.stream.batch(step, 0, 1), 0):016x}"


def text_of_rows(data: Inspected, step: int) -> Callable[[int, int, int], str]:
    """Returns what decodes tokens of a row of the step: the first of `count` that begin at `at`.

    Raises: UserError: no tokenizer lies beside the data.
    """
    tokenizer = find_tokenizer(path := data.section.data_path)
    if tokenizer is None:
        raise UserError(
            f"--text (True) needs the tokenizer that prepare puts beside the data ({path})"
        )
    tokens_BS = data.stream.batch(step, 0, 1).tokens_BS
    return lambda row, at, count: tokenizer.decode(
        tokens_BS[row, at : at + min(count, _EXCERPT)].tolist()
    )


def parse_range(name: str, text: str, stop: int) -> tuple[int, int]:
    """Returns [a, b) of "a:b" (or of "a", one) within [0, stop). Raises: UserError."""
    if not text:
        return 0, stop
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.replace(" ", ""))
    a, b = (int(match[1]), int(match[2] or int(match[1]) + 1)) if match else (0, 0)
    if not 0 <= a < b <= stop:
        raise UserError(
            f"--{name} ({text}) must be a:b with 0 <= a < b <= {stop}; write 0:{stop} for all"
        )
    return a, b


def main(config: StepConfig) -> None:
    """The command `inspect step`."""
    if config.step is None:
        raise UserError("--step is missing; name the step, from 1 on")
    begin = time.perf_counter()
    with inspected(config) as data:
        step, phase = config.step, data.order.history.phase(config.step)
        start, stop = parse_range("rows", config.rows, phase.batch_at(step))
        mark = {"data_fingerprint": step_fingerprint(data, step)} if config.fingerprint else {}
        decode = text_of_rows(data, step) if config.text else None
        if not config.json:
            size = f"{phase.batch_at(step)} sequences of {data.section.seq_length} tokens"
            print(f"step {step}: {size}{_when(data, step)}")
        for row, address in enumerate(data.order.addresses(step, start, stop), start):
            record = row_record(data, address, step, row)
            if decode is not None:
                for piece in record["pieces"]:
                    piece["text"] = decode(row, piece["at"], piece["stop"] - piece["start"])
            print(json.dumps(record | mark) if config.json else _describe_row(record))
        if not config.json:
            for name, value in mark.items():
                print(name, value)
            print(f"({time.perf_counter() - begin:.2f} s)")


def _when(data: Inspected, step: int) -> str:
    if data.run.step == 0 or step <= data.run.step:
        return ""
    changes = f", where {'; '.join(data.changes)}" if data.changes else ""
    return f"; planned: the newest checkpoint is of step {data.run.step}{changes}"


def _describe_row(record: dict[str, Any]) -> str:
    place = (
        f"epoch {record['epoch']}, sequence {record['sequence']} (window {record['window']}, "
        f"sequence {record['position']} in it)"
    )
    lines = [f"row {record['row']}: {record['source']}, {place}"]
    if "masked" in record:
        lines.append(f"  masked: {record['masked']}")
    return "\n".join([*lines, *map(_describe_piece, record["pieces"])])


def _describe_piece(piece: dict[str, Any]) -> str:
    length = piece["stop"] - piece["start"]
    at = f"[{piece['at']}, {piece['at'] + length})"
    lies = f"document {piece['document']}  tokens [{piece['start']}, {piece['stop']})"
    if "num_labels" in piece:
        lies += f"  loss on {piece['num_labels']} of {length}"
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in piece.get("text", ""))
    return f"  {at:<16} {piece['file']}  {lies}" + (f"\n      {text[:_EXCERPT]}" if text else "")
