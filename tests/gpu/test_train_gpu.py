"""Training on GPUs: every mode, resumed; checkpoints that go between GPUs and CPUs; the command's own ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.testing import run_ranks
from tests.ranks.training import STEPS, in_mode, run_part, small_config, write_text

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

REPOSITORY = Path(__file__).parents[2]
MODES = ("none", "optimizer", "gradients", "full", "hybrid")


def on_gpu(config, folder, **how):
    return run_part(config, folder, device=torch.device("cuda", torch.cuda.current_device()), **how)


def stop_and_resume(config, folder, modes, wholes):
    """Losses of each mode, stopped and resumed; where asked, also those of a run that was not."""
    losses = {}
    for mode in modes:
        ours = in_mode(config, mode)
        first, _ = on_gpu(ours, f"{folder}/{mode}", stop_after=3)
        second, _ = on_gpu(ours, f"{folder}/{mode}", resume=True)
        losses[mode] = first + second
        if mode in wholes:
            losses[f"{mode}, whole"], _ = on_gpu(ours, f"{folder}/{mode}-whole")
    return losses


def test_every_mode_trains_stops_and_resumes_on_nccl(tmp_path):
    config = small_config(write_text(tmp_path))
    losses = run_ranks(
        stop_and_resume, 2, config, tmp_path, MODES, ("full",), kind="nccl", timeout_seconds=140
    )[0]
    expected = losses.pop("full, whole")
    assert len(expected) == STEPS
    for mode, found in losses.items():
        assert found == pytest.approx(expected, rel=1e-3), mode


@pytest.mark.parametrize(
    "setting", ["sharding.precision=bf16", "sharding.offload=true", "sharding.recompute=true"]
)
def test_precision_offload_and_recomputation_train_on_a_gpu(tmp_path, setting):
    config = small_config(write_text(tmp_path), setting)
    losses = run_ranks(
        stop_and_resume, 2, config, tmp_path, ("full",), ("full",), kind="nccl", timeout_seconds=140
    )[0]
    assert losses["full"] == pytest.approx(losses["full, whole"], rel=2e-2)
    assert losses["full"][-1] < losses["full"][0]


def test_a_run_goes_from_gpus_to_cpus_and_back(tmp_path):
    config = small_config(write_text(tmp_path))
    whole, _ = run_ranks(on_gpu, 2, config, tmp_path / "whole", kind="nccl")[0]
    losses, _ = run_ranks(on_gpu, 2, config, tmp_path / "run", stop_after=2, kind="nccl")[0]
    for kind, part, stop_after in (("gloo", run_part, 4), ("nccl", on_gpu, None)):
        more, _ = run_ranks(part, 2, config, tmp_path / "run", resume=True, stop_after=stop_after, kind=kind)[
            0
        ]
        losses = losses + more
    assert losses == pytest.approx(whole, rel=1e-3)


def test_the_command_starts_a_rank_on_each_gpu(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "shardwise", "train", "tiny", "--json", "--out", str(tmp_path / "run")]
    command += ["--set", "train.steps=4", "--set", "sharding.precision=bf16", "--set", "train.batch_size=48"]
    done = subprocess.run(
        command,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["device"] == "CUDA"
    assert lines[0]["world_size"] == torch.cuda.device_count()
    assert lines[-1]["ended"] == "finished"
