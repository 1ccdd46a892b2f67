"""Runs one program, and combines what each rank found into one outcome."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import shardwise
from shardwise.testing import RankFailure, RankTimeout, run_ranks
from tests.fuzz.oracle import (
    Comparison,
    ProgramRaised,
    Sharded,
    Side,
    Tolerance,
    TorchSharded,
    Wrapped,
    ZeroPlain,
    compared,
)
from tests.fuzz.programs import Program, source
from tests.fuzz.settings import Settings

# Long enough for a program of tiny tensors on a machine that has hardly any time for it.
TIMEOUT_SECONDS = 300.0

SIDES: dict[str, type[Side]] = {
    "fully_shard": Sharded,
    "wrapper": Wrapped,
    "zero": ZeroPlain,
    "torch": TorchSharded,
}

# What shardwise refuses on purpose though a plain program can do it: a name, and a part of the message.
REFUSALS: tuple[tuple[str, str], ...] = (
    ("a parameter replaced by something else", "which cannot take the place of"),
    (
        "a result left in a list of the caller's",
        "from a tensor that forward stored somewhere else than in its output",
    ),
    (
        "a write to parameters gathered in another dtype",
        "was written to while it was gathered, which its shard of",
    ),
    (
        "several names with different parameters",
        "has several names, and they were given different parameters",
    ),
    ("a parameter replaced while it is gathered", "while it was gathered, and the replacement would be lost"),
    (
        "a parameter replaced while sums wait for the replicas",
        "were replaced while their unit's gradients still wait to be summed over replicas",
    ),
    ("clipping gradients that are kept back", "the gradients to clip have not been reduced yet"),
    ("a step without gradients that are kept back", "would step without the gradients that were kept back"),
    ("a tie of parameters in flat ones", "which flat parameters cannot follow"),
    ("freezing a part of a flat parameter", "some were frozen and some were not"),
    ("the state of an optimizer of other parameters", "is not a parameter of the model"),
    (
        "parameters tied while they are gathered",
        "as it was before it was sharded, and a step would not reach",
    ),
    (
        "an optimizer over gathered parameters",
        "as it is while gathered, and a step would not reach the shards",
    ),
)


# What else may be refused where ranks do different things: here, where inputs need gradients on one rank only.
DIVERGED: tuple[tuple[str, str], ...] = tuple(
    ("ranks that do different things", sign)
    for sign in ("ranks diverged", "ranks are waiting for each other", "aborted its step", "is gone")
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program. `how` is empty if it passed; failures of the same kind have the same `how`."""

    how: str = ""
    text: str = ""
    refused: str = ""


def code_of(text: str, name: str) -> Callable[[Any], None]:
    """Returns the function `program` of a source text, whose lines are shown in tracebacks."""
    filename = f"<{name}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    space: dict[str, Any] = {"__name__": "fuzzed"}
    exec(compile(text, filename, "exec"), space)
    program: Callable[[Any], None] = space["program"]
    return program


def on_rank(
    text: str,
    name: str,
    side: str,
    options: dict[str, Any],
    tolerance: Tolerance,
    refusals: tuple[tuple[str, str], ...],
) -> Comparison:
    torch.set_num_threads(1)
    shardwise.set_trust(timeout_seconds=20.0, start_seconds=20.0)
    return compared(code_of(text, name), SIDES[side], options, tolerance, refusals)


def run(program: Program, side: str = "shardwise", runner: Any = run_ranks) -> Outcome:
    """Runs a program on its ranks; any failure becomes an outcome."""
    settings = program.settings
    try:
        comparisons = runner(
            on_rank,
            settings.world,
            source(program),
            f"seed {program.seed}",
            settings.api if side == "shardwise" else side,
            side_options(program),
            tolerance_of(program),
            refusals_of(program),
            kind=settings.kind,
            timeout_seconds=TIMEOUT_SECONDS,
        )
    except RankTimeout as error:
        return Outcome("hangs", str(error))
    except RankFailure as error:
        return Outcome(_kind_of(error), _message_of(error))
    bad = [(rank, comparison) for rank, comparison in enumerate(comparisons) if comparison.how]
    if bad:
        text = "\n".join(f"rank {rank}: {comparison.text}" for rank, comparison in bad)
        return Outcome(bad[0][1].how, text)
    refused = {comparison.refused for comparison in comparisons}
    if program.differs_by_rank:
        # A rank that has nothing left to wait for ends rightly, before its peers hear that it is gone.
        refused = {max(refused)}
    if len(refused) > 1:
        return Outcome(
            "refused on some ranks", f"refused by rank: {[comparison.refused for comparison in comparisons]}"
        )
    return Outcome(refused=refused.pop())


def _message_of(error: RankFailure) -> str:
    cause = error.__cause__
    return str(cause) if isinstance(cause, ProgramRaised) else str(error)


def _kind_of(error: RankFailure) -> str:
    cause = error.__cause__
    if isinstance(cause, ProgramRaised) and cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is None:
        return "dies"
    first = (str(cause).splitlines() or [""])[0]
    return f"raises {type(cause).__name__}: {normalised(first)}"


