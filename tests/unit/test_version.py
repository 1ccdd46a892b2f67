"""shardwise says which version it is, however it came here."""

import re
from importlib import metadata
from pathlib import Path

import pytest

import shardwise
from shardwise.cli import main
from shardwise.version import version_of

ROOT = Path(__file__).parents[2]


def test_the_version_is_the_projects_own():
    (declared,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert shardwise.__version__ == declared


@pytest.mark.parametrize("project", [None, '[project]\nname = "another"\nversion = "7.0"\n'])
def test_an_installed_package_says_what_was_installed(tmp_path, monkeypatch, project):
    monkeypatch.setattr(metadata, "version", {"shardwise": "1.2.3"}.__getitem__)
    if project is not None:
        (tmp_path / "pyproject.toml").write_text(project)
    assert version_of(tmp_path / "shardwise") == "1.2.3"


def test_a_source_tree_comes_before_what_is_installed_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(metadata, "version", {"shardwise": "1.2.3"}.__getitem__)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "shardwise"\nversion = "4.5.6"\n')
    assert version_of(tmp_path / "shardwise") == "4.5.6"


def test_a_copy_that_nobody_installed_is_of_no_known_version(tmp_path, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert version_of(tmp_path / "shardwise") == "0+unknown"


def test_the_command_tells_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"shardwise {shardwise.__version__}, torch ")
