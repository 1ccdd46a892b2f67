"""Agreement on an optimizer's steps: no rank starts one alone, and no rank is left waiting when one raises."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch.distributed as dist

from shardwise.comm.channels.channel import Channel
from shardwise.comm.channels.collective_log import collective_code, listed
from shardwise.comm.collectives.group import channel_of
from shardwise.engine.step.agreement import last_checkpoint
from shardwise.zero.partition import Partition

__all__ = ["OptimizerAgreement"]

_EXCHANGE = collective_code("exchange the parameters that a ZeroRedundancyOptimizer has stepped")


class OptimizerAgreement:
    """Reports this rank's steps to the other ranks, over the group's channel."""

    def __init__(self, partition: Partition, group: dist.ProcessGroup) -> None:
        self._partition = partition
        self._group = group
        # Created now, so that ranks that wait in their first step can already see where this one is.
        self._channel = self._find_channel()
        self._codes: dict[tuple[int, ...] | None, int] = {}

    @property
    def channel(self) -> Channel:
        if self._channel.device.type != self._partition.params[0].device.type:
            self._channel = self._find_channel()
        return self._channel

    def _find_channel(self) -> Channel:
        return channel_of(self._group, self._partition.params[0].device)

    def agree(self, *, has_gradients: bool) -> None:
        """Waits until all ranks are about to step; raises if they have gradients of different parameters."""
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
        """Returns a context for the exchange of stepped pieces, in which the watchdog ends waits for lost ranks."""
        return self.channel.watched(_EXCHANGE, polls_failure=polls_failure)

    def report_torn_step(self, error: BaseException) -> None:
        """Tells the other ranks that this rank's step raised."""
        checkpoint = f" ({last_checkpoint()})" if last_checkpoint() else ""
        self.channel.abort_step(
            f"{type(error).__name__} in the step of a ZeroRedundancyOptimizer, which is torn: some parameters are "
            f"updated and some are not; load the last checkpoint{checkpoint}"
        )
