"""Reads a run's data as tokens: text files, folders, binaries, Hugging Face data sets, or Python's own sources.

All of them become a `Corpus`: tokens end to end, with files memory-mapped and read on use. A sample is a sequence and
the token after it; the end of the corpus is held out for evaluation. `sample_order` decides which sample is used when.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import sysconfig
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shardwise.checkpoint.disk import bytes_of
from shardwise.errors import ConfigError
from shardwise.train.config import Data
from shardwise.train.optional_packages import require
from shardwise.train.run_files import replace_file

__all__ = ["Corpus", "Samples", "needs_tokenizing", "open_corpus", "tokenize", "tokens_state"]

_EMBEDDED_BYTES = 4 << 20
_WHERE = "data.path"


class Corpus:
    """The tokens of several files or buffers, end to end."""

    def __init__(self, pieces: Iterable[Tensor]) -> None:
        self._pieces = [piece for piece in pieces if piece.numel()]
        self._starts = [0, *accumulate(piece.numel() for piece in self._pieces)]

    @property
    def num_tokens(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> Tensor:
        found = []
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            piece, first = self._pieces[number], self._starts[number]
            end = min(stop, self._starts[number + 1])
            found.append(piece[start - first : end - first].to(torch.int64))
            start, number = end, number + 1
        return torch.cat(found)

    def fingerprint(self) -> str:
        """Returns a cheap fingerprint of the corpus: its length, and a checksum of its two ends."""
        length = min(self.num_tokens, 1 << 14)
        ends = torch.cat((self.read(0, length), self.read(self.num_tokens - length, self.num_tokens)))
        return f"{self.num_tokens}-{zlib.crc32(bytes_of(ends)):08x}"


class Samples:
    """Sequences of one length from a corpus: first those for training, then the held-out ones.

    Raises:
        ConfigError: the data is too small for one training sample and, if some are to be held out, one of those.
    """

    def __init__(self, corpus: Corpus, context: int, vocabulary: int, held_out: float) -> None:
        self._corpus, self._context, self._vocabulary = corpus, context, vocabulary
        total = max(0, corpus.num_tokens - 1) // context
        self.num_held_out = min(total - 1, max(1, round(total * held_out))) if held_out else 0
        self.num_training = total - self.num_held_out
        if self.num_training < 1 or (held_out and self.num_held_out < 1):
            raise ConfigError(
                f"the data has {corpus.num_tokens} tokens, too few for sequences of {context}",
                where=_WHERE,
                fix="use more data, a smaller model.context, or data.held_out=0",
            )

    def batch(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, one row per sample; held-out samples are numbered after those for training."""
        context = self._context
        rows = torch.stack(
            [self._corpus.read(sample * context, sample * context + context + 1) for sample in samples]
        )
        lowest, highest = int(rows.min()), int(rows.max())
        if highest >= self._vocabulary or lowest < 0:
            odd = (rows < 0) | (rows >= self._vocabulary)
            raise ConfigError(
                f"the data contains token {lowest if lowest < 0 else highest}, "
                f"but the model's vocabulary is {self._vocabulary}",
                where=f"{_WHERE}, sample {samples[int(odd.any(dim=1).to(torch.uint8).argmax())]}",
                fix="check data.token_dtype and data.tokenizer, or raise model.vocabulary",
            )
        return rows[:, :-1], rows[:, 1:]


# --- opening --------------------------------------------------------------------------------------------------------


def needs_tokenizing(data: Data) -> bool:
    """Returns whether text must first be tokenized into a file; the bytes of text files can be tokens as they are."""
    is_binary = data.path.endswith(".bin")
    return not is_binary and (data.tokenizer != "bytes" or data.path.startswith("hf:"))


