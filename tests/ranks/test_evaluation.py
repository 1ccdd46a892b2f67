"""``shardwise eval``: the mean loss over all whole sequences, on any number of ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from shardwise.cli import main
from shardwise.testing import run_ranks
from shardwise.train.config import Source
from shardwise.train.evaluation import EvaluationRequest, evaluate_on_ranks
from shardwise.train.team import Team
from shardwise.train.trained_model import find_model, load_model
from tests.ranks.training import run_part, small_config, write_text

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run_ranks(run_part, 1, small_config(write_text(folder)), folder / "run", kind="gloo")
    return folder / "run"


def results(model, sources, batch_size=3):
    return evaluate_on_ranks(EvaluationRequest(str(model), tuple(map(str, sources)), batch_size), Team(), CPU)


def by_hand(model, text):
    """The mean loss of a text's whole sequences of 8 tokens, one by one."""
    parallel = load_model(find_model(str(model)), Team(), CPU)
    tokens = torch.tensor(list(text.encode()))
    losses = []
    with torch.no_grad():
        for start in range(0, len(tokens) - 8, 8):
            logits = parallel.logits(tokens[None, start : start + 8])
            losses.append(float(cross_entropy(logits[0], tokens[start + 1 : start + 9])))
    return sum(losses) / len(losses), 8 * len(losses)


def test_all_sequences_count_once_on_any_number_of_ranks(run, tmp_path):
    texts = {"a": "the quick brown fox jumps over it. " * 3, "b": "a lazy dog sleeps all day."}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    sources = [tmp_path / name for name in texts]
    expected = [run_ranks(by_hand, 1, run, text)[0] for text in texts.values()]
    for world_size in (1, 2, 3):
        for found in run_ranks(results, world_size, run, sources):
            assert [each.tokens for each in found] == [
                *(count for _, count in expected),
                sum(n for _, n in expected),
            ]
            for each, (loss, _) in zip(found, expected, strict=False):
                assert each.loss == pytest.approx(loss, rel=1e-5)
                assert each.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
            whole = sum(loss * count for loss, count in expected) / sum(count for _, count in expected)
            assert found[-1].loss == pytest.approx(whole, rel=1e-5)


def test_the_command_evaluates_what_the_run_held_out(run, given_one_rank, capsys):
    assert main(["eval", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["source"], found["tokens"] % 8) == ("held out", 0)
    assert 0 < found["loss"] < math.log(128)


def test_a_mixture_is_found_again_with_its_weights(tmp_path):
    text = write_text(tmp_path)
    mixed = (Source(str(text), 0.75), Source(str(tmp_path), 0.25))
    config = small_config(text)
    config = replace(config, data=replace(config.data, path="", sources=mixed))
    run_ranks(run_part, 1, config, tmp_path / "run", kind="gloo")
    model = find_model(str(tmp_path / "run"))
    assert model.data == config.data


def test_data_that_is_missing_is_reported_before_ranks_start(run, capsys):
    assert main(["eval", str(run), "--data", "/nowhere"]) == 1
    assert "there is no file or folder '/nowhere'" in capsys.readouterr().err
