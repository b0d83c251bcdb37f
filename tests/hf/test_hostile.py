"""Corrupt Hugging Face checkpoints: read, or rejected in one line; no traceback, no hang.

`HOSTILE_CASES=1000 python -m pytest tests/hf/test_hostile.py` takes 1,000 a family in place of 100.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fms_fsdp.errors import UserError, is_for_user
from fms_fsdp.generate import Sampling, encode_prompts, generate, load, text_after
from fms_fsdp.prepare.command import train_sentencepiece
from fms_fsdp.tokenizers.tokenizer import SentencePieceTokenizer
from fms_fsdp.tools.evaluate_command import choice_scores
from tests.hf_folders import template, weights_of, write_folder, write_tokenizer_json

CASES = int(os.environ.get("HOSTILE_CASES", "100"))
DEEP: Any = json.loads("[" * 900 + "]" * 900)
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    -64,
    2.5,
    1e-320,
    1e300,
    math.nan,
    math.inf,
    10**9,
    10**18,
    2**63,
    10**400,
    "",
    "false",
    "x",
    "64",
    "\ud800",
    "\x1b[2J",
    "../x",
    [],
    [1],
    [-64, 64],
    ["a", None],
    {},
    {"a": 1},
    {"rope_type": "linear"},
    {"type": "llama3", "factor": 8},
    {"content": 3},
    DEEP,
]
NAMES = "rope_scaling rope_theta sliding_window layer_types head_dim rms_norm_eps eos_token_id"
NAMES += " tie_word_embeddings num_key_value_heads rope_parameters hidden_act quantization_config"
NAMES += " add_bos_token model_type \ud800"
TEMPERATURES = (0, 1e-320, 1e-9, 0.8, 1e30)


def files_of(kind: str, folder: Path) -> dict[str, bytes]:
    """The files of a valid checkpoint: the weights in one file, and in two with an index."""
    write_folder(folder, kind, eos_token_id=257)
    write_tokenizer_json(folder, template(end=257))
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 256]}')
    from safetensors.torch import save_file

    weights = {name: weight.clone() for name, weight in weights_of(kind).items()}
    names = list(weights)
    places = {name: f"part{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in sorted(set(places.values())):
        save_file({name: weights[name] for name in names if places[name] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def places(content: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of keys to each value of a JSON document, the first items of long ones."""
    keys: Iterable[Any] = content if isinstance(content, dict) else ()
    keys = range(min(len(content), 3)) if isinstance(content, list) else keys
    for key in list(keys)[:60]:
        yield (*before, key)
        yield from places(content[key], (*before, key))


def changed_json(draw: random.Random, data: bytes) -> bytes:
    content = json.loads(data)
    what = draw.random()
    if what < 0.05:
        return json.dumps(draw.choice(VALUES)).encode()
    if what < 0.1:
        return b"[" * 100_000 + data
    if what < 0.25:
        content[draw.choice(NAMES.split())] = draw.choice(VALUES)
        return json.dumps(content).encode()
    *way, last = draw.choice(list(places(content)))
    inner = content
    for key in way:
        inner = inner[key]
    if what < 0.35:
        del inner[last]
    elif what < 0.5 and type(inner[last]) in (int, float):
        inner[last] = inner[last] * draw.choice((-1, 0, 0.5, 2, 3, 1000)) + draw.choice((0, 0, 1))
    else:
        inner[last] = draw.choice(VALUES)
    return json.dumps(content).encode()


def changed_bytes(draw: random.Random, data: bytes) -> bytes:
    data = data or b"x"
    at = draw.randrange(len(data))
    if draw.random() < 0.3:
        return data[:at]
    return data[:at] + draw.randbytes(draw.randint(1, 8)) + data[at + 1 :]


def changed_safetensors(draw: random.Random, data: bytes) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + length], bytearray(data[8 + length :])
    if draw.random() < 0.5:
        header = changed_json(draw, header)
    else:
        at = draw.randrange(len(body) // 4) * 4
        body[at : at + 4] = struct.pack("<f", draw.choice((math.nan, math.inf, 3e38, -1e-44)))
    return struct.pack("<Q", len(header)) + header + bytes(body)


def changed_folder(draw: random.Random, files: dict[str, bytes]) -> dict[str, bytes]:
    files = dict(files)
    if draw.random() < 0.5:
        del files["model.safetensors"]
    for _ in range(draw.choice((1, 1, 2))):
        name = draw.choice(["config.json", "config.json", *files])
        change = changed_json if name.endswith(".json") else changed_safetensors
        kind = draw.random()
        try:
            data = b"" if kind < 0.05 else changed_bytes(draw, files[name])
            files[name] = data if kind < 0.2 else change(draw, files[name])
        except Exception:  # the file is not valid any more
            files[name] = changed_bytes(draw, files[name])
    return files


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError("a folder takes too long")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def use(folder: Path, draw: random.Random) -> str:
    """Reads the folder as `generate` and `evaluate --questions` do; returns what the user is told."""
    try:
        loaded = model, tokenizer, rules = load(str(folder), None, "cpu")
        if tokenizer is None:
            return "no tokenizer"
        prompts = encode_prompts(tokenizer, rules, ["the in", ""], model.config)
        sampling = Sampling(draw.choice(TEMPERATURES), top_p=draw.choice((1.0, 1e-320, 0.9)))
        drawn = list(generate(model, prompts, sampling, max_new_tokens=3, end_tokens=rules.ends))
        text_after(tokenizer, prompts[0], [token for (token, _) in drawn if token is not None])
        prompt = draw.choice(("the ", "", "\ud800"))
        choice_scores(loaded, prompt, [" in", "the"])
    except (UserError, OSError) as error:
        assert is_for_user(error), repr(error)
        assert "\n" not in str(error) and len(str(error)) < 2000, error
        return str(error)
    return ""


def test_corrupt_sentencepiece_model_is_one_line() -> None:
    lines = ["the thing in a line of words and more words " * 40] * 9
    valid = train_sentencepiece(iter(lines), 275, "unigram")
    for number in range(CASES):
        draw, data = random.Random(number), valid
        for _ in range(draw.choice((1, 1, 4))):
            data = changed_bytes(draw, data)
        try:
            tokenizer = SentencePieceTokenizer(data, "x")
            tokenizer.decode(tokenizer.encode(["the thing", "", " 日本"])[0].tolist())
            tokenizer.token_bytes()
        except UserError as error:
            assert "\n" not in str(error)


@pytest.mark.filterwarnings("ignore")  # of torch, for quantized and sparse tensors of the test
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gpt_neox"])
def test_corrupt_folder_is_read_or_one_line(kind: str, tmp_path: Path) -> None:
    valid = files_of(kind, tmp_path / "valid")
    assert use(tmp_path / "valid", random.Random(1)) == ""
    folder, messages = tmp_path / "hf", set[str]()
    for number in range(CASES):
        draw = random.Random(f"{kind} {number}")
        files = changed_folder(draw, valid)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        with within(20):
            try:
                messages.add(use(folder, draw))
            except BaseException as error:
                changed = [name for name in valid if files.get(name) != valid[name]]
                raise AssertionError(f"case {number} of {kind}, {changed}: {error!r}") from error
    assert len(messages) > CASES // 4