def open_corpus(data: Data, tokenized: Path | None = None, vocabulary: int | None = None) -> Corpus:
    """Opens the corpus that ``data`` describes.

    Args:
        data: the settings of the data.
        tokenized: the file that ``tokenize`` wrote, if the data needs tokenizing.
        vocabulary: the number of different tokens, to detect a ``.bin`` that is read in the wrong dtype.

    Raises:
        ConfigError: the path does not exist, has no tokens, or was written in another dtype.
    """
    if needs_tokenizing(data):
        assert tokenized is not None
        corpus = Corpus([_map_tokens(tokenized, torch.int32)])
    elif data.path.endswith(".bin"):
        path = _existing_path(data.path)
        corpus = Corpus([_map_tokens(path, getattr(torch, data.token_dtype))])
        if vocabulary is not None:
            _check_token_dtype(path, data.token_dtype, vocabulary)
    elif data.path:
        corpus = Corpus(_map_tokens(path, torch.uint8) for path in _text_files(_existing_path(data.path)))
    else:
        corpus = Corpus([torch.frombuffer(bytearray(embedded_text()), dtype=torch.uint8)])
    if not corpus.num_tokens:
        raise ConfigError(
            "it contains no text" if data.path else "this Python has no sources of its standard library",
            where=f"{_WHERE}={data.path}",
            fix="pass a text file, a folder of text files, or a .bin of tokens",
        )
    return corpus


def embedded_text() -> bytes:
    """Returns sources of Python's standard library, in a fixed order: text that needs no download."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _EMBEDDED_BYTES:
            break
    return bytes(text[:_EMBEDDED_BYTES])


def _existing_path(path: str) -> Path:
    found = Path(path).expanduser()
    if not found.exists():
        raise ConfigError(
            f"there is no file or folder '{path}'",
            where=_WHERE,
            fix="check the path; it is the same on every rank",
        )
    return found


def _text_files(path: Path) -> list[Path]:
    """Returns the file itself, or a folder's text files sorted by path, without hidden, empty and binary files."""
    if path.is_file():
        return [path]
    found = []
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if not hidden and file.is_file() and file.stat().st_size:
            with file.open("rb") as opened:
                if b"\0" not in opened.read(4096):
                    found.append(file)
    return found


