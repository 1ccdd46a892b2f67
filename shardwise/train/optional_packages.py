"""Packages that a run can use but need not have: asked for here, so that a missing one is always told the same way."""

from __future__ import annotations

import importlib
from typing import Any

from shardwise.errors import ConfigError

__all__ = ["optional", "require"]


def optional(name: str) -> Any | None:
    """The package, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def require(name: str, purpose: str) -> Any:
    package = optional(name)
    if package is None:
        raise ConfigError(
            f"{purpose} needs the package '{name}', which is not installed",
            where="this Python environment",
            fix=f"pip install {name}",
        )
    return package
