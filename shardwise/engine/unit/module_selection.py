"""Which modules of a model become units: by class, by size, or by a callable.

    fully_shard(model, wrap=TransformerBlock)
    fully_shard(model, wrap=(Block, nn.Embedding))
    fully_shard(model, wrap=20_000_000)                        # a module whose parameters reach this many elements
    fully_shard(model, wrap=lambda module: isinstance(module, Block) and {"reshard_after_forward": False})
    fully_shard(model, wrap=Block, group_bytes=16 * 2**20)     # small neighbours share a unit

The model itself always becomes a unit, after the modules chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from shardwise.errors import ConfigError, ConfigTypeError

Choice = bool | Mapping[str, Any] | None
Wrap = type[nn.Module] | Iterable[type[nn.Module]] | int | Callable[[nn.Module], Choice]

# What a callable may set for a module it chooses.
OVERRIDES = frozenset(
    ("mesh", "reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy", "dp_mesh_dims")
)


def choose_modules(
    model: nn.Module, wrap: Wrap, ignored: set[nn.Parameter]
) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Returns the modules below ``model`` that become units, inner ones first, each with the keywords it overrides."""
    if isinstance(wrap, bool):
        raise _unknown(wrap)
    if isinstance(wrap, int):
        chosen: list[tuple[nn.Module, dict[str, Any]]] = [
            (module, {}) for module in _by_size(model, wrap, ignored)
        ]
    elif isinstance(wrap, type):
        chosen = _by_choice(model, _is_one_of((wrap,)))
    elif isinstance(wrap, Iterable):
        classes = tuple(wrap)
        if not classes or not all(isinstance(cls, type) for cls in classes):
            raise _unknown(classes)
        chosen = _by_choice(model, _is_one_of(classes))
    elif callable(wrap):
        chosen = _by_choice(model, wrap)
    else:
        raise _unknown(wrap)
    if not chosen:
        raise ConfigError(
            f"wrap={wrap!r} chooses no module of {type(model).__name__}: the whole model would be one unit",
            where=f"fully_shard({type(model).__name__}, wrap=...)",
            fix="name a class that the model contains, a smaller size, or leave wrap out to shard it as one unit",
        )
    return chosen


def join_neighbors(
    model: nn.Module,
    chosen: list[tuple[nn.Module, dict[str, Any]]],
    group_bytes: int,
    ignored: set[nn.Parameter],
) -> list[tuple[tuple[nn.Module, ...], dict[str, Any]]]:
    """Joins chosen modules that follow each other in one parent, as long as their parameters fit into ``group_bytes``.

    Modules with different keywords stay apart. Inner modules come first in the result, too.
    """
    keywords = dict(chosen)
    sizes = _free_bytes([module for module, _ in chosen], ignored)
    group_of: dict[nn.Module, list[nn.Module]] = {}
    for parent in model.modules():
        group: list[nn.Module] = []
        for child in parent.children():
            if child not in keywords or child in group_of:
                continue
            fits = sum(sizes[member] for member in [*group, child]) <= group_bytes
            if not (group and group_bytes and fits and keywords[group[0]] == keywords[child]):
                group = []
            group.append(child)
            group_of[child] = group
    return [(tuple(group), keywords[last]) for last in keywords if (group := group_of[last])[-1] is last]


def _free_bytes(chosen: list[nn.Module], ignored: set[nn.Parameter]) -> dict[nn.Module, int]:
    """Returns the bytes of each module's own parameters; ``chosen`` has inner modules first, which take theirs."""
    taken: set[nn.Parameter] = set(ignored)
    sizes = {}
    for module in chosen:
        free = set(module.parameters()) - taken
        taken |= free
        sizes[module] = sum(param.numel() * param.element_size() for param in free)
    return sizes


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: containers such as ``ModuleList`` are not, so nothing would gather them."""
    # torch.compile's wrappers have their forward on the object, not on the class.
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others. Without a forward, any other may have methods that are used instead."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not has_forward(module)


def _is_one_of(classes: tuple[type, ...]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, classes)


def _by_choice(
    model: nn.Module, choose: Callable[[nn.Module], Choice]
) -> list[tuple[nn.Module, dict[str, Any]]]:
    chosen = []
    for module in _inner_first(model):
        choice = choose(module)
        if not choice and not isinstance(choice, Mapping):
            continue
        overrides = dict(choice) if isinstance(choice, Mapping) else {}
        if unknown := set(overrides) - OVERRIDES:
            raise ConfigError(
                f"wrap returned the keywords {sorted(unknown)} for a {type(module).__name__}",
                where="fully_shard(model, wrap=...)",
                fix=f"return a bool, or a mapping with keys of {sorted(OVERRIDES)}",
            )
        chosen.append((module, overrides))
    return chosen


def _by_size(model: nn.Module, least_numel: int, ignored: set[nn.Parameter]) -> list[nn.Module]:
    if least_numel < 1:
        raise ConfigError(
            f"wrap={least_numel} is not a size",
            where="fully_shard(model, wrap=...)",
            fix="pass the minimum number of elements of a unit, e.g. wrap=10_000_000",
        )
    taken: set[int] = {id(param) for param in ignored}
    chosen = []
    for module in _inner_first(model):
        free = [param for param in module.parameters() if id(param) not in taken]
        if has_forward(module) and sum(param.numel() for param in free) >= least_numel:
            chosen.append(module)
            taken.update(id(param) for param in free)
    return chosen


def _inner_first(model: nn.Module) -> list[nn.Module]:
    """Returns all modules below ``model``, without itself, children before parents."""
    order: list[nn.Module] = []
    seen = {model}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child not in seen:
                seen.add(child)
                visit(child)
                order.append(child)

    visit(model)
    return order


def _unknown(wrap: object) -> ConfigTypeError:
    return ConfigTypeError(
        f"wrap={wrap!r} does not say which modules to shard",
        where="fully_shard(model, wrap=...)",
        fix="pass a module class, several classes, a minimum number of elements, or a callable that takes a module",
    )
