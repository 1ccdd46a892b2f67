"""The predicted step as a timeline: lanes of bars, and memory by kind at the times when the host changes it."""

from __future__ import annotations

from collections import Counter

from shardwise.forecast.clock import StepTime
from shardwise.forecast.rehearsal import Rehearsal
from shardwise.forecast.tape import Allocate, Free
from shardwise.forecast.timeline import LANES, Lane, Memory, Timeline

# As many points as a screen shows: between two of them the highest counts.
_MOST_POINTS = 3000


def timeline_of(rehearsal: Rehearsal, step: StepTime, facts: dict[str, str]) -> Timeline:
    lanes = tuple(Lane(name, tuple(step.bars.get(name, ()))) for name in LANES if step.bars.get(name))
    drawn = max((lane.bars[-1].end for lane in lanes), default=step.seconds)
    if drawn < 0.97 * step.seconds:
        facts = {**facts, "drawn": f"the first {1e3 * drawn:.1f} ms: further micro-batches repeat them"}
    return Timeline("predicted", step.seconds, lanes, _curve(rehearsal, step), facts)


def _curve(rehearsal: Rehearsal, step: StepTime) -> Memory:
    begin = rehearsal.steps[-1]
    held: Counter[str] = Counter()
    known: dict[int, Allocate] = {}
    points: list[tuple[float, Counter[str]]] = []
    changes = [entry for entry in rehearsal.tape[begin:] if isinstance(entry, (Allocate, Free))]
    stride = max(1, len(changes) // _MOST_POINTS)
    best, number = -1, 0
    for index, entry in enumerate(rehearsal.tape):
        if isinstance(entry, Allocate):
            known[entry.key] = entry
            held[entry.what] += entry.num_bytes
        elif isinstance(entry, Free):
            gone = known.pop(entry.key)
            held[gone.what] -= gone.num_bytes
        else:
            continue
        if index < begin:
            continue
        if number % stride == 0 or not points:
            points.append((step.issued[index - begin], held.copy()))
            best = held.total()
        elif held.total() > best:
            points[-1] = (points[-1][0], held.copy())
            best = held.total()
        number += 1
    kinds = tuple(dict.fromkeys(kind for _, levels in points for kind in levels))
    return Memory(
        kinds,
        tuple(time for time, _ in points),
        tuple(tuple(levels[kind] for kind in kinds) for _, levels in points),
    )