def normalised(text: str) -> str:
    """Returns a text without names, shapes and numbers, which change while a program shrinks."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", text)
    text = re.sub(r"\[[^\]]*\]|\([^)]*\)", "(…)", text)
    return re.sub(r"\d+", "#", text)[:100]


# --- what a program runs with, and the test it can be pasted as -------------------------------------------------------


def side_options(program: Program) -> dict[str, Any]:
    settings = program.settings
    return {
        "seed": program.seed % 1000,
        "mesh_shape": settings.mesh,
        "param_dtype": _dtype(settings.param_dtype),
        "reduce_dtype": _dtype(settings.reduce_dtype),
        "offload": settings.offload,
        **({"wrapper": wrapper_options(settings)} if settings.api == "wrapper" else {}),
        **(
            {
                "zero_options": {
                    "parameters_as_bucket_view": settings.bucket_view,
                    "balanced": settings.balanced,
                }
            }
            if settings.api == "zero"
            else {}
        ),
    }


def wrapper_options(settings: Settings) -> dict[str, Any]:
    return {
        "strategy": settings.strategy,
        "use_orig_params": settings.use_orig_params,
        "prefetch": settings.prefetch,
    }


def _dtype(name: str) -> torch.dtype | None:
    return getattr(torch, name) if name else None


def refusals_of(program: Program) -> tuple[tuple[str, str], ...]:
    """Returns what may be refused in the program though plain code can do it."""
    return REFUSALS + DIVERGED if program.differs_by_rank else REFUSALS


def tolerance_of(program: Program) -> Tolerance:
    """Returns the tolerance: 0, unless the sharded program adds terms in another order than the plain one."""
    settings = program.settings
    kinds = program.context().kinds
    names = [settings.dtype, settings.param_dtype, settings.reduce_dtype]
    names += ["float32"] if "single" in kinds else []
    coarsest = max((torch.finfo(getattr(torch, name)).eps, name) for name in names if name)[1]
    return Tolerance.of(getattr(torch, coarsest), is_exact=not _reorders(program))


@cache
def _reorders(program: Program) -> bool:
    settings, kinds = program.settings, program.context().kinds
    if settings.param_dtype or settings.reduce_dtype or "single" in kinds:
        return True
    if kinds & {"twice", "mirrored", "recursive"} or program.ties:
        return True
    # An input's gradient is a sum over its uses, and a unit sums its own uses first: another order for three terms.
    uses = [
        block.kind
        for _, block in program.model.walk()
        if block.kind in ("both", "residual", "list", "no_grad")
    ]
    uses += [block.kind for _, block in program.model.walk() if "append" in block.kind]
    if len(uses) > 1 or "attention" in kinds:
        return True
    if settings.kind == "gloo" and (settings.mesh or settings.strategy == "NO_SHARD"):
        return True  # gloo sums replicas in another order
    if "fused" in settings.optimizer or "flat" in settings.optimizer:
        return True
    for action in program.actions:
        if action.kind in ("tie", "summon", "ema", "clip") or (
            action.kind == "optimizer" and ("fused" in action.args[0] or "flat" in action.args[0])
        ):
            return True
        if action.kind == "step":
            step = action.args[1]
            if step.clips or step.backward != "plain":
                return True
            if not (step.all_reduces and step.syncs):
                return True
    return False


def as_test(program: Program) -> str:
    """Returns the source with a test around it, to be pasted into a file."""
    settings = program.settings
    options = {"world_size": settings.world, **side_options(program)}
    defaults = {"mesh_shape": (), "param_dtype": None, "reduce_dtype": None, "offload": False}
    shown = {key: value for key, value in options.items() if key not in defaults or value != defaults[key]}
    if settings.api != "fully_shard":
        shown["side"] = settings.api
    if settings.kind != "threads":
        shown["kind"] = settings.kind
    if tolerance := tolerance_of(program).relative:
        shown["tolerance"] = tolerance
    if program.differs_by_rank:
        shown["may_diverge"] = True
    arguments = "".join(f", {key}={value!r}" for key, value in shown.items())
    text = source(program).replace("\n\n\n", "\nfrom tests.fuzz.trial import check\n\n\n", 1)
    return f"{text}\n\ndef test_found_by_seed_{program.seed}():\n    check(program{arguments})\n"


def check(
    program: Callable[[Any], None],
    world_size: int,
    *,
    side: str = "fully_shard",
    kind: Any = "threads",
    tolerance: float = 0.0,
    may_diverge: bool = False,
    **options: Any,
) -> None:
    """Raises unless the sharded program does the same as the plain one."""
    refusals = REFUSALS + DIVERGED if may_diverge else REFUSALS
    comparisons = run_ranks(
        compared, world_size, program, SIDES[side], options, Tolerance(tolerance), refusals, kind=kind
    )
    assert may_diverge or len({comparison.refused for comparison in comparisons}) == 1
    for rank, comparison in enumerate(comparisons):
        assert not comparison.how, f"rank {rank} {comparison.how}:\n{comparison.text}"
