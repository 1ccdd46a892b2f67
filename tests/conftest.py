"""What every test gets: one compute thread, and no rank process left behind."""

import gc
from collections.abc import Iterator

import pytest
import torch

from shardwise.testing import close_pools

# Ranks are the parallelism here; with more threads each, they only get in one another's way.
torch.set_num_threads(1)


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


@pytest.fixture(scope="session", autouse=True)
def _rank_pools_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()
