"""The exception tree: what a message looks like, and what catches it."""

import pickle
import subprocess
import sys

import pytest

from shardwise import errors
from shardwise.errors import (
    CheckpointError,
    ConfigError,
    ConfigTypeError,
    RankDisagreement,
    ShardwiseError,
    StateError,
)

EVERY_ERROR = [getattr(errors, name) for name in errors.__all__]


def test_a_message_says_what_where_and_fix():
    error = ConfigError(
        "unit 'layers.3' cannot reshard to groups of 3: its shard world is 8",
        where="fully_shard(layers.3, reshard_after_forward=3), rank 0",
        fix="use a divisor of 8 (2 or 4), or True / False",
    )
    assert str(error) == (
        "unit 'layers.3' cannot reshard to groups of 3: its shard world is 8\n"
        "  where: fully_shard(layers.3, reshard_after_forward=3), rank 0\n"
        "  fix:   use a divisor of 8 (2 or 4), or True / False"
    )


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "it broke"),
        ({"where": "rank 1"}, "it broke\n  where: rank 1"),
        ({"fix": "mend it"}, "it broke\n  fix:   mend it"),
    ],
)
def test_where_and_fix_may_be_left_out(parts, text):
    assert str(StateError("it broke", **parts)) == text


@pytest.mark.parametrize(
    ("error_type", "builtin"),
    [
        (ConfigError, ValueError),
        (ConfigTypeError, ValueError),
        (ConfigTypeError, TypeError),
        (StateError, RuntimeError),
        (RankDisagreement, RuntimeError),
        (CheckpointError, RuntimeError),
    ],
)
def test_an_except_clause_written_for_torch_catches_ours(error_type, builtin):
    with pytest.raises(builtin):
        raise error_type("no")


@pytest.mark.parametrize("error_type", EVERY_ERROR)
def test_every_error_is_a_shardwise_error(error_type):
    assert issubclass(error_type, ShardwiseError)


@pytest.mark.parametrize("error_type", EVERY_ERROR)
def test_an_error_survives_a_process_pipe(error_type):
    there = error_type("what", where="where", fix="fix")
    back = pickle.loads(pickle.dumps(there))
    assert type(back) is error_type
    assert (str(back), back.what, back.where, back.fix) == (str(there), "what", "where", "fix")


def test_the_errors_load_without_torch():
    program = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program, errors.__file__]).returncode == 0
