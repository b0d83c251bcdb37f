"""The digest of the tokenizer goes from shards to checkpoints and exports; another one is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import fms_fsdp
from fms_fsdp.data.tokenizer import check_same_tokenizer, find_tokenizer, folder_tokenizer
from fms_fsdp.tools.prepare.command import PrepareConfig, prepare
from tests.cli import CORPUS, run, trained
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


def test_a_run_goes_on_with_data_of_its_tokenizer_alone(world: Path) -> None:
    ours, theirs = (find_tokenizer(str(world / name)) for name in ("own", "other"))
    assert ours is not None and theirs is not None
    resolved = json.loads((world / "run" / "config.json").read_text())["resolved"]
    assert resolved["tokenizer"] == ours.vocabulary.digest
    before = sorted(path.name for path in (world / "run").iterdir())
    more = ("--num_steps=3", f"--data_path={world}/other")
    for flags in (
        (f"--output_dir={world}/run",),
        (
            f"--output_dir={world}/new",
            f"--ckpt_load_path={world}/run/checkpoints",
            "--load_model_only=True",
        ),
    ):
        refused = run(*FLAGS, *more, *flags, nproc=2)
        assert refused.returncode != 0
        (line,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
        assert f"--data_path={world}/other is of tokenizer {theirs.vocabulary.digest[:12]}" in line
        assert f"checkpoints/step_2 of {ours.vocabulary.digest[:12]}; prepare the data with" in line
    assert (
        sorted(path.name for path in (world / "run").iterdir()) == before
        and not (world / "new").exists()
    )


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


def test_text_and_export_take_no_other_tokenizer_from_the_place_of_the_data(world: Path) -> None:
    moved = world / "moved"
    shutil.copytree(world / "run", moved)
    for name in ("tokenizer.model", "meta/tokenizer.json"):
        shutil.copy(world / "own" / name, world / "own" / f"{name}.kept")
        shutil.copy(world / "other" / name, world / "own" / name)
    try:
        for argv in (
            ("generate", f"--path={moved}"),
            ("export", f"--path={moved}", f"--output={world}/hf"),
        ):
            refused = command(*argv)
            assert refused.returncode == 2, refused.stdout + refused.stderr
            assert "the folder of its data of" in refused.stderr and "put back" in refused.stderr
        assert not (world / "hf").exists()
    finally:
        for name in ("tokenizer.model", "meta/tokenizer.json"):
            shutil.move(world / "own" / f"{name}.kept", world / "own" / name)


def test_weights_of_a_hugging_face_folder_want_data_of_its_tokenizer(world: Path) -> None:
    pytest.importorskip("tokenizers")
    assert command("export", f"--path={world}/run", f"--output={world}/folder").returncode == 0
    flags = (*FLAGS[1:-2], "--num_steps=1", f"--init_from_hf={world}/folder")
    refused = run(*flags, f"--data_path={world}/other", f"--output_dir={world}/refused")
    assert refused.returncode == 2 and f"--init_from_hf={world}/folder of" in refused.stderr
    assert not (world / "refused").exists()
    (
        world / "folder" / "tokenizer.model"
    ).unlink()  # tokenizer.json has another digest, and the same ids
    trained(*flags, f"--data_path={world}/own", f"--output_dir={world}/taken")


def test_files_of_one_tokenizer_are_one(world: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    assert command("export", f"--path={world}/run", f"--output={tmp_path}/hf").returncode == 0
    (tmp_path / "hf" / "tokenizer.model").unlink()
    data = prepared(tmp_path / "json", tokenizer=str(tmp_path / "hf"))
    used = [
        (str(path), find_tokenizer(str(path))) for path in (world / "own", data, world / "other")
    ]
    one, same, other = (
        folder_tokenizer(name, found.vocabulary.digest if found else "", name)
        for name, found in used
    )
    assert one.digest != same.digest
    check_same_tokenizer(one, same, "never seen")
    with pytest.raises(ValueError, match="is of tokenizer .*; do this"):
        check_same_tokenizer(same, other, "do this")


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
