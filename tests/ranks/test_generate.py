"""``shardwise generate``: the same text from a run, its checkpoint and its export, on any number of ranks."""

from __future__ import annotations

import json
import shutil
import sys
from itertools import islice

import pytest
import torch

from shardwise.checkpoint.convert import export_safetensors
from shardwise.checkpoint.manifest import read_manifest
from shardwise.checkpoint.weights import open_weights
from shardwise.cli import main
from shardwise.errors import ConfigError
from shardwise.testing import run_ranks
from shardwise.train import generate
from shardwise.train.generate import Generator
from shardwise.train.sampling import Sampling
from shardwise.train.team import Team
from shardwise.train.trained_model import find_model, load_model
from tests.ranks.training import checkpoint_at, run_part, small_config, write_text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run_ranks(run_part, 1, small_config(write_text(folder)), folder / "run", kind="gloo")
    return folder / "run"


def made(model, prompt="the quick", num_tokens=20, **settings):
    """Tokens that a model makes on this rank."""
    team, found = Team(), find_model(str(model))
    device = torch.device("cpu")
    generator = Generator(load_model(found, team, device), found, team, device)
    return list(islice(generator.tokens(list(prompt.encode()), Sampling(**settings)), num_tokens))


def test_text_is_the_same_on_any_number_of_ranks(run):
    alone = run_ranks(made, 1, run)[0]
    assert len(alone) == 20
    for world_size in (2, 3):
        assert run_ranks(made, world_size, run) == [alone] * world_size
    assert run_ranks(made, 1, run, seed=1)[0] != alone


def test_a_checkpoint_and_an_export_say_what_the_run_says(run, tmp_path):
    said = run_ranks(made, 1, run, temperature=0.0)[0]
    assert run_ranks(made, 1, checkpoint_at(run), temperature=0.0)[0] == said
    export_safetensors(open_weights(run), tmp_path / "exported", shard_bytes=4000)
    assert run_ranks(made, 1, tmp_path / "exported", temperature=0.0)[0] == said
    # The tokenizer went with it.
    assert find_model(str(tmp_path / "exported")).tokenizer == str(tmp_path / "exported")


def test_the_command_prints_each_text_or_a_json_object(run, tmp_path, given_one_rank, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the lazy\nthe quick\n")
    few = ["--max-tokens", "6", "--temperature", "0"]
    assert main(["generate", str(run), "--prompts", str(prompts), *few]) == 0
    out, _ = capsys.readouterr()
    first, second = out.split("---\n")
    assert first.startswith("the lazy")
    assert second.startswith("the quick")
    assert main(["generate", str(run), "the quick", *few, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["prompt"], record["tokens"]) == ("the quick", 6)
    assert second == f"the quick{record['text']}\n"


def test_any_seed_will_do_and_a_long_prompt_is_told(run, given_one_rank, capsys):
    few = ["--max-tokens", "2", "--seed", str(10**30)]
    assert main(["generate", str(run), "the quick " * 90, *few]) == 0
    assert "note: the prompt has 900 tokens, of which the model sees the last" in capsys.readouterr().err


def test_closed_streams_are_no_error(run, given_one_rank, monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["generate", str(run), "--max-tokens", "2"]) == 0


def test_a_prompt_that_is_refused_in_the_terminal_does_not_end_it(run, given_one_rank, capsys, monkeypatch):
    prompts = iter(["é", "the quick", None])
    monkeypatch.setattr(generate, "_ask_in_terminal", lambda: prompts.__next__)
    generate.generate(generate.Request(str(run), is_interactive=True, max_tokens=2))
    out, err = capsys.readouterr()
    assert "token 195" in err
    assert out.startswith("the quick")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nowhere"], "there is no file or folder '/nowhere'"),
        (["RUN", "é"], "the prompt contains token 195, but the model's vocabulary is 128"),
        (["RUN", "a", "--top-p", "2"], "top-p is 2.0"),
        (["RUN", "a", "--max-tokens", "0"], "0 tokens were asked for"),
        (["RUN", "--prompts", "/nowhere"], "the prompts cannot be read"),
    ],
)
def test_bad_requests_are_refused_before_ranks_start(run, arguments, said, capsys):
    assert main(["generate", *(str(run) if word == "RUN" else word for word in arguments)]) == 1
    assert said in capsys.readouterr().err


def test_a_module_of_your_own_asks_for_its_recipe(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    manifest = read_manifest(checkpoint_at(copy))
    manifest.run.update(config={}, hugging_face=None, recipe="mine.py:big")
    (checkpoint_at(copy) / "manifest.json").write_text(manifest.to_text())
    with pytest.raises(ConfigError, match=r"--recipe mine.py:big"):
        find_model(str(copy))
