"""The two sides on which a program runs, plain and sharded, and the comparison of what they noted.

A program is a function of a `side`, whose methods do what differs between a plain and a sharded run: `shard` does
nothing to a plain model, and a plain `backward` averages gradients over ranks by itself, in rank order. Everything else
is the user's code. Both sides note what they see, and `differences` compares their notes entry by entry.

A plain run has ranks, too: each has its own model, data and buffers, so it is data parallelism in its simplest form.

What counts as equal is decided in `Tolerance`, in one place.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwise
from shardwise.errors import ShardwiseError
from shardwise.torch_internals import map_tree


@dataclass(frozen=True)
class Tolerance:
    """How much a tensor may differ from the plain one, relative to the plain one's norm. 0: bitwise equal.

    Gradients are summed in rank order on both sides, so most programs must agree bitwise. They need not if terms are
    added in another order: a module that runs several times is reduced several times; a norm is a sum over shards;
    fused kernels process the ends of a tensor with other instructions. Programs are a few steps of a few layers, so
    rounding grows by less than four orders of magnitude, while a lost or doubled term is of the order of one.

    A parameter that steps have brought close to zero still has the rounding errors of what it was, and a gradient whose
    terms cancel those of its terms: both are measured against the largest they have been.
    """

    relative: float = 0.0

    @staticmethod
    def of(dtype: torch.dtype, is_exact: bool) -> Tolerance:
        return Tolerance(0.0 if is_exact else min(2e4 * torch.finfo(dtype).eps, 0.25))


@dataclass(frozen=True)
class Cut:
    """One rank's shard of a tensor, and how it was cut: enough to find the same shard of a full tensor."""

    local: Tensor
    shape: torch.Size
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    placements: tuple[Any, ...]

    @staticmethod
    def of(value: DTensor) -> Cut:
        mesh = value.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        local = value.detach().to_local().clone()
        return Cut(local, value.shape, tuple(mesh.shape), tuple(coordinate), tuple(value.placements))

    def part_of(self, whole: Tensor) -> Tensor:
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                chunks = whole.chunk(self.mesh[axis], placement.dim)
                at = self.coordinate[axis]
                whole = chunks[at] if at < len(chunks) else whole.narrow(placement.dim, 0, 0)
            else:
                assert isinstance(placement, Replicate), placement
        return whole


@dataclass(frozen=True)
class Raised:
    """An exception that was caught, or that ended the program."""

    name: str
    text: str = ""
    names: tuple[str, ...] = ()  # of its class and base classes

    @staticmethod
    def of(error: BaseException) -> Raised:
        return Raised(type(error).__name__, str(error), tuple(each.__name__ for each in type(error).__mro__))

    def stands_for(self, other: Raised) -> bool:
        """Returns whether an `except` clause for the other catches this one, too."""
        return self.name == other.name or other.name in self.names


KEPT = "kept"  # a module does not show its shards: there is nothing to compare until it does

Notes = list[tuple[str, Any]]


