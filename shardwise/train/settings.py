"""Reads and changes the settings of a run by dotted name.

    config = with_settings(tiny(), ["train.steps=200", "sharding.mode=hybrid"])

The error for an unknown name suggests the nearest one that exists; the error for an invalid value names the valid
ones.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from shardwise.errors import ConfigError
from shardwise.train.checks import check
from shardwise.train.config import Config, Source, sources_text

__all__ = ["as_json", "parse_sources", "settings_of", "with_settings"]

Record = TypeVar("Record")
_UNION = type(typing.Optional[int])  # noqa: UP045  the type of unions made by typing, which differs from that of |


def settings_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields every setting of a config: dotted name, type, value."""
    hints = typing.get_type_hints(type(config))
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        kind = hints[entry.name]
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{prefix}{entry.name}.")
        elif isinstance(value, Mapping):
            yield prefix + entry.name, kind, dict(value)
        elif callable(value):
            # Code can be replaced by a setting where a name would do as well.
            if _as_text(kind) is not None:
                yield prefix + entry.name, kind, f"{value.__module__}.{value.__qualname__}"
        elif kind == tuple[Source, ...]:
            yield prefix + entry.name, kind, sources_text(value)
        elif not isinstance(value, tuple) and value is not None:
            yield prefix + entry.name, kind, value


def with_settings(
    config: Config, assignments: Iterable[str], origins: Mapping[str, str] | None = None
) -> Config:
    """Returns the config with ``name=value`` assignments, checked; the last assignment to a name wins.

    ``origins`` says where an assignment is written, if not on the command line.
    """
    known = {name: kind for name, kind, _ in settings_of(config)}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        name = name.strip()
        where = (origins or {}).get(assignment, f"--set {assignment}")
        if not equals:
            raise ConfigError(f"'{assignment}' sets nothing", where=where, fix="write --set name=value")
        if f"{name}.name" in known:
            # optimizer=muon
            name = f"{name}.name"
        head, _, key = name.rpartition(".")
        if head in known and typing.get_origin(known[head]) is Mapping and key.isidentifier():
            path = head.split(".")
            arguments = {**_value_of(config, path), key: _parse_any(text.strip())}
            config = _with_value(config, path, arguments)
            continue
        if name not in known:
            raise ConfigError(f"there is no setting '{name}'", where=where, fix=_suggestion(name, known))
        config = _with_value(config, name.split("."), _parse_value(text.strip(), known[name], where))
    check(config)
    return config


def _suggestion(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not near:
        last = name.rsplit(".", 1)[-1]
        lasts = {full.rsplit(".", 1)[-1]: full for full in names}
        near = [lasts[found] for found in difflib.get_close_matches(last, list(lasts), n=1, cutoff=0.5)]
    if near:
        return f"did you mean '{near[0]}'?"
    return "see them all with: shardwise train --settings"


def _as_text(kind: Any) -> Any | None:
    """Returns the part of a type that can be written in a setting: of ``str | type``, it is ``str``."""
    for option in typing.get_args(kind) if isinstance(kind, types.UnionType | _UNION) else (kind,):
        if option is str or typing.get_origin(option) is Literal:
            return option
    return None


def _value_of(record: Any, path: list[str]) -> Any:
    return functools.reduce(getattr, path, record)


def _with_value(record: Record, path: list[str], value: Any) -> Record:
    head, *rest = path
    if rest:
        value = _with_value(getattr(record, head), rest, value)
    return dataclasses.replace(record, **{head: value})  # type: ignore[type-var]


def _parse_any(text: str) -> Any:
    """Returns the value that a text means: a number, true or false, a tuple, or else the text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_sources(text: str, where: str) -> tuple[Source, ...]:
    """Reads ``PATH*WEIGHT, PATH*WEIGHT``, or paths alone."""
    found = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        path, star, weight = entry.rpartition("*")
        try:
            found.append(Source(path.strip(), float(weight)) if star else Source(entry))
        except ValueError:
            raise ConfigError(
                f"'{weight}' is not a weight", where=where, fix="write PATH*WEIGHT, PATH*WEIGHT, ..."
            ) from None
    return tuple(found)


def _parse_value(text: str, kind: Any, where: str) -> Any:
    kind = _as_text(kind) or kind
    if kind == tuple[Source, ...]:
        return parse_sources(text, where)
    if typing.get_origin(kind) is Mapping:
        value = _parse_any(text)
        if not isinstance(value, dict):
            raise ConfigError(
                f"'{text}' is no dict", where=where, fix="set its entries one by one: name.key=value"
            )
        return value
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if text in choices:
            return text
        near = difflib.get_close_matches(text, choices, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ConfigError(
            f"'{text}' is not a valid value", where=where, fix=f"{hint}use one of {', '.join(choices)}"
        )
    if kind is bool:
        words = {"true": True, "yes": True, "on": True, "1": True}
        words |= {"false": False, "no": False, "off": False, "0": False}
        if text.lower() in words:
            return words[text.lower()]
        raise ConfigError(f"'{text}' is neither true nor false", where=where, fix="write true or false")
    if kind is str:
        return text
    if isinstance(kind, types.UnionType) and text.lower() == "none":
        return None
    try:
        value = ast.literal_eval(text.replace("_", "") if kind in (int, float) else text)
    except (ValueError, SyntaxError):
        value = text
    if kind is float and isinstance(value, int):
        value = float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(kind, type) and (not isinstance(value, kind) or isinstance(value, bool)):
        raise ConfigError(
            f"'{text}' is not {'a whole number' if kind is int else 'a number'}",
            where=where,
            fix=f"write one, such as {'100' if kind is int else '1e-3'}",
        )
    return value


def as_json(config: Config) -> dict[str, Any]:
    """Returns the settings as plain values, for files."""
    return {name: value for name, _, value in settings_of(config)}
