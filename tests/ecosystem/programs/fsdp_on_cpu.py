"""Patches of libraries, for torch's side and ours alike: they offer FSDP on accelerators alone, and CI has a CPU."""

import contextlib

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp._flat_param import FlatParamHandle


def allow_fsdp_on_cpu() -> None:
    _let_accelerate_use_fsdp()
    # torch's wrapper frees full parameters that it "moves" from the CPU to the CPU, and reads them after that.
    FlatParamHandle.to_cpu = lambda handle: contextlib.nullcontext()


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
