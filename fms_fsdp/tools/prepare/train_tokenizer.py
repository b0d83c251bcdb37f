"""A sentencepiece model of the user's own text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence

from fms_fsdp.errors import UserError
from fms_fsdp.tools.prepare.documents import Document, Slice, TextFormat, read_part

_SENTENCE_CHARS = 2048  # pieces of a document that sentencepiece trains on
_TRAINING_THREADS = 4  # fixed: part of what makes the trained model a function of its input


def sample_texts(slices: Sequence[Slice], form: TextFormat, budget: int) -> Iterator[str]:
    """Documents spread evenly over the slices, about `budget` bytes; it reads at most 16 times that."""
    total = sum(entry.num_bytes for entry in slices)
    step = max(1, round(total / (16 * budget)))
    share = min(1.0, budget * step / max(1, total))
    seen = taken = 0
    for part in (part for entry in slices[::step] for part in entry.parts):
        for record in read_part(part, form):
            if isinstance(record, Document):
                seen += len(record.data)
                if taken < share * seen and taken < budget:
                    taken += len(record.data)
                    yield record.text


def train_sentencepiece(texts: Iterable[str], vocab_size: int, model_type: str) -> bytes:
    """A sentencepiece model (`bpe` or `unigram`) of the texts; equal texts give equal bytes.

    Ids: 0 unknown, 1 begin, 2 end, then 256 bytes that spell what the vocabulary lacks. Pieces may span line
    ends and runs of spaces, of which source code is full; digits stand alone.

    Raises:
        UserError: too little text for the vocabulary, or too many characters.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=16 * _SENTENCE_CHARS,
            num_threads=_TRAINING_THREADS,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            minloglevel=3,
        )
    except RuntimeError as error:
        raise UserError(f"--vocab_size ({vocab_size}) {_training_problem(str(error))}") from error
    return model.getvalue()


def _training_problem(text: str) -> str:
    """The rule and the remedy behind an error of sentencepiece."""
    if least := re.search(r"required_chars\. \d+ vs (\d+)", text):
        return f"is too low for this text, whose characters take {least[1]}; raise this number"
    if most := re.search(r"value <= (\d+)", text):
        return f"is too high for this text: at most {most[1]}; lower this number or give more text"
    return f"must fit the text: {text.strip().splitlines()[-1]}; change this number or give other text"


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Pieces of bounded length, cut before a line end: sentencepiece drops one at the end of a piece."""
    for text in texts:
        start = 0
        while start < len(text):
            stop = start + _SENTENCE_CHARS
            if stop < len(text) and (line_end := text.rfind("\n", start + 1, stop)) > 0:
                stop = line_end
            yield text[start:stop]
            start = stop
