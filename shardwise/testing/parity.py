"""Checks that sharded training computes what plain training computes.

Both runs produce a `History`, and `differences` compares the two:

    every rank   run_sharded: units sharded, its own slice of the data ──> LocalHistory ─┐
                                                                         gather_histories ┴─> History
    one process  run_plain:   every rank's slice in turn on the plain model, gradients
                              summed in rank order in the reduce dtype ──────────────────> History

The oracle (`run_plain`) shards nothing and communicates nothing. It models what users are promised:
parameters and floating inputs of a unit cast to the parameter dtype, gradients summed in the reduce dtype and
averaged over ranks, master parameters and optimizer state in the parameters' own dtype. The models are in
`workloads.py`. This file does not know how sharding is done: callers pass a function that does it.
"""

from __future__ import annotations

import copy
import ctypes
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shardwise.comm.exchange import all_gather_bytes
from shardwise.testing.workloads import Batch, Workload
from shardwise.torch_internals import map_tree

__all__ = [
    "BF16",
    "BF16_REDUCED_IN_BF16",
    "FP32",
    "ONE_BATCH",
    "Accumulation",
    "History",
    "LocalHistory",
    "Precision",
    "differences",
    "gather_histories",
    "run_plain",
    "run_sharded",
]

OptimizerFactory: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


# --- settings of a run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Precision:
    """The dtypes of computation and of the reduce; None means the parameters' own dtype."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def label(self) -> str:
        names = [
            str(dtype).removeprefix("torch.") for dtype in (self.param_dtype, self.reduce_dtype) if dtype
        ]
        return "+".join(names) or "own dtype"


FP32 = Precision()
BF16 = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_REDUCED_IN_BF16 = Precision(param_dtype=torch.bfloat16)


@dataclass(frozen=True)
class Accumulation:
    """The number of micro-batches in a step, and whether each is reduced or only the last."""

    micro_batches: int = 1
    sync_each: bool = True

    def syncs(self, micro_batch: int) -> bool:
        return self.sync_each or micro_batch == self.micro_batches - 1

    @property
    def label(self) -> str:
        if self.micro_batches == 1:
            return "1 micro-batch"
        return f"{self.micro_batches} micro-batches, {'each' if self.sync_each else 'last'} reduced"


ONE_BATCH = Accumulation()


# --- results of a run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardPiece:
    """One rank's shard of a tensor, cut along `dim`; `replica` distinguishes copies of the same shard."""

    values: Tensor
    dim: int
    replica: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # torch takes about 0.1 ms to pickle a tensor, which adds up over thousands of small pieces.
        values = self.values.contiguous()
        raw = ctypes.string_at(values.data_ptr(), values.nbytes)
        return _unpickle_piece, (raw, self.values.dtype, self.values.shape, self.dim, self.replica)


def _unpickle_piece(raw: bytes, dtype: torch.dtype, shape: torch.Size, dim: int, replica: int) -> ShardPiece:
    values = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return ShardPiece(values.view(shape), dim, replica)


@dataclass
class LocalHistory:
    """What one rank computed in each step: its losses, and its shards of gradients and parameters."""

    losses: list[list[float]] = field(default_factory=list)
    grads: list[dict[str, ShardPiece | None]] = field(default_factory=list)
    params: list[dict[str, ShardPiece]] = field(default_factory=list)


@dataclass
class History:
    """What a run computed: `losses[step][rank][micro_batch]`, and full gradients and parameters of each step."""

    losses: list[list[list[float]]] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    params: list[dict[str, Tensor]] = field(default_factory=list)


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimizer: unlike Adam, SGD reveals a gradient that is wrong by a constant factor."""
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


# --- the oracle ---------------------------------------------------------------------------------------------


def run_plain(
    workload: Workload,
    world_size: int,
    *,
    precision: Precision = FP32,
    accumulation: Accumulation = ONE_BATCH,
    steps: int = 10,
    optimizer: OptimizerFactory = sgd,
    device: torch.device | str = "cpu",
) -> History:
    """Train in this process alone, on each rank's slice in turn; needs no process group."""
    master = workload.model(device)
    named = dict(master.named_parameters())
    optim = optimizer(named.values())
    replica = _PlainReplica(workload, master, precision)
    history = History()
    for step in range(steps):
        replica.load(named)
        losses: list[list[float]] = [[] for _ in range(world_size)]
        gradients: list[dict[str, Tensor]] = [{} for _ in range(world_size)]
        for micro_batch in range(accumulation.micro_batches):
            for rank in range(world_size):
                batch = workload.data(step, micro_batch, rank, device)
                losses[rank].append(replica.run(batch, gradients[rank]))
            if accumulation.syncs(micro_batch):
                _reduce(named, gradients, precision)
                gradients = [{} for _ in range(world_size)]
        history.losses.append(losses)
        history.grads.append({name: _snapshot(param.grad) for name, param in named.items()})
        optim.step()
        optim.zero_grad()
        history.params.append({name: param.detach().cpu().clone() for name, param in named.items()})
    return history


