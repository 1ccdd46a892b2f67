"""What a training step uses of torch's private names: the step's one door to them.

Autograd's hooks and what the running backward reaches; modes that would record the engine's own work; local tensors of
DTensors; storages, kernels over lists of tensors, and CUDA streams; what an optimizer runs. What is needed at set-up
only is in the other files of this package.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from operator import attrgetter, is_
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import Variable
from torch.autograd.graph import _CloneArgBeforeMutateMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

# --- autograd ---------------------------------------------------------------------------------------------------------

# Returns the id of the backward that this thread is running, or -1.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def inside_backward() -> bool:
    """Returns whether this thread is running a backward."""
    return current_backward() != -1


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Registers a hook on a non-leaf tensor like ``register_hook``, without a handle to remove it: twice as fast."""
    # Read once: each access creates a Python object for the node.
    node = tensor.grad_fn
    if tensor._backward_hooks is None and node is not None:
        # Not a plain dict: handles of other hooks, which are numbered from 0, hold it weakly. Item assignment takes
        # half the time of passing a list.
        hooks: OrderedDict[int, Any] = OrderedDict()
        hooks[-1] = hook
        tensor._backward_hooks = hooks
        node._register_hook_dict(tensor)
    else:
        tensor.register_hook(hook)


def hook_of_gradient(tensor: torch.Tensor) -> Callable[[torch.Tensor], Any] | None:
    """Returns the hook that ``hook_gradient`` registered on ``tensor``, if any."""
    hooks = tensor._backward_hooks
    return None if hooks is None else hooks.get(-1)


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs ``callback`` once, at the end of the backward that is running."""
    Variable._execution_engine.queue_callback(callback)


# Returns whether the running backward executes a node, the ``grad_fn`` of some tensor.
backward_executes: Callable[[Any], bool] = torch._C._will_engine_execute_node


def backward_reaches(leaf: torch.Tensor) -> bool:
    """Returns whether the running backward computes a gradient of ``leaf``."""
    # A leaf's node is not exposed, but a view created in grad mode points to it. ``get_gradient_edge`` does the same
    # and takes three times as long. A tensor subclass may have no views.
    was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    follower = leaf.view_as(leaf) if type(leaf) is torch.nn.Parameter else _Follower.apply(leaf)
    torch._C._set_grad_enabled(was_enabled)
    node = follower.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert node is not None
    try:
        return backward_executes(node)
    except RuntimeError:
        # torch has no answer where ``autograd.grad`` was asked for this very gradient.
        return True


class _Follower(torch.autograd.Function):
    """Makes a tensor whose node points to its input's, without any operation on the input."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None


def preserved_version(tensor: torch.Tensor) -> Any:
    """Returns a context in which writing to ``tensor`` does not increment its version."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]


# Returns the hooks registered with ``register_post_accumulate_grad_hook``.
post_accumulate_hooks: Callable[[torch.Tensor], Mapping[int, Callable[[torch.Tensor], None]] | None] = cast(
    Any, torch.Tensor
)._post_accumulate_grad_hooks.__get__


# --- modes that see operations ----------------------------------------------------------------------------------------

num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def unrecorded_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of ``tensor``, unseen by modes that record a forward: its replay may need no such view."""
    if num_dispatch_modes():
        with _unrecorded():
            return tensor.view_as(tensor)
    return tensor.view_as(tensor)


def unseen_by_modes() -> AbstractContextManager[Any]:
    """Returns a context without dispatch modes, so that control traffic is not counted as the model's."""
    if num_dispatch_modes() or _len_torch_dispatch_stack_pre_dispatch():
        return _disable_current_modes()
    return _NO_MODES


_NO_MODES = nullcontext()


Result = TypeVar("Result")

# Modes that record every operation of a forward, to replay it or to save what it overwrites.
_RECORDING_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode, _CloneArgBeforeMutateMode)


def aside(work: Callable[..., Result]) -> Callable[..., Result]:
    """Returns ``work``, done so that it is not part of the model's computation.

    If a mode recorded that work with a forward, a replay would repeat it, or miss it; and a transform of ``torch.func``
    would apply to its tensors. Modes that count collectives still see it.
    """
    # Nearly always as it is: without a context, which takes time, and without a frame of its own.
    if num_dispatch_modes() or peek_interpreter_stack() is not None:
        return partial(_aside, work)
    return work


def _aside(work: Callable[..., Result], *args: Any) -> Result:
    with _unrecorded(), temporarily_clear_interpreter_stack():
        return work(*args)


@contextmanager
def _unrecorded() -> Iterator[None]:
    modes = []
    while num_dispatch_modes():
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


def is_within_compiled() -> bool:
    """Returns whether this thread is inside a call of a compiled function."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == dynamo.__file__:
            return True
        frame = frame.f_back
    return False


# --- DTensors and their local tensors ---------------------------------------------------------------------------------

# As in torch, parameters that are DTensors are typed as plain tensors or parameters.


def dtensor(local: torch.Tensor, spec: DTensorSpec, outline: torch.Tensor | None = None) -> DTensor:
    """Wraps a local tensor as a DTensor, without the checks and communication of ``from_local``: 20 times as fast.

    Only ``__new__``: ``__init__`` does nothing but pass through several wrappers. ``outline`` is a tensor like
    ``local`` without a storage offset: torch fails to copy a DTensor created with one.
    """
    made = DTensor.__new__(DTensor, local if outline is None else outline, spec, requires_grad=False)
    if outline is not None:
        made._local_tensor = local
    return made


def spec_of(tensor: torch.Tensor) -> DTensorSpec:
    spec: DTensorSpec = tensor._spec  # type: ignore[attr-defined]
    return spec


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor itself; ``to_local()`` would create a new one each time."""
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank has of a tensor: the local tensor of a DTensor, all of any other."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def all_show(shown: Sequence[tuple[dict[str, Any], str, Any, torch.Tensor, bool]]) -> bool:
    """Returns whether each module still has, under that name, the same parameter with the same local tensor and the
    same ``requires_grad``.

    One call for all parameters of a unit, because every step makes it.
    """
    with without_torch_function():
        for params, name, param, local, trainable in shown:
            if (
                param._local_tensor is not local
                or param.requires_grad is not trainable
                or params.get(name) is not param
            ):
                return False
    return True


