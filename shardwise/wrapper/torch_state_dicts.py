"""torch's own ``get_model_state_dict`` and its like (``torch.distributed.checkpoint.state_dict``) on wrapped models.

They know torch's wrappers by their class, and take ours for any module: states of models are then right, of the kind
that is set. States of optimizers would be this rank's shards under whole parameters' names, to be saved by one rank for
all; such calls are refused before anything is read.
"""

from __future__ import annotations

from shardwise.engine.gather.full_tensors import flat_form
from shardwise.engine.unit.binding import WRAPPED_NAME
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError
from shardwise.torch_internals import state_dict_call_options


def names_in(unit: Unit) -> dict[str, str]:
    """What those functions ask a wrapper's ``_fqn_modifiers`` for: the module inside adds nothing to a name."""
    asked = state_dict_call_options()
    if asked is not None:
        _refuse(unit, *asked)
    return {"": WRAPPED_NAME}


def _refuse(unit: Unit, for_optimizers: bool, broadcasts: bool, drops_frozen: bool) -> None:
    wrapper = type(unit.modules[0].get_submodule(WRAPPED_NAME)).__name__
    where = f"torch.distributed.checkpoint.state_dict, on a wrapped {wrapper}, rank {unit.rank}"
    if for_optimizers:
        raise ConfigError(
            "torch's functions for optimizer states do not know whose elements a wrapper's shards are",
            where=where,
            fix="call FullyShardedDataParallel.optim_state_dict(model, optimizer) to save, and "
            "optim_state_dict_to_load(model, optimizer, state) for what optimizer.load_state_dict() takes",
        )
    lines = flat_form(unit).lines
    if all(line.flat is None for line in lines):
        return
    if broadcasts:
        raise ConfigError(
            "broadcast_from_rank0=True finds flat parameters where names should be",
            where=where,
            fix="wrap with use_orig_params=True, or call model.load_state_dict() with the state dict on every rank",
        )
    if drops_frozen and any(line.flat is not None and not line.flat.requires_grad for line in lines):
        raise ConfigError(
            "ignore_frozen_params=True finds flat parameters where names should be",
            where=where,
            fix="wrap with use_orig_params=True, or drop the frozen names from what model.state_dict() gives",
        )
