"""What is lent to other processes stays as it is until all of them have read it, even when its owner has ended."""

import os
import random

import pytest
import torch

from shardwise.comm.arena import Arena, map_arena, mark_read, payload_at
from shardwise.engine.storage import Movable


def reader_of(arena):
    return map_arena(os.getpid(), arena.descriptor, arena.num_bytes)


def test_a_place_is_lent_again_when_all_have_read_and_not_before():
    arena = Arena(world=3)
    memory = reader_of(arena)
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
            seen = payload_at(memory, read.start, 3, 0, read.payload.numel())
            assert torch.equal(seen, torch.full_like(seen, expected[read])), "it was written over"
            mark_read(memory, read.start, reader)
        if not loan.is_sent:
            loan.is_sent = True
            unread += [(loan, reader) for reader in range(3)]
    assert arena.lend(1, (0, 1, 2)).end < 300 * 1000, "places are not lent again"
    arena.close()


def test_a_loan_that_does_not_fit_is_refused():
    arena = Arena(world=2)
    with pytest.raises(MemoryError, match="too many"):
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
        os.write(card_in, b"%d %d %d" % (arena.descriptor, arena.num_bytes, loan.start))
        os.read(end_out, 1)
        os._exit(0)
    descriptor, num_bytes, start = map(int, os.read(card_out, 100).split())
    memory = map_arena(pid, descriptor, num_bytes)
    os.write(end_in, b"x")
    os.waitpid(pid, 0)
    assert payload_at(memory, start, 2, 0, 5000).tolist() == [7] * 5000
    with pytest.raises(OSError, match="No such file"):
        map_arena(pid, descriptor, num_bytes)


def test_other_files_are_not_taken_for_an_arena(tmp_path):
    with (tmp_path / "file").open("w") as file, pytest.raises(OSError, match="no arena"):
        map_arena(os.getpid(), file.fileno(), 1 << 20)
    assert (tmp_path / "file").stat().st_size == 0


def test_tensors_of_a_movable_buffer_stand_where_it_grows():
    buffer = Movable(64, torch.device("cpu"))
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
