"""Documents of a prompt and a response, from `prepare --prompt_key` to the loss."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from fms_fsdp.__main__ import main
from tests.cli import TINY, metrics, trained

COMMON = ("--tokenizer=byte", "--num_workers=1", "--shard_tokens=4000")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data folders with the same documents, one with prompts marked and one without prompts."""
    folder = tmp_path_factory.mktemp("prompts")
    texts = [(f"{i}? " + "what " * (7 * i % 31), f"{i}! " + "so " * (i % 40)) for i in range(200)]
    records = [json.dumps({"prompt": prompt, "text": text}) for prompt, text in texts]
    (folder / "docs.jsonl").write_text("\n".join(records))
    for name, flags in {"marked": ["--prompt_key=prompt"], "plain": []}.items():
        paths = f"--input={folder}/docs.jsonl", f"--output={folder}/{name}"
        assert main(["prepare", *paths, *COMMON, *flags]) == 0
    return folder


def test_only_marked_shards_have_masks(corpus: Path) -> None:
    for name, has_masks, dtype in (("marked", b"true", b"uint32"), ("plain", None, b"uint16")):
        metadata = pa.ipc.open_file(corpus / name / "docs/shard-00000.arrow").schema.metadata
        assert (metadata.get(b"has_masks"), metadata[b"dtype"]) == (has_masks, dtype)
        assert main(["inspect", "verify", f"--data_path={corpus}/{name}"]) == 0


def test_loss_counts_responses_at_any_world_size(corpus: Path, tmp_path: Path) -> None:
    flags = [*TINY, "--use_dummy_dataset=False", f"--data_path={corpus}/marked"]
    flags += ["--precision=fp32", "--global_batch_size=4", "--trackers=none"]
    trained(*flags, "--num_steps=3", f"--output_dir={tmp_path}/one")
    trained(*flags, "--num_steps=3", "--cp_size=2", f"--output_dir={tmp_path}/two", nproc=2)
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    for step in (1, 2, 3):
        assert two[step]["loss"] == pytest.approx(one[step]["loss"], rel=1e-5)
        assert two[step]["data_fingerprint"] == one[step]["data_fingerprint"]
    flags += ["--num_steps=4", "--loss_on=all", f"--output_dir={tmp_path}/one"]
    assert "loss_on" in trained(*flags)  # a resumed run logs the change


def test_records_without_prompt_are_malformed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = '{"prompt": "a", "text": "b"}\n{"text": "b"}\n{"prompt": 3, "text": "b"}\n'
    (tmp_path / "some.jsonl").write_text(records + '{"prompt": "a", "text": ""}\n')
    (tmp_path / "page.txt").write_text("only text")
    flags = [f"--output={tmp_path}/out", "--prompt_key=prompt", *COMMON]
    assert main(["prepare", f"--input={tmp_path}/some.jsonl", *flags]) == 0
    out = capsys.readouterr().out
    for reason in ("'prompt' is missing", "'prompt' is not a string", "'text' is empty"):
        assert f"key {reason}" in out
    assert main(["prepare", f"--input={tmp_path}/page.txt", *flags]) == 2
    assert "--prompt_key=prompt requires records" in capsys.readouterr().err
