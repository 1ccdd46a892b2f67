"""The simulated clock: streams that wait, a host that runs ahead, and what slows compute down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.forecast.clock import COPY_SHARE, time_step
from shardwise.forecast.device_files import load_device
from shardwise.forecast.prices import Curve
from shardwise.forecast.tape import COMPUTE, GATHER, Collective, HostWork, Mark, Op, Record, Transfer, Wait

MS = 1e-3


def device(**host_us):
    """One byte of a copy, and one floating-point operation, take a millisecond; the host takes what is given."""
    always = Curve((1.0, 2.0), (1.0, 1.0))
    loaded = load_device("h200")
    return replace(
        loaded,
        memory_bytes_per_second=1e3,
        launch_seconds=0.0,
        peak_flops={"float32": 1e3},
        fractions=dict.fromkeys(loaded.fractions, always),
        host_microseconds=host_us,
        host_copy_bytes_per_second=1e3,
    )


def work(ms, stream=COMPUTE):
    return Op("work", "copy", stream, num_bytes=ms)


def played(*entries, **host_us):
    return time_step(entries, device(**host_us), lambda axis, world: world)


def test_ops_of_one_stream_run_one_after_another():
    assert played(work(2), work(3)).seconds == pytest.approx(5 * MS)


def test_streams_run_side_by_side_and_copies_beside_compute_slow_it_down():
    found = played(work(2, GATHER), work(5))
    assert found.seconds == pytest.approx((5 + COPY_SHARE * 2) * MS)


def test_compute_that_waits_for_a_gather_is_exposed_communication():
    found = played(work(4, GATHER), Record(1, GATHER), Wait(1, COMPUTE), work(1))
    assert found.seconds == pytest.approx(5 * MS)
    assert found.exposed == pytest.approx(4 * MS)


def test_compute_that_waits_for_the_host_is_host_bound():
    found = played(work(1), work(1), op=3000)
    assert found.seconds == pytest.approx(7 * MS)
    assert found.host_bound == pytest.approx((3 + 2) * MS)


def test_the_host_runs_ahead_of_a_busy_device():
    found = played(work(10), work(10), op=1000)
    assert found.host == pytest.approx(2 * MS)
    assert found.seconds == pytest.approx(21 * MS)


def test_the_host_can_wait_for_a_stream_and_then_works_itself():
    found = played(Transfer("out", 4, GATHER), Record(1, GATHER), Wait(1, "host"), HostWork("optimizer", 0))
    assert found.host == pytest.approx(4 * MS)


def test_a_thread_steps_what_has_arrived_on_the_host_while_the_device_goes_on():
    sent = Transfer("out", 4, GATHER)
    found = played(sent, HostWork("optimizer", 5000, GATHER), work(6), optimizer_bytes_per_us=1.0)
    assert found.seconds == pytest.approx((4 + 5) * MS)
    assert found.optimizer == pytest.approx(5 * MS)


def test_every_micro_batch_after_the_third_takes_as_long_as_the_second():
    def micro_batch(ms):
        return [Mark("phase", "", "forward"), work(ms)]

    tape = [*micro_batch(1), *micro_batch(2), *micro_batch(4), Mark("phase", "", "optimizer"), work(8)]
    found = time_step(tape, device(), lambda axis, world: world, micro_batches=10)
    assert found.seconds == pytest.approx((1 + 2 * 8 + 4 + 8) * MS)
    assert found.by_kind["copy"] == pytest.approx(29 * MS)


def test_every_tensor_that_one_call_gathers_costs_the_host_time():
    prices = {"all_gather": 10.0, "all_gather_of_one_more": 2.0}
    one, nine = (
        played(Collective("all_gather", 0, 8, "shard", GATHER, num_tensors=count), **prices).host
        for count in (1, 9)
    )
    assert one == pytest.approx(10e-6)
    assert nine == pytest.approx((10 + 8 * 2) * 1e-6)


def test_a_unit_of_more_parameters_costs_the_host_more():
    found = [
        played(Mark("reduce", "unit", "backward", count), unit_reduce=100, unit_param=20).host
        for count in (1, 9, 12)
    ]
    assert found == pytest.approx([100e-6, 100e-6, 160e-6])
