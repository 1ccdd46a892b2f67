"""Reverts the fixes of known defects, and counts how many programs it takes to find each defect again.

    python -m tests.fuzz.planted --result benchmarks/results/fuzz_finds.json

A program finds a defect if it fails with it and passes without it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.engine.unit import replaced
from shardwise.engine.unit.autograd_signals import Visit
from shardwise.engine.unit.flat_form import FlatForm
from shardwise.engine.unit.gathered_parameters import GatheredParameters
from shardwise.engine.unit.hooks import UnitHooks
from shardwise.engine.unit.unit_gradients import UnitGradients
from shardwise.wrapper import summon_full_params
from tests.fuzz import trial
from tests.fuzz.programs import Program, draw, source
from tests.fuzz.shrink import shrunk

# Rank processes would not have the patches of this process.
WITHOUT = frozenset({"gloo"})


def an_exception_leaves_the_unit_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UnitHooks, "_release_after_error", lambda *_: None)


def ties_within_a_unit_are_not_followed(patch: pytest.MonkeyPatch) -> None:
    tied_to = replaced._tied_to

    def tied_to_another_unit(shown: Any, slot: Any, unit: Any) -> Any:
        found = tied_to(shown, slot, unit)
        return None if found is None or found[0] is unit else found

    patch.setattr(replaced, "_tied_to", tied_to_another_unit)


def a_unit_remembers_one_call(patch: pytest.MonkeyPatch) -> None:
    """If a unit calls itself, the inner call's visit replaces the outer one's, and ends with the inner call."""
    make, end, signal = Visit.__init__, UnitHooks._end_forward, Visit.signal_outputs

    def made(self: Visit, hooks: Any, window: Any) -> None:
        make(self, hooks, window)
        hooks.the_visit = self

    def ended(self: Any, visit: Visit | None) -> None:
        end(self, visit)
        self.the_visit = None

    def signalled(self: Any, output: Any, recomputes: bool) -> Any:
        return signal(self, output, recomputes) if self.hooks.the_visit is self else output

    patch.setattr(Visit, "__init__", made)
    patch.setattr(UnitHooks, "_end_forward", ended)
    patch.setattr(Visit, "signal_outputs", signalled)


def what_a_frozen_parameter_holds_is_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UnitGradients, "_plan_with_stash", lambda self: self.plan)


def autograd_hears_of_no_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GatheredParameters, "pass_on_writes", lambda self: None)


def flat_shards_are_trusted_to_tell_of_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlatForm, "sees_all_writes", True)


def calls_of_wrappers_see_no_tie(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(summon_full_params, "take_back_replaced", lambda unit: None)


def _fails(program: Program) -> bool:
    return any(
        "fail" in action.kind or (_is_step(action) and action.args[1].fails) for action in program.actions
    )


def _ties(program: Program) -> bool:
    return any(action.kind == "tie" for action in program.actions)


def _recurs(program: Program) -> bool:
    return "recursive" in program.context().kinds


def _freezes_while_it_holds(program: Program) -> bool:
    return any("freeze" in action.kind for action in program.actions) and any(
        _is_step(action) and not action.args[1].syncs for action in program.actions
    )


def _writes_between(program: Program) -> bool:
    return any(action.kind == "write_between" for action in program.actions)


def _writes_data_of_a_wrapper(program: Program) -> bool:
    return program.settings.api == "wrapper" and any(
        action.kind == "scale_data" for action in program.actions
    )


def _ties_wrapped(program: Program) -> bool:
    return program.settings.api == "wrapper" and any(
        action.kind == "tie" or "tie" in action.args for action in program.actions
    )


def _is_step(action: Any) -> bool:
    return bool(action.kind == "step")


@dataclass(frozen=True)
class Defect:
    plant: Callable[[pytest.MonkeyPatch], None]
    may_show: Callable[[Program], bool]
    """False for programs that have nothing to do with it: a search that is short of time leaves them out."""

    @property
    def name(self) -> str:
        return self.plant.__name__

    @contextmanager
    def planted(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            self.plant(patch)
            yield

    def how(self, program: Program) -> str:
        with self.planted():
            return trial.run(program).how


DEFECTS = (
    Defect(an_exception_leaves_the_unit_held, _fails),
    Defect(ties_within_a_unit_are_not_followed, _ties),
    Defect(a_unit_remembers_one_call, _recurs),
    Defect(what_a_frozen_parameter_holds_is_left_out, _freezes_while_it_holds),
    Defect(autograd_hears_of_no_write, _writes_between),
    Defect(flat_shards_are_trusted_to_tell_of_writes, _writes_data_of_a_wrapper),
    Defect(calls_of_wrappers_see_no_tie, _ties_wrapped),
)


def first_find(defect: Defect, programs: Iterable[Program]) -> tuple[int, Program] | None:
    """Returns the first program that finds a defect, and the number of programs run up to it."""
    for count, program in enumerate(programs, 1):
        if defect.how(program) and not trial.run(program).how:
            return count, program
    return None


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    options.add_argument("--most", type=int, default=1000, help="programs to try for each defect")
    options.add_argument("--result", type=Path)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    record: dict[str, Any] = {"torch": torch.__version__, "without": sorted(WITHOUT), "defects": {}}
    for defect in DEFECTS:
        begun = time.monotonic()
        found = first_find(defect, (draw(seed, WITHOUT) for seed in range(arguments.most)))
        if found is None:
            raise SystemExit(f"{defect.name}: not found by {arguments.most} programs")
        count, program = found
        seconds = round(time.monotonic() - begun, 1)
        small = shrunk(program, defect.how)
        record["defects"][defect.name] = {
            "seed": program.seed,
            "programs": count,
            "seconds": seconds,
            "how": defect.how(small),
            "shrunk_to": source(small).splitlines(),
        }
        print(f"{defect.name}: {count} programs, {seconds} s\n{source(small)}", flush=True)
    if arguments.result:
        arguments.result.write_text(json.dumps(record, indent=2) + "\n")
    os._exit(0)  # rank threads never end


if __name__ == "__main__":
    main()
