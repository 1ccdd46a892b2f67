"""The demo does what it says, and can say no."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "examples" / "demo.py"


def load_demo():
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    demo = importlib.util.module_from_spec(spec)
    # Its records look their module up by name while they are made.
    sys.modules["demo"] = demo
    spec.loader.exec_module(demo)
    return demo


@pytest.mark.timeout(150)
def test_the_demo_trains_and_finds_the_runs_equal():
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(DEMO), "--steps", "4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stderr
    assert "sharded      step   4/4" in done.stdout
    assert "one process  step   4/4" in done.stdout
    assert "max difference      0 in the weights, 0 in the losses" in done.stdout
    assert "equal, bit for bit: 4 losses" in done.stdout
    assert "\r" not in done.stdout
    assert done.stderr == ""


def test_the_demo_notices_a_single_bit(capsys):
    demo = load_demo()
    run = demo.Run(losses=[1.0], weights={"w": torch.ones(3)}, kept_bytes=12)
    assert demo.compare(run, run)
    off_by_a_bit = torch.nextafter(torch.ones(3), torch.full((3,), 2.0))
    assert not demo.compare(dataclasses.replace(run, weights={"w": off_by_a_bit}), run)
    assert not demo.compare(dataclasses.replace(run, losses=[1.0 + 2**-40]), run)
    assert "NOT EQUAL" in capsys.readouterr().err
