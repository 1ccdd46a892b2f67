"""Tensors inside the arguments and results of a forward: lists, tuples, named tuples, dicts, dataclasses, nested."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from operator import is_
from typing import Any

import torch


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in ``value``, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), found)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with every tensor changed.

    Containers are copied where something in them has changed; all others are passed on as they are, since a module may
    write to what it is given: a cache, a list of losses.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(change, item) for item in value]
        if all(map(is_, items, value)):
            return value
        if isinstance(value, tuple):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        copied = copy.copy(value)
        copied[:] = items
        return copied
    if isinstance(value, dict):
        changes = {key: map_tensors(change, item) for key, item in value.items()}
        if all(map(is_, changes.values(), value.values())):
            return value
        copied_dict = copy.copy(value)
        for key, item in changes.items():
            copied_dict[key] = item
        return copied_dict
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_record(change, value)
    return value


def _map_record(change: Callable[[torch.Tensor], torch.Tensor], record: Any) -> Any:
    copied = None
    for field in dataclasses.fields(record):
        if hasattr(record, field.name):
            value = getattr(record, field.name)
            changed = map_tensors(change, value)
            if changed is not value:
                copied = copy.copy(record) if copied is None else copied
                # Frozen records refuse plain assignment; this copy has no other owner yet.
                object.__setattr__(copied, field.name, changed)
    return record if copied is None else copied
