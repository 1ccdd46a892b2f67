"""Trees of tensors, walked as torch walks containers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten


def same_structure(one: Any, other: Any) -> bool:
    """Returns whether two trees have the same containers, with tensors at the same leaves and equal other leaves."""
    leaves, shape = tree_flatten(one)
    other_leaves, other_shape = tree_flatten(other)
    return shape == other_shape and all(
        isinstance(a, torch.Tensor) == isinstance(b, torch.Tensor) and (isinstance(a, torch.Tensor) or a == b)
        for a, b in zip(leaves, other_leaves, strict=True)
    )


def map_tree(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Returns ``tree`` with ``change`` applied to every tensor, as torch walks containers."""
    return tree_map_only(torch.Tensor, change, tree)


def leaves_of(tree: Any) -> list[Any]:
    """Returns what is in nested lists, tuples and dicts, in their order."""
    return tree_flatten(tree)[0]


def with_leaves(tree: Any, leaves: Iterable[Any]) -> Any:
    """Returns ``tree`` with other leaves, in the same containers."""
    return tree_unflatten(list(leaves), tree_flatten(tree)[1])


def join_trees(join: Callable[[list[torch.Tensor]], torch.Tensor], trees: Sequence[Any]) -> Any:
    """Joins trees of one structure: tensors at the same leaf become one, other leaves are the first tree's."""
    first, *others = trees
    return tree_map(
        lambda leaf, *same: join([leaf, *same]) if isinstance(leaf, torch.Tensor) else leaf, first, *others
    )
