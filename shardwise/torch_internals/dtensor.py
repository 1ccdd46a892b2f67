"""The door to torch's underscore names.

Everything here was checked on torch 2.11 and 2.13. When a torch release moves one of these names, this is the one
file that changes; what makes threads into ranks has a door of its own, ``torch_threads.py``.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Variable
from torch.autograd.graph import _CloneArgBeforeMutateMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from shardwise.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=torch.Tensor)
A = TypeVar("A")
R = TypeVar("R")

# Parameters that are DTensors are typed as plain tensors and parameters everywhere else, as torch itself does; the
# functions here take them so.

# --- DTensor -----------------------------------------------------------------------------------------------------


Spec = DTensorSpec


def dtensor_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def dtensor(local: torch.Tensor, spec: DTensorSpec, outline: torch.Tensor | None = None) -> DTensor:
    """Wraps a local tensor without the checks and communication of ``from_local`` (a twentieth of its time).

    ``__new__`` alone: ``__init__`` does nothing but pass through several wrappers. ``outline`` is a tensor like
    ``local`` but without a storage offset: torch fails to copy a DTensor that was made with one.
    """
    made = DTensor.__new__(DTensor, local if outline is None else outline, spec, requires_grad=False)
    if outline is not None:
        made._local_tensor = local
    return made


def dtensor_parameter(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool) -> nn.Parameter:
    """A new DTensor as a parameter. ``nn.Parameter`` would detach it first, for which DTensor works out how the result
    lies: milliseconds for each new shape, spent on a tensor that nobody else holds."""
    made: Any = dtensor(local, spec).requires_grad_(requires_grad)
    made._is_param = True
    return cast(nn.Parameter, made)


def spec_of(tensor: torch.Tensor) -> DTensorSpec:
    spec: DTensorSpec = tensor._spec  # type: ignore[attr-defined]
    return spec


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor itself; ``to_local()`` would give a new one each time."""
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def all_show(entries: Sequence[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor, bool]]) -> bool:
    """Whether each module's parameters hold, under that name, that very parameter with that very local tensor, as
    trainable or frozen as it was.

    One call for all parameters of a unit: it is asked in every step.
    """
    with plain_attributes():
        for params, name, sharded, local, trainable in entries:
            if (
                params.get(name) is not sharded
                or sharded._local_tensor is not local
                or sharded.requires_grad is not trainable
            ):
                return False
    return True


# A context in which attributes of DTensors cost what a plain tensor's do: for each, torch looks whether the class has
# something to say about it, which takes longer than the rest.
plain_attributes = torch._C.DisableTorchFunctionSubclass


# And one inside it for code of somebody else's, in which they are what they always are.
enabled_attributes = torch._C._EnableTorchFunction


def are_over(tensors: Iterable[torch.Tensor], locals_: Iterable[torch.Tensor]) -> bool:
    """Whether DTensors that need no gradient are over these very local tensors, in order."""
    return all(
        tensor._local_tensor is local and not tensor.requires_grad  # type: ignore[attr-defined]
        for tensor, local in zip(tensors, locals_, strict=True)
    )


