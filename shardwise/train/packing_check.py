"""Tries out, before the first step, whether a model computes of a packed conversation what it computes of it alone.

    packed   │ other │ conversation │        alone   │ conversation │

What a model does with a mask and with positions depends on its kind of attention: some ignore them, some add a mask to
their scores whatever it is, some see only a window of their own. Nothing fails then, and the loss falls all the same.
"""

from __future__ import annotations

import torch

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.train.parallel import Parallel

__all__ = ["check_packing"]

_LARGEST_DIFFERENCE = 0.03
"""Of the largest logit: far above what bf16 rounds, and far below what another conversation changes."""


def check_packing(parallel: Parallel, context: int, vocabulary: int, device: torch.device) -> None:
    """Raises ConfigError if the model does not keep packed conversations apart; called on every rank."""
    if context < 2:
        return
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (1, context), generator=generator).to(device)
    end = max(1, context // 3)
    segments = (torch.arange(context, device=device) >= end).long()[None]
    parallel.module.eval()
    try:
        with torch.no_grad():
            alone = parallel.logits(tokens[:, end:])
            packed = parallel.logits(tokens, segments)
        assert alone is not None
        assert packed is not None
    except (ShardwiseError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _refusal(f"it raised {type(error).__name__}: {error}") from error
    finally:
        parallel.module.train()
    difference, largest = (packed[:, end:] - alone).abs().max(), alone.abs().max()
    # Written so that what is not a number is refused, too.
    if not difference <= _LARGEST_DIFFERENCE * largest:
        raise _refusal(f"logits of up to {largest:.3g} differ by {difference:.3g}")


def _refusal(problem: str) -> ConfigError:
    return ConfigError(
        f"the model does not compute of packed conversations what it computes of each alone: {problem}",
        where="data.packing",
        fix="use data.packing=false, which pads instead, or another attention of the model",
    )
