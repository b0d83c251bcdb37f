"""The scripts under a pseudo-terminal: live progress, and what a real training prints at its end."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
from pathlib import Path

import pytest

from tests.cli import ROOT
from tests.scripts.conftest import environment, fake_python3

COLOR = re.compile(r"\x1b\[[0-9;]*m")
DUMMY = ("--use_dummy_dataset=True", "--model_variant=tiny", "--seq_length=64")


def on_terminal(*argv: object, env: dict[str, str]) -> tuple[int, str]:
    """Exit status of a command and all that its terminal was sent."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [str(word) for word in argv],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=env,
        start_new_session=True,
    )
    os.close(slave)
    shown = b""
    ready = select.poll()
    ready.register(master)
    while ready.poll(120_000):
        try:
            shown += os.read(master, 65536)
        except OSError:  # the command has ended
            break
    os.close(master)
    return process.wait(timeout=30), shown.decode().replace("\r\n", "\n")


@pytest.mark.slow
def test_train_sh_shows_progress_and_results(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = (
        *DUMMY,
        "--batch_size=8",
        "--num_steps=120",
        "--report_interval=60",
        f"--output_dir={folder}",
    )
    env = environment(NO_COLOR="", NPROC_PER_NODE="2", OMP_NUM_THREADS="1")
    evaluation = ("--eval_interval=120", "--eval_steps=1")
    code, shown = on_terminal("bash", ROOT / "scripts/train.sh", *flags, *evaluation, env=env)
    assert code == 0, shown
    assert re.search(r"\r\x1b\[Kstep \d+/120 · next report at step 60", shown)
    assert re.search(r"loss \x1b\[1;36m\d", shown)
    console = (folder / "console.txt").read_text()
    assert "next report" not in console and "\x1b" not in console
    assert (
        re.search(r"^\d\d:\d\d:\d\d step 60/120  loss", console, re.MULTILINE)
        and "finished 120 steps" in console
    )
    plain = COLOR.sub("", shown)
    (result,) = re.findall(r"^final +(.*)$", plain, re.MULTILINE)
    assert re.fullmatch(
        r"train loss \d\.\d{4} \(last \d+ steps\), validation loss \d\.\d{4}", result
    )
    before, _, after = plain.partition("report        file://")
    page = Path(after.splitlines()[0])
    assert page == folder / "report.html" and "</html>" in page.read_text()
    assert re.search(r"^time          .*training \d+ s.*: \d+ s in total$", after, re.MULTILINE)
    assert "--num_steps=360" in after and len(after.splitlines()) <= 9


@pytest.mark.slow
def test_failing_report_page_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "run/report.html").mkdir(parents=True)
    flags = (*DUMMY, "--batch_size=2", "--num_steps=4", f"--output_dir={tmp_path}/run")
    code, shown = on_terminal("bash", ROOT / "scripts/train.sh", *flags, env=environment())
    assert code == 0, shown
    assert (
        "note: the page of curves could not be made" in shown
        and "report        file://" not in shown
    )


@pytest.mark.slow
def test_installation_shows_progress_of_pip(repo: Path, tmp_path: Path) -> None:
    """With a stand-in for python3 whose pip works for two seconds and fails."""
    install = 'echo "Collecting torch"; sleep 2.5; echo "no room on the disk"'
    env = environment(PATH=fake_python3(tmp_path / "bin", install))
    del env["PYTHON"]
    code, shown = on_terminal("bash", repo / "scripts/test.sh", env=env)
    assert code == 1
    assert re.search(r"\r\x1b\[Ktest.sh: [12] s  Collecting torch", shown)
    assert "no room on the disk\ntest.sh: error: pip could not install the packages" in shown
