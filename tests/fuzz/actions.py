"""The actions of programs on their models: actions as data, how they are drawn, and their source lines.

An action is a kind and its arguments. `DRAW` makes one that fits the program, or None; `WRITE` returns source lines.
The lines call `side` (see `oracle.py`) where plain and sharded code differ, and are ordinary torch code otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.fuzz.dice import Dice
from tests.fuzz.models import Block, Param, params_of
from tests.fuzz.settings import OPTIMIZERS, Settings, UnitCall


@dataclass(frozen=True)
class Action:
    kind: str
    args: tuple[Any, ...] = ()
    inner: tuple[Action, ...] = ()  # between a step's forward and its backward


@dataclass(frozen=True)
class Step:
    """How a training step is taken; the defaults are the simplest step."""

    syncs: bool = True
    all_reduces: bool = True
    backward: str = "plain"
    input_needs_grad: bool = False
    # The input needs its gradient on one rank only; not where one rank alone would run a backward in which a plain
    # model waits for all: with gradients that ranks hold, or with reentrant checkpoints.
    on_one_rank: bool = False
    fails: str = ""  # the path of a block whose exception is caught inside the model
    clips: bool = False
    steps: bool = True
    zeroes: str = "optim"


@dataclass(frozen=True)
class Context:
    """The model, settings and units that actions are drawn for."""

    model: Block
    settings: Settings
    units: tuple[UnitCall, ...]
    without: frozenset[str]

    def __post_init__(self) -> None:
        blocks = list(self.model.walk())
        object.__setattr__(self, "blocks", blocks)
        object.__setattr__(self, "params", params_of(self.model, self.settings.width))
        object.__setattr__(self, "sharded", [path for call in self.units for path in call.paths])
        object.__setattr__(self, "kinds", {block.kind for _, block in blocks})

    blocks: Any = None
    params: Any = None
    sharded: Any = None
    kinds: Any = None

    def of_kind(self, *kinds: str) -> list[str]:
        return [path for path, block in self.blocks if block.kind in kinds]

    def caught(self) -> list[str]:
        """Returns the paths of raising blocks whose exception is caught inside the model."""
        return [
            f"{path}.{block.children[0].name}" if path else block.children[0].name
            for path, block in self.blocks
            if block.kind == "catching"
        ]

    def uncaught(self) -> list[str]:
        catching = self.of_kind("catching")
        return [
            path for path in self.of_kind("raising") if not any(is_below(path, outer) for outer in catching)
        ]

    def tensor_modules(self) -> list[str]:
        """Returns the paths of modules that take one tensor."""
        return [path for path, block in self.blocks if path and not block.kind.endswith("_inner")]

    def callable_modules(self, *kinds: str) -> list[str]:
        """Returns the modules that can be called by themselves: no unit outside them owns any of their parameters."""
        return [
            path
            for path, block in self.blocks
            if path in self.tensor_modules()
            and (not kinds or block.kind in kinds)
            and all(self._is_own(path, leaf) for leaf in self._leaves(path))
        ]

    def _leaves(self, path: str) -> list[str]:
        return [leaf for leaf, block in self.blocks if is_below(leaf, path) and not block.children]

    def _is_own(self, path: str, leaf: str) -> bool:
        unit = self.unit_of(leaf)
        return unit is None or is_below(unit, path)

    def unit_of(self, path: str) -> str | None:
        """Returns the path of the innermost unit around a module or parameter."""
        return max((unit for unit in self.sharded if is_below(path, unit)), key=len, default=None)


def is_below(path: str, above: str) -> bool:
    return not above or f"{path}.".startswith(f"{above}.")


def at(path: str) -> str:
    """Returns the source expression for a module or parameter of the model."""
    return f"model.{path}" if path else "model"


# --- drawing ----------------------------------------------------------------------------------------------------------

Drawn = Action | None

_ONCE_DIFFERENTIABLE = {"reentrant", "selective", "checkpoint", "recurrent", "attention"}


def draw_step(dice: Dice, context: Context, number: int, holds: bool = False) -> Action:
    """Draws a training step. `holds`: an earlier step has left gradients that are not reduced yet."""
    without = context.without
    backward = "plain"
    if dice.chance(25):
        options = ["retain", "two_losses", "two_backwards", "crossed_backwards"]
        if "reentrant" not in context.kinds:  # torch allows that only in backward()
            options += ["grad_of_input"]
        # Second derivatives in bfloat16 cancel to rounding errors.
        is_coarse = context.settings.param_dtype == "bfloat16"
        if not is_coarse and not context.kinds & _ONCE_DIFFERENTIABLE:
            options += ["create"]
        backward = dice.pick([option for option in options if option not in without])
    fails = ""
    caught = context.caught()
    if caught and "caught_exception" not in without and dice.chance(40):
        fails = dice.pick(caught)
    if holds and "" not in context.sharded:
        # A backward that runs through no unit cannot reduce stashed gradients.
        fails = ""
    inner: list[Action] = []
    if dice.chance(25):
        for _ in range(dice.between(1, 2)):
            kinds = [(weight, kind) for kind, weight in INNER.items() if kind not in without]
            if context.settings.api == "wrapper":
                # Full tensors are available only between steps.
                kinds = [
                    (weight, kind) for weight, kind in kinds if kind not in ("save", "look", "call_part")
                ]
            kind = dice.weighted(kinds)
            if kind == "zero_grad" and ("zero_between" in without or (holds and "zero_held" in without)):
                continue
            action = DRAW[kind](dice, context, number * 10 + len(inner) + 500)
            if action is not None:
                inner.append(action)
    syncs = "no_sync" in without or dice.chance(80)
    all_reduces = not syncs or "no_sync" in without or not context.settings.is_hybrid or dice.chance(80)
    # An optimizer step with stashed gradients is refused; mostly another micro-batch follows.
    is_last = syncs and all_reduces
    keeps = not is_last and "zero_held" in without
    step = Step(
        syncs=syncs,
        all_reduces=all_reduces,
        backward=backward,
        input_needs_grad=dice.chance(25),
        on_one_rank=not holds
        and "reentrant" not in context.kinds
        and "on_one_rank" not in without
        and dice.chance(5),
        fails=fails,
        clips="clip" not in without and is_last and dice.chance(10) and not counts_unused(context),
        steps=is_last and dice.chance(85),
        zeroes=""
        if keeps
        else dice.weighted(
            [
                (70 if is_last else 10, "optim"),
                (8, "optim_zero"),
                (8, "model"),
                (4, "model_zero"),
                (10 if is_last else 70, ""),
            ]
        ),
    )
    return Action("step", (number, step), tuple(inner))


def draw_eval(dice: Dice, context: Context, number: int) -> Drawn:
    modes = [mode for mode in ("no_grad", "inference_mode", "enable_grad") if mode not in context.without]
    return Action("eval", (number, dice.pick(modes)))


def draw_forward_only(dice: Dice, context: Context, number: int) -> Drawn:
    return Action("forward_only", (number,))


def draw_call_part(dice: Dice, context: Context, number: int) -> Drawn:
    paths = context.callable_modules()
    if not paths:
        return None
    return Action("call_part", (number, dice.pick(paths), dice.pick(("backward", "forward", "no_grad"))))


def draw_fail_part(dice: Dice, context: Context, number: int) -> Drawn:
    paths = context.callable_modules("linear", "no_bias", "mlp")
    return Action("fail_part", (number, dice.pick(paths), dice.chance(30))) if paths else None


def draw_fail_forward(dice: Dice, context: Context, number: int) -> Drawn:
    paths = context.uncaught()
    return Action("fail_forward", (number, dice.pick(paths))) if paths else None


def draw_fail_backward(dice: Dice, context: Context, number: int) -> Drawn:
    paths = context.of_kind("raising")
    return Action("fail_backward", (number, dice.pick(paths))) if paths else None


def draw_fail_hook(dice: Dice, context: Context, number: int) -> Drawn:
    paths = context.tensor_modules()
    if not paths:
        return None
    when = dice.pick(("register_forward_hook", "register_forward_pre_hook"))
    return Action("fail_hook", (number, dice.pick(paths), when))


def draw_freeze(dice: Dice, context: Context, number: int) -> Drawn:
    params: list[Param] = context.params
    return Action("freeze", (dice.pick(params).path,)) if params else None


def draw_thaw(dice: Dice, context: Context, number: int) -> Drawn:
    params: list[Param] = context.params
    return Action("thaw", (dice.pick(params).path,)) if params else None


def draw_freeze_module(dice: Dice, context: Context, number: int) -> Drawn:
    paths = [path for path, _ in context.blocks]
    return Action("freeze_module", (dice.pick(paths), dice.chance(50)))


def draw_tie(dice: Dice, context: Context, number: int) -> Drawn:
    # Of a module that does not run, nobody notices the tie: while the other unit is gathered, the name shows the shard.
    skipped = context.of_kind("catching", "either", "unused")
    pair = draw_pair(dice, context, skipped)
    return None if pair is None else Action("tie", (*pair, dice.chance(75)))


def draw_pair(dice: Dice, context: Context, without: Sequence[str] = ()) -> tuple[str, str] | None:
    """Draws two parameters that can be tied, none of them below the paths of ``without``."""
    params: list[Param] = [
        param
        for param in context.params
        if param.path.split(".")[-1] in ("weight", "bias")
        and not any(is_below(param.path, path) for path in without)
    ]
    pairs = [
        (one.path, other.path)
        for index, one in enumerate(params)
        for other in params[index + 1 :]
        if one.shape == other.shape and one.single == other.single and len(one.shape) == 2
    ]
    apart = [pair for pair in pairs if context.unit_of(pair[0]) != context.unit_of(pair[1])]
    if apart and dice.chance(60):
        pairs = apart
    return dice.pick(pairs) if pairs else None


def draw_replace(dice: Dice, context: Context, number: int) -> Drawn:
    params: list[Param] = context.params
    return Action("replace", (dice.pick(params).path, dice.chance(75))) if params else None


def draw_zero_grad(dice: Dice, context: Context, number: int) -> Drawn:
    return Action("zero_grad", (dice.pick(("model", "optim")), dice.chance(50)))


def draw_unshard(dice: Dice, context: Context, number: int) -> Drawn:
    return Action("unshard", (dice.pick(context.sharded),))


def draw_reshard(dice: Dice, context: Context, number: int) -> Drawn:
    return Action("reshard", (dice.pick(context.sharded),))


def draw_setting(dice: Dice, context: Context, number: int) -> Drawn:
    setter = dice.pick(("set_reshard_after_forward", "set_reshard_after_backward", "set_is_last_backward"))
    return Action("setting", (dice.pick(context.sharded), setter, dice.chance(50)))


def draw_prefetch(dice: Dice, context: Context, number: int) -> Drawn:
    setter = dice.pick(("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"))
    return Action("prefetch", (dice.pick(context.sharded), setter, tuple(dice.some(context.sharded, 30))))


def draw_switch(dice: Dice, context: Context, number: int) -> Drawn:
    paths = context.of_kind("either")
    return Action("switch", (dice.pick(paths),)) if paths else None


def draw_hook(dice: Dice, context: Context, number: int) -> Drawn:
    paths = context.tensor_modules()
    if not paths:
        return None
    hook = dice.pick(("forward", "forward_scales", "forward_pre", "backward", "backward_pre"))
    return Action("hook", (dice.pick(paths), hook))


def draw_save(dice: Dice, context: Context, number: int) -> Drawn:
    ways = ["", "", "_by_torch"] + ["_sharded"] * (context.settings.api == "wrapper")
    return Action("save", (dice.pick(ways),))


def saved_parts(context: Context) -> list[str]:
    """Returns the modules that have a state dict of their own: of a wrapped model, only the wrappers."""
    if context.settings.api == "wrapper":
        return [path for path in context.sharded if path]
    return [path for path, _ in context.blocks if path]


def draw_save_part(dice: Dice, context: Context, number: int) -> Drawn:
    paths = saved_parts(context)
    return Action("save_part", (number, dice.pick(paths))) if paths else None


def draw_load_part(dice: Dice, context: Context, number: int) -> Drawn:
    paths = saved_parts(context)
    return Action("load_part", (dice.pick(paths),)) if paths else None


def draw_local_state(dice: Dice, context: Context, number: int) -> Drawn:
    return Action("local_state")


def draw_summon(dice: Dice, context: Context, number: int) -> Drawn:
    around = dice.pick(context.sharded) if dice.chance(30) else ""
    params: list[Param] = [param for param in context.params if is_below(param.path, around)]
    if not params:
        return None
    what = dice.weighted([(4, "scale"), (2, "data"), (3, "freeze"), (1, "thaw"), (5, "tie")])
    if what == "tie":
        pair = draw_pair(dice, context, context.of_kind("catching", "either", "unused"))
        return None if pair is None else Action("summon", ("", what, *pair))
    return Action("summon", (around, what, around if what == "scale" else dice.pick(params).path))


def draw_apply(dice: Dice, context: Context, number: int) -> Drawn:
    paths = context.sharded if context.settings.api == "wrapper" else [path for path, _ in context.blocks]
    return Action("apply", (dice.pick(paths),))


def draw_convert(dice: Dice, context: Context, number: int) -> Drawn:
    return Action("convert", (dice.pick([path for path, _ in context.blocks]),))


def draw_clip(dice: Dice, context: Context, number: int) -> Drawn:
    return None if counts_unused(context) else Action("clip", (number,))


def counts_unused(context: Context) -> bool:
    # A wrapper cannot tell that a parameter was used on no rank from one that has no elements here: its dtype counts.
    return context.settings.api == "wrapper" and "single" in context.kinds


def draw_load(dice: Dice, context: Context, number: int) -> Drawn:
    ways = [way for way in ("", "assign", "whole") if way not in context.without]
    return Action("load", (dice.pick(ways),))


def draw_optimizer(dice: Dice, context: Context, number: int) -> Drawn:
    return Action("optimizer", (dice.pick([name for name in OPTIMIZERS if not _is_without(name, context)]),))


def draw_reload(dice: Dice, context: Context, number: int) -> Drawn:
    return Action("reload_optimizer")


def draw_scale(dice: Dice, context: Context, number: int) -> Drawn:
    return Action("scale", (dice.pick((0.5, 1.5)),))


def draw_scale_data(dice: Dice, context: Context, number: int) -> Drawn:
    return Action("scale_data", (number, dice.pick((0.5, 1.5)), dice.chance(50)))


def draw_write_between(dice: Dice, context: Context, number: int) -> Drawn:
    # No fused optimizer: its kernels do not tell autograd which plain tensors they write to.
    ways = ["scale", "load"]
    if context.settings.api != "zero":
        ways += ["sgd", "momentum", "sgd_foreach"]
    return Action(
        "write_between", (number, dice.pick([way for way in ways if not _is_without(way, context)]))
    )


def _is_without(name: str, context: Context) -> bool:
    return any(word in name for word in context.without)


def draw_after_gradient(dice: Dice, context: Context, number: int) -> Drawn:
    params: list[Param] = context.params
    return Action("after_gradient", (dice.pick(params).path,)) if params else None


def draw_set_data(dice: Dice, context: Context, number: int) -> Drawn:
    params: list[Param] = context.params
    return Action("set_data", (dice.pick(params).path,)) if params else None


def draw_scale_gradients(dice: Dice, context: Context, number: int) -> Drawn:
    return Action("scale_gradients", (0.5,))


def draw_keep_gradients(dice: Dice, context: Context, number: int) -> Drawn:
    return Action("keep_gradients", (number, dice.pick(("model", "optim"))))


# Kinds that torch.func can differentiate: no hooks, no checkpointing, no writes to buffers.
_PURE = {
    "linear",
    "no_bias",
    "mlp",
    "norm",
    "pair",
    "residual",
    "both",
    "either",
    "twice",
    "bare",
    "embedding",
}


def draw_func(dice: Dice, context: Context, number: int) -> Drawn:
    if context.kinds - _PURE:
        return None
    # Forward-mode differentiation has one level per process, which ranks that are threads would share.
    return Action(
        "func", (number, dice.pick(("grad", "jvp") if context.settings.kind == "gloo" else ("grad",)))
    )


def draw_ema(dice: Dice, context: Context, number: int) -> Drawn:
    return Action("ema", (number,))


def draw_deepcopy(dice: Dice, context: Context, number: int) -> Drawn:
    return Action("deepcopy")


def draw_look(dice: Dice, context: Context, number: int) -> Drawn:
    return Action("look", (number,))


DRAW: dict[str, Callable[[Dice, Context, int], Drawn]] = {
    "eval": draw_eval,
    "forward_only": draw_forward_only,
    "call_part": draw_call_part,
    "fail_part": draw_fail_part,
    "fail_forward": draw_fail_forward,
    "fail_backward": draw_fail_backward,
    "fail_hook": draw_fail_hook,
    "freeze": draw_freeze,
    "thaw": draw_thaw,
    "freeze_module": draw_freeze_module,
    "tie_after": draw_tie,
    "replace": draw_replace,
    "zero_grad": draw_zero_grad,
    "unshard": draw_unshard,
    "reshard": draw_reshard,
    "setting": draw_setting,
    "prefetch": draw_prefetch,
    "switch": draw_switch,
    "hook": draw_hook,
    "save": draw_save,
    "save_part": draw_save_part,
    "load": draw_load,
    "load_part": draw_load_part,
    "local_state": draw_local_state,
    "summon": draw_summon,
    "apply": draw_apply,
    "convert": draw_convert,
    "clip": draw_clip,
    "optimizer": draw_optimizer,
    "ema": draw_ema,
    "reload_optimizer": draw_reload,
    "scale": draw_scale,
    "scale_data": draw_scale_data,
    "write_between": draw_write_between,
    "after_gradient": draw_after_gradient,
    "set_data": draw_set_data,
    "scale_gradients": draw_scale_gradients,
    "keep_gradients": draw_keep_gradients,
    "func": draw_func,
    "deepcopy": draw_deepcopy,
    "look": draw_look,
}

# The weight of each kind between steps.
OUTER = {
    "eval": 10,
    "forward_only": 5,
    "call_part": 8,
    "fail_part": 4,
    "fail_forward": 4,
    "fail_backward": 3,
    "fail_hook": 4,
    "freeze": 6,
    "thaw": 4,
    "freeze_module": 4,
    "tie_after": 12,
    "replace": 6,
    "zero_grad": 4,
    "unshard": 5,
    "reshard": 4,
    "setting": 5,
    "prefetch": 4,
    "switch": 6,
    "hook": 8,
    "save": 4,
    "load": 5,
    "optimizer": 4,
    "ema": 3,
    "reload_optimizer": 4,
    "scale": 4,
    "scale_data": 4,
    "write_between": 5,
    "after_gradient": 4,
    "set_data": 1,
    "scale_gradients": 3,
    "keep_gradients": 3,
    "func": 3,
    "deepcopy": 1,
    "look": 2,
    "save_part": 2,
    "load_part": 2,
    "local_state": 2,
    "summon": 6,
    "apply": 2,
    "convert": 2,
    "clip": 1,
}

# What changes which parameters a model has, or what becomes of them.
CHANGES = {
    "tie_after": 14,
    "replace": 6,
    "freeze": 6,
    "thaw": 4,
    "freeze_module": 4,
    "set_data": 2,
    "summon": 6,
}

# What a program may do before its first forward, and directly after such a change: it must see the change.
ENTRIES = {
    "save": 8,
    "save_part": 8,
    "load": 8,
    "load_part": 6,
    "local_state": 3,
    "summon": 4,
    "apply": 4,
    "convert": 4,
    "clip": 4,
    "look": 4,
    "reload_optimizer": 5,
    "optimizer": 3,
    "zero_grad": 4,
    "scale": 4,
    "scale_gradients": 2,
    "eval": 4,
    "call_part": 5,
    "fail_part": 1,
    "unshard": 4,
    "reshard": 3,
    "setting": 2,
    "deepcopy": 1,
}

# The weight of each kind between a step's forward and its backward.
INNER = {
    "eval": 6,
    "forward_only": 6,
    "call_part": 4,
    "zero_grad": 8,
    "unshard": 4,
    "reshard": 4,
    "save": 2,
    "look": 2,
}


# --- writing ----------------------------------------------------------------------------------------------------------


def batch(context: Context, number: int) -> str:
    return f"side.batch({number}, {context.settings.rows}, {context.settings.width})"


def write_step(context: Context, number: int, step: Step, inner: list[str]) -> list[str]:
    lines = []
    if not step.syncs:
        lines.append("side.sync(model, False)")
    if not step.all_reduces:
        lines.append("side.all_reduce(model, False)")
    if step.fails:
        lines.append(write_set(context, step.fails, "fails", "True"))
    lines.append(f"x = {batch(context, number)}")
    if step.backward in ("create", "grad_of_input"):
        lines.append("x.requires_grad_()")
    elif step.input_needs_grad:
        lines.append(f"x.requires_grad_({'side.rank == 0' if step.on_one_rank else ''})")
    lines.append("loss = model(x).square().mean()")
    lines.append(f'side.note("loss {number}", loss)')
    if step.backward in ("two_losses", "two_backwards", "crossed_backwards"):
        lines.append(f"other = model({batch(context, number + 1000)}).square().mean()")
    if step.fails:
        lines.append(write_set(context, step.fails, "fails", "False"))
    lines += inner
    lines += {
        "plain": ["side.backward(loss)"],
        "retain": ["side.backward(loss, retain_graph=True)", "side.backward(loss)"],
        "two_losses": ["side.backward(loss + other)"],
        "two_backwards": ["side.backward(loss)", "side.backward(other)"],
        "crossed_backwards": ["side.backward(other)", "side.backward(loss)"],
        "grad_of_input": [
            "(slope,) = torch.autograd.grad(loss, x, retain_graph=True, allow_unused=True)",
            f'side.note("slope {number}", slope)',
            "side.backward(loss)",
        ],
        "create": [
            "(slope,) = torch.autograd.grad(loss, x, create_graph=True)",
            "side.backward(loss + slope.square().sum())",
        ],
    }[step.backward]
    if step.input_needs_grad:
        lines.append(f'side.note("gradient of input {number}", x.grad)')
    if not step.syncs:
        lines.append("side.sync(model, True)")
    if not step.all_reduces:
        lines.append("side.all_reduce(model, True)")
    if step.clips:
        lines.append(f'side.note("norm {number}", side.clip(model, 0.5))')
    lines.append(f'side.look("step {number}")')
    if step.steps:
        lines.append("optim.step()")
    lines += {
        "optim": ["side.zero_grad(optim)"],
        "optim_zero": ["side.zero_grad(optim, set_to_none=False)"],
        "model": ["side.zero_grad(model)"],
        "model_zero": ["side.zero_grad(model, set_to_none=False)"],
        "": [],
    }[step.zeroes]
    return lines


def write(action: Action, context: Context) -> list[str]:
    """Returns the source lines of an action."""
    args = action.args
    if action.kind == "step":
        inner = [line for each in action.inner for line in write(each, context)]
        return write_step(context, args[0], args[1], inner)
    return WRITE[action.kind](context, *args)


def write_eval(context: Context, number: int, mode: str) -> list[str]:
    return [
        "model.eval()",
        f"with torch.{mode}():",
        f'    side.note("eval {number}", model({batch(context, number)}))',
        "model.train()",
    ]


def write_call_part(context: Context, number: int, path: str, how: str) -> list[str]:
    call = f"{at(path)}({batch(context, number)})"
    if how == "no_grad":
        return ["with torch.no_grad():", f'    side.note("part {number}", {call})']
    lines = [f"part = {call}", f'side.note("part {number}", part)']
    if how == "backward":
        lines += [
            "if part.requires_grad:",
            "    side.backward(part.square().mean())",
            f'side.look("part {number}")',
        ]
    return lines


def write_fail_part(context: Context, number: int, path: str, without_grad: bool) -> list[str]:
    lines = [f'with side.catch("part {number}"){", torch.no_grad()" if without_grad else ""}:']
    return [*lines, f"    {at(path)}({batch(context, number)}[:, 1:])"]


def write_fail_forward(context: Context, number: int, path: str) -> list[str]:
    return [
        write_set(context, path, "fails", "True"),
        f'with side.catch("forward {number}"):',
        f"    model({batch(context, number)})",
        write_set(context, path, "fails", "False"),
    ]


def write_fail_backward(context: Context, number: int, path: str) -> list[str]:
    return [
        write_set(context, path, "fails_in_backward", "True"),
        f"loss = model({batch(context, number)}).square().mean()",
        write_set(context, path, "fails_in_backward", "False"),
        f'with side.catch("backward {number}"):',
        "    side.backward(loss)",
        "side.zero_grad(model)",
    ]


def write_fail_hook(context: Context, number: int, path: str, when: str) -> list[str]:
    return [
        f"handle = {inside(context, path)}.{when}(raise_oops)",
        f'with side.catch("hook {number}"):',
        f"    model({batch(context, number)})",
        "handle.remove()",
    ]


def optimizer(context: Context, name: str) -> str:
    made = OPTIMIZERS[name].format(params="model.parameters()")
    if context.settings.api == "zero":
        made = f"side.zero({made.replace('(', ', ', 1)}"
    return made


def write_optimizer(context: Context, name: str) -> list[str]:
    return [f"optim = {optimizer(context, name)}"]


def inside(context: Context, path: str) -> str:
    """Returns the expression for a module itself, not for a wrapper around it."""
    return f"side.inside({at(path)})" if context.settings.api == "wrapper" else at(path)


def write_set(context: Context, path: str, name: str, value: str) -> str:
    """Returns the line that sets an attribute of a module: set on a wrapper, it would not reach the module."""
    return f"{inside(context, path)}.{name} = {value}"


def write_hook(context: Context, path: str, hook: str) -> list[str]:
    what = f"{hook} of {path}"
    return {
        "forward": [
            f'{inside(context, path)}.register_forward_hook(lambda m, args, out: side.note("{what}", out))'
        ],
        "forward_scales": [f"{inside(context, path)}.register_forward_hook(lambda m, args, out: out * 0.5)"],
        "forward_pre": [
            f'{inside(context, path)}.register_forward_pre_hook(lambda m, args: side.note("{what}", args))'
        ],
        "backward": [
            f'{inside(context, path)}.register_full_backward_hook(lambda m, into, out: side.note("{what}", out))'
        ],
        "backward_pre": [
            f'{inside(context, path)}.register_full_backward_pre_hook(lambda m, out: side.note("{what}", out))'
        ],
    }[hook]


def write_load(context: Context, how: str) -> list[str]:
    if how == "assign":
        return [
            "model.load_state_dict({name: value.clone() for name, value in saved.items()}, assign=True)",
            *write_optimizer(context, context.settings.optimizer),
        ]
    if how == "whole":
        return ["model.load_state_dict({name: side.whole(value) for name, value in saved.items()})"]
    return ["model.load_state_dict(saved)"]


def write_ema(context: Context, number: int) -> list[str]:
    # A moving average of the model, updated by foreach operations on its parameters.
    return [
        "side.reshard(model)",
        "with torch.no_grad():",
        "    torch._foreach_mul_(list(teacher.parameters()), 0.5)",
        "    torch._foreach_add_(list(teacher.parameters()), list(model.parameters()), alpha=0.5)",
        f'    side.note("teacher {number}", teacher({batch(context, number)}))',
    ]


def write_keep_gradients(context: Context, number: int, target: str) -> list[str]:
    # Gradients that a user keeps must keep their values.
    return [
        "side.reshard(model)",
        "kept = side.gradients(model)",
        f"side.zero_grad({target})",
        "side.zero_grad(model)",  # the optimizer may not have all of its parameters
        f"side.backward(model({batch(context, number)}).square().mean())",
        f'side.note("kept {number}", kept)',
    ]


def write_func(context: Context, number: int, transform: str) -> list[str]:
    call = {
        "grad": "torch.func.grad(lambda x: model(x).square().mean())(x)",
        "jvp": "torch.func.jvp(model, (x,), (torch.ones_like(x),))",
    }[transform]
    return [f"x = {batch(context, number)}", f'side.note("{transform} {number}", {call})']


def write_scale_data(context: Context, number: int, factor: float, in_place: bool) -> list[str]:
    # No version tells of writes to the data of plain tensors. Here they follow an evaluation, which may keep weights.
    change = f"param.data.mul_({factor})" if in_place else f"param.data = param.data * {factor}"
    return [
        *write_eval(context, number, "no_grad"),
        "side.reshard(model)",
        "for param in model.parameters():",
        f"    {change}",
    ]


def write_write_between(context: Context, number: int, how: str) -> list[str]:
    # autograd refuses a backward that needs values of before the write, and allows one that does not.
    lines = [f"loss = model({batch(context, number)}).square().mean()"]
    if how == "load":
        lines.insert(0, "before = side.save(model)")
        lines.append("model.load_state_dict(before)")
    elif how == "scale":
        lines.append("side.scale(model, 0.5)")
    else:
        lines = ["side.reshard(model)", f"stepped = {optimizer(context, how)}", *lines]
        lines.append(f"side.backward(model({batch(context, number + 1000)}).square().mean())")
        lines += ["stepped.step()", "side.zero_grad(stepped)"]
    lines += [f'with side.catch("late backward {number}"):', "    side.backward(loss)"]
    return [*lines, "side.zero_grad(model)"]


def rebuilt(lines: list[str], context: Context, is_wanted: bool = True) -> list[str]:
    """Appends the lines that build a new optimizer over the current shards, if that is wanted."""
    if not is_wanted:
        return lines
    return [*lines, "side.reshard(model)", *write_optimizer(context, context.settings.optimizer)]


def write_tie(context: Context, one: str, other: str, is_rebuilt: bool = True) -> list[str]:
    module, _, name = other.rpartition(".")
    return rebuilt([write_set(context, module, name, at(one))], context, is_rebuilt)


def write_replace(context: Context, path: str, is_rebuilt: bool = True) -> list[str]:
    module, _, name = path.rpartition(".")
    made = f"nn.Parameter({at(path)}.detach() * 0.5)"
    return rebuilt([write_set(context, module, name, made)], context, is_rebuilt)


def write_load_part(context: Context, path: str) -> list[str]:
    return [f"part = side.save({at(path)})", "side.scale(model, 0.5)", f"{at(path)}.load_state_dict(part)"]


def write_save_part(context: Context, number: int, path: str) -> list[str]:
    return [f'side.note("part {number} saved", side.save({at(path)}))']


def write_summon(context: Context, around: str, what: str, *paths: str) -> list[str]:
    change = {
        "scale": lambda path: [
            "with torch.no_grad():",
            f"    for param in {at(path)}.parameters():",
            "        param.mul_(0.5)",
        ],
        "data": lambda path: [f"{at(path)}.data = {at(path)}.data * 0.5"],
        "freeze": lambda path: [f"{at(path)}.requires_grad_(False)"],
        "thaw": lambda path: [f"{at(path)}.requires_grad_(True)"],
        "tie": lambda one, other: write_tie(context, one, other, False),
    }[what](*paths)
    lines = [f"with side.full({at(around)}):", *(f"    {line}" for line in change)]
    return rebuilt(lines, context, what == "tie")


def write_apply(context: Context, path: str) -> list[str]:
    return [
        "def halve(module):",
        "    with torch.no_grad():",
        "        for param in module.parameters(recurse=False):",
        "            param.mul_(0.5)",
        f"{at(path)}.apply(halve)",
    ]


WRITE: dict[str, Callable[..., list[str]]] = {
    "eval": write_eval,
    "forward_only": lambda context, number: [f"model({batch(context, number)})"],
    "call_part": write_call_part,
    "fail_part": write_fail_part,
    "fail_forward": write_fail_forward,
    "fail_backward": write_fail_backward,
    "fail_hook": write_fail_hook,
    "freeze": lambda context, path: [f"{at(path)}.requires_grad_(False)"],
    "thaw": lambda context, path: [f"{at(path)}.requires_grad_(True)"],
    "freeze_module": lambda context, path, on: [f"{at(path)}.requires_grad_({on})"],
    "tie": write_tie,
    "replace": write_replace,
    "zero_grad": lambda context, target, to_none: [f"side.zero_grad({target}, set_to_none={to_none})"],
    "unshard": lambda context, path: [f'side.call({at(path)}, "unshard")'],
    "reshard": lambda context, path: [f'side.call({at(path)}, "reshard")'],
    "setting": lambda context, path, setter, on: [f'side.call({at(path)}, "{setter}", {on})'],
    "prefetch": lambda context, path, setter, others: [
        f'side.call({at(path)}, "{setter}", [{", ".join(at(other) for other in others)}])'
    ],
    "switch": lambda context, path: [write_set(context, path, "first", f"not {at(path)}.first")],
    "hook": write_hook,
    "save": lambda context, how: [f"saved = side.save{how}(model)", 'side.note("saved", saved)'],
    "save_part": write_save_part,
    "load_part": write_load_part,
    "local_state": lambda context: ["side.pass_local_state(model)"],
    "summon": write_summon,
    "apply": write_apply,
    "convert": lambda context, path: [f"{at(path)}.cpu()"],
    "clip": lambda context, number: [f'side.note("norm {number}", side.clip(model, 0.5))'],
    "load": write_load,
    "optimizer": lambda context, name: ["side.reshard(model)", *write_optimizer(context, name)],
    "ema": write_ema,
    "reload_optimizer": lambda context: ["optim = side.reload(optim)"],
    "after_gradient": lambda context, path: [
        "side.reshard(model)",
        f'side.after_gradient({at(path)}, "{path}")',
    ],
    "set_data": lambda context, path: [f"{at(path)}.data = {at(path)}.data * 0.5"],
    "scale_gradients": lambda context, factor: [
        "side.reshard(model)",
        f"side.scale_gradients(model, {factor})",
    ],
    "keep_gradients": write_keep_gradients,
    "func": write_func,
    "scale": lambda context, factor: [f"side.scale(model, {factor})"],
    "scale_data": write_scale_data,
    "write_between": write_write_between,
    "deepcopy": lambda context: ["side.deepcopy(model)"],
    "look": lambda context, number: [f'side.look("look {number}")'],
}
