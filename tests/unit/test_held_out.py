"""Held-out samples are a part of the data, spread all over it, and the same in every run on it."""

from __future__ import annotations

import json

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.train.checkpointing import changes_of_split
from shardwise.train.command import Request, resolve
from shardwise.train.config import Data
from shardwise.train.data import Corpus
from shardwise.train.held_out import HeldOut
from shardwise.train.samples import Mixture, Texts
from shardwise.train.trained_model import _data_of_run


def places(num_samples, num_held_out, place="everywhere"):
    """The places of training samples and of held-out ones."""
    chosen = HeldOut(num_samples, num_held_out, place)
    training = [chosen.training_place(number) for number in range(num_samples - num_held_out)]
    return training, [chosen.held_out_place(number) for number in range(num_held_out)]


@given(st.integers(1, 3000), st.floats(0, 1), st.sampled_from(["everywhere", "end"]))
def test_every_sample_is_either_trained_on_or_held_out(num_samples, fraction, place):
    training, held_out = places(num_samples, int(fraction * (num_samples - 1)), place)
    assert sorted([*training, *held_out]) == list(range(num_samples))
    assert training == sorted(training)
    if place == "end":
        assert held_out == list(range(len(training), num_samples))


@given(st.integers(6_000, 40_000))
@settings(deadline=None)
def test_every_twentieth_of_the_data_has_its_part(num_samples):
    num_held_out = num_samples // 20
    chosen = HeldOut(num_samples, num_held_out, "everywhere")
    in_parts = [0] * 20
    for number in range(num_held_out):
        in_parts[20 * chosen.held_out_place(number) // num_samples] += 1
    assert min(in_parts) > num_held_out / 20 / 2
    assert max(in_parts) < num_held_out / 20 * 2


def test_a_short_evaluation_sees_all_of_the_data_and_long_held_out_stretches_are_not_split():
    num_samples = 65_000
    training, held_out = places(num_samples, num_samples // 20)
    halves = [place < num_samples // 2 for place in held_out[:48]]
    assert 12 < sum(halves) < 36
    neighbours = sum(place + 1 in set(held_out) for place in held_out[:500])
    assert neighbours > 400
    assert len(training) + len(held_out) == num_samples


def test_a_mixtures_first_held_out_samples_are_of_all_sources():
    parts = [Texts(Corpus([torch.full((4001,), number)]), 10, 9, 0.1) for number in (1, 2)]
    mixture = Mixture(parts)
    first = [int(mixture.read(mixture.num_training + number).inputs[0]) for number in range(20)]
    assert 5 < first.count(1) < 15
    everything = [int(mixture.read(mixture.num_training + n).inputs[0]) for n in range(mixture.num_held_out)]
    assert everything.count(1) == everything.count(2) == 40


def test_runs_that_were_begun_before_there_was_a_choice_keep_their_held_out_end(tmp_path):
    config = {"data.held_out": 0.05, "data.path": ""}
    (tmp_path / "config.json").write_text(json.dumps({"recipe": "tiny", "settings": [], "config": config}))
    resumed = resolve(Request(resume=str(tmp_path)))
    assert resumed.config.data.held_out_from == "end"
    # And for good: what is saved from now on says so.
    assert resumed.origin["settings"] == ["data.held_out_from=end"]
    assert resolve(Request()).config.data.held_out_from == "everywhere"
    assert _data_of_run(config) == Data(held_out_from="end")


def test_other_packs_hold_out_other_conversations():
    before = {"data.held_out": 0.1, "data.held_out_from": "everywhere", "data.packing": False}
    assert changes_of_split(before, before) == []
    assert changes_of_split(before, {**before, "data.packing": True}) == [
        "data.packing was False and is True"
    ]