class _PlainReplica:
    """The unsharded model, cast to the parameter dtype, as one rank computes with it."""

    def __init__(self, workload: Workload, master: nn.Module, precision: Precision) -> None:
        self._workload = workload
        self._model = copy.deepcopy(master)
        self._precision = precision
        self._named = dict(self._model.named_parameters())
        dtype = precision.param_dtype
        if dtype is not None:
            for param in self._named.values():
                param.data = param.data.to(dtype)
            for unit in [*workload.units(self._model), self._model]:
                unit.register_forward_pre_hook(_InputCast(dtype), with_kwargs=True)

    def load(self, masters: dict[str, nn.Parameter]) -> None:
        with torch.no_grad():
            for name, param in self._named.items():
                param.copy_(masters[name])

    def run(self, batch: Batch, gradients: dict[str, Tensor]) -> float:
        """Runs forward and backward on one slice and adds to `gradients`, in the reduce dtype if that is wider."""
        loss = self._workload.loss(self._model(*batch), batch)
        loss.backward()
        for name, param in self._named.items():
            grad, param.grad = param.grad, None
            if grad is None:
                continue
            wide = _wider(grad.dtype, self._precision.reduce_dtype)
            gradients[name] = grad.to(wide) if name not in gradients else gradients[name] + grad
        return loss.item()


class _InputCast:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_tree(self._cast, (args, kwargs))  # type: ignore[no-any-return]

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self._dtype) if value.is_floating_point() else value


def _wider(dtype: torch.dtype, other: torch.dtype | None) -> torch.dtype:
    return other if other is not None and other.itemsize > dtype.itemsize else dtype


def _reduce(named: dict[str, nn.Parameter], gradients: list[dict[str, Tensor]], precision: Precision) -> None:
    for name, param in named.items():
        contributions = [rank[name] for rank in gradients if name in rank]
        if not contributions:
            continue
        dtype = precision.reduce_dtype or contributions[0].dtype
        total = contributions[0].to(dtype, copy=True)
        for contribution in contributions[1:]:
            total += contribution.to(dtype)
        average = (total / len(gradients)).to(param.dtype)
        param.grad = average if param.grad is None else param.grad + average


