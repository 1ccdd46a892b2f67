"""A mesh of ranks that do not exist: its collectives are written to the tape of a dry run."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.channels.channel import UNNAMED, Channel
from shardwise.comm.collectives.group import DONE, GroupCollectives, Work
from shardwise.comm.mesh import DataMesh, give_reading
from shardwise.forecast.recording import TapeRecorder
from shardwise.torch_internals import mesh_without_groups

META = torch.device("meta")


class DryChannel(Channel):
    """The collectives of one axis, as rank 0 issues them: it has the most of every uneven shard."""

    is_dry = True
    gathers_each = True

    def __init__(self, recorder: TapeRecorder, world: int, axis: str) -> None:
        super().__init__(META, "dry run", world, ordered_by_stream=True, averages=True)
        self._recorder = recorder
        self._axis = axis

    def _write(self, kind: str, whole: torch.Tensor | int, num_tensors: int = 1) -> Work:
        num_bytes = whole if isinstance(whole, int) else whole.nbytes
        self._recorder.collective(kind, num_bytes, self.world, self._axis, num_tensors)
        return DONE

    def issue_all_gather(self, output: torch.Tensor, own: torch.Tensor, code: int = UNNAMED) -> Work:
        return self._write("all_gather", output)

    def issue_all_gather_each(
        self, outputs: list[torch.Tensor], owns: list[torch.Tensor], code: int = UNNAMED
    ) -> Work:
        return self._write("all_gather", sum(output.nbytes for output in outputs), len(outputs))

    def issue_reduce_scatter(
        self, output: torch.Tensor, rows: torch.Tensor, average: bool, code: int = UNNAMED
    ) -> Work:
        return self._write("reduce_scatter", rows)

    def issue_exchange(self, output: torch.Tensor, rows: torch.Tensor, code: int = UNNAMED) -> Work:
        return self._write("all_to_all", rows)

    def issue_all_reduce(self, tensor: torch.Tensor, average: bool, code: int = UNNAMED) -> Work:
        return self._write("all_reduce", tensor)


class DryMesh(DataMesh):
    """The groups of rank 0."""

    @property
    def rank(self) -> int:
        return 0

    def separate_shard_group(self) -> GroupCollectives:
        return self.shard

    def part(self, part_world: int) -> GroupCollectives:
        shard: Any = self.shard
        if part_world not in self._parts:
            self._parts[part_world] = DryChannel(shard._recorder, part_world, "part")
        return self._parts[part_world]


def dry_mesh(recorder: TapeRecorder, shard: int, replicate: int = 1) -> DeviceMesh:
    """Returns a mesh of ``replicate`` × ``shard`` meta devices that ``fully_shard`` and the wrapper accept."""
    mesh = mesh_without_groups("meta", (replicate, shard) if replicate > 1 else (shard,))
    replicas = DryChannel(recorder, replicate, "replicate") if replicate > 1 else None
    reading = DryMesh(mesh, META, DryChannel(recorder, shard, "shard"), replicas)
    give_reading(mesh, reading)
    return mesh