def replace_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Points a DTensor at another local tensor of the same shape, keeping the object that optimizers hold."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def count_foreach_writes(is_counted: Callable[[torch.Tensor], bool]) -> None:
    """Has in-place foreach and fused kernels raise the versions of the DTensors they write to, as others do.

    For DTensors that are ``is_counted``. To be called once in a process.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for name in dir(torch.ops.aten):
        if name.startswith(("_foreach_", "_fused_")) and name.endswith("_"):
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                handlers.setdefault(getattr(packet, overload), partial(_counting_writes, is_counted))


def _counting_writes(
    is_counted: Callable[[torch.Tensor], bool], op: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    targets = args[0]
    if all(isinstance(target, DTensor) for target in targets):
        torch.autograd.graph.increment_version([target for target in targets if is_counted(target)])
        if all(_can_be_sharded_like(targets, operand) for operand in (*args, *kwargs.values())):
            # Element by element, so each rank computes its own shards.
            args = [_sharded_like(targets, operand) for operand in args]
            kwargs = {name: _sharded_like(targets, operand) for name, operand in kwargs.items()}
            local_args, local_kwargs = tree_map_only(DTensor, local_of, (args, kwargs))
            return op(*local_args, **local_kwargs)
    with _without_handler(op):
        return op(*args, **kwargs)


def _can_be_sharded_like(targets: Sequence[Any], operand: Any) -> bool:
    if isinstance(operand, DTensor):
        return operand.ndim == 0
    if not isinstance(operand, (list, tuple)):
        return True
    return all(
        tensor.device_mesh == target.device_mesh
        and tensor.shape == target.shape
        and not any(placement.is_partial() for placement in target.placements)
        for target, tensor in zip(targets, operand, strict=False)
        if isinstance(tensor, DTensor)
    )


def _sharded_like(targets: Sequence[Any], operand: Any) -> Any:
    """An operand of an element-wise kernel: a list as its targets are sharded, one number for all of them whole."""
    if isinstance(operand, DTensor):
        return operand.full_tensor()
    if not isinstance(operand, (list, tuple)):
        return operand
    return [
        tensor.redistribute(target.device_mesh, target.placements)
        if isinstance(tensor, DTensor) and tensor.placements != target.placements
        else tensor
        for target, tensor in zip(targets, operand, strict=False)
    ]


_bypass_lock = threading.Lock()
# Handlers that are out of use, and by how many threads.
_bypassed: dict[Any, tuple[Any, int]] = {}


@contextmanager
def _without_handler(op: Any) -> Iterator[None]:
    """An operator as torch itself does it; several threads may ask for that at once."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    with _bypass_lock:
        handler, num_threads = _bypassed.get(op) or (handlers.pop(op), 0)
        _bypassed[op] = handler, num_threads + 1
    try:
        yield
    finally:
        with _bypass_lock:
            num_threads = _bypassed.pop(op)[1] - 1
            if num_threads:
                _bypassed[op] = handler, num_threads
            else:
                handlers[op] = handler


