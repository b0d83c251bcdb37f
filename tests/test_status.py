"""How a launch ends: status.json, exit status, and who prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fms_fsdp.status import FINISHED, RESUME_ME, BadInput, Launch, checking_input


def status(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / "status.json").read_text())
    return content


def test_finished(tmp_path: Path) -> None:
    with Launch() as launch:
        launch.folder, launch.step, launch.outcome, launch.reason = tmp_path / "run", 7, FINISHED, "done"
    assert launch.exit_status == 0
    assert status(tmp_path / "run") == {"status": "finished", "step": 7, "reason": "done"}


def test_stopped_early_is_75_but_0_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Launch() as launch:
        launch.folder, launch.outcome = tmp_path, RESUME_ME
    assert launch.exit_status == 75
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert launch.exit_status == 0


def test_bad_input_is_one_line_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Launch() as launch:
        launch.folder = tmp_path
        with checking_input():
            raise ValueError("--x (1) must\n be 2")
    assert launch.exit_status == 2
    assert capsys.readouterr().err == "error: --x (1) must be 2\n"
    assert status(tmp_path)["status"] == "bad_input"


def test_a_bug_of_ours_keeps_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Launch() as launch:
        launch.folder = tmp_path
        raise KeyError("lost")
    assert launch.exit_status == 1
    assert "Traceback" in capsys.readouterr().err and status(tmp_path)["status"] == "failed"


def test_an_unwritable_folder_is_the_users_to_mend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with Launch() as launch, checking_input():
        (tmp_path / "file" / "run").mkdir()
    assert launch.exit_status == 2 and "error:" in capsys.readouterr().err


def test_a_restart_repeats_bad_input_only_if_it_is_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(text: str) -> str:
        with Launch() as launched:
            launched.folder = tmp_path
            raise BadInput(text)
        return capsys.readouterr().err

    assert launch("first") == "error: first\n"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert launch("first") == ""
    assert launch("second") == "error: second\n"


def test_a_rank_that_alone_meets_bad_data_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    with Launch() as launch:
        launch.folder = tmp_path
        raise BadInput("shard x is truncated", on_one_rank=True)
    assert capsys.readouterr().err == "error: shard x is truncated\n"
    assert status(tmp_path)["status"] == "bad_input"
