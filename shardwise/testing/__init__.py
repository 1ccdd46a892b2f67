"""For tests of sharded code: ranks on one machine, as threads, as processes, or on GPUs.

It may use everything below it; nothing of the library uses it.
"""

from shardwise.testing.failures import RankFailure, RankReport, RankTimeout
from shardwise.testing.own_model import ParityReport, check_parity
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