def take_data(is_taken: Callable[[torch.Tensor], bool]) -> None:
    """Makes ``param.data = value`` write to the shards of DTensors that are ``is_taken``; once in a process.

    Otherwise it does nothing at all: it gives another tensor to the DTensor's outside, which has no elements.
    """

    def set_data(param: Any, value: torch.Tensor) -> None:
        if not is_taken(param):
            torch.Tensor.data.__set__(param, value)  # type: ignore[attr-defined]
            return
        if value.shape != param.shape or value.dtype != param.dtype:
            raise ConfigError(
                f"a sharded parameter of shape {tuple(param.shape)} and {param.dtype} was given data of shape "
                f"{tuple(value.shape)} and {value.dtype}",
                where="param.data = ...",
                fix="give it data of its own shape and dtype; model.to(dtype) changes the dtype of a whole model",
            )
        with torch.no_grad():
            if not isinstance(value, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
            param.copy_(value)

    DTensor.data = property(torch.Tensor.data.__get__, set_data)  # type: ignore[assignment, attr-defined]


def placed_local(gradient: torch.Tensor, spec: Spec, left: tuple[int, ...] = ()) -> torch.Tensor:
    """The local tensor of a DTensor gradient, placed as ``spec`` says; backward may leave it as partial sums.

    On the axes ``left`` it stays as it came.
    """
    assert isinstance(gradient, DTensor)
    wanted = spec.placements
    if left:
        wanted = tuple(
            gradient.placements[axis] if axis in left else wanted[axis] for axis in range(len(wanted))
        )
    if gradient.placements != wanted:
        gradient = gradient.redistribute(placements=wanted)
    local = gradient._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Cut along ``dim`` after another axis of the mesh has cut it into ``split_factor`` parts."""
    return _StridedShard(dim, split_factor=split_factor)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` was sliced from, or itself."""
    return mesh._get_root_mesh()


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    return mesh._flatten(name)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    return DeviceMesh._concatenate(meshes)


def forget_meshes() -> None:
    """Drops DTensor's caches: they hold meshes, and an equal mesh of the next default group would be given the
    groups of the last one."""
    from torch.distributed.tensor import _redistribute

    try:
        from torch.distributed.tensor import debug
    except ImportError:
        # Its door needs numpy, which torch itself does without; behind it are these two caches.
        propagate: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        getattr(propagate, "cache", propagate).cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()
    else:
        debug._clear_sharding_prop_cache()
    clear_plans = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    if clear_plans is not None:
        clear_plans()


def outline_of(cls: type[T], param: torch.Tensor) -> T:
    """A tensor of class ``cls`` with the shape, dtype and device of ``param``, and no memory."""
    made: T = torch.Tensor._make_wrapper_subclass(
        cls, param.shape, dtype=param.dtype, device=param.device, requires_grad=param.requires_grad
    )
    return made


# --- autograd ----------------------------------------------------------------------------------------------------


# The number of the backward that this thread is running right now; -1 if it is running none.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def inside_backward() -> bool:
    """Whether this thread is running a backward right now."""
    return current_backward() != -1


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """``register_hook`` for a tensor that is no leaf, without the handle that would remove it: half the price."""
    # Asked for once: Python's side of a node is made for whoever asks, and goes with them.
    node = tensor.grad_fn
    if tensor._backward_hooks is None and node is not None:
        # Handles of other hooks are numbered from 0; and they hold this dict weakly, which a plain dict forbids.
        # Filled item by item, which takes half the time of a list of them.
        hooks: OrderedDict[int, Any] = OrderedDict()
        hooks[-1] = hook
        tensor._backward_hooks = hooks
        node._register_hook_dict(tensor)
    else:
        tensor.register_hook(hook)


def view_aside(tensor: torch.Tensor) -> torch.Tensor:
    """A view of all of ``tensor``, unseen by modes that record a forward: run again, it may need none."""
    if _dispatch_modes():
        with _unrecorded():
            return tensor.view_as(tensor)
    return tensor.view_as(tensor)


def hook_of_gradient(tensor: torch.Tensor) -> Callable[[torch.Tensor], Any] | None:
    """What ``hook_gradient`` hooked on ``tensor``, if it did."""
    hooks = tensor._backward_hooks
    return None if hooks is None else hooks.get(-1)


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs ``callback`` once when the backward that is running now has ended."""
    Variable._execution_engine.queue_callback(callback)


# Whether the backward that is running now executes a node, the ``grad_fn`` of some tensor.
backward_passes: Callable[[Any], bool] = torch._C._will_engine_execute_node


def backward_reaches(leaf: torch.Tensor) -> bool:
    """Whether the backward that is running now gives ``leaf`` a gradient."""
    # A leaf's node is not exposed; a view made in grad mode points to it. ``get_gradient_edge`` does the same at
    # three times the price.
    was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    view_node = leaf.view_as(leaf).grad_fn
    torch._C._set_grad_enabled(was_enabled)
    assert view_node is not None
    node = view_node.next_functions[0][0]
    assert node is not None
    return backward_passes(node)


def unchanged_to_autograd(tensor: torch.Tensor) -> Any:
    """A context in which writing to ``tensor`` does not raise its version."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]


# The hooks a user registered with ``register_post_accumulate_grad_hook``.
post_accumulate_hooks: Callable[[torch.Tensor], Mapping[int, Callable[[torch.Tensor], None]] | None] = cast(
    Any, torch.Tensor
)._post_accumulate_grad_hooks.__get__


# --- process groups ----------------------------------------------------------------------------------------------


def all_gather_call(group: dist.ProcessGroup) -> Callable[..., Any]:
    """The group's own gather into one tensor; Python-made groups only know the newer of its two names."""
    return getattr(group, "all_gather_single", None) or group._allgather_base


def reduce_scatter_call(group: dist.ProcessGroup) -> Callable[..., Any]:
    return getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that serves ``device`` in this group; a group made in Python is its own backend."""
    try:
        return str(backend_of(group, device).name())
    except RuntimeError:
        return str(group.name())


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend itself: its collectives go past torch's dispatcher."""
    return group._get_backend(device)


def timeout_seconds_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """How long the group waits for a rank by itself."""
    try:
        options = getattr(backend_of(group, device), "options", None)
    except RuntimeError:
        # A group made in Python has no backend, and waits as long as torch does by default.
        options = None
    timeout: timedelta = getattr(options, "_timeout", dist.constants.default_pg_timeout)
    return timeout.total_seconds()


def num_issued(group: dist.ProcessGroup) -> int | None:
    """How much this process has issued on all its groups; None where the calling thread cannot see the group's rank."""
    groups = list(dist.distributed_c10d._world.pg_map)
    if group not in groups:
        return None
    try:
        return sum(int(cast(Any, each)._get_sequence_number_for_group()) for each in groups)
    except RuntimeError:
        # A backend that does not count.
        return None


def finished_work() -> Any:
    """A collective's handle, as torch's dispatcher takes it, with nothing left to wait for."""
    over: torch.futures.Future[list[Any]] = torch.futures.Future()
    over.set_result([])
    return torch._C._distributed_c10d._create_work_from_future(over).boxed()  # type: ignore[attr-defined]


def store_of(group: dist.ProcessGroup, purpose: str) -> Any:
    """The store through which the group's ranks found each other, under a prefix of this group and purpose.

    By a connection of its own: one that somebody waits on answers nobody else.
    """
    store = dist.PrefixStore(purpose, dist.distributed_c10d._world.pg_map[group][1].clone())  # type: ignore[attr-defined]
    # Nobody waits for a note that is not there; this is for a store that has gone.
    store.set_timeout(timedelta(seconds=3))
    return store


def is_destroyed(group: dist.ProcessGroup) -> bool:
    return group not in dist.distributed_c10d._world.pg_map


def name_of(group: dist.ProcessGroup) -> str:
    """The same on all ranks of the group, and no other group's."""
    return group.group_name


def defaults_of(op: str) -> tuple[Any, ...]:
    """The default value of each argument of an operation; None for those that have none."""
    namespace, name = op.split("::")
    schema = getattr(getattr(torch.ops, namespace), name).default._schema
    return tuple(argument.default_value for argument in schema.arguments)


def passing_library(namespace: str) -> Any:
    """A library of kernels that goes when the context ends, and its kernels with it."""
    return torch.library._scoped_library(namespace, "IMPL")


def modes_are_watching() -> bool:
    """Whether a dispatch mode is on, such as one that counts collectives."""
    return torch._C._len_torch_dispatch_stack() > 0


def debugs_in_detail() -> bool:
    """Whether ``torch.distributed`` was asked to look closely (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
    return bool(dist.get_debug_level() == dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]


def symmetric_memory(group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    """An allocator of NCCL's symmetric memory, which every rank of ``group`` must call alike."""
    from torch.distributed import _symmetric_memory as memory

    memory.set_backend("NCCL")

    def allocate(size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = memory.empty(*size, dtype=dtype, device=device)
        memory.rendezvous(made, group)
        return made

    return allocate


@contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Runs collectives past torch's dispatch modes, so that control traffic is not counted as the model's."""
    with _disable_current_modes():
        yield


# Modes that watch every operation of a forward, to replay it or to save what it writes to.
_RECORDING_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode, _CloneArgBeforeMutateMode)


_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def do_aside(work: Callable[[A], R], given: A) -> R:
    """Does the engine's own work, which is no part of what the model computes.

    Recorded with a forward, it would be missed or met again when that is replayed; and inside a transform of
    ``torch.func`` it would act on tensors of that transform. Whoever counts collectives still sees them.
    """
    if _dispatch_modes() or peek_interpreter_stack() is not None:
        with _unrecorded(), temporarily_clear_interpreter_stack():
            return work(given)
    return work(given)


@contextmanager
def _unrecorded() -> Iterator[None]:
    modes = []
    while torch._C._len_torch_dispatch_stack():
        modes.append(_pop_mode())
    seen = [mode for mode in reversed(modes) if not isinstance(mode, _RECORDING_MODES)]
    for mode in seen:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in seen:
            _pop_mode()
        for mode in reversed(modes):
            _push_mode(mode)


def same_structure(one: Any, other: Any) -> bool:
    """Whether two values are the same containers around tensors, and equal wherever there are none."""
    leaves, shape = tree_flatten(one)
    other_leaves, other_shape = tree_flatten(other)
    return shape == other_shape and all(
        isinstance(a, torch.Tensor) == isinstance(b, torch.Tensor) and (isinstance(a, torch.Tensor) or a == b)
        for a, b in zip(leaves, other_leaves, strict=True)
    )


def map_tree(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with every tensor changed, as torch itself walks containers."""
    return tree_map_only(torch.Tensor, change, tree)


def join_trees(join: Callable[[list[torch.Tensor]], torch.Tensor], trees: Sequence[Any]) -> Any:
    """One tree out of several alike: tensors in one place become one, anything else is taken from the first."""
    first, *others = trees
    return tree_map(
        lambda leaf, *same: join([leaf, *same]) if isinstance(leaf, torch.Tensor) else leaf, first, *others
    )


# --- modules and kernels -----------------------------------------------------------------------------------------


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters by name; writing here costs a tenth of ``setattr``."""
    return module._parameters


# The base of all batch norms, which compute in full precision whatever is around them.
BatchNorm = _BatchNorm


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules


def state_entries(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """What a state dict holds of this module itself; ``None`` stands for extra state, which may be anything."""
    for name, param in module._parameters.items():
        if param is not None:
            yield name, param
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer
    if type(module).set_extra_state is not nn.Module.set_extra_state:
        yield "_extra_state", None


def asked_for_state_dicts() -> tuple[bool, bool, bool] | None:
    """What a caller asks ``torch.distributed.checkpoint.state_dict`` for: for optimizers too? sent by the first rank?
    without frozen parameters? None where the present call does not come from there.

    Nothing that those functions call is told any of it.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_verify_options" and frame.f_globals["__name__"].endswith(".state_dict"):
            options = frame.f_locals["options"]
            return (
                bool(frame.f_locals["optims"]),
                bool(options.broadcast_from_rank0),
                bool(options.ignore_frozen_params),
            )
    return None


def loads_plainly(module: nn.Module, own_hooks: type) -> bool:
    """Whether nothing but hooks of type ``own_hooks`` changes how this module takes its part of a state dict."""
    hooks = module._load_state_dict_pre_hooks.values()
    return (
        type(module)._load_from_state_dict is nn.Module._load_from_state_dict
        and not module._load_state_dict_post_hooks
        and all(isinstance(getattr(hook, "hook", None), own_hooks) for hook in hooks)
    )


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many owners a storage has."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    """A tensor of its own over a storage that may be too small for it yet; ``offset`` is in elements.

    ``set_`` would make the storage large enough, and take memory for that.
    """
    nothing = torch.empty(0, dtype=dtype, device=storage.device)
    nothing.set_(storage, 0, (0,), (1,))
    made: torch.Tensor = torch.ops.inductor._reinterpret_tensor(nothing, shape, strides, offset)
    return made


copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_copy_
add_all: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_add_


def chunk_cat(tensors: list[torch.Tensor], num_chunks: int, rows: torch.Tensor) -> None:
    """Cuts each tensor along dim 0 into ``num_chunks``, padded with zero rows, and lays chunk i of all into row i."""
    torch._chunk_cat(tensors, 0, num_chunks, out=rows)


zero_all: Callable[[list[torch.Tensor]], object] = torch._foreach_zero_


def multiply_all(targets: list[torch.Tensor], factor: torch.Tensor) -> None:
    torch._foreach_mul_(targets, factor)


def norms_of(tensors: list[torch.Tensor], order: float, together: bool) -> list[torch.Tensor]:
    """The norm of each tensor, all of one device and dtype and none empty, in float32 or wider."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if together:
        return list(torch._foreach_norm(tensors, order, dtype=dtype))
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


# --- torch.compile -----------------------------------------------------------------------------------------------


def untraced(function: F) -> F:
    """Keeps torch.compile out of ``function`` and all it calls. An eager call costs what it did before."""
    return _untraced(function, _FrameAction.SKIP)


def untraced_itself(function: F) -> F:
    """Keeps torch.compile out of ``function``, not out of what it calls."""
    return _untraced(function, _FrameAction.DEFAULT)


def _untraced(function: F, below: _FrameAction) -> F:
    # What ``torch.compiler.disable`` does, without the wrapper that it puts around every call.
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, below))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "shardwise gathers and reduces here"  # type: ignore[attr-defined]
    return function


