"""Another thread gets a consistent excerpt of a collective log, while it grows and when it restarts."""

from __future__ import annotations

import threading

from shardwise.comm.channels.channel import CollectiveLog, collective_code, first_divergence, listed
from shardwise.comm.channels.watched import EpochFailure, WatchedChannel
from shardwise.errors import PeerFailure

CODES = [collective_code(f"event {number}") for number in range(1, 50)]


def test_an_excerpt_is_consistent_while_the_log_grows():
    log, is_over = CollectiveLog(), threading.Event()

    def walk():
        while not is_over.is_set():
            for code in CODES:
                log.record(code)
            log.restart()

    walker = threading.Thread(target=walk)
    walker.start()
    try:
        for _ in range(3000):
            excerpt = log.excerpt()
            assert excerpt.names == [f"event {number}" for number in range(1, excerpt.num_events + 1)]
    finally:
        is_over.set()
        walker.join()


def test_a_log_that_is_merely_shorter_does_not_diverge():
    assert first_divergence([(2, ["a", "b"]), (1, ["a"])]) is None
    assert first_divergence([(2, ["a", "b"]), (0, [])]) is None
    assert first_divergence([(3, ["b", "c"]), (2, ["a", "x"])]) == 1


def test_a_failure_of_an_epoch_that_a_rank_has_left_does_not_count():
    channel = WatchedChannel.__new__(WatchedChannel)
    channel.log, channel.world_rank, channel.waiting, channel._epoch_failure = CollectiveLog(), 0, None, None
    epoch = channel.log.epoch
    channel.set_failure(EpochFailure(PeerFailure, "in time", "").as_entry(), epoch)
    assert channel.failure is not None
    channel.log.restart()
    channel.set_failure(EpochFailure(PeerFailure, "too late", "").as_entry(), epoch)
    assert channel.failure is None
    channel.raise_failure()


def test_a_long_list_is_abbreviated_and_stays_distinct():
    assert listed(["a", "b"]) == "['a', 'b']"
    many = [f"layer.{number}" for number in range(40)]
    short = listed(many)
    assert short.startswith("['layer.0', 'layer.1' and 38 more; checksum ")
    assert len(short) < 100
    assert listed([*many[:20], "another", *many[21:]]) != short
