"""Files of tiktoken give the ids that the package tiktoken gives, and unfit ones are refused."""

from __future__ import annotations

import base64
import random
from pathlib import Path

import pytest

from fms_fsdp.data.tokenizer import load_tokenizer
from fms_fsdp.extras.byte_pairs import byte_characters, of_tiktoken
from tests.cli import CORPUS

WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return CORPUS.read_text().split("\n\n")


@pytest.fixture(scope="module")
def pieces(texts: list[str]) -> list[bytes]:
    """As many as r50k_base has: those of a BPE trained on the corpus, then joins of earlier ones."""
    tokenizers = pytest.importorskip("tokenizers")
    raw = tokenizers.ByteLevelBPETokenizer()
    raw.train_from_iterator(texts, vocab_size=4000, show_progress=False)
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    learnt = sorted(raw.get_vocab().items(), key=lambda item: item[1])
    known = dict.fromkeys(bytes(byte_of[character] for character in piece) for piece, _ in learnt)
    found, draw = list(known), random.Random(0)
    while len(found) < 50256:
        joined = draw.choice(found) + draw.choice(found)
        if len(joined) <= 16 and joined not in known:
            known[joined] = None
            found.append(joined)
    return found


def written(pieces: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces))


def test_ids_are_those_of_tiktoken(tmp_path: Path, texts: list[str], pieces: list[bytes]) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    file = tmp_path / "own.tiktoken"
    file.write_bytes(written(pieces))
    ours, ranks = load_tokenizer(str(file)), {piece: rank for rank, piece in enumerate(pieces)}
    theirs = tiktoken.Encoding("own", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={})
    draw = random.Random(1)
    strings = [text[at : at + 200] for text in texts for at in range(0, len(text), 150)]
    for _ in range(3000):
        ranges = [(32, 127), (0, 32), (160, 12288), (0x4E00, 0x9000), (0x1F300, 0x1F700)]
        strings.append(
            "".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(draw.randrange(40)))
        )
    ids = [row.tolist() for row in ours.encode(strings)]
    assert ids == theirs.encode_ordinary_batch(strings)
    assert [ours.decode(row) for row in ids] == strings
    assert (ours.vocabulary.size, ours.vocabulary.eos_id) == (50257, 50256)
    lengths = ours.token_bytes()
    assert [int(lengths[row].sum()) for row in ids] == [len(text.encode()) for text in strings]
    ours.save(tmp_path)
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).vocabulary == ours.vocabulary


def test_a_piece_of_text_is_no_end_where_a_special_token_is_one(
    tmp_path: Path, pieces: list[bytes]
) -> None:
    """Qwen's vocabulary has </s> as a piece of code."""
    file = tmp_path / "own.tiktoken"
    file.write_bytes(written([*pieces[:-1], b"</s>"]))
    assert load_tokenizer(str(file)).vocabulary.eos_id == 50256


def test_damaged_and_unknown_files_are_refused(pieces: list[bytes]) -> None:
    whole = written(pieces)
    for data in (
        whole[: len(whole) // 2],
        whole + b"YQ== 50257\n",  # a piece once more
        whole.replace(b" 50255\n", b" 7\n"),
        whole.replace(b" 50255\n", b" 90000\n"),
        whole + b"no line of it\n",
    ):
        with pytest.raises(
            ValueError, match=r"--tokenizer \(x\) has .*r50k_base.*as tokenizer.json"
        ):
            of_tiktoken(data, "x")