def is_within_compiled() -> bool:
    """Whether this thread is inside a call of something that was given to torch.compile."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == dynamo.__file__:
            return True
        frame = frame.f_back
    return False


# --- CUDA streams ------------------------------------------------------------------------------------------------


StreamKey = tuple[int, int, int]


def current_cuda_stream(device_index: int) -> StreamKey:
    """What tells the current stream from others, a tenth of the price of the stream as an object."""
    return torch._C._cuda_getCurrentStream(device_index)


def set_cuda_stream(key: StreamKey) -> None:
    """``torch.cuda.set_stream`` without its checks."""
    torch._C._cuda_setStream(*key)


def cuda_stream(key: StreamKey) -> torch.cuda.Stream:
    stream_id, device_index, device_type = key
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def cuda_mark() -> torch.cuda.Event:
    """An event that a host may sleep on. Of the class below ``torch.cuda.Event``, whose methods only pass on."""
    return cast(torch.cuda.Event, torch._C._CudaEventBase(blocking=True))


def raw_cuda_stream(device_index: int) -> int:
    """The current stream as CUDA itself knows it."""
    return torch._C._cuda_getCurrentRawStream(device_index)


# --- ZeRO --------------------------------------------------------------------------------------------------------


def issue_grouped_broadcasts(
    group: dist.ProcessGroup, device: torch.device, tensors_by_source: Sequence[Sequence[torch.Tensor]]
) -> dist.Work:
    """Each rank's tensors to all the others, as one operation of the backend (NCCL runs it as one kernel)."""
    group._start_coalescing(device)
    for source, tensors in enumerate(tensors_by_source):
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.asyncOp = True
        for tensor in tensors:
            # The group's own method: torch's wrapper of it checks what was checked when the exchange was planned.
            group.broadcast([tensor], options)
    return group._end_coalescing(device)


