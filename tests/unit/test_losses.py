"""The loss of a batch counts every target once, and masked ones not at all."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows

from shardwise.errors import ConfigError
from shardwise.train.losses import IGNORED, count_targets, mean_loss


def batch(masked):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 7, generator=generator, requires_grad=True)
    targets = torch.randint(0, 7, (3, 5), generator=generator)
    targets.view(-1)[list(masked)] = IGNORED
    return logits, targets


def each_targets_loss(logits, targets):
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def mean_of_targets(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("own", [None, each_targets_loss, mean_of_targets])
def test_masked_targets_have_no_loss_and_no_gradient(own):
    masked = (0, 3, 4, 11)
    logits, targets = batch(masked)
    assert count_targets(targets) == 11
    loss = mean_loss(logits, targets, own, 11)
    loss.backward()
    kept = [number for number in range(15) if number not in masked]
    expected = F.cross_entropy(logits.detach().view(-1, 7)[kept], targets.view(-1)[kept])
    torch.testing.assert_close(loss.detach(), expected)
    gradient = logits.grad.view(-1, 7)
    assert not gradient[list(masked)].any()
    assert gradient[kept].any(dim=1).all()


def test_a_batch_without_targets_has_loss_and_gradient_zero():
    logits, targets = batch(range(15))
    loss = mean_loss(logits, targets, None, 0)
    loss.backward()
    assert loss.item() == 0.0
    assert not logits.grad.any()


def test_a_loss_of_another_shape_is_refused():
    logits, targets = batch(())
    with pytest.raises(ConfigError, match="shape"):
        mean_loss(logits, targets, lambda logits, targets: logits.sum(dim=-1)[0], 15)
