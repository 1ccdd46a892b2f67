"""What is lent to other processes stays as it is until all of them have read it, even when its owner has ended."""

import os
import platform
import random

import pytest
import torch

from shardwise import PeerFailure
from shardwise.comm.shared_memory import arena as arenas
from shardwise.comm.shared_memory.arena import Arena, Borrower, map_arena
from shardwise.engine.buffers import RelocatableBuffer


def readers_of(arena, world):
    memory = map_arena(os.getpid(), arena.descriptor, arena.num_bytes)
    return [Borrower(memory, world, reader) for reader in range(world)]


def test_a_place_is_lent_again_when_all_have_read_and_not_before():
    arena = Arena(world=3)
    borrowers = readers_of(arena, 3)
    chance = random.Random(0)
    expected, unread = {}, []
    for number in range(300):
        loan = arena.lend(chance.choice([1, 64, 1000, 4096]), readers=(0, 1, 2))
        loan.payload.fill_(number % 251)
        loan.is_sent = chance.random() < 0.9  # others are still being written
        expected[loan] = number % 251
        unread += [(loan, reader) for reader in range(3) if loan.is_sent]
        while len(unread) > 12:
            read, reader = unread.pop(chance.randrange(len(unread)))
            lent = borrowers[reader].find(read.slot)
            seen = lent.payload(0, read.payload.numel())
            assert torch.equal(seen, torch.full_like(seen, expected[read])), "it was written over"
            lent.mark_read()
        if not loan.is_sent:
            loan.is_sent = True
            unread += [(loan, reader) for reader in range(3)]
    last = arena.lend(1, (0, 1, 2))
    assert last.end - arena._begin < 300 * 1000, "places are not lent again"
    assert last.slot < 30, "slots are not used again"
    arena.close()


def test_bytes_of_earlier_loans_are_never_mistaken_for_flags():
    readers = (0, 1)
    # What a flag would have to hold, in whatever was sent before: ids, counts, masks.
    for number in range(1, 8):
        arena = Arena(world=2)
        borrowers = readers_of(arena, 2)
        for num_bytes in (64, 4096):
            loan = arena.lend(num_bytes, readers)
            loan.payload.view(torch.int64).fill_(number)
            loan.is_sent = True
            for borrower in borrowers:
                borrower.find(loan.slot).mark_read()
        for num_bytes in (256, 64, 64, 8, 640):
            loan = arena.lend(num_bytes, readers)
            loan.is_sent = True
            assert not loan.is_over(readers), f"loan {loan.number} is over, and nobody has read it"
            borrowers[0].find(loan.slot).mark_read()
            assert not loan.is_over(readers), f"loan {loan.number} is over, and one has not read it"
        arena.close()


def test_a_late_or_repeated_mark_frees_no_other_loan():
    arena = Arena(world=2)
    borrowers = readers_of(arena, 2)
    first = arena.lend(64, (0, 1))
    first.is_sent = True
    read = [borrower.find(first.slot) for borrower in borrowers]
    for lent in read:
        lent.mark_read()
    second = arena.lend(64, (0, 1))
    second.payload.fill_(7)
    second.is_sent = True
    assert (second.slot, second.start) == (first.slot, first.start)
    for lent in read:
        lent.mark_read()
    assert not second.is_over((0, 1))
    assert second.payload.tolist() == [7] * 64
    arena.close()


@pytest.mark.parametrize(
    ("slot", "entry"),
    [
        (-1, None),
        (1 << 16, None),
        (1 << 60, None),
        (3, None),
        (0, {1: -8}),
        (0, {1: 1 << 62}),
        (0, {2: 1 << 62}),
        (0, {2: -1}),
        (0, {1: 0}),
    ],
)
def test_what_a_peer_cannot_have_lent_is_refused_before_it_is_read(slot, entry):
    arena = Arena(world=2)
    loan = arena.lend(64, (0, 1))
    for position, value in (entry or {}).items():
        loan.entry[position] = value
    with pytest.raises(PeerFailure, match="a loan that cannot exist"):
        readers_of(arena, 2)[1].find(slot)
    arena.close()


def test_more_than_was_lent_is_not_read():
    arena = Arena(world=2)
    loan = arena.lend(64, (0, 1))
    lent = readers_of(arena, 2)[1].find(loan.slot)
    assert lent.payload(32, 32).numel() == 32
    with pytest.raises(PeerFailure, match="a loan of 64 bytes"):
        lent.payload(32, 33)
    arena.close()


@pytest.mark.parametrize(
    ("machine", "lends"), [("x86_64", True), ("AMD64", True), ("aarch64", False), ("", False)]
)
def test_memory_is_lent_only_on_machines_that_keep_stores_in_order(machine, lends, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert arenas.is_possible() is lends


def test_a_loan_that_does_not_fit_is_refused():
    arena = Arena(world=2)
    with pytest.raises(MemoryError, match="cannot lend"):
        arena.lend(arena.num_bytes, (0, 1))
    arena.close()


def test_what_a_process_has_lent_can_be_read_after_its_end():
    card_out, card_in = os.pipe()
    end_out, end_in = os.pipe()
    pid = os.fork()
    if pid == 0:
        arena = Arena(world=2)
        loan = arena.lend(5000, (0, 1))
        loan.payload.fill_(7)
        os.write(card_in, b"%d %d %d" % (arena.descriptor, arena.num_bytes, loan.slot))
        os.read(end_out, 1)
        os._exit(0)
    descriptor, num_bytes, slot = map(int, os.read(card_out, 100).split())
    memory = map_arena(pid, descriptor, num_bytes)
    os.write(end_in, b"x")
    os.waitpid(pid, 0)
    assert Borrower(memory, 2, 1).find(slot).payload(0, 5000).tolist() == [7] * 5000
    with pytest.raises(OSError, match="No such file"):
        map_arena(pid, descriptor, num_bytes)


def test_other_files_are_not_mistaken_for_an_arena(tmp_path):
    with (tmp_path / "file").open("w") as file, pytest.raises(OSError, match="no arena"):
        map_arena(os.getpid(), file.fileno(), 1 << 20)
    assert (tmp_path / "file").stat().st_size == 0


def test_an_arena_of_another_size_than_announced_is_not_mapped():
    arena = Arena(world=2)
    with pytest.raises(OSError, match="no arena of"):
        map_arena(os.getpid(), arena.descriptor, arena.num_bytes + 4096)
    arena.close()


def test_tensors_of_a_movable_buffer_stand_where_it_grows():
    buffer = RelocatableBuffer(64, torch.device("cpu"))
    whole, part = buffer.tensor(torch.float32, 0, (16,)), buffer.tensor(torch.int16, 32, (2, 4), (8, 2))
    room = torch.zeros(256, dtype=torch.uint8)
    for lent in (None, room[64:128], room[128:192], None, None, room[:64]):
        room.zero_()
        buffer.grow_in(lent)
        whole.fill_(1.0)
        part.fill_(3)
        assert (part.shape, part.stride()) == ((2, 4), (8, 2))
        assert whole[8:].view(torch.int16)[:8:2].tolist() == [3] * 4
        stands_in = torch.zeros(0) if lent is None else lent.view(torch.float32)
        assert stands_in.tolist() == ([] if lent is None else whole.tolist())
        assert int(room.count_nonzero()) == (0 if lent is None else int(lent.count_nonzero()))
        buffer.shrink()
        assert not buffer.is_grown
