"""``whole``: steps each matrix whole, on one rank, with any torch optimizer class.

    agree     which parameters have gradients, on all ranks
    rounds    gradient shards to owners, owners step, a few matrices at a time
    conclude  did a rank raise? then all ranks go back to where they were
    return    stepped matrices back to the shards

An owner keeps the state of its matrices, and a copy of each, so that only gradients travel to it. The copies are
fetched again after anybody else wrote to the shards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import LBFGS, Optimizer, SparseAdam

from shardwise.comm.channels.channel import collective_code
from shardwise.engine.step.agreement import forget_torn_steps
from shardwise.errors import ConfigError, ConfigTypeError, PeerFailure, RankDisagreement, StateError
from shardwise.optim.flat_optimizer import sharded_parameters
from shardwise.optim.held_parameters import (
    WHERE,
    HeldParameter,
    Version,
    find_group,
    gather_held,
    versions_of,
)
from shardwise.optim.matrix_moves import Batch, MatrixMoves, Movement, Route, route
from shardwise.optim.owned_matrices import OwnedMatrices, group_options
from shardwise.optim.step_gradients import NOTHING_AGREED, Agreed, StepGradients
from shardwise.optim.whole_state import WholeState
from shardwise.planning.matrix_owners import Held, matrix_work, plan_owners
from shardwise.torch_internals import (
    run_after_load_state_dict,
    run_after_state_dict,
    run_before_load_state_dict,
    run_before_state_dict,
    without_torch_function,
)

_CONCLUDE = collective_code("conclude a step of whole matrices")
_RECORD_BYTES = 512


def whole(
    optimizer_class: type[Optimizer],
    params: nn.Module | Iterable[Any],
    *,
    at_once: int = 8,
    work: Callable[[tuple[int, ...]], float] | None = None,
    gradient_dtype: torch.dtype | None = None,
    in_backward: bool = False,
    undoes_steps: bool = True,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> WholeOptimizer:
    """Returns an optimizer that steps each matrix whole, on one rank, however it is sharded.

    For classes that need whole matrices, such as ``torch.optim.Muon`` or a Shampoo of your own: results are those of
    the unsharded class, bit for bit. Each matrix has one owner, which alone steps it and keeps its state; owners are
    chosen so that all ranks have the same work. Call it, and then ``step()``, ``state_dict()`` and
    ``load_state_dict()``, on every rank.

    Args:
        optimizer_class: any optimizer class that steps each parameter by itself.
        params: a model, for all its parameters, or what any optimizer accepts. They may be sharded by ``fully_shard``
            or ``FullyShardedDataParallel(use_orig_params=True)``, or be plain tensors that all ranks have, with
            gradients that are already reduced.
        at_once: how many whole gradients a rank may hold at a time; with 2 or more, those of the next matrices arrive
            while these are stepped.
        work: from a matrix's shape, how long a step of it takes, in any unit; by default as for Newton-Schulz.
        gradient_dtype: send gradients in this dtype, e.g. ``torch.bfloat16``, for half the bytes. Results are then
            those of gradients rounded to it.
        in_backward: send gradients to owners as soon as their unit is reduced, while backward goes on; of each owner's
            the first ``at_once``, the others in ``step()``. What is changed after backward, as by clipping, is sent
            again.
        undoes_steps: copy an owner's state before it is stepped, so that after an error on any rank all ranks are
            where they were. False saves that memory; after an error, load a checkpoint.
        process_group: the ranks that hold the parameters, if those of their meshes are not all of them.
        options: arguments of the class, e.g. ``lr=0.02``.
    """
    check_class(optimizer_class)
    if at_once < 1:
        raise ConfigError(f"at_once is {at_once}", where=WHERE, fix="allow at least one matrix at a time")
    listed = sharded_parameters(params) if isinstance(params, nn.Module) else list(params)
    return WholeOptimizer(
        optimizer_class,
        listed,
        options,
        at_once=at_once,
        work=work or matrix_work,
        gradient_dtype=gradient_dtype,
        in_backward=in_backward,
        undoes_steps=undoes_steps,
        process_group=process_group,
    )


def check_class(optimizer_class: type[Optimizer]) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ConfigTypeError(
            f"the optimizer class is {optimizer_class!r}, which is not a subclass of torch.optim.Optimizer",
            where=WHERE,
            fix="pass the class itself first: whole(torch.optim.Muon, params, lr=0.02)",
        )
    if issubclass(optimizer_class, (LBFGS, SparseAdam)):
        raise ConfigError(
            f"{optimizer_class.__name__} does not step each parameter by itself from a dense gradient",
            where=f"{WHERE}({optimizer_class.__name__}, ...)",
            fix="use another optimizer on sharded parameters",
        )


class WholeOptimizer(Optimizer):
    """What ``whole`` returns. ``optim`` is this rank's own optimizer, of the matrices that it owns."""

    _is_ready = False

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params: list[Any],
        options: dict[str, Any],
        *,
        at_once: int,
        work: Callable[[tuple[int, ...]], float],
        gradient_dtype: torch.dtype | None,
        in_backward: bool,
        undoes_steps: bool,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._class, self._options = optimizer_class, options
        self._work = work
        self._undoes_steps = undoes_steps
        super().__init__(params, dict(options))
        everything = [param for group in self.param_groups for param in group["params"]]
        self._calls = find_group(everything, process_group)
        self.moves = MatrixMoves(self._calls)
        self.owned = OwnedMatrices(optimizer_class, options, self._calls.rank)
        self._gradients = StepGradients(
            self._calls,
            self.moves,
            self.owned,
            at_once=at_once,
            gradient_dtype=gradient_dtype,
            in_backward=in_backward,
            class_name=optimizer_class.__name__,
        )
        self._words = f"{optimizer_class.__qualname__}, {at_once=}, {gradient_dtype=}, {in_backward=}"
        self._held: list[HeldParameter] = []
        self._blocks: list[Held] = []
        self.owners: list[int] = []
        self._loads = [0] * self._calls.world
        self._routes: list[Route] = []
        # By parameter, the version of the shards that the owner's copy equals; None before it has one.
        self._versions: list[Version | None] = []
        for group in self.param_groups:
            self._adopt_group(group)
        self.defaults = self.owned.optim.defaults
        self._states = WholeState(self._calls, self.moves, self.owned)
        self._is_ready = True

    @property
    def optim(self) -> Optimizer:
        return self.owned.optim

    def owned_parameters(self) -> list[torch.Tensor]:
        """The parameters whose state is on this rank."""
        return [self._held[index].param for index in self.owned.copies]

    def __getstate__(self) -> dict[str, Any]:
        raise StateError(
            "an optimizer of whole matrices cannot be copied or pickled: it belongs to a process group",
            where=WHERE,
            fix="make a new one and load state_dict() into it",
        )

    # --- groups ---------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, on every rank."""
        super().add_param_group(param_group)
        if self._is_ready:
            try:
                self._adopt_group(self.param_groups[-1])
            except BaseException:
                self.param_groups.pop()
                raise

    def _adopt_group(self, group: dict[str, Any]) -> None:
        """Gives the matrices of a group their owners."""
        first = len(self._held)
        added = [HeldParameter(param, first + number) for number, param in enumerate(group["params"])]
        # The class itself says whether it takes these parameters, and which options they have.
        group.update({**self.owned.options_for(added, group_options(group)), **_members(group)})
        blocks, trains = gather_held(added, self._words, self._calls)
        works = [
            int(self._work(held.shape)) if is_trained else 0
            for held, is_trained in zip(added, trains, strict=True)
        ]
        owners = plan_owners(works, blocks, self._loads)
        for work, owner in zip(works, owners, strict=True):
            self._loads[owner] += work
        self._held += added
        self._blocks += blocks
        self.owners += owners
        self._versions += [None] * len(added)
        self.owned.add_group(
            group_options(group),
            [held for held, owner in zip(added, owners, strict=True) if owner == self._calls.rank],
        )
        self._routes = [
            route(blocks, owner, held.shape, held.param.dtype)
            for held, blocks, owner in zip(self._held, self._blocks, self.owners, strict=True)
        ]
        self._gradients.plan(self._held, self._routes)

    # --- a step ---------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps all parameters that have gradients. If a rank raises, all do, and nothing has changed.

        Args:
            closure: computes the loss and the gradients, if given.
            **kwargs: passed on to the class.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.finish_step(self.prepare_step(**kwargs))
        return loss

    def prepare_step(self, **kwargs: Any) -> Agreed:
        """Steps owners' copies alone; returns what ranks have agreed on.

        Then either ``finish_step`` or ``cancel_step``, on all ranks.
        """
        self._adopt_replaced()
        channel = self._calls.channel
        epoch = channel.log.epoch
        agreed = NOTHING_AGREED
        try:
            agreed = self._gradients.agree(self._versions)
            self._fetch(agreed.stale)
            self.owned.pull_options(self.param_groups)
            error = self._step_rounds(agreed, kwargs)
            failures = self._gather_failures(error)
        except BaseException as raised:
            self.cancel_step(agreed)
            if channel.log.epoch == epoch and not isinstance(raised, RankDisagreement):
                channel.abort_step(f"{type(raised).__name__} in the step of {self._class.__name__}")
            raise
        if failures:
            self.cancel_step(agreed)
            self._raise_failure(error, failures)
        return agreed

    def finish_step(self, agreed: Agreed) -> None:
        """Sends what was stepped back to the shards."""
        self._return_to_shards(agreed.stepped)
        self.owned.forget_undo()
        self.owned.push_options(self.param_groups)
        self._publish(agreed.active)

    def cancel_step(self, agreed: Agreed) -> None:
        """Goes back to before the step. Owners' copies are fetched again from the shards, which have not changed."""
        self.owned.undo()
        for index in agreed.active:
            self._versions[index] = None
        if self._undoes_steps:
            self._publish(index for index in agreed.active if self._held[index].param in self.state)
            forget_torn_steps({held.unit: None for held in self._held if held.unit is not None})

    def _fetch(self, stale: list[int]) -> None:
        """Brings owners' copies of matrices up to date."""
        chosen = set(stale)
        for members in self._gradients.rounds:
            if indices := [index for index in members if index in chosen]:
                batch = Batch([self._routes[index] for index in indices])
                shards = [self._held[index].local() for index in indices]
                self.moves.to_owners(batch, shards, [self.owned.allocate(index) for index in indices]).wait()

    def _step_rounds(self, agreed: Agreed, kwargs: dict[str, Any]) -> Exception | None:
        """Steps round by round; returns the first error of this rank, which goes on taking part in the movements."""
        with self.owned.one_step():
            error = self.owned.try_keep(agreed.active) if self._undoes_steps else None
            # Closed at once if the step is broken off: what is on its way must arrive before its memory is freed.
            with closing(self._gradients.by_round(agreed)) as rounds:
                for gradients in rounds:
                    error = error or self.owned.try_step(gradients, kwargs)
            # Counters that the class keeps in its groups must be the same on all ranks.
            return error or self.owned.try_step({}, kwargs)

    def _return_to_shards(self, batches: list[Batch]) -> None:
        previous: tuple[Movement, list[HeldParameter]] | None = None
        for batch in batches:
            held = [self._held[index] for index in batch.members]
            with without_torch_function():
                shards = [each.local() for each in held]
            wholes = [self.owned.copies.get(index) for index in batch.members]
            movement = self.moves.from_owners(batch, wholes, shards)
            self._finish_return(previous)
            previous = movement, held
        self._finish_return(previous)

    def _finish_return(self, issued: tuple[Movement, list[HeldParameter]] | None) -> None:
        if issued is None:
            return
        movement, held = issued
        movement.wait()
        with without_torch_function():
            # Tells autograd and the units of the writes to shards.
            increment_version([each.param for each in held])
            for each, version in zip(held, versions_of(held), strict=True):
                self._versions[each.index] = version

    def _publish(self, stepped: Iterable[int]) -> None:
        """Shows owners' state as this optimizer's; that of other ranks' matrices is empty here."""
        for index in stepped:
            self.state[self._held[index].param] = self.owned.state_of(index)

    def _adopt_replaced(self) -> None:
        """Switches to parameters that replaced ours in their unit, as ``load_state_dict(assign=True)`` does."""
        replaced = {
            held.param: (held.index, new) for held in self._held if (new := held.replacement()) is not None
        }
        for group in self.param_groups if replaced else ():
            for position, param in enumerate(group["params"]):
                if param in replaced:
                    index, group["params"][position] = replaced[param]
                    self._held[index] = HeldParameter(replaced[param][1], index)
                    if param in self.state:
                        self.state[replaced[param][1]] = self.state.pop(param)

    # --- errors ---------------------------------------------------------------------------------------------------

    def _gather_failures(self, error: Exception | None) -> dict[int, str]:
        """Returns the errors of all ranks; every rank has done its work by then."""
        text = "" if error is None else f"{type(error).__name__}: {error}"
        records = self.moves.gather(text.encode()[:_RECORD_BYTES].ljust(_RECORD_BYTES, b"\0"), _CONCLUDE)
        texts = [record.rstrip(b"\0").decode(errors="ignore") for record in records]
        return {rank: text for rank, text in enumerate(texts) if text}

    def _raise_failure(self, error: Exception | None, failures: dict[int, str]) -> None:
        if error is not None:
            raise error
        rank, text = next(iter(failures.items()))
        remains = "no rank has changed anything" if self._undoes_steps else "the state of matrices is torn"
        fix = "read that rank's own error; " + (
            "ranks that catch the error can go on with the next step together"
            if self._undoes_steps
            else "load the last checkpoint on all ranks, or use undoes_steps=True"
        )
        raise PeerFailure(
            f"rank {rank} of the group raised in the step of {self._class.__name__}: {text}; {remains}",
            where=f"rank {self._calls.rank} of {self._calls.world}",
            fix=fix,
        )

    # --- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in the format of an unsharded optimizer, as shards. Called on every rank.

        A tensor of state that has the shape of its parameter is sharded like it; any other is a DTensor sharded over
        the same mesh. ``torch.save``, ``get_optimizer_state_dict`` and ``torch.distributed.checkpoint`` take it.
        """
        run_before_state_dict(self)
        state = self._states.to_shards(self._held, self._blocks, self.owners, self._gradients.rounds)
        numbers = {held.param: held.index for held in self._held}
        groups = [
            {**group, "params": [numbers[param] for param in group["params"]]} for group in self.param_groups
        ]
        return run_after_state_dict(self, {"state": state, "param_groups": groups})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict: sharded, or full, of this optimizer or of an unsharded one. Called on every rank."""
        state_dict = run_before_load_state_dict(self, state_dict)
        saved = state_dict["param_groups"]
        lengths = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in saved] != lengths:
            raise ConfigError(
                f"the state dict has parameter groups of {[len(group['params']) for group in saved]} parameters, this "
                f"optimizer of {lengths}",
                where=f"load_state_dict of {self._class.__name__}, rank {self._calls.rank} of {self._calls.world}",
                fix="make the optimizer with the groups that were saved",
            )
        ids = [number for group in saved for number in group["params"]]
        by_index = {
            index: state_dict["state"][number]
            for index, number in enumerate(ids)
            if number in state_dict["state"]
        }
        with torch.no_grad():
            loaded, present = self._states.to_owners(by_index, self._held, self.owners)
        for group, theirs in zip(self.param_groups, saved, strict=True):
            group.update(copy.deepcopy(group_options(theirs)))
        self.owned.load(loaded, self.param_groups)
        self.state.clear()
        self._publish(present)
        run_after_load_state_dict(self)


def _members(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in ("params", "param_names") if key in group}


# torch does this in the first constructor call, where ranks that are threads would race.
WholeOptimizer.step = Optimizer.profile_hook_step(WholeOptimizer.step)  # type: ignore[method-assign]
WholeOptimizer.step.hooked = True  # type: ignore[attr-defined]
