"""Tokenizers: text round-trips, training is deterministic, other files are rejected."""

from __future__ import annotations

import json
import resource
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sentencepiece

from fms_fsdp.__main__ import main
from fms_fsdp.data.kept_tokenizer import find_tokenizer, unk_warnings
from fms_fsdp.data.open_storage import open_storage
from fms_fsdp.data.shards import NO_LOSS
from fms_fsdp.errors import UserError
from fms_fsdp.prepare.command import train_sentencepiece
from fms_fsdp.prepare.documents import open_arrow
from fms_fsdp.tokenizers.load import load_tokenizer
from fms_fsdp.tokenizers.tokenizer import (
    PROBES,
    ByteTokenizer,
    SentencePieceTokenizer,
    Vocabulary,
    counts_bytes,
)

ODD_TEXTS = [
    "",
    " ",
    " leading and trailing  ",
    "\n\n\tif x:\r\n        y = 1  # tabs\tand   runs\n\n\n",
    "\ttab first",
    "\x00 control \x07\x1b",
    "<s></s><unk><0x41> are text",
    "é漢字 😀 \u00a0\u2028\ufeff \U0010ffff",
    "0123456789" * 30,
    "x" * 5000,
]


@pytest.fixture(scope="module")
def source_code() -> list[str]:
    root = Path(__file__).resolve().parents[2] / "fms_fsdp"
    return [path.read_text().replace("\u2581", "_") for path in sorted(root.rglob("*.py"))[:20]]


@pytest.fixture(scope="module")
def model(source_code: list[str]) -> bytes:
    return train_sentencepiece(source_code, 600, "bpe")


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_trained_model_round_trips_text(model_type: str, source_code: list[str]) -> None:
    trained = train_sentencepiece(source_code[:12], 500, model_type)
    tokenizer = SentencePieceTokenizer(trained, "test")
    texts = [*source_code, *ODD_TEXTS]
    encoded, lengths = tokenizer.encode(texts), [len(text.encode()) for text in texts]
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert all(ids.max(initial=0) < tokenizer.vocabulary.size == 500 for ids in encoded)
    assert not any(np.isin(ids, [0, 1, 2]).any() for ids in encoded)  # neither UNK, BOS nor EOS
    assert sum(map(len, encoded)) < sum(lengths) / 1.5
    assert [int(tokenizer.token_bytes()[ids].sum()) for ids in encoded] == lengths
    assert tokenizer.decode(tokenizer.encode(["a▁b"])[0]) == "a b"  # the one exception


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_tokenizer_of_text_without_spaces_keeps_them(model_type: str) -> None:
    texts = ["一二三四五六七八九十" * 20] * 20
    tokenizer = SentencePieceTokenizer(train_sentencepiece(texts, 270, model_type), "test")
    (ids,) = tokenizer.encode(["一 是  a"])
    assert tokenizer.decode(ids) == "一 是  a"
    assert tokenizer.token_bytes()[ids].sum() == len("一 是  a".encode())


def test_tokenizer_that_replaces_spaces_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.txt").write_text("一 二")
    options = {"model_type": "bpe", "byte_fallback": True, "minloglevel": 3, "vocab_size": 262}
    options |= {"normalization_rule_name": "identity", "add_dummy_prefix": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["一二"] * 9), model_prefix=str(tmp_path / "sp"), **options
    )
    flags = (f"--tokenizer={tmp_path}/sp.model", f"--output={tmp_path}/out")
    main(["prepare", f"--input=s={tmp_path}/x.txt", *flags])
    assert "has no piece for the space" in capsys.readouterr().err


def test_tokenizer_of_documentation_round_trips_code(source_code: list[str]) -> None:
    """A tokenizer of other text than it encodes: bytes stand for the characters that it lacks."""
    pages = Path(__file__).resolve().parents[2].glob("docs/**/*.md")
    prose = [path.read_text().replace("\u2581", "_") for path in sorted(pages)]
    tokenizer = SentencePieceTokenizer(train_sentencepiece(prose, 800, "bpe"), "test")
    for texts in (prose, source_code):
        encoded = tokenizer.encode(texts)
        assert [tokenizer.decode(ids) for ids in encoded] == texts
        num_bytes = sum(len(text.encode()) for text in texts)
        assert 1.5 * sum(map(len, encoded)) < num_bytes
    assert tokenizer.decode(tokenizer.encode(ODD_TEXTS)[-1]) == ODD_TEXTS[-1]


