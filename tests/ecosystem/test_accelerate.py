"""accelerate trains, saves, loads and merges on ours as on torch's FSDP, bit for bit.

Gradients of tied weights over several micro-batches cannot be compared: torch adds up every use, we add up the
uses of a micro-batch first.
"""

import pytest

from tests.ecosystem.beside import parameters_of
from tests.ecosystem.hugging_face import check_same


@pytest.mark.parametrize(
    ("program", "case"),
    parameters_of("train_with_accelerate", short=("train-2-SHARDED-bf16", "train-1-FULL-no")),
)
def test_accelerate_does_on_ours_what_it_does_on_torchs(beside, program, case):
    check_same(beside(program), case)
