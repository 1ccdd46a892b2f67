"""``torch.distributed.checkpoint.state_dict``: lets its functions work on wrappers that are not torch's own.

They know torch's FSDP1 by its class, ask that class for optimizer states, and ask its flat parameters for the original
names. None of that can be extended from outside, so the names that the functions look up are replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

_lock = threading.Lock()
_NAMES = ("FSDP", "_get_fqns", "_get_module_fsdp_state_if_fully_sharded_module", "_init_optim_state")


class _EitherWrapper(type):
    """The class of a stand-in for torch's wrapper: instances of both are its instances.

    Its functions are those of the class that the model was wrapped with.
    """

    ours: Any
    torchs: Any

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.ours, cls.torchs))

    def __getattr__(cls, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            model: nn.Module = args[0] if args else kwargs["module"]
            return getattr(cls.ours if cls.ours.fsdp_modules(model) else cls.torchs, name)(*args, **kwargs)

        return call


def serve_state_dict_functions(
    wrapper: type[nn.Module],
    original_names: Callable[[nn.Module, str], list[str] | None],
    alone: Callable[[torch.optim.Optimizer], AbstractContextManager[None]],
) -> None:
    """Makes torch's functions take ``wrapper`` as they take torch's own wrapper.

    ``original_names(model, name)``: the names of the parameters in a flat parameter; None if it is none.
    ``alone(optim)``: a context for the step without gradients with which they make an optimizer's states; only those
    ranks take it whose optimizer has none yet.
    """
    from torch.distributed.checkpoint import state_dict as functions

    names: Any = vars(functions)
    with _lock:
        if isinstance(names["FSDP"], _EitherWrapper):
            return
        torchs, fqns_of, state_of, init_state = (names[name] for name in _NAMES)

        def fqns_of_either(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> set[str]:
            originals = original_names(model, name)
            found = [fqns_of(model, each, *args, **kwargs) for each in originals or (name,)]
            return set().union(*found)

        def state_of_either(module: nn.Module) -> Any:
            return module if isinstance(module, wrapper) else state_of(module)

        def init_state_alone(optim: torch.optim.Optimizer) -> None:
            with alone(optim):
                init_state(optim)

        either = _EitherWrapper("EitherWrapper", (), {"ours": wrapper, "torchs": torchs})
        names.update(zip(_NAMES, (either, fqns_of_either, state_of_either, init_state_alone), strict=True))
