"""Owners of whole matrices: work is balanced, rounds keep to their bound, and messages do not overlap."""

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardwise.planning.layout import cut_evenly
from shardwise.planning.matrix_owners import (
    HeldBlock,
    is_complete,
    matrix_work,
    padding,
    plan_messages,
    plan_owners,
    plan_rounds,
    rows_fit,
    senders,
)

worlds = st.integers(1, 8)
shapes = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=40)


def cut_by_rows(shape: tuple[int, ...], world: int, replicas: int = 1) -> list[HeldBlock]:
    spans = [cut_evenly(shape[0], world, rank) for rank in range(world)]
    blocks = [HeldBlock((span.start, *[0] * len(shape[1:])), (span.numel, *shape[1:])) for span in spans]
    return blocks * replicas


@given(shapes, worlds)
def test_no_rank_has_more_than_a_fair_share_and_one_matrix(found, world):
    works = [matrix_work(shape) for shape in found]
    owners = plan_owners(works, [cut_by_rows(shape, world) for shape in found], [0] * world)
    loads = [
        sum(work for work, owner in zip(works, owners, strict=True) if owner == rank) for rank in range(world)
    ]
    # The rank with most work got its last matrix when it had the least.
    assert max(loads) <= sum(works) / world + max(works)
    assert sum(loads) == sum(works)


def test_equal_layers_are_divided_evenly():
    layer = [(64, 64)] * 4 + [(64, 256)] * 3
    works = [matrix_work(shape) for shape in layer * 8]
    owners = plan_owners(works, [cut_by_rows(shape, 4) for shape in layer * 8], [0] * 4)
    loads = [
        sum(work for work, owner in zip(works, owners, strict=True) if owner == rank) for rank in range(4)
    ]
    assert max(loads) / (sum(loads) / 4) <= 1.05


def test_one_units_matrices_leave_rows_by_owner_padded_on_many_ranks():
    """The table in docs/design/optimizers.md: what a reduce straight to the owners of one unit would send."""
    blocks = {
        "1b": [(2048, 2048)] * 4 + [(5632, 2048)] * 3,
        "8b": [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 3,
    }
    found = {}
    for (name, block), layers in zip(blocks.items(), (16, 32), strict=True):
        for world in (2, 4, 8):
            shapes = block * layers
            works = [matrix_work(shape) for shape in shapes]
            owners = plan_owners(works, [cut_by_rows(shape, world) for shape in shapes], [0] * world)
            numels = [math.prod(shape) for shape in shapes]
            units = [slice(7 * number, 7 * number + 7) for number in range(layers)]
            padded = [padding(owners[unit], numels[unit], world) for unit in units]
            found[name, world] = round(sum(padded) / layers, 2)
    assert found == {
        ("1b", 2): 1.22,
        ("1b", 4): 1.22,
        ("1b", 8): 2.29,
        ("8b", 2): 1.27,
        ("8b", 4): 1.46,
        ("8b", 8): 2.54,
    }


def test_a_rank_that_holds_more_of_a_matrix_owns_it_rather_than_an_equally_loaded_one():
    held = [HeldBlock((0, 0), (1, 4)), HeldBlock((1, 0), (6, 4)), HeldBlock((7, 0), (1, 4))]
    assert plan_owners([9], [held], [0, 0, 0]) == [1]
    assert plan_owners([9], [held], [0, 1, 0]) == [0]


def test_a_rank_without_the_parameter_does_not_own_it():
    held = [None, HeldBlock((0, 0), (2, 4)), None]
    assert plan_owners([9, 9], [held, held], [0, 100, 0]) == [1, 1]


@given(shapes, worlds, st.integers(1, 5))
def test_rounds_hold_each_matrix_once_and_few_of_each_owner(found, world, at_once):
    numels = [math.prod(shape) for shape in found]
    owners = plan_owners(numels, [cut_by_rows(shape, world) for shape in found], [0] * world)
    rounds = plan_rounds(owners, numels, world, at_once)
    assert sorted(index for members in rounds for index in members) == list(range(len(found)))
    for members in rounds:
        assert max([owners[index] for index in members].count(rank) for rank in range(world)) <= at_once
    # As few rounds as the bound allows, the shortest first.
    longest = max(range(world), key=owners.count)
    lengths = [[owners[index] for index in members].count(longest) for members in rounds]
    assert len(rounds) == math.ceil(owners.count(longest) / at_once)
    assert lengths[1:] == [at_once] * (len(rounds) - 1)


@given(st.tuples(st.integers(1, 30), st.integers(1, 5)), worlds, st.integers(1, 3), st.data())
def test_every_block_is_sent_once_and_replicas_send_to_the_nearest_owner(shape, world, replicas, data):
    held = cut_by_rows(shape, world, replicas)
    owner = data.draw(st.integers(0, len(held) - 1))
    sending = senders(held, owner)
    assert sum(held[rank].numel for rank in sending) == math.prod(shape)
    assert is_complete(shape, held)
    if held[owner].numel:
        assert owner in sending
    assert not is_complete((shape[0] + 1, shape[1]), held)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 100)), max_size=30))
def test_messages_of_a_row_do_not_overlap_and_own_blocks_do_not_travel(found):
    routes = [(index, *route) for index, route in enumerate(found)]
    plan = plan_messages(routes, 4)
    travels = {index for index, source, target, size in routes if source != target and size}
    assert {message.matrix for message in plan.messages} == travels
    for source in range(4):
        for target in range(4):
            spans = sorted(
                (message.start_bytes, message.start_bytes + routes[message.matrix][3])
                for message in plan.messages
                if (message.source, message.target) == (source, target)
            )
            assert all(before[1] <= after[0] for before, after in pairwise(spans))
            assert all(stop <= plan.row_bytes for _, stop in spans)
    assert all(message.start_bytes % 16 == 0 for message in plan.messages)


@given(st.integers(1, 200), worlds, st.integers(1, 9))
def test_where_bands_fit_no_rank_cuts_one_and_bands_are_cut_like_rows(num_rows, world, together):
    spans = [cut_evenly(num_rows, world, rank) for rank in range(world)]
    bands = [cut_evenly(-(-num_rows // together), world, rank) for rank in range(world)]
    fit = all(
        span.numel and span.start == together * band.start and -(-span.numel // together) == band.numel
        for span, band in zip(spans, bands, strict=True)
    )
    assert rows_fit(num_rows, world, together) == fit


def test_work_grows_with_the_short_side_squared():
    assert matrix_work((100, 100)) > 4 * matrix_work((50, 100))
    assert matrix_work((30, 70)) == matrix_work((70, 30))
    assert matrix_work((8, 4, 3, 3)) == matrix_work((8, 36))
    assert matrix_work((7,)) == 7