@dataclass
class Side:
    """The methods by which a program calls the library it runs with."""

    seed: int = 0
    mesh_shape: tuple[int, ...] = ()
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    offload: bool = False
    wrapper: dict[str, Any] = field(default_factory=dict)
    zero_options: dict[str, Any] = field(default_factory=dict)
    notes: Notes = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.dtype = torch.float64
        self.model: Any = None
        self._seen: dict[str, Any] = {}

    def inside(self, module: Any) -> Any:
        """Returns the module itself, without a wrapper around it."""
        return module

    def reload(self, optim: Any) -> Any:
        """Returns a new optimizer with the state of the given one."""
        state = copy.deepcopy(optim.state_dict())
        twin = type(optim)(optim.param_groups[0]["params"], **_arguments(optim))
        twin.load_state_dict(state)
        return twin

    def scale(self, model: Any, factor: float) -> None:
        """Scales all parameters in place."""
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(factor)

    def full(self, model: Any) -> Any:
        """Returns a context in which modules have full parameters."""
        return contextlib.nullcontext()

    def save_by_torch(self, model: Any) -> dict[str, Any]:
        """Returns the state dict that torch's own function reads."""
        return {name: value.detach().clone() for name, value in get_model_state_dict(model).items()}

    def pass_local_state(self, model: Any) -> None:
        """Saves this rank's elements, scales all parameters, and loads what was saved."""
        saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.scale(model, 0.5)
        model.load_state_dict(saved)

    def ready(self, model: Any) -> None:
        """Sets the model that `look` reads and `backward` runs through."""
        self.model = model

    # --- the same on both sides ---------------------------------------------------------------------------------------

    def build(self, make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Any:
        """Builds the model; its weights depend on the program's seed and their names."""
        self.dtype = dtype
        model = make().to(dtype)
        with torch.no_grad():
            for name, param in model.named_parameters():
                generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
                scale = param.shape[-1] ** -0.5 if param.dim() > 1 else 0.5
                param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * scale)
                if param.dim() == 1 and "weight" in name:
                    param.add_(1)
        return model

    def batch(self, number: int, rows: int = 3, width: int = 4) -> Tensor:
        """Returns this rank's input of one step."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {number} {self.rank}".encode()))
        return torch.randn((rows, width), generator=generator, dtype=torch.float64).to(self.dtype)

    def note(self, what: str, value: Any) -> None:
        self.notes.append((what, _snapshot(value)))

    def seen(self, what: str, value: Any) -> None:
        """Stores a value for the next `look`: the time of a hook in a backward may differ, but not its last value."""
        self._seen[what] = _snapshot(value)

    def scale_gradients(self, model: Any, factor: float) -> None:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(factor)

    def clip(self, model: Any, max_norm: float) -> Tensor:
        norm = self._clip(model, max_norm)
        # Without any gradients the norm is a zero of any dtype.
        return norm if norm else norm.to(self.dtype)

    def _clip(self, model: Any, max_norm: float) -> Tensor:
        raise NotImplementedError

    def gradients(self, model: Any) -> list[Any]:
        return [param.grad for param in model.parameters()]

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Calls `loss.backward`; does nothing if everything is frozen."""
        if loss.requires_grad:
            self._backward(loss, options)

    def _backward(self, loss: Tensor, options: dict[str, Any]) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def catch(self, what: str) -> Iterator[None]:
        """Catches an exception of the body, and notes its type, not how far the body came.

        A rank that has no elements of what was wrongly written to hears of it from its peers, later than they.
        """
        begun = len(self.notes)
        try:
            yield
        except Exception as error:  # noqa: BLE001  its type is compared
            del self.notes[begun:]
            self.notes.append((what, Raised.of(error)))
        else:
            self.notes.append((what, Raised("nothing")))

    def look(self, what: str, model: Any = None) -> None:
        """Notes parameters, gradients and buffers."""
        model = self.model if model is None else model
        for name, param in model.named_parameters():
            self.notes.append((f"{what}: parameter {name}", self.shown(param)))
            self.notes.append((f"{what}: gradient {name}", self.shown_gradient(param)))
        for name, buffer in model.named_buffers():
            self.notes.append((f"{what}: buffer {name}", _snapshot(buffer)))
        self.notes.append((f"{what}: seen by hooks", self._seen))
        self._seen = {}

    def shown(self, param: Tensor) -> Any:
        return _snapshot(param)

    def shown_gradient(self, param: Tensor) -> Any:
        return _snapshot(param.grad)


