"""Text of a model: the distribution it is drawn from, rows in lock step, the command."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fms_fsdp.__main__ import main
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.errors import UserError
from fms_fsdp.generate import Sampling, generate, probabilities, read_lines
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.init import init_weights
from fms_fsdp.models.llama import Llama
from fms_fsdp.tools.generate import GenerateConfig
from tests.cli import CORPUS, ROOT, losses, made_once, trained
from tests.cli import run as launched
from tests.hf_folders import template, write_folder, write_tokenizer_json
from tests.warm import command

GREEDY = Sampling(temperature=0)
PROMPTS = ([5, 6, 7, 8, 9, 10], [3], [11, 12, 13])


@pytest.fixture(scope="module", params=["rope", "learned", "relative"])
def model(request: pytest.FixtureRequest) -> Llama:
    config = TransformerConfig(
        2, 32, 64, 4, 2, 61, max_seq_len=24, pos_emb=request.param, init_std=0.3
    )
    made = build_model(config)
    init_weights(made, seed=3)
    return made.eval()


def texts(
    model: Llama, prompts: Sequence[Sequence[int]], sampling: Sampling, **more: Any
) -> list[list[int]]:
    columns = list(generate(model, prompts, sampling, **{"max_new_tokens": 10, **more}))
    return [[token for token in row if token is not None] for row in zip(*columns, strict=True)]


def test_greedy_text_with_a_cache_is_that_without_one(model: Llama) -> None:
    for prompt, text in zip(PROMPTS, texts(model, PROMPTS, GREEDY), strict=True):
        expected = list(prompt)
        for _ in range(10):
            with torch.no_grad():
                expected.append(int(model(torch.tensor([expected]))[0, -1].argmax()))
        assert text == expected[len(prompt) :]


def test_a_row_is_what_it_would_be_alone(model: Llama) -> None:
    """In fp64: in fp32 other shapes round otherwise, which can turn a draw."""
    model = copy.deepcopy(model).double()
    sampling = Sampling(temperature=1.3, top_k=30, top_p=0.95)
    together = texts(model, PROMPTS, sampling, seed=7)
    alone = [
        texts(model, [prompt], sampling, seed=7 + row)[0] for row, prompt in enumerate(PROMPTS)
    ]
    assert together == alone and len({tuple(text) for text in together}) == 3
    assert texts(model, PROMPTS, sampling, seed=8) != together


def test_a_text_ends_with_the_context_and_before_the_end_token(model: Llama) -> None:
    (text,) = texts(model, [[5] * 20], GREEDY, max_new_tokens=100)
    assert len(text) == 4
    (before,) = texts(model, [[3]], Sampling(), seed=1)
    end = before[4]
    (after,) = texts(model, [[3]], Sampling(), seed=1, end_tokens=[end])
    assert after == before[: before.index(end)]
    for prompt in ([], [1] * 24):
        with pytest.raises(ValueError, match=r"must have 1 to 23 tokens"):
            texts(model, [[1], prompt], GREEDY)


def test_the_smallest_temperature_takes_the_likeliest(model: Llama) -> None:
    (expected,) = texts(model, [[3]], GREEDY)
    for sampling in (
        Sampling(temperature=1e-320),
        Sampling(temperature=1e-320, top_k=3, top_p=0.5),
    ):
        assert texts(model, [[3]], sampling) == [expected]


def test_logits_that_are_not_finite_are_told_in_one_line(model: Llama) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.head.norm.weight[0] = float("nan")  # type: ignore[union-attr, index]
    for sampling in (GREEDY, Sampling(), Sampling(top_k=3)):
        with pytest.raises(UserError, match="the logits are not finite"):
            texts(broken, [[3]], sampling)


def test_tokens_that_the_model_does_not_have_are_told_in_one_line(model: Llama) -> None:
    with pytest.raises(UserError, match="token 61 is not in the model's vocabulary of 61"):
        texts(model, [[3], [4, 61]], GREEDY)
    assert texts(model, [[3]], GREEDY, end_tokens=[10**9]) == texts(model, [[3]], GREEDY)


def test_a_folder_s_begin_and_end_tokens_are_those_of_its_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers: greedy text behind the ids of its tokenizer; with CRLF from a pipe, too."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_folder(tmp_path)
    write_tokenizer_json(tmp_path, template())
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    given = tokenizer("the in", return_tensors="pt").input_ids
    assert given[0, 0] == 256
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = theirs.generate(given, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
    flags = [f"--path={tmp_path}", "--temperature=0", "--max_new_tokens=12"]

    def written(*more: str) -> str:
        assert main(["generate", *flags, *more]) == 0
        return capsys.readouterr().out

    drawn = ids[given.shape[1] :]
    for end in (299, drawn[5]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, end]}))
        kept = drawn[: drawn.index(end)] if end in drawn else drawn
        kept = [token for token in kept if token < 261]  # the model has more
        expected = tokenizer.decode([*given[0], *kept], skip_special_tokens=True)
        assert written("--prompt=the in") == expected + "\n"


def test_draws_follow_the_distribution(model: Llama) -> None:
    """Chi-square over 4,000 rows of the same prompt."""
    with torch.no_grad():
        expected = model(torch.tensor([[3, 4]]))[0, -1].double().softmax(-1)
    drawn = [row[0] for row in texts(model, [[3, 4]] * 4000, Sampling(), max_new_tokens=1)]
    counts = torch.bincount(torch.tensor(drawn), minlength=61)
    often = expected * 4000 >= 5
    pairs = [(counts[often], expected[often]), (counts[~often].sum(), expected[~often].sum())]
    chi = sum(float(((count - 4000 * p) ** 2 / (4000 * p)).sum()) for count, p in pairs)
    freedom = int(often.sum())
    assert chi < freedom + 5 * (2 * freedom) ** 0.5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on text, with its tokenizer."""

    def make(folder: Path) -> None:
        flags = [f"--output={folder}/data", "--train_tokenizer", "--vocab_size=400"]
        flags += [r"--text_separator=\n\n"]
        command("prepare", f"--input=pages={CORPUS}", *flags).check_returncode()
        shape = [
            "--model_variant=tiny",
            f"--data_path={folder}/data",
            "--seq_length=48",
            "--batch_size=4",
        ]
        trained(*shape, "--num_steps=4", f"--output_dir={folder}/run")

    return made_once(tmp_path_factory, "written", make) / "run"


