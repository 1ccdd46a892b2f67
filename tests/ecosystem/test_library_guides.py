"""The guides for libraries run as printed."""

import re
from pathlib import Path

import pytest

from tests.ecosystem.beside import REPOSITORY, Beside, cases_of

PROGRAM = "run_guides"


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    return Beside(PROGRAM, tmp_path_factory.mktemp(PROGRAM))


@pytest.mark.parametrize("case", cases_of(PROGRAM))
def test_the_guide_runs_as_printed(beside, case):
    assert min(beside.results("shardwise", case)) > 0


def test_every_page_that_leaves_blocks_to_these_tests_is_run():
    pages = [
        path
        for path in (REPOSITORY / "docs").rglob("*.md")
        if "`make test-ecosystem` runs it" in path.read_text()
    ]
    assert {f"guide-{Path(page).stem}" for page in pages} == set(cases_of(PROGRAM))


def test_the_guides_name_the_versions_that_are_tested():
    pinned = dict(re.findall(r"^(\w+)==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE))
    table = (REPOSITORY / "docs" / "guides" / "libraries.md").read_text()
    named = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", table, re.MULTILINE))
    assert named
    assert named.items() <= pinned.items()
