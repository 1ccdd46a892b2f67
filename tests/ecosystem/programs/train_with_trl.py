"""trl and peft: SFTTrainer with LoRA trains, saves its adapter and resumes; DoRA, modules_to_save, merged adapters."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tests.ecosystem.programs.cases import case, main
from tests.ecosystem.programs.fsdp_on_cpu import allow_fsdp_on_cpu, forget_accelerator
from tests.ecosystem.programs.models import VOCABULARY, Tokens, tiny_llama


def _lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **options)


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "w3")), pad_token="w0", bos_token="w1", eos_token="w2"
    )


def _trainer(folder: Path, version: int, saved_as: str, **options: Any) -> SFTTrainer:
    torch.manual_seed(4)
    arguments = SFTConfig(
        output_dir=str(folder / "run"),
        fsdp=True,
        fsdp_config={
            "version": version,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": f"{saved_as}_STATE_DICT",
            **({"reshard_after_forward": True} if version == 2 else {"reshard_after_forward": "FULL_SHARD"}),
            **({} if version == 2 else {"use_orig_params": True}),
        },
        max_steps=4,
        per_device_train_batch_size=2,
        max_grad_norm=0.5 if version == 2 else 1e6,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        dataset_num_proc=None,
        seed=3,
    )
    rows = Dataset.from_dict({"input_ids": Tokens().rows.tolist()})
    return SFTTrainer(
        tiny_llama(),
        arguments,
        train_dataset=rows,
        processing_class=_tokenizer(),
        peft_config=_lora(**options),
    )


@case(2, "FULL")
@case(2, "SHARDED", use_dora=True)
@case(1, "FULL")
def sft(folder: Path, version: int, saved_as: str, **options: Any) -> dict[str, Any]:
    first = _trainer(folder, version, saved_as, **options)
    first.train()
    first.save_model(str(folder / "adapter"))
    went_on = _losses(first)
    file = folder / "adapter" / "adapter_model.safetensors"
    forget_accelerator()
    again = _trainer(folder, version, saved_as, **options)
    again.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    return {
        "losses": went_on,
        "norms": [entry["grad_norm"] for entry in first.state.log_history if "grad_norm" in entry],
        "adapter": load_file(file) if file.exists() else {},
        "resumed": _losses(again)[2:] == went_on[2:],
    }


def _losses(trainer: SFTTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@case()
@case(use_dora=True)
@case(modules_to_save=["lm_head"])
def adapter(folder: Path, **options: Any) -> dict[str, Any]:
    """peft without a trainer: a model sharded by hand, its adapter saved, loaded and merged."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = _adapted(options)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    losses = []
    for step in range(3):
        rows = Tokens().rows[step * 4 + 2 * dist.get_rank() :][:2].clone()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    adapter_state = get_peft_model_state_dict(model, full)
    whole = _adapted(options)
    set_peft_model_state_dict(whole, adapter_state)
    return {
        "losses": losses,
        "adapter": adapter_state,
        "merged": whole.merge_and_unload().state_dict(),
        "class": type(model).__name__,
    }


def _adapted(options: dict[str, Any]) -> PeftModel:
    torch.manual_seed(4)
    return get_peft_model(tiny_llama(), _lora(**options))


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    main(forget_accelerator)
