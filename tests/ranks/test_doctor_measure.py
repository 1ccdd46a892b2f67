"""``shardwise doctor --measure``: the prices of this machine, measured by ranks at once."""

from __future__ import annotations

import pytest

from shardwise.cli import main
from shardwise.forecast.device_files import load_device
from shardwise.forecast.prices import seconds_of_collective, seconds_of_op


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_machine_measures_its_prices(tmp_path, capsys, ranks):
    target = tmp_path / "mine.json"
    assert main(["doctor", "--measure", str(target), "--cpu", "--ranks", str(ranks)]) == 0
    said = capsys.readouterr().out
    assert f"--device {target}" in said
    device = load_device(target)
    assert device.type == "cpu"
    assert f"{ranks} ranks at once" in device.sources["fractions.matmul"]
    assert device.host_microseconds["unit_gather"] > 0
    # A gigaflop and a hundred megabytes take this machine longer than a tenth of that, and less than a minute.
    for kind, flops, num_bytes in (("matmul", 1e9, 0), ("copy", 0, 1e8)):
        seconds = seconds_of_op(device, kind, flops, num_bytes, "float32")
        assert seconds_of_op(device, kind, flops / 10, num_bytes / 10, "float32") < seconds < 60
    if ranks == 2:
        small, large = (
            seconds_of_collective(device.links, "all_gather", size, 2, 2) for size in (1024, 1 << 26)
        )
        assert 0 < small < large < 60
