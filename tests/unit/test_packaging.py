"""What is installed and what is published: a wheel with all of the library and nothing else, a complete source."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from shardwise.forecast.device_files import device_names

REPOSITORY = Path(__file__).parents[2]
BUILD = """
import sys
from setuptools import build_meta
target = sys.argv[1]  # setuptools puts arguments of its own there
build_meta.build_wheel(target)
build_meta.build_sdist(target)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the source distribution, built from a copy, so that nothing is left in the checkout."""
    source, target = tmp_path_factory.mktemp("source") / "shardwise", tmp_path_factory.mktemp("dist")
    unwanted = (
        ".git",
        ".venv",
        "build",
        "dist",
        "runs",
        "shared",
        "__pycache__",
        "*.egg-info",
        ".*_cache",
        ".hypothesis",
    )
    shutil.copytree(REPOSITORY, source, ignore=shutil.ignore_patterns(*unwanted))
    command = [sys.executable, "-c", BUILD, str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel, sdist


def modules():
    paths = (REPOSITORY / "shardwise").rglob("*.py")
    return {str(path.relative_to(REPOSITORY)) for path in paths}


def test_the_wheel_has_the_library_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    data = {"shardwise/py.typed", "shardwise/train/watch.html", "shardwise/forecast/page.html"}
    data |= {f"shardwise/forecast/devices/{name}.json" for name in (*device_names(), "links")}
    assert {name for name in names if ".dist-info/" not in name} == modules() | data
    inside = {name.partition(".dist-info/")[2] for name in names}
    assert {"entry_points.txt", "licenses/LICENSE"} <= inside


def test_the_library_needs_torch_alone_and_extras_say_the_rest(built):
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(wheel.read(name).decode())
    required = metadata.get_all("Requires-Dist")
    assert [need for need in required if "extra ==" not in need] == ["torch>=2.11"]
    assert set(metadata.get_all("Provides-Extra")) >= {
        "convert",
        "train",
        "tensorboard",
        "huggingface",
        "docs",
        "dev",
    }
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["License-Expression"] == "BSD-3-Clause"


def test_every_optional_package_of_a_run_is_in_an_extra():
    project = (REPOSITORY / "pyproject.toml").read_text().split("optional-dependencies]")[1].split("\n[")[0]
    source = "".join(path.read_text() for path in (REPOSITORY / "shardwise" / "train").glob("*.py"))
    used = set(re.findall(r"\b(?:require|optional)\(\"(\w+)\"", source))
    assert len(used) > 4
    for name in used:
        assert f'"{name}' in project, name


def test_the_source_distribution_can_be_tested_and_read(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = modules() | {
        "CHANGELOG.md",
        "ARCHITECTURE.md",
        "Makefile",
        "constraints.txt",
        "mkdocs.yml",
        ".ci/run",
    }
    for place in (
        "docs/**/*.md",
        "docs/*.py",
        "tests/**/*.py",
        "benchmarks/*.py",
        "benchmarks/results/*.json",
    ):
        wanted |= {str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob(place)}
    assert wanted <= names, wanted - names
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.parametrize(("target", "extras"), [("demo", ["train"]), ("test", ["train", "dev,train"])])
def test_the_demo_installs_no_developers_tools_and_the_tests_add_them(tmp_path, target, extras):
    command = ["make", "--dry-run", f"VENV={tmp_path / 'venv'}", target]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"-e '\.\[([\w,]+)\]'", done.stdout) == extras
    # It says what it installs: all that is named for training on every Python, at least.
    (wanted,) = re.findall(r"^train = \[(.*)\]$", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    (said,) = re.findall(r"once: (torch, .*)\"$", done.stdout, re.MULTILINE)
    for requirement in re.findall(r'"([^"]*)"', wanted):
        name, _, only_where = requirement.partition(";")
        assert only_where or re.match(r"\w+", name)[0] in re.findall(r"\w+", said)