def written(run: Path, *flags: str, code: int = 0) -> str:
    ended = command("generate", f"--path={run}", *flags)
    assert ended.returncode == code, ended.stderr
    return ended.stdout if code == 0 else ended.stderr


def test_a_file_of_prompts_is_cut_at_line_feeds_alone(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes("a\u2028b\r\nc\rd\x0ce\n\nf\u0085".encode())
    assert read_lines(path, "--prompts") == ["a\u2028b", "c\rd\x0ce", "", "f\u0085"]
    path.write_bytes(b"")
    assert read_lines(path, "--prompts") == []
    path.write_bytes(b"a\xff")
    with pytest.raises(UserError, match=r"--prompts=.* must be UTF-8: .* at byte 1"):
        read_lines(path, "--prompts")


def test_flags_sample_from_all_tokens_by_default() -> None:
    config = GenerateConfig()
    assert Sampling(config.temperature, config.top_k, config.top_p) == Sampling(temperature=0.8)
    assert parse_flags(GenerateConfig, ["--top_k=0"]) == config


def test_prompt_may_have_spaces_and_lines() -> None:
    read = partial(parse_flags, GenerateConfig)
    text = " def f(x):\n\treturn x\r\n\u00a0\u2028👩‍👧"
    assert read([f"--prompt={text}"]).prompt == text
    for wrong in ("--prompt=a\x1b[2J", "--prompt=\ud800"):
        with pytest.raises(UserError, match="must not contain control characters"):
            read([wrong])


@pytest.mark.parametrize("name", ["min_p", "repetition_penalty", "stop", "use_torch_compile"])
def test_removed_flag_names_its_reason(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", f"--{name}=1"]) == 2
    assert f"--{name} is not a flag; it was removed" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_writes_the_same_text_in_every_form(run: Path, tmp_path: Path) -> None:
    one = written(run, "--prompt=The run", "--max_new_tokens=20", "--seed=3")
    assert one.startswith("The run") and len(one) > 12
    spaced = json.loads(written(run, "--prompt= (The ", "--max_new_tokens=1", "--json=True"))
    assert spaced["prompt"] == " (The "  # to the last space
    (line,) = written(
        run, "--prompt=The run", "--max_new_tokens=20", "--seed=3", "--json=True"
    ).splitlines()
    record = json.loads(line)
    assert record["prompt"] + record["text"] + "\n" == one
    (tmp_path / "prompts").write_text("A checkpoint\n\nThe run\n")
    lines = written(
        run,
        f"--prompts={tmp_path}/prompts",
        "--num_samples=2",
        "--json=True",
        "--dtype=bf16",
        "--batch_size=4",
    ).splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["A checkpoint"] * 2 + [""] * 2 + [
        "The run"
    ] * 2


@pytest.mark.slow
def test_a_folder_of_hugging_face_is_read_in_place_and_writes_what_the_run_writes(
    run: Path, tmp_path: Path
) -> None:
    assert main(["export", f"--path={run}", f"--output={tmp_path}/hf", "--dtype=fp32"]) == 0
    flags = ["--prompt=The run", "--max_new_tokens=20", "--seed=3"]
    text = written(run, *flags)
    # Of tokenizer.json, which writes broken characters differently.
    assert written(tmp_path / "hf", *flags)[:10] == text[:10]
    (tmp_path / "hf/tokenizer.json").unlink()
    assert written(tmp_path / "hf", *flags) == text
    assert "--step=4 is not supported" in written(tmp_path / "hf", *flags, "--step=4", code=2)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        (tmp_path / "hf" / name).unlink()
    assert "has no tokenizer" in written(tmp_path / "hf", *flags, code=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.slow
def test_lines_of_a_pipe_are_answered_one_by_one(run: Path) -> None:
    asked = "The run\n" + "x" * 999 + "\nA page\n"
    command = [
        sys.executable,
        "-m",
        "fms_fsdp",
        "generate",
        f"--path={run}",
        "--interactive",
        "--seed=3",
    ]
    command.append("--max_new_tokens=5")
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=ROOT, input=asked
    )
    assert (
        ended.returncode == 0
        and "must have 1 to 47 tokens" in ended.stderr
        and ended.stderr.count("\n") == 1
    )
    first = written(run, "--prompt=The run", "--max_new_tokens=5", "--seed=3")
    assert ended.stdout == first + written(run, "--prompt=A page", "--max_new_tokens=5", "--seed=3")
    assert "cannot be used together" in written(run, "--interactive", "--prompt=a", code=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [("--sharding_strategy=fsdp", "--mixed_precision=True"), ("--use_torch_compile=True",)]
)
def test_samples_of_a_training_change_nothing_in_it(
    run: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    data = run.parent / "data"
    (tmp_path / "prompts").write_text("The run\n\nA checkpoint\n")
    flags = [
        "--model_variant=tiny",
        f"--data_path={data}",
        "--seq_length=48",
        "--global_batch_size=4",
    ]
    flags += [
        "--num_steps=3",
        "--report_interval=1",
        "--save_last=False",
        "--learning_rate=1e-2",
        *more,
    ]
    how: dict[str, Any] = {"nproc": 2} if "fsdp" in more[0] else {"backend": "aot_eager"}
    trained(*flags, f"--output_dir={tmp_path}/without", **how)
    samples = ["--sample_interval=2", f"--sample_prompts={tmp_path}/prompts"]
    said = trained(*flags, *samples, f"--output_dir={tmp_path}/with", **how)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    texts = (tmp_path / "with/samples.txt").read_text()
    assert texts.count("--- step 2 ---\n") == texts.count("--- step 3 ---\n") == 3
    assert texts.startswith("--- step 2 ---\nThe run") and "--- step 3 ---\nA checkpoint" in texts
    assert len(texts) > 200 and said.count("sample at step 2: ") == 3
    assert main(["report", str(tmp_path / "with")]) == 0
    assert "--- step 3 ---" in (tmp_path / "with/report.html").read_text()
    (events,) = (tmp_path / "with/tensorboard").glob("events*")
    assert b"samples/text_summary" in events.read_bytes()


@pytest.mark.slow
def test_samples_that_cannot_be_written_are_refused_before_any_work(
    run: Path, tmp_path: Path
) -> None:
    data = f"--data_path={run.parent / 'data'}"
    for text, flags in (
        ("--sample_interval=2 requires a tokenizer in --data_path", ["--use_dummy_dataset=True"]),
        ("must have 1 to 15 tokens", [data, f"--sample_prompts={'x' * 99}"]),
        ("must have 1 to 15 tokens", [data, f"--sample_prompts={'x' * 999}"]),
    ):
        shape = ["--model_variant=tiny", "--seq_length=16", f"--output_dir={tmp_path}/run"]
        ended = launched(*shape, "--sample_interval=2", *flags)
        assert ended.returncode == 2 and text in ended.stderr and ended.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_cannot_be_written_is_one_line(run: Path, tmp_path: Path) -> None:
    assert "must have 1 to 47 tokens" in written(run, "--prompt=" + "x" * 999, code=2)
    assert "cannot be used together" in written(run, "--prompt=a", "--prompts=b", code=2)
    assert "must be a run folder" in written(tmp_path, code=2) or "checkpoint" in written(
        tmp_path, code=2
    )
    trained(
        "--use_dummy_dataset=True",
        "--model_variant=tiny",
        "--seq_length=16",
        "--num_steps=1",
        f"--output_dir={tmp_path}/dummy",
    )
    told = written(tmp_path / "dummy", code=2)
    assert told.count("\n") == 1 and "has no tokenizer" in told


def test_probabilities_equal_a_plain_reference() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    for k, p, t in ((0, 1.0, 1.0), (7, 1.0, 0.7), (0, 0.6, 1.3), (9, 0.5, 0.9)):
        found = probabilities(logits, Sampling(temperature=t, top_k=k, top_p=p))
        for row, logit in zip(found, logits, strict=True):
            order = logit.argsort(descending=True)[: k or 50]
            weights = (logit[order] / t).softmax(-1)
            keep = [i for i in range(len(order)) if weights[:i].sum() < p]
            expected = torch.zeros(50)
            expected[order[keep]] = weights[keep] / weights[keep].sum()
            torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_text_equals_transformers(family: str, tmp_path: Path) -> None:
    import transformers

    from fms_fsdp.generate import load

    torch.manual_seed(0)
    if family == "llama":
        theirs: Any = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                initializer_range=0.3,
            )
        )  # fmt: skip
    else:
        theirs = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3
            )
        )
    theirs.eval().save_pretrained(tmp_path)
    model = load(str(tmp_path)).model
    prompts = [[5, 6, 7, 8], [3, 9]]
    found = texts(model, prompts, GREEDY, max_new_tokens=30)
    for prompt, text in zip(prompts, found, strict=True):
        ids = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert ids[0, len(prompt) :].tolist() == text
