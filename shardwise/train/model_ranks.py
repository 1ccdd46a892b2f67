"""Starts the ranks of commands that use a trained model: one by default, or as many as the model is sharded over."""

from __future__ import annotations

import os

import torch

from shardwise.train.launch import Work, given_ranks, joined_process_group, plan_ranks, run_local_ranks
from shardwise.train.run_files import fill_standard_streams

__all__ = ["run_model_ranks"]


def run_model_ranks(work: Work, ranks: int | None, device: str) -> int:
    """Runs ``work`` on ranks started here, or as the rank of a launcher, and returns the exit status."""
    fill_standard_streams()
    num_gpus = torch.cuda.device_count()
    assigned = given_ranks(os.environ) if ranks is None else None
    if assigned is None:
        num_ranks, kind = plan_ranks(1 if ranks is None else ranks, device, num_gpus)
        return run_local_ranks(work, num_ranks, kind)
    kind = ("cuda" if num_gpus else "cpu") if device == "auto" else device
    with joined_process_group(assigned, kind) as own:
        work(own)
    return 0
