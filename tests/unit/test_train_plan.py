"""What a run decides without ranks: settings, the order of samples, learning rates, how many ranks."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.train.config import Config, Optimization, Sharding, Training
from shardwise.train.launch import given_ranks, plan_ranks
from shardwise.train.rank_grid import num_replicas
from shardwise.train.recipes import RECIPES, load_recipe
from shardwise.train.records import sparkline
from shardwise.train.sample_order import SampleOrder, plan_order, shuffled
from shardwise.train.schedules import learning_rate
from shardwise.train.settings import settings_of, with_settings

# --- settings -----------------------------------------------------------------------------------------------------


def test_a_setting_is_parsed_as_the_type_of_its_field():
    config = with_settings(
        Config(),
        [
            "train.steps=7",
            "optimizer.lr=1e-3",
            "optimizer.clip=2",
            "sharding.mode=hybrid",
            "sharding.compile=yes",
            "data.path=a=b.txt",
            "model.width=64",
            "train.batch_size=1_200",
            "train.late_seconds=3600",
        ],
    )
    assert config.train.late_seconds == 3600.0
    assert config.train.steps == 7
    assert config.optimizer.lr == 1e-3
    assert isinstance(config.optimizer.clip, float)
    assert config.sharding == Sharding(mode="hybrid", compile=True)
    assert config.data.path == "a=b.txt"
    assert config.model.width == 64
    assert config.train.batch_size == 1200


def test_the_last_assignment_of_a_setting_wins():
    assert with_settings(Config(), ["optimizer=muon"]).optimizer == Optimization(name="muon")
    assert with_settings(Config(), ["train.steps=7", "train.steps=9"]).train.steps == 9


@pytest.mark.parametrize(
    ("assignment", "answer"),
    [
        ("train.step=5", "did you mean 'train.steps'?"),
        ("optimiser.lr=1", "did you mean 'optimizer.lr'?"),
        ("lr=1", "did you mean 'optimizer.lr'?"),
        ("xyzzy=1", "shardwise train --settings"),
        ("train.steps", "write --set name=value"),
        ("train.steps=many", "such as 100"),
        ("train.steps=2.5", "not a whole number"),
        ("train.steps=0", "1 or more"),
        ("sharding.mode=ful", "did you mean 'full'?"),
        ("sharding.compile=perhaps", "true or false"),
        ("optimizer.lr=fast", "not a number"),
        ("data.held_out=1.5", "0.05"),
        ("model.heads=3", "multiple of 2 × heads"),
    ],
)
def test_an_invalid_setting_is_answered_with_a_valid_one(assignment, answer):
    with pytest.raises(ConfigError) as refused:
        with_settings(Config(), [assignment])
    assert answer in str(refused.value)


@pytest.mark.parametrize("setting", ["sharding.offload=true", "sharding.group_bytes=1000"])
def test_offload_and_groups_are_refused_where_nothing_is_sharded(setting):
    with pytest.raises(ConfigError, match=r"sharding\.mode=full"):
        with_settings(Config(), ["sharding.mode=none", setting])


def test_every_built_in_recipe_is_complete_and_fits_common_numbers_of_ranks():
    for name in RECIPES:
        config = with_settings(load_recipe(name), [])
        assert config.name == name
        assert all(setting for setting, _, _ in settings_of(config))
        for world_size in (1, 2, 4, 8) if config.train.batch_size % 8 == 0 else (1, 2, 3, 4):
            SampleOrder(1000, config.train.batch_size, world_size, config.train.accumulate)


def test_an_unknown_recipe_is_answered_with_the_nearest_one(tmp_path):
    for name, answer in (
        ("llama1b", "did you mean 'llama-1b'?"),
        (f"{tmp_path}/none.py:recipe", "there is no file"),
        ("no.such.module:recipe", "cannot be imported"),
    ):
        with pytest.raises(ConfigError) as refused:
            load_recipe(name)
        assert answer in str(refused.value)
    file = tmp_path / "mine.py"
    file.write_text("def recipe():\n    return 3\n")
    with pytest.raises(ConfigError, match=r"shardwise\.train\.Config"):
        load_recipe(f"{file}:recipe")
    with pytest.raises(ConfigError, match="did you mean 'recipe'"):
        load_recipe(f"{file}:recipes")


def test_a_recipe_of_ones_own_is_a_function_in_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from shardwise.train import Config\ndef recipe():\n    return Config(name='mine')\n")
    assert load_recipe(f"{file}:recipe").name == "mine"


# --- the order of samples -----------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(1, 400), st.integers(0, 2**64))
def test_shuffling_is_a_permutation(length, key):
    assert sorted(shuffled(index, length, key) for index in range(length)) == list(range(length))


def test_epochs_and_seeds_shuffle_differently():
    orders = [
        tuple(SampleOrder(100, 10, seed=seed).sample(epoch * 100 + index) for index in range(100))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4
    assert SampleOrder(100, 10, seed=None).sample(117) == 17


@settings(max_examples=40)
@given(st.integers(1, 50), st.integers(0, 1000))
def test_a_steps_samples_do_not_depend_on_ranks_or_micro_batches(num_samples, seen):
    def of_step(world_size, accumulate):
        order = SampleOrder(num_samples, 12, world_size, accumulate)
        return [
            sample
            for rank in range(world_size)
            for micro in range(accumulate)
            for sample in order.samples(seen, rank, micro)
        ]

    alone = of_step(1, 1)
    assert len(alone) == 12
    for world_size, accumulate in ((1, 3), (2, 1), (3, 2), (4, 3)):
        assert of_step(world_size, accumulate) == alone


@settings(max_examples=40)
@given(st.integers(1, 50), st.integers(0, 1000))
def test_with_exact_sums_a_micro_batch_is_the_same_on_whichever_rank_it_runs(num_samples, seen):
    train = Training(batch_size=24, exact_micro_batches=8)

    def of_step(world_size):
        order = plan_order(num_samples, train, world_size, 0)
        return {
            order.micro_batch_index(rank, micro): order.samples(seen, rank, micro)
            for rank in range(world_size)
            for micro in range(order.accumulate)
        }

    alone = of_step(1)
    assert list(alone) == list(range(8))
    for world_size in (2, 4, 8):
        assert of_step(world_size) == alone
        order = plan_order(num_samples, train, world_size, 0)
        assert [order.micro_batch_index(rank, 0) for rank in range(world_size)] == list(range(world_size))


@pytest.mark.parametrize("world_size", [3, 16])
def test_exact_sums_are_refused_on_numbers_of_ranks_that_cannot_compute_them(world_size):
    with pytest.raises(ConfigError, match=f"8 micro-batches cannot be summed exactly on {world_size} ranks"):
        plan_order(100, Training(batch_size=48, exact_micro_batches=8), world_size, 0)


def test_exact_micro_batches_and_accumulate_exclude_each_other():
    with pytest.raises(ConfigError, match=r"use train\.accumulate=1"):
        with_settings(Config(), ["train.exact_micro_batches=8", "train.accumulate=2"])


def test_a_batch_that_cannot_be_divided_is_refused_with_one_that_can():
    with pytest.raises(ConfigError, match="a multiple of 6, such as 12"):
        SampleOrder(100, 10, world_size=3, accumulate=2)


# --- rates, ranks, replicas ---------------------------------------------------------------------------------------


def test_the_learning_rate_warms_up_linearly_and_decays_to_its_minimum():
    choice = Optimization(lr=1.0, min_lr=0.1, warmup=4)
    rates = [learning_rate(choice, step, 20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[3:]))
    assert 0.1 < rates[-1] < 0.13
    assert learning_rate(choice, 10**9, 20) == pytest.approx(0.1)
    assert learning_rate(dataclasses.replace(choice, warmup=0), 0, 20) == 1.0


def test_schedules_hold_fall_or_decay_at_the_end():
    def rates(schedule, **choices):
        choice = Optimization(lr=2.0, min_lr=0.0, warmup=2, schedule=schedule, **choices)
        return [learning_rate(choice, step, 12) for step in range(12)]

    assert rates("constant") == [1.0] + [2.0] * 11
    assert rates("linear")[1:] == pytest.approx([2.0 * (1 - step / 10) for step in (0, *range(10))])
    decayed = [2.0] * 8 + [1.5, 1.0, 0.5]
    assert rates("wsd", decay=0.4)[1:] == pytest.approx(decayed)
    assert rates(lambda step, num_steps: step / num_steps) == [2.0 * step / 12 for step in range(12)]


def test_a_schedule_is_chosen_by_name_also_over_a_function():
    config = Config(optimizer=Optimization(schedule=lambda step, num_steps: 1.0))
    assert with_settings(config, ["optimizer.schedule=wsd"]).optimizer.schedule == "wsd"
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        with_settings(config, ["optimizer.schedule=cosin"])
    with pytest.raises(ConfigError, match=r"optimizer\.decay is 0"):
        with_settings(config, ["optimizer.schedule=wsd", "optimizer.decay=0"])


def test_arguments_of_an_optimizer_are_set_one_by_one():
    chosen = ["optimizer=torch.optim.NAdam", "optimizer.arguments.betas=(0.8, 0.9)"]
    chosen += ["optimizer.arguments.decoupled_weight_decay=true", "optimizer.arguments.word=some"]
    optimizer = with_settings(Config(), chosen).optimizer
    assert optimizer.name == "torch.optim.NAdam"
    assert optimizer.arguments == {"betas": (0.8, 0.9), "decoupled_weight_decay": True, "word": "some"}
    with pytest.raises(ConfigError, match="did you mean 'muon'"):
        with_settings(Config(), ["optimizer=moun"])


def test_ranks_default_to_gpus_or_two_on_the_cpu():
    assert plan_ranks(None, "auto", 0) == (2, "cpu")
    assert plan_ranks(3, "auto", 0) == (3, "cpu")
    assert plan_ranks(None, "auto", 4) == (4, "cuda")
    assert plan_ranks(2, "auto", 4) == (2, "cuda")
    assert plan_ranks(9, "cpu", 4) == (9, "cpu")


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(ConfigError, match="8 ranks were requested, but this machine has 4 GPUs") as refused:
        plan_ranks(8, "auto", 4)
    assert "--ranks 4, or --device cpu" in str(refused.value)
    with pytest.raises(ConfigError, match="no GPU"):
        plan_ranks(1, "cuda", 0)


def test_ranks_of_torchrun_and_slurm_are_joined():
    assert given_ranks({"PATH": "x", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    torchrun |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    found = given_ranks(torchrun)
    assert found is not None
    assert dataclasses.astuple(found) == (3, 4, 1, 2, "10.0.0.1", 1234)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NNODES": "2"}
    for hosts, first in (("gpu[03-04]", "gpu03"), ("a,b", "a"), ("n[7,9]", "n7"), ("only", "only")):
        found = given_ranks({**slurm, "SLURM_STEP_NODELIST": hosts, "SLURM_JOB_ID": "41"})
        assert found is not None
        assert dataclasses.astuple(found) == (5, 8, 1, 4, first, 20041)


def test_replicas_are_hosts_or_two_and_divide_the_ranks():
    assert num_replicas(0, 16, 8) == 2
    assert num_replicas(0, 4, 4) == 2
    assert num_replicas(0, 1, 1) == 1
    assert num_replicas(4, 8, 8) == 4
    with pytest.raises(ConfigError, match="a divisor of 6"):
        num_replicas(4, 6, 6)


def test_a_sparkline_falls_with_its_values():
    assert sparkline([8.0, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline([float("nan")], 8) == ""
    assert len(sparkline([float(n) for n in range(1000)], 20)) == 20
