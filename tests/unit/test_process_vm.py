"""What processes of one host tell each other arrives under its key, whatever comes first; silence has an end."""

import fcntl
import os
import resource

import pytest
import torch

from shardwise.comm.channels.channel import Channel, collective_code
from shardwise.comm.shared_memory.process_vm import ProcessVMPeers


def pair(least_descriptor=0):
    """Two ranks of one process."""
    to_zero, to_one = ([_moved(end, least_descriptor) for end in os.pipe()] for _ in range(2))
    pids = [os.getpid()] * 2
    channels = [Channel(torch.device("cpu"), "solo") for _ in range(2)]
    return (
        ProcessVMPeers(channels[0], pids, {1: to_zero[0]}, {1: to_one[1]}),
        ProcessVMPeers(channels[1], pids, {0: to_one[0]}, {0: to_zero[1]}),
    )


def _moved(descriptor, least):
    if descriptor >= least:
        return descriptor
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least)
    os.close(descriptor)
    return moved


def test_descriptors_may_be_as_large_as_processes_have_them():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    zero, one = pair(least_descriptor=2000)
    zero.send(1, (1, 0), 5)
    assert one.receive(0, (1, 0)) == 5


def test_messages_are_kept_under_their_keys_until_they_are_received():
    zero, one = pair()
    for number in (1, 2, 3):
        zero.send(1, (number, 0), 10 * number)
        zero.send(1, (number, 1), -(1 << 62))
    assert one.receive(0, (3, 0)) == 30
    assert one.receive(0, (1, 0)) == 10
    assert one.receive(0, (1, 1)) == -(1 << 62)
    assert one.receive(0, (2, 0)) == 20
    one.send(0, (7, 7))
    assert zero.receive(1, (7, 7)) == 0


def test_a_peer_that_has_ended_is_named_at_once_on_send_and_receive():
    zero, one = pair()
    zero.send(1, (1, 0), 5)
    ends = [*zero._read_ends.values(), *zero._write_ends.values()]
    del zero  # the last of rank 0: its ends of the pipes go with it
    for end in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)
    assert one.receive(0, (1, 0)) == 5
    with pytest.raises(RuntimeError, match="rank 0 of the group has ended"):
        one.receive(0, (2, 0))
    with pytest.raises(RuntimeError, match="rank 0 of the group has ended"):
        one.send(0, (2, 0))


def test_ranks_with_equal_logs_get_the_same_tags_and_no_tag_twice():
    zero, one = pair()
    seen = set()
    for step in range(100):
        for local_peers in (zero, one):
            local_peers._channel.record(collective_code(f"step {step % 3}"))
        numbers = [(zero.next_tag(), one.next_tag()) for _ in range(3)]
        assert all(left == right for left, right in numbers)
        seen.update(left for left, _ in numbers)
    assert len(seen) == 300
    for local_peers in (zero, one):
        local_peers._channel.abort_step("something is wrong")
    assert zero.next_tag() == one.next_tag()
    assert zero.next_tag() not in seen
