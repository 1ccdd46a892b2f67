"""`shardwise train` with sharding.float8: torchao's emulation, which rounds on a CPU as GPUs do."""

from __future__ import annotations

import pytest

from shardwise.errors import ConfigError
from shardwise.testing import run_ranks
from tests.ranks.training import (
    assert_same,
    checkpoint_at,
    run_part,
    small_config,
    whole_tensors,
    write_text,
)

pytest.importorskip("torchao.float8", reason="torchao is not installed here")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = ("model.width=32", "model.hidden=48", "model.kv_heads=2", "train.steps=3", "train.accumulate=2")
EMULATED = "sharding.float8=emulated"


def config_of(folder, *settings):
    return small_config(write_text(folder), *SIZES, *settings)


def losses_of(world_size, config, folder, **options):
    return run_ranks(run_part, world_size, config, folder, kind="gloo", **options)[0][0]


def test_float8_rounds_products_and_a_pipeline_rounds_them_alike(tmp_path):
    plain = losses_of(1, config_of(tmp_path), tmp_path / "plain")
    one = losses_of(1, config_of(tmp_path, EMULATED), tmp_path / "one")
    assert one != plain
    # A mantissa of 3 bits rounds by 1/16 at most; the first loss is of almost random logits.
    assert one[0] == pytest.approx(plain[0], rel=1e-2)
    two = losses_of(2, config_of(tmp_path, EMULATED, "sharding.pipeline=2"), tmp_path / "two")
    assert two == one
    assert_same(*(whole_tensors(checkpoint_at(tmp_path / name, 3)) for name in ("one", "two")))
    # Each rank has a scale of its own batch.
    for mode in ("full", "none"):
        found = losses_of(2, config_of(tmp_path, EMULATED, f"sharding.mode={mode}"), tmp_path / mode)
        assert found[0] == pytest.approx(one[0], rel=1e-3)


def test_a_run_in_float8_goes_on_without(tmp_path):
    losses_of(1, config_of(tmp_path, EMULATED), tmp_path / "run", stop_after=2)
    assert len(losses_of(1, config_of(tmp_path), tmp_path / "run", resume=True)) == 1


def refused(config, folder):
    with pytest.raises(ConfigError) as raised:
        run_part(config, folder)
    return str(raised.value)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (("sharding.float8=on",), "a CPU does not multiply in float8"),
        ((EMULATED, "model.width=20", "model.hidden=27"), "sizes that are multiples of 16"),
    ],
)
def test_float8_is_refused_where_it_cannot_be(tmp_path, settings, problem):
    (error,) = run_ranks(refused, 1, config_of(tmp_path, *settings), tmp_path / "run", kind="gloo")
    assert problem in error
