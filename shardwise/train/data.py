"""Opens a run's data as tokens: the bytes of text files, binaries of tokens, or what `tokenizing` wrote.

All of them become a `Corpus`: tokens end to end, with files memory-mapped and read on use. `samples` cuts sequences
from it, and `sample_order` decides which of them is used when.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.disk import bytes_of
from shardwise.errors import ConfigError
from shardwise.train.config import Data
from shardwise.train.documents import embedded_text, existing_path, text_files
from shardwise.train.tokenizing import ends_path, needs_tokenizing, token_dtype

__all__ = ["Corpus", "open_bounds", "open_corpus"]

_WHERE = "data.path"
_PIECE = 1 << 14
_MOST_PIECES = 256


class Corpus:
    """The tokens of several files or buffers, end to end."""

    def __init__(self, pieces: Iterable[Tensor]) -> None:
        self._pieces = [piece for piece in pieces if piece.numel()]
        self._starts = [0, *accumulate(piece.numel() for piece in self._pieces)]

    @property
    def num_tokens(self) -> int:
        return self._starts[-1]

    @property
    def highest_possible(self) -> int:
        """Returns the largest number that the files' dtypes can hold."""
        return max((torch.iinfo(piece.dtype).max for piece in self._pieces), default=0)

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
        """Returns its length and a checksum: of a large corpus, of a few million tokens from all over it."""
        num_pieces = min(_MOST_PIECES, -(-self.num_tokens // _PIECE))
        checksum = 0
        for number in range(num_pieces):
            start = (self.num_tokens - _PIECE) * number // max(1, num_pieces - 1)
            piece = self.read(max(0, start), min(self.num_tokens, max(0, start) + _PIECE))
            checksum = zlib.crc32(bytes_of(piece), checksum)
        return f"{self.num_tokens}-{checksum:08x}"


# --- opening --------------------------------------------------------------------------------------------------------


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
        corpus = Corpus([_map_tokens(tokenized, token_dtype(data))])
    elif data.path.endswith(".bin"):
        path = existing_path(data.path)
        corpus = Corpus([_map_tokens(path, getattr(torch, data.token_dtype))])
        if vocabulary is not None:
            _check_token_dtype(path, data.token_dtype, vocabulary)
    elif data.path:
        corpus = Corpus(_map_tokens(path, torch.uint8) for path in text_files(existing_path(data.path)))
    else:
        corpus = Corpus([torch.frombuffer(bytearray(embedded_text()), dtype=torch.uint8)])
    if not corpus.num_tokens:
        raise ConfigError(
            "it contains no text" if data.path else "this Python has no sources of its standard library",
            where=f"{_WHERE}={data.path}",
            fix="pass a text file, a folder of text files, or a .bin of tokens",
        )
    return corpus


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


def open_bounds(tokenized: Path) -> Tensor:
    """Returns, for each conversation of a file that ``tokenize`` wrote, where it ends and its first target."""
    return _map_tokens(ends_path(tokenized), torch.int64).view(-1, 2)


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
