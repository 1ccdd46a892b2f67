"""Tests that the fuzzer finds defects whose fixes are reverted."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from tests.fuzz.planted import DEFECTS, WITHOUT, Defect, first_find
from tests.fuzz.programs import draw

# Seeds give other programs when the generator changes: any of this many programs may find the defect.
SEEDS, MOST = 3000, 60


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_programs_find_a_defect_whose_fix_is_taken_back(defect: Defect):
    programs = (draw(seed, WITHOUT) for seed in range(SEEDS))
    found = first_find(defect, islice(filter(defect.may_show, programs), MOST))
    assert found is not None, f"{MOST} programs that might show it did not"
