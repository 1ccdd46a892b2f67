"""Draws a whole program from a seed, as data, and writes it as source, which then runs. This file needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.fuzz import actions
from tests.fuzz.actions import Action, Context, Step, at
from tests.fuzz.dice import Dice
from tests.fuzz.models import Architect, Block, written
from tests.fuzz.settings import (
    NOT_OF_FLAT_PARAMETERS,
    NOT_OF_FULLY_SHARD,
    NOT_OF_WRAPPERS,
    NOT_OF_ZERO,
    Settings,
    UnitCall,
    draw_api,
    draw_settings,
    draw_units,
    is_fully_sharded,
)


@dataclass(frozen=True)
class Program:
    seed: int
    settings: Settings
    model: Block
    units: tuple[UnitCall, ...]
    ties: tuple[tuple[str, str], ...] = ()
    frozen: tuple[str, ...] = ()
    actions: tuple[Action, ...] = ()

    @property
    def differs_by_rank(self) -> bool:
        """Whether ranks do different things, which may be refused on all of them."""
        return any(action.kind == "step" and action.args[1].on_one_rank for action in self.actions)

    def context(self, without: frozenset[str] = frozenset()) -> Context:
        return Context(self.model, self.settings, self.units, without)


def draw(seed: int, without: frozenset[str] = frozenset()) -> Program:
    """Returns the program of a seed; `without` excludes features."""
    dice = Dice(seed)
    api = draw_api(dice.split(0), without)
    without = (
        without | {"fully_shard": NOT_OF_FULLY_SHARD, "wrapper": NOT_OF_WRAPPERS, "zero": NOT_OF_ZERO}[api]
    )
    settings = draw_settings(dice.split(1), api, without)
    if not settings.use_orig_params:
        without = without | NOT_OF_FLAT_PARAMETERS
    if settings.param_dtype:
        # The oracle casts a unit's parameters around its call. It does not model recomputation, state of another dtype,
        # or a list whose tensors are cast for the module but not for its caller.
        without = without | {"checkpoint", "recurrent", "batch_norm", "buffer", "appended"}
        # Its casts keep the values of before a write, which a unit's parameters of another dtype do not.
        without = without | {"write_between"}
    if settings.rows == 2:
        # Of two rows, a batch norm leaves the sign of their difference: gradients before it are rounding errors.
        without = without | {"batch_norm"}
    if settings.param_dtype == "bfloat16":
        # Rounding is too coarse to bound the effect of adding in another order: exclude what changes the order.
        without = without | {"twice", "attention", "tie_before", "tie_after"}
    model = Architect(dice.split(2), without, settings.dtype == "float64" and not settings.param_dtype).draw()
    units = draw_units(dice.split(3), model, settings, without)
    if api == "zero":
        units = (UnitCall(("",)),)
    if not is_fully_sharded(units):
        # Each outermost unit then is a root of its own: stashed gradients are reduced when that unit runs again.
        without = without | {
            "foreach",
            "fused",
            "flat",
            "ema",
            "clip",
            "no_sync",
            "tie_after",
            "after_gradient",
        }
        if any(word in settings.optimizer for word in without):
            settings = replace(settings, optimizer="momentum")
    context = Context(model, settings, units, without)
    ties: list[tuple[str, str]] = []
    rest = dice.split(4)
    if "tie_before" not in without and is_fully_sharded(units) and rest.chance(15):
        pair = actions.draw_pair(rest, context)
        if pair is not None:
            ties.append(pair)
    frozen = rest.some([param.path for param in context.params], 50) if rest.chance(15) else []
    return Program(
        seed, settings, model, units, tuple(ties), tuple(frozen), tuple(draw_actions(dice.split(5), context))
    )


def draw_actions(dice: Dice, context: Context) -> list[Action]:
    drawn: list[Action] = []
    saved = holds = hooked = False
    count = dice.between(2, 9)
    # Programs save, load or tie just after set-up, too, when no unit has run yet.
    early = dice.between(1, 4) if dice.chance(50) else 0
    for number in range(early + count):
        if number >= early and dice.chance(45):
            drawn.append(actions.draw_step(dice, context, number, holds))
            saved = saved or any(each.kind == "save" for each in drawn[-1].inner)
            step = drawn[-1].args[1]
            holds = not (step.syncs and step.all_reduces)
            continue
        weights = actions.OUTER
        if number < early:
            weights = actions.CHANGES if dice.chance(45) else actions.ENTRIES
        elif drawn and drawn[-1].kind.replace("tie", "tie_after") in actions.CHANGES and dice.chance(50):
            weights = actions.ENTRIES
        kinds = [(weight, kind) for kind, weight in weights.items() if kind not in context.without]
        kind = dice.weighted(kinds)
        if holds and f"{kind}_held".replace("zero_grad", "zero") in context.without:
            continue
        if kind == "load" and not saved:
            kind = "save"
        saved = saved or kind == "save"
        if kind in ("set_data", "scale_data") and any(
            each.kind in ("replace", "load", "load_part", "tie", "convert") for each in drawn
        ):
            continue  # the parameter may now be a user's DTensor, whose data torch itself does not set
        if kind == "func" and (hooked or holds):
            continue  # hooks would note a transform's tensors; whether it syncs stashed gradients is unspecified
        if kind == "clip" and holds:
            continue
        hooked = hooked or kind == "hook"
        action = actions.DRAW[kind](dice, context, number)
        if action is not None and action.kind == "replace" and _steps_flat(context, drawn):
            # Flat optimizers go on with parameters that replaced theirs, others do not.
            action = replace(action, args=(*action.args[:-1], True))
        if action is not None:
            drawn.append(action)
    # The effects of an action show in the steps after it.
    drawn += [Action("step", (100 + number, Step())) for number in range(2)]
    return drawn


def _steps_flat(context: Context, drawn: list[Action]) -> bool:
    names = [context.settings.optimizer, *(each.args[0] for each in drawn if each.kind == "optimizer")]
    return any("flat" in name for name in names)


def source(program: Program) -> str:
    """Returns the program as a test: classes, a function of a side, and a call that compares."""
    context = program.context()
    settings = program.settings
    make = [f"model = side.build(Model, torch.{settings.dtype})"]
    make += [f"{at(path)}.float()" for path, block in context.blocks if block.single]
    make += [f"{at(other)} = {at(one)}" for one, other in program.ties]
    make += [f"{at(path)}.requires_grad_(False)" for path in program.frozen]
    for call in program.units:
        options = "" if call.reshard is None else f", reshard_after_forward={call.reshard}"
        options += ", columns=True" if call.columns else ""
        options = "" if settings.api != "fully_shard" else options
        into = f"{at(call.paths[0])} = " if settings.api == "wrapper" else ""
        make.append(f"{into}side.shard({', '.join(at(path) for path in call.paths)}{options})")
    make.append("return model")
    lines = ["model = make(side)", "side.ready(model)"]
    if any(action.kind == "ema" for action in program.actions):
        lines.append("teacher = make(side)")
    lines += actions.write_optimizer(context, settings.optimizer)
    for action in program.actions:
        lines += actions.write(action, context)
    lines += ["side.finish()", 'side.look("at the end")']
    body = "\n".join(f"    {line}" for line in lines)
    classes = written(program.model, settings.width)
    if "raise_oops" in body and "raise_oops" not in classes:
        from tests.fuzz.models import SUPPORT

        classes = SUPPORT["Oops"] + "\n" + classes
    made = "\n".join(f"    {line}" for line in make)
    text = f"{classes.strip()}\n\n\ndef make(side):\n{made}\n\n\ndef program(side):\n{body}\n"
    return f"{_imports(text)}\n\n\n{text}"


def _imports(text: str) -> str:
    lines = []
    if "@dataclass" in text:
        lines.append("from dataclasses import dataclass")
    if "NamedTuple" in text:
        lines.append("from typing import NamedTuple")
    lines += ["import torch", "from torch import nn"]
    names = [
        name
        for name in ("CheckpointPolicy", "checkpoint", "create_selective_checkpoint_contexts")
        if f"{name}(" in text or f"{name}." in text
    ]
    if names:
        lines.append(f"from torch.utils.checkpoint import {', '.join(names)}")
    return "\n".join(lines)
