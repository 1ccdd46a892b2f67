"""Reads text and rows from files and data sets, one after the other, without holding a file in memory.

.jsonl             a JSON object per line
.parquet           rows, a few hundred at a time
hf:NAME            rows of a Hugging Face data set
any other file     one text
a folder           all of its files, sorted by path
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.train.config import Data
from shardwise.train.optional_packages import require

__all__ = [
    "embedded_text",
    "existing_path",
    "has_rows",
    "left_out_files",
    "read_rows",
    "read_texts",
    "text_files",
    "valid_text",
]

_EMBEDDED_BYTES = 4 << 20
_ROWS_AT_ONCE = 512
_ROW_SUFFIXES = (".jsonl", ".parquet")
_CHAT_COLUMNS = ("messages", "prompt", "completion")
_WHERE = "data.path"

Row = tuple[str, dict[str, Any]]
"""Where a row was found, and its values."""


def has_rows(data: Data) -> bool:
    """Returns whether the data consists of rows, not of plain text or tokens."""
    if data.path.startswith("hf:"):
        return True
    path = Path(data.path).expanduser()
    if data.path and path.is_dir():
        return any(file.suffix in _ROW_SUFFIXES for file in text_files(path))
    return path.suffix in _ROW_SUFFIXES


def read_texts(data: Data) -> Iterator[str | None]:
    """Yields the texts of the data, one after the other; None for a row that has none."""
    if not data.path:
        yield embedded_text().decode(errors="replace")
        return
    if data.path.startswith("hf:"):
        yield from (_text_in(row, data.column, where) for where, row in _read_hugging_face(data))
        return
    # A line between rows, so that the bytes of one are told from those of the next.
    end = "\n" if data.tokenizer == "bytes" else ""
    for path in text_files(existing_path(data.path)):
        if path.suffix not in _ROW_SUFFIXES:
            yield path.read_text(errors="replace")
            continue
        for where, row in _read_file(path, (data.column,)):
            text = _text_in(row, data.column, where)
            yield text if text is None else text + end


def read_rows(data: Data) -> Iterator[Row]:
    """Yields the rows of the data, each with where it was found.

    Raises:
        ConfigError: a file has no rows, or is damaged.
    """
    if data.path.startswith("hf:"):
        yield from _read_hugging_face(data)
        return
    for path in text_files(existing_path(data.path)):
        if path.suffix not in _ROW_SUFFIXES:
            raise ConfigError(
                f"{path} has no rows",
                where=f"{_WHERE}={data.path}",
                fix="pass .jsonl or .parquet files, or a data set hf:NAME",
            )
        yield from _read_file(path, _CHAT_COLUMNS)


def existing_path(path: str) -> Path:
    found = Path(path).expanduser()
    if not found.exists():
        raise ConfigError(
            f"there is no file or folder '{path}'",
            where=_WHERE,
            fix="check the path; it is the same on every rank",
        )
    return found


def text_files(path: Path) -> list[Path]:
    """Returns the file itself, or a folder's files sorted by path, without hidden, empty and binary files.

    Raises:
        ConfigError: the file itself is binary.
    """
    if path.is_file():
        if _is_binary(path):
            raise ConfigError(
                f"'{path}' is a binary file, not text",
                where=_WHERE,
                fix="pass text; tokens are in a file whose name ends in .bin (data.token_dtype=uint8 for bytes)",
            )
        return [path]
    return [file for file in _visible_files(path) if file.stat().st_size and not _is_binary(file)]


def left_out_files(path: Path) -> list[Path]:
    """Returns the files of a folder that are left out because they are empty or binary; hidden ones are not counted."""
    kept = set(text_files(path)) if path.is_dir() else set()
    return [file for file in _visible_files(path) if file not in kept] if path.is_dir() else []


def _visible_files(folder: Path) -> list[Path]:
    return [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]


def _is_binary(file: Path) -> bool:
    if file.suffix == ".parquet":
        return False
    with file.open("rb") as opened:
        return b"\0" in opened.read(4096)


def embedded_text() -> bytes:
    """Returns sources of Python's standard library, in a fixed order: text that needs no download."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _EMBEDDED_BYTES:
            break
    return bytes(text[:_EMBEDDED_BYTES])


# --- rows -----------------------------------------------------------------------------------------------------------


def valid_text(text: str) -> str:
    """Returns the text without halves of characters, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _text_in(row: dict[str, Any], column: str, where: str) -> str | None:
    text: Any = row
    # A name with dots leads into columns of columns, unless there is a column of that name.
    for key in (column,) if column in row else column.split("."):
        if not isinstance(text, dict) or key not in text:
            raise _no_text(f"there is no text in '{column}'", row, where)
        text = text[key]
        if text is None:
            return None
    if not isinstance(text, str):
        raise _no_text(f"'{column}' is no text", row, where)
    return valid_text(text)


def _no_text(problem: str, row: dict[str, Any], where: str) -> ConfigError:
    texts = [str(key) for key, value in row.items() if isinstance(value, str)]
    return ConfigError(
        problem,
        where=where,
        fix=f"set data.column to one of: {', '.join(texts)}"
        if texts
        else f"set data.column to a column with text; there are {', '.join(map(str, row)) or 'none'}",
    )


def _read_file(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    yield from _read_parquet(path, columns) if path.suffix == ".parquet" else _read_json_lines(path)


def _read_json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                # Its own text says line 1, of this line.
                problem = (
                    f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                )
                raise ConfigError(
                    f"it is no JSON: {problem}", where=where, fix="write one JSON object per line"
                ) from None
            if not isinstance(row, dict):
                raise ConfigError(
                    f"it is a {type(row).__name__}", where=where, fix="write one JSON object per line"
                )
            yield where, row


def _read_parquet(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Reads only ``columns``, if there are any of them."""
    require("pyarrow", f"reading {path}")
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(str(path)) as file:
            names = file.schema_arrow.names
            wanted = [name for name in columns if name in names or name.split(".")[0] in names]
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=wanted or None):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (ArrowInvalid, OSError) as error:
        raise ConfigError(
            f"it cannot be read: {error}", where=f"{path}, after row {number}", fix="write the file again"
        ) from None


def _read_hugging_face(data: Data) -> Iterator[Row]:
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
    if data.format == "text" and data.column not in rows.column_names:
        raise ConfigError(
            f"the data set has no column '{data.column}'",
            where="data.column",
            fix=f"use one of {', '.join(rows.column_names)}",
        )
    for number, row in enumerate(rows, start=1):
        yield f"{data.path}, row {number}", row
