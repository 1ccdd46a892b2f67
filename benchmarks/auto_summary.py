"""What the trials of `auto_plan.py` say: how close predictions were, what failed, what was ranked wrong."""

from __future__ import annotations

import statistics
from typing import Any


def spread(ratios: list[float]) -> dict[str, float]:
    return {"least": min(ratios), "median": statistics.median(ratios), "most": max(ratios)} if ratios else {}


def summary_of(trials: list[dict[str, Any]], is_grid: bool) -> dict[str, Any]:
    """How close predictions were, which trials failed, and how many settings of a grid were ranked wrong."""
    chosen = [trial for trial in trials if "refused" not in trial]
    ran = [trial for trial in chosen if trial["measured"]["ended"] == "ok"]
    times = [(trial["predicted"]["ms"], trial["measured"]["median_ms"]) for trial in ran]
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
        found |= {
            "pairs": len(times) * (len(times) - 1) // 2,
            "pairs ranked wrong by more than 5 %": len(wrong),
            "the worst of them": max(wrong, default=1.0),
        }
    return found


def trial_name(trial: dict[str, Any]) -> str:
    return str(trial.get("name", trial.get("number")))
