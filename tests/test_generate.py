"""Text of a model: the distribution it is drawn from, rows in lock step, the command."""

from __future__ import annotations

import copy
import io
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
from fms_fsdp.extras import generate as generate_module
from fms_fsdp.extras.decoding import CachedReader
from fms_fsdp.extras.generate import Sampling, generate, probabilities
from fms_fsdp.extras.prompts import read_lines
from fms_fsdp.models.init import init_weights
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.tools.generate import GenerateConfig
from tests.cli import CORPUS, ROOT, losses, made_once, trained
from tests.cli import run as launched
from tests.hf_folders import template, write_folder, write_tokenizer_json
from tests.warm import command

GREEDY = Sampling(temperature=0)
PROMPTS = ([5, 6, 7, 8, 9, 10], [3], [11, 12, 13])


@pytest.fixture(scope="module", params=["rope", "learned", "relative"])
def model(request: pytest.FixtureRequest) -> Llama:
    config = LlamaConfig(2, 32, 64, 4, 2, 61, max_seq_len=24, pos_emb=request.param, init_std=0.3)
    made = Llama(config)
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
    sampling = Sampling(temperature=1.3, top_k=30, top_p=0.95, min_p=0.001, repetition_penalty=1.2)
    together = texts(model, PROMPTS, sampling, seed=7)
    alone = [
        texts(model, [prompt], sampling, seed=7 + row)[0] for row, prompt in enumerate(PROMPTS)
    ]
    assert together == alone and len({tuple(text) for text in together}) == 3
    assert texts(model, PROMPTS, sampling, seed=8) != together


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_the_layout_of_onednn_give_the_same_logits(
    model: Llama, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bf16 on this processor")
    model = copy.deepcopy(model)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    made = list[bool]()
    pack = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda *given: made.append(True) or pack(*given)
    )
    tokens_BS, found = torch.tensor([[5, 6, 7], [8, 9, 10]]), dict[int, torch.Tensor]()
    with torch.no_grad():
        for room in (100, 10**9):
            read = CachedReader(model, 24, False, room)
            found[room] = torch.stack([read(tokens_BS), read(tokens_BS[:, :1])])
            assert len(made) == (0 if room == 100 else 2 * 7 + 1)
    list(generate(model, [[5, 6, 7]], GREEDY, max_new_tokens=2))  # it pays for many steps only
    assert len(made) == 2 * 7 + 1
    list(generate(model, [[5, 6, 7]], GREEDY, max_new_tokens=20))
    assert len(made) == 2 * (2 * 7 + 1)
    assert found[10**9].dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(
        found[10**9], found[100], rtol=tolerance, atol=tolerance * float(found[100].abs().max())
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns of deprecated calls it makes
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"pos_emb": "learned", "norm": "layernorm", "bias": True},
        {"pos_emb": "alibi", "attn_window": 5},
        {"pos_emb": "relative", "relative_buckets": 8, "relative_max_distance": 12},
    ],
)
def test_compiled_steps_give_the_same_text(shape: dict[str, Any]) -> None:
    """In fp64, as above. Block and head are compiled once for each number of rows, whatever the lengths."""
    model = (
        Llama(LlamaConfig(3, 32, 64, 4, 2, 61, max_seq_len=24, init_std=0.3, **shape))
        .eval()
        .double()
    )
    init_weights(model, seed=3)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    sampling = Sampling(temperature=1.3, top_p=0.95, repetition_penalty=1.2)
    for prompts, seed in ((PROMPTS, 1), (PROMPTS[::-1], 2), (PROMPTS[:1], 3), ([[1, 2]], 4)):
        text = texts(model, prompts, sampling, seed=seed)
        assert texts(model, prompts, sampling, seed=seed, compiled=True) == text
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * 2