def test_training_is_deterministic(source_code: list[str], model: bytes) -> None:
    assert train_sentencepiece(iter(source_code), 600, "bpe") == model


def test_byte_tokenizer_needs_no_file() -> None:
    tokenizer = load_tokenizer("byte")
    assert isinstance(tokenizer, ByteTokenizer)
    encoded = tokenizer.encode(ODD_TEXTS)
    assert [tokenizer.decode(ids) for ids in encoded] == ODD_TEXTS
    assert encoded[3].tolist() == list(ODD_TEXTS[3].encode())
    assert load_tokenizer("byte", "<|end_of_text|>").vocabulary == tokenizer.vocabulary
    with pytest.raises(UserError, match="--eos_token=</s> is not the EOS token of"):
        load_tokenizer("byte", "</s>")
    assert tokenizer.vocabulary.eos_id == 257 < tokenizer.vocabulary.size
    assert tokenizer.decode([104, 105, 257]) == "hi"
    assert tokenizer.token_bytes()[[104, 255, 256, 257]].tolist() == [1, 1, 0, 0]


def test_saved_model_loads_as_it_was(tmp_path: Path, model: bytes) -> None:
    tokenizer = SentencePieceTokenizer(model, "test")
    tokenizer.save(tmp_path)
    for name in (tmp_path, tmp_path / "tokenizer.model"):
        assert load_tokenizer(str(name)).vocabulary == tokenizer.vocabulary
    other = load_tokenizer(str(tmp_path), "<s>")
    assert (other.vocabulary.eos_id, other.vocabulary.digest) == (1, tokenizer.vocabulary.digest)


def test_replaced_tokenizer_is_removed(tmp_path: Path, model: bytes) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(tmp_path / "words.json"))
    (tmp_path / "sp.model").write_bytes(model)
    (tmp_path / "x.txt").write_text("a a")
    out = tmp_path / "out"
    for name, files in (
        (f"{tmp_path}/words.json", {"tokenizer.json", "tokenizer_config.json"}),
        (f"{tmp_path}/sp.model", {"tokenizer.model"}),
        ("byte", set()),
    ):
        flags = (f"--tokenizer={name}", f"--output={out}", "--overwrite=True")
        assert main(["prepare", f"s={tmp_path}/x.txt", *flags]) == 0
        assert {path.name for path in out.glob("tokenizer*")} == files
        assert load_tokenizer(str(out)).vocabulary == load_tokenizer(name).vocabulary
    (out / "tokenizer.json").write_bytes((tmp_path / "words.json").read_bytes())  # not its own
    assert load_tokenizer(str(out)).vocabulary.kind == "byte"


