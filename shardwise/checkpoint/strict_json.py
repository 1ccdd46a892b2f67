"""JSON from files that anybody may have written: each key once, values of the type that is expected, nothing nested
without end. Whatever is wrong is a ValueError that says what.

Python's own parser takes NaN, duplicate keys and any depth; ``True`` passes for 1 and 1.0 for a size.
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
    """An object, as a dict."""
    try:
        return obj(json.loads(content, object_pairs_hook=_each_once))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except MemoryError:
        raise ValueError("it does not fit into memory") from None


def _each_once(pairs: list[tuple[str, Any]]) -> Values:
    found: Values = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shown(key)} is there twice")
        found[text(key)] = value
    return found


def shown(value: Any) -> str:
    """A value as a message shows it, however large it is."""
    return reprlib.repr(value)


def obj(value: Any, keys: tuple[str, ...] | None = None) -> Values:
    """A dict, with exactly these keys if they are given."""
    if type(value) is not dict:
        raise ValueError(f"{shown(value)} is there in place of an object")
    if keys is not None and value.keys() != set(keys):
        raise ValueError(f"an object has the keys {shown(sorted(value))} in place of {sorted(keys)}")
    return value


def text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{shown(value)} is there in place of text")
    value.encode()  # half of a surrogate pair is a UnicodeEncodeError, which is a ValueError
    return value


def count(value: Any, limit: int = MAX_COUNT) -> int:
    """A whole number from 0 up to, and without, the limit; neither a float nor a bool."""
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{shown(value)} is there in place of a whole number from 0 to {limit - 1}")
    return value


def counts(value: Any, length: int | None = None) -> tuple[int, ...]:
    if type(value) is not list or length not in (None, len(value)):
        wanted = "a list of numbers" if length is None else f"a list of {length} numbers"
        raise ValueError(f"{shown(value)} is there in place of {wanted}")
    return tuple(map(count, value))


def check_nesting(value: Any, levels: int = MAX_NESTING) -> None:
    """Refuses values that are nested so deeply that whoever walks through them may fail, and text that is none."""
    if type(value) is str:
        text(value)
    elif type(value) in (dict, list):
        if not levels:
            raise ValueError("it is nested too deeply")
        for inner in value.values() if type(value) is dict else value:
            check_nesting(inner, levels - 1)
