"""One program, run: what each rank found, put together into one outcome."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import shardwise
from shardwise.testing import RankFailure, RankTimeout, run_ranks
from tests.fuzz.oracle import (
    ProgramRaised,
    Sharded,
    Side,
    Tolerance,
    TorchSharded,
    Verdict,
    Wrapped,
    ZeroPlain,
    compared,
)
from tests.fuzz.programs import Program, side_options, source, tolerance_of

TIMEOUT_SECONDS = 30.0

SIDES: dict[str, type[Side]] = {
    "fully_shard": Sharded,
    "wrapper": Wrapped,
    "zero": ZeroPlain,
    "torch": TorchSharded,
}

# What shardwise refuses on purpose though a plain program can do it: a name, and a sign in the message.
REFUSALS: tuple[tuple[str, str], ...] = (
    ("a parameter replaced by something else", "which cannot take the place of"),
    ("a parameter replaced while it is gathered", "while it was gathered, and what came would be forgotten"),
    ("a step without gradients that are kept back", "would step without the gradients that were kept back"),
    ("an optimizer over gathered parameters", "as it is while gathered, and a step would not reach the shards"),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a program. `how` is empty if all is well; alike failures have the same."""

    how: str = ""
    text: str = ""
    refused: str = ""


def code_of(text: str, name: str) -> Callable[[Any], None]:
    """The function `program` of a source, whose lines show in tracebacks."""
    filename = f"<{name}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    space: dict[str, Any] = {"__name__": "fuzzed"}
    exec(compile(text, filename, "exec"), space)
    program: Callable[[Any], None] = space["program"]
    return program


def on_rank(
    text: str, name: str, side: str, options: dict[str, Any], tolerance: Tolerance
) -> Verdict:
    torch.set_num_threads(1)
    shardwise.set_trust(timeout_seconds=8.0, start_seconds=8.0)
    return compared(code_of(text, name), SIDES[side], options, tolerance, REFUSALS)


def run(program: Program, side: str = "shardwise", runner: Any = run_ranks) -> Outcome:
    """Runs a program on its ranks; everything that can go wrong becomes an outcome."""
    settings = program.settings
    try:
        verdicts = runner(
            on_rank,
            settings.world,
            source(program),
            f"seed {program.seed}",
            settings.face if side == "shardwise" else side,
            side_options(program),
            tolerance_of(program),
            kind=settings.kind,
            timeout_seconds=TIMEOUT_SECONDS,
        )
    except RankTimeout as error:
        return Outcome("hangs", str(error))
    except RankFailure as error:
        return Outcome(_kind_of(error), _told(error))
    bad = [(rank, verdict) for rank, verdict in enumerate(verdicts) if verdict.how]
    if bad:
        text = "\n".join(f"rank {rank}: {verdict.text}" for rank, verdict in bad)
        return Outcome(bad[0][1].how, text)
    refused = {verdict.refused for verdict in verdicts}
    if len(refused) > 1:
        return Outcome("refused on some ranks", f"refused by rank: {[verdict.refused for verdict in verdicts]}")
    return Outcome(refused=refused.pop())


def _told(error: RankFailure) -> str:
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
    """Without names, shapes and numbers, which change while a program shrinks."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", text)
    text = re.sub(r"\[[^\]]*\]|\([^)]*\)", "(…)", text)
    return re.sub(r"\d+", "#", text)[:100]