def test_another_eos_token_is_rejected(
    tmp_path: Path, model: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sp.model").write_bytes(model)
    (tmp_path / "x.txt").write_text("text")
    flags = (f"--tokenizer={tmp_path}/sp.model", f"--output={tmp_path}/out")
    assert main(["prepare", f"a={tmp_path}/x.txt", *flags]) == 0
    assert main(["prepare", f"b={tmp_path}/x.txt", *flags, "--eos_token=<s>"]) == 2
    assert "source a, whose documents end with id 2, not 1; give" in capsys.readouterr().err
    assert not (tmp_path / "out" / "meta" / "prepare" / "b").exists()


def test_new_eos_token_is_kept_with_the_shards(
    tmp_path: Path, model: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exports and generated text ended at the token before, and no further source fitted."""
    (tmp_path / "sp.model").write_bytes(model)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (tmp_path / "x.txt").write_text("text")
    out = tmp_path / "out"
    flags = (f"--output={out}", "--num_workers=1")
    assert main(["prepare", f"a={tmp_path}/x.txt", *flags, f"--tokenizer={tmp_path}/sp.model"]) == 0
    again = ("--eos_token=<s>", "--overwrite=True")
    assert main(["prepare", f"a={tmp_path}/x.txt", *flags, *again]) == 0
    kept = find_tokenizer(str(out))
    assert kept is not None and kept.vocabulary.eos_id == 1
    # As `--tokenizer=OUT` of another prepare or convert, it ended documents with the model's own.
    assert load_tokenizer(str(out)).vocabulary == kept.vocabulary
    assert (out / "meta/chat.json").exists()
    assert main(["prepare", f"b={tmp_path}/x.txt", *flags]) == 0
    capsys.readouterr()
    ids = (f"c={out}/b/shard-00000.arrow", f"--tokenizer={tmp_path}/sp.model", "--eos_id=1")
    assert main(["convert", *ids, f"--output={tmp_path}/other", "--num_workers=1"]) == 0
    assert "--eos_id=1 is not the EOS token of --tokenizer (2)" in capsys.readouterr().err
    pq.write_table(pa.table({"tokens": [[10, 11]]}), tmp_path / "c.parquet")
    assert main(["convert", f"c={tmp_path}/c.parquet", *ids[1:], *flags]) == 0
    assert "EOS" not in capsys.readouterr().err
    kept_by_convert = find_tokenizer(str(out))
    assert kept_by_convert is not None and kept_by_convert.vocabulary == kept.vocabulary


@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_responses_continue_their_prompt(tmp_path: Path, source_code: list[str], rule: str) -> None:
    """With a model that puts a space before each text, such as Llama 2's or T5's."""
    options = {"model_type": "bpe", "vocab_size": 500, "normalization_rule_name": rule}
    options |= {"byte_fallback": rule == "identity", "minloglevel": 3}
    lines = (line for text in source_code for line in text.splitlines())
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_prefix=str(tmp_path / "sp"), **options
    )
    pairs = [("def main", "(x):"), ("return the", " value"), ("for x", "yz"), ("", "import")]
    records = [json.dumps({"q": prompt, "text": text}) for prompt, text in pairs]
    (tmp_path / "x.jsonl").write_text("\n".join(records))
    flags = (f"--tokenizer={tmp_path}/sp.model", f"--output={tmp_path}/out", "--prompt_key=q")
    assert main(["prepare", f"s={tmp_path}/x.jsonl", *flags]) == 0
    tokenizer = load_tokenizer(f"{tmp_path}/sp.model")
    with open_arrow(str(tmp_path / "out" / "s" / "shard-00000.arrow")) as (_, batches):
        rows = [row for batch in batches for row in batch.column(0).to_pylist()]
    for row, (prompt, text) in zip(rows, pairs, strict=True):
        ids = [token & (NO_LOSS - 1) for token in row]
        assert tokenizer.decode(ids) == prompt + text
        given = [token for token in row if token >= NO_LOSS]
        assert len(given) == len(tokenizer.encode([prompt])[0])


@pytest.mark.parametrize("kind", ["ByteLevel", "Metaspace"])
def test_responses_have_no_space_that_decoding_keeps(tmp_path: Path, kind: str) -> None:
    """A space that decoding keeps was not seen: "Answer:" and "yes" became "Answer: yes"."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = getattr(tokenizers.pre_tokenizers, kind)()  # both add a space
    if kind == "ByteLevel":  # its decoder keeps the space; Metaspace is tried without a decoder
        made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], show_progress=False
    )
    made.train_from_iterator(["Answer: yes", "a b | yes\n"] * 9, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.jsonl").write_text('{"q": "Answer:", "text": "yes"}\n{"q": "", "text": "yes"}')
    flags = (f"--tokenizer={tmp_path}/tokenizer.json", f"--output={tmp_path}/out", "--prompt_key=q")
    assert main(["prepare", f"s={tmp_path}/x.jsonl", *flags]) == 0
    with open_arrow(str(tmp_path / "out" / "s" / "shard-00000.arrow")) as (_, batches):
        rows = [row for batch in batches for row in batch.column(0).to_pylist()]
    responses = [[made.id_to_token(id) for id in row if id < NO_LOSS] for row in rows]
    spaces = {"ByteLevel": "\u0120", "Metaspace": "\u2581"}
    assert ["".join(row) for row in responses] == ["yes", f"{spaces[kind]}yes"]


def test_eos_token_in_text_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"model_type": "bpe", "vocab_size": 270, "byte_fallback": True, "minloglevel": 3}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c"] * 9),
        model_prefix=str(tmp_path / "sp"),
        user_defined_symbols=["<|endoftext|>"],
        hard_vocab_limit=False,
        **options,
    )
    (tmp_path / "x.jsonl").write_text('{"text": "<|endoftext|> b <|endoftext|>"}\n{"text": "</s>"}')
    flags = (f"--tokenizer={tmp_path}/sp.model", "--eos_token=<|endoftext|>")
    assert main(["prepare", f"s={tmp_path}/x.jsonl", *flags, f"--output={tmp_path}/out"]) == 0
    assert (
        "source s spell the EOS token, which then"
        in capsys.readouterr().out.partition("2 times")[0]
    )
    assert main(["prepare", f"s={tmp_path}/x.jsonl", flags[0], f"--output={tmp_path}/own"]) == 0
    assert "spell the EOS" not in capsys.readouterr().out