class Plain(Side):
    """The plain side: gradients are averaged over ranks after each backward that syncs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_synced = True
        self._cast_places: set[tuple[int, str]] = set()
        self._units: list[nn.Module] = []
        self._after_gradient: dict[Tensor, list[Callable[[Any], None]]] = {}
        self.held: dict[Tensor, Tensor] = {}  # gradients of this rank alone, until the next sync

    def shard(self, *modules: Any, **options: Any) -> Any:
        self._units += modules
        if self.param_dtype is not None:
            _LowPrecision(modules, self.param_dtype, self._cast_places)
        return modules[0]

    def flat(self, cls: Any, params: Any, **options: Any) -> Any:
        return cls(params, **options)

    def zero(self, cls: Any, params: Any, **options: Any) -> Any:
        return cls(params, **options)

    def whole(self, value: Any) -> Any:
        return value.clone()

    def deepcopy(self, model: Any) -> None:
        """Does nothing: a sharded model refuses to be copied, so there is nothing to compare with."""

    def sync(self, model: Any, on: bool) -> None:
        self.is_synced = on

    def all_reduce(self, model: Any, on: bool) -> None:
        if len(self.mesh_shape) == 2:  # without replicas there is no all-reduce to postpone
            self.is_synced = on

    def call(self, module: Any, method: str, *args: Any) -> None:
        """Does nothing: only sharded modules have the method, and it changes no values."""

    def _backward(self, loss: Tensor, options: dict[str, Any]) -> None:
        # Parameters outside of units are synchronized by the user.
        in_units = {param for unit in self._units for param in unit.parameters()}
        params = [param for param in self.model.parameters() if param in in_units]
        before = [(param, param.grad) for param in params]
        for param in params:
            param.grad = None
        try:
            loss.backward(**options)
        except BaseException:
            for param, grad in before:
                param.grad = grad
            raise
        for param, grad in before:
            came, param.grad = param.grad, grad
            if came is not None:
                self.held[param] = self.held[param] + came if param in self.held else came
        if self.is_synced:
            self._reduce()

    def _reduce(self) -> None:
        if self.wrapper and not self.wrapper["use_orig_params"]:
            self._fill_flat_gradients()
        shown = set(self.model.parameters())
        for param, average in zip(self.held, self._averages(list(self.held.values())), strict=True):
            param.grad = average if param.grad is None else param.grad + average
            # A replaced parameter no longer has a shard whose gradient could be complete.
            for hook in self._after_gradient.get(param, ()) if param in shown else ():
                hook(param)
        self.held = {}

    def after_gradient(self, param: Any, name: str) -> None:
        """Registers a hook that runs when a gradient is complete; for a plain parameter, when it is averaged."""
        if param.requires_grad:
            self._after_gradient.setdefault(param, []).append(lambda param: self.seen(name, param.grad))

    def _fill_flat_gradients(self) -> None:
        """Adds missing gradients, as zeros: if one parameter of a flat parameter has a gradient, all of them have."""
        taken: set[Tensor] = set()
        for unit in self._units:
            owned = [param for param in unit.parameters() if param not in taken and param.requires_grad]
            taken.update(owned)
            for dtype in {param.dtype for param in owned}:
                members = [param for param in owned if param.dtype == dtype]
                if any(param in self.held for param in members):
                    for param in members:
                        self.held.setdefault(param, torch.zeros_like(param))

    def _averages(self, grads: list[Tensor]) -> list[Tensor]:
        """Returns averages: sums over the ranks of a shard group, then over replicas, in rank order; then divides."""
        if self.world == 1:
            return grads
        averages: list[Tensor | None] = [None] * len(grads)
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            chosen = [index for index, grad in enumerate(grads) if grad.dtype == dtype]
            flat = torch.cat([grads[index].reshape(-1) for index in chosen])
            parts = [torch.empty_like(flat) for _ in range(self.world)]
            dist.all_gather(parts, flat)
            replicas = self.mesh_shape[0] if len(self.mesh_shape) == 2 else 1
            size = self.world // replicas
            groups = [_sum_in_order(parts[start : start + size]) for start in range(0, self.world, size)]
            pieces = (_sum_in_order(groups) / self.world).split([grads[index].numel() for index in chosen])
            for index, piece in zip(chosen, pieces, strict=True):
                averages[index] = piece.view(grads[index].shape)
        return averages  # type: ignore[return-value]

    def zero_grad(self, target: Any, set_to_none: bool = True) -> None:
        target.zero_grad(set_to_none=set_to_none)
        if isinstance(target, nn.Module):
            params = list(target.parameters())
        else:
            params = [param for group in target.param_groups for param in group["params"]]
        for param in params:
            if set_to_none:
                self.held.pop(param, None)
            elif param in self.held:
                self.held[param] = torch.zeros_like(param)

    def _clip(self, model: Any, max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def save(self, model: Any) -> dict[str, Any]:
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    save_sharded = save

    def reshard(self, model: Any) -> None:
        pass

    def finish(self) -> None:
        pass


class _LowPrecision:
    """A unit of a plain model that computes in another dtype: parameters and inputs are cast in each forward."""

    def __init__(self, modules: tuple[Any, ...], dtype: torch.dtype, taken: set[tuple[int, str]]) -> None:
        self._dtype = dtype
        self._depth = 0
        self._places: list[tuple[nn.Module, str]] = []
        self._masters: list[Any] = []
        for module in modules:
            for member in module.modules():
                for name in member._parameters:
                    # A parameter's place in a module belongs to the innermost unit around it, also if it is tied.
                    if (id(member), name) not in taken and member._parameters[name] is not None:
                        taken.add((id(member), name))
                        self._places.append((member, name))
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth == 1:
            self._masters = [member._parameters[name] for member, name in self._places]
            casts: dict[int, Any] = {}
            for (member, name), master in zip(self._places, self._masters, strict=True):
                if id(master) not in casts:
                    casts[id(master)] = master.to(self._dtype)
                member._parameters[name] = casts[id(master)]
        return tuple(self._cast(each) for each in args), {
            key: self._cast(each) for key, each in kwargs.items()
        }

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            for (member, name), master in zip(self._places, self._masters, strict=True):
                member._parameters[name] = master

    def _cast(self, value: Any) -> Any:
        if isinstance(value, list):
            value[:] = [
                self._cast(each) for each in value
            ]  # in place: the module may append to the caller's list
            return value
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{key: self._cast(each) for key, each in vars(value).items()})
        return map_tree(self._cast_tensor, value)

    def _cast_tensor(self, value: Tensor) -> Tensor:
        return value.to(self._dtype) if value.is_floating_point() else value


def _sum_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class Sharded(Side):
    """The side that uses shardwise's `fully_shard`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._mesh: DeviceMesh | None = None

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.mesh_shape:
            if self._mesh is None:
                names = ("replicate", "shard")[-len(self.mesh_shape) :]
                self._mesh = init_device_mesh("cpu", self.mesh_shape, mesh_dim_names=names)
            options["mesh"] = self._mesh
        if self.param_dtype is not None or self.reduce_dtype is not None:
            options["mp_policy"] = shardwise.MixedPrecisionPolicy(
                param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype
            )
        if self.offload:
            options["offload_policy"] = shardwise.CPUOffloadPolicy(pin_memory=False)
        return options

    def shard(self, *modules: Any, **options: Any) -> Any:
        target = modules[0] if len(modules) == 1 else list(modules)
        if options.pop("columns", False):
            options["shard_placement_fn"] = lambda param: Shard(1) if param.dim() > 1 else Shard(0)
        return shardwise.fully_shard(target, **self._options(), **options)

    def after_gradient(self, param: Any, name: str) -> None:
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda param: self.seen(name, param.grad))

    def whole(self, value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value.clone()

    def deepcopy(self, model: Any) -> None:
        try:
            copy.deepcopy(model)
        except ShardwiseError:
            return
        self.note("deepcopy", "not refused")

    def flat(self, cls: Any, params: Any, **options: Any) -> Any:
        return shardwise.optim.flat(params, cls, **options)

    def _outermost(self, model: Any) -> list[Any]:
        """Returns the model if it is sharded, else the outermost sharded modules below it."""
        found: list[Any] = []

        def visit(module: nn.Module) -> None:
            if self._is_sharded(module):
                found.append(module)
            else:
                for child in module.children():
                    visit(child)

        visit(model)
        return found

    def _is_sharded(self, module: Any) -> bool:
        return isinstance(module, shardwise.FSDPModule)

    def sync(self, model: Any, on: bool) -> None:
        for module in self._outermost(model):
            module.set_requires_gradient_sync(on)

    def all_reduce(self, model: Any, on: bool) -> None:
        for module in self._outermost(model):
            module.set_requires_all_reduce(on)

    def call(self, module: Any, method: str, *args: Any) -> None:
        getattr(module, method)(*args)

    def _backward(self, loss: Tensor, options: dict[str, Any]) -> None:
        loss.backward(**options)

    def zero_grad(self, target: Any, set_to_none: bool = True) -> None:
        target.zero_grad(set_to_none=set_to_none)

    def _clip(self, model: Any, max_norm: float) -> Tensor:
        return shardwise.clip_grad_norm_(model.parameters(), max_norm)

    def save(self, model: Any) -> dict[str, Any]:
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    def shown(self, param: Tensor) -> Any:
        return Cut.of(param) if isinstance(param, DTensor) else KEPT

    def shown_gradient(self, param: Tensor) -> Any:
        if not isinstance(param, DTensor):
            return KEPT
        return None if param.grad is None else Cut.of(param.grad)  # type: ignore[arg-type]

    def reshard(self, model: Any) -> None:
        """Reshards what the program unsharded by hand."""
        for module in model.modules():
            if self._is_sharded(module):
                module.reshard()

    def finish(self) -> None:
        """Reshards everything, so that the last look sees all shards."""
        self.reshard(self.model)


class Wrapped(Sharded):
    """The side that uses shardwise's `FullyShardedDataParallel`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._holds = False
        self._no_sync: Any = None

    def shard(self, *modules: Any, **options: Any) -> Any:
        (module,) = modules
        strategy = shardwise.ShardingStrategy[self.wrapper["strategy"]]
        prefetch = self.wrapper["prefetch"]
        return shardwise.FullyShardedDataParallel(
            module,
            sharding_strategy=strategy,
            use_orig_params=self.wrapper["use_orig_params"],
            backward_prefetch=shardwise.BackwardPrefetch[prefetch] if prefetch else None,
            device_mesh=self._options().get("mesh"),
            cpu_offload=shardwise.CPUOffload(offload_params=True) if self.offload else None,
        )

    def _is_sharded(self, module: Any) -> bool:
        return isinstance(module, shardwise.FullyShardedDataParallel)

    def inside(self, module: Any) -> Any:
        return module.module if self._is_sharded(module) else module

    def sync(self, model: Any, on: bool) -> None:
        if not on:
            self._no_sync = model.no_sync()
            self._no_sync.__enter__()
        elif self._no_sync is not None:
            self._no_sync.__exit__(None, None, None)
            self._no_sync = None

    def _backward(self, loss: Tensor, options: dict[str, Any]) -> None:
        loss.backward(**options)
        self._holds = self._no_sync is not None

    def _clip(self, model: Any, max_norm: float) -> Tensor:
        return model.clip_grad_norm_(max_norm)

    def whole(self, value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value.clone()

    def full(self, model: Any) -> Any:
        return shardwise.FullyShardedDataParallel.summon_full_params(model)

    def save_sharded(self, model: Any) -> dict[str, Any]:
        kind = shardwise.StateDictType.SHARDED_STATE_DICT
        with shardwise.FullyShardedDataParallel.state_dict_type(model, kind):
            return self.save(model)

    def pass_local_state(self, model: Any) -> None:
        kind = shardwise.StateDictType.LOCAL_STATE_DICT
        with shardwise.FullyShardedDataParallel.state_dict_type(model, kind):
            super().pass_local_state(model)

    def scale(self, model: Any, factor: float) -> None:
        with shardwise.FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            for param in model.parameters():
                param.mul_(factor)

    def reload(self, optim: Any) -> Any:
        wrapper = shardwise.FullyShardedDataParallel
        state = wrapper.optim_state_dict(self.model, optim)
        twin = type(optim)(list(self.model.parameters()), **_arguments(optim))
        twin.load_state_dict(wrapper.optim_state_dict_to_load(self.model, twin, state))
        return twin

    def look(self, what: str, model: Any = None) -> None:
        model = self.model if model is None else model
        # Gradients stashed by `no_sync` are not available as full tensors.
        with_grads = not self._holds
        with shardwise.FullyShardedDataParallel.summon_full_params(
            model, with_grads=with_grads, writeback=False
        ):
            for name, param in model.named_parameters():
                self.notes.append((f"{what}: parameter {name}", _snapshot(param)))
                grad = _snapshot(param.grad) if with_grads else KEPT
                self.notes.append((f"{what}: gradient {name}", grad))
            for name, buffer in model.named_buffers():
                self.notes.append((f"{what}: buffer {name}", _snapshot(buffer)))
        self.notes.append((f"{what}: seen by hooks", {}))

    def reshard(self, model: Any) -> None:
        """Does nothing: between steps a wrapper shows its shards anyway."""

    def finish(self) -> None:
        pass


class ZeroPlain(Plain):
    """A plain model whose optimizer is shardwise's `ZeroRedundancyOptimizer`."""

    def zero(self, cls: Any, params: Any, **options: Any) -> Any:
        return shardwise.ZeroRedundancyOptimizer(params, optimizer_class=cls, **self.zero_options, **options)

    def reload(self, optim: Any) -> Any:
        """Returns a new optimizer with the state of the given one, consolidated on one rank."""
        optim.consolidate_state_dict(to=0)
        states = [optim.state_dict() if self.rank == 0 else None]
        dist.broadcast_object_list(states, src=0)
        arguments = _arguments(optim)
        params = optim.param_groups[0]["params"]
        twin = self.zero(type(optim.optim), params, **arguments)
        twin.load_state_dict(states[0])
        return twin


class TorchSharded(Sharded):
    """The side that uses torch's own `fully_shard`, to tell a defect of shardwise from one of the oracle."""

    def _options(self) -> dict[str, Any]:
        from torch.distributed import fsdp

        if not self.mesh_shape:
            self.mesh_shape = (self.world,)
        precision, offload = (self.param_dtype, self.reduce_dtype), self.offload
        self.param_dtype = self.reduce_dtype = None
        self.offload = False
        options = super()._options()
        (self.param_dtype, self.reduce_dtype), self.offload = precision, offload
        if precision != (None, None):
            options["mp_policy"] = fsdp.MixedPrecisionPolicy(
                param_dtype=precision[0], reduce_dtype=precision[1]
            )
        if offload:
            options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=False)
        return options

    def shard(self, *modules: Any, **options: Any) -> Any:
        from torch.distributed import fsdp

        target = modules[0] if len(modules) == 1 else list(modules)
        if options.pop("columns", False):
            options["shard_placement_fn"] = lambda param: Shard(1) if param.dim() > 1 else Shard(0)
        return fsdp.fully_shard(target, **self._options(), **options)

    def _is_sharded(self, module: Any) -> bool:
        from torch.distributed import fsdp

        return isinstance(module, fsdp.FSDPModule)

    def flat(self, cls: Any, params: Any, **options: Any) -> Any:
        return cls(params, **options)

    def _clip(self, model: Any, max_norm: float) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _arguments(optim: Any) -> dict[str, Any]:
    """Returns the arguments with which an optimizer was made."""
    names = ("lr", "momentum", "eps", "foreach", "fused")
    return {name: optim.defaults[name] for name in names if name in optim.defaults}


