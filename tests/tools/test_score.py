"""Questions with several answers: the sums against a slow reference, the command, its errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from fms_fsdp.__main__ import main
from fms_fsdp.data.tokenizer import load_tokenizer
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.init import init_weights
from fms_fsdp.models.llama import Llama
from fms_fsdp.tools.score import Question, by_length, read_question, score

QUESTION = Question("A sky is", (" blue", " loud and long", "!"), 0)


def model_of(vocab_size: int, context: int = 64) -> Llama:
    model = Llama(TransformerConfig(2, 32, 64, 4, 2, vocab_size, max_seq_len=context, init_std=0.3))
    init_weights(model, seed=3)
    return model.eval()


def test_a_choice_counts_the_probability_of_its_tokens() -> None:
    tokenizer = load_tokenizer("byte")
    model = model_of(tokenizer.vocabulary.size)
    expected = []
    for choice in QUESTION.choices:
        seen, total = list(QUESTION.prompt.encode()), 0.0
        for byte in choice.encode():
            with torch.no_grad():
                logits_V = model(torch.tensor([seen]))[0, -1].double()
            total += float(logits_V.log_softmax(0)[byte])
            seen.append(byte)
        expected.append(total)
    assert score(model, tokenizer, QUESTION).tolist() == pytest.approx(expected, rel=1e-5)
    first = score(
        model, tokenizer, Question("", ("a", "b"), 0)
    )  # of all 258 tokens, behind a document's end
    assert bool((first < 0).all()) and float(first.exp().sum()) < 1


def test_a_token_that_reaches_from_the_prompt_into_a_choice_is_counted(tmp_path: Path) -> None:
    from fms_fsdp.tools.prepare.command import train_sentencepiece

    content = train_sentencepiece(iter(["the theme of them " * 40]), 280, "bpe")
    (tmp_path / "tokenizer.model").write_bytes(content)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.model"))
    prompt, whole = (tokenizer.encode([text])[0].tolist() for text in ("th", "the"))
    assert whole[: len(prompt)] != prompt  # one token is both
    model = model_of(tokenizer.vocabulary.size)
    scores = score(model, tokenizer, Question("th", ("e", "x"), 0))
    with torch.no_grad():
        logits_V = model(torch.tensor([[tokenizer.vocabulary.eos_id]]))[0, -1]
    assert float(scores[0]) == pytest.approx(float(logits_V.log_softmax(0)[whole].sum()), rel=1e-5)


def test_white_space_at_the_end_of_a_prompt_belongs_to_the_choices() -> None:
    tokenizer = load_tokenizer("byte")
    model = model_of(tokenizer.vocabulary.size)
    moved = score(model, tokenizer, Question("A sky is \n", ("blue", "loud"), 0))
    assert torch.equal(
        moved, score(model, tokenizer, Question("A sky is", (" \nblue", " \nloud"), 0))
    )
    assert not torch.equal(
        moved, score(model, tokenizer, Question("A sky is ", ("\nblue", "loud"), 0))
    )


def test_what_the_tokenizer_adds_stands_before_a_question() -> None:
    tokenizer = load_tokenizer("byte")
    model = model_of(tokenizer.vocabulary.size)
    for prompt in ("ab", ""):
        found = score(model, tokenizer, Question(prompt, ("c", "d"), 0), [256])
        with torch.no_grad():
            logits_V = model(torch.tensor([[256, *prompt.encode()]]))[0, -1].log_softmax(0)
        assert found.tolist() == pytest.approx(logits_V[[ord("c"), ord("d")]].tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("choices", "scores", "best"),
    [
        ((" ab", "abc"), (-2.1, -3.0), 1),  # 2 characters, not 3: one leading space is none
        (("  a", " abc"), (-2.1, -3.0), 1),  # of two spaces one counts: 2 and 3
        ((" ", "abc"), (-0.1, -9.0), 1),  # no character is left
    ],
)
def test_acc_norm_counts_characters_as_lm_eval_does(
    choices: tuple[str, ...], scores: tuple[float, ...], best: int
) -> None:
    assert int(by_length(torch.tensor(scores), choices).argmax()) == best


def test_a_text_in_place_of_choices_is_refused() -> None:
    with pytest.raises(ValueError, match="must have texts as prompt and choices"):
        read_question('{"prompt": "a", "choices": "bc", "answer": 0}', "q:1")
    with pytest.raises(ValueError, match="must have texts as prompt and choices"):
        read_question('{"prompt": "a", "choices": {"b": 1, "c": 2}, "answer": 0}', "q:1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt to go on with "ababab", and its data."""
    from tests.cli import trained

    root = tmp_path_factory.mktemp("score")
    text = root / "text"
    text.mkdir()
    (text / "a.txt").write_text("ab" * 4000)
    prepare = ["prepare", f"--input={text}", f"--output={root}/data", "--tokenizer=byte"]
    assert main(prepare) == 0
    trained(
        "--model_variant=tiny",
        f"--data_path={root}/data",
        "--seq_length=32",
        "--num_steps=30",
        "--learning_rate=0.01",
        f"--output_dir={root}/run",
    )
    return root


