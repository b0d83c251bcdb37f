"""Generated text: its distribution, batches of prompts, the command."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fms_fsdp.__main__ import main
from fms_fsdp.config import FP32, TrainConfig
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.errors import UserError
from fms_fsdp.generate import Sampling, _allocate, generate, probabilities, read_lines
from fms_fsdp.hf.trained import Trained
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.init import init_weights
from fms_fsdp.models.llama import Llama
from fms_fsdp.tools.evaluate_command import _shape_of_evaluation, _Subject
from fms_fsdp.tools.tool_flags import GenerateConfig
from tests.cli import CORPUS, losses, made_once, trained
from tests.hf_folders import template, write_folder, write_tokenizer_json
from tests.specs import planned
from tests.warm import command

GREEDY = Sampling(temperature=0)
SHAPE = ("--model_variant=tiny", "--seq_length=48")
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


def test_cache_does_not_change_greedy_text(model: Llama) -> None:
    for prompt, text in zip(PROMPTS, texts(model, PROMPTS, GREEDY), strict=True):
        expected = list(prompt)
        for _ in range(10):
            with torch.no_grad():
                expected.append(int(model(torch.tensor([expected]))[0, -1].argmax()))
        assert text == expected[len(prompt) :]


def test_prompts_do_not_depend_on_the_batch(model: Llama) -> None:
    """In fp64: in fp32 other shapes round otherwise, which can turn a draw."""
    model = copy.deepcopy(model).double()
    sampling = Sampling(temperature=1.3, top_k=30, top_p=0.95)
    together = texts(model, PROMPTS, sampling, seed=7)
    alone = [texts(model, [each], sampling, seed=7 + i)[0] for i, each in enumerate(PROMPTS)]
    assert together == alone and len({tuple(text) for text in together}) == 3
    assert texts(model, PROMPTS, sampling, seed=8) != together


def test_text_ends_with_context_or_eos(model: Llama) -> None:
    (text,) = texts(model, [[5] * 20], GREEDY, max_new_tokens=100)
    assert len(text) == 4
    (before,) = texts(model, [[3]], Sampling(), seed=1)
    end = before[4]
    (after,) = texts(model, [[3]], Sampling(), seed=1, end_tokens=[end, 10**9])
    assert after == before[: before.index(end)]


def test_smallest_temperature_is_greedy(model: Llama) -> None:
    for more in ({}, {"top_k": 3, "top_p": 0.5}):
        sampling = Sampling(temperature=1e-320, **more)  # type: ignore[arg-type]
        assert texts(model, [[3]], sampling) == texts(model, [[3]], GREEDY)


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_kernel_of_training_is_not_needed(kernel: str) -> None:
    shape = TransformerConfig(1, 32, 64, 4, 2, 61, max_seq_len=24, attn_impl=kernel)
    model = _allocate(shape, "cpu")
    init_weights(model, seed=3)
    assert len(texts(model, [[1, 2, 3]], GREEDY)[0]) == 10
    subject = _Subject(Trained(Path("run"), shape), FP32, TrainConfig(), 1, 1)
    assert _shape_of_evaluation(subject, 24).attn_impl == "auto"


def test_unusable_prompts_and_logits_are_errors(model: Llama) -> None:
    for prompt in ([], [1] * 24):
        with pytest.raises(UserError, match=r"must have 1 to 23 tokens"):
            texts(model, [[1], prompt], GREEDY)
    with pytest.raises(UserError, match="token 61 is not in the model's vocabulary of 61"):
        texts(model, [[3], [4, 61]], GREEDY)
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.head.norm.weight[0] = float("nan")  # type: ignore[union-attr, index]
    for sampling in (GREEDY, Sampling(), Sampling(top_k=3)):
        with pytest.raises(UserError, match="the logits are not finite"):
            texts(broken, [[3]], sampling)


def test_text_of_hf_checkpoint_equals_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy text with the BOS token of its tokenizer and the EOS tokens of its config."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_folder(tmp_path)
    write_tokenizer_json(tmp_path, template())
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    given = tokenizer("the in", return_tensors="pt").input_ids
    assert given[0, 0] == 256
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = theirs.generate(given, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
    drawn = ids[given.shape[1] :]
    flags = [f"--path={tmp_path}", "--temperature=0", "--max_new_tokens=12", "--prompt=the in"]
    for end in (299, drawn[5]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, end]}))
        kept = drawn[: drawn.index(end)] if end in drawn else drawn
        kept = [token for token in kept if token < 261]  # the model has more
        assert main(["generate", *flags]) == 0
        expected = tokenizer.decode([*given[0], *kept], skip_special_tokens=True)
        assert capsys.readouterr().out == expected + "\n"


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
        flags = ["--train_tokenizer", "--vocab_size=400", r"--text_separator=\n\n"]
        argv = ["prepare", f"--input=pages={CORPUS}", f"--output={folder}/data", *flags]
        command(*argv).check_returncode()
        data = [f"--data_path={folder}/data", f"--output_dir={folder}/run"]
        trained(*SHAPE, *data, "--batch_size=4", "--num_steps=4")

    return made_once(tmp_path_factory, "written", make) / "run"


def written(run: Path, *flags: str, code: int = 0) -> str:
    ended = command("generate", f"--path={run}", *flags)
    assert ended.returncode == code, ended.stderr
    return ended.stdout if code == 0 else ended.stderr


def test_prompt_files_split_at_line_feeds(tmp_path: Path) -> None:
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
    for wrong, rule in (
        ("--prompt=a\x1b[2J", "must not contain control characters"),
        ("--prompt=\udcc3", "must be text in the encoding of the locale"),
    ):
        with pytest.raises(UserError, match=rule):
            read([wrong])


@pytest.mark.slow
def test_command_prints_text_and_json(run: Path, tmp_path: Path) -> None:
    flags = ("--prompt= (The run ", "--max_new_tokens=20", "--seed=3")  # with its spaces
    one = written(run, *flags)
    record = json.loads(written(run, *flags, "--json=True"))
    assert record["prompt"] == " (The run " and len(one) > 15
    assert record["prompt"] + record["text"] + "\n" == one
    (tmp_path / "prompts").write_text("A checkpoint\n\nThe run\n")
    many = (f"--prompts={tmp_path}/prompts", "--num_samples=2", "--dtype=bf16", "--batch_size=4")
    lines = written(run, *many, "--json=True").splitlines()
    expected = [prompt for prompt in ("A checkpoint", "", "The run") for _ in range(2)]
    assert [json.loads(line)["prompt"] for line in lines] == expected


@pytest.mark.slow
def test_exported_checkpoint_generates_the_same(run: Path, tmp_path: Path) -> None:
    exported = tmp_path / "hf"
    assert main(["export", f"--path={run}", f"--output={exported}", "--dtype=fp32"]) == 0
    flags = ["--prompt=The run", "--max_new_tokens=20", "--seed=3"]
    text = written(run, *flags)
    # tokenizer.json writes broken characters differently
    assert written(exported, *flags)[:10] == text[:10]
    (exported / "tokenizer.json").unlink()
    assert written(exported, *flags) == text
    assert "--step=4 is not supported" in written(exported, *flags, "--step=4", code=2)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        (exported / name).unlink()
    assert "has no tokenizer" in written(exported, *flags, code=2)


@pytest.mark.slow
def test_interactive_answers_each_line(run: Path) -> None:
    flags = ["--seed=3", "--max_new_tokens=5"]
    ended = command(
        "generate",
        f"--path={run}",
        "--interactive",
        *flags,
        stdin="The run\n" + "x" * 999 + "\nA page\n",
    )
    assert ended.returncode == 0 and ended.stderr.count("\n") == 1
    assert "must have 1 to 47 tokens" in ended.stderr
    expected = [written(run, f"--prompt={prompt}", *flags) for prompt in ("The run", "A page")]
    assert ended.stdout == "".join(expected)


@pytest.mark.slow
def test_samples_leave_training_bit_equal(run: Path, tmp_path: Path) -> None:
    """Of a sharded and compiled model."""
    (tmp_path / "prompts").write_text("The run\n\nA checkpoint\n")
    flags = [*SHAPE, f"--data_path={run.parent / 'data'}", "--global_batch_size=4", "--num_steps=3"]
    flags += ["--report_interval=1", "--save_last=False", "--learning_rate=1e-2"]
    flags += ["--sharding_strategy=fsdp", "--mixed_precision=True", "--use_torch_compile=True"]
    samples = ["--sample_interval=2", f"--sample_prompts={tmp_path}/prompts"]
    how: dict[str, Any] = {"nproc": 2, "backend": "aot_eager"}
    trained(*flags, f"--output_dir={tmp_path}/without", **how)
    said = trained(*flags, *samples, f"--output_dir={tmp_path}/with", **how)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    texts = (tmp_path / "with/samples.txt").read_text()
    assert texts.count("--- step 2 ---\n") == texts.count("--- step 3 ---\n") == 3
    assert texts.startswith("--- step 2 ---\nThe run") and "--- step 3 ---\nA checkpoint" in texts
    assert len(texts) > 200 and said.count("sample @2\n") == 3 and "compile and step" in said
    assert re.search(r"compiling \d+ blocks? for the first step", said)
    assert main(["report", str(tmp_path / "with")]) == 0
    assert "--- step 3 ---" in (tmp_path / "with/report.html").read_text()
    (events,) = (tmp_path / "with/tensorboard").glob("events*")
    assert b"samples/text_summary" in events.read_bytes()


@pytest.mark.slow
def test_unusable_samples_and_prompts_are_errors(
    run: Path, eight_steps: Path, tmp_path: Path
) -> None:
    data = f"--data_path={run.parent / 'data'}"
    for text, flags in (
        ("--sample_interval=2 requires a tokenizer in --data_path", ["--use_dummy_dataset=True"]),
        ("must have 1 to 47 tokens", [data, f"--sample_prompts={'x' * 999}"]),
    ):
        with pytest.raises(UserError, match=text):
            planned([*SHAPE, "--sample_interval=2", f"--output_dir={tmp_path}/run", *flags])
    for words, path, flags in (
        ("must have 1 to 47 tokens", run, ["--prompt=" + "x" * 999]),
        ("checkpoint", tmp_path, []),
        ("has no tokenizer", eight_steps, []),
    ):
        told = written(path, *flags, code=2)
        assert told.count("\n") == 1 and words in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("k", "p", "t"), [(0, 1.0, 1.0), (7, 1.0, 0.7), (0, 0.6, 1.3), (9, 0.5, 0.9)]
)
def test_probabilities_equal_a_plain_reference(k: int, p: float, t: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    found = probabilities(logits, Sampling(temperature=t, top_k=k, top_p=p))
    for row, logit in zip(found, logits, strict=True):
        order = logit.argsort(descending=True)[: k or 50]
        weights = (logit[order] / t).softmax(-1)
        keep = [i for i in range(len(order)) if weights[:i].sum() < p]
        expected = torch.zeros(50)
        expected[order[keep]] = weights[keep] / weights[keep].sum()
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-6)
