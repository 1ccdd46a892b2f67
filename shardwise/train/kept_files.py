"""What a run keeps in its folder so that it can be resumed and exported: its settings and its tokenizer.

The folder is made again if somebody removes it during the run, and left alone once another run has begun in it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

from shardwise.checkpoint.weights import TOKENIZER
from shardwise.errors import ConfigError
from shardwise.train.config import Config
from shardwise.train.display import Display
from shardwise.train.records import CONFIG
from shardwise.train.report import Unwritten
from shardwise.train.run_files import replace_file
from shardwise.train.run_folder import lock_holder
from shardwise.train.settings import as_json
from shardwise.train.tokenizers import IDS, save_tokenizer, tokenizer_of

__all__ = ["KeptFiles"]


class KeptFiles:
    """The settings and the tokenizer in a run's folder; only rank 0 writes.

    Args:
        folder: the run's folder.
        config: the settings of the run.
        origin: the recipe and settings asked for.
        display: shows warnings about what cannot be written.
        unwritten: collects what cannot be written.
    """

    def __init__(
        self, folder: Path, config: Config, origin: dict[str, Any], display: Display, unwritten: Unwritten
    ) -> None:
        self._folder, self._config, self._origin = folder, config, origin
        self._display, self._unwritten = display, unwritten
        self._holder = lock_holder(folder)

    def keep_tokenizer(self) -> None:
        """Copies the tokenizer into the run's folder, for generation and exports."""
        data = self._config.data
        if tokenizer_of(data) == IDS or (self._folder / TOKENIZER).exists():
            return
        try:
            save_tokenizer(data.tokenizer, self._folder / TOKENIZER)
        except OSError as error:
            self._warn(
                TOKENIZER, f"the tokenizer cannot be written, training continues: {_reason(error)}", error
            )

    def write_config(self) -> None:
        """Writes the file that resuming needs: a new run does not begin before it is on disk."""
        path = self._folder / CONFIG
        try:
            replace_file(path, self._config_text())
        except OSError as error:
            if not path.exists():
                raise ConfigError(
                    f"{path} cannot be written: {error.strerror}",
                    where="output.folder",
                    fix="free disk space, or choose another folder",
                ) from None
            self._warn(
                CONFIG, f"{CONFIG} cannot be written and keeps the old settings: {error.strerror}", error
            )

    def ensure_folder(self) -> str | None:
        """Makes a folder that was removed or moved again, so that the run can be resumed; before a save.

        Returns the other run that is using the folder, if there is one.
        """
        if not os.path.lexists(self._folder):
            problem = OSError(errno.ENOENT, "it was removed or moved; recreating it")
            self._warn("the run's folder", f"the run's folder {self._folder}: {problem.strerror}", problem)
            # If this fails, the save reports it.
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True)
                replace_file(self._folder / CONFIG, self._config_text())
        return self.other_run()

    def other_run(self) -> str | None:
        """Returns the holder of another run, if one has begun in the folder since it was emptied or replaced."""
        holder = lock_holder(self._folder)
        return holder if holder and holder != self._holder else None

    def _config_text(self) -> str:
        return json.dumps({**self._origin, "config": as_json(self._config)}, indent=2) + "\n"

    def _warn(self, name: str, text: str, error: OSError) -> None:
        if self._unwritten.add(name, error):
            self._display.warn(text)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
