"""What a module shows of a parameter that one flat parameter stands for, while its unit is sharded.

It has the parameter's shape, dtype and device and no memory. To compute with it is an error that says what to do.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from shardwise.engine.tensor_trees import tensors_in
from shardwise.errors import StateError
from shardwise.torch_internals import without_memory_like

if TYPE_CHECKING:
    from shardwise.engine.unit.unit import Unit


class ShardedPlaceholder(torch.Tensor):
    """A parameter that is not there."""

    param_name: str
    # Weak: modules hold what they show, and must not hold their unit by it.
    unit: weakref.ref[Unit]

    @classmethod
    def of(cls, param: torch.Tensor, name: str, unit: Unit) -> ShardedPlaceholder:
        made = without_memory_like(cls, param)
        made.param_name, made.unit = name, weakref.ref(unit)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<parameter '{self.param_name}', {list(self.shape)} {self.dtype}, sharded>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        used = next(tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, cls))
        unit = used.unit()
        raise StateError(
            f"parameter '{used.param_name}' was used while its unit is sharded ({func})",
            where=f"unit '{unit.name}', rank {unit.rank}" if unit is not None else "a unit that is gone",
            fix="call the wrapper rather than the module inside it; name other methods that compute with "
            "register_fsdp_forward_method(), or use summon_full_params()",
        )