def test_a_model_that_has_learnt_the_text_answers_right(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"prompt": "abababab", "choices": ["abab", "bbaa"], "answer": 0},
        {"prompt": "bababa", "choices": ["aabb", "baba", "bbbb"], "answer": 1},
        {"prompt": "bababa", "choices": ["aabb", "baba", "bbbb"], "answer": 2},  # wrong
        {"prompt": "abababa", "choices": ["b", "a", "x", "é"], "answer": 0},
    ]
    (folder / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["score", f"--path={folder}/run", f"--questions={folder}/q.jsonl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["questions"], found["acc"], found["acc_norm"]) == (4, 0.75, 0.75)
    assert found["chance"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 3 + 1 / 4) / 4)
    assert found["acc_stderr"] == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    assert main(["score", f"--path={folder}/run", f"--questions={folder}/q.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert shown == "4 questions · acc 0.750 ± 0.217 · acc_norm 0.750 ± 0.217 · by chance 0.354\n"
    (folder / "one.jsonl").write_text((folder / "q.jsonl").read_text().splitlines()[0])
    assert main(["score", f"--path={folder}/run", f"--questions={folder}/one.jsonl"]) == 0
    assert capsys.readouterr().out.startswith("1 question · acc ")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "is empty"),
        (
            '{"prompt": "\\ud800", "choices": ["b", "c"], "answer": 0}',
            "q.jsonl:1) a text must be whole",
        ),
        ("{", "q.jsonl:1) must have prompt, choices and answer"),
        ("[1]", "q.jsonl:1) must have prompt, choices and answer"),
        (
            '{"prompt": "a", "choices": ["b"], "answer": 0}',
            "q.jsonl:1) must have two choices at least",
        ),
        ('{"prompt": "a", "choices": ["b", ""], "answer": 0}', "none of these empty"),
        (
            '{"prompt": 1, "choices": ["b", "c"], "answer": 0}',
            "must have texts as prompt and choices",
        ),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": 2}', "an answer in 0 to 1, not 2"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": true}', "an answer in 0 to 1, not True"),
        (
            '{"prompt": "%s", "choices": ["b", "c"], "answer": 0}' % ("x" * 9999),
            "q.jsonl:1) has 10000 tokens",
        ),
    ],
)
def test_what_is_no_question_is_one_line(
    folder: Path, line: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "q.jsonl").write_text(line and line + "\n")
    assert main(["score", f"--path={folder}/run", f"--questions={folder}/q.jsonl"]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
    assert (
        main(["score", f"--path={folder}/run"]) == 2
        and "--questions is missing" in capsys.readouterr().err
    )