def test_files_next_to_a_model_may_be_anything(tmp_path: Path, model: bytes) -> None:
    (tmp_path / "sp.model").write_bytes(model)
    (tmp_path / "config.json").write_text("[1, 2]")
    (tmp_path / "x.txt").write_text("text")
    flags = (f"s={tmp_path}/x.txt", f"--tokenizer={tmp_path}/sp.model", f"--output={tmp_path}/out")
    assert main(["prepare", *flags]) == 0
    plan = (tmp_path / "out/meta/prepare/s/plan.json").read_bytes()
    (tmp_path / "tokenizer_config.json").write_text("[1, 2]")  # of the tokenizer, and malformed
    assert main(["prepare", *flags, "--overwrite=True", "--min_tokens=2"]) == 2
    assert (tmp_path / "out/meta/prepare/s/plan.json").read_bytes() == plan


def test_vocabulary_without_unknown_token_is_usable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package tokenizers raises an error for any other text."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"x": 0, "</s>": 1})
    tokenizers.Tokenizer(model).save(str(tmp_path / "words.json"))
    (tmp_path / "x.jsonl").write_text('{"q": "x", "text": "x"}')
    flags = (f"--tokenizer={tmp_path}/words.json", f"--output={tmp_path}/out", "--prompt_key=q")
    assert main(["prepare", f"s={tmp_path}/x.jsonl", *flags]) == 0
    assert not counts_bytes(load_tokenizer(f"{tmp_path}/words.json"))
    (tmp_path / "x.jsonl").write_text('{"q": "x", "text": "y"}')
    assert main(["prepare", f"s={tmp_path}/x.jsonl", *flags[:2], "--overwrite=True"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: --tokenizer ({tmp_path}/out/tokenizer.json) cannot encode")


@pytest.mark.parametrize("alphabet", ["all", "UTF-8", "text"])
def test_tokenizer_that_drops_characters_is_noted(
    tmp_path: Path, alphabet: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the alphabet of bytes, BPE without an unknown token has no ids for other characters."""
    tokenizers = pytest.importorskip("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = set(byte_level.alphabet())
    if alphabet == "UTF-8":
        letters -= {chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}
    if alphabet == "text":
        letters = set()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["</s>"], initial_alphabet=sorted(letters), show_progress=False
    )
    tokenizer.train_from_iterator(["a b"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.txt").write_text("a é\x01")
    flags = (f"--tokenizer={tmp_path}/tokenizer.json", f"--output={tmp_path}/out")
    assert main(["prepare", f"s={tmp_path}/x.txt", *flags, "--num_workers=1"]) == 0
    assert ("drops the characters" in capsys.readouterr().err) == (alphabet == "text")


def test_hugging_face_files_are_read(tmp_path: Path, source_code: list[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    raw = tokenizers.ByteLevelBPETokenizer()
    raw.train_from_iterator(
        source_code, vocab_size=500, special_tokens=["<|endoftext|>", "<stop>"], show_progress=False
    )
    raw.save_model(str(tmp_path))  # GPT-2's two files
    pair = load_tokenizer(str(tmp_path))
    raw.save(str(tmp_path / "tokenizer.json"))
    whole = load_tokenizer(str(tmp_path / "tokenizer.json"))
    for tokenizer in (pair, whole):
        encoded = tokenizer.encode(source_code)
        assert [tokenizer.decode(ids) for ids in encoded] == source_code
        assert tokenizer.vocabulary.eos_id == raw.token_to_id("<|endoftext|>")
        lengths = [int(tokenizer.token_bytes()[ids].sum()) for ids in encoded]
        assert lengths == [len(text.encode()) for text in source_code]
        # The separator of documents is a label: its 13 characters made bits per byte too low.
        assert tokenizer.token_bytes()[tokenizer.vocabulary.eos_id] == 0
    assert whole.token_bytes()[raw.token_to_id("<stop>")] == 0
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    configured = load_tokenizer(str(tmp_path))  # a folder prefers tokenizer.json
    assert configured.vocabulary.eos_id == raw.token_to_id("<stop>")
    copy = tmp_path / "copy"
    copy.mkdir()
    configured.save(copy)
    assert load_tokenizer(str(copy)).vocabulary == configured.vocabulary
    with pytest.raises(ValueError, match=r"--eos_token \(<nope>\) is not a token"):
        load_tokenizer(str(copy), "<nope>")


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer", "CLIPTokenizer"])
def test_class_decides_how_a_pair_splits(tmp_path: Path, source_code: list[str], name: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    raw = tokenizers.ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|startoftext|>"]
    raw.train_from_iterator(source_code, 500, special_tokens=special, show_progress=False)
    raw.save_model(str(tmp_path))
    settings = {"tokenizer_class": name, "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for text, ids in zip(PROBES, load_tokenizer(str(tmp_path)).encode(PROBES), strict=True):
        assert ids.tolist() == expected(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("addition", ["added_tokens.json", "add_prefix_space"])
def test_additions_to_a_pair_change_its_ids(tmp_path: Path, addition: str) -> None:
    """The added tokens and the space were ignored."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    raw = tokenizers.ByteLevelBPETokenizer()
    raw.train_from_iterator(["hello"] * 9, 270, special_tokens=["<|endoftext|>"])
    raw.save_model(str(tmp_path))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    if addition == "added_tokens.json":
        added = {"    ": raw.get_vocab_size()}
        (tmp_path / addition).write_text(json.dumps(added))
    else:
        settings |= {"add_prefix_space": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    found = load_tokenizer(str(tmp_path))
    assert found.vocabulary.size == len(expected)
    assert found.encode(["hello    hello"])[0].tolist() == expected("hello    hello").input_ids


def test_tokenizer_without_eos_requires_eos_token(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    raw.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="--eos_token"):
        load_tokenizer(str(tmp_path))
    assert load_tokenizer(str(tmp_path), "b").vocabulary.eos_id == 1


def test_other_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "bad.model").write_text("no model")
    (tmp_path / "tiktoken.model").write_text("IQ== 0\nIg== 1\n")
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name, error, words in [
        ("nothing.model", FileNotFoundError, "does not exist"),
        ("empty", FileNotFoundError, "has none of"),
        ("bad.model", ValueError, "is not a sentencepiece model"),
        (
            "tiktoken.model",
            ValueError,
            "is not a sentencepiece model: .*; set --tokenizer to its tokenizer.json",
        ),
        ("bad.json", ValueError, "cannot be read"),
    ]:
        with pytest.raises(error, match=words):
            load_tokenizer(str(tmp_path / name))


def test_vocab_size_above_text_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"--vocab_size=5000 is too high for this text: at most"):
        train_sentencepiece(["only a few words"], 5000, "bpe")


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_vocab_size_below_characters_is_rejected(model_type: str) -> None:
    """400 characters of a script, in many orders, each need a token, besides 259 of every model."""
    text = [" ".join(chr(0x4E00 + (i * step) % 400) for i in range(2000)) for step in (1, 3, 7, 11)]
    match = r"--vocab_size=300 is too low for this text, whose characters take (66\d);"
    with pytest.raises(ValueError, match=match) as caught:
        train_sentencepiece(text, 300, model_type)
    least = int(str(caught.value).rpartition("take ")[2].partition(";")[0])
    model = SentencePieceTokenizer(train_sentencepiece(text, least, model_type), "test")
    assert model.vocabulary.size == least


@pytest.fixture(scope="module")
def poor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentencepiece model that knows Latin letters only, and has no bytes."""
    import sentencepiece

    path = tmp_path_factory.mktemp("poor") / "poor.model"
    words = (f"word{i} other" for i in range(500))
    settings = {"model_prefix": str(path.with_suffix("")), "vocab_size": 60, "unk_piece": "?!"}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=words, minloglevel=3, **settings)
    return path


@pytest.mark.parametrize("prompt_key", ["", "q"])
def test_unknown_tokens_are_reported_per_source(
    poor: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt_key: str
) -> None:
    latin, greek = {"q": "word", "text": "word1 other" * 9}, {"q": "άλφα", "text": "βήτα word"}
    for name, record in (("latin", latin), ("greek", greek)):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(record)}\n" * 9)
    out = tmp_path / "out"
    flags = f"--tokenizer={poor}", f"--output={out}", f"--prompt_key={prompt_key}"
    inputs = ",".join(f"{name}={tmp_path / name}.jsonl" for name in ("latin", "greek"))
    assert main(["prepare", inputs, *flags, "--num_workers=1"]) == 0
    told = capsys.readouterr().out
    with open_arrow(str(out / "greek" / "shard-00000.arrow")) as (_, batches):
        ids = np.concatenate([batch.column(0).flatten().to_numpy() for batch in batches])
    summary = json.loads((out / "meta" / "summary.json").read_text())
    fraction = np.mean(ids.astype(np.uint32) & (NO_LOSS - 1) == 0)
    assert summary["greek"]["unk_fraction"] == pytest.approx(fraction, abs=1e-6) and fraction > 0.1
    assert summary["latin"]["unk_fraction"] == 0
    warning = f"warning: {fraction:.2%} of the tokens of source greek are <unk>"
    assert warning in told and told.count("are <unk>") == 1 and f"{fraction:.3%}" in told
    assert main(["inspect", "verify", f"--data_path={out}"]) == 0
    assert warning in capsys.readouterr().out
    assert unk_warnings(open_storage(str(out)), ["latin", "other"]) == []


def test_full_temporary_folder_hides_no_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export wrote a model without tokenizer and EOS."""
    described = asdict(Vocabulary("sentencepiece", 300, 2, "", "tokenizer.model"))
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/tokenizer.json").write_text(json.dumps(described))
    assert find_tokenizer(str(tmp_path)) is find_tokenizer(str(tmp_path / "none")) is None
    (tmp_path / "tokenizer.model").write_bytes(bytes(999))
    match = (
        "the tokenizer cannot be copied to the temporary folder: .*; free disk space, or set TMP"
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (99, limits[1]))  # of a file: File too large
    try:
        with pytest.raises(UserError, match=match):
            find_tokenizer(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.setattr(tempfile, "tempdir", "/proc")  # mkdir says: No such file or directory
    with pytest.raises(UserError, match=match):
        find_tokenizer(str(tmp_path))


def test_malformed_summary_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    for content in (None, "", "[]", '{"x": 1}', '{"x": {"unk_fraction": "a"}}', "{}"):
        if content is not None:
            (tmp_path / "meta" / "summary.json").write_text(content)
        assert unk_warnings(open_storage(str(tmp_path)), ["x"]) == []


def test_unk_id_of_tokenizer_json(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    models = tokenizers.models
    for model, expected in (
        (models.WordLevel({"a": 0, "[U]": 1, "</s>": 2}, unk_token="[U]"), 1),
        (models.BPE({"a": 0, "</s>": 1}, []), None),
        (models.Unigram([("a", 0.0), ("<u>", 0.0), ("</s>", 0.0)], 1, False), 1),
    ):
        tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
        assert load_tokenizer(str(tmp_path / "tokenizer.json")).unk_id() == expected
    assert load_tokenizer("byte").unk_id() is None