def _snapshot(value: Any) -> Any:
    if isinstance(value, DTensor):
        return Cut.of(value)
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _snapshot(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_snapshot(each) for each in value]
    return value


# --- the comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """The outcome of a program on one rank. Failures with the same `how` may be shrunk into each other."""

    how: str = ""  # empty: passed
    text: str = ""
    refused: str = ""  # the intended refusal that ended it, if any


def differences(expected: Notes, actual: Notes, tolerance: Tolerance) -> Iterator[str]:
    largest: dict[str, Tensor] = {}
    for (what, want), (what_too, got) in zip(expected, actual, strict=False):
        if what != what_too:
            yield f"noted {what_too!r}, expected {what!r}"
            return
        scale, (_, _, name) = None, what.partition(": ")
        if name.startswith(("parameter ", "gradient ")) and isinstance(want, Tensor) and want.numel():
            norm = want.double().norm()
            scale = largest[name] = torch.maximum(norm, largest.get(name, norm))
        if isinstance(got, str) and got == KEPT:
            continue
        yield from _difference(what, want, got, tolerance, scale)
    if len(expected) != len(actual):
        longer, count = max(expected, actual, key=len), min(len(expected), len(actual))
        yield f"{len(actual)} notes, expected {len(expected)}; the next is {longer[count][0]!r}"


