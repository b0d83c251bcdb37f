"""A checkpoint → a folder of Hugging Face: the same logits and token ids, complete or absent."""

from __future__ import annotations

import json
import random
import re
import shlex
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
from fms_fsdp.data.tokenizer import load_tokenizer
from fms_fsdp.hf.config import config_to_hf, find_family
from fms_fsdp.hf.tokenizer import export_tokenizer
from fms_fsdp.hf.weights import fuse, weight_map
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.tools.prepare.command import train_sentencepiece
from tests.cli import CORPUS, ROOT, TINY, trained
from tests.warm import COMMANDS, command, running

SMALL = (
    "--num_layers=2",
    "--hidden_size=64",
    "--ffn_hidden_size=96",
    "--num_attention_heads=4",
    "--num_steps=2",
)
MODELS = {
    "grouped": ("--num_kv_heads=2",),
    "each its own": ("--num_kv_heads=4", "--rope_theta=5000"),
    "padded GPT-2": ("--model_variant=gpt3_125m", "--vocab_size=301", "--dropout=0.1"),
    "NeoX": ("--model_variant=pythia_70m", "--vocab_size=300"),
    "Mistral": ("--num_kv_heads=2", "--attn_window=9", "--max_seq_len=80"),
    "Qwen3": ("--num_kv_heads=2", "--head_dim=24", "--qk_norm=True"),
    "Qwen2": ("--num_kv_heads=2", "--qkv_bias=True"),
    "tied and scaled": ("--model_variant=llama3.2_1b", "--num_kv_heads=2", "--vocab_size=300"),
}


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
@pytest.mark.parametrize("name", MODELS)
def test_transformers_load_it_and_give_the_same_logits(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path / "run", *MODELS[name])
    assert export(f"--path={run}", f"--output={tmp_path}/hf", "--dtype=fp32") == 0
    assert differing_logits(run, tmp_path / "hf") <= 1e-5
    # a scaled model that was trained on rows shorter than the original context is told so
    assert "warn" not in capfd.readouterr().err.lower() or "scaled" in name


@pytest.mark.slow
def test_a_sharded_checkpoint_in_several_files_of_bf16(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run = make(tmp_path / "run", "--sharding_strategy=fsdp", "--num_kv_heads=2", nproc=2)
    assert export(f"--path={run}", f"--output={tmp_path}/hf", "--max_shard_gb=0.0002") == 0
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "| step | 2 |" in card and "--sharding_strategy=fsdp" in card and "--adam_beta2=" in card
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert len(files) > 1 and all(path.stat().st_size < 3e5 for path in files)
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert set(tensors) == set(index["weight_map"]) and {t.dtype for t in tensors.values()} == {
        torch.bfloat16
    }
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    model = fms_fsdp.load_model(run)[0]
    ours, weights = model.state_dict(), weight_map(model.config)
    for theirs, weight in weights.items():
        assert torch.equal(
            fuse(model.config, weight.ours, ours.__getitem__).bfloat16(), tensors[theirs]
        )
    assert differing_logits(run, tmp_path / "hf") <= 3e-2


@pytest.mark.slow
def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path / "run")

    def refused(*flags: str) -> str:
        assert export(*flags) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        return error

    (tmp_path / "taken").mkdir()
    assert "must not exist; choose another" in refused(
        f"--path={run}", f"--output={tmp_path}/taken"
    )
    assert "--output is missing" in refused(f"--path={run}")
    assert "must hold a complete checkpoint" in refused(
        f"--path={tmp_path}", f"--output={tmp_path}/hf"
    )
    assert "--dtype=fp8 must be one of" in refused(
        f"--path={run}", f"--output={tmp_path}/hf", "--dtype=fp8"
    )
    learned = make(tmp_path / "learned", "--pos_emb=learned")
    assert "--pos_emb=learned (not rope)" in refused(f"--path={learned}", f"--output={tmp_path}/hf")
    (file,) = (tmp_path / "run/checkpoints/step_2").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert "is corrupt: " in refused(f"--path={run}", f"--output={tmp_path}/hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["learned", "run", "taken"]


@pytest.mark.slow
def test_a_killed_export_leaves_no_folder_and_the_next_one_is_whole(tmp_path: Path) -> None:
    run = make(tmp_path / "run", "--vocab_size=200000")
    argv = ["export", f"--path={run}", f"--output={tmp_path}/hf"]
    with running(argv, program=COMMANDS) as process:
        while not list(tmp_path.glob(".hf.partial/*.safetensors")):
            assert process.exitcode is None, "it ended before it could be killed"
            time.sleep(0.002)
    assert process.exitcode == -signal.SIGKILL and not (tmp_path / "hf").exists()
    assert command(*argv).returncode == 0
    assert (
        not (tmp_path / ".hf.partial").exists() and differing_logits(run, tmp_path / "hf") <= 3e-2
    )


@pytest.mark.slow
def test_memory_is_that_of_two_of_the_largest_weight(tmp_path: Path) -> None:
    run = make(
        tmp_path / "run", "--vocab_size=400000", "--num_layers=1"
    )  # 102 MB each: embedding and head
    code = (
        "import resource, sys\nfrom fms_fsdp.tools.export import *\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\nbefore = peak()\n"
        f"main(ExportConfig(path={run!r}, output={str(tmp_path / 'hf')!r}))\nprint(peak() - before)"
    )
    # by way of a shell, which forks: a process started by this one would begin with the peak of pytest
    done = subprocess.run(
        ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, code],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert float(done.stdout.splitlines()[-1]) < 2 * 98 + 200, done.stdout + done.stderr


def test_the_configuration_has_both_spellings_and_every_weight_a_name() -> None:
    for name, config in VARIANTS.items():
        if config.pos_emb == "none" or name.startswith(("smollm3", "granite", "olmo2")):
            continue
        content = config_to_hf(config, "bfloat16", 2)
        assert content["torch_dtype"] == content["dtype"] == "bfloat16"
        assert content["architectures"][0].startswith(find_family(config).architecture)
        if config.pos_emb != "rope":
            continue
        assert (
            content["rope_parameters"]["rope_theta"] == content["rope_theta"] == config.rope_theta
        ), name
        assert (content["rope_scaling"] is None) == (config.rope_scaling is None)
    for tied in (False, True):
        config = TransformerConfig(2, 64, 96, 4, 2, 120, tie_embeddings=tied)
        with torch.device("meta"):
            parts = [name for weight in weight_map(config).values() for name in weight.ours]
            assert sorted(parts) == sorted(Llama(config).state_dict())


def texts() -> list[str]:
    page = CORPUS.read_text()
    draw, ranges = random.Random(1), ((1, 127), (128, 0x2FFF), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF))
    wild = [
        "".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(draw.randint(1, 30)))
        for _ in range(4000)
    ]
    cut = [
        page[at : at + draw.randint(1, 200)]
        for at in (draw.randrange(len(page)) for _ in range(6000))
    ]
    return [
        *cut,
        *wild,
        "",
        " ",
        "  a",
        "\t\n x",
        "日本語 é",
        "a\x00b",
        "😀🏳️‍🌈",
        "   \n\n\n   x  ",
        "\u2581 x",
        "   two\n  lines  ",
    ]


