"""Checks whether a state dict fits a model, before any of it is loaded. Each API passes the entries it expects."""

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
    arguments: str,
) -> None:
    """Raises one ``CheckpointError`` that lists everything in ``state_dict`` that does not fit; changes nothing.

    ``problem_with`` gets a key, the model's entry and the value to load. ``arguments``: of the call of
    ``load_state_dict``, for the message.
    """
    problems = []
    if checks_keys:
        missing = [key for key in expected if key not in state_dict]
        unexpected = [key for key in state_dict if key not in expected]
        for kind, keys in (("Missing", missing), ("Unexpected", unexpected)):
            if keys:
                quoted = ", ".join(f'"{key}"' for key in keys)
                problems.append(f"{kind} key(s) in state_dict: {quoted}.")
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
    """Says that a value does not have the model's shape; None if it has."""
    if tuple(value.shape) == shape:
        return None
    return (
        f"size mismatch for {key}: copying a param with shape {tuple(value.shape)} from checkpoint, "
        f"the shape in current model is {shape}."
    )
