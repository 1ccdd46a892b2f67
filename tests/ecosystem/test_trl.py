"""trl's SFTTrainer and peft's adapters train, save, resume and merge on ours as on torch's FSDP, bit for bit."""

import pytest

from tests.ecosystem.beside import parameters_of
from tests.ecosystem.hugging_face import check_same


@pytest.mark.parametrize(
    ("program", "case"), parameters_of("train_with_trl", short=("sft-2-FULL", "adapter-use_dora"))
)
def test_trl_does_on_ours_what_it_does_on_torchs(beside, program, case):
    check_same(beside(program), case)
