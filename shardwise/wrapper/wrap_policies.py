"""Policies for ``FullyShardedDataParallel(auto_wrap_policy=...)``: which modules are wrapped.

There are two kinds. A *policy object* gets the whole model (``_run_policy``) and may return options for each module. A
*callable* is asked before a module's children whether to recurse into them (``recurse=True``), and after them whether
to wrap the module (``recurse=False``), with the number of elements in it that are not wrapped yet. torch's own policies
are of these kinds and work too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from shardwise.errors import ConfigTypeError

Chosen = dict[nn.Module, dict[str, Any]]


class ModuleWrapPolicy:
    """Wraps every module of the given classes."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._classes = tuple(module_classes)
        if not all(isinstance(cls, type) for cls in self._classes):
            raise ConfigTypeError(
                f"ModuleWrapPolicy was given {self._classes!r}",
                where="ModuleWrapPolicy",
                fix="pass module classes, e.g. {TransformerBlock}",
            )

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, self._classes)

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> Chosen:
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, self._classes)
        }

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(cls.__name__ for cls in self._classes)}}})"


class CustomPolicy:
    """Wraps modules for which ``lambda_fn`` returns True, or a mapping of options for that module."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> Chosen:
        chosen: Chosen = {}
        for module in root_module.modules():
            if module in ignored_modules:
                continue
            choice = self._lambda_fn(module)
            if not isinstance(choice, (bool, Mapping)):
                raise ConfigTypeError(
                    f"CustomPolicy's function returned {choice!r} for a {type(module).__name__}",
                    where="CustomPolicy",
                    fix="return True, False, or a mapping of options",
                )
            if choice:
                chosen[module] = {**root_kwargs, **(choice if isinstance(choice, Mapping) else {})}
        return chosen


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wraps every module that has a forward."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wraps modules for which ``lambda_fn`` returns True."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Wraps modules of the given classes, a transformer's layers."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wraps modules with at least ``min_num_params`` elements in parameters that are not wrapped yet.

    It does not recurse into ``force_leaf_modules`` (default: ``nn.MultiheadAttention``), and does not wrap
    ``exclude_wrap_modules`` (default: ``nn.ModuleList`` and ``nn.ModuleDict``, which are never called).
    """
    leaves = {nn.MultiheadAttention} if force_leaf_modules is None else force_leaf_modules
    excluded = {nn.ModuleList, nn.ModuleDict} if exclude_wrap_modules is None else exclude_wrap_modules
    is_large = nonwrapped_numel >= min_num_params
    if recurse:
        return is_large and not isinstance(module, tuple(leaves))
    return is_large and not isinstance(module, tuple(excluded))


# The arguments of the innermost ``enable_wrap`` around this code.
_enabled: ContextVar[tuple[Callable[..., nn.Module], dict[str, Any]] | None] = ContextVar(
    "enabled", default=None
)


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """A context manager in which ``wrap(module)`` returns ``wrapper_cls(module, **wrapper_kwargs)``."""
    token = _enabled.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _enabled.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wraps the module as ``enable_wrap`` says, with ``wrap_overrides``; outside it, returns the module unchanged."""
    chosen = _enabled.get()
    if chosen is None:
        return module
    wrapper_cls, options = chosen
    return wrapper_cls(module, **{**options, **wrap_overrides})


def choose(
    root: nn.Module,
    policy: Any,
    ignored: set[nn.Module],
    ignored_params: set[nn.Parameter],
    full_precision: tuple[type[nn.Module], ...],
    where: str,
) -> list[tuple[nn.Module, dict[str, Any]]]:
    """The modules below ``root`` to wrap, inner ones first, each with the options that the policy set for it.

    Modules of the classes ``full_precision`` are wrapped whatever the policy says, without mixed precision.
    """
    if hasattr(policy, "_run_policy"):
        chosen = dict(policy._run_policy(root, ignored, {}))
        chosen.pop(root, None)
    elif callable(policy):
        chosen = {}
        _ask(root, policy, ignored, ignored_params, chosen, is_root=True)
    else:
        raise ConfigTypeError(
            f"auto_wrap_policy is {policy!r}",
            where=where,
            fix="pass ModuleWrapPolicy({Block}), CustomPolicy(fn), or a callable that takes "
            "(module, recurse, nonwrapped_numel)",
        )
    for module in root.modules() if full_precision else ():
        if module is not root and module not in ignored and isinstance(module, full_precision):
            chosen[module] = {**chosen.get(module, {}), "mixed_precision": None}
    if not chosen:
        warnings.warn(
            f"auto_wrap_policy={policy!r} chooses no module of {type(root).__name__}: the whole model is one unit, so "
            f"all of its parameters are gathered at once",
            stacklevel=2,
        )
    depth_first = list(root.modules())
    return [(module, chosen[module]) for module in reversed(depth_first) if module in chosen]


def _ask(
    module: nn.Module,
    policy: Callable[..., bool],
    ignored: set[nn.Module],
    ignored_params: set[nn.Parameter],
    chosen: Chosen,
    is_root: bool = False,
) -> int:
    """Asks the policy about ``module`` and its children; returns how many of its elements the chosen modules have."""
    numel = sum(param.numel() for param in module.parameters() if param not in ignored_params)
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    taken = 0
    for child in module.children():
        if child not in ignored and child not in chosen:
            taken += _ask(child, policy, ignored, ignored_params, chosen)
    if not is_root and policy(module=module, recurse=False, nonwrapped_numel=numel - taken):
        chosen[module] = {}
        return numel
    return taken
