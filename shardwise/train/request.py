"""What ``shardwise train`` was asked for, and the settings that follow: recipe, folder to resume, file, command line.

    recipe  <  what the resumed run had  <  a file of settings  <  --set

The later of two values of a setting counts. Code runs only if the command line names it: a run's folder and a file of
settings may come from anywhere, so a recipe or an optimizer of one's own that they name must be named again.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.checkpoint.store import Store
from shardwise.errors import ConfigError
from shardwise.train.config import Config
from shardwise.train.config_file import ConfigFile, differing, read_config_file
from shardwise.train.recipes import RECIPES, load_recipe
from shardwise.train.records import CONFIG
from shardwise.train.run_folder import CHECKPOINTS, newest_folder
from shardwise.train.settings import settings_of, with_settings

__all__ = ["Request", "Resolved", "find_run_to_resume", "resolve"]

_FOLDER = "output.folder"


@dataclass(frozen=True)
class Request:
    """The arguments of ``shardwise train``."""

    recipe: str | None = None
    settings: tuple[str, ...] = ()
    ranks: int | None = None
    device: str = "auto"
    resume: str | None = None
    """A run's folder; empty: the newest run of the recipe's name; None: a new run."""
    auto_resume: bool = False
    """Continues the run in ``output.folder`` if it has a checkpoint, and begins it otherwise."""
    stop_after: int | None = None
    show: str | None = None
    """Replaces ``output.show`` this time only; it is not saved with the run."""
    config: str | None = None
    """A TOML file of settings, which those in ``settings`` replace."""
    profile: int = 0
    """The number of steps to profile."""


@dataclass(frozen=True)
class Resolved:
    """The settings of a request."""

    config: Config
    recipe: str
    base: Config
    """The recipe without settings."""
    settings: tuple[str, ...]
    """``name=value``, each name once."""
    kept: tuple[str, ...] = ()
    """Those of them that come from the run to resume."""
    recipe_before: str = ""
    """The recipe of the run to resume, if it is another one, so that its settings are not kept."""

    @property
    def origin(self) -> dict[str, Any]:
        """What a run's folder keeps, so that the run can be resumed."""
        return {"recipe": self.recipe, "settings": list(self.settings)}


def resolve(request: Request) -> Resolved:
    """Returns the settings of a request, checked; a resumed run keeps those that it had.

    A run that its launcher started again has them from the command, which is the same every time.

    Raises:
        ConfigError: there is no such recipe, setting, file or run, or code would run that the request does not name.
    """
    file = ConfigFile("") if request.config is None else read_config_file(request.config)
    recipe = request.recipe or _recipe_of(file, request)
    kept: list[str] = []
    before = _record_of_run(request, recipe) if request.resume else {}
    keeps = before if not request.auto_resume else {}
    known = None if keeps.get("recipe") is None else str(keeps["recipe"])
    if recipe is None and known is not None and known not in RECIPES:
        raise ConfigError(
            f"the run uses a recipe of your own, '{known}'",
            where=f"--resume {request.resume}",
            fix=f"name it again: shardwise train {shlex.quote(str(known))} --resume {request.resume}",
        )
    recipe = recipe or known or "tiny"
    if recipe == known and isinstance(keeps.get("settings"), list):
        kept = [str(setting) for setting in keeps["settings"]]
    given = [*file.settings, *request.settings]
    _refuse_optimizer_named_by(kept, given, f"--resume {request.resume}")
    _refuse_optimizer_named_by(file.settings, request.settings, str(request.config))
    kept = [*_settings_of_earlier_versions(before), *kept]
    settings = _last_of_each_name([*kept, *given])
    base = load_recipe(recipe)
    config = with_settings(base, settings, file.origins)
    if request.resume:
        _refuse_other_folder(request.resume, given)
        config = replace(config, output=replace(config.output, folder=request.resume))
    replaced = {_name_of(setting) for setting in given}
    return Resolved(
        config,
        recipe,
        base,
        settings if request.resume else _without_repetitions(settings, request, config, base),
        tuple(setting for setting in settings if setting in kept and _name_of(setting) not in replaced),
        known if known and known != recipe else "",
    )


def _settings_of_earlier_versions(before: dict[str, Any]) -> list[str]:
    """Returns the settings that keep a run as it was begun, where defaults have changed since."""
    config = before.get("config")
    if isinstance(config, dict) and "data.held_out" in config and "data.held_out_from" not in config:
        return ["data.held_out_from=end"]
    return []


