"""A sentencepiece model of the user's own text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator

_SENTENCE_CHARS = 2048  # pieces of a document that sentencepiece trains on
_TRAINING_THREADS = 4  # fixed: part of what makes the trained model a function of its input


def train_sentencepiece(texts: Iterable[str], vocab_size: int, model_type: str) -> bytes:
    """A sentencepiece model (`bpe` or `unigram`) of the texts, which the caller bounds; the same texts give the same bytes.

    Ids: 0 unknown, 1 begin, 2 end, then 256 bytes that spell what the vocabulary lacks. Pieces may span line ends and runs of spaces, which source
    code is full of; digits stand alone.

    Raises:
        ValueError: too little text for the vocabulary, or too many characters.
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
        most, least = (
            re.search(form, str(error)) for form in (r"value <= (\d+)", r"required_chars\. \d+ vs (\d+)")
        )
        if least:
            problem = f"is too low for this text, whose characters take {least[1]}; raise it"
        elif most:
            problem = f"is too high for this text: at most {most[1]}; lower it or give more"
        else:
            problem = (
                f"must fit the text: {str(error).strip().splitlines()[-1]}; change it or give other text"
            )
        raise ValueError(f"--vocab_size ({vocab_size}) {problem}") from error
    return model.getvalue()


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Pieces of bounded length, cut before a line end where there is one: sentencepiece drops line ends at the end of a piece."""
    for text in texts:
        start = 0
        while start < len(text):
            stop = start + _SENTENCE_CHARS
            if stop < len(text) and (line_end := text.rfind("\n", start + 1, stop)) > 0:
                stop = line_end
            yield text[start:stop]
            start = stop
