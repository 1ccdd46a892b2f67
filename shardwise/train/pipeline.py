"""Runs the built-in Llama as a pipeline: each rank has some of its blocks, and micro-batches follow one another.

    stage 0   embedding, first blocks │ F0 F1 F2 F3 B0 B1 …
    stage 1   … last blocks, head     │    F0 B0 F1 B1 …       loss

The stages and schedules are those of ``torch.distributed.pipelining``. Gradients of all micro-batches are summed on
each rank in their order, and reduced once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name everyone knows
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.train.llama import LlamaModel
from shardwise.train.losses import IGNORED
from shardwise.train.model import segment_mask, segment_positions
from shardwise.train.samples import Batch
from shardwise.train.tensor_parallel import padded_to_multiple, whole

__all__ = ["Carried", "LlamaStage", "Pipeline", "cut_into_stages"]

_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}

MicroBatchLoss = Callable[[Tensor, Tensor, int], Tensor]
"""Returns the loss of the logits, targets and number of a micro-batch."""


class LlamaStage(nn.Module):
    """Some of a Llama's blocks, with the embedding before the first and the head after the last.

    Args:
        model: the whole model.
        blocks: the numbers of the stage's blocks.
        parts: into how many parts sequences are divided between blocks.
    """

    def __init__(self, model: LlamaModel, blocks: range, parts: int) -> None:
        super().__init__()
        trunk = model.model
        self._parts = parts
        self._rotations = trunk.rotations
        self.is_first, self.is_last = blocks.start == 0, blocks.stop == len(trunk.layers)
        self.embed_tokens = trunk.embed_tokens if self.is_first else None
        self.layers = nn.ModuleList(trunk.layers[number] for number in blocks)
        self.norm = trunk.norm if self.is_last else None
        self.lm_head = model.lm_head if self.is_last else None

    def forward(self, x: Tensor, segments: Tensor | None = None) -> Tensor:
        """Computes what the next stage is given, or logits, from tokens or what the previous stage has computed."""
        if self.embed_tokens is not None:
            length, x = x.size(1), self.embed_tokens(x)
        else:
            length = x.size(1) * self._parts
        positions, mask = torch.arange(length, device=x.device), None
        if segments is not None:
            positions, mask = segment_positions(segments)[:, None], segment_mask(segments)
        cos, sin = self._rotations(positions, x)
        for layer in self.layers:
            x = layer(x, cos, sin, None, mask)
        if self.norm is not None and self.lm_head is not None:
            x = whole(self.lm_head(self.norm(x)))
        return x


def cut_into_stages(
    model: LlamaModel, rank: int, num_ranks: int, per_rank: int, parts: int
) -> list[LlamaStage]:
    """Cuts a model into stages, and returns those of one rank of the pipeline.

    The other stages' modules are removed from the model; what remains keeps its name.
    """
    trunk, num_stages = model.model, num_ranks * per_rank
    num_blocks = len(trunk.layers)
    edges = [num_blocks * number // num_stages for number in range(num_stages + 1)]
    own = [range(edges[number], edges[number + 1]) for number in range(rank, num_stages, num_ranks)]
    stages = [LlamaStage(model, blocks, parts) for blocks in own]
    # By name instead of position: block 3 is still layers.3.
    kept = {str(number): trunk.layers[number] for blocks in own for number in blocks}
    trunk.add_module("layers", nn.ModuleDict(kept))
    if not any(each.is_first for each in stages):
        del trunk.embed_tokens
    if not any(each.is_last for each in stages):
        del trunk.norm, model.lm_head
    return stages


@dataclass(frozen=True)
class Carried:
    """What stages send to one another: for each sequence, a hidden state of each of its tokens or of a part of them."""

    context: int
    """The tokens of a sequence, a multiple of ``parts``; in training, shorter ones are padded."""
    width: int
    vocabulary: int
    parts: int
    """Into how many parts sequences are divided between blocks."""
    dtype: torch.dtype

    def hidden_shape(self, rows: int, length: int) -> tuple[int, int, int]:
        return rows, length // self.parts, self.width


class Pipeline:
    """The pipeline that this rank is a part of.

    Args:
        stages: this rank's stages, sharded.
        mesh: the ranks of this pipeline, of one axis.
        schedule: the name of the order of micro-batches.
        carried: what stages send to one another.
        device: the device of this rank.
    """

    def __init__(
        self,
        stages: Sequence[LlamaStage],
        mesh: DeviceMesh,
        schedule: str,
        carried: Carried,
        device: torch.device,
    ) -> None:
        self._stages, self._schedule_name, self._carried, self._device = stages, schedule, carried, device
        self._rank, self._num_ranks = mesh.get_local_rank(), mesh.size()
        self.group = mesh.get_group()
        self._peers = [dist.get_global_rank(self.group, rank) for rank in range(self._num_ranks)]
        self._schedule: Any = None
        self._loss: MicroBatchLoss | None = None
        self._next_loss = 0

    # --- training -----------------------------------------------------------------------------------------------

    def train(self, batches: Sequence[Batch], loss: MicroBatchLoss) -> None:
        """Runs forward and backward of a step's micro-batches; calls ``loss`` on the last stage's rank."""
        batches = [_padded(batch, self._carried) for batch in batches]
        if self._schedule is None:
            self._schedule = self._make_schedule(len(batches), batches[0].inputs.size(0))
        self._loss, self._next_loss = loss, 0
        arguments, options = [], {}
        if self._stages[0].is_first:
            arguments = [torch.cat([batch.inputs for batch in batches]).to(self._device)]
        if self._stages[-1].is_last:
            options["target"] = torch.cat([batch.targets for batch in batches]).to(self._device)
        segments = [batch.segments for batch in batches if batch.segments is not None]
        if segments:
            options["segments"] = torch.cat(segments).to(self._device)
        self._schedule.step(*arguments, return_outputs=False, **options)

    def _make_schedule(self, num_micro_batches: int, rows: int) -> Any:
        # Imported on use: it takes long, and only pipelines need it.
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        carried = self._carried
        shape = carried.hidden_shape(rows, carried.context)
        hidden = torch.empty(shape, dtype=carried.dtype, device="meta", requires_grad=True)
        tokens = torch.empty(rows, carried.context, dtype=torch.int64, device="meta")
        logits = torch.empty(
            rows,
            carried.context,
            carried.vocabulary,
            dtype=carried.dtype,
            device="meta",
            requires_grad=True,
        )
        num_stages = self._num_ranks * len(self._stages)
        stages = [
            PipelineStage(
                stage,
                self._rank + number * self._num_ranks,
                num_stages,
                self._device,
                input_args=tokens if stage.is_first else hidden,
                output_args=logits if stage.is_last else hidden,
                group=self.group,
            )
            for number, stage in enumerate(self._stages)
        ]
        kind: Any = get_schedule_class(_SCHEDULES[self._schedule_name])
        given = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        # The loss of each micro-batch is already its part of the step's.
        return kind(given, num_micro_batches, loss_fn=self._compute_loss, scale_grads=False)

    def _compute_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        # Micro-batches reach the end of the pipeline in their order.
        number, self._next_loss = self._next_loss, self._next_loss + 1
        assert self._loss is not None
        return self._loss(logits.float(), targets, number)

    # --- forward only -------------------------------------------------------------------------------------------

    def logits(self, tokens: Tensor, segments: Tensor | None) -> Tensor | None:
        """Returns the logits of a batch on the last stage's rank, None on the others; without gradients."""
        carried, length = self._carried, tokens.size(1)
        tokens, segments = padded_to_multiple(tokens, segments, carried.parts)
        shape = carried.hidden_shape(*tokens.shape)
        for stage in self._stages:
            x = tokens
            if not stage.is_first:
                x = torch.empty(shape, dtype=carried.dtype, device=self._device)
                dist.recv(x, self._peers[(self._rank - 1) % self._num_ranks], group=self.group)
            x = stage(x, segments)
            if stage.is_last:
                logits: Tensor = x[:, :length]
                return logits
            dist.send(x.contiguous(), self._peers[(self._rank + 1) % self._num_ranks], group=self.group)
        return None


def _padded(batch: Batch, carried: Carried) -> Batch:
    """Pads a batch to the length that all micro-batches of the run have."""
    inputs, segments = padded_to_multiple(batch.inputs, batch.segments, carried.context)
    missing = inputs.size(1) - batch.targets.size(1)
    return Batch(inputs, F.pad(batch.targets, (0, missing), value=IGNORED), segments)
