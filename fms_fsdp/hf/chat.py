"""Chat settings of a tokenizer, which training ignores and a chat with the exported model needs.

folder of the tokenizer ── prepare, convert ──> OUT/meta/chat.json ─┐
folder of --init_from_hf ───────────────────────────────────────────┴─ export
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fms_fsdp.config.values import shown
from fms_fsdp.errors import UserError
from fms_fsdp.files import read_json_object, write_json
from fms_fsdp.tokenizers.tokenizer import Tokenizer, token_text

CHAT_FILE = "meta/chat.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# fields of generation_config.json that are carried over, or that say nothing about sampling
_KNOWN = {"bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "transformers_version"}


@dataclass(frozen=True)
class ChatSettings:
    """The chat settings of a tokenizer.

    Attributes:
        source: the folder that they were read from.
        chat_template: a Jinja template, or a list of {"name": …, "template": …}; "" for none.
        end_ids: the tokens that end a generated text, by generation_config.json or config.json.
        not_carried: names of further settings of that folder.
    """

    source: str = ""
    chat_template: str | list[Any] = ""
    bos_token: str = ""
    pad_token: str = ""
    end_ids: tuple[int, ...] = ()
    not_carried: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.chat_template or self.bos_token or self.pad_token or self.end_ids)

    def tokenizer_settings(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Returns fields of tokenizer_config.json.

        A token outside of the vocabulary is left out: transformers would give it a new id.
        """
        found: dict[str, Any] = {}
        if self.chat_template:
            found["chat_template"] = self.chat_template
        for name, token in (("bos_token", self.bos_token), ("pad_token", self.pad_token)):
            if token and tokenizer.token_id(token) is not None:
                found[name] = token
        return found

    def generation_settings(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Returns fields of generation_config.json: tokens that end a text, and the pad token."""
        vocabulary = tokenizer.vocabulary
        known = [number for number in self.end_ids if number < vocabulary.size]
        ids = list(dict.fromkeys([vocabulary.eos_id, *known]))
        found: dict[str, Any] = {"eos_token_id": ids if len(ids) > 1 else ids[0]}
        pad_id = tokenizer.token_id(self.pad_token) if self.pad_token else None
        if pad_id is not None:
            found["pad_token_id"] = pad_id
        return found

    def note(self, tokenizer: Tokenizer) -> str:
        """Returns a note about the settings that an export leaves behind, "" if there are none."""
        names = list(self.not_carried)
        for name, token in (("bos_token", self.bos_token), ("pad_token", self.pad_token)):
            if token and tokenizer.token_id(token) is None:
                names.append(f"{name} {token}, which is not in the vocabulary")
        if not names:
            return ""
        return f"not carried over from {self.source}: {', '.join(names)}"


NO_CHAT = ChatSettings()


def end_ids(folder: Path) -> tuple[int, ...]:
    """Returns the tokens that end a text by generation_config.json, or else by config.json.

    Raises:
        UserError: a file is malformed.
    """
    found: tuple[int, ...] = ()
    for name in ("generation_config.json", "config.json"):
        value = _content(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if not all(each is None or (type(each) is int and -1 <= each < 1 << 31) for each in ids):
            raise UserError(
                f"{folder / name}: eos_token_id={shown(str(value)[:99])} must be a token id"
            )
        found = found or tuple(each for each in ids if each is not None and each >= 0)
    return found


def read_chat_settings(folder: Path) -> ChatSettings:
    """Returns the chat settings of a tokenizer folder: of Hugging Face, or the output of `prepare`.

    Raises:
        UserError: a file is malformed.
    """
    kept = folder / CHAT_FILE
    if kept.is_file():
        return parse_chat_settings(kept.read_bytes(), str(kept))
    settings = _content(folder / "tokenizer_config.json")
    template = settings.get("chat_template")
    # Newer folders have the template in a file of its own.
    template = _content(folder / "chat_template.json").get("chat_template") or template
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            template = jinja.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{jinja} must be UTF-8 text; convert or remove it") from None
    if not isinstance(template, str | list | None):
        raise UserError(
            f"{folder}: chat_template={shown(str(template)[:99])} must be text; correct or remove "
            "it"
        )
    generation = _content(folder / "generation_config.json")
    not_carried = []
    for name in sorted(generation):
        is_known = name in _KNOWN or name.startswith("_")
        if generation[name] is not None and not is_known:
            not_carried.append(name)
    return ChatSettings(
        source=str(folder),
        chat_template=template or "",
        bos_token=token_text(settings, "bos_token"),
        pad_token=token_text(settings, "pad_token"),
        end_ids=end_ids(folder),
        not_carried=tuple(not_carried),
    )


def find_chat_settings(tokenizer: str) -> ChatSettings:
    """Returns the chat settings of --tokenizer.

    Raises:
        UserError: a file is malformed.
    """
    path = Path(tokenizer).expanduser()
    if not tokenizer or tokenizer == "byte":
        return NO_CHAT
    if path.is_dir():
        return read_chat_settings(path)
    folder = path.parent
    is_of_checkpoint = path.name in _TOKENIZER_FILES
    if is_of_checkpoint or (folder / "tokenizer_config.json").is_file():
        return read_chat_settings(folder)
    return NO_CHAT  # a config.json next to a model file may be anything


def save_chat_settings(found: ChatSettings, output: Path) -> None:
    """Keeps the chat settings of a tokenizer with its shards; removes another tokenizer's."""
    kept = output / CHAT_FILE
    if found:
        write_json(kept, asdict(found))
    elif kept.exists():
        kept.unlink()


def parse_chat_settings(data: bytes, source: str) -> ChatSettings:
    """Returns the settings in meta/chat.json.

    Raises:
        UserError: the content is not what `prepare` writes.
    """
    try:
        found = ChatSettings(**json.loads(data))
        is_valid = _is_valid(found)
    except (ValueError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise UserError(f"{source} was not written by prepare; restore or remove the file")
    return found


def _is_valid(settings: ChatSettings) -> bool:
    """Returns whether the values have the types that ChatSettings declares; JSON may hold any."""
    for value in (settings.end_ids, settings.not_carried):
        if not isinstance(value, list | tuple):
            return False
    for number in settings.end_ids:
        if type(number) is not int or number < 0:
            return False
    texts = [settings.source, settings.bos_token, settings.pad_token, *settings.not_carried]
    if not all(isinstance(text, str) for text in texts):
        return False
    return isinstance(settings.chat_template, str | list)


def merged(first: ChatSettings, second: ChatSettings) -> ChatSettings:
    """Returns the settings of `first`, the missing ones of `second`, and the end tokens of both."""
    return ChatSettings(
        source=first.source or second.source,
        chat_template=first.chat_template or second.chat_template,
        bos_token=first.bos_token or second.bos_token,
        pad_token=first.pad_token or second.pad_token,
        end_ids=(*first.end_ids, *second.end_ids),
        not_carried=tuple(dict.fromkeys([*first.not_carried, *second.not_carried])),
    )


def _content(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
