"""A checkpoint to a Hugging Face checkpoint: the same logits and token ids, complete or absent."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fms_fsdp
from fms_fsdp.__main__ import main
from fms_fsdp.errors import UserError
from fms_fsdp.files import write_folder
from fms_fsdp.hf.hf_tokenizer import export_tokenizer
from fms_fsdp.hf.weights import fuse, weight_map
from fms_fsdp.prepare.command import train_sentencepiece
from fms_fsdp.tokenizers.load import load_tokenizer
from tests.checkpoint.signing import flip_a_bit
from tests.cli import CORPUS, ROOT, TINY, run, trained
from tests.warm import COMMANDS, running

SMALL = (
    "--num_layers=2",
    "--hidden_size=64",
    "--ffn_hidden_size=96",
    "--num_attention_heads=4",
    "--num_steps=2",
)


def make(folder: Path, *flags: str, nproc: int = 0) -> str:
    trained(*TINY, *SMALL, "--trackers=none", *flags, f"--output_dir={folder}", nproc=nproc)
    return str(folder)


def export(*flags: str) -> int:
    return main(["export", *flags])


def differing_logits(run: str, folder: Path) -> float:
    from transformers import AutoModelForCausalLM

    ours, _ = fms_fsdp.load_model(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.randint(
        0, ours.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        return float((theirs.float()(tokens).logits - ours(tokens)).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--model_variant=gpt3_125m", "--vocab_size=301", "--dropout=0.1"),  # padded
        ("--model_variant=llama3.2_1b", "--num_kv_heads=2", "--vocab_size=300"),  # tied, scaled
    ],
)
def test_exported_logits_equal_transformers(flags: tuple[str, ...], tmp_path: Path) -> None:
    run = make(tmp_path / "run", *flags)
    assert export(f"--path={run}", f"--output={tmp_path}/hf", "--dtype=fp32") == 0
    assert differing_logits(run, tmp_path / "hf") <= 1e-5


@pytest.mark.slow
def test_sharded_checkpoint_exports_to_bf16_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run, hf = make(tmp_path / "run", "--sharding_strategy=fsdp", nproc=2), tmp_path / "hf"
    assert export(f"--path={run}", f"--output={hf}", "--max_shard_gb=0.0002") == 0
    card = (hf / "README.md").read_text()
    assert "| step | 2 |" in card and "--sharding_strategy=fsdp" in card and "--adam_beta2=" in card
    files = sorted(hf.glob("*.safetensors"))
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    assert len(files) > 1 and all(path.stat().st_size < 3e5 for path in files)
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    model = fms_fsdp.load_model(run)[0]
    ours = model.state_dict()
    for name, weight in weight_map(model.config).items():
        fused = fuse(model.config, weight.ours, ours.__getitem__)
        assert tensors[name].dtype == torch.bfloat16 and torch.equal(
            fused.bfloat16(), tensors[name]
        )
    assert differing_logits(run, hf) <= 3e-2


@pytest.mark.slow
def test_failed_export_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, output = f"--path={make(tmp_path / 'run')}", f"--output={tmp_path}/hf"
    (tmp_path / "taken").mkdir()
    (file,) = (tmp_path / "run/checkpoints/step_2").glob("*.distcp")
    flip_a_bit(file)
    for flags, text in (
        ((run, f"--output={tmp_path}/taken"), "must not exist; choose another"),
        ((run,), "--output is missing"),
        ((f"--path={tmp_path}", output), "must hold a complete checkpoint"),
        ((run, output, "--dtype=fp8"), "--dtype=fp8 must be one of"),
        ((run, output), "is corrupt: "),
    ):
        assert export(*flags) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert text in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "taken"]


def test_second_export_to_one_folder_ends(tmp_path: Path) -> None:
    output = tmp_path / "hf"
    with write_folder(output) as partial:
        (partial / "weights").write_text("first")
        with pytest.raises(UserError, match="is being written by another export"):  # noqa: SIM117
            with write_folder(output):
                pass
    assert (output / "weights").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.slow
def test_killed_export_leaves_no_folder(tmp_path: Path) -> None:
    run = make(tmp_path / "run", "--vocab_size=200000")
    argv = ["export", f"--path={run}", f"--output={tmp_path}/hf"]
    with running(argv, program=COMMANDS) as process:
        while not list(tmp_path.glob(".hf.partial/*.safetensors")):
            assert process.exitcode is None, "it ended before it could be killed"
            time.sleep(0.002)
    assert process.exitcode == -signal.SIGKILL and not (tmp_path / "hf").exists()
    assert export(*argv[1:]) == 0
    assert not (tmp_path / ".hf.partial").exists()
    assert differing_logits(run, tmp_path / "hf") <= 3e-2


@pytest.mark.slow
def test_export_memory_is_two_large_weights(tmp_path: Path) -> None:
    # the embedding and the head are 102 MB each
    run = make(tmp_path / "run", "--vocab_size=400000", "--num_layers=1")
    code = (
        "import resource\nfrom fms_fsdp.hf.export import *\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\nbefore = peak()\n"
        f"main(ExportConfig(path={run!r}, output='{tmp_path}/hf'))\nprint(peak() - before)"
    )
    # by way of a shell, which forks: a process started by this one would begin with its peak
    shell = ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, code]
    ended = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(ended.stdout.splitlines()[-1]) < 2 * 98 + 200


def texts() -> list[str]:
    page, draw = CORPUS.read_text(), random.Random(1)
    ranges = ((1, 127), (128, 0x2FFF), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF))
    wild = [
        "".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(draw.randint(1, 30)))
        for _ in range(800)
    ]
    starts = [draw.randrange(len(page)) for _ in range(1200)]
    cut = [page[at : at + draw.randint(1, 200)] for at in starts]
    odd = ["", " ", "  a", "\t\n x", "日本語 é", "a\x00b", "😀🏳️‍🌈", "   \n\n\n   x  ", "\u2581 x"]
    return [text for text in (*cut, *wild, *odd) if "</s>" not in text and "<s>" not in text]


def are_equally_likely(model: Path, *cuts: list[int]) -> bool:
    """Whether a unigram model may choose any of these ways to cut a text, by their scores."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    scores = [sum(processor.get_score(piece) for piece in cut) for cut in cuts]
    return max(scores) - min(scores) < 1e-3


