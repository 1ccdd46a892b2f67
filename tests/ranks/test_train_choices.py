"""What people choose for a training: optimizers by name, schedules, a loss of their own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows

from shardwise.errors import ConfigError
from shardwise.testing import run_ranks
from shardwise.train.command import Request, resolve
from tests.ranks.training import assert_same, checkpoint_at, run_part, small_config, whole_tensors, write_text


def run_all(configs, folder):
    return {name: run_part(config, f"{folder}/{name}", stop_after=3)[0] for name, config in configs.items()}


class Signs(torch.optim.SGD):
    """An optimizer of the user's own, without weight decay."""

    def __init__(self, params, lr, power=1.0):
        super().__init__(params, lr=lr)
        self.power = power


def test_optimizers_are_chosen_by_dotted_name_or_class_in_sharded_and_replicated_modes(tmp_path):
    text = write_text(tmp_path)
    adamw = "optimizer.weight_decay=0.05"
    named = ("optimizer.name=torch.optim.AdamW", "optimizer.arguments.betas=(0.9, 0.95)", adamw)
    configs = {}
    for mode in ("full", "optimizer"):
        configs[f"{mode}-short"] = small_config(text, f"sharding.mode={mode}", adamw)
        configs[f"{mode}-named"] = small_config(text, f"sharding.mode={mode}", *named)
    of_own = small_config(text, "optimizer.arguments.power=0.5")
    configs["own"] = dataclasses.replace(of_own, optimizer=dataclasses.replace(of_own.optimizer, name=Signs))
    configs["adagrad"] = small_config(text, "optimizer=torch.optim.Adagrad")
    losses = run_ranks(run_all, 2, configs, str(tmp_path), kind="gloo")[0]
    for mode in ("full", "optimizer"):
        assert losses[f"{mode}-named"] == losses[f"{mode}-short"]
    assert len({tuple(losses[name]) for name in ("full-short", "own", "adagrad")}) == 3
    assert any(name.endswith("/sum") for name in whole_tensors(checkpoint_at(tmp_path / "adagrad", 3)))


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        (("optimizer=torch.optim.Nothing",), "there is no optimizer 'torch.optim.Nothing'"),
        (("optimizer=os.path.join",), "is no optimizer"),
        (("optimizer.arguments.speed=3",), "AdamW does not take these arguments"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_refused_with_its_name(tmp_path, choice, problem):
    config = small_config(write_text(tmp_path), *choice)
    (error,) = run_ranks(refused, 1, config, tmp_path / "run", kind="gloo")
    assert problem in error


def refused(config, folder):
    with pytest.raises(ConfigError) as raised:
        run_part(config, folder)
    return str(raised.value)


def test_a_run_folder_cannot_make_a_resume_import_a_class(tmp_path):
    (tmp_path / "config.json").write_text('{"recipe": "tiny", "settings": ["optimizer.name=evil.Class"]}')
    with pytest.raises(ConfigError, match=r"an optimizer of your own, 'evil\.Class'"):
        resolve(Request(resume=str(tmp_path)))
    named = Request(resume=str(tmp_path), settings=("optimizer=evil.Class",))
    assert resolve(named).config.optimizer.name == "evil.Class"
    (tmp_path / "config.json").write_text('{"recipe": "tiny", "settings": ["optimizer=torch.optim.NAdam"]}')
    assert resolve(Request(resume=str(tmp_path))).config.optimizer.name == "torch.optim.NAdam"


def each_targets_cross_entropy(logits, targets):
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def smoothed(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.3)


def test_a_loss_of_ones_own_trains_and_evaluates_the_model(tmp_path):
    config = small_config(write_text(tmp_path), "train.steps=3")
    configs = {"built-in": config}
    for loss in (each_targets_cross_entropy, smoothed):
        configs[loss.__name__] = dataclasses.replace(config, loss=loss)
    losses = run_ranks(run_all, 2, configs, str(tmp_path), kind="gloo")[0]
    assert losses["each_targets_cross_entropy"] == pytest.approx(losses["built-in"], rel=1e-5)
    assert losses["smoothed"][1] != pytest.approx(losses["built-in"][1], rel=1e-3)


def double(step, num_steps):
    return 2.0 if step else 0.0


def test_a_schedule_of_ones_own_sets_the_learning_rate(tmp_path):
    config = small_config(write_text(tmp_path), "train.steps=1")
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, schedule=double))
    run_ranks(run_twice, 1, config, str(tmp_path), kind="gloo")
    first, second = (whole_tensors(checkpoint_at(tmp_path / "run", step)) for step in (1, 2))
    model = [name for name in first if name.startswith("model/")]
    # The first step had a learning rate of 0.
    untrained = whole_tensors(checkpoint_at(tmp_path / "other seed", 1))
    assert any(not torch.equal(first[name], second[name]) for name in model)
    assert_same({name: first[name] for name in model}, {name: untrained[name] for name in model})


def run_twice(config, folder):
    run_part(config, f"{folder}/run")
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=2))
    run_part(longer, f"{folder}/run", resume=True)
    # Another step with a learning rate of 0, on other samples.
    shuffled = dataclasses.replace(config, data=dataclasses.replace(config.data, shuffle=False))
    run_part(shuffled, f"{folder}/other seed")
