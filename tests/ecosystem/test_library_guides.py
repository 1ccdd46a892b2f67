"""The guides for libraries run as printed."""

from pathlib import Path

import pytest

from tests.ecosystem.beside import REPOSITORY, cases_of, parameters_of
from tests.ranks.test_guides import blocks_of, commands_of

PROGRAM = "run_guides"


@pytest.mark.parametrize(("program", "case"), parameters_of(PROGRAM))
def test_the_guide_runs_as_printed(beside, program, case):
    assert min(beside(program).results("shardwise", case)) > 0


def test_the_command_of_torchtitans_guide_names_a_config_that_is_run():
    from tests.ecosystem.programs.train_with_torchtitan import DTENSORS, LLAMA

    (block,) = [
        block for block in blocks_of(REPOSITORY / "docs/guides/torchtitan.md") if block.language == "sh"
    ]
    (words,) = commands_of(block)
    assert words[:3] == ["run", "-m", "torchtitan.train"]
    assert " ".join(words[3:]).replace("=", " ") == f"{LLAMA} {DTENSORS}".replace("=", " ")


def test_every_page_that_leaves_blocks_to_these_tests_is_run():
    pages = [
        path
        for path in (REPOSITORY / "docs").rglob("*.md")
        if "`make test-ecosystem` runs it" in path.read_text()
    ]
    assert {f"guide-{Path(page).stem}" for page in pages} == set(cases_of(PROGRAM))
