"""Sources without labels are named at the start, and their steps do not end the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from fms_fsdp.__main__ import main
from fms_fsdp.data.kept_tokenizer import unk_warnings
from fms_fsdp.data.storage import Storage
from fms_fsdp.errors import read_failed
from fms_fsdp.run.startup_log import warn_of_missing_labels
from tests.cli import TINY, metrics, trained
from tests.data.corpora import SEP, Files, write_corpus, write_lists


def test_source_without_labels_is_named_at_start(tmp_path: Path) -> None:
    """Responses of one character after prompts of 400: steps without a label are named too."""
    record = json.dumps({"prompt": "x" * 400, "text": "."})
    (tmp_path / "pairs.jsonl").write_text("\n".join([record] * 50))
    data, out = tmp_path / "data", tmp_path / "run"
    prepare = ["prepare", f"--input=docs={tmp_path}/pairs.jsonl", f"--output={data}"]
    assert main([*prepare, "--tokenizer=byte", "--prompt_key=prompt", "--num_workers=1"]) == 0
    flags = [flag for flag in TINY if "dummy" not in flag and "seq_length" not in flag]
    flags += [f"--data_path={data}", "--seq_length=32", "--batch_size=1", "--num_steps=6"]
    output = trained(*flags, "--trackers=none", f"--output_dir={out}")
    assert "source docs: 0.0 % of its tokens are labels" in output
    assert "has no labels; it changed nothing. Data fingerprint" in output
    assert json.loads((out / "status.json").read_text())["status"] == "finished"
    assert metrics(out)


def test_failed_reads_do_not_end_rank_0_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks, which do not read these files, waited for it."""

    def failing(*args: object) -> NoReturn:
        raise read_failed("a", "Input/output error")

    files = Files(tmp_path)
    write_lists(tmp_path / "a/s.arrow", [np.arange(10, 60)] * 50, dtype="uint32", has_masks="true")
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/summary.json").write_text("{}")
    with files.stream(2, seq_length=16) as stream:
        monkeypatch.setattr(Storage, "read", failing)
        warn_of_missing_labels(stream)
        assert unk_warnings(stream.corpus.storage, ["a"]) == []


def test_hidden_shards_are_named_at_start(tmp_path: Path) -> None:
    """All shards of the source are cut: each step is one without labels, and the run finishes."""
    data, out = tmp_path / "data", tmp_path / "run"
    write_corpus(data, {"web": [400] * 6, "books": [400] * 6})
    for path in (data / "web").glob("*.arrow"):
        path.write_bytes(b"")
    flags = [flag for flag in TINY if "dummy" not in flag]
    flags += [f"--data_path={data}", "--on_missing=mask", "--vocab_size=5000"]
    output = trained(*flags, "--num_steps=2", f"--sep_token={SEP}", f"--output_dir={out}")
    assert "source web: 0.0 % of its tokens are labels" in output
    assert "source books: 0.0 % of its tokens" not in output
