"""A placeholder that modules show for a parameter inside a flat parameter, while its unit is sharded.

It has the parameter's shape, dtype and device, and no memory. Computing with it raises an error that says what to do.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch

from shardwise.engine.tensor_trees import tensors_in
from shardwise.engine.unit.interfaces import NamedUnit
from shardwise.errors import StateError
from shardwise.torch_internals import without_memory_like


class ShardedPlaceholder(torch.Tensor):
    """Shape, dtype and device of a parameter that is not gathered."""

    param_name: str
    # Weak: modules hold the placeholder, and must not keep the unit alive through it.
    unit: weakref.ref[NamedUnit]

    @classmethod
    def of(cls, param: torch.Tensor, name: str, unit: NamedUnit) -> ShardedPlaceholder:
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
            where=f"unit '{unit.name}', rank {unit.rank}"
            if unit is not None
            else "a unit that no longer exists",
            fix="call the wrapper rather than the module inside it; name other methods that compute with "
            "register_fsdp_forward_method(), or use summon_full_params()",
        )
