"""shardwise: train PyTorch models too big for one device, by sharding parameters, gradients and optimizer state."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.api import *


def __getattr__(name: str) -> Any:
    """Returns a module of the package or a public name, which is imported on its first use."""
    if name not in ("__all__", "__version__"):
        # First, so that the package's own modules can import each other before the public names exist.
        if name.startswith("_"):
            raise AttributeError(f"module 'shardwise' has no attribute '{name}'")
        if importlib.util.find_spec(f"shardwise.{name}") is not None:
            return importlib.import_module(f"shardwise.{name}")
    api = importlib.import_module("shardwise.api")
    if name in ("__all__", *api.__all__):
        # Found without this function from now on.
        return globals().setdefault(name, getattr(api, name))
    raise AttributeError(f"module 'shardwise' has no attribute '{name}'")


def __dir__() -> list[str]:
    api = importlib.import_module("shardwise.api")
    return sorted({*globals(), *api.__all__})
