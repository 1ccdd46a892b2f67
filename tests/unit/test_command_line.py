"""The command line by itself: help, explained settings and completion, all without torch."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import main, parser
from shardwise.cli.completion import RECIPE_NAMES, completion_script
from shardwise.cli.settings import explanations, setting_choices
from shardwise.train.config import Config
from shardwise.train.recipes import RECIPES
from shardwise.train.request import Request, resolve
from shardwise.train.settings import settings_of

REPOSITORY = Path(__file__).parents[2]
COMMANDS = (
    "train",
    "plan",
    "generate",
    "eval",
    "runs",
    "watch",
    "convert",
    "doctor",
    "run",
    "trace",
    "completion",
)


# --- help ---------------------------------------------------------------------------------------------------------

WITHOUT_TORCH = """
import sys
from shardwise.cli import main
for words in [["--help"], *([name, "--help"] for name in sys.argv[1:]), ["completion", "bash"], ["completion", "fish"]]:
    try:
        main(words)
    except SystemExit as left:
        assert not left.code
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""


def test_help_and_completion_import_no_torch_and_every_command_has_an_example():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *COMMANDS],
        env={"PYTHONPATH": str(REPOSITORY), "COLUMNS": "100", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, *helps = done.stdout.split("usage: shardwise")[1:]
    for name in COMMANDS:
        assert f"\n    {name}" in first
    for name, text in zip(COMMANDS, helps, strict=True):
        assert f"shardwise {name}" in text.partition("example")[2], name


# Libraries may swallow an exception that comes while they are imported.
SWALLOWING = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    [None for _ in range(1000)]
except KeyboardInterrupt:
    pass
"""


@pytest.mark.parametrize(
    ("silent", "said"), [([], "loading torch …\n"), (["--quiet"], ""), (["--json"], "")], ids=str
)
def test_torch_is_waited_for_aloud_and_ctrl_c_ends_that(tmp_path, silent, said):
    (tmp_path / "torch.py").write_text(SWALLOWING)
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.cli", "train", "tiny", *silent],
        env={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", said)


# --- settings -----------------------------------------------------------------------------------------------------


def test_every_setting_is_explained_and_known_to_completion():
    names = {name for name, _, _ in settings_of(Config())}
    assert set(setting_choices()) == names
    silent = [
        name
        for (record, name), entry in explanations().items()
        if not entry.text
        and not entry.record
        and record in {type(getattr(Config(), f)).__name__ for f in vars(Config())}
    ]
    assert silent == []
    assert "ratio" in explanations()["Optimization", "min_lr"].text
    assert setting_choices()["optimizer.schedule"] == ("constant", "linear", "cosine", "wsd")
    assert setting_choices()["data.shuffle"] == ("true", "false")


def test_the_list_of_settings_fits_a_narrow_terminal_and_is_a_file_that_can_be_used(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["train", "small", "--settings", "--set", "train.seed=5"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 60
    assert "# In the recipe: 0.\ntrain.seed = 5\n" in text
    assert '# One of: text, chat.\ndata.format = "text"\n' in text
    (tmp_path / "my.toml").write_text(text)
    wanted = resolve(Request("small", ("train.seed=5",)))
    found = resolve(Request(config=str(tmp_path / "my.toml")))
    assert found.config == wanted.config
    # A run does not keep what only repeats its recipe.
    assert found.settings == ("train.seed=5",)


# --- completion ---------------------------------------------------------------------------------------------------

TYPED = {
    ("tr",): {"train", "trace"},
    ("train", "--se"): {"--set", "--settings"},
    ("train", "--set", "train.st"): {"train.steps="},
    ("train", "--device", "c"): {"cpu", "cuda"},
    ("train", "llama-1"): {"llama-125m", "llama-1b"},
    ("plan", "llama-1"): {"llama-125m", "llama-1b"},
    ("plan", "--set", "train.st"): {"train.steps="},
    ("completion", "f"): {"fish"},
    ("run", "a b"): {"a b.py"},
}


@pytest.fixture
def scripts(tmp_path):
    (tmp_path / "a b.py").write_text("")
    for shell in ("bash", "zsh", "fish"):
        (tmp_path / shell).write_text(completion_script(shell, parser()))
    return tmp_path


def run_shell(folder, *words):
    # Without anybody's own settings.
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TERM": "dumb"}
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout


def needs(shell):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


def test_recipes_that_are_completed_are_those_that_exist():
    assert tuple(RECIPES) == RECIPE_NAMES


@needs("bash")
def test_bash_completes_commands_settings_values_and_paths(scripts):
    # As bash divides words: at =, too.
    values = {
        ("train", "--set", "optimizer.schedule", "="): {"constant", "linear", "cosine", "wsd"},
        ("train", "--set", "sharding.mode", "=", "f"): {"full"},
        ("train", "--set", "data.path", "=", "a"): {"a b.py"},
        ("train", "--set", "sharding.mode=f"): {"sharding.mode=full"},
    }
    wanted = {**TYPED, **values}
    lines = ["source ./bash", "compopt() { :; }"]
    for words in wanted:
        quoted = " ".join(f"'{word}'" for word in words)
        lines.append(f"COMP_WORDS=(shardwise {quoted}); COMP_CWORD={len(words)}; _shardwise")
        lines.append("printf '%s|' \"${COMPREPLY[@]}\"; echo")
    said = run_shell(scripts, "bash", "--norc", "-c", "\n".join(lines)).splitlines()
    for (words, completed), line in zip(wanted.items(), said, strict=True):
        assert set(line.split("|")[:-1]) == completed, words


@needs("fish")
def test_fish_completes_commands_settings_and_values(scripts):
    wanted = {**TYPED, ("train", "--set", "sharding.mode=f"): {"sharding.mode=full"}}
    del wanted["run", "a b"]
    lines = ["source ./fish"]
    for words in wanted:
        lines += [f"complete -C 'shardwise {' '.join(words)}'", "echo end"]
    said = run_shell(scripts, "fish", "--no-config", "-c", "\n".join(lines)).split("end\n")
    for (words, completed), block in zip(wanted.items(), said, strict=False):
        assert {line.split("\t")[0] for line in block.splitlines()} == completed, words


@needs("zsh")
def test_zsh_reads_its_script(scripts):
    # What it completes is only seen in a terminal.
    said = run_shell(
        scripts,
        "zsh",
        "-f",
        "-c",
        "autoload -U compinit; compinit -u -D; source ./zsh; echo $_comps[shardwise]",
    )
    assert said == "_shardwise\n"
