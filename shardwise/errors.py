"""Every error shardwise raises on purpose.

A message has up to three parts, so that whoever reads it at 3 a.m. can act on it:

    ConfigError: unit 'layers.3' cannot reshard to groups of 3: its shard world is 8
      where: fully_shard(layers.3, reshard_after_forward=3), rank 0
      fix:   use a divisor of 8 (2 or 4), or True / False

Each error is also the built-in error that torch raises in its place, so ``except ValueError`` keeps working.
This module imports nothing, not even torch: errors are sent through pipes and must load anywhere.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CheckpointValueError",
    "ConfigAssertionError",
    "ConfigError",
    "ConfigRecordError",
    "ConfigTypeError",
    "NonFiniteGradients",
    "PeerFailure",
    "RankDisagreement",
    "ShardwiseError",
    "StateAssertionError",
    "StateError",
    "StateTypeError",
    "UnsupportedError",
]

# What backends and sockets say when the peer is gone.
LOST_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Socket closed",
    "Broken pipe",
    "remote process has exited",
)


class ShardwiseError(Exception):
    """Base class of the errors that shardwise raises.

    Args:
        what: what happened, with the values that caused it.
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
    """An argument, or a combination of arguments, is invalid."""


class ConfigTypeError(ConfigError, TypeError):
    """An argument has the wrong type, where torch raises a ``TypeError``."""


class ConfigRecordError(ConfigTypeError, RuntimeError):
    """A record of options has the wrong type, where torch raises a ``RuntimeError``."""


class ConfigAssertionError(ConfigError, AssertionError):
    """An argument is invalid, where torch raises an ``AssertionError``."""


class UnsupportedError(ConfigError, NotImplementedError):
    """A combination of arguments that is not supported, where torch raises a ``NotImplementedError``."""


class StateError(ShardwiseError, RuntimeError):
    """A valid call at the wrong time."""


class StateAssertionError(StateError, AssertionError):
    """A valid call at the wrong time, where torch raises an ``AssertionError``."""


class StateTypeError(StateError, TypeError):
    """An object is in a state that a call cannot take, where torch raises a ``TypeError``."""


class RankDisagreement(ShardwiseError, RuntimeError):
    """Ranks disagree where they must not: on the model, the order of units, or an argument."""


class NonFiniteGradients(ShardwiseError, FloatingPointError):
    """A gradient is infinite or NaN; no optimizer has used it."""


class PeerFailure(ShardwiseError, RuntimeError):
    """Another rank raised, died, or did not arrive, so this one cannot go on."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint cannot be written or read, or does not fit this model."""


class CheckpointValueError(CheckpointError, ValueError):
    """A state does not fit this model, where torch raises a ``ValueError``."""


def text_of(error: BaseException) -> str:
    """What an error says; those of users may fail at that, and are errors to tell all the same."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  whatever it is, it is not the error to tell
        return "<no text>"


def lost_its_peers(error: BaseException) -> bool:
    """Whether a backend raised this because another rank is gone."""
    text = text_of(error)
    return isinstance(error, (RuntimeError, OSError)) and any(sign in text for sign in LOST_PEER_TEXTS)


def follows_from_a_peer(error: BaseException) -> bool:
    """Returns whether this error is only a consequence of another rank's, which is the one to read."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PeerFailure) or lost_its_peers(cause):
            return True
        cause = cause.__cause__
    return False
