"""Whether the tokenizer of an export gives the ids of training: compared on texts, as its readers read it.

package tokenizers   10,000 texts: pieces, any letters, runs of spaces
transformers         500 of them, through AutoTokenizer
"""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fms_fsdp.data.tokenizer import Tokenizer

_TEXTS, _OF_TRANSFORMERS = 10_000, 500
_LETTERS = ((0x20, 0x7E), (0x1, 0x2FFF), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF))
_SPACES, _ENDS = (" ", " ", "  ", "   ", "    ", " " * 8), ("\n", "\n\n", "\t", " \n", "\n    ")
_GAPS = (*_SPACES, *_ENDS, " " * 17, "\r\n", " \t ")


def find_differences(tokenizer: Tokenizer, folder: Path, before: Sequence[int] = ()) -> list[str]:
    """A sentence for each reader that gives other ids than training, which had `before` at the beginning of
    each text; and for what could not be compared."""
    if find_spec("tokenizers") is None:
        return ["tokenizer.json was not compared: the package tokenizers is not installed"]
    texts = _some_texts(tokenizer)
    ours = [[*before, *row.tolist()] for row in tokenizer.encode(texts)]
    fast: Any = importlib.import_module("tokenizers").Tokenizer.from_file(
        str(folder / "tokenizer.json")
    )
    found = [
        _sentence(
            "tokenizer.json gives", texts, ours, [each.ids for each in fast.encode_batch(texts)]
        )
    ]
    if find_spec("transformers") is not None:
        few = slice(0, None, len(texts) // _OF_TRANSFORMERS)
        try:
            theirs = _encode_with_transformers(folder, texts[few])
        except Exception as error:  # it is not our program that fails
            found.append(f"transformers could not read the tokenizer: {error}")
        else:
            told = _sentence("transformers give", texts[few], ours[few], theirs)
            found.append(told if not found[0] else "")
    return [sentence for sentence in found if sentence]


def _encode_with_transformers(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text by AutoTokenizer, which logs and warns nothing here: it would report that
    texts are longer than the model's context, which is no concern of a comparison."""
    transformers: Any = importlib.import_module("transformers")
    library_log: Any = importlib.import_module("transformers.utils.logging")
    verbosity = library_log.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library_log.set_verbosity_error()
        try:
            opened = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            return [list(opened(text).input_ids) for text in texts]
        finally:
            library_log.set_verbosity(verbosity)


def _some_texts(tokenizer: Tokenizer) -> list[str]:
    """A third each of pieces, of any letters, and of words between runs of spaces and ends of lines."""
    draw, texts = random.Random(0), list[str]()
    visible = [number for number, size in enumerate(tokenizer.token_bytes().tolist()) if size]
    words = list[str]()
    for number in visible:
        word = tokenizer.decode([number]).strip()
        if word and word.isprintable():
            words.append(word)
    for number in range(_TEXTS):
        length = draw.randint(1, 30)
        if number % 3 == 0:
            texts.append(tokenizer.decode(draw.choices(visible, k=length)))
        elif number % 3 == 1:
            texts.append("".join(chr(draw.randint(*draw.choice(_LETTERS))) for _ in range(length)))
        else:
            pairs = zip(
                draw.choices(words or ["a"], k=length), draw.choices(_GAPS, k=length), strict=True
            )
            texts.append(draw.choice(("", *_GAPS)) + "".join(word + gap for word, gap in pairs))
    return texts


def _sentence(
    who: str, texts: Sequence[str], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> str:
    """What differs, "" if nothing does."""
    others = [text for text, a, b in zip(texts, theirs, ours, strict=True) if list(a) != list(b)]
    if not others:
        return ""
    of_spaces = sum("  " in text for text in others)
    found = f"for {len(others):,} of {len(texts):,} texts ({of_spaces:,} with runs of spaces)"
    return f"{who} other ids than training {found}, such as {min(others, key=len)!r}"
