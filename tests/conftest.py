"""What every test gets: compute threads, a temporary folder, and no rank process left behind."""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
import torch

from shardwise.testing import close_pools
from tests.processor import avoid_instructions_that_do_not_run
from tests.why import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # Ranks are the parallelism here; with more threads each, they only get in one another's way.
    parser.addoption("--compute-threads", type=int, default=1, help="threads that every rank computes with")
    if not pluginmanager.hasplugin("timeout"):
        # A machine that brings its own torch may have pytest alone: tests run there without limits.
        for name in ("timeout", "timeout_method"):
            parser.addini(name, help="of pytest-timeout, which is not installed")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: of pytest-timeout, which is not installed")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _have_a_temporary_folder()
    avoid_instructions_that_do_not_run()
    num_threads = config.getoption("--compute-threads")
    torch.set_num_threads(num_threads)
    # For rank processes and commands, which start after this.
    os.environ["OMP_NUM_THREADS"] = str(num_threads)


def _have_a_temporary_folder() -> None:
    """Gives this process, and every process it starts, a temporary folder of its own: failing ranks leave traces there.

    It goes away with the process; ``tmp_path`` stays where pytest keeps it.
    """
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # Short: the names of sockets in it may not exceed 100 characters.
    folder = tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="sw-")
    # After multiprocessing has removed its own, whose priority is -100.
    Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-200)


def pytest_report_header(config: pytest.Config) -> str:
    avoided = ", oneDNN up to " + limit if (limit := os.environ.get("ONEDNN_MAX_CPU_ISA")) else ""
    capability = torch.backends.cpu.get_cpu_capability() + avoided
    return f"torch {torch.__version__}, {capability}, threads {torch.get_num_threads()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def pytest_collection_finish() -> None:
    # What was imported stays for good: collections, which stop every rank that is a thread, look at the rest only.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _every_test_has_its_compute_threads(request: pytest.FixtureRequest) -> None:
    # A training run in this process has set its own.
    torch.set_num_threads(request.config.getoption("--compute-threads"))


@pytest.fixture(scope="session", autouse=True)
def _rank_pools_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Asked for by name alone: it needs libraries that `make test` does without.
    if collection_path.name == "ecosystem" and not any("ecosystem" in argument for argument in config.args):
        return True
    return None
