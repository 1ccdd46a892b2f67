"""Measured prices: what is made of the times. tests/ranks/test_doctor_measure.py takes them."""

import pytest
import torch

from shardwise.cli import main
from shardwise.forecast.measured_links import fitted_line
from shardwise.forecast.measured_prices import Clock, fractions
from shardwise.forecast.prices import Curve


def test_a_curve_gives_back_the_times_it_was_made_of():
    times = [(1e6, 1e-3), (1e8, 1e-2), (1e9, 2e-1)]
    points = fractions({"copy": times}, 1e12, 1e10, 0.0)["copy"]
    curve = Curve(tuple(size for size, _ in points), tuple(fraction for _, fraction in points))
    for size, seconds in times:
        assert size / (1e10 * curve.at(size)) == pytest.approx(seconds)


def test_noise_makes_no_curve_that_a_device_file_refuses():
    # The larger one was faster, and the last faster than the peak.
    points = fractions({"matmul": [(1e6, 5e-3), (1e7, 2e-3), (1e9, 1e-4)]}, 1e12, 1e10, 1e-4)["matmul"]
    assert all(0 < fraction <= 1 for _, fraction in points)
    seconds = [size / fraction for size, fraction in points]
    assert seconds == sorted(seconds)


def test_what_an_op_costs_anyway_is_not_in_the_curve():
    (point,) = fractions({"copy": [(1e6, 3e-4)]}, 1e12, 1e10, 1e-4)["copy"]
    assert 1e6 / (1e10 * point[1]) == pytest.approx(2e-4)


def test_a_line_is_found_through_times_of_collectives():
    fixed, rate = fitted_line([(size, 1e-4 + size / 2e9) for size in (1e3, 1e5, 1e7)])
    assert fixed == pytest.approx(1e-4)
    assert rate == pytest.approx(2e9)
    fixed, rate = fitted_line([(1e3, 1e-3), (1e5, 9e-4), (1e7, 8e-4)])
    assert fixed > 0
    assert rate > 0


def test_a_cache_that_holds_small_collectives_does_not_decide_the_rate_of_a_units():
    # Of gloo on two cores: those of two megabytes and less stay in the cache.
    points = [
        (512, 5e-5),
        (32768, 6e-5),
        (524288, 1.5e-4),
        (2097152, 2.1e-4),
        (8388608, 2e-3),
        (33554432, 9e-3),
    ]
    fixed, rate = fitted_line(points)
    for size, seconds in points[-2:]:
        assert fixed + size / rate == pytest.approx(seconds, rel=0.2)
    assert fixed < 2 * points[0][1]


def test_ranks_that_share_a_core_take_turns():
    def work():
        return torch.ones(64, 64) @ torch.ones(64, 64)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cpu = torch.device("cpu")
        alone, many = Clock(cpu, 1, 0.02), Clock(cpu, 1 << 20, 0.02)
        assert many.seconds(work) > 100 * alone.seconds(work) > 0
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("target", ["mine.txt", "no/folder.json"])
def test_a_file_that_could_not_be_used_is_refused_before_measuring(tmp_path, capsys, target):
    assert main(["doctor", "--measure", str(tmp_path / target), "--cpu"]) == 1
    assert "ends in .json" in capsys.readouterr().err
