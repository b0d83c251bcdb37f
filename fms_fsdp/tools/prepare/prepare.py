"""Text → token shards: `python -m fms_fsdp prepare`.

inputs ── sources in slices ── tokenizer: given, trained or the output's own ── pipeline
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fms_fsdp.config import flag
from fms_fsdp.data.tokenizer import (
    SentencePieceTokenizer,
    Tokenizer,
    Vocabulary,
    load_tokenizer,
    parse_description,
)
from fms_fsdp.errors import UserError
from fms_fsdp.tools.prepare.documents import TextFormat, file_kind, json_without_text, plan_slices
from fms_fsdp.tools.prepare.encode import TextReader
from fms_fsdp.tools.prepare.input_files import find_files, parse_input, unique_files
from fms_fsdp.tools.prepare.output_folder import PreparedSource, check_plans, lock_output, save_tokenizer
from fms_fsdp.tools.prepare.pipeline import ShardsConfig, make_shards
from fms_fsdp.tools.prepare.shard_writer import ShardInfo
from fms_fsdp.tools.prepare.stats import Stats, describe
from fms_fsdp.tools.prepare.train_tokenizer import sample_texts, train_sentencepiece
from fms_fsdp.tools.prepare.workers import note

# part of every plan: raise it when the same input gives other shards; arrays and Arrow files once were text
_LAYOUT_VERSION = 1
_BYTES_PER_TOKEN = 3  # sizes slices so that one rarely fills more than a shard
_SHARD_OPTIONS = (
    "text_key text_separator limit_docs min_tokens max_tokens dedup append_eos shard_tokens".split()
)
_TRAINING_OPTIONS = "vocab_size tokenizer_type tokenizer_sample_mb text_key text_separator limit_docs".split()


@dataclass(frozen=True)
class PrepareConfig(ShardsConfig):
    """Which texts to read, how to turn the texts into tokens, and where to write the shards."""

    tokenizer: str = flag("", "byte, a model file, a tokenizer.json or a folder (default: the output's own)")
    train_tokenizer: bool = flag(False, "train a sentencepiece model on a sample of the inputs first")
    vocab_size: int | None = flag(None, "tokens of the model (default: 32000)", minimum=300, maximum=1 << 20)
    tokenizer_type: str = flag("bpe", "kind of the new model", choices=("bpe", "unigram"))
    tokenizer_sample_mb: int = flag(64, "MB of text for the training of the new model", minimum=1)
    eos_token: str = flag("", "the token that ends a document (default: the end token of the tokenizer)")
    bos_token: str = flag("", "the token that begins each document, such as <s>, stored (default: none)")
    append_eos: bool = flag(False, "store the end token in the shards; by default the loader adds this token")
    text_key: str = flag("text", "JSON key or Parquet column of the text; a line end joins the texts of a,b")
    prompt_key: str = flag("", "JSON key or column of a prompt, to which the text is the response")
    text_separator: str = flag(
        "", r"what ends a document within a text file, with \n, \t (default: one per file)", form="text"
    )
    include: tuple[str, ...] = flag((), "patterns of files to read, such as *.py,*.md (default: all)")
    exclude: tuple[str, ...] = flag((), "patterns of file names to pass over, such as test/*")
    min_tokens: int = flag(1, "drop documents of fewer tokens", minimum=1)
    max_tokens: int | None = flag(None, "drop documents of more tokens", minimum=1)
    limit_docs: int | None = flag(None, "read only so many documents of each source", minimum=1)
    dedup: bool = flag(False, "drop exact copies of earlier documents, over all sources of this call")
    max_bad_lines: int = flag(100, "stop when a source has more malformed records than this", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_tokenizer and self.tokenizer:
            rule = "and --train_tokenizer exclude each other; leave one out"
            raise UserError(f"--tokenizer ({self.tokenizer}) {rule}")
        if self.vocab_size is not None and not self.train_tokenizer:
            rule = "is for a tokenizer to train; add --train_tokenizer=True"
            raise UserError(f"--vocab_size ({self.vocab_size}) {rule}")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            rule = f"must not be below --min_tokens ({self.min_tokens})"
            raise UserError(f"--max_tokens ({self.max_tokens}) {rule}")

    @property
    def form(self) -> TextFormat:
        separator = self.text_separator.replace("\\n", "\n").replace("\\t", "\t")
        return TextFormat(self.text_key, separator, self.prompt_key)


def prepare(config: PrepareConfig) -> dict[str, Stats]:
    """Turns the inputs into shards and returns what was read and written, by source.

    Raises:
        UserError: bad options or inputs, or an output made from others.
    """
    sources = [_find_source(config, name, paths) for name, paths in parse_input(config.input).items()]
    with lock_output(config.folder):
        vocabulary = _settle_tokenizer(config, sources)
        name = vocabulary.kept_in(config.folder)
        bos_id, lengths = _begin_token(config, name), (config.min_tokens, config.max_tokens)
        reader = TextReader(config.form, name, vocabulary.eos_token, config.append_eos, *lengths, bos_id)
        stored = config.append_eos, bool(config.prompt_key), bos_id
        info = ShardInfo(vocabulary.size, vocabulary.eos_id, vocabulary.digest, *stored)
        return make_shards(config, sources, reader, info, config.max_bad_lines, config.dedup)


def _begin_token(config: PrepareConfig, tokenizer: str) -> int | None:
    """The id of --bos_token. Raises: UserError: the tokenizer has no such token."""
    if not config.bos_token:
        return None
    if (number := load_tokenizer(tokenizer).token_id(config.bos_token)) is None:
        raise UserError(
            f"--bos_token ({config.bos_token}) must be a token of the tokenizer; name another one"
        )
    return number


def _find_source(config: PrepareConfig, name: str, paths: Sequence[str]) -> PreparedSource:
    found = (find_files(path, config.include, config.exclude, config.folder) for path in paths)
    files = unique_files(file for files in found for file in files)
    if config.prompt_key and (texts := [file.path for file in files if file_kind(file.path) == "text"]):
        rule = f"is a key of records, and {texts[0]} is text without records"
        raise UserError(f"--prompt_key ({config.prompt_key}) {rule}; exclude the file, or name JSON lines")
    if arrays := json_without_text(files, config.form):
        what = f"{len(arrays)} .json files hold objects without {config.text_key}"
        note(f"{what}, each is read as text: {arrays[0]} …")
    slices = plan_slices(files, config.shard_tokens * _BYTES_PER_TOKEN, config.form, config.limit_docs)
    return PreparedSource(name, files, tuple(slices), config.folder)


def _settle_tokenizer(config: PrepareConfig, sources: Sequence[PreparedSource]) -> Vocabulary:
    """The tokenizer of the output from now on: the one that is given, trained, or already there.

    Raises:
        UserError: a source of the output was made with another, or with other inputs or options.
    """
    output = config.folder
    path = output / "meta" / "tokenizer.json"
    known, trained_on = parse_description(path.read_bytes(), str(path)) if path.is_file() else (None, None)
    training = _training_key(config, sources) if config.train_tokenizer else None
    is_kept = known is not None and (trained_on == training if training else not config.tokenizer)
    if known is not None and is_kept:
        tokenizer = _load_kept(config, known)
    elif training:
        if known and not config.overwrite:
            rule = "has a tokenizer that was not trained on these inputs with these options"
            remedy = "leave out --train_tokenizer to use this one, choose another folder, or --overwrite=True"
            raise UserError(f"--output ({output}) {rule}; {remedy}")
        tokenizer = _train(config, sources)
    elif config.tokenizer:
        tokenizer = load_tokenizer(config.tokenizer, config.eos_token)
    else:
        raise UserError("--tokenizer is missing; give byte, a model file, a folder, or --train_tokenizer")
    keys = [_plan_key(config, source, tokenizer.vocabulary, sources) for source in sources]
    check_plans(output, sources, keys, tokenizer.vocabulary.digest, config.overwrite)
    if not is_kept:
        save_tokenizer(output, tokenizer, training)
    return tokenizer.vocabulary


def _load_kept(config: PrepareConfig, known: Vocabulary) -> Tokenizer:
    tokenizer = load_tokenizer(known.kept_in(config.folder), config.eos_token or known.eos_token)
    if tokenizer.vocabulary.digest != known.digest:
        rule = f"{known.file_name} was changed after its use; restore the file"
        raise UserError(f"--output ({config.folder}) has another tokenizer: {rule}")
    return tokenizer


def _train(config: PrepareConfig, sources: Sequence[PreparedSource]) -> Tokenizer:
    slices = [entry for source in sources for entry in source.slices]
    texts = list(sample_texts(slices, config.form, config.tokenizer_sample_mb * 10**6))
    vocab_size = config.vocab_size or 32_000
    size_mb = sum(map(len, texts)) / 1e6
    note(f"training a {config.tokenizer_type} tokenizer of {vocab_size} tokens on {size_mb:.1f} MB")
    model = train_sentencepiece(texts, vocab_size, config.tokenizer_type)
    return SentencePieceTokenizer(model, "trained", config.eos_token)


def _training_key(config: PrepareConfig, sources: Sequence[PreparedSource]) -> dict[str, Any]:
    """What a trained tokenizer depends on."""
    options = {name: getattr(config, name) for name in _TRAINING_OPTIONS}
    return {**options, "inputs": {source.name: source.inputs_digest for source in sources}}


def _plan_key(
    config: PrepareConfig, source: PreparedSource, vocabulary: Vocabulary, sources: Sequence[PreparedSource]
) -> dict[str, Any]:
    """All that the shards of a source depend on, as JSON gives it back."""
    return {
        "layout": _LAYOUT_VERSION + any(file_kind(file.path) in ("json", "arrow") for file in source.files),
        "inputs": source.inputs_digest,
        "tokenizer_digest": vocabulary.digest,
        "eos_id": vocabulary.eos_id,
        "split": [share / sum(config.split) for share in config.split],
        **{name: getattr(config, name) for name in _SHARD_OPTIONS},
        **{name: value for name in ("prompt_key", "bos_token") if (value := getattr(config, name))},
        "dedup_over": [f"{other.name}:{other.inputs_digest}" for other in sources] if config.dedup else [],
    }


def main(config: PrepareConfig) -> None:
    """The command: prepares, then says what was made."""
    print(describe(prepare(config)))
    made = f"shards, tokenizer and counts are in {config.output}"
    print(f"{made}; train on these shards with --data_path={config.output}")
