"""Imports packages that only some runs need, so that a missing one is always reported in the same way."""

from __future__ import annotations

import importlib
from typing import Any

from shardwise.errors import ConfigError

__all__ = ["optional", "require"]


def optional(name: str) -> Any | None:
    """Imports and returns a package, or returns None if it is not installed."""
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
