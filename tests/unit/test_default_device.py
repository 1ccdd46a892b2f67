"""The device on which models are sharded when nobody says which."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwise.comm.mesh import default_device_type


@pytest.mark.parametrize(
    ("backend", "device_type"),
    [
        ("nccl", "cuda"),
        ("cpu:gloo,cuda:nccl", "cuda"),
        ("undefined", "cuda"),
        ("gloo", "cpu"),
        ("threaded", "cpu"),
    ],
)
def test_the_process_group_says_which_device_is_meant(monkeypatch, backend, device_type):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    assert default_device_type([torch.zeros(2), torch.zeros(2, device="meta")]) == device_type


def test_without_an_accelerator_it_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "undefined")
    assert default_device_type([torch.zeros(2)]) == "cpu"
