"""Files of settings: the same names, checks and values as on the command line, which wins."""

from __future__ import annotations

import json
import sys

import pytest

from shardwise.cli import main, parser, request_of
from shardwise.errors import ConfigError
from shardwise.train.config import Source
from shardwise.train.config_file import config_text, read_config_file
from shardwise.train.request import Request, resolve


def write(folder, text, name="my.toml"):
    path = folder / name
    path.write_text(text)
    return str(path)


def test_tables_and_dotted_names_give_what_set_gives(tmp_path):
    path = write(
        tmp_path,
        """
        recipe = "small"
        name = "mine"
        train.steps = 7
        [data]
        sources = [{path = "web.jsonl", weight = 0.7}, {path = "code", weight = 3}]
        shuffle = false
        [optimizer]
        name = "torch.optim.NAdam"
        lr = 1
        arguments.betas = [0.9, 0.99]
        [sharding]
        """,
    )
    found = resolve(Request(config=path))
    assert found.recipe == "small"
    config = found.config
    assert (config.name, config.train.steps, config.data.shuffle) == ("mine", 7, False)
    assert config.data.sources == (Source("web.jsonl", 0.7), Source("code", 3.0))
    assert (config.optimizer.lr, config.optimizer.arguments) == (1.0, {"betas": [0.9, 0.99]})
    assert config.train.batch_size == 48


def test_the_command_line_wins_over_the_file_and_the_file_over_the_run(tmp_path):
    kept = ["train.steps=1", "train.seed=1", "train.batch_size=2"]
    (tmp_path / "config.json").write_text(json.dumps({"recipe": "tiny", "settings": kept}))
    path = write(tmp_path, "train.steps = 5\ntrain.seed = 5")
    asked = ("train.seed=9",)
    found = resolve(Request(config=path, settings=asked, resume=str(tmp_path)))
    train = found.config.train
    assert (train.steps, train.seed, train.batch_size) == (5, 9, 2)
    assert found.kept == ("train.batch_size=2",)
    assert sorted(found.settings) == ["train.batch_size=2", "train.seed=9", "train.steps=5"]


def test_a_name_that_ends_in_toml_is_a_file(tmp_path):
    path = write(tmp_path, "train.steps = 5")
    for words in (["train", path], ["train", "small", "--config", path]):
        request = request_of(parser().parse_args(words))
        assert request.config == path
        assert resolve(request).config.train.steps == 5
        assert resolve(request).recipe == ("tiny" if words[1] == path else "small")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[train]\nstep = 5",
            ["my.toml: train.step\n", "there is no setting", "did you mean 'train.steps'?"],
        ),
        ('sharding.mode = "ful"', ["my.toml: sharding.mode\n", "did you mean 'full'?"]),
        ("train.steps = 1.5", ["my.toml: train.steps\n", "is not a whole number"]),
        ("train.steps = 1979-05-27", ["my.toml: train.steps\n", "a date is no value of a setting"]),
        ("recipe = 3", ["my.toml: recipe\n", "is not the name of a recipe"]),
        ('recipe = "tinny"', ["did you mean 'tiny'?"]),
        ("train.steps 5", ["my.toml\n", "it is not TOML", "(at line 1, column 13)"]),
        ('recipe = "evil.py:recipe"', ["shardwise train evil.py:recipe --config"]),
        ('optimizer.name = "evil.Class"', ["name it again: --set optimizer.name=evil.Class"]),
    ],
)
def test_what_a_file_cannot_say_is_refused_with_its_place(tmp_path, text, words):
    with pytest.raises(ConfigError) as refused:
        resolve(Request(config=write(tmp_path, text)))
    for word in words:
        assert word in str(refused.value)


def test_code_that_a_file_names_runs_if_the_command_line_names_it_too(tmp_path, monkeypatch):
    write(tmp_path, "from shardwise.train.recipes import small\ndef recipe(): return small()", "mine.py")
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, 'recipe = "mine.py:recipe"\ntrain.steps = 3')
    found = resolve(Request("mine.py:recipe", config=path))
    assert (found.recipe, found.config.name, found.config.train.steps) == ("mine.py:recipe", "small", 3)


def test_a_file_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["train", str(tmp_path / "no.toml"), "--dry-run"]) == 1
    assert "the settings cannot be read: No such file or directory" in capsys.readouterr().out


def test_a_python_without_toml_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path, "train.steps = 5")
    for name in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="pip install tomli"):
        read_config_file(path)


def test_the_file_that_a_run_writes_makes_the_same_run(tmp_path):
    odd = 'a "b" \\ c\t\x7f é 😀 = #'
    settings = (
        f"data.column={odd}",
        "train.steps=7",
        "optimizer=torch.optim.SGD",
        "optimizer.arguments.nesterov=true",
        "optimizer.arguments.dampening=0.0",
        "optimizer.lr=1e-05",
        "sharding.recompute=true",
        "data.sources=a*0.5, b*0.5",
        "output.folder=runs/first",
    )
    first = resolve(Request("small", settings))
    path = write(tmp_path, config_text(first.config, first.base, first.recipe, "runs/first/config.toml"))
    again = resolve(Request(config=path))
    assert again.config.data.column == odd
    # A folder belongs to one run.
    assert again.config.output.folder == ""
    assert resolve(Request(config=path, settings=("output.folder=runs/first",))).config == first.config
    assert len(again.settings) == len(settings) - 1


@pytest.mark.parametrize("source", ['{path = "a,b.txt"}', '{path = "a", wieght = 1}', "{weight = 1}", "3"])
def test_a_table_that_is_no_source_is_refused(tmp_path, source):
    path = write(tmp_path, f"data.sources = [{source}]")
    with pytest.raises(ConfigError, match=r"is no source(.|\n)*my\.toml: data\.sources"):
        read_config_file(path)
