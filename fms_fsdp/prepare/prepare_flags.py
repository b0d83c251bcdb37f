"""The flags of `prepare` and `convert`. Loads neither numpy nor pyarrow: `--help` and wrong flags are answered
at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fms_fsdp.config import flag
from fms_fsdp.config.values import joined
from fms_fsdp.errors import UserError


@dataclass(frozen=True)
class ShardsConfig:
    """The sources, and how their shards are cut and where they are written."""

    input: str = flag(
        "",
        "[NAME=]PATH[,…]: files, folders, quoted globs; NAME defaults to the folder's",
        positional=True,
        required=True,
    )
    output: str = flag(
        "", "folder for the shards: the --data_path of training", form="path", required=True
    )
    split: tuple[float, ...] = flag(
        (1.0,), "ratios of train[,validation[,test]] by hash of a text: 949,50,1"
    )
    shard_tokens: int = flag(
        1 << 24, "maximum tokens per shard, unless a document is longer", min=1
    )
    num_workers: int | None = flag(None, "worker processes (default: one per core)", min=1)
    overwrite: bool = flag(False, "replace sources made from other inputs or with other options")

    def __post_init__(self) -> None:
        if not self.output:
            raise UserError("--output is missing; name the folder for the shards")
        if not 1 <= len(self.split) <= 3 or min(self.split) < 0 or self.split[0] <= 0:
            raise UserError(
                f"--split={joined(self.split)} must be one to three ratios, e.g. 949,50,1"
            )

    @property
    def folder(self) -> Path:
        return Path(self.output).expanduser()


@dataclass(frozen=True)
class PrepareConfig(ShardsConfig):
    """The texts to read, how they become tokens, and where the shards are written."""

    tokenizer: str = flag(
        "",
        "byte, a model file, a tokenizer.json or a folder (default: the output's own)",
        form="path",
    )
    train_tokenizer: bool = flag(
        False, "train a sentencepiece model on a sample of the inputs first"
    )
    vocab_size: int | None = flag(
        None, "vocabulary size of the tokenizer to train (default: 32000)", min=300, max=1 << 20
    )
    tokenizer_type: str = flag(
        "bpe", "algorithm of the tokenizer to train", choices=("bpe", "unigram")
    )
    tokenizer_sample_mb: int = flag(64, "MB of text to train the tokenizer on", min=1)
    eos_token: str = flag(
        "", "token that ends a document (default: the EOS token of the tokenizer)"
    )
    bos_token: str = flag(
        "", "token stored at the start of each document, e.g. <s> (default: none)"
    )
    append_eos: bool = flag(
        False, "store the EOS token in the shards (default: the loader adds it)"
    )
    text_key: str = flag(
        "text",
        "JSON key or column of the text; a.b is a field, a,b joins two columns with a newline",
    )
    prompt_key: str = flag("", "JSON key or column of a prompt, to which the text is the response")
    text_separator: str = flag(
        "", r"end of a document in text files, with \n, \t (default: none)", form="text"
    )
    include: tuple[str, ...] = flag(
        (),
        "patterns of files to read, e.g. *.py,*.md (default: all, but in a folder with records "
        "only those with a known ending)",
    )
    exclude: tuple[str, ...] = flag((), "patterns of files to skip, e.g. test/*")
    min_tokens: int = flag(1, "drop documents of fewer tokens", min=1)
    max_tokens: int | None = flag(None, "drop documents of more tokens", min=1)
    limit_docs: int | None = flag(None, "read at most N documents of each source", min=1)
    dedup: bool = flag(
        False,
        "drop exact copies of earlier documents, over all sources of this call (24 bytes of memory "
        "per document)",
    )
    max_bad_lines: int = flag(100, "stop if a source has more malformed records", min=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_tokenizer and self.tokenizer:
            rule = f"--tokenizer={self.tokenizer} and --train_tokenizer cannot be used together"
            raise UserError(f"{rule}; remove one")
        if self.vocab_size is not None and not self.train_tokenizer:
            raise UserError(f"--vocab_size={self.vocab_size} requires --train_tokenizer; add it")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise UserError(
                f"--max_tokens={self.max_tokens} must not be below --min_tokens={self.min_tokens}; "
                "lower --min_tokens"
            )


@dataclass(frozen=True)
class ConvertConfig(ShardsConfig):
    """The files to convert (.idx with .bin, .ds, .parquet, .arrow), and the meaning of their ids."""

    tokenizer: str = flag(
        "", "the tokenizer that made the ids; sets --vocab_size and --eos_id", form="path"
    )
    vocab_size: int | None = flag(
        None, "number of ids (default: the tokenizer's)", min=2, max=1 << 32
    )
    eos_id: int | None = flag(None, "id that ends a document (default: the tokenizer's)", min=0)
    bos: str = flag(
        "keep", "treatment of BOS tokens in the input", choices=("keep", "strip", "add")
    )
    bos_id: int | None = flag(None, "id of the BOS token, for --bos=strip and add", min=0)
    column: str = flag(
        "", "column of the ids in Parquet and Arrow files (default: tokens or input_ids)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tokenizer and (self.vocab_size is None or self.eos_id is None):
            raise UserError("--tokenizer is missing; set it, or both --vocab_size and --eos_id")
        if self.bos != "keep" and self.bos_id is None:
            raise UserError(
                f"--bos={self.bos} requires --bos_id; set it to the id of the BOS token"
            )
