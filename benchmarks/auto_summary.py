"""What the trials of `auto_plan.py` say: how close predictions were, what failed, what was ranked wrong."""

from __future__ import annotations

import statistics
from typing import Any


def spread(ratios: list[float]) -> dict[str, float]:
    return {"least": min(ratios), "median": statistics.median(ratios), "most": max(ratios)} if ratios else {}


def summary_of(
    trials: list[dict[str, Any]], is_grid: bool, turns: dict[str, list[float]] | None = None
) -> dict[str, Any]:
    """How close predictions were, which trials failed, and how many settings of a grid were ranked wrong.

    Settings that took turns are ranked by these, others by the steps that each took alone.
    """
    by_turns = {name: statistics.median(found) for name, found in (turns or {}).items()}
    chosen = [trial for trial in trials if "refused" not in trial]
    ran = [trial for trial in chosen if trial["measured"]["ended"] == "ok"]
    times = [
        (trial["predicted"]["ms"], by_turns.get(trial_name(trial), trial["measured"]["median_ms"]))
        for trial in ran
    ]
    wrong = [
        slower / faster
        for (first, slower) in times
        for (second, faster) in times
        if first < second and slower > 1.05 * faster
    ]
    peaks_of = {
        kind: [
            trial["predicted"][kind] / trial["measured"]["peak"][kind]
            for trial in ran
            if trial["measured"]["peak"].get(kind)
        ]
        for kind in ("allocated", "reserved")
    }
    found = {
        "tried": len(chosen),
        "failed": {trial_name(trial): trial["measured"]["ended"] for trial in chosen if trial not in ran},
        "refused, and what became of the least": {
            trial_name(trial): trial["measured"]["ended"] for trial in trials if "refused" in trial
        },
        "predicted / measured, ms": spread([one / other for one, other in times]),
        **{f"predicted / measured, {kind}": spread(ratios) for kind, ratios in peaks_of.items()},
    }
    if is_grid:
        pairs = len(times) * (len(times) - 1) // 2
        found |= {
            "ranked by": "turns" if by_turns else "steps alone",
            "pairs": pairs,
            "share of pairs ranked wrong": len(wrong) / max(1, pairs),
            "pairs ranked wrong by more than 5 %": len(wrong),
            "the worst of them": max(wrong, default=1.0),
        }
    return found


def trial_name(trial: dict[str, Any]) -> str:
    return str(trial.get("name", trial.get("number")))
