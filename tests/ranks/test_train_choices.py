"""What people choose for a training: optimizers by name, schedules, a loss of their own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows

from shardwise.errors import ConfigError
from shardwise.testing import run_ranks
from shardwise.train.command import Request, resolve
from shardwise.train.schedules import learning_rate
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


def refused(configs, folder):
    found = {}
    for problem, config in configs.items():
        with pytest.raises(ConfigError) as raised:
            run_part(config, folder)
        found[problem] = str(raised.value)
    return found


def test_an_optimizer_that_cannot_be_made_or_stepped_is_refused_with_its_name(tmp_path):
    chosen = {
        "there is no optimizer 'torch.optim.Nothing'": ("optimizer=torch.optim.Nothing",),
        "is no optimizer, but <function": ("optimizer=os.path.join",),
        "AdamW has no argument 'speed'": ("optimizer.arguments.speed=3",),
        "did you mean 'fused'?": ("optimizer.arguments.foused=true",),
        "Muon has no argument 'betas'": ("optimizer=muon", "optimizer.arguments.betas=3"),
        "the schedule sets lr in every step": ("optimizer.arguments.lr=0.1",),
        "AdamW cannot be made: Invalid beta parameter at index 0: 2.0": ("optimizer.beta1=2",),
        "SGD cannot be made: Nesterov momentum requires": (
            "optimizer=sgd",
            "optimizer.arguments.nesterov=true",
            "optimizer.beta1=0",
        ),
        "LBFGS does not step each parameter": ("optimizer=torch.optim.LBFGS",),
        "SparseAdam does not step each": ("optimizer=torch.optim.SparseAdam", "sharding.mode=none"),
        "the optimizer cannot step shards: aten.": ("optimizer=torch.optim.Adafactor",),
    }
    text = write_text(tmp_path)
    configs = {problem: small_config(text, *settings) for problem, settings in chosen.items()}
    (found,) = run_ranks(refused, 1, configs, tmp_path / "run", kind="gloo")
    for problem, error in found.items():
        assert problem in error
        assert "optimizer.name" in error


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


def with_schedule(config, schedule):
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, schedule=schedule))


def of_nothing(logits, targets):
    return None


def without_gradient(logits, targets):
    return logits.detach().sum()


def test_a_loss_or_a_schedule_that_returns_something_else_is_refused_with_its_name(tmp_path):
    config = small_config(write_text(tmp_path))
    configs = {
        "the loss is no tensor, but None\n  where: loss=of_nothing": dataclasses.replace(
            config, loss=of_nothing
        ),
        "the loss has no gradient\n  where: loss=without_gradient": dataclasses.replace(
            config, loss=without_gradient
        ),
    }
    (found,) = run_ranks(refused, 1, configs, tmp_path / "run", kind="gloo")
    assert all(problem in error for problem, error in found.items())
    for returned in (None, -0.5, float("nan"), float("inf"), "much"):
        choice = with_schedule(config, lambda step, num_steps, returned=returned: returned).optimizer
        with pytest.raises(ConfigError, match=f"returned {returned!r} for step 3 of 6(.|\n)*<lambda>"):
            learning_rate(choice, 3, 6)
    assert learning_rate(with_schedule(config, lambda *_: torch.tensor(0.5)).optimizer, 3, 6) == 0.005


def double(step, num_steps):
    return 2.0 if step else 0.0


def test_a_schedule_of_ones_own_sets_the_learning_rate(tmp_path):
    config = small_config(write_text(tmp_path), "train.steps=1")
    run_ranks(run_twice, 1, with_schedule(config, double), str(tmp_path), kind="gloo")
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