def find_run_to_resume(request: Request) -> Request:
    """Returns the request with the folder to resume, if it asks for the newest run or for one that may exist."""
    if request.auto_resume:
        return _to_resume_or_begin(request)
    if request.resume != "":
        return request
    name = resolve(replace(request, resume=None)).config.name
    return replace(request, resume=str(newest_folder(name)))


def _to_resume_or_begin(request: Request) -> Request:
    """Returns the request of a launcher that starts the same command again and again, once it is known which it is."""
    if request.resume is not None:
        raise ConfigError(
            "--auto-resume and --resume exclude each other", where="--auto-resume", fix="leave out --resume"
        )
    name = resolve(request).config.output.folder
    if not name:
        raise ConfigError(
            "--auto-resume needs to know the folder of the run",
            where="--auto-resume",
            fix="name the folder with --out",
        )
    folder = Path(name).expanduser()
    return replace(request, resume=str(folder)) if Store(folder / CHECKPOINTS).checkpoints() else request


def _recipe_of(file: ConfigFile, request: Request) -> str | None:
    if file.recipe and (":" in file.recipe or file.recipe.endswith(".py")):
        raise ConfigError(
            f"the file uses a recipe of your own, '{file.recipe}'",
            where=str(request.config),
            fix=f"name it again: {shlex.join(['shardwise', 'train', file.recipe, '--config', str(request.config)])}",
        )
    return file.recipe or None


def _record_of_run(request: Request, recipe: str | None) -> dict[str, Any]:
    """Returns what the folder of the run to resume says; nothing, if it has no record and the recipe is known."""
    folder = Path(str(request.resume)).expanduser()
    found: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads((folder / CONFIG).read_text())
    if not folder.is_dir() or (found is None and recipe is None):
        raise ConfigError(
            f"there is no run in '{request.resume}' to continue",
            where=f"--resume {request.resume}",
            fix="pass the folder of a run, the one that holds config.json",
        )
    return found if isinstance(found, dict) else {}


def _name_of(setting: str) -> str:
    return setting.partition("=")[0].strip()


def _last_of_each_name(settings: list[str]) -> tuple[str, ...]:
    # A name that is set again moves to the end.
    found: dict[str, str] = {}
    for setting in settings:
        found.pop(_name_of(setting), None)
        found[_name_of(setting)] = setting
    return tuple(found.values())


def _without_repetitions(
    settings: tuple[str, ...], request: Request, config: Config, base: Config
) -> tuple[str, ...]:
    """Returns the settings without those in which a file only repeats the recipe, as one with all settings does."""
    changed = {name for name, _, _ in differing(config, base)}
    known = {name for name, _, _ in settings_of(base)}
    return tuple(
        setting
        for setting in settings
        if setting in request.settings or _name_of(setting) in changed or _name_of(setting) not in known
    )


def _refuse_other_folder(resume: str, given: list[str]) -> None:
    """Raises ConfigError if a run that continues is given another folder."""
    folders = [setting.partition("=")[2].strip() for setting in given if _name_of(setting) == _FOLDER]
    if (
        folders
        and folders[-1]
        and Path(folders[-1]).expanduser().resolve() != Path(resume).expanduser().resolve()
    ):
        raise ConfigError(
            f"a run continues in its own folder, '{resume}', not in '{folders[-1]}'",
            where="--resume with --out or output.folder",
            fix=f"leave that out; to branch off: cp -r {shlex.quote(resume)} {shlex.quote(folders[-1])}, "
            f"then --resume {shlex.quote(folders[-1])}",
        )


def _refuse_optimizer_named_by(
    found: list[str] | tuple[str, ...], given: list[str] | tuple[str, ...], where: str
) -> None:
    """Raises ConfigError if a file names a class to import, and the request does not name it itself."""

    def named(settings: list[str] | tuple[str, ...]) -> str | None:
        values = [
            setting.partition("=")[2].strip()
            for setting in settings
            if _name_of(setting) in ("optimizer", "optimizer.name")
        ]
        return values[-1] if values else None

    optimizer = named(found)
    is_known = optimizer is None or "." not in optimizer or optimizer.startswith("torch.optim.")
    if not is_known and named(given) is None:
        raise ConfigError(
            f"the run uses an optimizer of your own, '{optimizer}'",
            where=where,
            fix=f"name it again: --set optimizer.name={optimizer}",
        )
