"""The gradients of whole matrices, on their way from shards to owners.

    agree     which parameters have gradients, on all ranks
    rounds    a few matrices at a time; those of the next round travel while these are stepped

With ``in_backward`` gradients are sent as units are reduced, up to as many as a rank may hold:

    backward    | unit 3 | unit 2 | unit 1 | unit 0 |
    reduced               ▼ 3      ▼ 2      ▼ 1      ▼ 0
    to owners                       [ 3, 2 ]          [ 1, 0 ]    step() finds them there

Rows to all owners are equally long. So that little of them is padding, units wait for the next ones until their owners
have about equally much; what still waits at the end is sent by ``step()``.

What changes a gradient after that, such as clipping, raises its version; ``step()`` then sends it again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from shardwise import trace
from shardwise.comm.channels.channel import collective_code
from shardwise.comm.collectives.group import GroupCollectives
from shardwise.engine.buffers import gradient_version
from shardwise.engine.unit.unit import Unit
from shardwise.errors import RankDisagreement
from shardwise.optim.held_parameters import HeldParameter, Version, versions_of
from shardwise.optim.matrix_moves import Batch, MatrixMoves, Movement, Route
from shardwise.optim.owned_matrices import OwnedMatrices
from shardwise.planning.matrix_owners import padding, plan_rounds
from shardwise.torch_internals import unseen_by_modes, without_torch_function

_AGREE = collective_code("agree on the gradients of whole matrices")
# A rank's report of a parameter: one of these or a dtype, and two bits.
_NO_GRADIENT, _NOTHING_HELD, _FIRST_DTYPE = 0, 1, 2
_IS_STALE, _IS_LATE = 0x80, 0x40
_CODE = 0x3F
# What a step moves is then at most 2.1 times the parameters' bytes: gradients once, with this, and parameters once.
_MOST_PADDING = 1.1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
_CODES: dict[torch.dtype | None, int] = {
    dtype: code for code, dtype in enumerate(_DTYPES, start=_FIRST_DTYPE)
}
_CODES[None] = _NO_GRADIENT
# Which parameters have gradients may differ from step to step.
_KEPT_BATCHES = 1000


class Agreed(NamedTuple):
    """What all ranks know at the beginning of a step; the same as in the step before if ranks say the same.

    By parameter with a gradient, its dtype; the parameters of which owners have no current copy; and those whose
    gradients were sent in backward and have not changed since. Round by round, the gradients that are still to be
    sent, and the matrices that return.
    """

    active: dict[int, torch.dtype]
    stale: list[int]
    sent: set[int]
    late: list[Batch]
    stepped: list[Batch]


NOTHING_AGREED = Agreed({}, [], set(), [], [])


class _Sent(NamedTuple):
    """A gradient that was sent in backward; ``gradient`` is what this rank sent of it, at that version."""

    movement: Movement
    whole: torch.Tensor | None
    gradient: weakref.ref[torch.Tensor] | None
    version: int
    epoch: int


class StepGradients:
    """The gradients of one optimizer."""

    def __init__(
        self,
        calls: GroupCollectives,
        moves: MatrixMoves,
        owned: OwnedMatrices,
        *,
        at_once: int,
        gradient_dtype: torch.dtype | None,
        in_backward: bool,
        class_name: str,
    ) -> None:
        self._calls, self._moves, self._owned = calls, moves, owned
        self._at_once, self._gradient_dtype, self._class_name = at_once, gradient_dtype, class_name
        self._in_backward = in_backward
        # Two rounds are in memory at a time: one that is stepped, and one that arrives.
        self._a_round = max(1, at_once // 2)
        self._held: Sequence[HeldParameter] = ()
        self._routes: Sequence[Route] = ()
        self.rounds: list[list[int]] = []
        self._batches: dict[Hashable, Batch] = {}
        # What ranks reported for the last step, and what that means.
        self._records: list[bytes] = []
        self._agreed = NOTHING_AGREED
        self._of_unit: dict[Unit, list[int]] = {}
        self._sent: dict[int, _Sent] = {}
        # Reduced in this backward, and not sent yet.
        self._waiting: list[int] = []

    def plan(self, held: Sequence[HeldParameter], routes: Sequence[Route]) -> None:
        """Divides the parameters into rounds; asks their units to tell when they are reduced."""
        self._held, self._routes = held, routes
        owners = [route.owner for route in routes]
        self.rounds = plan_rounds(owners, [each.numel for each in held], self._calls.world, self._a_round)
        self._records = []
        if not self._in_backward:
            return
        self._of_unit = {}
        for each in held:
            if each.unit is not None and each.param.requires_grad:
                self._of_unit.setdefault(each.unit, []).append(each.index)
        for unit in self._of_unit:
            unit.gradients.listen(self._unit_reduced)

    # --- in backward ----------------------------------------------------------------------------------------------

    def _unit_reduced(self, unit: Unit, _wait: Callable[[], None], is_last: bool) -> None:
        """Sends gradients to their owners; all ranks call it for the same units in the same order."""
        members = self._of_unit.get(unit, ())
        self._drop(members)
        if is_last:
            self._waiting += self._as_many_as_fit(members)
        chosen = self._waiting
        owners = [self._routes[index].owner for index in chosen]
        numels = [self._held[index].numel for index in chosen]
        if not chosen or padding(owners, numels, self._calls.world) > _MOST_PADDING:
            return
        self._waiting = []
        dtypes = {index: self._held[index].param.dtype for index in chosen}
        # On the reduce stream, which has just written the gradients; what follows backward waits for it.
        with torch.no_grad(), unseen_by_modes(), unit.root.streams.reduce:
            movement, wholes = self._issue(self._gradient_batch(chosen, dtypes), dtypes, False)
        for index in chosen:
            gradient = self._held[index].param.grad
            reference = None if gradient is None else weakref.ref(gradient)
            version = -1 if gradient is None else gradient_version(gradient)
            self._sent[index] = _Sent(
                movement, wholes.get(index), reference, version, self._calls.channel.log.epoch
            )
        if unit.settings.recorder is not None:
            unit.settings.recorder.add(trace.SEND, unit.name, trace.IN_POST_BACKWARD, unit.rank)

    def _as_many_as_fit(self, members: Iterable[int]) -> Iterator[int]:
        room = [self._at_once] * self._calls.world
        for index in (*self._sent, *self._waiting):
            room[self._routes[index].owner] -= 1
        for index in members:
            owner = self._routes[index].owner
            if room[owner] > 0:
                room[owner] -= 1
                yield index

    def _is_as_sent(self, index: int) -> bool:
        sent, gradient = self._sent.get(index), self._held[index].param.grad
        return (
            sent is not None
            and gradient is not None
            and sent.gradient is not None
            and sent.gradient() is gradient
            and sent.version == gradient_version(gradient)
            and gradient.dtype == self._held[index].param.dtype
            and sent.epoch == self._calls.channel.log.epoch
        )

    def _drop(self, indices: Iterable[int]) -> None:
        """Forgets gradients that were sent; what other ranks sent here must have arrived before its memory is freed."""
        epoch = self._calls.channel.log.epoch
        dropped = set(indices)
        self._waiting = [index for index in self._waiting if index not in dropped]
        for index in dropped:
            if (sent := self._sent.pop(index, None)) is not None:
                if sent.epoch == epoch:
                    sent.movement.wait()
                else:
                    sent.movement.abandon()

    # --- in a step ------------------------------------------------------------------------------------------------

    def agree(self, known: Sequence[Version | None]) -> Agreed:
        """Returns what ranks agree on; raises on all of them if they have different gradients.

        Args:
            known: by parameter, the version of the shards that its owner has a copy of.
        """
        with without_torch_function():
            own = self._report(known)
        records = self._moves.gather(own, _AGREE)
        if records != self._records:
            self._agreed = self._read(records)
            self._records = records
        agreed = self._agreed
        self._drop(self._sent.keys() - agreed.sent)
        self._waiting = []
        return agreed

    def _report(self, known: Sequence[Version | None]) -> bytes:
        """What this rank says of each parameter."""
        late = [_IS_LATE] * len(self._held)
        for index in self._sent:
            if not self._held[index].has_elements or self._is_as_sent(index):
                late[index] = 0
        gradients = [held.param.grad for held in self._held]
        codes = [_CODES[None if gradient is None else gradient.dtype] for gradient in gradients]
        stale = [
            _IS_STALE if was != now else 0 for was, now in zip(known, versions_of(self._held), strict=True)
        ]
        columns = zip(self._held, codes, stale, late, strict=True)
        return bytes(
            code | is_stale | is_late if held.has_elements else _NOTHING_HELD | is_late
            for held, code, is_stale, is_late in columns
        )

    def _read(self, records: Sequence[bytes]) -> Agreed:
        """Returns what all ranks' reports mean together."""
        active: dict[int, torch.dtype] = {}
        stale = []
        sent = set()
        for index, reports in enumerate(zip(*records, strict=True)):
            said = {report & _CODE for report in reports} - {_NOTHING_HELD}
            if len(said) > 1:
                self._raise_different(index, reports)
            if said and (code := said.pop()) >= _FIRST_DTYPE:
                active[index] = _DTYPES[code - _FIRST_DTYPE]
                if any(report & _IS_STALE for report in reports):
                    stale.append(index)
                if not any(report & _IS_LATE for report in reports):
                    sent.add(index)
        late, stepped = [], []
        for members in self.rounds:
            if chosen := [index for index in members if index in active]:
                stepped.append(self._batch(chosen, [self._routes[index].dtype for index in chosen]))
            if chosen := [index for index in chosen if index not in sent]:
                late.append(self._gradient_batch(chosen, active))
        return Agreed(active, stale, sent, late, stepped)

    def _raise_different(self, index: int, reports: Sequence[int]) -> None:
        words = ", ".join(
            f"rank {rank} of the group {_words(report & _CODE)}" for rank, report in enumerate(reports)
        )
        raise RankDisagreement(
            f"ranks have different gradients of {self._held[index].name}: {words}",
            where=f"step of {self._class_name}, rank {self._calls.rank} of {self._calls.world}",
            fix="compute or drop this gradient on all ranks, in one dtype",
        )

    def by_round(self, agreed: Agreed) -> Generator[dict[int, torch.Tensor]]:
        """Yields this rank's whole gradients; those of the next round are on their way meanwhile."""
        issued = (self._issue(batch, agreed.active, True) for batch in agreed.late)
        early = self._rounds_of_sent()
        looks_ahead = self._at_once > 1
        current: tuple[Movement, dict[int, torch.Tensor]] | None = None
        following: tuple[Movement, dict[int, torch.Tensor]] | None = None
        try:
            for number, members in enumerate(early, start=1):
                if number == len(early) and looks_ahead:
                    current = next(issued, None)
                gradients = self._take(members)
                yield gradients
                gradients.clear()
            if current is None:
                current = next(issued, None)
            while current is not None:
                movement, gradients = current
                # Before the next ones are prepared: those wait for what is computed by then, and these need not.
                movement.send()
                following = next(issued, None) if looks_ahead else None
                movement.wait()
                yield gradients
                gradients.clear()
                current = following if looks_ahead else next(issued, None)
        finally:
            for each in (current, following):
                if each is not None:
                    each[0].abandon()

    def _rounds_of_sent(self) -> list[list[int]]:
        """Divides what was sent in backward into rounds, first come, first stepped."""
        arrived = list(self._sent)
        owners = [self._routes[index].owner for index in arrived]
        rounds = plan_rounds(owners, [0] * len(arrived), self._calls.world, self._a_round)
        return [[arrived[position] for position in members] for members in rounds]

    def _take(self, members: Iterable[int]) -> dict[int, torch.Tensor]:
        taken = {}
        for index in members:
            sent = self._sent.pop(index)
            sent.movement.wait()
            if sent.whole is not None:
                taken[index] = sent.whole
        return taken

    def _gradient_batch(self, members: Sequence[int], dtypes: Mapping[int, torch.dtype]) -> Batch:
        return self._batch(members, [self._gradient_dtype or dtypes[index] for index in members])

    def _batch(self, members: Sequence[int], dtypes: Sequence[torch.dtype]) -> Batch:
        """Parameters that travel together, in these dtypes."""
        key = (*members, *dtypes)
        known = self._batches.get(key)
        if known is None:
            if len(self._batches) >= _KEPT_BATCHES:
                self._batches.clear()
            routes = [
                self._routes[index]._replace(dtype=dtype)
                for index, dtype in zip(members, dtypes, strict=True)
            ]
            known = self._batches[key] = Batch(routes, tuple(members))
        return known

    def _issue(
        self, batch: Batch, dtypes: Mapping[int, torch.dtype], is_beside: bool
    ) -> tuple[Movement, dict[int, torch.Tensor]]:
        """Starts to send gradients to their owners; returns the whole gradients that will arrive here."""
        wholes: dict[int, torch.Tensor] = {}
        for index in batch.members:
            like = self._owned.copies.get(index)
            if like is not None:
                wholes[index] = torch.empty(like.shape, dtype=dtypes[index], device=like.device)
        with without_torch_function():
            shards = [self._held[index].local_gradient() for index in batch.members]
        movement = self._moves.to_owners(
            batch, shards, [wholes.get(index) for index in batch.members], is_beside=is_beside
        )
        return movement, wholes


def _words(code: int) -> str:
    if code == _NOTHING_HELD:
        return "holds none of it"
    return "has none" if code == _NO_GRADIENT else f"has one in {_DTYPES[code - _FIRST_DTYPE]}"
