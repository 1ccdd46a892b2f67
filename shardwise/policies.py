"""What users choose, as frozen records.

A policy is read once, when a unit is made, and turned into decisions there; nothing in a training step asks a
policy a question. Names and fields are torch's, so that a program changes one import line. ``TrustPolicy`` has no
counterpart there.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a unit: what it computes in, reduces in and returns.

    Attributes:
        param_dtype: dtype of the unsharded parameters, hence of compute and of the gather. ``None`` keeps each
            parameter's own.
        reduce_dtype: dtype in which gradients are summed over ranks. ``None`` means the dtype they were computed
            in. Without gradient sync, gradients accumulate in this dtype when it is the wider one.
        output_dtype: dtype to which floating-point forward outputs are cast. ``None`` leaves them.
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
                    f"MixedPrecisionPolicy.{field} is {dtype}, a format to store in: nothing can be added up in it",
                    where=f"MixedPrecisionPolicy({field}=...)",
                    fix="pass torch.bfloat16; for fp8 products use a tensor subclass, such as those of torchao",
                )


# A shard, its gradient, and the two states that Adam and its kin keep.
BYTES_TRAINED_PER_BYTE = 4


@dataclass(frozen=True)
class OffloadPolicy:
    """Keeps shards on the device that computes: the default."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keeps shards, their gradients and so the optimizer's state in host memory.

    Attributes:
        pin_memory: page-lock the host buffers, so that transfers overlap with compute.
        device_budget_gb: GiB of the device's memory that shards may stay in, with their gradients and two states of an
            optimizer for each. Units sharded with this very policy object stay there, in the order in which they are
            made, as long as they fit; the others go to the host. ``None``: all go.
    """

    pin_memory: bool = True
    device_budget_gb: float | None = None
    # What units of each rank have taken of the budget: ranks that are threads share the policy.
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
        """Whether a unit with that many bytes of shards still fits; if it does, its part of the budget is taken."""
        if self.device_budget_gb is None:
            return False
        needed = self._taken_bytes.get(rank, 0) + BYTES_TRAINED_PER_BYTE * shard_bytes
        if needed > self.device_budget_gb * 2**30:
            return False
        self._taken_bytes[rank] = needed
        return True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a mesh, by name, carry data parallelism.

    Attributes:
        shard: the axis (or axes, taken together) over which parameters are sharded.
        replicate: the axis (or axes) over which the shards are replicated.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ConfigError(
                "DataParallelMeshDims names no axis at all",
                where="DataParallelMeshDims(shard=None, replicate=None)",
                fix="name at least one axis, e.g. DataParallelMeshDims(shard='dp')",
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


@dataclass(frozen=True)
class TrustPolicy:
    """How ranks make sure that they do the same, and what happens when they do not. One for a process.

    Attributes:
        checks: ``"step"`` compares what ranks did before an optimizer uses a step; ``"collective"`` before every
            collective, also where a group's own collectives carry the data (NCCL), at the price of a message each;
            ``"off"`` compares nothing and watches nothing. Read when a group is first used.
        timeout_seconds: how long a rank waits for another before it logs who is late, and where that rank is; then it
            goes on waiting. It raises, after this time, if the other was stopped, gives no sign of life, or waits for
            this rank in another collective; at once if the other is dead or has done something else.
        late_seconds: how long it waits for a rank that is alive and running. ``None``: as long as the process group's
            own timeout.
        start_seconds: how long it waits for a rank that has not begun to use the group and of which nothing is known
            yet: it may be loading a model.
        debugger_grace_seconds: how long it waits for a rank that sits in a debugger.
        non_finite: what to do before an optimizer uses a step in which a rank had a gradient that is infinite or not
            a number: ``"raise"``, on all ranks; ``"skip"`` the step, on all ranks; ``"log"`` it and go on. With
            ``None`` nobody looks.
        undoes_steps: put gradients and buffers back to what they were before a forward or backward that raised, here
            or on another rank. It costs a copy of them in every step.
        trace_dir: where a rank's last events are written on failure; a folder for temporary files if None.
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
    """The policy in force in this process."""
    return _Trust.policy


def set_trust(**changes: Any) -> TrustPolicy:
    """Changes fields of the process's ``TrustPolicy``; returns the one that was in force before."""
    before = _Trust.policy
    _Trust.policy = replace(before, **changes)
    return before
