"""Finds and replaces tensors in the arguments and results of a forward: nested lists, tuples, dicts, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Container
from operator import is_
from typing import Any

import torch

Change = Callable[[torch.Tensor], torch.Tensor]


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


def containers_in(value: Any) -> list[Any]:
    """The mutable containers in ``value`` (lists, dicts, dataclasses that are not frozen), in order."""
    found: list[Any] = []
    _collect_containers(value, found)
    return found


def _collect_containers(value: Any, found: list[Any]) -> None:
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, (list, tuple)):
        if isinstance(value, list):
            found.append(value)
        for item in value:
            _collect_containers(item, found)
    elif isinstance(value, dict):
        found.append(value)
        for item in value.values():
            _collect_containers(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not _is_frozen(value):
            found.append(value)
        for field in dataclasses.fields(value):
            _collect_containers(getattr(value, field.name, None), found)


def _is_frozen(record: Any) -> bool:
    return bool(type(record).__dataclass_params__.frozen)


class InputSwaps:
    """Replaces tensors inside the containers that a module receives, for as long as the module runs.

    The module must receive the caller's own containers, because it may write to them (a cache, a list of losses). So
    tensors are replaced in place, and restored afterwards wherever they still are.
    """

    __slots__ = ("_containers", "_originals", "known")

    def __init__(self, given: Any) -> None:
        self._containers: dict[int, Any] = {id(container): container for container in containers_in(given)}
        self._originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # The tensors that were passed in, and their replacements.
        self.known: list[torch.Tensor] = tensors_in(given)

    def change(self, change: Change, value: Any) -> Any:
        """Returns ``value`` with every tensor replaced: in place in mutable containers, in copies of all others."""

        def exchange(tensor: torch.Tensor) -> torch.Tensor:
            changed = change(tensor)
            if changed is not tensor:
                self._originals[id(changed)] = (changed, tensor)
                self.known.append(changed)
            return changed

        return map_tensors(exchange, value, self._containers)

    def written(self) -> list[torch.Tensor]:
        """The tensors that the module has put into the containers."""
        known = set(map(id, self.known))
        return [
            tensor
            for container in self._containers.values()
            for tensor in tensors_in(container)
            if id(tensor) not in known
        ]

    def put_back(self) -> None:
        if self._originals:
            for container in self._containers.values():
                map_items(self._original, container)

    def _original(self, value: Any) -> Any:
        # A tensor may have been replaced more than once: cast, then by a view.
        while (found := self._originals.get(id(value))) is not None:
            value = found[1]
        return value


# For calls whose only argument is one tensor, as most are.
NO_SWAPS = InputSwaps(())


def change_inputs(change: Change, args: tuple[Any, ...], kwargs: dict[str, Any], swaps: InputSwaps) -> Any:
    """Returns the arguments of a forward with every tensor replaced, for as long as the module runs."""
    if swaps is NO_SWAPS:
        return (change(args[0]),), kwargs
    return swaps.change(change, (args, kwargs))


def cast_inputs(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any], swaps: InputSwaps) -> Any:
    """Returns the arguments of a forward with every floating-point tensor cast."""
    if swaps is NO_SWAPS and args[0].dtype is dtype:
        # As most often: the output of the block before.
        return args, kwargs
    return change_inputs(
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, args, kwargs, swaps
    )


def map_items(change: Callable[[Any], Any], container: Any) -> None:
    """Replaces the items of a list, dict or dataclass in place, without recursion."""
    if isinstance(container, list):
        for index, item in enumerate(container):
            if (changed := change(item)) is not item:
                container[index] = changed
    elif isinstance(container, dict):
        for key, item in list(container.items()):
            if (changed := change(item)) is not item:
                container[key] = changed
    else:
        for field in dataclasses.fields(container):
            item = getattr(container, field.name, None)
            if (changed := change(item)) is not item:
                setattr(container, field.name, changed)


def map_tensors(change: Change, value: Any, in_place: Container[int] = ()) -> Any:
    """Returns ``value`` with ``change`` applied to every tensor.

    Containers whose ids are in ``in_place`` are changed in place; others are copied if something in them changes.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if id(value) in in_place:
        map_items(lambda item: map_tensors(change, item, in_place), value)
        return value
    if isinstance(value, (tuple, list)):
        items = [map_tensors(change, item, in_place) for item in value]
        if all(map(is_, items, value)):
            return value
        if isinstance(value, tuple):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        copied = copy.copy(value)
        copied[:] = items
        return copied
    if isinstance(value, dict):
        changes = {key: map_tensors(change, item, in_place) for key, item in value.items()}
        if all(map(is_, changes.values(), value.values())):
            return value
        copied_dict = copy.copy(value)
        for key, item in changes.items():
            copied_dict[key] = item
        return copied_dict
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(change, value, in_place)
    return value


def _map_dataclass(change: Change, record: Any, in_place: Container[int]) -> Any:
    copied = None
    for field in dataclasses.fields(record):
        if hasattr(record, field.name):
            value = getattr(record, field.name)
            changed = map_tensors(change, value, in_place)
            if changed is not value:
                copied = copy.copy(record) if copied is None else copied
                # Also works for a frozen dataclass; the copy has no other owner yet.
                object.__setattr__(copied, field.name, changed)
    return record if copied is None else copied
