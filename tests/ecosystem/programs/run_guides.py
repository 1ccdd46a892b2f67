"""The guides that need libraries: the Python of each page runs as printed, in one namespace and one folder."""

import functools
import os
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch.distributed as dist
import torchao.float8
from lightning.pytorch import Trainer
from transformers import TrainingArguments

import shardwise
from tests.ecosystem.programs.cases import case, main
from tests.ecosystem.programs.fsdp_on_cpu import allow_fsdp_on_cpu, forget_accelerator
from tests.ecosystem.programs.models import tiny_llama
from tests.ranks.test_guides import blocks_of

GUIDES = Path(__file__).parents[3] / "docs" / "guides"


# From the last one up; the page that makes the process group itself goes first.
@case("lightning")
@case("torchao")
@case("bitsandbytes")
@case("accelerate")
@case("libraries")
@case("trainer")
@case("trl")
@case("hugging_face")
def guide(folder: Path, page: str) -> int:
    shardwise.install()
    os.chdir(folder)
    if page in ("hugging_face", "bitsandbytes") and os.environ["RANK"] == "0":
        tiny_llama().save_pretrained("a-folder")
    if dist.is_initialized():
        dist.barrier()
    namespace = {"__name__": "example"}
    blocks = [block for block in blocks_of(GUIDES / f"{page}.md") if block.language == "python"]
    for block in blocks:
        source = "\n" * (block.line - 1) + block.text
        exec(compile(source, block.page, "exec"), namespace)
    dist.barrier()
    return len(blocks)


def _use_the_cpu() -> None:
    """The settings that a machine without a GPU needs, and the guides leave out."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    original = TrainingArguments.__post_init__

    def post_init(self):
        self.use_cpu = True
        original(self)

    TrainingArguments.__post_init__ = post_init
    # What emulates float8 where no kernel has it.
    torchao.float8.Float8LinearConfig = functools.partial(torchao.float8.Float8LinearConfig, emulate=True)
    lightning.pytorch.Trainer = _trainer_on_cpu


def _trainer_on_cpu(**options: Any) -> Any:
    """Lightning's Trainer. Lightning refuses its FSDPStrategy itself on a CPU, and its subclasses nowhere."""

    class OnCpu(lightning.pytorch.strategies.FSDPStrategy):
        pass

    strategy = OnCpu() if options["strategy"] == "fsdp" else options["strategy"]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    return Trainer(**{**options, **quiet, "accelerator": "cpu", "strategy": strategy})


def _forget() -> None:
    forget_accelerator()
    os.environ["ACCELERATE_USE_CPU"] = "true"


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    _use_the_cpu()
    main(_forget)