def _difference(
    what: str, want: Any, got: Any, tolerance: Tolerance, scale: Tensor | None = None
) -> Iterator[str]:
    if isinstance(got, Cut) and isinstance(want, Tensor):
        if got.shape != want.shape:
            yield f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
            return
        if scale is None and want.numel():
            scale = want.double().norm()
        want, got = got.part_of(want), got.local
        yield from _tensor_difference(what, want, got, tolerance, scale)
    elif isinstance(want, Tensor) and isinstance(got, Tensor):
        yield from _tensor_difference(what, want, got, tolerance, scale)
    elif isinstance(want, Raised) and isinstance(got, Raised):
        if not got.stands_for(want):
            yield f"{what}: raised {got.name} ({got.text.splitlines()[0] if got.text else ''}), expected {want.name}"
    elif isinstance(want, dict) and isinstance(got, dict):
        if want.keys() != got.keys():
            yield f"{what}: has {sorted(got)}, expected {sorted(want)}"
        for key in want.keys() & got.keys():
            yield from _difference(f"{what}[{key}]", want[key], got[key], tolerance)
    elif isinstance(want, list) and isinstance(got, list):
        if len(want) != len(got):
            yield f"{what}: {len(got)} items, expected {len(want)}"
        for index, pair in enumerate(zip(want, got, strict=False)):
            yield from _difference(f"{what}[{index}]", *pair, tolerance)
    elif isinstance(want, Tensor) or isinstance(got, (Tensor, Cut)):
        yield f"{what}: {_described(got)}, expected {_described(want)}"
    elif want != got:
        yield f"{what}: {got!r}, expected {want!r}"


