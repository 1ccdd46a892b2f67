"""Tensor parallelism, pipelines and fp16 in `shardwise train`: the run of one rank, divided in another way."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows

from shardwise.checkpoint.manifest import read_manifest
from shardwise.errors import ConfigError, StateError
from shardwise.testing import run_ranks
from shardwise.train.config import Sharding
from shardwise.train.model import OwnModel
from shardwise.train.rank_grid import plan_grid
from shardwise.train.settings import with_settings
from tests.ranks.tables import slow
from tests.ranks.test_train_sources import settings_of
from tests.ranks.training import (
    Noted,
    assert_same,
    checkpoint_at,
    run_part,
    small_config,
    whole_tensors,
    write_text,
)

TENSOR, PIPELINE = "sharding.tensor_parallel=2", "sharding.pipeline=2"
FOUR = "train.accumulate=4"
GPIPE, INTERLEAVED = "sharding.schedule=gpipe", "sharding.schedule=interleaved"
STEPS = 3


def config_of(folder, *settings):
    """A model whose matrices two ranks can divide, into parts that two more cannot divide evenly."""
    sizes = ("model.layers=4", "model.width=24", "model.heads=4", "model.kv_heads=2", "model.hidden=30")
    own = (*sizes, "model.vocabulary=130", f"train.steps={STEPS}", "train.batch_size=8")
    return small_config(write_text(folder), *own, *settings)


def run_whole(config, folder):
    """Runs to the end; returns the losses and, on the first rank, the one of the evaluation."""
    display = Noted()
    losses, _ = run_part(config, folder, display=display)
    return [*losses, *(record.eval_loss for record in display.records[-1:])]


def runs(world_size, folder, **settings):
    """Returns each run's losses and last checkpoint."""
    found = {}
    for name, chosen in settings.items():
        # Each by itself: in one process group, torch takes an axis of a mesh for the same axis of another mesh.
        config = config_of(folder, *chosen)
        first, *others = run_ranks(run_whole, world_size, config, folder / name, kind="gloo")
        assert all(losses[:STEPS] == first[:STEPS] for losses in others)
        found[name] = first, whole_tensors(checkpoint_at(folder / name, STEPS))
    return found


# Sums in another order: Adam turns a gradient's rounding into as much of its step, which is at most lr = 0.01.
def assert_near(found, expected, absolute=1e-4):
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=absolute, msg=name)


# --- equal to the run on one rank -----------------------------------------------------------------------------------


@pytest.mark.arithmetic
@pytest.mark.parametrize(
    "chosen",
    [
        {"1f1b": ()},
        slow({"gpipe": (GPIPE,), "interleaved": (INTERLEAVED,), "gradients": ("sharding.mode=gradients",)}),
        slow({"recompute": ("sharding.recompute=true",), "offload": ("sharding.offload=true",)}),
    ],
    ids=["1f1b", "schedules", "memory"],
)
def test_a_pipeline_is_bitwise_the_run_on_one_rank_with_as_many_micro_batches(tmp_path, chosen):
    expected = runs(1, tmp_path, one=(FOUR,))["one"]
    found = runs(2, tmp_path, **{name: (FOUR, PIPELINE, *settings) for name, settings in chosen.items()})
    for losses, tensors in found.values():
        assert losses == expected[0]
        assert_same(tensors, expected[1])


@pytest.mark.arithmetic
@pytest.mark.parametrize(
    ("chosen", "both"),
    [
        # Sequences of 7 are padded to 8, which two ranks divide.
        ({"odd": ()}, ("model.context=7",)),
        slow({"tied": ()}, ("model.tied=true",)),
        slow({"gradients": ("sharding.mode=gradients",), "recompute": ("sharding.recompute=true",)}, ()),
        slow({"offload": ("sharding.offload=true",), "accumulate": ()}, (FOUR,)),
    ],
    ids=["odd", "tied", "memory", "offload"],
)
def test_tensor_parallelism_is_the_run_on_one_rank_within_rounding(tmp_path, chosen, both):
    expected = runs(1, tmp_path, one=both)["one"]
    for found in runs(
        2, tmp_path, **{name: (TENSOR, *both, *settings) for name, settings in chosen.items()}
    ).values():
        assert_near(found, expected)


@pytest.mark.slow
def test_all_combinations_on_four_ranks_are_the_run_on_one_rank_within_rounding(tmp_path):
    # As many samples are evaluated: batches of them are half as large.
    two = ("train.accumulate=2", "evaluate.batches=2")
    expected = runs(1, tmp_path, one=())["one"]
    hybrid, gradients = "sharding.mode=hybrid", "sharding.mode=gradients"
    found = runs(
        4,
        tmp_path,
        tensor=(TENSOR,),
        tensor_gradients=(TENSOR, gradients),
        pipeline=(PIPELINE, *two),
        interleaved=(PIPELINE, *two, INTERLEAVED),
        both=(PIPELINE, TENSOR, *two),
        interleaved_tensor=(PIPELINE, TENSOR, *two, INTERLEAVED),
        tensor_hybrid=(TENSOR, hybrid),
        pipeline_hybrid=(PIPELINE, *two, hybrid),
    )
    for each in found.values():
        assert_near(each, expected)
    # Clipping scales by the norm over all stages and parts.
    clipped = runs(1, tmp_path, clipped=("optimizer.clip=0.2",))["clipped"]
    found = runs(
        4,
        tmp_path,
        clipped_tensor=(TENSOR, "optimizer.clip=0.2"),
        clipped_both=(PIPELINE, TENSOR, *two, "optimizer.clip=0.2"),
    )
    for each in found.values():
        assert_near(each, clipped)


