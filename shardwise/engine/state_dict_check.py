"""Whether a state dict fits a model, decided before any of it is loaded. Each API says which entries it expects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.errors import CheckpointError

Entry = TypeVar("Entry")


def check_state_dict(
    module: nn.Module,
    state_dict: Any,
    expected: Mapping[str, Entry],
    problem_with: Callable[[str, Entry, Any], str | None],
    checks_keys: bool,
    is_extra: Callable[[Any], bool] = lambda value: False,
    arguments: str = "",
) -> None:
    """Raises one ``CheckpointError`` with all that does not fit; changes nothing.

    Args:
        expected: what the model has under each key.
        problem_with: takes a key, the model's entry and the state dict's value; returns what is wrong with the value.
        checks_keys: whether missing and unexpected keys are errors.
        is_extra: whether a value under an unexpected key is allowed.
        arguments: of the ``load_state_dict`` call, for the error message.
    """
    problems = []
    if checks_keys:
        if missing := [key for key in expected if key not in state_dict]:
            problems.append(f"Missing key(s) in state_dict: {_quoted(missing)}.")
        unexpected = [key for key, value in state_dict.items() if key not in expected and not is_extra(value)]
        if unexpected:
            problems.append(f"Unexpected key(s) in state_dict: {_quoted(unexpected)}.")
    for key, entry in expected.items():
        if key in state_dict and (problem := problem_with(key, entry, state_dict[key])) is not None:
            problems.append(problem)
    if problems:
        raise CheckpointError(
            f"the state dict does not fit {type(module).__name__}, and nothing was loaded:\n    "
            + "\n    ".join(problems),
            where=f"{type(module).__name__}.load_state_dict({arguments})",
            fix="load a state dict of the same model; strict=False ignores missing and unexpected keys",
        )


def size_mismatch(key: str, value: torch.Tensor, shape: tuple[int, ...]) -> str | None:
    """The problem with a value of another shape than the model's; None if the shapes are the same."""
    if tuple(value.shape) == shape:
        return None
    return (
        f"size mismatch for {key}: copying a param with shape {tuple(value.shape)} from checkpoint, "
        f"the shape in current model is {shape}."
    )


def _quoted(keys: list[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys)
