"""The settings of a program: world, mesh, dtypes, precision, optimizer, and which modules become units."""

from __future__ import annotations

from dataclasses import dataclass

from tests.fuzz.dice import Dice
from tests.fuzz.models import Block


@dataclass(frozen=True)
class Settings:
    """The settings of a program; failures shrink towards the defaults."""

    api: str = "fully_shard"  # or "wrapper", "zero"
    world: int = 2
    mesh: tuple[int, ...] = ()  # empty: the default mesh of all ranks
    kind: str = "threads"
    width: int = 4
    rows: int = 3
    dtype: str = "float64"
    param_dtype: str = ""  # of the precision policy
    reduce_dtype: str = ""
    offload: bool = False
    optimizer: str = "sgd"
    # Only for the wrapper.
    strategy: str = "FULL_SHARD"
    use_orig_params: bool = True
    prefetch: str = "BACKWARD_PRE"
    # Only for ZeRO.
    bucket_view: bool = False
    balanced: bool = False

    @property
    def is_hybrid(self) -> bool:
        return self.api == "fully_shard" and len(self.mesh) == 2 and self.mesh[0] > 1


@dataclass(frozen=True)
class UnitCall:
    """One call of `fully_shard`: its modules, and how the unit reshards."""

    paths: tuple[str, ...]
    reshard: bool | int | None = None
    columns: bool = False  # shard along dim 1 if there is one


OPTIMIZERS = {
    "sgd": "torch.optim.SGD({params}, lr=0.125)",
    "momentum": "torch.optim.SGD({params}, lr=0.125, momentum=0.5)",
    "sgd_foreach": "torch.optim.SGD({params}, lr=0.125, foreach=True)",
    "adam": "torch.optim.AdamW({params}, lr=0.03125, eps=0.1)",
    "adam_foreach": "torch.optim.AdamW({params}, lr=0.03125, eps=0.1, foreach=True)",
    "adam_fused": "torch.optim.AdamW({params}, lr=0.03125, eps=0.1, fused=True)",
    "flat_adam": "side.flat(torch.optim.AdamW, {params}, lr=0.03125, eps=0.1)",
    "flat_sgd": "side.flat(torch.optim.SGD, {params}, lr=0.125, momentum=0.5)",
}


# What the other two APIs do not have, or this oracle does not model for them.
_ENGINE_ONLY = frozenset(
    {"columns", "after_gradient", "groups", "unshard", "reshard", "setting", "prefetch", "no_root"}
)
_WRAPPER_ONLY = frozenset({"summon", "local_state"})
_NOT_MODELLED = frozenset({"precision", "flat", "ema"})
NOT_OF_FULLY_SHARD = _WRAPPER_ONLY
NOT_OF_WRAPPERS = _ENGINE_ONLY | _NOT_MODELLED | {"keep_gradients", "assign"}
# What needs parameters under their own names.
NOT_OF_FLAT_PARAMETERS = frozenset({"freeze", "thaw", "freeze_module", "tie_after", "replace", "set_data"})
NOT_OF_ZERO = (
    _ENGINE_ONLY | _WRAPPER_ONLY | _NOT_MODELLED | {"hybrid", "offload", "deepcopy", "no_sync", "clip"}
)


def draw_api(dice: Dice, without: frozenset[str]) -> str:
    apis = [(60, "fully_shard"), (31, "wrapper"), (9, "zero")]
    return dice.weighted([api for api in apis if api[1] not in without])


def draw_settings(dice: Dice, api: str, without: frozenset[str]) -> Settings:
    world = dice.weighted([(10, 1), (55, 2), (15, 3), (20, 4)])
    mesh: tuple[int, ...] = ()
    if "hybrid" not in without and dice.chance(25):
        mesh = {1: (1, 1), 2: dice.pick(((2, 1), (1, 2))), 3: (3, 1), 4: dice.pick(((2, 2), (2, 2), (4, 1)))}[
            world
        ]
    dtype = "float64" if dice.chance(65) else "float32"
    param_dtype = reduce_dtype = ""
    if "precision" not in without and dice.chance(20):
        param_dtype = "float32" if dtype == "float64" and dice.chance(70) else "bfloat16"
        reduce_dtype = dice.pick(("", "float32", dtype))
    strategy = dice.pick(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"))
    if api == "wrapper" and "HYBRID" in strategy and not mesh:
        mesh = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}[world]
    elif api == "wrapper" and "HYBRID" not in strategy:
        mesh = ()
    return Settings(
        api=api,
        world=world,
        mesh=mesh,
        kind="gloo" if "gloo" not in without and dice.chance(2) else "threads",
        width=dice.pick((3, 4, 4, 5, 8)),
        rows=dice.pick((2, 3, 4)),
        dtype=dtype,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        offload="offload" not in without and dice.chance(8),
        optimizer=dice.pick([name for name in OPTIMIZERS if not any(word in name for word in without)]),
        strategy=strategy if api == "wrapper" else "FULL_SHARD",
        use_orig_params=api != "wrapper" or "flat_params" in without or dice.chance(75),
        prefetch=dice.pick(("BACKWARD_PRE", "BACKWARD_POST", "")) if api == "wrapper" else "BACKWARD_PRE",
        bucket_view=api == "zero" and dice.chance(40),
        balanced=api == "zero" and dice.chance(40),
    )


def draw_units(dice: Dice, model: Block, settings: Settings, without: frozenset[str]) -> tuple[UnitCall, ...]:
    """Draws some submodules and mostly the model itself, bottom-up; sometimes two modules as one unit."""
    percent = dice.pick((0, 25, 50, 80, 100))
    found: list[str] = []

    def visit(path: str, block: Block) -> None:
        for child in block.children:
            visit(f"{path}.{child.name}" if path else child.name, child)
        if path and dice.chance(percent):
            found.append(path)

    visit("", model)
    calls: list[UnitCall] = []
    shard_world = settings.mesh[1] if settings.mesh else settings.world
    while found:
        path = found.pop(0)
        paths = [path]
        if "groups" not in without and found and dice.chance(12) and not _nested(path, found[0]):
            paths.append(found.pop(0))
        calls.append(UnitCall(tuple(paths), _draw_reshard(dice, shard_world), _draw_columns(dice, without)))
    if not calls or "no_root" in without or not dice.chance(7):
        calls.append(UnitCall(("",), _draw_reshard(dice, shard_world), _draw_columns(dice, without)))
    return tuple(calls)


def is_fully_sharded(units: tuple[UnitCall, ...]) -> bool:
    """Returns whether every parameter is in a unit. Foreach operations reject a mix of plain and sharded tensors."""
    return any("" in call.paths for call in units)


def _nested(one: str, other: str) -> bool:
    return f"{other}.".startswith(f"{one}.") or f"{one}.".startswith(f"{other}.")


def _draw_columns(dice: Dice, without: frozenset[str]) -> bool:
    return "columns" not in without and dice.chance(8)


def _draw_reshard(dice: Dice, shard_world: int) -> bool | int | None:
    options: list[bool | int | None] = [None, None, True, False]
    if shard_world == 4:
        options += [2]
    return dice.pick(options)