@pytest.mark.slow
def test_muon_steps_whole_matrices_of_stages_and_of_divided_matrices(tmp_path):
    expected = runs(1, tmp_path, one=(FOUR, "optimizer=muon"))["one"]
    found = runs(
        2, tmp_path, pipeline=(FOUR, PIPELINE, "optimizer=muon"), tensor=(FOUR, TENSOR, "optimizer=muon")
    )
    assert_same(found["pipeline"][1], expected[1])
    # Muon orthogonalizes in bf16, which has 8 bits: other roundings of a gradient are seen in the third digit.
    assert found["tensor"][0] == pytest.approx(expected[0], rel=1e-4)
    for name, value in expected[1].items():
        torch.testing.assert_close(found["tensor"][1][name], value, rtol=2e-2, atol=5e-3, msg=name)


def test_the_norm_over_all_stages_clips_every_stage(tmp_path):
    clip = "optimizer.clip=0.2"
    expected = runs(1, tmp_path, one=(FOUR, clip))["one"]
    assert_near(runs(2, tmp_path, pipeline=(FOUR, PIPELINE, clip))["pipeline"], expected, absolute=1e-6)


def per_target(logits, targets):
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


@pytest.mark.slow
def test_conversations_and_ones_own_loss_train_alike_in_all_modes(tmp_path):
    for name in ("padded", "packed"):
        data = (*settings_of(name, tmp_path), "train.batch_size=4", "train.accumulate=2")
        one = runs(1, tmp_path, **{f"{name}-one": data})[f"{name}-one"]
        for mode, found in runs(
            2, tmp_path, **{f"{name}-tensor": (*data, TENSOR), f"{name}-pipeline": (*data, PIPELINE)}
        ).items():
            assert found[0] == pytest.approx(one[0], rel=1e-5), mode
    expected = runs(1, tmp_path, one=(FOUR,))["one"][0]
    for mode in (TENSOR, PIPELINE):
        config = dataclasses.replace(config_of(tmp_path, FOUR, mode), loss=per_target)
        losses = run_ranks(run_whole, 2, config, tmp_path / mode, kind="gloo")[0]
        assert losses == pytest.approx(expected, rel=1e-5), mode


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_run_goes_from_divided_matrices_to_a_pipeline_to_one_rank(tmp_path):
    expected = runs(1, tmp_path, one=(FOUR,))["one"]
    followed = []
    for number, (world_size, settings, mode) in enumerate(
        [(2, (TENSOR,), "full, tensor parallel 2"), (2, (PIPELINE,), "full, pipeline 2"), (1, (), "full")]
    ):
        config = config_of(tmp_path, FOUR, *settings)
        losses, lines = run_ranks(
            run_part,
            world_size,
            config,
            tmp_path / "run",
            resume=number > 0,
            stop_after=number + 1,
            kind="gloo",
        )[0]
        followed += losses
        step = checkpoint_at(tmp_path / "run", number + 1)
        assert read_manifest(step).run["mode"] == mode
        assert not number or any("resumed" in line for line in lines)
    assert followed == pytest.approx(expected[0][:STEPS], rel=1e-5)
    assert_near((followed, whole_tensors(checkpoint_at(tmp_path / "run", STEPS))), (followed, expected[1]))


@pytest.mark.slow
@pytest.mark.arithmetic
def test_a_run_that_was_stopped_and_resumed_is_bitwise_the_run_that_was_not(tmp_path):
    chosen = {
        "tensor": (TENSOR,),
        "pipeline": (PIPELINE, "train.accumulate=2", INTERLEAVED),
        "both": (PIPELINE, TENSOR, "train.accumulate=2"),
    }
    for name, (_, tensors) in runs(4, tmp_path, **chosen).items():
        config, folder = config_of(tmp_path, *chosen[name]), tmp_path / f"{name}-stopped"
        for part in ({"stop_after": 2}, {"resume": True}):
            run_ranks(run_part, 4, config, folder, **part, kind="gloo")
        assert_same(whole_tensors(checkpoint_at(folder, STEPS)), tensors)


def end_with_bad_gradients(config, folder):
    with pytest.raises(StateError) as raised:
        run_part(config, folder)
    return str(raised.value)


def test_bad_gradients_are_traced_to_a_unit_of_any_stage(tmp_path):
    config = config_of(tmp_path, FOUR, PIPELINE, "optimizer.lr=1e30", "optimizer.warmup=0")
    errors = run_ranks(end_with_bad_gradients, 2, config, str(tmp_path / "run"), kind="gloo")
    assert errors[0] == errors[1]
    assert "unit 'model.layers." in errors[0]


