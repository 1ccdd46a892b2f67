"""Users' choices, as frozen records.

A policy is read once, when a unit is created; training steps do not look at it. Names and fields are torch's, so that a
program changes only an import line; ``TrustPolicy`` has no counterpart in torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch

from shardwise.errors import ConfigError, ConfigTypeError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which a unit computes, reduces and returns.

    Attributes:
        param_dtype: dtype of the unsharded parameters, hence of compute and of the gather. ``None`` keeps each
            parameter's own.
        reduce_dtype: dtype in which gradients are summed over ranks. ``None`` means the dtype in which they were
            computed. Without gradient sync, gradients accumulate in this dtype if it is wider.
        output_dtype: dtype to which floating-point forward outputs are cast. ``None`` does not cast them.
        cast_forward_inputs: cast floating-point forward inputs to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, field)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ConfigError(
                    f"MixedPrecisionPolicy.{field} is {dtype!r}, which is not a floating-point dtype",
                    where=f"MixedPrecisionPolicy({field}=...)",
                    fix="pass torch.bfloat16, torch.float16, torch.float32 or None",
                )
            if dtype.itemsize == 1:
                raise ConfigError(
                    f"MixedPrecisionPolicy.{field} is {dtype}, a storage format without arithmetic",
                    where=f"MixedPrecisionPolicy({field}=...)",
                    fix="pass torch.bfloat16; for fp8 matrix products use a tensor subclass, such as those of torchao",
                )


# A shard, its gradient, and the two states of Adam and similar optimizers.
BYTES_TRAINED_PER_BYTE = 4


@dataclass(frozen=True)
class OffloadPolicy:
    """Keeps shards on the compute device: the default."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keeps shards and their gradients, and so the optimizer's state, in host memory.

    Attributes:
        pin_memory: page-lock the host buffers, so that transfers overlap with compute.
        device_budget_gb: GiB of device memory for shards that stay there, with their gradients and two optimizer
            states for each. Units sharded with this same policy object stay on the device, in the order in which they
            are created, as long as they fit; the others are offloaded. ``None`` offloads all.
    """

    pin_memory: bool = True
    device_budget_gb: float | None = None
    # Bytes of the budget used by each rank's units: ranks that are threads share the policy.
    _taken_bytes: dict[int, int] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        budget = self.device_budget_gb
        if budget is not None and not (isinstance(budget, int | float) and budget >= 0):
            raise ConfigError(
                f"CPUOffloadPolicy.device_budget_gb is {budget!r}",
                where="CPUOffloadPolicy(device_budget_gb=...)",
                fix="pass a number of GiB that is not negative, or None to offload everything",
            )

    def keeps_on_device(self, rank: int, shard_bytes: int) -> bool:
        """Returns whether a unit with that many bytes of shards fits into the budget, and if so reserves them."""
        if self.device_budget_gb is None:
            return False
        needed = self._taken_bytes.get(rank, 0) + BYTES_TRAINED_PER_BYTE * shard_bytes
        if needed > self.device_budget_gb * 2**30:
            return False
        self._taken_bytes[rank] = needed
        return True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names the axes of a mesh that are used for data parallelism.

    Attributes:
        shard: the axis (or axes, taken together) over which parameters are sharded.
        replicate: the axis (or axes) over which the shards are replicated.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ConfigError(
                "DataParallelMeshDims names no axis",
                where="DataParallelMeshDims(shard=None, replicate=None)",
                fix="name at least one axis, e.g. DataParallelMeshDims(shard='dp')",
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


@dataclass(frozen=True)
class ShardPlacementResult:
    """What ``shard_placement_fn`` returns for a parameter that is sharded over another mesh than its neighbours.

    Attributes:
        placement: the ``Shard(dim)`` to shard along. ``None`` means dim 0.
        mesh_info: a ``DeviceMesh`` of one axis (shard) or two (replicate, shard); torch's ``FSDPMeshInfo`` will do.
    """

    placement: Any
    mesh_info: Any


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


R = TypeVar("R")


def is_record_named(name: str, value: Any) -> bool:
    """Whether ``value`` is a dataclass of that name, ours or torch's, or of a class derived from it."""
    kind: type = type(value)
    return dataclasses.is_dataclass(value) and any(cls.__name__ == name for cls in kind.__mro__)


