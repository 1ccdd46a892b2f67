"""The five changes that shardwise makes to torch for the whole process, each in a function that is called once.

In-place foreach kernels increment the versions of DTensors; ``param.data = value`` writes to shards; ``zero_grad``
calls back; ``functional_call`` asks first; and a tensor whose memory was freed can be printed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import _tensor_str, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import stateless
from torch.utils._pytree import tree_map_only

from shardwise.errors import ConfigError
from shardwise.torch_internals.step import local_of


def count_foreach_writes(is_counted: Callable[[torch.Tensor], bool]) -> None:
    """Makes in-place foreach and fused kernels increment the versions of the DTensors they write to, as others do.

    Only for DTensors for which ``is_counted`` is true. Called once per process.
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


# Returns ``tensor.data``, whatever ``redirect_data`` made of it.
raw_data: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def redirect_data(
    is_redirected: Callable[[torch.Tensor], bool],
    watched_data: Callable[[torch.Tensor], torch.Tensor | None],
) -> None:
    """Makes ``param.data = value`` write to the shards of DTensors that are ``is_redirected``. Called once per process.

    In torch it silently does nothing: it replaces the data of the DTensor's wrapper, which has no elements. Reading
    ``param.data`` gives ``watched_data(param)``, unless that is None.
    """

    def get_data(param: Any) -> torch.Tensor:
        watched = None if torch.compiler.is_compiling() else watched_data(param)
        return raw_data(param) if watched is None else watched

    def set_data(param: Any, value: torch.Tensor) -> None:
        if not is_redirected(param):
            torch.Tensor.data.__set__(param, value)  # type: ignore[attr-defined]
            return
        if value.shape != param.shape or value.dtype != param.dtype:
            raise ConfigError(
                f"a sharded parameter of shape {tuple(param.shape)} and {param.dtype} cannot take data of shape "
                f"{tuple(value.shape)} and {value.dtype}",
                where="param.data = ...",
                fix="assign data of the same shape and dtype; model.to(dtype) changes the dtype of the whole model",
            )
        with torch.no_grad():
            if not isinstance(value, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
            param.copy_(value)

    DTensor.data = property(get_data, set_data)  # type: ignore[assignment]


def on_zero_grad(
    of_optimizer: Callable[[torch.optim.Optimizer, bool], None], of_module: Callable[[nn.Module, bool], None]
) -> None:
    """Calls back after each ``zero_grad`` of an optimizer or module, with its ``set_to_none``. Called once per process.

    torch has no hook for it, and ``zero_grad`` does not see every gradient.
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


def before_functional_call(to_swap: Callable[[nn.Module, Mapping[str, Any]], dict[str, Any]]) -> None:
    """``torch.func.functional_call`` swaps what ``to_swap(module, values)`` gives it. Called once per process."""
    functions: Any = stateless
    functional_call = functions._functional_call

    @wraps(functional_call)
    def checked(module: nn.Module, values: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            needed = to_swap(module, values)
            # ``strict`` compares the names with those of the module.
            values = values if kwargs.get("strict") else needed
        return functional_call(module, values, *args, **kwargs)

    functions._functional_call = checked


@contextmanager
def replaced_functions(module: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Within it, ``module`` has these functions, in all threads: they must do the usual where they have no say."""
    usual = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(module, name, function)


def make_freed_tensors_printable() -> None:
    """Lets tensors without memory, as freed parameters are, be printed without their values. Called once per process.

    Reading them ends the process on a CPU, and the CUDA context on a GPU; debuggers and test reports print what they
    find.
    """
    functions: Any = _tensor_str
    text_of = functions._str

    @wraps(text_of)
    def text_of_any(self: Any, *, tensor_contents: str | None = None) -> str:
        if tensor_contents is None and _is_freed(self):
            tensor_contents = f"<freed>, size={tuple(self.shape)}, dtype={self.dtype}"
        text: str = text_of(self, tensor_contents=tensor_contents)
        return text

    functions._str = text_of_any


def _is_freed(tensor: torch.Tensor) -> bool:
    if (
        type(tensor) not in (torch.Tensor, nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.is_meta
    ):
        return False
    try:
        return tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0
    except (NotImplementedError, RuntimeError):  # without a storage, as inside of torch.func's transforms
        return False