def are_equally_likely(model: Path, *cuts: list[int]) -> bool:
    """Whether a unigram model scores these ways to cut a text alike: it may then choose any of them."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    scores = [sum(processor.get_score(piece) for piece in cut) for cut in cuts]
    return max(scores) - min(scores) < 1e-3


@pytest.mark.parametrize("kind", ["byte", "bpe", "unigram"])
def test_the_fast_tokenizer_agrees_id_for_id(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = tmp_path / "tokenizer.model"
    if kind != "byte":
        corpus = CORPUS.read_text().split("\n\n")
        model.write_bytes(train_sentencepiece(iter(corpus), 900, kind))
    ours = load_tokenizer("byte" if kind == "byte" else str(model))
    folder = tmp_path / "hf"
    folder.mkdir()
    note = export_tokenizer(ours, folder, 4096, None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (
        settings["add_bos_token"] is settings["add_eos_token"] is False
    )  # without them llama.cpp adds
    assert kind == "byte" or settings["add_prefix_space"] is False
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert not note
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token_id == ours.vocabulary.eos_id
    strings = [text for text in texts() if "</s>" not in text and "<s>" not in text]
    assert len(strings) > 10_000
    for text, tokens in zip(strings, ours.encode(strings), strict=True):
        found, ids = theirs(text)["input_ids"], tokens.tolist()
        assert found == ids or (kind == "unigram" and are_equally_likely(model, found, ids)), repr(
            text
        )
        assert theirs.decode(found) == ours.decode(ids), repr(text)


@pytest.mark.slow
def test_a_run_exports_its_own_checkpoints(tmp_path: Path) -> None:
    flags = (
        "--num_kv_heads=2",
        "--checkpoint_interval=2",
        "--export_interval=4",
        "--keep_last_n=1",
    )
    folder = tmp_path / "a run"
    run = make(folder, *flags, "--num_steps=5", nproc=2)
    exports = folder / "exports"
    assert sorted(path.name for path in exports.iterdir()) in (["step_4", "step_5"], ["step_5"])
    assert export(f"--path={run}", f"--output={tmp_path / 'by_hand'}") == 0
    for path in (tmp_path / "by_hand").iterdir():
        assert (exports / "step_5" / path.name).read_bytes() == path.read_bytes(), path
    card = (exports / "step_5" / "README.md").read_text()
    copied = shlex.split(card.rpartition("```text\n")[2].partition("```")[0])
    assert f"--output_dir={folder}" in copied and "--num_kv_heads=2" in copied
    log = (folder / "log.txt").read_text()
    assert f"exported {exports}/step_5" in log
    (exports / "step_6").mkdir()  # where the next one belongs
    make(folder, *flags, "--num_steps=6")
    log = (folder / "log.txt").read_text()
    assert re.search(
        r"step 6 was not exported: export: error: --output \(.*step_6\) must not exist", log
    )
