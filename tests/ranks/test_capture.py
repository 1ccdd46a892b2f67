"""``capture`` where there is no GPU: it says so and runs the step as it is. ``tests/gpu`` has the rest."""

import pytest
import torch

import shardwise
from shardwise.training_step.cuda_graph import CapturableOptimizers


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_step_runs_as_it_is_and_says_why():
    calls = []

    def step(x):
        calls.append(x)
        return x.sum()

    with pytest.warns(UserWarning, match="there is no CUDA device"):
        captured = shardwise.capture(step, torch.ones(3))
    assert [captured(torch.full((size,), 2.0)).item() for size in (3, 4)] == [6.0, 8.0]
    assert len(calls) == 2
    assert captured.reason == "there is no CUDA device"
    assert not captured.is_captured


def test_the_optimizers_of_a_step_are_noticed_as_they_step():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=0.5) for param in params]
    found = CapturableOptimizers()
    params[0].grad = torch.ones(2)
    with found.collect():
        optimizers[0].step()
    optimizers[1].step()
    assert [(param is params[0], gradient is params[0].grad) for param, gradient in found.gradients()] == [
        (True, True)
    ]


def test_a_change_of_an_optimizers_options_is_seen_and_one_of_a_rate_on_the_device_is_not():
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([param], lr=torch.tensor(0.5), foreach=False)
    found = CapturableOptimizers()
    with found.collect():
        optimizer.step()
    found.make_capturable()
    before = found.options()
    rate = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.25
    found.update_learning_rates()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25
    assert found.options() == before
    optimizer.param_groups[0]["weight_decay"] = 0.1
    assert found.options() != before
