"""Tensors that a forward stores in attributes of its modules, beside its output: an auxiliary loss, for example.

Backward may reach a unit through one of them first, so they need hooks like outputs. Searching all attributes in every
forward would take too long: the first forward finds the attributes that hold such tensors, later ones read only these.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwise.engine.tensor_trees import tensors_in
from shardwise.engine.unit.membership import units_of
from shardwise.torch_internals import buffers_of

# Attributes that every module has, which never hold a result.
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


class GraphAttributes:
    """The attributes of a unit's modules that hold tensors with a graph after a forward."""

    def __init__(self) -> None:
        self._known: dict[nn.Module, list[tuple[dict[str, Any], str]]] = {}

    def graph_tensors(self, module: nn.Module) -> list[Tensor]:
        """Returns the tensors in such attributes of ``module`` and of the modules below it in the same unit."""
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
