"""Tensors that a forward leaves as attributes of its modules, beside its output: an auxiliary loss, say.

Backward may come to a unit by one of them first. Looking through all attributes takes too long to do it in every
forward, so the first one tells which of them hold such tensors, and later ones look at these.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwise.engine.tensor_trees import tensors_in
from shardwise.engine.unit.membership import units_of
from shardwise.torch_internals import buffers_of

# What every module has, and what is never a place for a result.
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


class GraphAttributes:
    """The attributes of a unit's modules that hold tensors with a graph after a forward."""

    def __init__(self) -> None:
        self._known: dict[nn.Module, list[tuple[dict[str, Any], str]]] = {}

    def graph_tensors(self, module: nn.Module) -> list[Tensor]:
        """What such attributes of ``module``, and of modules below it in the same unit, hold now."""
        known = self._known.get(module)
        if known is None:
            known = self._known[module] = []
            _look_through(module, known)
        if not known:
            return []
        return [tensor for attributes, name in known for tensor in tensors_in(attributes.get(name))]


def _look_through(module: nn.Module, found: list[tuple[dict[str, Any], str]]) -> None:
    for attributes in (module.__dict__, buffers_of(module)):
        for name, value in attributes.items():
            if name not in _OF_EVERY_MODULE and any(
                tensor.grad_fn is not None for tensor in tensors_in(value)
            ):
                found.append((attributes, name))
    for child in module.children():
        if not units_of(child):
            _look_through(child, found)
