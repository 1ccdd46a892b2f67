"""Names for everything in a parameter's optimizer state: tensors in lists and dicts, and plain numbers.

    exp_avg            a tensor
    sides[0]           a tensor in a list or tuple, which comes back as a list
    roots[left]        a tensor in a dict
    step:int           a number, saved as a tensor of one element

Anything else is not saved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardwise.errors import CheckpointError

__all__ = ["named_values", "nested_state"]

_NUMBERS: dict[str, tuple[type, torch.dtype]] = {
    "bool": (bool, torch.bool),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}
_PART = re.compile(r"\[([^\[\]]*)\]")


def named_values(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors and numbers of a state by name."""
    return dict(pair for key, value in state.items() for pair in _named(key, value))


def _named(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    for suffix, (kind, dtype) in _NUMBERS.items():
        if type(value) is kind:
            yield f"{name}:{suffix}", torch.tensor(value, dtype=dtype, device="cpu")
    if isinstance(value, Mapping):
        inner: Any = value.items()
    else:
        inner = enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, each in inner:
        yield from _named(f"{name}[{key}]", each)


def nested_state(values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Returns a state from its values by name; raises CheckpointError for names that are of no state."""
    state: dict[str, Any] = {}
    for name, value in values.items():
        path, _, suffix = name.rpartition(":") if name.rpartition(":")[2] in _NUMBERS else (name, "", "")
        key = path.partition("[")[0]
        if suffix and value.numel() != 1:
            raise _no_state(name, f"is a number, and has {value.numel()} elements")
        _insert(state, [key, *_PART.findall(path[len(key) :])], value.item() if suffix else value, name)
    return {key: _with_lists(value) for key, value in state.items()}


def _insert(tree: Any, path: list[str], value: Any, name: str) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise _no_state(name, f"is inside '{key}', which is a value itself")
    if path[-1] in tree:
        raise _no_state(name, "comes twice")
    tree[path[-1]] = value


def _no_state(name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the optimizer's '{name}' {why}",
        where="the manifest of a checkpoint",
        fix="resume from another checkpoint, or begin the optimizer anew from its weights",
    )


def _with_lists(value: Any) -> Any:
    """Turns dicts with keys 0, 1, 2, … into lists."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(each) for key, each in value.items()}
    numbers = [str(number) for number in range(len(inner))]
    return [inner[number] for number in numbers] if set(numbers) == set(inner) else inner
