"""bitsandbytes: weights of four bits, frozen, with trained adapters of peft beside them (QLoRA)."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.ecosystem.programs.cases import case, main
from tests.ecosystem.programs.models import Tokens, tiny_llama


@case("nf4")
@case("fp4", kept=True)
@case("nf4", bnb_4bit_use_double_quant=True)
def adapter(folder: Path, kind: str, *, kept: bool = False, **options: Any) -> dict[str, Any]:
    if dist.get_rank() == 0:
        tiny_llama().save_pretrained(folder / "pretrained")
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(
        folder / "pretrained",
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind,
            bnb_4bit_compute_dtype=torch.float32,
            # Weights are sharded as numbers of this type: that of the others.
            bnb_4bit_quant_storage=torch.float32,
            **options,
        ),
        attn_implementation="eager",
        dtype=torch.float32,
        device_map="cpu",
    )
    torch.manual_seed(4)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    layers = model.base_model.model.model.layers
    assert sum(isinstance(module, Linear4bit) for module in layers.modules()) == 14
    for layer in layers:
        fully_shard(layer, reshard_after_forward=not kept)
    fully_shard(model)
    model.train()
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
    return {
        "losses": losses,
        "gradients": [param.grad is None for param in model.parameters()],
        "adapter": {
            name: param.full_tensor() for name, param in model.named_parameters() if param.requires_grad
        },
        "saved": get_peft_model_state_dict(
            model, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        ),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