def _tensor_difference(
    what: str, want: Tensor, got: Tensor, tolerance: Tolerance, scale: Tensor | None
) -> Iterator[str]:
    if want.shape != got.shape or want.dtype != got.dtype:
        yield f"{what}: {_described(got)}, expected {_described(want)}"
        return
    if torch.equal(want, got) or not want.numel():
        return
    if not want.is_floating_point():
        yield f"{what}: {got.tolist()}, expected {want.tolist()}"
        return
    whole = want.double().norm() if scale is None else scale
    error = float((got.double() - want.double()).norm() / whole.clamp_min(1e-3))
    if not error <= tolerance.relative:
        yield f"{what}: off by {error:.3g}, allowed {tolerance.relative:.3g}"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    if isinstance(value, Cut):
        return f"a shard of {tuple(value.shape)}"
    return repr(value)


def run_side(program: Callable[[Any], None], side: Any) -> BaseException | None:
    """Runs a program; returns the exception that ended it, or None."""
    try:
        program(side)
    except Exception as error:  # noqa: BLE001  compared with the other side's exception
        side.notes.append(("the program", Raised.of(error)))
        return error
    return None


class ProgramRaised(Exception):
    """Sharded code raised an exception that plain code did not."""


def compared(
    program: Callable[[Any], None],
    sharded: type[Side],
    options: dict[str, Any],
    tolerance: Tolerance,
    refusals: tuple[tuple[str, str], ...] = (),
) -> Comparison:
    """Runs the program on both sides, on one rank, and compares; raises if only sharded code raised."""
    plain, other = Plain(**options), sharded(**options)
    want = run_side(program, plain)
    got = run_side(program, other)
    for count, (what, note) in enumerate(other.notes):
        # Where plain code notes something else, it has got further than this.
        same = [each for each in plain.notes[count : count + 1] if each[0] == what]
        if name := _refusal(note, same, refusals):
            # Whatever a program does after a refusal, plain code has not been refused.
            found = list(differences(plain.notes[:count], other.notes[:count], tolerance))
            return _comparison(found) if found else Comparison(refused=name)
    is_alone = want is None or len(other.notes) < len(plain.notes)
    if got is not None and is_alone:
        raise ProgramRaised("".join(traceback.format_exception(got))) from got
    if want is not None and got is None:
        return Comparison(
            f"only plain code raises {type(want).__name__}", "".join(traceback.format_exception(want))
        )
    return _comparison(list(differences(plain.notes, other.notes, tolerance)))


def _refusal(note: Any, plain: Notes, refusals: tuple[tuple[str, str], ...]) -> str:
    """Returns the name of the intended refusal that was raised, caught or not, where plain code did not raise it."""
    if not isinstance(note, Raised) or ShardwiseError.__name__ not in note.names:
        return ""
    if any(isinstance(expected, Raised) and note.stands_for(expected) for _, expected in plain):
        return ""
    return next((name for name, sign in refusals if sign in note.text), "")


def _comparison(found: list[str]) -> Comparison:
    return Comparison(how=_kind_of(found[0]), text="\n".join(found[:6])) if found else Comparison()


def _kind_of(difference: str) -> str:
    if "raised" in difference:
        return "differs: raised"
    if "notes" in difference or "noted" in difference:
        return "differs: notes"
    return "differs"
