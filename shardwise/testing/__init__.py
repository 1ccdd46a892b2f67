"""Tools for testing sharded code: runs ranks on one machine, as threads, as processes, or on GPUs.

This package may import any other package of the library; none of them imports this one.
"""

from shardwise.testing.failures import RankFailure, RankReport, RankTimeout
from shardwise.testing.parity_check import ParityReport, check_parity
from shardwise.testing.processes import close_pools
from shardwise.testing.ranks import run_ranks

__all__ = [
    "ParityReport",
    "RankFailure",
    "RankReport",
    "RankTimeout",
    "check_parity",
    "close_pools",
    "run_ranks",
]
