"""Loads what ``transformers`` knows by folder, or by name on Hugging Face's hub; says in one sentence why it cannot.

folder        only what is in it
name          a copy from an earlier download, or else the hub, if it can be reached at all
"""

from __future__ import annotations

import contextlib
import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError

__all__ = ["check_name", "load_from_hub"]

_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_ANSWER_SECONDS = 10.0


def load_from_hub(loader: Any, name: str, what: str, **arguments: Any) -> Any:
    """Returns ``loader.from_pretrained(name)``.

    Args:
        loader: a class of ``transformers`` such as ``AutoConfig``.
        name: a folder, or a name on the hub.
        what: what is loaded, for errors: "model", "tokenizer".

    Raises:
        ConfigError: there is no such folder, or no such name, or the hub cannot be reached.
    """
    check_name(name, what)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _load(loader, str(folder), name, what, arguments)
    # What was downloaded before is enough, and the same on every rank.
    with contextlib.suppress(OSError, ValueError):
        return loader.from_pretrained(name, local_files_only=True, **arguments)
    if not _hub_answers():
        raise ConfigError(
            f"there is no folder '{name}' here, and Hugging Face's hub cannot be reached to look up that name",
            where=f"the {what}",
            fix=f"pass the folder of a {what}, or download '{name}' where there is internet and copy its folder",
        )
    return _load(loader, name, name, what, arguments)


def check_name(name: str, what: str) -> None:
    """Raises ConfigError if ``name`` is neither a folder nor a name that the hub may have; nothing is imported."""
    path = Path(name).expanduser()
    if path.is_dir() or (_NAME.fullmatch(name) and not path.exists()):
        return
    raise ConfigError(
        f"'{name}' is a file, not a folder" if path.exists() else f"there is no folder '{name}'",
        where=f"the {what}",
        fix=f"pass the folder of a {what}, or its name on Hugging Face's hub, such as 'gpt2'",
    )


def _load(loader: Any, source: str, name: str, what: str, arguments: dict[str, Any]) -> Any:
    try:
        return loader.from_pretrained(source, **arguments)
    except Exception as error:  # noqa: BLE001  many kinds: a file is missing, no such name, another kind of model
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"'{name}' cannot be loaded as a {what}: {reason}",
            where=f"the {what}",
            fix=f"pass a folder that save_pretrained() has written, or the name of a {what} on the hub",
        ) from None


def _hub_answers() -> bool:
    """Returns whether the hub answers at all: transformers itself tries for most of a minute, and prints each try."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_ANSWER_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
