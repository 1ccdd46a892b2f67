"""accelerate: prepare, accumulate, clip, save and load its state, merge; FSDP plugins 2 and 1."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

import shardwise
from tests.ecosystem.programs.cases import case, main
from tests.ecosystem.programs.fsdp_on_cpu import allow_fsdp_on_cpu, forget_accelerator
from tests.ecosystem.programs.models import Tokens, tiny_llama


@case(2, "FULL", "no")
@case(2, "SHARDED", "no")
@case(2, "FULL", "bf16")
@case(2, "SHARDED", "no", tied=True, accumulated=1)
@case(2, "SHARDED", "bf16")
@case(2, "SHARDED", "no", checkpointed=True)
@case(2, "SHARDED", "no", ram_efficient=True)
@case(2, "SHARDED", "no", sharded_by_user=True)
@case(2, "SHARDED", "no", sharded_by_user=True, with_ours=True)
@case(1, "FULL", "no")
@case(1, "SHARDED", "no", original=True)
@case(1, "FULL", "bf16", original=True)
@case(1, "SHARDED", "bf16")
@case(1, "FULL", "no", tied=True)
@case(1, "SHARDED", "no", checkpointed=True)
@case(1, "SHARDED", "no", ram_efficient=True)
@case(1, "SHARDED", "no", original=True, sharded_by_user=True)
def train(
    folder: Path,
    version: int,
    saved_as: str,
    precision: str,
    *,
    tied: bool = False,
    original: bool = False,
    checkpointed: bool = False,
    ram_efficient: bool = False,
    sharded_by_user: bool = False,
    with_ours: bool = False,
    accumulated: int = 2,
) -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="no_wrap" if sharded_by_user else "transformer_based_wrap",
        state_dict_type=f"{saved_as}_STATE_DICT",
        activation_checkpointing=checkpointed,
        cpu_ram_efficient_loading=ram_efficient,
        **({"use_orig_params": original, "sync_module_states": ram_efficient} if version == 1 else {}),
    )
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, mixed_precision=precision, gradient_accumulation_steps=accumulated
    )
    model = tiny_llama(tied=tied)
    if sharded_by_user:
        model = _shard(model, version, with_ours)
    # A wrapper makes new parameters, so the optimizer comes after it.
    model = accelerator.prepare(model) if version == 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    loader = DataLoader(Tokens(), batch_size=2)
    if version == 1:
        optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
    else:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    # Norms of torch's wrapper differ from ours in the last bit: they are compared, but must not scale anything.
    max_norm = 0.5 if version == 2 else 1e6
    training = accelerator, model, optimizer, loader, scheduler, max_norm
    history = _steps(*training)
    accelerator.save_state(str(folder / "state"))
    went_on = _steps(*training)
    weights = dict(accelerator.get_state_dict(model))
    accelerator.save_model(model, str(folder / "model"))
    accelerator.load_state(str(folder / "state"))
    resumed = _steps(*training)
    return {
        "losses": [loss for loss, _, _ in history + went_on],
        "norms": [norm for _, norm, _ in history + went_on if norm is not None],
        "rates": [rate for _, _, rate in history + went_on],
        "weights": weights,
        "class": type(accelerator.unwrap_model(model)).__name__.removeprefix("FSDP"),
        "saved model": load_file(folder / "model" / "model.safetensors"),
        "merged": _merge(folder) if saved_as == "SHARDED" else {},
        "files": sorted(
            str(path.relative_to(folder)) for path in folder.rglob("*") if path.name[0] not in ".r"
        ),
        "resumed": resumed == went_on,
    }


def _shard(model, version: int, with_ours: bool):
    if version == 1:
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = FullyShardedDataParallel(
                layer, device_id=torch.device("cpu"), use_orig_params=True
            )
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    # Ours must be taken for a sharded model by an accelerate that knows torch's classes alone.
    shard = shardwise.fully_shard if with_ours else fully_shard
    for layer in model.model.layers:
        shard(layer)
    return shard(model)


def _steps(accelerator, model, optimizer, loader, scheduler, max_norm: float) -> list[Any]:
    history = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = None
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        history.append((loss.item(), None if norm is None else float(norm), scheduler.get_last_lr()))
    return history


def _merge(folder: Path) -> dict[str, torch.Tensor]:
    merge_fsdp_weights(str(folder / "state" / "pytorch_model_fsdp_0"), str(folder / "merged"))
    return load_file(folder / "merged" / "model.safetensors")


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    main(forget_accelerator)
