"""Files of settings in TOML, beside ``--set``: the same names, the same checks, and the command line wins.

    recipe = "tiny"

    [train]                     # or train.steps = 500
    steps = 500

    [optimizer.arguments]
    betas = [0.9, 0.99]

Every run writes its own to its folder. A file is data: it names a recipe of the library, and no code.
"""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.train.config import Config
from shardwise.train.optional_packages import require
from shardwise.train.settings import settings_of

__all__ = ["ConfigFile", "config_text", "differing", "read_config_file", "toml_lines", "toml_value"]


@dataclass(frozen=True)
class ConfigFile:
    """What a file of settings says."""

    recipe: str
    settings: tuple[str, ...] = ()
    """``name=value``, as ``--set`` takes them."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where each of them is written, for errors."""


# --- reading ------------------------------------------------------------------------------------------------------


def read_config_file(path: str) -> ConfigFile:
    """Reads a file of settings; their names and values are checked where they are used.

    Raises:
        ConfigError: the file cannot be read, or is not TOML.
    """
    try:
        values = _toml_reader()(Path(path).expanduser().read_bytes().decode())
    except (OSError, ValueError, RecursionError) as error:
        problem = (error.strerror or str(error)) if isinstance(error, OSError) else f"it is not TOML: {error}"
        raise ConfigError(
            f"the settings cannot be read: {problem}",
            where=path,
            fix="pass a file with lines such as: train.steps = 500",
        ) from None
    recipe = values.pop("recipe", "")
    if not isinstance(recipe, str):
        raise ConfigError(
            f"'{recipe}' is not the name of a recipe", where=f"{path}: recipe", fix='write recipe = "tiny"'
        )
    settings = {f"{name}={_text_of(name, value, path)}": name for name, value in _flattened(values)}
    origins = {setting: f"{path}: {name}" for setting, name in settings.items()}
    return ConfigFile(recipe, tuple(settings), origins)


def _toml_reader() -> Callable[[str], dict[str, Any]]:
    read: Callable[[str], dict[str, Any]]
    try:
        read = importlib.import_module("tomllib").loads
    except ImportError:
        # Python has its own since 3.11.
        read = require("tomli", "a file of settings on Python 3.10").loads
    return read


def _flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        # An empty table sets nothing.
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _text_of(name: str, value: Any, path: str) -> str:
    """Returns a value as ``--set`` would be given it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value
    if isinstance(value, list) and name == "data.sources":
        return ", ".join(_source_text(source, f"{path}: {name}") for source in value)
    if isinstance(value, int | float | list):
        return repr(value)
    raise ConfigError(
        f"a {type(value).__name__} is no value of a setting",
        where=f"{path}: {name}",
        fix="write a number, a text in quotes, true or false, or a list of them",
    )


def _source_text(source: Any, where: str) -> str:
    """Returns a path, or a table of path and weight, as an entry of ``data.sources``."""
    table = source if isinstance(source, dict) else {"path": source}
    path, weight = table.get("path"), table.get("weight")
    if not isinstance(path, str) or "," in path or not table.keys() <= {"path", "weight"}:
        raise ConfigError(
            f"{toml_value(source)} is no source",
            where=where,
            fix='write { path = "web.jsonl", weight = 0.7 }, without a comma in the path',
        )
    return path if weight is None else f"{path}*{weight}"


# --- writing ------------------------------------------------------------------------------------------------------


def differing(config: Config, base: Config) -> list[tuple[str, Any, Any]]:
    """Returns the settings whose values differ from those in ``base``: name, value, value in ``base``."""
    before = {name: value for name, _, value in settings_of(base)}
    return [
        (name, value, before.get(name)) for name, _, value in settings_of(config) if value != before.get(name)
    ]


def config_text(config: Config, base: Config, recipe: str, path: str) -> str:
    """Returns a file that makes the same run again: settings that differ from the recipe's, the others as comments."""
    changed = {name for name, _, _ in differing(config, base)}
    own: list[str] = []
    others: list[str] = []
    for name, _, value in settings_of(config):
        # A folder belongs to one run.
        if name != "output.folder":
            (own if name in changed else others).extend(toml_lines(name, value))
    named = f"{shlex.quote(recipe)} --config {shlex.quote(path)}" if ":" in recipe else shlex.quote(path)
    command = f"shardwise train {named}".replace("\n", " ")
    return "\n".join(
        (
            f"# Train so again: {command}",
            f"recipe = {toml_value(recipe)}",
            "",
            *own,
            *([""] if own else []),
            "# As in the recipe:",
            *(f"# {line}" for line in others),
            "",
        )
    )


def toml_lines(name: str, value: Any) -> list[str]:
    """Returns the lines that give a setting its value; a dict's entries have a line each."""
    if isinstance(value, dict) and value:
        return [f"{name}.{key} = {toml_value(entry)}" for key, entry in value.items()]
    return [f"{name} = {toml_value(value)}"]


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f' {key} = {toml_value(entry)}' for key, entry in value.items())}}}"
    # A basic string of TOML is one of JSON, in which a few more characters must be escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
