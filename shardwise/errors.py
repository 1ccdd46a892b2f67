"""Every error shardwise raises on purpose.

A message has up to three parts, so that whoever reads it at 3 a.m. can act on it:

    ConfigError: unit 'layers.3' cannot reshard to groups of 3: its shard world is 8
      where: fully_shard(layers.3, reshard_after_forward=3), rank 0
      fix:   use a divisor of 8 (2 or 4), or True / False

Each error is also the built-in error that torch raises in its place, so ``except ValueError`` keeps working.
This room imports nothing, torch least of all: errors cross process pipes and must load anywhere.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConfigTypeError",
    "NonFiniteGradients",
    "PeerFailure",
    "RankDisagreement",
    "ShardwiseError",
    "StateError",
]

# What backends say when a rank at the other end of a connection is gone.
_LOST_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Socket closed",
    "Broken pipe",
    "remote process has exited",
)


class ShardwiseError(Exception):
    """The root of the tree.

    Args:
        what: what happened, with the values that made it happen.
        where: rank, unit, parameter or call.
        fix: what to do about it, as an imperative.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        # ``args`` holds ``what`` alone: pickle calls ``cls(*args)`` and then restores the attributes.
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.where is not None:
            lines.append(f"  where: {self.where}")
        if self.fix is not None:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


class ConfigError(ShardwiseError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class ConfigTypeError(ConfigError, TypeError):
    """An argument of the wrong type, where torch promises a ``TypeError``."""


class StateError(ShardwiseError, RuntimeError):
    """A call at the wrong time: right in itself, but not in the present state."""


class RankDisagreement(ShardwiseError, RuntimeError):
    """Ranks that must agree do not: on the model, on the order of units, on an argument."""


class NonFiniteGradients(ShardwiseError, FloatingPointError):
    """A gradient that is infinite or not a number, before any optimizer has used it."""


class PeerFailure(ShardwiseError, RuntimeError):
    """Another rank cannot go on with this one: it raised, died, or does not come."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint that cannot be written, read, or fitted to this model."""


def text_of(error: BaseException) -> str:
    """What an error says; those of users may fail at that, and are errors to tell all the same."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  whatever it is, it is not the error to tell
        return "<no text>"


def lost_its_peers(error: BaseException) -> bool:
    """Whether a backend raised this because another rank is gone."""
    text = text_of(error)
    return isinstance(error, (RuntimeError, OSError)) and any(sign in text for sign in _LOST_PEER_TEXTS)


def follows_from_a_peer(error: BaseException) -> bool:
    """Whether this error only passes on that another rank failed: then that rank's own error is the one to read."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PeerFailure) or lost_its_peers(cause):
            return True
        cause = cause.__cause__
    return False
