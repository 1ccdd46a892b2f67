"""transformers: its Trainer with FSDP 2 and 1 trains, evaluates, generates, saves and resumes; its own sharding."""

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from tests.ecosystem.programs.cases import case, main
from tests.ecosystem.programs.fsdp_on_cpu import allow_fsdp_on_cpu, forget_accelerator
from tests.ecosystem.programs.models import Tokens, tiny_llama


def _arguments(folder: Path, version: int, saved_as: str, steps: int, **options: Any) -> TrainingArguments:
    # Norms of torch's wrapper differ from ours in the last bit, so it must not clip.
    return TrainingArguments(
        output_dir=str(folder / "run"),
        fsdp=True,
        fsdp_config={
            "version": version,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": f"{saved_as}_STATE_DICT",
            **({"reshard_after_forward": True} if version == 2 else {"reshard_after_forward": "FULL_SHARD"}),
        },
        max_steps=steps,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_grad_norm=0.5 if version == 2 else 1e6,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        seed=3,
        **options,
    )


@case(2, "FULL")
@case(2, "SHARDED", bf16=True)
@case(2, "SHARDED", tied=True)
@case(1, "FULL", tied=True)
@case(1, "SHARDED", bf16=True)
def trainer(
    folder: Path, version: int, saved_as: str, *, tied: bool = False, **options: Any
) -> dict[str, Any]:
    first = Trainer(
        tiny_llama(tied=tied),
        _arguments(folder, version, saved_as, 4, **options),
        train_dataset=Tokens(),
        eval_dataset=Tokens(4),
    )
    first.train()
    evaluated = first.evaluate()["eval_loss"]
    first.save_model(str(folder / "model"))
    weights = _weights(folder / "model")
    # Torch's wrapper gathers for its own forward alone, so the trainers for text summon, too.
    summoned = FullyShardedDataParallel.summon_full_params(first.model_wrapped)
    with summoned if version == 1 else contextlib.nullcontext():
        generated = first.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    went_on = _losses(first)

    forget_accelerator()
    again = Trainer(
        tiny_llama(tied=tied),
        _arguments(folder, version, saved_as, 4, **options),
        train_dataset=Tokens(),
        eval_dataset=Tokens(4),
    )
    again.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    return {
        "losses": went_on,
        "norms": [entry["grad_norm"] for entry in first.state.log_history if "grad_norm" in entry],
        "evaluated": evaluated,
        "generated": generated,
        "weights": weights,
        "resumed": _losses(again)[2:] == went_on[2:],
    }


def _losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / "model.safetensors"
    return load_file(file) if file.exists() else {}


@case()
@case(fsdp_mixed_precision=True)
def sharded_when_loaded(folder: Path, **options: Any) -> dict[str, Any]:
    """transformers' own sharding: ``from_pretrained`` with a distributed config, without Trainer or accelerate."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        tiny_llama().save_pretrained(folder / "pretrained")
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(
        folder / "pretrained",
        distributed_config=DistributedConfig(fsdp_size=2, **options),
        attn_implementation="eager",
        dtype=torch.float32,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        rows = Tokens().rows[step * 4 + 2 * dist.get_rank() :][:2].clone()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(folder / "saved")
    dist.barrier()
    return {"losses": losses, "weights": _weights(folder / "saved"), "class": type(model).__name__}


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    main(forget_accelerator)
