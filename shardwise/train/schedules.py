"""Learning rates by step: linear warmup, then one of four schedules, or a function of your own.

constant   ──────────────        cosine   ──╲
                                             ╲──
linear     ╲                     wsd      ──────────╲      warmup, stable, decay: linear over the last part
             ╲                                       ╲
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

from shardwise.errors import ConfigError
from shardwise.train.config import Optimization

__all__ = ["learning_rate"]


def learning_rate(choice: Optimization, step: int, num_steps: int) -> float:
    """Returns the learning rate of a step, counted from 0, of ``num_steps``."""
    if callable(choice.schedule):
        return choice.lr * _own_height(choice.schedule, step, num_steps)
    if step < choice.warmup:
        return choice.lr * (step + 1) / choice.warmup
    progress = min(1.0, (step - choice.warmup) / max(1, num_steps - choice.warmup))
    lowest = choice.lr * choice.min_lr
    return lowest + (choice.lr - lowest) * _HEIGHTS[choice.schedule](progress, choice)


def _own_height(schedule: Callable[[int, int], float], step: int, num_steps: int) -> float:
    returned = schedule(step, num_steps)
    with contextlib.suppress(TypeError, ValueError):
        if 0.0 <= (height := float(returned)) < math.inf:
            return height
    raise ConfigError(
        f"the schedule returned {returned!r} for step {step} of {num_steps}",
        where=f"optimizer.schedule={getattr(schedule, '__qualname__', schedule)}",
        fix="return a fraction of optimizer.lr, 0 or more",
    )


def _cosine(progress: float, _choice: Optimization) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _linear(progress: float, _choice: Optimization) -> float:
    return 1.0 - progress


def _constant(_progress: float, _choice: Optimization) -> float:
    return 1.0


def _warmup_stable_decay(progress: float, choice: Optimization) -> float:
    return min(1.0, (1.0 - progress) / choice.decay)


_HEIGHTS: dict[str, Callable[[float, Optimization], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _warmup_stable_decay,
}
"""How far the learning rate is above its end, from 1 to 0, by the part of the steps after warmup that is done."""