# --- fp16 -----------------------------------------------------------------------------------------------------------


def steep(logits, targets):
    """Gradients that overflow in fp16 with the first scales."""
    return 20.0 * F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def whole_and_resumed(config, folder):
    """Returns what was shown of a run that was not stopped, and of the second part of one that was."""
    whole, resumed = Noted(), Noted()
    run_part(config, f"{folder}-whole", display=whole)
    run_part(config, folder, stop_after=3)
    run_part(config, folder, resume=True, display=resumed)
    return whole, resumed


@pytest.mark.parametrize(
    "choice",
    ["sharding.mode=full", *map(slow, ("sharding.mode=none", "sharding.mode=optimizer", TENSOR, PIPELINE))],
)
def test_fp16_skips_steps_that_overflow_and_resumes_with_its_scale(tmp_path, choice):
    fp16 = ("sharding.precision=fp16", "train.accumulate=2", "train.steps=6", "optimizer.warmup=0")
    config = dataclasses.replace(config_of(tmp_path, *fp16, choice), loss=steep)
    whole, resumed = run_ranks(whole_and_resumed, 2, config, str(tmp_path / "run"), kind="gloo")[0]
    skipped = [record for record in whole.records if record.grad_norm is None]
    assert 0 < len(skipped) < 4
    assert whole.records[0].loss_scale == 2.0**15
    assert whole.records[-1].loss_scale == 2.0 ** (16 - len(skipped))
    assert whole.summary.skipped == resumed.summary.skipped == len(skipped)
    assert "step 1 was skipped: its gradients overflowed in fp16; the loss scale is now 32768" in whole.lines
    assert whole.records[-1].loss < whole.records[0].loss
    figures = [(record.loss, record.grad_norm, record.loss_scale) for record in whole.records[3:]]
    assert figures == [(record.loss, record.grad_norm, record.loss_scale) for record in resumed.records]
    assert_same(*(whole_tensors(checkpoint_at(tmp_path / name, 6)) for name in ("run", "run-whole")))


def infinite(logits, targets):
    return math.inf * F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_fp16_does_not_skip_steps_whose_loss_is_not_finite(tmp_path):
    config = dataclasses.replace(config_of(tmp_path, "sharding.precision=fp16"), loss=infinite)
    (error,) = run_ranks(end_with_bad_gradients, 1, config, str(tmp_path / "run"), kind="gloo")
    assert "the gradients of step 1 are not finite" in error


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ((TENSOR, "sharding.mode=none"), "cannot be combined with mode 'none'"),
        ((PIPELINE, "sharding.mode=optimizer", FOUR), "cannot be combined with mode 'optimizer'"),
        ((TENSOR, "train.exact_micro_batches=4"), "divides sums"),
        ((TENSOR, "sharding.compile=true"), "cannot be combined with sharding.compile"),
        (("sharding.tensor_parallel=4",), r"model\.kv_heads is 2, which cannot be divided by 4"),
        ((TENSOR, "model.hidden=31"), r"model\.hidden=32"),
        ((TENSOR, "model.vocabulary=131"), r"model\.vocabulary=132"),
        (("sharding.tensor_parallel=0",), "use 1 or more"),
        ((PIPELINE,), "1 micro-batch cannot fill 2 stages"),
        ((PIPELINE, INTERLEAVED, "train.accumulate=3"), r"train\.accumulate=4"),
        (("sharding.pipeline=8", "train.accumulate=8"), "4 layers cannot be cut into 8 stages"),
        ((PIPELINE, INTERLEAVED, FOUR, "model.layers=3"), "3 layers cannot be cut into 4 stages"),
        ((PIPELINE, FOUR, "model.tied=true"), "share their weight"),
        (("sharding.schedule=zigzag",), "use one of 1f1b, gpipe, interleaved"),
    ],
)
def test_what_cannot_work_is_refused_before_any_rank_exists(tmp_path, settings, problem):
    with pytest.raises(ConfigError, match=problem):
        config_of(tmp_path, *settings)


def test_only_the_built_in_llama_is_divided(tmp_path):
    own = dataclasses.replace(config_of(tmp_path), model=OwnModel(torch.nn.Identity, torch.nn.Linear))
    with pytest.raises(ConfigError, match="the model is a OwnModel"):
        with_settings(own, [TENSOR])


def test_ranks_are_divided_into_stages_replicas_shards_and_parts():
    sharding = Sharding(mode="hybrid", replicas=2, tensor_parallel=2, pipeline=2)
    grids = [plan_grid(sharding, rank, 16) for rank in range(16)]
    assert [grid.stage for grid in grids] == [0] * 8 + [1] * 8
    assert [grid.data_rank for grid in grids] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert [rank for rank, grid in enumerate(grids) if grid.has_loss] == [8, 10, 12, 14]
    with pytest.raises(ConfigError, match="6 ranks cannot be divided into 2 pipeline stages of groups of 2"):
        plan_grid(sharding, 0, 6)
