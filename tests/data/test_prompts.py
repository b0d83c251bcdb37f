"""Documents of a prompt and a response: no prompt token is a label, wherever rows cut the documents."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from fms_fsdp.__main__ import main
from fms_fsdp.config import DataConfig
from fms_fsdp.data.batch import IGNORED_LABEL
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.data.stream import TokenStream, build_stream
from tests.cli import TINY, metrics, run, trained

SEP = 257  # of the byte tokenizer
COMMON = ("--tokenizer=byte", "--num_workers=1", "--shard_tokens=4000")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[tuple[str, str]]]:
    """The same 200 documents with marked prompts and without, and a plain source beside both."""
    folder, draw = tmp_path_factory.mktemp("prompts"), random.Random(3)
    pairs = []
    for number in range(200):
        prompt = f"{number}? " + "what " * draw.randint(0, 30)
        pairs.append((prompt, f"{number}! " + "so " * draw.randint(0, 40)))
    records = [json.dumps({"prompt": prompt, "text": text}) for prompt, text in pairs]
    (folder / "pairs.jsonl").write_text("\n".join(records))
    (folder / "plain.jsonl").write_text("\n".join(json.dumps({"text": p + t}) for p, t in pairs))
    (folder / "other.jsonl").write_text(
        "\n".join(json.dumps({"text": f"page {i} " * 9}) for i in range(99))
    )
    for name, flags in {"pairs": ["--prompt_key=prompt"], "plain": []}.items():
        source = f"--input=docs={folder}/{name}.jsonl"
        assert main(["prepare", source, f"--output={folder}/{name}", *COMMON, *flags]) == 0
        assert (
            main(
                [
                    "prepare",
                    f"--input=web={folder}/other.jsonl",
                    f"--output={folder}/{name}",
                    *COMMON,
                ]
            )
            == 0
        )
    return folder / "pairs", folder / "plain", pairs


def open_stream(root: Path, section: DataConfig) -> TokenStream:
    section = replace(section, data_path=str(root))
    sizes: dict[str, Any] = {"global_batch_size": 3, "dp_rank": 0, "dp_size": 1}
    return TokenStream(section, open_corpus(section), seed=5, vocab_size=258, **sizes)


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("packing", ["concat", "bestfit"])
@pytest.mark.parametrize("seq_length", [7, 64, 331])
def test_labels_are_those_of_plain_documents_but_for_prompts(
    corpus: Any, packing: str, seq_length: int, document_mask: bool
) -> None:
    marked_root, plain_root, pairs = corpus
    section = DataConfig(
        datasets=("docs",), seq_length=seq_length, packing=packing, logical_shards=4
    )
    section = replace(section, document_mask=document_mask)
    marked, plain = open_stream(marked_root, section), open_stream(plain_root, section)
    everything = open_stream(marked_root, replace(section, loss_on="all"))
    hidden = 0
    for step in range(1, 12):
        with_marks, without = marked.batch(step, 0, 1), plain.batch(step, 0, 1)
        for name in ("tokens_BS", "positions_BS", "document_ids_BS"):
            assert torch.equal(getattr(with_marks, name), getattr(without, name)), name
        assert torch.equal(everything.batch(step, 0, 1).labels_BS, without.labels_BS)
        for row, address in enumerate(marked.order.addresses(step)):
            expected = without.labels_BS[row].tolist()
            place = 0
            paths = marked.reader("docs").source.paths
            for file, document, start, stop in marked.documents_of(address):
                first = sum(int(marked.reader("docs").source.docs[i]) for i in range(file))
                prompt, text = pairs[first + document]
                assert paths[file].startswith("docs/")
                for token in range(start, stop):
                    is_end = token == len(prompt) + len(
                        text
                    )  # the separator: a prompt follows, or nothing
                    if is_end or token + 1 < len(prompt):
                        expected[place] = IGNORED_LABEL
                    place += 1
            assert with_marks.labels_BS[row].tolist() == expected, (step, row)
            hidden += expected.count(IGNORED_LABEL)
    assert hidden > 100


def test_ranks_and_a_resume_see_the_same_rows_of_a_mixture(corpus: Any) -> None:
    section = DataConfig(
        data_path=str(corpus[0]), datasets=("docs", "web"), weights=(3, 1), seq_length=64
    )
    how: dict[str, Any] = {
        "seed": 5,
        "vocab_size": 258,
        "global_batch_size": 4,
        "pin_memory": False,
    }
    whole = build_stream(section, corpus=open_corpus(section), **how, dp_rank=0, dp_size=1)
    batches = [whole.next_batch() for _ in range(6)]
    state = None
    for rank in (0, 1):
        part = build_stream(section, corpus=open_corpus(section), **how, dp_rank=rank, dp_size=2)
        for step in range(3):
            own = part.next_batch()
            assert torch.equal(own.labels_BS, batches[step].labels_BS[2 * rank : 2 * rank + 2])
        state = part.state_dict()
    again = build_stream(section, corpus=open_corpus(section), **how, dp_rank=0, dp_size=1)
    assert state is not None
    again.load_state_dict(state, 3)
    assert torch.equal(again.next_batch().labels_BS, batches[3].labels_BS)
    shares = [(batch.labels_BS == IGNORED_LABEL).float().mean().item() for batch in batches]
    assert 0.05 < float(np.mean(shares)) < 0.9


def test_plain_shards_are_as_before_and_marked_ones_say_so(corpus: Any) -> None:
    marked, plain = (sorted((root / "docs").glob("*.arrow")) for root in corpus[:2])
    for paths, says in ((marked, b"true"), (plain, None)):
        schema = pa.ipc.open_file(paths[0]).schema
        assert schema.metadata.get(b"has_masks") == says
    assert pa.ipc.open_file(plain[0]).schema.metadata[b"dtype"] == b"uint16"
    assert main(["inspect", "verify", f"--data_path={corpus[0]}"]) == 0


def test_a_training_counts_responses_alone_on_any_number_of_ranks(
    corpus: Any, tmp_path: Path
) -> None:
    flags = [
        *TINY,
        "--use_dummy_dataset=False",
        "--seq_length=64",
        "--num_steps=3",
        "--precision=fp32",
    ]
    flags += ["--global_batch_size=4", "--trackers=none", "--datasets=docs"]
    found = {}
    for name, root, more in (
        ("one", corpus[0], []),
        ("two", corpus[0], ["--cp_size=2"]),
        ("all", corpus[0], ["--loss_on=all"]),
        ("plain", corpus[1], []),
    ):
        argv = [*flags, f"--data_path={root}", *more, f"--output_dir={tmp_path / name}"]
        trained(*argv, nproc=2 if name == "two" else 0)
        found[name] = metrics(tmp_path / name)
    for step in (1, 2, 3):
        assert found["two"][step]["loss"] == pytest.approx(found["one"][step]["loss"], rel=1e-5)
        assert (
            found["all"][step]["loss"] == found["plain"][step]["loss"] != found["one"][step]["loss"]
        )
        assert found["two"][step]["data_fingerprint"] == found["one"][step]["data_fingerprint"]


def test_a_changed_loss_is_announced_on_a_resume_and_a_wrong_one_refused(
    corpus: Any, tmp_path: Path
) -> None:
    flags = [*TINY, "--use_dummy_dataset=False", "--seq_length=64", f"--data_path={corpus[0]}"]
    flags += ["--datasets=docs", "--trackers=none", f"--output_dir={tmp_path}"]
    trained(*flags, "--num_steps=1")
    assert "loss_on" in trained(*flags, "--num_steps=2", "--loss_on=all")
    refused = run(*flags, "--loss_on=prompt")
    assert refused.returncode == 2 and "--loss_on=prompt must be one of" in refused.stderr


def test_records_without_a_prompt_are_counted_as_malformed(tmp_path: Path, capsys: Any) -> None:
    records = [
        {"prompt": "a", "text": "b"},
        {"text": "b"},
        {"prompt": 3, "text": "b"},
        {"prompt": "a", "text": ""},
    ]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, records)))
    flags = [
        f"--input={tmp_path}/some.jsonl",
        f"--output={tmp_path}/out",
        "--prompt_key=prompt",
        *COMMON,
    ]
    assert main(["prepare", *flags]) == 0
    out = capsys.readouterr().out
    for text in (
        "key 'prompt' is missing or empty",
        "key 'prompt' is not a string",
        "key 'text' is empty",
    ):
        assert text in out
    (tmp_path / "page.txt").write_text("only text")
    flags[0] = f"--input={tmp_path}/page.txt"
    assert main(["prepare", *flags]) == 2
    assert "--prompt_key=prompt requires records" in capsys.readouterr().err
