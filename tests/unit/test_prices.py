"""Prices of devices and links: which files are accepted, and how seconds grow with work, ranks and bytes."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.forecast import device_files
from shardwise.forecast.device_files import (
    device_from_json,
    device_names,
    device_text,
    link_named,
    link_names,
    load_device,
    with_links,
)
from shardwise.forecast.prices import (
    COLLECTIVES,
    OPS,
    SHARES,
    Link,
    Links,
    host_seconds,
    seconds_of_collective,
    seconds_of_op,
)

MIB = 1 << 20
SIZES = [10.0**power for power in range(2, 16)]


@pytest.fixture
def content():
    return json.loads((Path(device_files.__file__).parent / "devices" / "h200.json").read_text())


def test_the_devices_that_people_rent_come_with_shardwise():
    assert {"h100", "h200", "a100", "b200", "l40s", "cpu-gloo"} <= set(device_names())


@pytest.mark.parametrize("name", device_names())
def test_every_price_of_a_device_says_where_it_comes_from(name):
    device = load_device(name)
    assert {"memory_bytes", "launch_seconds", "links.within", "fractions.matmul"} <= device.sources.keys()
    assert {f"peak_flops.{dtype}" for dtype in device.peak_flops} <= device.sources.keys()
    assert all(device.sources.values())


@pytest.mark.parametrize("name", device_names())
@pytest.mark.parametrize("kind", OPS)
def test_more_work_never_takes_less_time(name, kind):
    device = load_device(name)
    seconds = [seconds_of_op(device, kind, size, size / 100, "bfloat16") for size in SIZES]
    assert seconds == sorted(seconds)
    assert seconds[0] >= device.launch_seconds


@pytest.mark.parametrize("name", device_names())
def test_no_op_beats_the_peak(name):
    device = load_device(name)
    for dtype, peak in device.peak_flops.items():
        assert seconds_of_op(device, "matmul", 1e13, 0, dtype) >= 1e13 / peak
    for kind in OPS:
        assert seconds_of_op(device, kind, 0, 1e10, "float32") >= 1e10 / device.memory_bytes_per_second


def test_a_matmul_with_little_arithmetic_is_limited_by_memory():
    device = load_device("h200")
    assert seconds_of_op(device, "matmul", 1e6, 1e9, "bfloat16") == seconds_of_op(
        device, "elementwise", 0, 1e9, "bfloat16"
    )


def test_an_unknown_dtype_costs_what_float32_does():
    device = load_device("h200")
    assert seconds_of_op(device, "matmul", 1e12, 0, "int7") == seconds_of_op(
        device, "matmul", 1e12, 0, "float32"
    )


@pytest.mark.parametrize("name", link_names())
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives_take_longer_with_more_bytes_and_more_nodes(name, kind):
    links = Links(link_named(name), link_named("infiniband-ndr"))
    by_bytes = [seconds_of_collective(links, kind, size * MIB, 8, 8) for size in (0, 1, 16, 256)]
    assert by_bytes == sorted(by_bytes)
    by_nodes = [seconds_of_collective(links, kind, 64 * MIB, 8 * nodes, 8) for nodes in (2, 4, 16, 128)]
    # Over more nodes, less of an all-to-all stays on a link within the node that may be the slower one.
    assert kind in ("p2p", "all_to_all") or by_nodes == sorted(by_nodes)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_group_of_one_communicates_in_no_time(kind):
    assert seconds_of_collective(load_device("h100").links, kind, MIB, 1, 8) == 0.0


def slow(**changes):
    return replace(Link("test", call_seconds=0.0, hop_seconds=0.0, bytes_per_second=1e9), **changes)


def test_a_ring_moves_all_but_a_rank_s_own_part():
    links = Links(slow(), slow())
    for kind in ("all_gather", "reduce_scatter"):
        assert seconds_of_collective(links, kind, 10**9, 4, 4) == pytest.approx(0.75)
    assert seconds_of_collective(links, "all_reduce", 10**9, 4, 4) == pytest.approx(1.5)


def test_the_ranks_of_a_node_cross_to_the_next_at_their_own_cards():
    links = Links(slow(bytes_per_second=1e15), slow())
    one_card = seconds_of_collective(links, "all_gather", 10**9, 2, 1)
    assert one_card == pytest.approx(0.5)
    eight_cards = seconds_of_collective(links, "all_gather", 10**9, 16, 8)
    assert eight_cards == pytest.approx(15 / 16 / 8)


def test_a_ring_is_as_fast_as_its_slowest_link():
    links = Links(slow(), slow(bytes_per_second=1e15))
    assert seconds_of_collective(links, "all_gather", 10**9, 16, 8) == pytest.approx(15 / 16)


def test_small_all_reduces_over_many_nodes_climb_a_tree():
    links = Links(slow(), slow(hop_seconds=1e-3))
    assert seconds_of_collective(links, "all_reduce", 0, 64, 1) == pytest.approx(2 * 6 * 1e-3)


def test_ranks_that_share_a_memory_share_its_rate():
    shared = Links(slow(is_shared=True), slow())
    apart = Links(slow(), slow())
    assert seconds_of_collective(shared, "all_gather", MIB, 4, 4) == pytest.approx(
        4 * seconds_of_collective(apart, "all_gather", MIB, 4, 4)
    )


def test_torch_s_fake_group_copies_and_reduces_nothing():
    links = with_links(load_device("h200"), within="fake").links
    assert seconds_of_collective(links, "all_gather", MIB, 8, 8) > 0
    assert seconds_of_collective(links, "reduce_scatter", MIB, 8, 8) == 0


def test_torch_s_fake_group_copies_tensor_after_tensor_and_nccl_gathers_them_together():
    device = load_device("h200")
    for links, is_longer in ((with_links(device, within="fake").links, True), (device.links, False)):
        one, nine = (seconds_of_collective(links, "all_gather", MIB, 8, 8, count) for count in (1, 9))
        assert (nine > one) is is_longer
        assert nine - one == pytest.approx(8 * 7 * links.within.hop_seconds if is_longer else 0)


@pytest.mark.parametrize("share", SHARES)
def test_kernels_that_reach_a_share_take_longer_in_proportion(share):
    device = replace(load_device("h200"), launch_seconds=0.0)
    for kind, flops in (("matmul", 1e12), ("elementwise", 0)):
        whole, part = (seconds_of_op(device, kind, flops, 1e9, "bfloat16", which) for which in ("", share))
        assert part * device.shares[share] == pytest.approx(whole)


def test_attention_in_float32_is_three_products_in_tf32():
    device = replace(load_device("h200"), launch_seconds=0.0)
    seconds = seconds_of_op(device, "attention", 1e12, 0, "float32")
    expected = device.peak_flops["bfloat16"] / (device.peak_flops["tf32"] / 3)
    assert seconds / seconds_of_op(device, "attention", 1e12, 0, "bfloat16") == pytest.approx(expected)


def test_a_device_file_survives_being_written_and_read(content, tmp_path):
    (tmp_path / "mine.json").write_text(device_text(content))
    assert load_device(tmp_path / "mine.json") == replace(
        load_device("h200"), sources=load_device(tmp_path / "mine.json").sources
    )


def damaged(content, path, value):
    content = copy.deepcopy(content)
    *outer, last = path.split(".")
    place = content
    for name in outer:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        ("memory_bytes", None, "'memory_bytes' of the device file is missing"),
        ("memory_bytes", {"value": 1}, "does not say where it comes from"),
        ("memory_bytes.value", -1, "is -1"),
        ("memory_bytes.value", float("nan"), "is nan"),
        ("launch_seconds.value", True, "is True"),
        ("type", "tpu", "is 'tpu'"),
        ("format", "2", "is '2'"),
        ("peak_flops.values", {"bfloat16": 1}, "has no price of float32"),
        ("fractions.matmul", None, "'fractions.matmul' of the device file is missing"),
        ("fractions", [], "'fractions.matmul' of the device file is missing"),
        ("fractions.matmul.points", [[1, 2, 3]], "has no 'points'"),
        ("fractions.matmul.points", [1], "has no 'points'"),
        ("fractions.matmul.points", [[1e6, 1.5]], "reaches 1.5 of the peak"),
        ("fractions.matmul.points", [[1e6, 0.1], [2e6, 0.5]], "takes less time for a larger size"),
        ("links", {"within": "nvlink4"}, "lacks 'within' or 'between'"),
        ("links.within", "string", "no link 'string'"),
        ("links.within", {"from": "here", "call_seconds": 0, "hop_seconds": 0}, "'bytes_per_second'"),
    ],
)
def test_a_wrong_entry_of_a_device_file_is_named(content, path, value, what):
    with pytest.raises(ConfigError) as raised:
        device_from_json(damaged(content, path, value), "mine.json")
    assert what in str(raised.value)
    assert raised.value.fix


@pytest.mark.parametrize("content", ["[]", "{", "12", '{"format": "shardwise device 1"}'])
def test_a_file_that_is_no_device_file_is_refused(tmp_path, content):
    (tmp_path / "mine.json").write_text(content)
    with pytest.raises(ConfigError):
        load_device(tmp_path / "mine.json")


def test_an_unknown_name_is_answered_with_the_known_ones():
    device = load_device("h200")
    with pytest.raises(ConfigError, match="h200"):
        load_device("h300")
    with pytest.raises(ConfigError, match="matmul"):
        seconds_of_op(device, "convolution", 1, 1, "float32")
    with pytest.raises(ConfigError, match="all_gather"):
        seconds_of_collective(device.links, "gather", 1, 8, 8)
    with pytest.raises(ConfigError, match="all_gather"):
        host_seconds(device, "nothing")
