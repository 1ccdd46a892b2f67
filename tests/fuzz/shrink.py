"""Shrinks a failing program to a small one that fails in the same way.

Every step tries programs that are a little smaller (one action fewer, a setting at its default, a block replaced by one
of its children) and takes the first that still fails in the same way. This file does not run programs: callers pass a
function that does, and returns how a program failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.fuzz.actions import Action, Step
from tests.fuzz.models import Block, params_of
from tests.fuzz.programs import Program
from tests.fuzz.settings import Settings, UnitCall

How = Callable[[Program], str]


def shrunk(program: Program, how: How, limit: int = 400) -> Program:
    """Returns the smallest program found that fails in the same way, after at most `limit` runs."""
    wanted = how(program)
    if not wanted:
        return program
    runs = 0
    seen: set[Program] = {program}
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in smaller(program):
            if candidate in seen:
                continue
            seen.add(candidate)
            runs += 1
            if runs > limit:
                return program
            if how(candidate) == wanted:
                program, is_smaller = candidate, True
                break
    return program


def smaller(program: Program) -> Iterator[Program]:
    """Yields programs that are one step simpler, the largest reductions first."""
    yield from _fewer_actions(program)
    yield from _smaller_models(program)
    yield from _fewer_units(program)
    for index in range(len(program.ties)):
        yield replace(program, ties=_without(program.ties, index))
    if program.frozen:
        yield replace(program, frozen=())
    for index in range(len(program.frozen)):
        yield replace(program, frozen=_without(program.frozen, index))
    yield from _plainer_settings(program)
    yield from _plainer_actions(program)


def _without(items: tuple[Any, ...], index: int, count: int = 1) -> tuple[Any, ...]:
    return items[:index] + items[index + count :]


def _fewer_actions(program: Program) -> Iterator[Program]:
    actions = program.actions
    size = len(actions) // 2
    while size >= 1:
        for start in range(0, len(actions), size):
            yield replace(program, actions=_without(actions, start, size))
        size //= 2


def _plainer_actions(program: Program) -> Iterator[Program]:
    for index, action in enumerate(program.actions):
        for inner in range(len(action.inner)):
            yield _with_action(program, index, replace(action, inner=_without(action.inner, inner)))
        if action.kind != "step":
            continue
        number, step = action.args
        for field in fields(Step):
            # Zeroing gradients is no simpler than keeping them.
            if getattr(step, field.name) != field.default and field.name not in ("zeroes", "steps"):
                plainer = replace(step, **{field.name: field.default})
                yield _with_action(program, index, replace(action, args=(number, plainer)))
        for name, value in (("steps", False), ("zeroes", "")):
            if getattr(step, name) != value:
                yield _with_action(
                    program, index, replace(action, args=(number, replace(step, **{name: value})))
                )


def _with_action(program: Program, index: int, action: Action) -> Program:
    actions = program.actions
    return replace(program, actions=(*actions[:index], action, *actions[index + 1 :]))


def _fewer_units(program: Program) -> Iterator[Program]:
    for index, call in enumerate(program.units):
        # A tie to a parameter outside its unit would be another failure; without the outermost wrapper, names change.
        is_needed = "" in call.paths and (program.ties or program.settings.api == "wrapper")
        if len(program.units) > 1 and not is_needed:
            yield replace(program, units=_without(program.units, index))
        if len(call.paths) > 1:
            for path in call.paths:
                kept = replace(call, paths=(path,))
                yield replace(program, units=(*program.units[:index], kept, *program.units[index + 1 :]))
        if call.reshard is not None or call.columns:
            plain = UnitCall(call.paths)
            yield replace(program, units=(*program.units[:index], plain, *program.units[index + 1 :]))


def _plainer_settings(program: Program) -> Iterator[Program]:
    settings = program.settings
    for field in fields(Settings):
        if getattr(settings, field.name) == field.default or field.name == "api":
            continue  # the same program with another API fails for another reason
        changes: dict[str, Any] = {field.name: field.default}
        if field.name == "world":
            changes["mesh"] = ()
        yield replace(program, settings=replace(settings, **changes))
    if settings.world > 1:
        yield replace(program, settings=replace(settings, world=1, mesh=()))


# --- the model --------------------------------------------------------------------------------------------------------


def _smaller_models(program: Program) -> Iterator[Program]:
    for path, block in program.model.walk():
        for child in block.children:
            below = f"{path}.{child.name}" if path else child.name
            yield from _transplanted(program, path, child, below)
        if block.kind != "linear":
            yield from _transplanted(program, path, Block("linear", block.name), None)


def _transplanted(program: Program, path: str, graft: Block, old_path: str | None) -> Iterator[Program]:
    """Yields the program with the block at `path` replaced, without what refers to blocks that no longer exist."""
    name = path.split(".")[-1] if path else "model"
    graft = replace(graft, name=name)
    model = _grafted(program.model, path, graft)
    before = _paths(program.model, program.settings.width)
    after = _paths(model, program.settings.width)

    def moved(known: str) -> str | None:
        if old_path is not None and (known == old_path or known.startswith(f"{old_path}.")):
            rest = known[len(old_path) :].lstrip(".")
            known = f"{path}.{rest}" if path and rest else path or rest
        return known if known in after else None

    def moved_argument(value: Any) -> tuple[bool, Any]:
        if isinstance(value, str) and value in before:
            new = moved(value)
            return new is not None, new
        if isinstance(value, tuple):
            kept = [moved_argument(each) for each in value]
            return True, tuple(each for fits, each in kept if fits)
        if isinstance(value, Step):
            new = moved(value.fails) if value.fails else ""
            return True, replace(value, fails=new or "")
        return True, value

    def moved_actions(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        kept = []
        for action in actions:
            args = [moved_argument(each) for each in action.args]
            if all(fits for fits, _ in args):
                new_args = tuple(each for _, each in args)
                kept.append(Action(action.kind, new_args, moved_actions(action.inner)))
        return tuple(kept)

    units: list[UnitCall] = []
    taken: set[str] = set()
    for call in program.units:
        paths = tuple(new for known in call.paths if (new := moved(known)) is not None and new not in taken)
        taken.update(paths)
        if paths:
            units.append(replace(call, paths=paths))
    ties = tuple(
        (one, other)
        for a, b in program.ties
        if (one := moved(a)) is not None and (other := moved(b)) is not None
    )
    if units:
        yield replace(
            program,
            model=model,
            units=tuple(units),
            ties=ties,
            frozen=tuple(new for known in program.frozen if (new := moved(known)) is not None),
            actions=moved_actions(program.actions),
        )


def _grafted(block: Block, path: str, graft: Block) -> Block:
    if not path:
        return graft
    head, _, rest = path.partition(".")
    children = tuple(
        _grafted(child, rest, graft) if child.name == head else child for child in block.children
    )
    return replace(block, children=children)


def _paths(model: Block, width: int) -> set[str]:
    found = {path for path, _ in model.walk()}
    return found | {param.path for param in params_of(model, width)}


def shape(program: Program) -> str:
    """Describes a program's features in words; small programs that fail for the same reason have the same text."""
    words = {f"block {block.kind}" for _, block in program.model.walk() if block.kind != "linear"}
    for action in program.actions:
        words.add(action.kind)
        for inner in action.inner:
            words.add(f"{inner.kind} inside")
        for each in (action, *action.inner):
            words |= {
                str(value)
                for value in each.args
                if isinstance(value, str) and value.isidentifier() and value[:1] != "m"
            }
        if action.kind == "step":
            step = action.args[1]
            words |= {
                f"{field.name}={getattr(step, field.name)!r}"
                for field in fields(Step)
                if getattr(step, field.name) != field.default
                and field.name not in ("steps", "zeroes", "fails")
            }
            words |= {"caught inside"} if step.fails else set()
    words.discard("step")
    for field in fields(Settings):
        value = getattr(program.settings, field.name)
        if value != field.default and field.name != "world":
            words.add(f"{field.name}={value}")
    words |= {"tied"} if program.ties else set()
    words |= {"frozen"} if program.frozen else set()
    words |= {"columns" for call in program.units if call.columns}
    words |= {f"reshard={call.reshard}" for call in program.units if call.reshard is not None}
    return ", ".join(sorted(words)) or "nothing special"
