"""An exchange brings every rank's tensors to every other rank, whichever way it goes."""

import pytest

from shardwise.testing import run_ranks
from tests.ranks.zero_cases import exchange

UNEVEN = [[3, 0, 70_000, 5], [], [1, 200_000, 2]]
MANY = [[4096] * 1500, [4096] * 1700]
LARGE = [[1_200_000], [7, 1_200_001, 0, 300], []]


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_tensors_of_any_sizes_are_moved(kind: str) -> None:
    run_ranks(exchange.moves_everyones_tensors, 3, UNEVEN, kind=kind, reads=False)


@pytest.mark.parametrize("numels", [MANY, LARGE], ids=["many", "large"])
@pytest.mark.parametrize("reads", [False, True])
def test_much_is_moved_by_messages_or_by_reading_the_peers_memory(
    numels: list[list[int]], reads: bool
) -> None:
    run_ranks(exchange.moves_everyones_tensors, len(numels), numels, kind="gloo", reads=reads)


def test_exchanges_under_way_together_are_kept_apart() -> None:
    run_ranks(exchange.keeps_exchanges_apart_that_are_under_way_together, 3, kind="gloo")


def test_a_peer_whose_memory_was_replaced_is_read_where_it_is_now() -> None:
    run_ranks(exchange.reads_where_a_peers_tensors_have_moved_to, 2, kind="gloo")


def test_what_was_sent_may_be_overwritten_at_once() -> None:
    run_ranks(exchange.may_write_as_soon_as_the_exchange_is_over, 3, kind="gloo")