@pytest.mark.parametrize("kind", ["byte", "bpe", "unigram"])
def test_exported_tokenizer_agrees_id_for_id(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model, folder = tmp_path / "tokenizer.model", tmp_path / "hf"
    if kind != "byte":
        model.write_bytes(train_sentencepiece(iter(CORPUS.read_text().split("\n\n")), 900, kind))
    ours = load_tokenizer("byte" if kind == "byte" else str(model))
    folder.mkdir()
    assert not export_tokenizer(ours, folder, 4096, None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    # without these fields llama.cpp adds tokens
    assert settings["add_bos_token"] is settings["add_eos_token"] is False
    assert kind == "byte" or settings["add_prefix_space"] is False
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token_id == ours.vocabulary.eos_id
    strings = texts()
    for text, tokens in zip(strings, ours.encode(strings), strict=True):
        found, ids = theirs(text)["input_ids"], tokens.tolist()
        is_equal = found == ids or (kind == "unigram" and are_equally_likely(model, found, ids))
        assert is_equal and theirs.decode(found) == ours.decode(ids), repr(text)


@pytest.mark.slow
def test_run_exports_its_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "a rün"
    exports = folder / "exports"
    flags = "--num_kv_heads=2", "--checkpoint_interval=2", "--export_interval=4", "--keep_last_n=1"
    argv = (*TINY, *SMALL, "--trackers=none", *flags, f"--output_dir={folder}", "--num_steps=5")
    ended = run(*argv, "--exit_interval=4", nproc=2)  # before its export of step 4 is done
    assert ended.returncode == 75, ended.stderr
    assert json.loads((exports / "due.json").read_text()) == {"steps": [4]}
    run_dir = make(folder, *flags, "--num_steps=5", nproc=2)
    assert sorted(path.name for path in exports.iterdir()) == ["step_4", "step_5"]
    kept = [path.name for path in (folder / "checkpoints").glob("step_*")]
    assert kept == ["step_5"]  # spared until they were exported
    # The job was killed during the last export.
    shutil.rmtree(exports / "step_5")
    (exports / "due.json").write_text('{"steps": [5]}')
    output = trained(*argv)
    assert f"exported {exports}/step_5" in output and "already finished at step 5" in output
    assert sorted(path.name for path in exports.iterdir()) == ["step_4", "step_5"]
    # By hand in a locale without UTF-8, although the card has the name of the run directory. As an
    # argument such a locale cannot spell the name.
    command = [sys.executable, "-m", "fms_fsdp", "export", "--path=."]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [*command, f"--output={tmp_path / 'by_hand'}"],
        cwd=run_dir,
        env=os.environ | ascii_only,
        check=True,
    )
    for path in (tmp_path / "by_hand").iterdir():
        assert (exports / "step_5" / path.name).read_bytes() == path.read_bytes(), path
    card = (exports / "step_5" / "README.md").read_text(encoding="utf-8")
    copied = shlex.split(card.rpartition("```text\n")[2].partition("```")[0])
    assert f"--output_dir={folder}" in copied and "--num_kv_heads=2" in copied
    (exports / "step_6").mkdir()  # of a branch that was left behind
    make(folder, *flags, "--num_steps=6")
    log = (folder / "log.txt").read_text()
    assert f"exported {exports}/step_5" in log
    assert f"renamed export to {exports}/step_6.superseded-1" in log
    assert f"exported {exports}/step_6" in log
