"""The settings of a run with what they mean, read from the source of their records, so that nothing of torch is needed.

``--settings`` prints them as a TOML file that can be edited and used; completion knows their names and choices.
"""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.train.request import Request

__all__ = ["Explanation", "explanations", "setting_choices", "settings_as_toml"]

_SOURCES = tuple(Path(__file__).parents[1] / "train" / name for name in ("config.py", "llama.py"))


@dataclass(frozen=True)
class Explanation:
    """A field of a record: what it means, the values it may have if they are few, and the record that it is."""

    text: str = ""
    choices: tuple[str, ...] = ()
    record: str = ""
    is_code: bool = False
    """Whether only a recipe can give it a value."""


@functools.cache
def explanations() -> dict[tuple[str, str], Explanation]:
    """Returns every field of the records of settings and models, by class and name."""
    found: dict[tuple[str, str], Explanation] = {}
    for path in _SOURCES:
        tree = ast.parse(path.read_text())
        aliases = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found |= {(node.name, name): entry for name, entry in _fields_of(node, aliases)}
    return found


def _fields_of(cls: ast.ClassDef, aliases: dict[str, ast.expr]) -> Iterator[tuple[str, Explanation]]:
    for entry, after in zip(cls.body, [*cls.body[1:], None], strict=True):
        if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = " ".join(str(after.value.value).split())
        kind: ast.expr = entry.annotation
        if isinstance(kind, ast.Name):
            kind = aliases.get(kind.id, kind)
        names = {node.id for node in ast.walk(kind) if isinstance(node, ast.Name)}
        choices = _choices_in(kind)
        yield (
            entry.target.id,
            Explanation(
                text,
                choices or (("true", "false") if "bool" in names else ()),
                _default_record(entry.value),
                is_code=bool({"Callable", "Callback"} & names) and not choices and "str" not in names,
            ),
        )


def _choices_in(kind: ast.expr) -> tuple[str, ...]:
    for node in ast.walk(kind):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id == "Literal"
        ):
            return tuple(
                str(value.value) for value in ast.walk(node.slice) if isinstance(value, ast.Constant)
            )
    return ()


def _default_record(value: ast.expr | None) -> str:
    """Returns the class that a field is made of by default: ``field(default_factory=Data)``."""
    if isinstance(value, ast.Call):
        for keyword in value.keywords:
            if keyword.arg == "default_factory" and isinstance(keyword.value, ast.Name):
                return keyword.value.id
    return ""


def setting_choices(record: str = "Config", prefix: str = "") -> dict[str, tuple[str, ...]]:
    """Returns the names of all settings, each with its choices, if it has few."""
    found: dict[str, tuple[str, ...]] = {}
    records = {cls for cls, _ in explanations()}
    for (cls, name), entry in explanations().items():
        if cls != record or entry.is_code:
            continue
        if entry.record in records:
            found |= setting_choices(entry.record, f"{prefix}{name}.")
        else:
            found[prefix + name] = entry.choices
    return found


# --- as text ------------------------------------------------------------------------------------------------------


def settings_as_toml(request: Request, width: int) -> Iterator[str]:
    """Yields the settings of a request as a TOML file, each with what it means, in lines of at most ``width``."""
    from shardwise.train.config_file import toml_lines, toml_value
    from shardwise.train.request import resolve
    from shardwise.train.settings import settings_of

    resolved = resolve(request)
    before = {name: value for name, _, value in settings_of(resolved.base)}
    yield from _comment("Change what you like, and train: shardwise train FILE.toml", width)
    if ":" in resolved.recipe:
        yield from _comment(f"with this file: shardwise train {resolved.recipe} --config FILE.toml", width)
    yield f"recipe = {toml_value(resolved.recipe)}"
    for name, _, value in settings_of(resolved.config):
        yield ""
        explained = _explanation_of(resolved.config, name)
        yield from _comment(explained.text, width)
        if not all(choice in explained.text or choice in ("true", "false") for choice in explained.choices):
            yield from _comment(f"One of: {', '.join(explained.choices)}.", width)
        if value != before.get(name):
            yield from _comment(f"In the recipe: {toml_value(before.get(name))}.", width)
        is_code = callable(_value_of(resolved.config, name))
        yield from (f"# {line}" if is_code else line for line in toml_lines(name, value))


def _explanation_of(config: Any, name: str) -> Explanation:
    path, _, last = name.rpartition(".")
    classes = [cls.__name__ for cls in type(_value_of(config, path)).__mro__]
    found = (explanations().get((cls, last)) for cls in classes)
    return next((entry for entry in found if entry is not None), Explanation())


def _value_of(config: Any, name: str) -> Any:
    return functools.reduce(getattr, name.split(".") if name else (), config)


def _comment(text: str, width: int) -> list[str]:
    text = text.replace("``", "")
    return textwrap.wrap(text, width, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
