"""Which shardwise this is: what the source tree says that it is run from, or what was installed."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

_DECLARED = re.compile(r'^name = "shardwise"\nversion = "([^"]+)"$', re.MULTILINE)


def version_of(package: Path) -> str:
    """The version of the package in this folder.

    A source tree comes before what is installed: with ``PYTHONPATH`` set to it, another version may be.
    """
    project = package.parent / "pyproject.toml"
    declared = _DECLARED.search(project.read_text()) if project.is_file() else None
    if declared is not None:
        return declared[1]
    try:
        return metadata.version("shardwise")
    except metadata.PackageNotFoundError:
        # A copy of the folder alone, which nobody has installed.
        return "0+unknown"


__version__ = version_of(Path(__file__).parent)
