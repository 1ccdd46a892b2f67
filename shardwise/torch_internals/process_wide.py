"""The five changes that shardwise makes to torch for the whole process, each in a function that is called once.

In-place foreach kernels increment the versions of DTensors; ``param.data = value`` writes to shards; ``zero_grad``
calls back; ``functional_call`` asks first; and a tensor whose memory was freed can be printed. What every step then
runs is in ``step``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import _tensor_str, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import stateless

from shardwise.errors import ConfigError
from shardwise.torch_internals.step import counting_writes, telling


def count_foreach_writes(is_counted: Callable[[torch.Tensor], bool]) -> None:
    """Makes in-place foreach and fused kernels increment the versions of the DTensors they write to, as others do.

    Only for DTensors for which ``is_counted`` is true. Called once per process.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for name in dir(torch.ops.aten):
        if name.startswith(("_foreach_", "_fused_")) and name.endswith("_"):
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                handlers.setdefault(getattr(packet, overload), partial(counting_writes, is_counted))


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
    optimizers, modules = cast(Any, torch.optim.Optimizer), cast(Any, nn.Module)
    optimizers.zero_grad = telling(optimizers.zero_grad, of_optimizer)
    modules.zero_grad = telling(modules.zero_grad, of_module)


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