def note_optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """Tells learning-rate schedulers that a step was made without a call of ``step()``."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Everything that runs before and after its ``step()``."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    of_all = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    return [hook for hooks in (*own, *of_all) for hook in hooks.values()]


def hear_zero_grad(
    of_optimizer: Callable[[torch.optim.Optimizer, bool], None], of_module: Callable[[nn.Module, bool], None]
) -> None:
    """Calls back after each ``zero_grad`` of an optimizer or module, with its ``set_to_none``; once in a process.

    torch has no hook for it, and not every gradient is where it looks.
    """
    _call_after(torch.optim.Optimizer, of_optimizer)
    _call_after(nn.Module, of_module)


def _call_after(cls: Any, heard: Callable[[Any, bool], None]) -> None:
    zero_grad = cls.zero_grad

    @wraps(zero_grad)
    def zero_grad_and_tell(self: Any, set_to_none: bool = True) -> None:
        zero_grad(self, set_to_none)
        heard(self, set_to_none)

    cls.zero_grad = zero_grad_and_tell


def join_is_watching(joinable: Joinable) -> bool:
    """Whether torch's ``Join`` counts this object's steps."""
    return bool(joinable._join_config.enable)


def run_before_state_dict(optimizer: torch.optim.Optimizer) -> None:
    """Runs the hooks that users registered to go before saving; the next three run the others."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def run_after_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    return state_dict


def run_before_load_state_dict(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    return state_dict


def run_after_load_state_dict(optimizer: torch.optim.Optimizer) -> None:
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)
