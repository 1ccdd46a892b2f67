"""Tensors inside the arguments and results of a forward: lists, tuples, named tuples, dicts, dataclasses, nested."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
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
    """``value`` with every tensor changed; containers are copied, everything else is passed on."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [map_tensors(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        copied = copy.copy(value)
        copied[:] = [map_tensors(change, item) for item in value]
        return copied
    if isinstance(value, dict):
        copied_dict = copy.copy(value)
        for key, item in value.items():
            copied_dict[key] = map_tensors(change, item)
        return copied_dict
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied_record = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                # Frozen records refuse plain assignment; this copy has no other owner yet.
                object.__setattr__(copied_record, field.name, map_tensors(change, getattr(value, field.name)))
        return copied_record
    return value