def as_record(kind: type[R], value: Any, where: str) -> R:
    """Returns ``value`` as a ``kind``; accepts torch's dataclass of the same name and fields."""
    if isinstance(value, kind):
        return value
    if is_record_named(kind.__name__, value):
        names = kind.__dataclass_fields__  # type: ignore[attr-defined]
        return kind(**{name: getattr(value, name) for name in names if hasattr(value, name)})
    raise ConfigTypeError(
        f"{value!r} is not a {kind.__name__}", where=where, fix=f"pass a shardwise.{kind.__name__}"
    )


@dataclass(frozen=True)
class TrustPolicy:
    """How ranks check that they run the same program, and what happens if they do not. One per process.

    Attributes:
        checks: ``"step"`` compares the collectives of all ranks before an optimizer uses a step; ``"collective"``
            before every collective, also with NCCL, at the cost of a message each; ``"off"`` checks nothing and starts
            no watchdog. Read when a group is first used.
        timeout_seconds: how long a rank waits for another before it logs which rank is late, with that rank's stack;
            then it goes on waiting. It raises, after this time, if the other rank was stopped, has no heartbeat, or
            waits for this rank in another collective; at once if the other is dead or issued another collective.
        late_seconds: how long a rank waits for another that is alive and running. ``None`` means the process group's
            own timeout.
        start_seconds: how long a rank waits for another that has not used the group yet: it may be loading a model.
        debugger_grace_seconds: how long a rank waits for another that is stopped in a debugger.
        non_finite: what to do before an optimizer uses a step in which a rank had an infinite or NaN gradient:
            ``"raise"`` on all ranks, ``"skip"`` the step on all ranks, or ``"log"`` it and go on. ``None`` does not
            check.
        undoes_steps: restore gradients and buffers after a forward or backward that raised, here or on another rank.
            It costs a copy of them in every step.
        trace_dir: folder for the file with a rank's last events, written on failure. ``None`` means the folder for
            temporary files.
    """

    checks: Literal["off", "step", "collective"] = "step"
    timeout_seconds: float = 20.0
    late_seconds: float | None = None
    start_seconds: float = 600.0
    debugger_grace_seconds: float = 3600.0
    non_finite: Literal["raise", "skip", "log"] | None = None
    undoes_steps: bool = False
    trace_dir: str | None = None

    def __post_init__(self) -> None:
        if self.checks not in ("off", "step", "collective"):
            raise ConfigError(
                f"TrustPolicy.checks is {self.checks!r}",
                where="TrustPolicy(checks=...)",
                fix="use 'off', 'step' or 'collective'",
            )
        if self.non_finite not in (None, "raise", "skip", "log"):
            raise ConfigError(
                f"TrustPolicy.non_finite is {self.non_finite!r}",
                where="TrustPolicy(non_finite=...)",
                fix="use 'raise', 'skip', 'log' or None",
            )
        for field in ("timeout_seconds", "late_seconds", "start_seconds", "debugger_grace_seconds"):
            if getattr(self, field) is not None and not getattr(self, field) > 0:
                raise ConfigError(
                    f"TrustPolicy.{field} is {getattr(self, field)!r}",
                    where=f"TrustPolicy({field}=...)",
                    fix="pass a number of seconds above zero",
                )


class _Trust:
    policy = TrustPolicy()


def trust() -> TrustPolicy:
    """Returns the policy of this process."""
    return _Trust.policy


class _Unchanged:
    def __repr__(self) -> str:
        return "unchanged"


_UNCHANGED: Any = _Unchanged()


def set_trust(
    *,
    checks: Literal["off", "step", "collective"] = _UNCHANGED,
    timeout_seconds: float = _UNCHANGED,
    late_seconds: float | None = _UNCHANGED,
    start_seconds: float = _UNCHANGED,
    debugger_grace_seconds: float = _UNCHANGED,
    non_finite: Literal["raise", "skip", "log"] | None = _UNCHANGED,
    undoes_steps: bool = _UNCHANGED,
    trace_dir: str | None = _UNCHANGED,
) -> TrustPolicy:
    """Changes the given fields of this process's ``TrustPolicy``; returns the policy before the change."""
    changes = {name: value for name, value in locals().items() if value is not _UNCHANGED}
    before = _Trust.policy
    _Trust.policy = replace(before, **changes)
    return before
