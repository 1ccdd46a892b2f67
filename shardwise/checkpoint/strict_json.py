"""Strict parsing of JSON from untrusted files; every violation is a ValueError that says what is wrong.

Python's own parser accepts duplicate keys and any depth, and ``True`` or 1.0 would pass for the size 1.
"""

from __future__ import annotations

import json
import reprlib
from typing import Any

__all__ = ["Values", "check_nesting", "count", "counts", "obj", "parse", "shown", "text"]

Values = dict[str, Any]
MAX_COUNT = 1 << 62
MAX_NESTING = 64


def parse(content: bytes | str) -> Values:
    """Parses a JSON object; each key may occur once."""
    try:
        return obj(json.loads(content, object_pairs_hook=_unique_keys))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except MemoryError:
        raise ValueError("it does not fit into memory") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> Values:
    found: Values = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shown(key)} occurs twice")
        found[text(key)] = value
    return found


def shown(value: Any) -> str:
    """Returns a short repr for messages, however large the value is."""
    return reprlib.repr(value)


def obj(value: Any, keys: tuple[str, ...] | None = None) -> Values:
    """Checks that a value is an object, with exactly these keys if they are given."""
    if type(value) is not dict:
        raise ValueError(f"expected an object, found {shown(value)}")
    if keys is not None and value.keys() != set(keys):
        raise ValueError(f"expected an object with the keys {sorted(keys)}, found {shown(sorted(value))}")
    return value


def text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected text, found {shown(value)}")
    value.encode()  # raises UnicodeEncodeError, a ValueError, for half of a surrogate pair
    return value


def count(value: Any, limit: int = MAX_COUNT) -> int:
    """Checks that a value is an int, not a float or bool, and in ``range(limit)``."""
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"expected a whole number from 0 to {limit - 1}, found {shown(value)}")
    return value


def counts(value: Any, length: int | None = None) -> tuple[int, ...]:
    if type(value) is not list or length not in (None, len(value)):
        wanted = "a list of numbers" if length is None else f"a list of {length} numbers"
        raise ValueError(f"expected {wanted}, found {shown(value)}")
    return tuple(map(count, value))


def check_nesting(value: Any, levels: int = MAX_NESTING) -> None:
    """Raises ValueError if a value is nested too deeply for recursive code, or has invalid text in it."""
    if type(value) is str:
        text(value)
    elif type(value) in (dict, list):
        if not levels:
            raise ValueError("it is nested too deeply")
        for inner in value.values() if type(value) is dict else value:
            check_nesting(inner, levels - 1)
