"""``fully_shard(plan=...)``: the settings come from a plan. What makes plans lies above, and registers itself here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.policies import OffloadPolicy

__all__ = ["make_plans_with", "shard_as_planned"]

_makers: list[Callable[..., Any]] = []


def make_plans_with(maker: Callable[..., Any]) -> None:
    """Registers the function that shards a model as a plan says."""
    _makers[:] = [maker]


def shard_as_planned(model: Any, plan: Any, options: Mapping[str, Any], **of_plan: Any) -> Any:
    """Shards a model as planned; ``options`` are keywords of ``fully_shard``, of which a plan takes some.

    Raises:
        ConfigError: an option is given that no plan takes into account.
    """
    if beside := [name for name, default in _NOT_TAKEN.items() if options[name] != default]:
        raise ConfigError(
            f"a plan does not know {', '.join(beside)}",
            where="fully_shard(model, plan=...)",
            fix=f"leave {' and '.join(beside)} out, or pass the settings that shardwise.choose returns one by one",
        )
    if not _makers:
        raise ConfigError(
            "nothing is there to make a plan",
            where="fully_shard(model, plan=...)",
            fix="import fully_shard from shardwise",
        )
    return _makers[0](model, plan, **{name: options[name] for name in _TAKEN}, **of_plan)


_TAKEN = ("mesh", "device_type", "mp_policy", "wrap", "reshard_after_forward", "group_bytes")
_NOT_TAKEN = {
    "shard_placement_fn": None,
    "offload_policy": OffloadPolicy(),
    "ignored_params": None,
    "dp_mesh_dims": None,
    "exact": False,
}
