"""Patches of libraries, for torch's side and ours alike: they offer FSDP on accelerators alone, and CI has a CPU."""

import contextlib
import os
from unittest import mock

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import _init_utils
from torch.distributed.fsdp._flat_param import FlatParamHandle


def allow_fsdp_on_cpu() -> None:
    _let_accelerate_use_fsdp()
    _let_accelerate_find_a_device()
    # torch's wrapper frees full parameters that it "moves" from the CPU to the CPU, and reads them after that.
    FlatParamHandle.to_cpu = lambda handle: contextlib.nullcontext()
    # And it sends rank 0's weights to GPUs alone.
    _init_utils._check_module_states_for_sync_module_states = lambda states: None


def _let_accelerate_use_fsdp() -> None:
    original = AcceleratorState.__init__

    def init(self, *arguments, fsdp_plugin=None, **options):
        is_new = not AcceleratorState._shared_state
        original(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
        if is_new and fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            # What the constructor does for every other kind of device.
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            # torch's wrapper tells "cpu:0" from "cpu".
            self.device = torch.device("cpu")
            PartialState._shared_state.update(distributed_type=self.distributed_type, device=self.device)

    AcceleratorState.__init__ = init


def _let_accelerate_find_a_device() -> None:
    """Makes rank 0 send its weights to the others' CPUs: the plugin looks for the current device of an accelerator."""
    original = FullyShardedDataParallelPlugin.__post_init__

    def post_init(self):
        found = mock.patch("accelerate.utils.dataclasses.is_xpu_available", return_value=True)
        with found, mock.patch("torch.xpu.current_device", return_value="cpu"):
            original(self)

    FullyShardedDataParallelPlugin.__post_init__ = post_init


def forget_accelerator() -> None:
    """Lets the next ``Accelerator`` of this process be another one."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
