"""Writes the tokens of texts and conversations to a file, once: a run maps it into memory and reads what it needs.

tokens.bin     tokens end to end, uint8 for bytes and otherwise int32; in chats, those not to be learnt as complement
tokens.ends    int64, chats only: for each conversation, where it ends and the first of its tokens that is a target
tokens.json    what they were made of, to notice when that changes
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from shardwise.errors import ConfigError
from shardwise.train.chat import conversation_reader
from shardwise.train.config import Data
from shardwise.train.documents import has_rows, read_rows, read_texts
from shardwise.train.run_files import replace_file
from shardwise.train.tokenizers import BYTES, load_hugging_face_tokenizer

__all__ = [
    "ends_path",
    "needs_tokenizing",
    "remove_unfinished",
    "token_dtype",
    "token_lists",
    "tokenize",
    "tokens_state",
]

_LAYOUT = 2
"""Raised whenever these files change, so that older ones count as stale."""


def needs_tokenizing(data: Data) -> bool:
    """Returns whether text must first be tokenized into a file; the bytes of text files can be tokens as they are."""
    is_binary = data.path.endswith(".bin")
    return not is_binary and (data.tokenizer != BYTES or data.format == "chat" or has_rows(data))


def tokens_state(data: Data, target: Path) -> Literal["good", "stale", "missing"]:
    """Returns whether ``target`` holds the tokens of ``data`` as the data is now."""
    if not target.exists():
        return "missing"
    try:
        made = json.loads(_origin_path(target).read_text())
        is_good = made == {**_origin_of(data), "num_bytes": target.stat().st_size}
    except (OSError, ValueError, RecursionError):
        is_good = False
    return "good" if is_good else "stale"


def token_dtype(data: Data) -> torch.dtype:
    """Returns the dtype that ``tokenize`` writes."""
    return torch.uint8 if data.tokenizer == BYTES and data.format == "text" else torch.int32


class Counts(NamedTuple):
    """How many texts, rows or conversations there were, and how many of them had no tokens to learn."""

    all: int
    left_out: int


def tokenize(data: Data, target: Path) -> Counts:
    """Writes the tokens of texts or conversations to ``target``; one rank does this, once.

    Raises:
        ConfigError: a row cannot be read, or there are no tokens.
    """
    # Taken before anything is read: if a file changes meanwhile, the tokens count as stale.
    origin = _origin_of(data)
    unfinished = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    unfinished_ends = ends_path(unfinished)
    num_bytes, num_all, num_left_out = 0, 0, 0
    try:
        with unfinished.open("xb") as file, unfinished_ends.open("xb") as ends:
            for token_list in token_lists(data):
                num_all += 1
                if not token_list:
                    num_left_out += 1
                    continue
                num_bytes += file.write(
                    token_list if isinstance(token_list, bytes) else array("i", token_list)
                )
                if data.format == "chat":
                    end = num_bytes // token_dtype(data).itemsize
                    ends.write(array("q", (end, _first_target(token_list))))
            for written in (file, ends):
                written.flush()
                os.fsync(written.fileno())
        if not num_bytes:
            raise ConfigError(
                "it contains nothing to learn",
                where=f"data.path={data.path}",
                fix="pass texts, or conversations with answers of the assistant",
            )
        # Tokens without this record count as stale: remove it before they change, write it afterwards.
        _origin_path(target).unlink(missing_ok=True)
        unfinished_ends.replace(ends_path(target))
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
        unfinished_ends.unlink(missing_ok=True)
    replace_file(_origin_path(target), json.dumps({**origin, "num_bytes": num_bytes}, indent=1) + "\n")
    return Counts(num_all, num_left_out)


def _first_target(tokens: Sequence[int]) -> int:
    """Returns the first token to be learnt, which is not the first of all: nothing is before that one."""
    return next(place for place, token in enumerate(tokens) if place and token >= 0)


def remove_unfinished(folder: Path) -> None:
    """Removes what making tokens has left in a run's folder if it was killed, which may be large."""
    for path in folder.glob(".tokens*"):
        with contextlib.suppress(OSError):
            path.unlink()


def _origin_path(target: Path) -> Path:
    return target.with_suffix(".json")


def _origin_of(data: Data) -> dict[str, Any]:
    """Returns what tokens are made of: settings, size and time of every file; names on a hub as they are."""
    path = data.path.removeprefix("hf:")
    sources: dict[str, Any] = {"python": platform.python_version()} if not path else _stats_of(path)
    return {
        "path": data.path
        if data.path.startswith("hf:") or not path
        else str(Path(path).expanduser().resolve()),
        "split": data.split,
        "column": data.column,
        "files": sources,
        "tokenizer": data.tokenizer,
        "tokenizer_files": {} if data.tokenizer == BYTES else _stats_of(data.tokenizer),
        "format": data.format,
        "train_on": data.train_on,
        "dtype": str(token_dtype(data)),
        "layout": _LAYOUT,
    }


def _stats_of(name: str) -> dict[str, list[int]]:
    """Returns size and time of a file, or of all files below a folder; empty if ``name`` is neither."""
    path = Path(name).expanduser()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {
        str(file.relative_to(path)): [found.st_size, found.st_mtime_ns]
        for file in files
        if file.is_file() and (found := file.stat())
    }


def ends_path(target: Path) -> Path:
    """Returns the file that says where each conversation ends."""
    return target.with_suffix(".ends")


def token_lists(data: Data) -> Iterator[Sequence[int]]:
    """Yields the tokens of one text or conversation after the other; none if nothing in it is to be learnt."""
    if data.format == "chat":
        read = conversation_reader(data.tokenizer, learns_all=data.train_on == "all")
        for where, row in read_rows(data):
            tokens = read(row, where)
            yield tokens if any(token >= 0 for token in tokens[1:]) else ()
        return
    encode = _encoder(data.tokenizer)
    for text in read_texts(data):
        yield () if text is None else encode(text)


def _encoder(name: str) -> Callable[[str], Sequence[int]]:
    if name == BYTES:
        return str.encode
    tokenizer = load_hugging_face_tokenizer(name)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return lambda text: tokenizer.encode(text, add_special_tokens=False) + end
