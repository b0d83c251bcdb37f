"""Text -> token shards: `python -m fms_fsdp prepare`."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fms_fsdp.data.kept_tokenizer import parse_description
from fms_fsdp.errors import UserError
from fms_fsdp.hf.chat import find_chat_settings
from fms_fsdp.prepare.documents import Document, TextFormat, check_format, file_format, read_part
from fms_fsdp.prepare.encode import ShardSettings, TextReader, make_shards, note
from fms_fsdp.prepare.input_files import (
    InputFile,
    Slice,
    find_files,
    note_splits,
    parse_input,
    plan_slices,
    skip_other_files,
    unique_files,
)
from fms_fsdp.prepare.prepare_flags import PrepareConfig
from fms_fsdp.prepare.writer import (
    PreparedSource,
    ShardInfo,
    Stats,
    check_plans,
    describe,
    lock_output,
    save_tokenizer,
)
from fms_fsdp.tokenizers.huggingface import HFTokenizer
from fms_fsdp.tokenizers.load import load_tokenizer
from fms_fsdp.tokenizers.tokenizer import (
    SentencePieceTokenizer,
    Tokenizer,
    Vocabulary,
    adds_space,
    replaces_space,
)

# part of every plan: raise it when the same input gives other shards
_LAYOUT_VERSION = 1
_BYTES_PER_TOKEN = 3  # sizes slices so that one rarely fills more than a shard
_SHARD_OPTIONS = (
    "text_key text_separator limit_docs min_tokens max_tokens dedup append_eos shard_tokens"
)
_TRAINING_OPTIONS = (
    "vocab_size tokenizer_type tokenizer_sample_mb text_key text_separator limit_docs"
)
_SENTENCE_CHARS = 2048  # sentencepiece trains on parts of documents
_SPACE = "\u2581"  # of sentencepiece
_TRAINING_THREADS = 4  # fixed, because the trained model depends on it


def prepare(config: PrepareConfig) -> dict[str, Stats]:
    """Writes shards of the inputs and returns statistics by source.

    Example:
        config = PrepareConfig(input="docs,code=src", output="data/own", tokenizer="byte")
        print({name: stats.tokens for name, stats in prepare(config).items()})

    Raises:
        UserError: options or inputs are not valid, or the output was made from other inputs.
    """
    named = parse_input(config.input)
    sources = [_find_source(config, name, paths) for name, paths in named.items()]
    with lock_output(config.folder):
        vocabulary, bos_id = _choose_tokenizer(config, sources)
        reader = TextReader(
            _form(config),
            vocabulary.kept_in(config.folder),
            vocabulary.eos_token,
            config.append_eos,
            config.min_tokens,
            config.max_tokens,
            bos_id,
        )
        info = ShardInfo(
            vocabulary.size,
            vocabulary.eos_id,
            vocabulary.digest,
            has_eos=config.append_eos,
            has_masks=bool(config.prompt_key),
            bos_id=bos_id,
        )
        settings = ShardSettings(
            reader, info, config.split, config.shard_tokens, config.max_bad_lines, config.dedup
        )
        return make_shards(config, sources, settings)


def _find_source(config: PrepareConfig, name: str, paths: Sequence[str]) -> PreparedSource:
    found = list[InputFile]()
    for path in paths:
        files_of_path = find_files(path, config.include, config.exclude, config.folder)
        if not config.include:
            files_of_path = skip_other_files(path, files_of_path, _form(config))
        found += files_of_path
    files = unique_files(found)
    note_splits(name, files)
    for file in files:
        check_format(file.path, _form(config))
    slices = plan_slices(
        files, config.shard_tokens * _BYTES_PER_TOKEN, _form(config), config.limit_docs
    )
    return PreparedSource(name, files, tuple(slices), config.folder)


def _choose_tokenizer(
    config: PrepareConfig, sources: Sequence[PreparedSource]
) -> tuple[Vocabulary, int | None]:
    """Returns the tokenizer of the output (given, trained, or already there) and the id of --bos_token;
    checks and writes the plans.

    Raises:
        UserError: a source of the output was made with another, or with other inputs or options.
    """
    output = config.folder
    path = output / "meta" / "tokenizer.json"
    known = None  # the tokenizer of the output
    trained_on = None
    if path.is_file():
        known, trained_on = parse_description(path.read_bytes(), str(path))
    training: dict[str, Any] | None = None
    if config.train_tokenizer:
        training = {name: getattr(config, name) for name in _TRAINING_OPTIONS.split()}
        training["inputs"] = {source.name: source.inputs_digest for source in sources}
    is_known = False
    if known is not None and training:
        is_known = trained_on == training
    elif known is not None:
        is_known = not config.tokenizer
    if known is not None and is_known:
        tokenizer = load_tokenizer(known.kept_in(output), config.eos_token or known.eos_token)
        if tokenizer.vocabulary.digest != known.digest:
            raise UserError(
                f"--output={output} has another tokenizer: {known.file_name} was changed after its use; "
                "restore the file"
            )
    elif training:
        if known and not config.overwrite:
            raise UserError(
                f"--output={output} has a tokenizer that was not trained on these inputs with these "
                "options; remove --train_tokenizer to use it, choose another folder, or set "
                "--overwrite=True"
            )
        tokenizer = _train(config, sources)
    elif config.tokenizer:
        tokenizer = load_tokenizer(config.tokenizer, config.eos_token)
    else:
        raise UserError(
            "--tokenizer is missing; set byte, a model file or a folder, or --train_tokenizer"
        )
    if replaces_space(tokenizer):
        note(f"the tokenizer has no piece for the space, and turns each space into {_SPACE}")
    if isinstance(tokenizer, HFTokenizer) and tokenizer.drops_text():
        note(
            "the tokenizer has no unknown token and not a token for every byte, so it drops the "
            "characters that it lacks; train it with initial_alphabet=ByteLevel.alphabet()"
        )
    vocabulary = tokenizer.vocabulary
    bos_id = _bos_id(config, tokenizer)  # its error comes before the plans are written
    plans = [_plan(config, source, vocabulary, sources) for source in sources]
    if config.prompt_key and adds_space(tokenizer):
        plans = [{**plan, "responses": "continued"} for plan in plans]
    chat = find_chat_settings(config.tokenizer)  # its errors come before the plans are written
    check_plans(output, sources, plans, config.overwrite)
    if not is_known:
        save_tokenizer(output, tokenizer, chat, training)
    elif vocabulary != known:  # another --eos_token, at which exports and generated text end
        save_tokenizer(output, tokenizer, None, trained_on)
    return vocabulary, bos_id


def _bos_id(config: PrepareConfig, tokenizer: Tokenizer) -> int | None:
    if not config.bos_token:
        return None
    bos_id = tokenizer.token_id(config.bos_token)
    if bos_id is None:
        raise UserError(
            f"--bos_token={config.bos_token} is not a token of the tokenizer; use another"
        )
    return bos_id


def _plan(
    config: PrepareConfig,
    source: PreparedSource,
    vocabulary: Vocabulary,
    sources: Sequence[PreparedSource],
) -> dict[str, Any]:
    """Returns everything that the shards of a source depend on, in the types that JSON reads back."""
    is_later_layout = any(file_format(file.path) in ("json", "arrow") for file in source.files)
    plan: dict[str, Any] = {
        "layout": _LAYOUT_VERSION + is_later_layout,
        "inputs": source.inputs_digest,
        "tokenizer_digest": vocabulary.digest,
        "eos_id": vocabulary.eos_id,
        "split": [ratio / sum(config.split) for ratio in config.split],
        "dedup_over": [],
    }
    for name in _SHARD_OPTIONS.split():
        plan[name] = getattr(config, name)
    for name in ("prompt_key", "bos_token"):  # plans of older outputs do not have them
        if getattr(config, name):
            plan[name] = getattr(config, name)
    if config.dedup:
        plan["dedup_over"] = [f"{other.name}:{other.inputs_digest}" for other in sources]
    return plan


def _train(config: PrepareConfig, sources: Sequence[PreparedSource]) -> Tokenizer:
    slices = [part for source in sources for part in source.slices]
    texts = list(sample_texts(slices, _form(config), config.tokenizer_sample_mb * 10**6))
    size = config.vocab_size or 32_000
    size_mb = sum(len(text.encode()) for text in texts) / 1e6
    note(f"training a {config.tokenizer_type} tokenizer of {size} tokens on {size_mb:.1f} MB")
    model = train_sentencepiece(texts, size, config.tokenizer_type)
    return SentencePieceTokenizer(model, "trained", config.eos_token)


def sample_texts(slices: Sequence[Slice], form: TextFormat, budget: int) -> Iterator[str]:
    """Yields documents spread evenly over the slices, about `budget` bytes; reads at most 16 times that."""
    total = sum(part.num_bytes for part in slices)
    step = max(1, round(total / (16 * budget)))  # reads every step-th slice
    ratio = min(1.0, budget * step / max(1, total))  # of what is read
    seen = 0
    taken = 0
    for selected in slices[::step]:
        for part in selected.parts:
            for record in read_part(part, form):
                if not isinstance(record, Document):
                    continue
                seen += len(record.data)
                if taken < ratio * seen and taken < budget:
                    taken += len(record.data)
                    yield record.text


def train_sentencepiece(texts: Iterable[str], vocab_size: int, model_type: str) -> bytes:
    """Trains a sentencepiece model (`bpe` or `unigram`); equal texts give equal bytes.

    Ids: 0 UNK, 1 BOS, 2 EOS, then 256 bytes that spell missing characters. Pieces may span line
    ends and runs of spaces, which are frequent in source code; digits are separate.

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
            required_chars=_SPACE,  # its own mark for a space is not spelled in bytes of the space
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
        minimum = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
        maximum = re.search(r"value <= (\d+)", str(error))
        if minimum is not None:
            rule = f"is too low for this text, whose characters take {minimum[1]}; raise it"
        elif maximum is not None:
            rule = f"is too high for this text: at most {maximum[1]}; lower it or add text"
        else:
            reason = str(error).strip().splitlines()[-1]
            rule = f"must fit the text: {reason}; change it or add text"
        raise UserError(f"--vocab_size={vocab_size} {rule}") from error
    return model.getvalue()


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Splits texts before line ends: sentencepiece drops a line end at the end of a sentence."""
    for text in texts:
        start = 0
        while start < len(text):
            stop = start + _SENTENCE_CHARS
            line_end = text.rfind("\n", start + 1, stop)
            if stop < len(text) and line_end > 0:
                stop = line_end
            yield text[start:stop]
            start = stop


def main(config: PrepareConfig) -> None:
    """Runs the command and prints the statistics."""
    stats = prepare(config)
    print(describe(stats))
    advice = shlex.quote(f"--data_path={config.output}")
    print(f"shards, tokenizer and counts are in {config.output}; train with {advice}")


def _form(config: PrepareConfig) -> TextFormat:
    separator = config.text_separator.replace("\\n", "\n").replace("\\t", "\t")
    return TextFormat(config.text_key, separator, config.prompt_key)
