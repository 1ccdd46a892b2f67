"""The demo does what it says, and can say no."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise import cli
from shardwise.checkpoint.convert import import_weights
from shardwise.checkpoint.weights import Weight, Weights
from shardwise.train.records import StepRecord

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "examples" / "demo.py"


def load_demo():
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    return demo


def test_the_commands_of_the_demo_are_understood(tmp_path, monkeypatch):
    demo, commands = load_demo(), []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--steps", "4"])
    monkeypatch.setattr(
        demo, "run", lambda why, *arguments: commands.append(cli.parser().parse_args(arguments))
    )
    monkeypatch.setattr(demo, "compare", lambda left, right: True)
    assert demo.main() == 0
    assert [command.run.__name__ for command in commands] == ["_train"] * 3 + ["_convert"]


@pytest.mark.slow
def test_the_demo_trains_resumes_finds_the_runs_equal_and_exports(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(DEMO), "--steps", "4"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for words in (
        "stopped at step 2 of 4",
        "resumed step-00000002",
        "finished at step 4 of 4",
        "4 steps",
        "at most 0 apart",
        "equal, bit for bit",
        "model/model.safetensors",
    ):
        assert words in done.stdout, words
    starts = ("loading torch …", "starting 2 CPU ranks in runs/demo/two …")
    assert all(line in starts for line in done.stderr.splitlines()), done.stderr
    for left in ("two/loss.png", "two/checkpoints/latest", "one/metrics.jsonl", "model/model.safetensors"):
        assert (tmp_path / "runs" / "demo" / left).exists(), left


def test_the_demo_notices_a_single_bit(tmp_path, capsys):
    demo = load_demo()

    def make_run(name, value, loss):
        weight = Weight("w", (3,), value.dtype, (((0,), value),))
        import_weights(Weights((weight,), None), tmp_path / name)
        record = StepRecord(1, loss, 0.1, 1.0, 1.0, 1.0, 1)
        (tmp_path / name / "metrics.jsonl").write_text(record.to_json() + "\n")
        return tmp_path / name

    run = make_run("run", torch.ones(3), 1.0)
    off_by_a_bit = make_run("bit", torch.nextafter(torch.ones(3), torch.full((3,), 2.0)), 1.0)
    other_loss = make_run("loss", torch.ones(3), 1.0 + 2**-40)
    assert demo.compare(run, make_run("same", torch.ones(3), 1.0))
    assert not demo.compare(run, off_by_a_bit)
    assert not demo.compare(run, other_loss)
    assert "NOT EQUAL" in capsys.readouterr().err
