"""What tests of whole commands share."""

from __future__ import annotations

import socket

import pytest

from shardwise import torch_internals
from shardwise.comm.mesh import forget_meshes


@pytest.fixture
def given_one_rank(monkeypatch):
    """This process is what a launcher of one rank would start, at a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    yield port
    # What a process of its own would have taken along.
    forget_meshes()
    torch_internals.forget_meshes()
