"""torchtitan: its own trainer, from its own configs: dense, float8, pipelined and with expert parallelism."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.ecosystem.programs.cases import case, main

WORDS = 256
SMALL = "--training.local_batch_size=2 --training.seq_len=32 --training.steps=4 --debug.seed=1 --debug.deterministic"
# Graphs of CUDA are no matter of a CPU, and traces of collectives are NCCL's.
QUIET = "--training.disable_cuda_graphs --comm.trace_buf_size=0"
# torchtitan's default, spmd_types, wants a torch newer than 2.13 with either FSDP.
DTENSORS = "--parallelism.spmd_backend=partial_dtensor"
SAVED = "--checkpoint.enable --checkpoint.interval=2"
FLOAT32 = "--training.mixed_precision_param=float32"
LLAMA, EXPERTS = (
    "--module=llama3 --config=llama3_debugmodel",
    "--module=deepseek_v3 --config=deepseek_v3_debugmodel",
)

# The debug models as they are: bfloat16, activations recomputed by choice, a loss in chunks.
CONFIGS = {
    "llama": f"{LLAMA} {SAVED}",
    "saved-in-background": f"{LLAMA} {SAVED} {FLOAT32} --checkpoint.async_mode=async",
    "kept-gathered": f"{LLAMA} {FLOAT32} --parallelism.fsdp_reshard_after_forward=never",
    "accumulated": f"{LLAMA} {FLOAT32} --training.global_batch_size=8",
    "recomputed": f"{LLAMA} {FLOAT32} activation-checkpoint:full",
    "whole-loss": f"{LLAMA}_ce_loss {SAVED}",
    "float8-lora": f"{LLAMA}_float8_emulate_lora",
    "full-dtensors": f"{LLAMA} {FLOAT32} --parallelism.spmd_backend=full_dtensor",
    "tensor-parallel": f"{LLAMA} {FLOAT32} --parallelism.tensor_parallel_degree=2",
    "replicated": f"{LLAMA} {FLOAT32} --parallelism.data_parallel_replicate_degree=2",
    "experts": f"{EXPERTS} {SAVED}",
    "expert-parallel": f"{EXPERTS} {SAVED} --parallelism.expert_parallel_degree=2",
}


def trainer(folder: Path, name: str) -> dict[str, Any]:
    """Trains with a config, and once more from the checkpoint in the middle."""
    _write_assets(folder)
    options = CONFIGS[name].split()
    first = _Run(folder, options)
    if SAVED in CONFIGS[name]:
        if dist.get_rank() == 0:
            (folder / "out" / "checkpoint" / "step-4").rename(folder / "last")
        dist.barrier()
        resumed = _Run(folder, options)
        assert resumed.steps == first.steps[2:]
    return {"steps": first.steps, "weights": first.weights}


for name in CONFIGS:
    case(name)(trainer)


class _Run:
    """One run of torchtitan's command for training, and what it found."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        from torchtitan.config import ConfigManager

        paths = [f"--dump_folder={folder / 'out'}", f"--hf_assets_path={folder / 'tokenizer'}"]
        paths += [f"--dataloader.dataset_path={folder / 'text'}"]
        self.steps: list[tuple[int, float, float, float]] = []
        defaults = f"{SMALL} {QUIET} {DTENSORS}".split()
        trainer = ConfigManager().parse_args([*defaults, *paths, *options]).build()
        try:
            with mock.patch.object(trainer.metrics_processor, "log", self._log):
                trainer.train()
            self.weights = {
                name: value.full_tensor() if isinstance(value, DTensor) else value
                for part in trainer.model_parts
                for name, value in part.state_dict().items()
                if isinstance(value, torch.Tensor)
            }
        finally:
            trainer.close()

    def _log(self, step: int, loss: float, largest: float, norm: float, **others: Any) -> None:
        self.steps.append((step, loss, largest, norm))


def _write_assets(folder: Path) -> None:
    """A tokenizer of words, and a text: torchtitan's own are not part of its package."""
    files, text = folder / "tokenizer", folder / "text"
    if dist.get_rank() == 0:
        files.mkdir()
        text.mkdir()
        words = [f"w{number}" for number in range(WORDS)]
        tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, "w0"))
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.save(str(files / "tokenizer.json"))
        (files / "tokenizer_config.json").write_text(json.dumps({"bos_token": "w1", "eos_token": "w2"}))
        numbers = torch.randint(3, WORDS, (64, 40), generator=torch.Generator().manual_seed(0)).tolist()
        texts = [" ".join(words[number] for number in row) for row in numbers]
        (text / "data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    dist.barrier()


def _let_torchtitan_use_the_cpu() -> None:
    """Patches torchtitan, which knows accelerators alone: the device, its memory, and attention that runs on a CPU."""
    # The kernels of one way to dispatch tokens, which no config here uses. They import triton.
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()
    from torchtitan.tools import utils

    memory = SimpleNamespace(total_memory=1)
    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        set_device=lambda device: None,
        current_device=lambda: 0,
        device_count=lambda: 1,
        synchronize=lambda: None,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: memory,
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda device: {},
    )
    utils.get_local_device = lambda: torch.device("cpu")
    utils.get_peak_flops = lambda name: 1.0

    from torchtitan.models.common import attention, config_utils

    # FlexAttention has no backward on a CPU, where every sequence is one document instead.
    config_utils.get_attention_config = lambda backend: attention.ScaledDotProductAttention.Config()

    from torchtitan.distributed import fsdp
    from torchtitan.distributed import utils as distributed

    # Asks for a function that torch 2.13 has not.
    distributed.set_pg_timeouts = lambda timeout, parallel_dims: None
    disable_division = fsdp.disable_fsdp_gradient_division

    def disable_division_on_gloo(model):
        disable_division(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Gloo cannot scale in a reduction, and torch would ask it to multiply by one.
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = disable_division_on_gloo


if __name__ == "__main__":
    _let_torchtitan_use_the_cpu()
    dist.init_process_group("gloo")
    main()
