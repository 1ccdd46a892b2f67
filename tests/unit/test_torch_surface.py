"""The page about torch's API is complete, true to the installed torch, and names tests that exist."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

# The table is about the newest torch; an older one has fewer names and arguments.
newest = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="the table is about torch 2.13"
)
REPOSITORY = Path(__file__).resolve().parents[2]


@cache
def surface():
    spec = importlib.util.spec_from_file_location("torch_surface", REPOSITORY / "docs" / "torch_surface.py")
    module = sys.modules["torch_surface"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def functions_in(path):
    """Names of all functions in a test's file, and of those in the folder of cases that it may take them from."""
    files = [REPOSITORY / path, *(REPOSITORY / "tests" / "ranks" / "zero_cases").glob("*.py")]
    names = {}
    for file in files:
        tree = ast.parse(file.read_text())
        names[file] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return names[REPOSITORY / path], set().union(*names.values())


def check(names, rows):
    """The names that have no row."""
    known = {row.name for row in rows}
    return [name for name in names if name not in known]


def test_every_public_name_of_torch_has_a_row():
    missing = check((name for name, _ in surface().torch_names()), surface().ROWS)
    assert not missing, f"add rows to docs/torch_surface.py: {missing}"


def test_a_name_without_a_row_is_found():
    assert check(["fully_shard", "FSDPModule.fly"], surface().ROWS) == ["FSDPModule.fly"]


def test_what_torch_has_is_here_under_the_same_name():
    missing = [
        row.name
        for row in surface().ROWS
        if row.verdict != "refused" and surface().own(row.name.partition("(")[0]) is None
    ]
    assert not missing


def test_every_argument_of_torch_is_taken_here_with_the_same_default():
    """A default may be given where torch has none; factories of fields are compared by what they make elsewhere."""
    odd = []
    for name, value in surface().torch_names():
        ours = surface().own(name)
        own = surface().arguments(ours)
        for argument, default in surface().arguments(value).items():
            if argument not in own:
                odd.append(f"{name}({argument}) is missing")
            elif default is not inspect.Parameter.empty and repr(default) != repr(own[argument]):
                odd.append(f"{name}({argument}): {default!r} in torch, {own[argument]!r} here")
    assert not odd


@newest
def test_arguments_that_torch_lacks_are_listed_apart():
    for name, value in surface().torch_names():
        added = set(surface().arguments(surface().own(name))) - set(surface().arguments(value))
        assert added == set(surface().OWN_ARGUMENTS.get(name, ())), name


@newest
def test_every_argument_that_has_a_row_is_one_of_torchs():
    taken = dict(surface().torch_names())
    for row in surface().ROWS:
        name, _, argument = row.name.removesuffix(")").partition("(")
        assert not argument or argument in surface().arguments(taken[name]), row.name


def test_every_row_says_why_it_is_not_the_same():
    for row in surface().ROWS:
        assert row.verdict in surface().VERDICTS, row
        assert (row.verdict == "same") == (not row.why), row


def test_no_row_is_there_twice():
    seen = [(row.name, row.detail) for row in surface().ROWS]
    assert len(set(seen)) == len(seen)


def all_rows():
    return (*surface().ROWS, *surface().ENVIRONMENT)


@pytest.mark.parametrize("path", sorted({row.test.partition("::")[0] for row in all_rows()}))
def test_the_tests_that_rows_name_exist(path):
    here, anywhere = functions_in(path)
    for row in all_rows():
        if row.test.partition("::")[0] != path:
            continue
        test, _, case = row.test.partition("::")[2].partition("[")
        assert test in here, f"{row.name}: {row.test}"
        assert not case or case.removesuffix("]") in anywhere, f"{row.name}: {row.test}"


def test_the_page_is_what_the_table_says():
    assert surface().PAGE.read_text() == surface().page(), "run make reference"
