"""transformers' Trainer and its own sharding do on ours what they do on torch's FSDP, bit for bit."""

import pytest

from tests.ecosystem.beside import parameters_of
from tests.ecosystem.hugging_face import check_same


@pytest.mark.parametrize(
    ("program", "case"),
    parameters_of("train_with_transformers", short=("trainer-2-SHARDED-tied", "sharded_when_loaded")),
)
def test_transformers_does_on_ours_what_it_does_on_torchs(beside, program, case):
    check_same(beside(program), case)
