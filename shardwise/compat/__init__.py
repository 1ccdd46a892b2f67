"""Libraries that import torch's FSDP and ZeRO by name get ours: ``install()`` and ``uninstall()``.

This package alone knows torch's own classes, as names to replace and types to be recognised by. It never works with
them.
"""

from shardwise.compat.installation import Installation, install, uninstall
from shardwise.compat.recognise import make_recognised

__all__ = ["Installation", "install", "uninstall"]

make_recognised()
