"""The exact norm: the same bits whatever the order and the cuts, and the right value."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.training_step.exact_norm import largest_of, norm_from, words_of

pytestmark = pytest.mark.arithmetic

CPU = torch.device("cpu")


def norm(ranks: list[list[torch.Tensor]], order: float) -> torch.Tensor:
    """As ranks compute it that hold these tensors: the largest of all first, then a sum of integers."""
    largest = torch.stack([largest_of(tensors, CPU) for tensors in ranks]).amax(dim=0)
    words = torch.stack([words_of(tensors, order, largest, CPU) for tensors in ranks]).sum(dim=0)
    return norm_from(words, order, largest)


@given(
    seed=st.integers(0, 1000),
    numel=st.integers(1, 300),
    spread=st.sampled_from([0.0, 3.0, 30.0]),
    order=st.sampled_from([1.0, 2.0]),
    cuts=st.lists(st.integers(0, 300), max_size=5),
)
def test_neither_order_nor_cuts_show(
    seed: int, numel: int, spread: float, order: float, cuts: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.exp(
        spread * torch.randn(numel, generator=generator)
    )
    mixed = values[torch.randperm(numel, generator=generator)]
    bounds = [0, *sorted(min(cut, numel) for cut in cuts), numel]
    parts = [[mixed[start:stop]] for start, stop in itertools.pairwise(bounds)]
    whole = norm([[values]], order)
    assert torch.equal(norm(parts, order), whole)
    assert torch.equal(norm([[part for (part,) in parts], []], order), whole)
    terms = [abs(value) ** order for value in values.tolist()]
    assert whole.item() == pytest.approx(math.fsum(terms) ** (1 / order), rel=1e-12)


@pytest.mark.parametrize("order", [1.0, 2.0])
@pytest.mark.parametrize("largest", [2.0**-149, 1e-30, 1.0, 3e38])
def test_small_and_large_gradients_keep_their_digits(largest: float, order: float) -> None:
    values = [largest, largest / 2, largest / 3]
    found = torch.tensor(values)
    terms = [value**order for value in (found.double() / largest).tolist()]
    assert norm([[found]], order).item() == pytest.approx(
        largest * math.fsum(terms) ** (1 / order), rel=1e-12
    )


def test_zeros_nothing_infinities_and_what_is_no_number_stay_what_they_are() -> None:
    assert norm([[torch.zeros(3)]], 2.0).item() == 0.0
    assert norm([[], []], 2.0).item() == 0.0
    assert norm([[torch.tensor([1.0, -math.inf])], [torch.ones(2)]], 2.0).item() == math.inf
    assert math.isnan(norm([[torch.tensor([1.0, math.nan, math.inf])], [torch.ones(2)]], 2.0).item())


def test_complex_gradients_count_with_both_parts_and_low_precision_as_it_is() -> None:
    assert norm([[torch.tensor([3 + 4j]), torch.tensor([12.0], dtype=torch.bfloat16)]], 2.0).item() == 13.0
