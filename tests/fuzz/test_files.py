"""Tests a fixed sample of changed files, and that a less careful reader is detected.

``python -m tests.fuzz.files`` runs any number of cases.
"""

from __future__ import annotations

import pytest

from shardwise.checkpoint import manifest, reading, torch_file
from tests.fuzz import files


@pytest.mark.parametrize("first", [0, 20, 40])
def test_a_changed_file_is_refused_or_read_right(tmp_path, first):
    for number in range(first, first + 20):
        folder = tmp_path / str(number)
        folder.mkdir()
        files.run_case(1, number, folder)


def test_a_case_is_the_same_whenever_it_is_made(tmp_path):
    for number in range(30):
        contents = []
        for again in "ab":
            folder = tmp_path / again / str(number)
            folder.mkdir(parents=True)
            made = files.make(1, number, folder)
            contents.append(
                {
                    path.relative_to(folder): path.read_bytes()
                    for path in folder.rglob("*")
                    if path.is_file() and path.stat().st_size < 1 << 20
                }
                | {"change": made.change}
            )
        assert contents[0] == contents[1]


def first_finding(tmp_path, kind, changes):
    """Returns the failure of the first case of a kind that fails."""
    for number in range(1000):
        folder = tmp_path / str(number)
        folder.mkdir()
        made = files.make(1, number, folder)
        if made.kind == kind and made.change.startswith(changes):
            try:
                files.check_readers(made, folder)
            except Exception as error:  # noqa: BLE001  any exception is a finding
                return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_reader_that_lets_chunks_overlap_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_cover_exactly_once", lambda shape, chunks: True)
    assert "not valid, and was read all the same" in first_finding(tmp_path, "checkpoint", "cut: offsets")


def test_a_load_that_compares_no_checksums_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "first_damage", lambda *_: None)
    assert "differs" in first_finding(tmp_path, "checkpoint", "bytes: flip")


def test_a_reader_of_torch_files_that_compares_no_checksums_is_found_out(tmp_path, monkeypatch):
    class Lenient(torch_file.zipfile.ZipFile):
        def open(self, *args, **kwargs):
            content = super().open(*args, **kwargs)
            content._expected_crc = None
            return content

    monkeypatch.setattr(torch_file.zipfile, "ZipFile", Lenient)
    assert "differs" in first_finding(tmp_path, "torch", "bytes")


def test_numbers_that_are_none_are_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "count", lambda value, limit=0: value)
    monkeypatch.setattr(manifest, "counts", lambda value, length=None: tuple(value))
    assert first_finding(tmp_path, "checkpoint", "hostile") != "nothing"
