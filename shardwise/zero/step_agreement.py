"""The ranks of an optimizer on its steps: none begins one alone, and none is left waiting when one breaks off."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch.distributed as dist

from shardwise.comm.channels.channel import Channel
from shardwise.comm.channels.collective_log import collective_code, listed
from shardwise.comm.collectives.group import channel_of
from shardwise.engine.step.optimizer_hooks import last_checkpoint
from shardwise.zero.partition import Partition

__all__ = ["OptimizerAgreement"]

_EXCHANGE = collective_code("exchange the parameters that a ZeroRedundancyOptimizer has stepped")


class OptimizerAgreement:
    """What this rank tells the others about its steps, over the group's wire."""

    def __init__(self, partition: Partition, group: dist.ProcessGroup) -> None:
        self._partition = partition
        self._group = group
        # Watched from here on: ranks that wait in their first step can see where this one is.
        self._known_wire = self._find_channel()
        self._codes: dict[tuple[int, ...] | None, int] = {}

    @property
    def channel(self) -> Channel:
        if self._known_wire.device.type != self._partition.params[0].device.type:
            self._known_wire = self._find_channel()
        return self._known_wire

    def _find_channel(self) -> Channel:
        return channel_of(self._group, self._partition.params[0].device)

    def agree(self, *, has_gradients: bool) -> None:
        """Lets no rank step before all have come here, with gradients of the same parameters if it has any yet."""
        params = self._partition.params
        absent = None
        if has_gradients:
            absent = tuple([number for number, param in enumerate(params) if param.grad is None])
        code = self._codes.get(absent)
        if code is None:
            words = "step a ZeroRedundancyOptimizer"
            if absent is not None:
                words += f" of {len(params)} parameters"
            if absent:
                words += f", without gradients of {listed(absent)}"
            code = self._codes[absent] = collective_code(words)
        self.channel.agree(code)

    def exchanging(self, *, polls_failure: bool = False) -> AbstractContextManager[None]:
        """Around the exchange of what was stepped: a wait for a rank that does not come ends with the reason."""
        return self.channel.watched(_EXCHANGE, polls_failure=polls_failure)

    def tear(self, error: BaseException) -> None:
        """Tells peers that this rank's step raised."""
        checkpoint = f" ({last_checkpoint()})" if last_checkpoint() else ""
        self.channel.abort_step(
            f"{type(error).__name__} in the step of a ZeroRedundancyOptimizer, which is torn: some parameters are "
            f"updated and some are not; load the last checkpoint{checkpoint}"
        )