# A context in which reading attributes of DTensors is as fast as of plain tensors: without ``__torch_function__``.
without_torch_function = torch._C.DisableTorchFunctionSubclass


# A context inside it for users' code, in which ``__torch_function__`` works as usual.
with_torch_function = torch._C._EnableTorchFunction


_local = attrgetter("_local_tensor")
_requires_grad = attrgetter("requires_grad")


def have_local_tensors(tensors: Collection[torch.Tensor], locals_: Collection[torch.Tensor]) -> bool:
    """Returns whether the DTensors have exactly these local tensors, in order, and require no gradient."""
    return all(map(is_, map(_local, tensors), locals_)) and not any(map(_requires_grad, tensors))


def replace_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Points a DTensor at another local tensor of the same shape, keeping the object that optimizers hold."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def redistributed_local(
    gradient: torch.Tensor, spec: DTensorSpec, left: tuple[int, ...] = ()
) -> torch.Tensor:
    """Redistributes a DTensor gradient, which may be partial sums, as ``spec`` says; returns its local tensor.

    On the axes ``left`` its placements stay as they are.
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


# --- storages, kernels over lists of tensors, CUDA streams ------------------------------------------------------------


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Returns the reference count of a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    """Returns a tensor over a storage that may still be too small for it; ``offset`` is in elements.

    ``set_`` would resize the storage, and so allocate memory.
    """
    nothing = torch.empty(0, dtype=dtype, device=storage.device)
    nothing.set_(storage, 0, (0,), (1,))
    made: torch.Tensor = torch.ops.inductor._reinterpret_tensor(nothing, shape, strides, offset)
    return made


copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_copy_
add_all: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_add_


def chunk_cat(tensors: list[torch.Tensor], num_chunks: int, rows: torch.Tensor) -> None:
    """Splits each tensor along dim 0 into ``num_chunks``, zero-padded, and copies chunk i of all of them into row i."""
    torch._chunk_cat(tensors, 0, num_chunks, out=rows)


zero_all: Callable[[list[torch.Tensor]], object] = torch._foreach_zero_


def multiply_all(targets: list[torch.Tensor], factor: torch.Tensor) -> None:
    torch._foreach_mul_(targets, factor)


def unscale_all(tensors: list[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Multiplies tensors of one device and dtype by ``inverse``; sets ``found_inf`` to 1 if any is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inverse)


def norms_of(tensors: list[torch.Tensor], order: float, together: bool) -> list[torch.Tensor]:
    """Returns the norm of each tensor in float32 or wider; all have one device and dtype, and none is empty."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if together:
        return list(torch._foreach_norm(tensors, order, dtype=dtype))
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


StreamKey = tuple[int, int, int]


# These are missing where torch is built without CUDA.

# Returns a key of a device's current stream: ten times as fast as the stream object.
current_cuda_stream: Callable[[int], StreamKey] = getattr(torch._C, "_cuda_getCurrentStream", None)  # type: ignore[assignment]

# ``torch.cuda.set_stream`` without its checks; takes the parts of a key.
set_cuda_stream: Callable[[int, int, int], None] = getattr(torch._C, "_cuda_setStream", None)  # type: ignore[assignment]

# Returns a device's current stream as a CUDA handle.
raw_cuda_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]


def cuda_stream(key: StreamKey) -> torch.cuda.Stream:
    stream_id, device_index, device_type = key
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def cuda_event() -> torch.cuda.Event:
    """Returns a blocking event, of the base class of ``torch.cuda.Event``, whose methods only forward to it."""
    return cast(torch.cuda.Event, torch._C._CudaEventBase(blocking=True))


# --- what an optimizer runs ------------------------------------------------------------------------------------------
# ``process_wide`` puts these into torch.


def telling(
    zero_grad: Callable[[Any, bool], None], heard: Callable[[Any, bool], None]
) -> Callable[..., None]:
    """Returns ``zero_grad`` such that it calls ``heard`` afterwards."""

    @wraps(zero_grad)
    def zero_grad_and_tell(self: Any, set_to_none: bool = True) -> None:
        zero_grad(self, set_to_none)
        heard(self, set_to_none)

    return zero_grad_and_tell


def counting_writes(
    is_counted: Callable[[torch.Tensor], bool], op: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Runs an in-place kernel over lists of DTensors, and increments the versions of those that ``is_counted``."""
    targets = args[0]
    if all(isinstance(target, DTensor) for target in targets):
        torch.autograd.graph.increment_version([target for target in targets if is_counted(target)])
        if all(_can_be_sharded_like(targets, operand) for operand in (*args, *kwargs.values())):
            # These kernels are element-wise, so each rank computes on its own shards.
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
    """Returns an operand for local tensors: a list sharded like its targets, or a scalar as a full tensor."""
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
# Handlers that are disabled at the moment, and by how many threads.
_bypassed: dict[Any, tuple[Any, int]] = {}


@contextmanager
def _without_handler(op: Any) -> Iterator[None]:
    """Disables our handler of an operator; several threads may do so at once."""
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
