"""With torch and nothing else: what is optional is not needed, and what is needed is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BARE = """
import sys
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        missing = name.partition(".")[0] in {"numpy", "rich", "matplotlib", "safetensors", "tensorboard"}
        return None if missing else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""
PROGRAM = """
import contextlib, importlib, io, pkgutil
import torch
import torch.distributed as dist
import shardwise
from shardwise.testing import check_parity, run_ranks

def step():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for param in model.parameters():
        torch.nn.init.constant_(param, 0.25)
    for layer in model:
        shardwise.fully_shard(layer)
    shardwise.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4) * (dist.get_rank() + 1)).sum().backward()
    shardwise.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return model[0].weight.full_tensor().detach().sum().item()

def parity():
    model = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.constant_(model.weight, 0.25)
    return str(check_parity(model, torch.ones(2, 4), shard=shardwise.fully_shard).difference)

if __name__ == "__main__":
    import sys
    sums = {value for kind in ("threads", "gloo") for value in run_ranks(step, 2, kind=kind)}
    print("steps", len(sums))
    print("parity", run_ranks(parity, 2))
    for module in pkgutil.walk_packages(shardwise.__path__, "shardwise."):
        if module.name not in ("shardwise.__main__", "shardwise.train.live"):
            importlib.import_module(module.name)
    from shardwise.cli import main
    from shardwise.train import doctor
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        print("train", main(["train", "tiny", "--out", "run"]))
        open("w.safetensors", "w").close()
        print("convert", main(["convert", "w.safetensors", "converted"]))
    print(said.getvalue().replace("\\n", "|"))
    (found,) = [each for each in [doctor._check_package("numpy", "shardwise train needs it", is_needed=True)]]
    print("doctor", found)
    print("numpy" in sys.modules)
"""


@pytest.mark.slow
def test_sharding_and_ranks_need_torch_alone_and_training_names_what_it_needs_beside(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BARE)
    (tmp_path / "program.py").write_text(PROGRAM)
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**clean, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    steps, parity, train, convert, error, doctor, has_numpy = done.stdout.splitlines()
    assert steps == "steps 1", "threads and processes computed different weights"
    assert parity == "parity ['None', 'None']"
    assert train == "train 1"
    assert convert == "convert 1"
    assert error == (
        "error: shardwise train needs the package 'numpy', which is not installed"
        "|  where: this Python environment|  fix:   pip install numpy|"
        "error: reading .safetensors files needs the package 'safetensors', which is not installed"
        "|  where: w.safetensors|  fix:   pip install safetensors|"
    )
    assert "good=False" in doctor
    assert "pip install numpy" in doctor
    assert has_numpy == "False"
    assert not (tmp_path / "run").exists()


def test_what_training_needs_is_declared():
    (declared,) = [
        line
        for line in (REPOSITORY / "pyproject.toml").read_text().splitlines()
        if re.match(r"train = \[", line)
    ]
    for package in ("numpy", "rich", "matplotlib", "safetensors"):
        assert f'"{package}' in declared
