"""``shardwise plan``, and what a run makes of its prediction."""

from __future__ import annotations

import json

import pytest
import torch

from shardwise import ConfigError
from shardwise.cli import main
from shardwise.forecast.device_files import prices_of_gpu
from shardwise.forecast.memory_play import MemoryForecast, Place
from shardwise.train.prediction import (
    PeakCheck,
    as_settings,
    choose_settings,
    difference_of,
    predict,
    question_of,
    shares_of,
)
from shardwise.train.recipes import RECIPES
from shardwise.train.settings import with_settings


def tiny(*settings):
    return with_settings(RECIPES["tiny"](), list(settings))


def test_the_command_prints_memory_time_and_links(capsys):
    assert main(["plan", "tiny", "--ranks", "4", "--device", "a100"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "tiny: 0.46 M parameters, 5 units, 4 × A100",
        "fits with",
        "tokens/s a rank",
        "4 ranks, over",
    ):
        assert part in shown


def test_the_command_compares_settings_and_devices(capsys):
    assert main(["plan", "tiny", "--ranks", "4", "--compare", "sharding.recompute=true,false", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert [plan["name"] for plan in plans] == ["sharding.recompute=true", "sharding.recompute=false"]
    assert plans[0]["flops"] > plans[1]["flops"]


def test_the_command_draws_the_step(tmp_path, capsys):
    page = tmp_path / "step.html"
    assert main(["plan", "tiny", "--ranks", "2", "--html", str(page)]) == 0
    assert "layers.0" in page.read_text()


def test_the_command_finds_settings_to_copy(capsys):
    assert main(["plan", "tiny", "--ranks", "4", "--choose", "--set", "train.batch_size=8"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("shardwise train tiny --set train.batch_size=8 --set sharding.mode=")
    flags = [flag for flag in last.split() if "=" in flag]
    with_settings(RECIPES["tiny"](), flags)


@pytest.mark.slow
def test_a_small_budget_is_met_by_smaller_micro_batches_or_recomputation_and_a_smaller_one_is_refused():
    config = tiny("train.batch_size=32", "train.accumulate=2")
    free = choose_settings(config, "h200", 2, 1, None)
    assert {"sharding.recompute=false", "train.accumulate=1"} <= set(as_settings(free.best.question.settings))
    memory = free.best.memory
    # Half of it, but for what no setting changes.
    budget = memory.by_kind["workspaces"] + 0.5 * (memory.reserved - memory.by_kind["workspaces"])
    tight = choose_settings(config, "h200", 2, 1, budget / 2**30)
    said = as_settings(tight.best.question.settings)
    assert "sharding.recompute=true" in said or "train.accumulate=1" not in said
    assert tight.best.memory.reserved <= budget
    # The budget, not the device, is what did not suffice.
    assert "reshard_after_forward=False" in tight.text()
    assert "does not fit by" in tight.text()
    with pytest.raises(ConfigError, match=r"none of [0-9]+ settings fits"):
        choose_settings(config, "h200", 2, 1, 0.01)


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        (("sharding.mode=none",), 4, "no prediction for sharding.mode=none"),
        (("train.batch_size=10",), 4, "train.batch_size is 10, which 4 ranks"),
    ],
)
def test_recipes_that_cannot_be_predicted_are_refused(settings, ranks, message):
    with pytest.raises(ConfigError, match=message):
        question_of(tiny(*settings), "h200", ranks, 1)


FORECAST = MemoryForecast(
    100 << 30, 110 << 30, {"activations": 60 << 30, "shards": 40 << 30}, Place("", "", ""), 0, {}
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to choose for")
def test_settings_are_not_chosen_for_a_machine_without_gpus(capsys):
    assert main(["train", "tiny", "--auto"]) == 1
    assert "settings are chosen for GPUs, and this machine has none" in capsys.readouterr().err


def test_a_prediction_that_was_close_is_noted_and_one_that_was_not_says_which_kind_was_wrong():
    assert difference_of(FORECAST, 102 << 30).endswith("+2.0 % of what was predicted")
    said = difference_of(FORECAST, 120 << 30)
    assert said.endswith("activations took 80.00 GiB instead of 60.00 GiB, beside shards 40.00 GiB")


def test_memory_is_told_apart_by_who_holds_it(monkeypatch):
    counted = {
        "memory_allocated": 10 << 30,
        "memory_reserved": 14 << 30,
        "mem_get_info": (60 << 30, 80 << 30),
    }
    for name, value in counted.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    said = shares_of(torch.device("cuda"))
    assert [word for word in said.split() if word[0].isdigit()] == ["10.00", "4.00", "6.00", "60.00"]


@pytest.mark.parametrize(("settings", "ranks"), [([], 6), (["--set", "train.batch_size=32"], 8)])
def test_without_a_number_of_ranks_it_takes_what_the_batch_allows(settings, ranks, capsys):
    assert main(["plan", "tiny", "--json", *settings]) == 0
    assert json.loads(capsys.readouterr().out)[0]["ranks"] == ranks


def test_a_choice_is_drawn_and_not_combined_with_other_questions(tmp_path, capsys):
    page = tmp_path / "step.html"
    assert main(["plan", "tiny", "--choose", "--html", str(page)]) == 0
    assert page.exists()
    assert "written to" in capsys.readouterr().out
    for beside in (["--compare", "ranks=2,4"], ["--what-if", "ranks=2..4"]):
        assert main(["plan", "tiny", "--choose", *beside]) == 1
        assert "one question at a time" in capsys.readouterr().err


def test_a_prediction_is_drawn_over_a_measured_step(tmp_path, capsys):
    page, measured = tmp_path / "both.html", tmp_path / "measured.json"
    step = predict(tiny("train.batch_size=8"), "h200", 2, 1).timeline.as_json()
    measured.write_text(json.dumps(step | {"name": "measured on Monday"}))
    assert main(["plan", "tiny", "--over", str(measured)]) == 1
    assert "name the page with --html" in capsys.readouterr().err
    assert main(["plan", "tiny", "--html", str(page), "--over", str(measured)]) == 0
    assert "measured on Monday" in page.read_text()


def test_a_run_on_a_cpu_predicts_nothing():
    class Alone:
        rank, world_size = 0, 1

    noted = []
    PeakCheck(tiny(), Alone(), torch.device("cpu"), noted.append).compare()
    assert noted == []


def test_gpus_are_known_by_the_names_that_torch_gives_them():
    assert prices_of_gpu("NVIDIA H200") == "h200"
    assert prices_of_gpu("NVIDIA H100 80GB HBM3") == "h100"
    assert prices_of_gpu("NVIDIA GeForce RTX 4090") is None
