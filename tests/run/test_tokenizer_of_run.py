"""The digest of the tokenizer is kept from shards to exports; another tokenizer is rejected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import fms_fsdp
from fms_fsdp.data.kept_tokenizer import find_tokenizer, folder_tokenizer
from fms_fsdp.prepare.command import prepare
from fms_fsdp.prepare.prepare_flags import PrepareConfig
from fms_fsdp.tokenizers.tokenizer import Tokenizer, UsedTokenizer, check_same_tokenizer
from tests.cli import CORPUS, run, trained
from tests.hf_folders import change_json
from tests.warm import command

FLAGS = ("--model_variant=tiny", "--seq_length=64", "--report_interval=1", "--trackers=none")
FLAGS += ("--global_batch_size=4", "--vocab_size=600", "--num_steps=2")


def prepared(folder: Path, **options: object) -> Path:
    given: dict[str, Any] = {"input": f"pages={CORPUS}", "split": (95.0, 5.0), **options}
    given["text_separator"] = r"\n\n"
    prepare(PrepareConfig(output=str(folder), **given))
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of two tokenizers, and a run on the first."""
    root = tmp_path_factory.mktemp("tokenizers")
    prepared(root / "own", train_tokenizer=True, vocab_size=600)
    prepared(root / "other", train_tokenizer=True, vocab_size=500)
    trained(*FLAGS, f"--data_path={root}/own", f"--output_dir={root}/run")
    return root


def find(folder: Path) -> Tokenizer:
    found = find_tokenizer(str(folder))
    assert found is not None
    return found


@pytest.mark.slow
def test_resume_rejects_data_of_other_tokenizer(world: Path) -> None:
    ours, theirs = find(world / "own"), find(world / "other")
    folder, new = world / "run", world / "new"
    resolved = json.loads((folder / "config.json").read_text())["resolved"]
    assert resolved["tokenizer"] == ours.vocabulary.digest
    before = sorted(path.name for path in folder.iterdir())
    load = (f"--ckpt_load_path={folder}/checkpoints", "--load_model_only=True")
    for flags in ((f"--output_dir={folder}",), (f"--output_dir={new}", *load)):
        rejected = run(*FLAGS, "--num_steps=3", f"--data_path={world}/other", *flags, nproc=2)
        assert rejected.returncode != 0
        (line,) = [line for line in rejected.stderr.splitlines() if line.startswith("error: ")]
        digests = f"({theirs.vocabulary.digest[:12]}, {ours.vocabulary.digest[:12]})"
        assert f"--data_path={world}/other and the checkpoint " in line
        assert f"different tokenizers {digests}; prepare the data with" in line
    assert sorted(path.name for path in folder.iterdir()) == before and not new.exists()


def test_held_out_data_of_another_tokenizer_are_refused(world: Path) -> None:
    refused = run(
        *FLAGS,
        f"--data_path={world}/own",
        f"--eval_data_path={world}/other/validation",
        "--eval_interval=1",
        f"--output_dir={world}/held",
    )
    assert refused.returncode == 2 and "prepare both with one tokenizer" in refused.stderr
    refused = command(
        "evaluate", f"--path={world}/run", f"--eval_data_path={world}/other/validation"
    )
    assert refused.returncode == 2 and "prepare both with one tokenizer" in refused.stderr


def test_tools_reject_a_replaced_tokenizer(world: Path, tmp_path: Path) -> None:
    """In the folder of the run's data."""
    moved, own = tmp_path / "moved", world / "own"
    shutil.copytree(world / "run", moved)
    names = ("tokenizer.model", "meta/tokenizer.json")
    kept = {name: (own / name).read_bytes() for name in names}
    for name in names:
        shutil.copy(world / "other" / name, own / name)
    try:
        for argv in (("generate",), ("export", f"--output={tmp_path}/hf")):
            rejected = command(*argv, f"--path={moved}")
            assert rejected.returncode == 2, rejected.stdout + rejected.stderr
            assert "the folder of its data has" in rejected.stderr
            assert "put back" in rejected.stderr
        assert not (tmp_path / "hf").exists()
    finally:
        for name, content in kept.items():
            (own / name).write_bytes(content)


def test_unknown_tokenizer_is_not_a_different_one(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = UsedTokenizer("the data", "0" * 64, lambda: None)
    ours = folder_tokenizer("the run", find(world / "own").vocabulary.digest, str(world / "own"))
    check_same_tokenizer(gone, ours, "prepare both with one tokenizer")
    assert "they are not compared, because that of the data is not there" in capsys.readouterr().err


@pytest.mark.slow
def test_weights_of_a_hugging_face_folder_want_data_of_its_tokenizer(world: Path) -> None:
    pytest.importorskip("tokenizers")
    assert command("export", f"--path={world}/run", f"--output={world}/folder").returncode == 0
    flags = (*FLAGS[1:-2], "--num_steps=1", f"--init_from_hf={world}/folder")
    refused = run(*flags, f"--data_path={world}/other", f"--output_dir={world}/refused")
    assert refused.returncode == 2 and f"--init_from_hf={world}/folder were" in refused.stderr
    assert not (world / "refused").exists()
    (
        world / "folder" / "tokenizer.model"
    ).unlink()  # tokenizer.json has another digest, and the same ids
    settings = world / "folder" / "tokenizer_config.json"
    change_json(settings, lambda said: said | {"chat_template": "{{ messages }}"})
    (world / "folder/generation_config.json").write_text('{"eos_token_id": [1, 2], "top_p": 0.9}')
    trained(*flags, f"--data_path={world}/own", f"--output_dir={world}/taken")
    ended = command("export", f"--path={world}/taken", f"--output={world}/chat")
    assert ended.returncode == 0
    assert f"note: not carried over from {world}/folder: top_p" in ended.stderr
    # An export is evaluated on the data of its run.
    for data in (f"--data_path={world}/own", f"--eval_data_path={world}/own/validation"):
        ended = command("evaluate", f"--path={world}/chat", data, "--seq_length=64")
        assert ended.returncode == 0, ended.stderr
        assert "not compared" not in ended.stderr and "—" not in ended.stdout
    exported = json.loads((world / "chat/tokenizer_config.json").read_text())
    assert exported["chat_template"] == "{{ messages }}"
    ends = json.loads((world / "chat/generation_config.json").read_text())["eos_token_id"]
    assert sorted(ends) == [1, 2]


def test_the_end_token_of_a_folder_stays_with_the_data(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    raw = tokenizers.ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<stop>"]
    raw.train_from_iterator([fms_fsdp.__doc__ or ""], vocab_size=300, special_tokens=special)
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    found = find_tokenizer(str(prepared(tmp_path / "data", tokenizer=str(tmp_path))))
    assert found is not None and found.vocabulary.eos_id == 1


def test_launch_repeats_the_unk_warning(world: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(world / "own", tmp_path / "data"))
    summary = json.loads((data / "meta" / "summary.json").read_text())
    flags = (*FLAGS, f"--data_path={data}", f"--output_dir={tmp_path}/new", "--dry_run")
    for fraction, count in ((0.0009, 0), (0.025, 1)):
        summary["pages"]["unk_fraction"] = fraction
        (data / "meta" / "summary.json").write_text(json.dumps(summary))
        ended = run(*flags)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count("2.50% of the tokens of source pages are <unk>") == count
