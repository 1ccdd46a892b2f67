"""Writes docs/reference.md and docs/design/files.md; run by ``make reference``.

The first comes from the docstrings of the public names, the settings of a run and the command line's help; the second
has the first line of every module's docstring.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import io
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import shardwise
import shardwise.checkpoint
import shardwise.optim
import shardwise.testing
import shardwise.train
import shardwise.train.config
from shardwise.cli import main as command
from shardwise.cli.settings import explanations

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "shardwise"
SECTIONS = {
    "shardwise": shardwise,
    "shardwise.trace": shardwise.trace,
    "shardwise.optim": shardwise.optim,
    "shardwise.checkpoint": shardwise.checkpoint,
    "shardwise.train": shardwise.train,
    "shardwise.testing": shardwise.testing,
}
COMMANDS = ("train", "generate", "eval", "runs", "watch", "convert", "doctor", "trace", "completion")


def public_names() -> Iterator[tuple[str, Any]]:
    """Every public name with what it stands for."""
    for prefix, module in SECTIONS.items():
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if not isinstance(value, ModuleType):
                yield f"{prefix}.{name}", value


def reference() -> str:
    parts = ["# Reference\n\nWritten by `make reference` from the docstrings; do not edit.\n"]
    section = ""
    for name, value in public_names():
        prefix = name.rpartition(".")[0]
        if prefix != section:
            section = prefix
            parts.append(f"\n## {section}\n\n{_prose(SECTIONS[section])}\n")
        parts.append(_entry(name, value))
    parts.append("\n## Settings\n\nOf `shardwise train`, by `--set name=value` or in a recipe.\n")
    parts.append(_settings())
    parts.append("\n## Command line\n")
    for name in COMMANDS:
        parts.append(f"\n```text\n{_help(name)}\n```\n")
    return "".join(parts)


def _entry(name: str, value: Any) -> str:
    short = name.rpartition(".")[2]
    lines = [f"\n### {short}\n"]
    if inspect.isclass(value) or inspect.isfunction(value):
        lines.append(f"\n```text\n{_signature(short, value)}\n```\n")
        if text := _prose(value):
            lines.append(f"\n{text}\n")
    else:
        lines.append(f"\n`{value!r}`\n")
    if inspect.isclass(value):
        lines += members_of(value)
    return "".join(lines)


def members_of(owner: type) -> list[str]:
    lines = []
    ours = [cls for cls in reversed(owner.__mro__) if cls.__module__.startswith("shardwise.")]
    for name, member in {name: member for cls in ours for name, member in vars(cls).items()}.items():
        function = getattr(owner, name) if isinstance(member, staticmethod | classmethod) else member
        is_told = inspect.isfunction(function) or inspect.ismethod(function) or isinstance(member, property)
        if name.startswith("_") or not is_told or not function.__doc__:
            continue
        called = name if isinstance(member, property) else " ".join(_signature(name, function).split())
        first = inspect.cleandoc(function.__doc__).split("\n\n")[0].replace("\n", " ")
        # Written as lines of a page: a signature is one piece of code, however long.
        text = textwrap.fill(
            f"- `{called}`: {_code(first)}", 118, subsequent_indent="  ", break_on_hyphens=False
        )
        lines.append(f"\n{text}")
    return [*lines, "\n"] if lines else []


def _signature(name: str, value: Any) -> str:
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return f"{name}: {', '.join(value.__members__)}"
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    bare = [param.replace(annotation=_bare(param.annotation)) for param in found.parameters.values()]
    signature = str(found.replace(parameters=bare, return_annotation=_bare(found.return_annotation)))
    # Without the module paths that only Python needs.
    for noise in _NOISE:
        signature = signature.replace(noise, "")
    signature = signature.replace("(self, ", "(").replace("(self)", "()")
    return (
        textwrap.fill(f"{name}{signature}", 110, subsequent_indent="    ") if "\n" not in signature else name
    )


_NOISE = (
    "shardwise.train.config.",
    "shardwise.train.llama.",
    "shardwise.train.model.",
    "shardwise.zero.optimizer.",
    "torch.nn.modules.module.",
    "torch.nn.parallel.distributed.",
    "torch._C._distributed_c10d.",
    "collections.abc.",
    "typing.",
)


class _Words(str):
    """An annotation that is printed without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _bare(annotation: Any) -> Any:
    return _Words(annotation) if isinstance(annotation, str) else annotation


def _prose(value: Any) -> str:
    """A docstring as Markdown: its list of arguments becomes a list."""
    lines: list[str] = []
    section = ""
    if (value.__doc__ or "").startswith(f"{getattr(value, '__name__', '')}("):
        return ""  # a dataclass's own words, which are its signature
    for line in inspect.cleandoc(value.__doc__ or "").split("\n"):
        is_inside = section and (line.startswith("    ") or not line)
        if line in ("Args:", "Attributes:", "Returns:", "Raises:"):
            section = line.rstrip(":")
            lines += [f"**{section}**", ""]
        elif not is_inside or section == "Returns":
            section = section if is_inside else ""
            lines.append(line.strip() if is_inside else line)
        elif line and not line.startswith("     ") and ":" in line:
            name, _, text = line.strip().partition(":")
            lines.append(f"- `{name}`:{text}")
        else:
            lines.append(f"  {line.strip()}".rstrip())
    return _code("\n".join(lines))


def _code(text: str) -> str:
    return text.replace("``", "`")


def _settings() -> str:
    """A table for each record of a config, with the text that follows each field in the source."""
    config = shardwise.train.config
    explained = explanations()
    parts = []
    for field in dataclasses.fields(config.Config):
        value = getattr(config.Config(), field.name)
        if not dataclasses.is_dataclass(value):
            continue
        kind = type(value).__name__
        parts.append(f"\n### {field.name}\n\n| setting | default | |\n|---|---|---|\n")
        for entry in dataclasses.fields(value):
            default = getattr(value, entry.name)
            shown = "" if default == "" else f"`{default}`"
            found = explained[kind, entry.name]
            is_told = all(choice in found.text or choice in ("true", "false") for choice in found.choices)
            told = [found.text, "" if is_told else f"One of {', '.join(found.choices)}."]
            text = " ".join(filter(None, told))
            parts.append(f"| `{field.name}.{entry.name}` | {shown} | {_code(text)} |\n")
    return "".join(parts)


def _help(name: str) -> str:
    os.environ["COLUMNS"] = "100"
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            command([name, "--help"])
    except SystemExit:
        pass
    return said.getvalue().rstrip()


def files() -> str:
    """Every module of the package with the first line of its docstring, folder by folder."""
    parts = [
        "# Every file\n\nGenerated by `make reference` from the first line of each file's docstring; do not edit.\n"
    ]
    folders = [
        PACKAGE,
        *sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE),
    ]
    for folder in folders:
        modules = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("__")]
        about = "" if folder == PACKAGE else f"\n{_first_line(folder / '__init__.py')}\n"
        parts.append(f"\n## {folder.relative_to(PACKAGE.parent).as_posix()}\n{about}")
        if modules:
            parts.append("\n| file | |\n|---|---|\n")
        parts += [f"| `{path.name}` | {_first_line(path)} |\n" for path in modules]
    return "".join(parts)


def _first_line(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return _code(" ".join(text.split("\n\n")[0].split())).replace("|", "\\|")


if __name__ == "__main__":
    (DOCS / "reference.md").write_text(reference())
    (DOCS / "design" / "files.md").write_text(files())
    sys.exit(0)
