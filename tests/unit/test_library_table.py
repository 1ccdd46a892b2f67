"""The guides name the libraries and versions that `make test-ecosystem` has tried."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
GUIDES = REPOSITORY / "docs" / "guides"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("make_libraries", REPOSITORY / "docs" / "make_libraries.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tried(generator):
    return json.loads(generator.RESULTS.read_text())


def test_the_table_of_libraries_is_that_of_the_results(generator):
    assert generator.PAGE.read_text() == generator.page(), "run make reference"


def test_every_library_that_was_tried_passed_and_is_in_the_table(generator, tried):
    assert tried.keys() == generator.GUIDES.keys()
    assert {library: found["failed"] for library, found in tried.items() if found["failed"]} == {}


def test_what_was_tried_is_what_is_installed_for_it(tried):
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE))
    for library, found in tried.items():
        assert (found["version"], found["torch"]) == (pins[library], pins["torch"]), library


def test_the_guides_say_which_versions_were_tried(tried):
    on_gpus = json.loads((REPOSITORY / "benchmarks" / "results" / "libraries_gpu.json").read_text())["cases"]
    also = [pair for found in on_gpus.values() for pair in found.get("versions", {}).items()]
    name = "|".join(tried)
    seen = 0
    for path in GUIDES.glob("*.md"):
        for library, version in re.findall(rf"\b({name}) (\d+(?:\.\d+)+)", path.read_text(), re.IGNORECASE):
            known = (
                tried[library.lower()]["version"].startswith(version) or (library.lower(), version) in also
            )
            assert known, f"{path.name}: {library} {version}"
            seen += 1
    assert seen > 8