def _map_tokens(path: Path, dtype: torch.dtype) -> Tensor:
    num_bytes = path.stat().st_size
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    if num_bytes % item_bytes:
        raise ConfigError(
            f"{path} has {num_bytes} bytes, which is not a whole number of {dtype} tokens",
            where=_WHERE,
            fix="set data.token_dtype to what the file was written with",
        )
    if not num_bytes:
        return torch.empty(0, dtype=dtype)
    return torch.from_file(str(path), shared=False, size=num_bytes // item_bytes, dtype=dtype)


# --- the dtype of a binary ------------------------------------------------------------------------------------------

_TOKEN_BYTES = {"uint8": 1, "uint16": 2, "int32": 4, "int64": 8}
_LOOKED_AT_BYTES = 1 << 16
_FEWEST_TOKENS = 32


def _check_token_dtype(path: Path, asked: str, vocabulary: int) -> None:
    """Raises ConfigError if a binary, judged by its data, was written in another dtype than it is read in.

    If it is read in a dtype that is too wide, tokens soon exceed the vocabulary, which `Samples` notices. If the dtype
    is too narrow, they never do: each token becomes its low part, followed by high parts that are mostly 0.
    """
    sample = _read_sample(path)
    found = next(
        (
            name
            for name in ("int64", "int32", "uint16")
            if _TOKEN_BYTES[name] > _TOKEN_BYTES[asked] and _looks_like(sample, name, asked, vocabulary)
        ),
        None,
    )
    if found is None and asked != "uint8" and _is_text(sample):
        found = "uint8"
    if found is not None:
        raise ConfigError(
            f"{path} does not look like {asked} tokens, but like {'text' if found == 'uint8' else found}",
            where=f"{_WHERE}={path}, data.token_dtype={asked}",
            fix=f"use data.token_dtype={found}",
        )


def _read_sample(path: Path) -> Tensor:
    """Returns bytes from the start, the middle and the end of a file, in whole words of the widest dtype."""
    length = path.stat().st_size // 8 * 8
    block = min(length, _LOOKED_AT_BYTES)
    found = bytearray()
    with path.open("rb") as file:
        for start in sorted({0, (length - block) // 16 * 8, length - block}):
            file.seek(start)
            found += file.read(block)
    return torch.frombuffer(found, dtype=torch.uint8) if found else torch.empty(0, dtype=torch.uint8)


def _looks_like(sample: Tensor, wide: str, asked: str, vocabulary: int) -> bool:
    """Returns whether all words of the wider dtype are tokens, and their first parts are distributed unlike the rest.

    Tokens of the narrow dtype have one distribution at all positions; the high parts of small numbers are mostly 0.
    """
    words = sample.view(getattr(torch, wide)).to(torch.int64)
    if words.numel() < _FEWEST_TOKENS or int(words.min()) < 0 or int(words.max()) >= vocabulary:
        return False
    parts = sample.view(getattr(torch, asked)).to(torch.float64).view(words.numel(), -1)
    # Compare magnitudes, with one bin for each power of two.
    bins = (parts + 1).log2().to(torch.int64)
    first, rest = (torch.bincount(part.flatten(), minlength=64) for part in (bins[:, :1], bins[:, 1:]))
    distance = (first / first.sum() - rest / rest.sum()).abs().sum() / 2
    return bool(distance > 0.25)


def _is_text(sample: Tensor) -> bool:
    """Returns whether all bytes are ASCII text, which tokens of two or more bytes hardly ever are."""
    printable = ((sample >= 32) & (sample < 127)) | ((sample >= 9) & (sample <= 13))
    return sample.numel() >= 2 * _FEWEST_TOKENS and bool(printable.all())


# --- tokenizing -----------------------------------------------------------------------------------------------------


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


def tokenize(data: Data, target: Path) -> None:
    """Writes the tokens of text files or of a Hugging Face data set to ``target``; one rank does this, once."""
    encode = _encoder(data.tokenizer)
    # Taken before anything is read: if a file changes meanwhile, the tokens count as stale.
    origin = _origin_of(data)
    unfinished = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    num_bytes = 0
    try:
        with unfinished.open("xb") as file:
            for text in _read_texts(data):
                tokens = torch.tensor(encode(text), dtype=torch.int32)
                num_bytes += file.write(bytes_of(tokens))
            file.flush()
            os.fsync(file.fileno())
        # Tokens without this record count as stale: remove it before they change, write it afterwards.
        _origin_path(target).unlink(missing_ok=True)
        unfinished.replace(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    replace_file(_origin_path(target), json.dumps({**origin, "num_bytes": num_bytes}, indent=1) + "\n")


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
        "tokenizer_files": {} if data.tokenizer == "bytes" else _stats_of(data.tokenizer),
        "dtype": "int32",
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


def _encoder(name: str) -> Any:
    if name == "bytes":
        return lambda text: list(text.encode())
    transformers = require("transformers", f"the tokenizer '{name}'")
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return lambda text: tokenizer.encode(text, add_special_tokens=False) + end


def _read_texts(data: Data) -> Iterator[str]:
    if not data.path.startswith("hf:"):
        if not data.path:
            yield embedded_text().decode(errors="replace")
            return
        for path in _text_files(_existing_path(data.path)):
            yield path.read_text(errors="replace")
        return
    datasets = require("datasets", f"the data set '{data.path}'")
    name, _, subset = data.path.removeprefix("hf:").partition(":")
    folder = Path(name).expanduser()
    try:
        if (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(str(folder))
            rows = loaded[data.split] if isinstance(loaded, dict) else loaded
        else:
            rows = datasets.load_dataset(name, subset or None, split=data.split)
    except Exception as error:  # noqa: BLE001  many kinds: no network, no such name, no such split
        raise ConfigError(
            f"the data set cannot be loaded: {error}",
            where=f"{_WHERE}={data.path}, data.split={data.split}",
            fix="check the name, the split and the network; a folder saved by save_to_disk needs none",
        ) from None
    if data.column not in rows.column_names:
        raise ConfigError(
            f"the data set has no column '{data.column}'",
            where="data.column",
            fix=f"use one of {', '.join(rows.column_names)}",
        )
    for row in rows:
        yield row[data.column]