def test_a_text_ends_with_the_context_and_before_the_end_token(model: Llama) -> None:
    (text,) = texts(model, [[5] * 20], GREEDY, max_new_tokens=100)
    assert len(text) == 4
    (before,) = texts(model, [[3]], Sampling(), seed=1)
    end = before[4]
    (after,) = texts(model, [[3]], Sampling(), seed=1, end_tokens=[end])
    assert after == before[: before.index(end)]
    for prompt in ([], [1] * 24):
        with pytest.raises(
            ValueError, match=r"must have 1 to 23, for the context of the model is 24"
        ):
            texts(model, [[1], prompt], GREEDY)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(top_k=3),
        Sampling(top_p=0.6),
        Sampling(min_p=0.3),
        Sampling(top_k=1),
        Sampling(temperature=2.0, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.5),
    ],
)
def test_the_distribution_is_that_of_a_slow_reference(sampling: Sampling) -> None:
    logits = torch.randn(40, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    seen = torch.rand(40, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    found = probabilities(logits, seen, sampling)
    for row in range(len(logits)):
        values = logits[row].tolist()
        for token, value in enumerate(values):
            if seen[row, token]:
                penalty = sampling.repetition_penalty
                values[token] = value / penalty if value > 0 else value * penalty
        weights = {
            t: 2.718281828459045 ** (value / sampling.temperature) for t, value in enumerate(values)
        }
        order = sorted(weights, key=lambda token: -weights[token])
        if sampling.top_k:
            order = order[: sampling.top_k]
        total, kept, above = sum(weights[token] for token in order), [], 0.0
        for token in order:
            if above < sampling.top_p * total:
                kept.append(token)
            above += weights[token]
        kept = [token for token in kept if weights[token] >= sampling.min_p * weights[kept[0]]]
        total = sum(weights[token] for token in kept)
        expected = [weights[token] / total if token in kept else 0.0 for token in range(9)]
        assert found[row].tolist() == pytest.approx(expected, abs=1e-12)


def test_the_smallest_temperature_takes_the_likeliest(model: Llama) -> None:
    (expected,) = texts(model, [[3]], GREEDY)
    for sampling in (
        Sampling(temperature=1e-320),
        Sampling(temperature=1e-320, top_k=3, top_p=0.5),
    ):
        assert texts(model, [[3]], sampling) == [expected]
    assert len(texts(model, [[3]], Sampling(repetition_penalty=1e-320))[0]) == 10


def test_logits_that_are_not_finite_are_told_in_one_line(model: Llama) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.head.norm.weight[0] = float("nan")  # type: ignore[union-attr, index]
    for sampling in (GREEDY, Sampling(), Sampling(top_k=3, repetition_penalty=1.1)):
        with pytest.raises(UserError, match="the model's logits are not finite"):
            texts(broken, [[3]], sampling)


def test_tokens_that_the_model_does_not_have_are_told_in_one_line(model: Llama) -> None:
    with pytest.raises(UserError, match="has token 61, and the model has 61"):
        texts(model, [[3], [4, 61]], GREEDY)
    assert texts(model, [[3]], GREEDY, end_tokens=[10**9]) == texts(model, [[3]], GREEDY)


def test_a_file_of_prompts_is_cut_at_line_feeds_alone(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes("a\u2028b\r\nc\rd\x0ce\n\nf\u0085".encode())
    assert read_lines(path, "--prompts") == ["a\u2028b", "c\rd\x0ce", "", "f\u0085"]
    path.write_bytes(b"")
    assert read_lines(path, "--prompts") == []
    path.write_bytes(b"a\xff")
    with pytest.raises(UserError, match=r"--prompts \(.*\) must be UTF-8: .* at byte 1"):
        read_lines(path, "--prompts")


def test_without_flags_no_token_is_left_out_and_none_is_penalized() -> None:
    config = GenerateConfig()
    chosen = Sampling(
        config.temperature, config.top_k, config.top_p, config.min_p, config.repetition_penalty
    )
    assert chosen == Sampling(temperature=0.8)
    assert parse_flags(GenerateConfig, ["--top_k=0"]) == config, "what is off may be said"


def test_a_second_copy_may_take_half_of_what_a_process_of_this_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        generate_module, "available_memory", lambda device, processes: 4096 // processes
    )
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert generate_module._room() == 2048
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert generate_module._room() == 512


def test_texts_of_flags_may_be_spaces_and_lines() -> None:
    read = partial(parse_flags, GenerateConfig)
    assert read(["--stop=\n"]).stop == ("\n",) and read(["--stop= "]).stop == (" ",)
    assert read(["--stop=\n\n,a b,\t"]).stop == ("\n\n", "a b", "\t")
    text = " def f(x):\n\treturn x\r\n\u00a0\u2028👩‍👧"
    assert read([f"--prompt={text}"]).prompt == text
    for wrong in ("--stop=a,,b", "--stop=,"):
        with pytest.raises(UserError, match="must not have an empty item"):
            read([wrong])
    for wrong in ("--prompt=a\x1b[2J", "--prompt=\ud800", "--stop=\x00"):
        with pytest.raises(UserError, match="must not contain control characters"):
            read([wrong])


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
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the in\r\n\xff\r\n")))
    assert main(["generate", *flags, "--interactive"]) == 0
    told = capsys.readouterr()
    assert told.out == expected + "\n" and "must be whole characters" in told.err


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
    # An untrained model may write any character, and a stop text takes no control characters.
    word = next(
        character
        for character in record["text"][4:]
        if character.isprintable() and character != " "
    )
    stopped = written(run, "--prompt=The run", "--max_new_tokens=20", "--seed=3", f"--stop={word}")
    assert stopped == "The run" + record["text"][: record["text"].index(word)] + "\n"
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
    assert written(tmp_path / "hf", *flags) == text
    (tmp_path / "hf/tokenizer.model").unlink()  # then tokenizer.json
    assert (
        written(tmp_path / "hf", *flags)[:10] == text[:10]
    )  # broken characters are shown otherwise
    assert "step (4) must be left out" in written(tmp_path / "hf", *flags, "--step=4", code=2)
    (tmp_path / "hf/tokenizer.json").unlink()
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
        and "must have 1 to 47" in ended.stderr
        and ended.stderr.count("\n") == 1
    )
    first = written(run, "--prompt=The run", "--max_new_tokens=5", "--seed=3")
    assert ended.stdout == first + written(run, "--prompt=A page", "--max_new_tokens=5", "--seed=3")
    assert "leave out one of the two flags" in written(run, "--interactive", "--prompt=a", code=2)


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
    assert len(texts) > 200 and said.count("sample at step 2 · ") == 3
    assert main(["report", str(tmp_path / "with")]) == 0
    assert "<h2>Sample</h2>" in (tmp_path / "with/report.html").read_text()
    (events,) = (tmp_path / "with/tensorboard").iterdir()
    assert b"samples/text_summary" in events.read_bytes()


@pytest.mark.slow
def test_samples_that_cannot_be_written_are_refused_before_any_work(
    run: Path, tmp_path: Path
) -> None:
    data = f"--data_path={run.parent / 'data'}"
    for text, flags in (
        (
            "--sample_interval (2) needs a tokenizer beside the data (none)",
            ["--use_dummy_dataset=True"],
        ),
        (
            "must have 1 to 15, for the context of the model is 16",
            [data, f"--sample_prompts={'x' * 99}"],
        ),
    ):
        shape = ["--model_variant=tiny", "--seq_length=16", f"--output_dir={tmp_path}/run"]
        ended = launched(*shape, "--sample_interval=2", *flags)
        assert ended.returncode == 2 and text in ended.stderr and ended.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_cannot_be_written_is_one_line(run: Path, tmp_path: Path) -> None:
    assert "must have 1 to 47, for the context of the model is 48" in written(
        run, "--prompt=" + "x" * 999, code=2
    )
    assert "leave out one of the two flags" in written(run, "--prompt=a", "--prompts=b", code=2)
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
    assert told.count("\n") == 1 and "has no tokenizer beside the data" in told
