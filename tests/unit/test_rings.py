"""Modules that import each other can only be understood together: rings stay small, imports for types counted."""

import importlib.util
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LARGEST = 3


@pytest.fixture(scope="module")
def shape():
    spec = importlib.util.spec_from_file_location("shape", REPOSITORY / "benchmarks" / "shape.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rings_are_small(shape):
    too_large = [ring for ring in shape.rings(shape.import_graph()) if len(ring) > LARGEST]
    assert not too_large, "\n".join(f"{len(ring)} modules: {', '.join(ring)}" for ring in too_large)


def test_a_ring_is_found_however_it_is_closed(shape):
    known = {"shardwise.a": 0, "shardwise.b": 0, "shardwise.b.c": 0}
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shardwise.a import A"
    late = "def f():\n    from shardwise import a"
    for source in (for_types, late, "import shardwise.a", "from shardwise import a as other"):
        graph = {"shardwise.a": shape.imports_of("from shardwise.b.c import x", known)}
        graph["shardwise.b.c"] = shape.imports_of(source, known)
        assert shape.rings(graph) == [["shardwise.a", "shardwise.b.c"]], source


def test_rings_are_told_apart(shape):
    graph = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e"}, "e": {"c"}, "f": {"a"}, "g": set()}
    assert shape.rings(graph) == [["c", "d", "e"], ["a", "b"]]
