"""Turns text into tokens and back: the bytes of the text, plain numbers, or a Hugging Face tokenizer.

A run keeps its tokenizer in its folder, in files that ``transformers`` reads, and an exported model carries it. So text
can be generated after the tokenizer's own folder has moved, and without a network.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import ConfigError
from shardwise.train.config import Data
from shardwise.train.hub import load_from_hub
from shardwise.train.optional_packages import require
from shardwise.train.run_files import replace_file

__all__ = [
    "BYTES",
    "Bytes",
    "Ids",
    "TextStream",
    "Tokenizer",
    "check_tokenizer",
    "load_hugging_face_tokenizer",
    "load_tokenizer",
    "save_tokenizer",
    "tokenizer_of",
]

BYTES = "bytes"
IDS = "ids"
_CONFIG = "tokenizer_config.json"
_KIND = "shardwise_tokenizer"


class Tokenizer(Protocol):
    end: int | None
    """The token after which a text ends."""
    start: list[int]
    """What to generate from if there is no prompt."""

    def encode(self, text: str) -> list[int]: ...

    def stream(self) -> TextStream: ...


class TextStream(Protocol):
    """Turns tokens into text as they come: a character appears once all of its tokens have come."""

    def add(self, token: int) -> str: ...

    def finish(self) -> str: ...


class Bytes:
    """Every byte of the UTF-8 text is a token."""

    end: int | None = None
    start: list[int] = [ord("\n")]  # noqa: RUF012  never changed

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def stream(self) -> TextStream:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < 256 else f"<{token}>"

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class Ids:
    """Text is a list of numbers, for models whose tokenizer is not known."""

    end: int | None = None
    start: list[int] = [0]  # noqa: RUF012  never changed

    def encode(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise ConfigError(
                f"the model's tokenizer is not known, and '{text}' is not a list of numbers",
                where="the prompt",
                fix="pass --tokenizer bytes or the tokenizer's folder, or write tokens as numbers, such as '12 7 300'",
            ) from None

    def stream(self) -> TextStream:
        return _IdStream()


class _IdStream:
    def add(self, token: int) -> str:
        return f" {token}"

    def finish(self) -> str:
        return ""


class _HuggingFace:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.end: int | None = tokenizer.eos_token_id
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else self.end
        self.start = [0 if first is None else first]

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def stream(self) -> TextStream:
        return _HuggingFaceStream(self._tokenizer)


class _HuggingFaceStream:
    """Decodes the tokens of the current line together: what a token adds depends on those before it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._num_shown = 0

    def add(self, token: int) -> str:
        self._tokens.append(token)
        text = self._decoded()
        # The replacement character stands for a character whose tokens have not all come.
        if text.endswith("�"):
            return ""
        new = text[self._num_shown :]
        self._num_shown = len(text)
        if text.endswith("\n"):
            self._tokens, self._num_shown = [], 0
        return new

    def finish(self) -> str:
        return self._decoded()[self._num_shown :]

    def _decoded(self) -> str:
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return text


# --- loading and saving -------------------------------------------------------------------------------------------


def tokenizer_of(data: Data) -> str:
    """Returns the name of the tokenizer that data is read with; ``ids`` if a file of tokens does not tell."""
    is_unknown = data.path.endswith(".bin") and data.tokenizer == BYTES and data.token_dtype != "uint8"
    return IDS if is_unknown else data.tokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """Returns ``bytes``, ``ids``, or the tokenizer of a folder or with a name on Hugging Face's hub."""
    if name == BYTES or _kind_in(Path(name)) == BYTES:
        return Bytes()
    if name == IDS:
        return Ids()
    return _HuggingFace(load_hugging_face_tokenizer(name))


def load_hugging_face_tokenizer(name: str) -> Any:
    """Loads a tokenizer of ``transformers`` by folder or name; raises ConfigError if there is none."""
    transformers = require("transformers", f"the tokenizer '{name}'")
    return load_from_hub(transformers.AutoTokenizer, name, "tokenizer")


def check_tokenizer(name: str, vocabulary: int) -> None:
    """Raises ConfigError if a Hugging Face tokenizer has tokens beyond a model's vocabulary."""
    highest = max(load_hugging_face_tokenizer(name).get_vocab().values(), default=0)
    if highest >= vocabulary:
        raise ConfigError(
            f"the tokenizer '{name}' has {highest + 1} tokens, but the model's vocabulary is {vocabulary}",
            where="data.tokenizer",
            fix=f"use the model's own tokenizer, or in a model that starts from nothing model.vocabulary={highest + 1}",
        )


def save_tokenizer(name: str, folder: Path) -> None:
    """Writes a tokenizer to a folder, in files that ``transformers`` and ``load_tokenizer`` read."""
    if name != BYTES:
        load_hugging_face_tokenizer(name).save_pretrained(str(folder))
        return
    folder.mkdir(exist_ok=True)
    replace_file(folder / "tokenizer.json", json.dumps(_byte_tokenizer(), ensure_ascii=False))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        _KIND: BYTES,
    }
    replace_file(folder / _CONFIG, json.dumps(config, indent=2) + "\n")


def _kind_in(folder: Path) -> str | None:
    """Returns the kind of one of our own tokenizers in a folder, which needs no ``transformers``."""
    try:
        found = json.loads((folder / _CONFIG).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found.get(_KIND) if isinstance(found, dict) else None


def _byte_tokenizer() -> dict[str, Any]:
    """Returns a tokenizer of the ``tokenizers`` library in which each byte is the token of its own number."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _byte_characters() -> Sequence[str]:
    """Returns the character that stands for each byte in byte-level vocabularies: itself if it can be printed."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
