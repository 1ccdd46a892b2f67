"""The guides for libraries run as printed."""

from pathlib import Path

import pytest

from tests.ecosystem.beside import REPOSITORY, cases_of, parameters_of

PROGRAM = "run_guides"


@pytest.mark.parametrize(("program", "case"), parameters_of(PROGRAM))
def test_the_guide_runs_as_printed(beside, program, case):
    assert min(beside(program).results("shardwise", case)) > 0


def test_every_page_that_leaves_blocks_to_these_tests_is_run():
    pages = [
        path
        for path in (REPOSITORY / "docs").rglob("*.md")
        if "`make test-ecosystem` runs it" in path.read_text()
    ]
    assert {f"guide-{Path(page).stem}" for page in pages} == set(cases_of(PROGRAM))
