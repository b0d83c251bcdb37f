"""What a run recorded is read from any folder."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path

import pytest

from fms_fsdp.config import CheckpointConfig, DataConfig, TrainConfig, as_dict, from_dict
from fms_fsdp.data.batch import fingerprint
from fms_fsdp.prepare.command import prepare
from fms_fsdp.prepare.prepare_flags import PrepareConfig
from fms_fsdp.state import located_sections, working_folder
from fms_fsdp.tools.inspect_command import open_run_data
from fms_fsdp.tools.report_command import load_run
from tests.cases import cases
from tests.cli import metrics
from tests.warm import command, launch


@cases("""
    typed | joined
    data/tokens | /home/me/data/tokens
    ../tokens | /home/me/../tokens
    /abs/tokens | /abs/tokens
    s3://bucket/tokens?region=x | s3://bucket/tokens?region=x
     |
""")
def test_relative_paths_are_joined_to_the_runs_working_folder(typed: str, joined: str) -> None:
    config = as_dict(
        TrainConfig(
            data=DataConfig(data_path=typed), checkpoint=CheckpointConfig(ckpt_load_path=typed)
        )
    )
    for start, expected in (("/home/me", joined), ("", typed)):
        cfg = from_dict(located_sections({**config, "resolved": {"working_dir": start}}))
        assert (cfg.data.data_path, cfg.checkpoint.ckpt_load_path) == (expected, expected)


def test_the_working_folder_is_the_one_that_the_shell_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "release-1").mkdir()
    (tmp_path / "current").symlink_to(tmp_path / "release-1")
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setenv("PWD", str(tmp_path / "current"))
    assert working_folder() == str(tmp_path / "current")
    for wrong in (str(tmp_path), "current", "", str(tmp_path / "none")):
        monkeypatch.setenv("PWD", wrong)
        assert working_folder() == os.getcwd() == str(tmp_path / "release-1")


@pytest.mark.slow
def test_a_run_on_a_relative_data_path_is_inspected_and_evaluated_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, other = tmp_path / "place", tmp_path / "other"
    place.mkdir()
    other.mkdir()
    inputs = f"code={sysconfig.get_path('stdlib')}/json"
    options = {
        "include": ("*.py",),
        "num_workers": 1,
        "text_separator": r"\n\n",
        "split": (80.0, 20.0),
    }
    output = str(place / "tokens")
    prepare(PrepareConfig(inputs, output, tokenizer="byte", **options))  # type: ignore[arg-type]
    shape = ("--model_variant=tiny", "--seq_length=32", "--global_batch_size=2", "--num_steps=1")
    flags = (*shape, "--data_path=tokens", "--ckpt_save_path=kept", "--output_dir=run")
    ended = launch(flags, cwd=place)
    assert ended.returncode == 0, ended.stderr
    monkeypatch.chdir(other)
    with open_run_data(str(place / "run")) as data:
        assert data.step == 1
        digest = fingerprint(data.stream.batch_at(1), 0)
        assert f"{digest:016x}" == metrics(place / "run")[1]["data_fingerprint"]
    evaluated = command(
        "evaluate", "--path=../place/kept", "--eval_steps=1", "--json=True", cwd=other
    )
    assert evaluated.returncode == 0, evaluated.stderr
    told = json.loads(evaluated.stdout)
    assert told["step"] == 1 and told["eval/loss"] > 0


def test_report_compares_paths_that_were_meant(tmp_path: Path) -> None:
    config = as_dict(TrainConfig(data=DataConfig(data_path="tokens")))
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        record = {"attempt": 1, "step": 1, "time": 0.0, "loss": 1.0}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        content = {**config, "resolved": {"working_dir": f"/{name}"}}
        (tmp_path / name / "config.json").write_text(json.dumps(content))
        found.append(load_run(tmp_path / name)["settings"]["data_path"])
    assert found == ["/a/tokens", "/b/tokens"]
