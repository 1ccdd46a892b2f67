"""``shardwise.install()``: libraries that import FSDP and ZeRO from torch get ours, all names or none."""

import functools
import gc
import multiprocessing
import os
import subprocess
import sys
import types
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp import wrap
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.distributed.pipelining import stage

import shardwise
from shardwise.cli import main
from shardwise.testing import run_ranks

CPU = torch.device("cpu")


CASES = {}


@pytest.fixture(scope="module")
def process():
    """A process of its own: in this one, other tests may still hold what torch's FSDP has sharded."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def _run_case(name):
    library = types.ModuleType("some_library")
    vars(library).update(FSDP=TorchFSDP, fully_shard=torch_fully_shard, Zero=TorchZero, other=nn.Linear)
    sys.modules["some_library"] = library
    try:
        CASES[name](library)
    finally:
        shardwise.uninstall()


def alone(case):
    """A test that runs in the other process, with a library that has imported names from torch."""

    @functools.wraps(case)
    def test(process):
        process.submit(_run_case, case.__name__).result()

    del test.__wrapped__
    CASES[case.__name__] = case
    return test


@alone
def test_all_public_names_of_torchs_fsdp_are_ours(library):
    installation = shardwise.install()
    assert {name for name in fsdp.__all__ if getattr(fsdp, name) is not getattr(shardwise, name)} == set()
    assert {name for name in wrap.__all__ if getattr(wrap, name) is not getattr(shardwise, name)} == set()
    assert dist.optim.ZeroRedundancyOptimizer is shardwise.ZeroRedundancyOptimizer
    assert installation.left == ()


@alone
def test_modules_that_are_imported_already_get_ours(library):
    installation = shardwise.install()
    assert library.FSDP is shardwise.FullyShardedDataParallel
    assert library.fully_shard is shardwise.fully_shard
    assert library.Zero is shardwise.ZeroRedundancyOptimizer
    assert library.other is nn.Linear
    assert {"some_library.FSDP", "torch.distributed.fsdp.fully_shard"} <= set(installation.replaced)
    assert "some_library" in str(installation)


@alone
def test_what_looks_inside_torchs_classes_keeps_them(library):
    shardwise.install()
    assert state_dict.FSDP is not shardwise.FullyShardedDataParallel
    assert stage.FSDPModule is not shardwise.FSDPModule


@alone
def test_uninstall_gives_everything_back(library):
    before = dict(vars(library)), dict(vars(fsdp)), dict(vars(wrap))
    shardwise.install()
    shardwise.uninstall()
    assert (dict(vars(library)), dict(vars(fsdp)), dict(vars(wrap))) == before


@alone
def test_uninstall_names_what_was_imported_since(library):
    shardwise.install()
    library.late = fsdp.fully_shard
    assert "some_library.late" in shardwise.uninstall()


@alone
def test_a_second_install_reaches_modules_that_got_hold_of_torchs_own(library):
    first = shardwise.install()
    library.late = stage.FSDPModule
    second = shardwise.install()
    assert library.late is shardwise.FSDPModule
    assert set(second.replaced) - set(first.replaced) == {"some_library.late"}


def _shard_with_torch():
    model = nn.Linear(4, 4)
    torch_fully_shard(model)
    with pytest.raises(shardwise.StateError, match=r"in use: object .*FSDPLinear") as refused:
        shardwise.install()
    assert "fix:" in str(refused.value)
    return fsdp.fully_shard is torch_fully_shard


@alone
def test_torchs_own_in_use_is_a_reason_to_refuse(library):
    assert run_ranks(_shard_with_torch, 1, kind="threads") == [True]
    shardwise.install()


@alone
def test_a_class_that_derives_from_torchs_own_is_a_reason_to_refuse(library):
    derived = type("Derived", (TorchFSDP,), {})
    with pytest.raises(shardwise.StateError, match=f"class {derived.__module__}.Derived"):
        shardwise.install()
    assert library.FSDP is TorchFSDP
    del derived
    gc.collect()
    shardwise.install()


def _block_sharded_by_ours():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 3))
    shardwise.fully_shard(model[1])
    return model


def _wrap_by_ours():
    model = _block_sharded_by_ours()
    model[1] = shardwise.FullyShardedDataParallel(nn.Linear(4, 4), device_id=CPU)
    return model


def _apply_torchs(make, apply):
    model = make()
    with pytest.raises(shardwise.ConfigError, match="would shard the shards") as refused:
        apply(model)
    assert "rank" in str(refused.value)
    # Nothing was lost: the model trains, and state dicts walk through it.
    model(torch.ones(2, 4)).sum().backward()
    state_dict.get_model_state_dict(model)
    return True


@pytest.mark.parametrize("make", [_block_sharded_by_ours, _wrap_by_ours])
@pytest.mark.parametrize(
    "apply",
    [
        torch_fully_shard,
        lambda model: torch_fully_shard(model[1]),
        lambda model: torch_fully_shard([model[0], model[1]]),
        lambda model: TorchFSDP(model, device_id=CPU),
        lambda model: TorchFSDP(model[1], device_id=CPU, use_orig_params=True),
    ],
    ids=["model", "same-module", "list", "wrapper", "wrapper-same-module"],
)
def test_torchs_fsdp_on_top_of_ours_is_an_error_that_says_so(make, apply):
    assert run_ranks(_apply_torchs, 2, make, apply, kind="threads") == [True, True]


SCRIPT = """
import os
import sys
import torch.distributed.fsdp as fsdp
assert os.path.isabs(__file__)
from beside import NAME
print(__name__, fsdp.fully_shard.__module__, NAME, *sys.argv[1:], flush=True)
if "fail" in sys.argv:
    fsdp.fully_shard(3)
sys.exit(5)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "script.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "beside.py").write_text("NAME = 'beside'")
    return tmp_path


def _run(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(Path(shardwise.__file__).parents[1])}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_run_runs_a_script_with_ours_as_python_would(folder):
    done = _run(folder, "shardwise", "run", "scripts/script.py", "--flag", "-x")
    assert done.stdout.split() == ["__main__", "shardwise.composable.fully_shard", "beside", "--flag", "-x"]
    assert "shardwise replaces torch's FSDP and ZeRO" in done.stderr
    assert done.returncode == 5


@pytest.mark.slow
def test_run_runs_a_module_and_shows_tracebacks(folder):
    done = _run(folder / "scripts", "shardwise", "run", "-m", "script", "fail")
    assert "__main__ shardwise.composable.fully_shard" in done.stdout
    assert "fsdp.fully_shard(3)" in done.stderr
    assert done.returncode == 1


def test_run_says_when_there_is_no_script(capsys):
    assert main(["run", "absent.py"]) == 2
    assert capsys.readouterr().err.strip() == "error: there is no file 'absent.py'"


@pytest.mark.slow
def test_run_works_under_torchrun(folder):
    # It ends well: torchrun stops all ranks as soon as one of them fails.
    (folder / "ends_well.py").write_text(
        "import torch.distributed.fsdp as fsdp\nprint(__name__, fsdp.fully_shard.__module__, flush=True)"
    )
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = _run(folder, *torchrun, "-m", "shardwise", "run", "ends_well.py")
    assert done.stdout.count("__main__ shardwise.composable.fully_shard") == 2, done.stderr
    assert done.stderr.count("shardwise replaces") == 1
