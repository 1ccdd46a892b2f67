"""Measures the structure of the package: its size, call depth and import cycles. Run by `make shape`.

All figures are read from the source, except the path of one batch, which is traced on two ranks that are threads.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "shardwise"
# The part that does the job of torch's FSDP1, FSDP2 and ZeRO; those build on torch's collectives, this on ``comm``.
SAME_JOB = ("planning", "engine", "training_step", "composable", "wrapper", "zero", "forward_methods.py")
CENTRAL_CLASS = ("engine/unit/unit.py", "Unit")
# The names that variables for units have.
CALLED = {"unit", "needed", "owner", "chosen", "top", "each", "gone", "following", "used"}
LONGEST_FUNCTION = 50


def modules() -> dict[str, Path]:
    """Returns the file of every module of the package by its dotted name; for a package, its ``__init__``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


# --- rings ------------------------------------------------------------------------------------------------------------


def imports_of(source: str, known: dict[str, Any]) -> set[str]:
    """Returns the modules among ``known`` that a file imports, including imports for types or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return found & set(known)


def rings(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the import cycles: strongly connected components of more than one module, largest first."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        open_.append(name)
        for other in sorted(graph.get(name, ())):
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in open_:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            at = open_.index(name)
            ring = open_[at:]
            del open_[at:]
            if len(ring) > 1:
                found.append(sorted(ring))

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return sorted(found, key=lambda ring: (-len(ring), ring))


def import_graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports_of(path.read_text(), known) - {name} for name, path in known.items()}


# --- sizes ------------------------------------------------------------------------------------------------------------


def code_lines(source: str) -> int:
    """Counts the lines of code, without blank lines, comments and docstrings."""
    lines: set[int] = set()
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
        and isinstance(node.body[0].value.value, str)
    }
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (*silent, tokenize.ENCODING, tokenize.ENDMARKER) or token.start in docstrings:
            continue
        lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def is_below(path: Path, places: tuple[str, ...]) -> bool:
    name = path.relative_to(PACKAGE).as_posix()
    return any(name == place or name.startswith(f"{place}/") for place in places)


def long_functions() -> tuple[int, int]:
    """Returns the number of functions that are too long, and the number of all functions."""
    lengths = [
        (node.end_lineno or 0) - node.lineno + 1
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    return sum(length > LONGEST_FUNCTION for length in lengths), len(lengths)


def attributes_of_central_class() -> set[str]:
    """Returns the attributes that methods of the class assign to ``self``."""
    path, name = CENTRAL_CLASS
    (owner,) = [
        node
        for node in ast.parse((PACKAGE / path).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return {target.attr for target in _assigned(owner) if _receiver(target) == "self"}


def writes_from_outside() -> list[str]:
    """Returns assignments to those attributes in other files, on variables that have a unit's name."""
    attributes, found = attributes_of_central_class(), []
    for path in modules().values():
        if path == PACKAGE / CENTRAL_CLASS[0]:
            continue
        for target in _assigned(ast.parse(path.read_text())):
            if target.attr in attributes and _receiver(target) in CALLED:
                found.append(f"{path.relative_to(PACKAGE)}:{target.lineno} .{target.attr}")
    return found


def _assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            targets = [node.target]
        for target in targets:
            for each in ast.walk(target):
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                    yield each


def _receiver(target: ast.Attribute) -> str:
    value = target.value
    if isinstance(value, ast.Attribute):
        return value.attr
    return value.id if isinstance(value, ast.Name) else ""


def glossary() -> list[str]:
    """Returns the words that ARCHITECTURE.md explains, one or more in each row of its table."""
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    found = re.search(r"^\| word \| meaning \|\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = found[1].splitlines() if found else []
    return [word.strip() for row in rows for word in row.split("|")[1].split(",")]


# --- the path of one batch --------------------------------------------------------------------------------------------

GATHER = ("issue_all_gather", "issue_all_gather_each", "issue_all_gather_lent")
REDUCE = ("issue_reduce_scatter",)


class Way:
    """A trace function: collects the files a step runs through on one thread, and its deepest stacks at collectives."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.deepest: dict[str, list[str]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(str(PACKAGE)) or "/testing/" in name:
            return
        self.files.add(name)
        calls = list(_calls_of_package(frame))
        called = {call.rpartition(" ")[2] for call in calls}
        for kind, issues in (("gather", GATHER), ("reduce", REDUCE)):
            if not called.isdisjoint(issues) and len(calls) > len(self.deepest.get(kind, ())):
                self.deepest[kind] = calls


def _calls_of_package(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(str(PACKAGE)) and "/testing/" not in name:
            yield f"{Path(name).relative_to(PACKAGE)}: {frame.f_code.co_name}"
        frame = frame.f_back


def _one_batch() -> tuple[list[str], dict[str, list[str]]]:
    """Traces the second step of a small model, on one rank."""
    import torch
    from torch import nn

    from shardwise import fully_shard

    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    way = Way()
    sys.setprofile(way)
    try:
        step()
    finally:
        sys.setprofile(None)
    return sorted(way.files), way.deepest


def way_of_a_batch() -> tuple[list[str], dict[str, list[str]]]:
    from shardwise.testing import run_ranks

    files: set[str] = set()
    deepest: dict[str, list[str]] = {}
    for came_through, calls in run_ranks(_one_batch, 2, kind="threads"):
        files.update(came_through)
        for kind, chain in calls.items():
            if len(chain) > len(deepest.get(kind, ())):
                deepest[kind] = chain
    return sorted(str(Path(name).relative_to(PACKAGE)) for name in files), deepest


# --- the table --------------------------------------------------------------------------------------------------------


def shape() -> dict[str, Any]:
    paths = list(modules().values())
    sources = {path: path.read_text() for path in paths}
    same_job = [path for path in paths if is_below(path, SAME_JOB)]
    num_long, num_functions = long_functions()
    files, deepest = way_of_a_batch()
    all_rings = rings(import_graph())
    words = glossary()
    return {
        "code lines for the same job": sum(code_lines(sources[path]) for path in same_job),
        "files of the package": len(paths),
        "lines of the package": sum(len(source.splitlines()) for source in sources.values()),
        "functions": num_functions,
        f"functions over {LONGEST_FUNCTION} lines": num_long,
        "files that one batch passes through": len(files),
        "frames deep at a gather": len(deepest["gather"]),
        "frames deep at a reduce": len(deepest["reduce"]),
        "attributes of the central class": len(attributes_of_central_class()),
        "writes to it from outside": len(writes_from_outside()),
        "modules in the largest ring": len(all_rings[0]) if all_rings else 1,
        "rings of more than 3 modules": sum(len(ring) > 3 for ring in all_rings),
        "words of the glossary": len(words),
        "details": {
            "batch": files,
            "gather": deepest["gather"],
            "reduce": deepest["reduce"],
            "writes": writes_from_outside(),
            "rings": all_rings,
            "words": words,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="all of it, with what was counted")
    parser.add_argument("--details", action="store_true", help="also what was counted")
    args = parser.parse_args()
    found = shape()
    details = found.pop("details")
    if args.json:
        print(json.dumps({**found, "details": details}, indent=1))
        return
    num_long, num = found[f"functions over {LONGEST_FUNCTION} lines"], found["functions"]
    for name, value in found.items():
        share = f" ({100 * num_long / num:.1f} %)" if value is num_long and "over" in name else ""
        print(f"{name:<40}{value:>8}{share}")
    for name, lines in details.items() if args.details else ():
        print(f"\n{name}")
        for line in lines:
            print(f"  {line if isinstance(line, str) else ' '.join(line)}")


if __name__ == "__main__":
    main()
