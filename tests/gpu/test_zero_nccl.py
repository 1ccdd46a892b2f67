"""ZeroRedundancyOptimizer on CUDA: the claims of tests/ranks on NCCL, with 2 and 4 ranks that may share a GPU."""

from pathlib import Path

import pytest

from shardwise.testing import run_ranks
from tests.ranks.tables import run_cases
from tests.ranks.zero_cases import models, parity, state
from tests.ranks.zero_cases.table import (
    ERRORS,
    EXCHANGE,
    JOIN,
    LAYOUTS,
    OPTIMIZER,
    OVERLAP,
    STATE,
    Run,
    each_run,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


@each_run([*OPTIMIZER, *STATE, *ERRORS, *JOIN, *OVERLAP, *EXCHANGE], "nccl")
def test_it(run: Run) -> None:
    run.check()


def test_a_model_on_the_cpu_and_the_gpu_is_stepped() -> None:
    run_cases(parity.steps_a_model_of_two_devices, 2, LAYOUTS, kind="nccl")


def test_cuda_parameters_are_stepped_over_gloo() -> None:
    run_cases(_steps_cuda_parameters_over_gloo, 2, LAYOUTS, kind="gloo-cuda")


def _steps_cuda_parameters_over_gloo(*, as_views: bool, balanced: bool) -> None:
    with models.on_cuda():
        parity.steps_a_model_of_two_devices(as_views=as_views, balanced=balanced)


def test_a_sharded_checkpoint_loads_on_another_world_size(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(state.saves_sharded, 4, path, "adam", kind="nccl", balanced=True)
    run_ranks(state.loads_sharded, 2, path, "adam", kind="nccl", balanced=False)
