"""``ShardedGradScaler``: loss scaling when each rank has only its shards of the gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.torch_internals import local_part, unscale_all


class ShardedGradScaler(torch.amp.GradScaler):
    """As ``torch.amp.GradScaler``, but all ranks skip a step if any rank finds an infinity or nan.

    Args:
        device: the device of the scale.
        process_group: the ranks that the model is sharded over. Default: all.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.process_group = process_group

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        # Shards of fp16 parameters have fp16 gradients, which torch's scaler refuses.
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    values = _values_of(param)
                    by_kind.setdefault((values.device, values.dtype), []).append(values)
        found = {device: torch.zeros_like(found_inf, device=device) for device, _ in by_kind}
        with torch.no_grad():
            for (device, _), gradients in by_kind.items():
                unscale_all(gradients, found[device], inv_scale.to(device))
        anywhere = torch.zeros_like(found_inf)
        for flag in found.values():
            anywhere = torch.maximum(anywhere, flag.to(anywhere.device))
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self.process_group)
        for flag in found.values():
            flag.copy_(anywhere)
        return found or {anywhere.device: anywhere}


def _values_of(param: torch.Tensor) -> torch.Tensor:
    """Returns the values of a gradient that this rank has: of a DTensor the local ones, on whatever mesh it is."""
    gradient = param.grad
    assert gradient is not None
    if gradient.is_sparse:
        param.grad = gradient = gradient.coalesce()
        return gradient.values()
    return local_part(gradient)