def _snapshot(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().cpu().clone()


# --- the sharded run ----------------------------------------------------------------------------------------


def run_sharded(
    workload: Workload,
    shard: Callable[[nn.Module], object],
    *,
    accumulation: Accumulation = ONE_BATCH,
    steps: int = 10,
    optimizer: OptimizerFactory = sgd,
    device: torch.device | str = "cpu",
) -> LocalHistory:
    """Shard the units with `shard`, bottom-up and the root last, and train on this rank's slice."""
    rank = dist.get_rank()
    model: Any = workload.model(device)
    for unit in [*workload.units(model), model]:
        shard(unit)
    optim = optimizer(model.parameters())
    history = LocalHistory()
    for step in range(steps):
        losses = []
        for micro_batch in range(accumulation.micro_batches):
            model.set_requires_gradient_sync(accumulation.syncs(micro_batch))
            batch = workload.data(step, micro_batch, rank, device)
            loss = workload.loss(model(*batch), batch)
            loss.backward()
            losses.append(loss.item())
        history.losses.append(losses)
        history.grads.append(
            {name: None if p.grad is None else _piece(name, p.grad) for name, p in model.named_parameters()}
        )
        optim.step()
        optim.zero_grad()
        history.params.append({name: _piece(name, param) for name, param in model.named_parameters()})
    return history


def _piece(name: str, value: Tensor) -> ShardPiece:
    placement = value.placements[-1] if isinstance(value, DTensor) else None
    if not isinstance(value, DTensor) or not isinstance(placement, Shard):
        raise AssertionError(
            f"after a step, parameter {name!r} and its gradient should be sharded, not {type(value)}"
        )
    local = cast(DTensor, value.detach()).to_local()
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    return ShardPiece(local.cpu().clone(), placement.dim, coordinate[0] if len(coordinate) == 2 else 0)


def gather_histories(local: Sequence[LocalHistory]) -> list[History]:
    """Assemble full histories from the shards of all ranks, on every rank; one collective for any number of runs."""
    assert dist.group.WORLD is not None
    by_rank = [pickle.loads(given) for given in all_gather_bytes(pickle.dumps(list(local)), dist.group.WORLD)]
    return [_assemble(pieces) for pieces in zip(*by_rank, strict=True)]


def _assemble(ranks: Sequence[LocalHistory]) -> History:
    history = History()
    for step in range(len(ranks[0].losses)):
        history.losses.append([rank.losses[step] for rank in ranks])
        history.params.append(
            {name: _join([rank.params[step][name] for rank in ranks]) for name in ranks[0].params[step]}
        )
        grads: dict[str, Tensor | None] = {}
        for name in ranks[0].grads[step]:
            pieces = [rank.grads[step][name] for rank in ranks]
            present = [piece for piece in pieces if piece is not None]
            if present and len(present) < len(pieces):
                raise AssertionError(
                    f"step {step}: only {len(present)} of {len(pieces)} ranks have a gradient of {name!r}"
                )
            grads[name] = _join(present) if present else None
        history.grads.append(grads)
    return history


def _join(pieces: Sequence[ShardPiece]) -> Tensor:
    """Returns the full tensor; raises if replicas are not bitwise equal."""
    replicas: dict[int, list[Tensor]] = {}
    for piece in pieces:
        replicas.setdefault(piece.replica, []).append(piece.values)
    whole, *copies = [torch.cat(values, dim=pieces[0].dim) for values in replicas.values()]
    for copy_of_it in copies:
        if not torch.equal(whole, copy_of_it):
            raise AssertionError(f"replicas differ by up to {(whole - copy_of_it).abs().max()}")
    return whole


# --- the comparison -----------------------------------------------------------------------------------------


def differences(expected: History, actual: History, *, tolerance: float = 0.0) -> list[str]:
    """Returns the differences between two histories, in the order of the run; empty if the histories agree.

    A tolerance of 0 demands bitwise equality. Otherwise it bounds the norm of the error relative to the norm
    of the expected tensor; gradients, whose terms may nearly cancel, are allowed a hundred times as much.
    """
    found: list[str] = []
    if len(expected.losses) != len(actual.losses):
        found.append(f"{len(actual.losses)} steps, expected {len(expected.losses)}")
    for step in range(min(len(expected.losses), len(actual.losses))):
        for rank, (want, got) in enumerate(zip(expected.losses[step], actual.losses[step], strict=True)):
            for micro_batch, pair in enumerate(zip(want, got, strict=True)):
                what = f"step {step}, rank {rank}, loss of micro-batch {micro_batch}"
                found += _difference(what, torch.tensor(pair[0]), torch.tensor(pair[1]), tolerance)
        for kind, wants, gots, allowed in (
            ("gradient", expected.grads[step], actual.grads[step], 100 * tolerance),
            ("parameter", expected.params[step], actual.params[step], tolerance),
        ):
            if wants.keys() != gots.keys():
                found.append(f"step {step}: {kind}s of {sorted(gots)}, expected {sorted(wants)}")
            for name in wants.keys() & gots.keys():
                found += _difference(f"step {step}, {kind} {name!r}", wants[name], gots[name], allowed)
    return found


def _difference(what: str, want: Tensor | None, got: Tensor | None, tolerance: float) -> list[str]:
    if want is None or got is None:
        if want is got:
            return []
        return [
            f"{what}: {'missing' if got is None else 'present'}, expected {'none' if want is None else 'one'}"
        ]
    if want.shape != got.shape or want.dtype != got.dtype:
        return [f"{what}: {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}"]
    if torch.equal(want, got):
        return []
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))
    return [] if error <= tolerance else [f"{what}: relative error {error:.3g}, allowed {tolerance:.3g}"]
