"""Lets libraries that know torch's FSDP recognise modules that ``fully_shard`` has sharded.

They ask ``isinstance(module, torch.distributed.fsdp.FSDPModule)``, and torch's pipelines then ask ``fully_shard.state``
to reduce the gradients of all micro-batches. So torch's class becomes the last base of sharded modules' classes, where
the methods of our ``FSDPModule`` hide all of torch's, and ``fully_shard.state`` finds a state of ours.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import fsdp

from shardwise.composable.fsdp_module import make_known_as
from shardwise.composable.fully_shard import fully_shard
from shardwise.engine.unit.membership import units_of
from shardwise.torch_internals import set_composable_state

_TORCHS_FULLY_SHARD: Any = fsdp.fully_shard


class PipelinedState:
    """What torch's pipelines use of ``fully_shard.state(module)``, under the names that they use.

    They go through the parameter groups of all states, then end the backward of the root. Here the end reduces
    everything, and there are no groups.
    """

    _fsdp_param_group = None
    _fsdp_param_groups: tuple[()] = ()

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def _state_ctx(self) -> PipelinedState:
        return self

    @property
    def all_states(self) -> tuple[PipelinedState]:
        return (self,)

    def _root_post_backward_final_callback(self) -> None:
        units_of(self._module)[0].root.reduce_stash()


def make_recognised() -> None:
    """Makes modules that are sharded from now on instances of torch's ``FSDPModule``, with a state."""
    make_known_as(fsdp.FSDPModule, _set_state)
    fully_shard.state = _TORCHS_FULLY_SHARD.state  # type: ignore[attr-defined]


def _set_state(module: nn.Module) -> None:
    set_composable_state(module, _TORCHS_FULLY_SHARD, PipelinedState(module))
